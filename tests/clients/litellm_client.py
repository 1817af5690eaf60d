"""litellm: chat and text completions, whole, streamed, and its own errors. Arguments: URL, key."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask a web server for prices

import litellm  # noqa: E402

URL, KEY = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Hi"}]
OPTIONS = {"model": "openai/tiny", "api_base": URL, "api_key": KEY, "temperature": 0, "num_retries": 0}

answer = litellm.completion(messages=MESSAGES, **OPTIONS)
assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("WORLD", "stop")
assert answer.usage.completion_tokens == 6
chunks = litellm.completion(messages=MESSAGES, stream=True, **OPTIONS)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "WORLD"
assert asyncio.run(litellm.acompletion(messages=MESSAGES, **OPTIONS)).choices[0].message.content == "WORLD"
text = litellm.text_completion(prompt="a", max_tokens=5, **(OPTIONS | {"model": "text-completion-openai/tiny"}))
assert text.choices[0].text == "bcdef"
for kind, changes in ((litellm.BadRequestError, {"messages": [{"role": "user", "content": "x" * 5000}]}),
                      (litellm.AuthenticationError, {"api_key": "wrong"}),
                      (litellm.NotFoundError, {"model": "openai/gpt-none"})):
    try:
        litellm.completion(**({"messages": MESSAGES} | OPTIONS | changes))
    except kind:
        continue
    raise AssertionError(f"no {kind.__name__}")
print("litellm ended well")
