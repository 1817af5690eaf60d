"""langchain-openai: chat and completion models, whole, streamed, batched. Arguments: URL, key."""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

URL, KEY = sys.argv[1:]
OPTIONS = {"base_url": URL, "api_key": KEY, "model": "tiny", "temperature": 0, "max_retries": 0}

chat = ChatOpenAI(**OPTIONS)
answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("Hi")])
assert answer.content == "WORLD" and answer.usage_metadata["output_tokens"] == 6
assert answer.response_metadata["finish_reason"] == "stop"
assert "".join(chunk.content for chunk in chat.stream("Hi")) == "WORLD"
assert [message.content for message in chat.batch(["Hi", "Ho"])] == ["WORLD", "WORLD"]
assert chat.invoke([HumanMessage("Hi"), AIMessage("Hello"), HumanMessage("And?")]).content == "WORLD"
assert chat.bind(stop=["RL"]).invoke("Hi").content == "WO"
assert asyncio.run(chat.ainvoke("Hi")).content == "WORLD"

responses = ChatOpenAI(**OPTIONS, use_responses_api=True)
assert responses.invoke("Hi").text == "WORLD"

completions = OpenAI(**OPTIONS, max_tokens=5)
assert completions.invoke("a") == "bcdef" and "".join(completions.stream("a")) == "bcdef"
print("langchain-openai ended well")
