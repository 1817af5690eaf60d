"""The openai package: sync and async, whole and streamed, three APIs, raw answers, errors. Arguments: URL, key."""

import asyncio
import sys

import openai

URL, KEY = sys.argv[1:]
ALPHABET = "bcdefghijklmnopqrstuvwxyz"
MESSAGES = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "tiny", "temperature": 0}


def sync() -> None:
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.completions.create(prompt="a", max_tokens=100, **GREEDY)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ALPHABET, "stop")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 26)
        chunks = list(client.completions.create(prompt="a", max_tokens=5, stream=True, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "bcdef"

        chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("WORLD", "stop")
        assert "".join(entry.token for entry in chat.choices[0].logprobs.content).startswith("WORLD")
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, n=2,
                                                stream_options={"include_usage": True}, **GREEDY)
        texts, usage = ["", ""], None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["WORLD", "WORLD"] and usage.completion_tokens == 12
        with client.chat.completions.stream(messages=MESSAGES, **GREEDY) as events:
            assert events.get_final_completion().choices[0].message.content == "WORLD"
        raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, extra_headers={"X-Request-Id": "me"},
                                                               **GREEDY)
        assert raw.headers["x-request-id"] == "me" and raw.parse().choices[0].message.content == "WORLD"

        response = client.responses.create(input="Hi", **GREEDY)
        assert (response.output_text, response.status) == ("WORLD", "completed")
        with client.responses.stream(input="Hi", **GREEDY) as events:
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == events.get_final_response().output_text == "WORLD"

        expect(openai.BadRequestError, lambda: client.completions.create(prompt="a" * 5000, **GREEDY))
        expect(openai.BadRequestError, lambda: client.chat.completions.create(messages=[], **GREEDY))
        expect(openai.NotFoundError, lambda: client.completions.create(model="gpt", prompt="a"))
        stream = client.completions.create(prompt="b", max_tokens=20, stream=True, **GREEDY)
        next(iter(stream))
        stream.close()  # leaves
    with openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0) as client:
        expect(openai.AuthenticationError, client.models.list)


def expect(kind, call) -> None:
    try:
        call()
    except kind as error:
        assert error.message
    else:
        raise AssertionError(f"no {kind.__name__}")


async def concurrently() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(messages=MESSAGES, **GREEDY)
                                         for _ in range(8)))
        assert [answer.choices[0].message.content for answer in answers] == ["WORLD"] * 8
        stream = await client.completions.create(prompt="a", max_tokens=100, stream=True, **GREEDY)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == ALPHABET
        response = await client.responses.create(input="Hi", **GREEDY)
        assert response.output_text == "WORLD"


sync()
asyncio.run(concurrently())
print("openai", openai.__version__)
