"""The clients against a server in this process: the same answers as from the engine itself."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jaxserve import ConfigError, EngineClosedError, QueueFullError, RequestError, SamplingParams
from jaxserve.client import AsyncClient, Client, ClientTls, ServerError, ServerTimeoutError
from jaxserve.client.channel import full_target
from jaxserve.client.wire import sampling_message
from jaxserve.serving.grpc.inference import sampling_params
from tests.serving.grpc.harness import running

LONG = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)
MESSAGES = [{"role": "user", "content": "Hello"}]


def test_generate_gives_what_the_engine_gives(client, llm):
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=3, n=2, logprobs=2, prompt_logprobs=1)
    prompts = ["One", [1, 2, 3], {"prompt": "Two é"}, {"prompt_token_ids": [7]}]
    got = client.generate(prompts, params, use_tqdm=False)
    expected = llm.generate(prompts, params, use_tqdm=False)
    for one, other in zip(got, expected, strict=True):
        same = dataclasses.replace(other, request_id=one.request_id, timings=one.timings,
                                   num_cached_tokens=one.num_cached_tokens)
        for ours, theirs in zip(one.outputs, same.outputs):
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)
            theirs.cumulative_logprob = ours.cumulative_logprob
        assert one == same
        assert one.timings.first_token is not None and one.timings.total >= one.timings.first_token


def test_a_prompt_on_its_own_may_fail_and_one_in_a_list_fails_in_its_place(client):
    with pytest.raises(RequestError, match="prompt of at most 511") as caught:
        client.generate("x" * 600, max_tokens=1, use_tqdm=False)
    assert caught.value.param == "prompt"
    good, long, wrong = client.generate(["a", "x" * 600, ["?"]], max_tokens=1, use_tqdm=False)
    assert good.error is None and len(good.outputs[0].token_ids) == 1
    assert isinstance(long.error, RequestError) and long.outputs[0].finish_reason == "error"
    assert isinstance(wrong.error, RequestError)


def test_options_are_the_offline_ones(client):
    with pytest.raises(RequestError, match="unknown sampling option"):
        client.generate("a", temprature=1)
    with pytest.raises(RequestError) as caught:
        client.generate("a", logprobs=1000, use_tqdm=False)
    assert caught.value.param == "logprobs"


def test_more_prompts_than_run_at_once(client, llm):
    prompts = [[i % 250] for i in range(150)]
    got = client.generate(prompts, max_tokens=2, temperature=0, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [
        o.outputs[0].token_ids for o in llm.generate(prompts, max_tokens=2, temperature=0, use_tqdm=False)]


def test_chat(client, llm):
    got = client.chat(MESSAGES, max_tokens=8, temperature=0, use_tqdm=False)[0]
    expected = llm.chat(MESSAGES, max_tokens=8, temperature=0, use_tqdm=False)[0]
    assert (got.text, got.prompt_token_ids) == (expected.text, expected.prompt_token_ids)


def test_a_conversation_goes_through_with_all_its_fields(client, llm):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "Ann"},
                {"role": "assistant", "content": "The answer is"}]
    got = client.tokenize(messages, continue_final_message=True)
    assert llm.tokenizer.decode(got, skip_special_tokens=False).endswith("The answer is")
    with pytest.raises(RequestError) as caught:
        client.chat([{"role": "user"}], use_tqdm=False)
    assert caught.value.param == "messages[0]"


def test_stream_joins_to_the_output(client):
    events = list(client.stream("Once", max_tokens=20, temperature=0, logprobs=1, ignore_eos=True))
    output = events[-1].output
    assert all(event.output is None for event in events[:-1])
    assert "".join(event.text for event in events) == output.text
    assert sum((event.token_ids for event in events), []) == output.outputs[0].token_ids
    assert sum((event.logprobs for event in events), []) == output.outputs[0].logprobs
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]


def test_stream_chat_and_stop_strings(parrot_server):
    with Client(parrot_server.target) as client:
        *_, last = client.stream("a", stop="klm", temperature=0)
        assert (last.output.text, last.finish_reason, last.stop_reason) == ("bcdefghij", "stop", "klm")
        *_, last = client.stream_chat([{"role": "user", "content": "x"}], max_tokens=1)
        assert last.output is not None


def test_closing_a_stream_ends_the_request(client, server):
    stream = client.stream("a", LONG)
    next(stream)
    stream.close()
    server.assert_idle()


def test_dropping_a_stream_ends_the_request(client, server):
    client.stream("a", LONG)
    server.assert_idle()


def test_abort_ends_the_stream(client, server):
    stream = client.stream("a", LONG, request_id="to-be-aborted")
    next(stream)
    client.abort("to-be-aborted", "unknown")
    *_, last = stream
    assert last.finish_reason == "abort" and last.output.outputs[0].finish_reason == "abort"
    server.assert_idle()


def test_timeout(server):
    with Client(server.target, timeout=0.05) as client, pytest.raises(ServerTimeoutError):
        for _ in range(100):  # a fast machine may need more than one
            client.generate("a", LONG, use_tqdm=False)
    server.assert_idle()


def test_duplicate_ids_are_refused(client, server):
    first = client.stream("a", LONG, request_id="same")
    next(first)
    with pytest.raises(RequestError, match="is running"):
        next(client.stream("b", LONG, request_id="same"))
    first.close()
    server.assert_idle()


def test_queue_full(loop, llm, monkeypatch):
    def refuse(_: int) -> None:
        raise QueueFullError("full")

    with running(loop, llm) as full, Client(full.target) as client:
        monkeypatch.setattr(full.service, "_check_tokens", refuse)
        with pytest.raises(QueueFullError):
            client.generate("a", max_tokens=1, use_tqdm=False)
        assert isinstance(client.generate(["a"], max_tokens=1, use_tqdm=False)[0].error, QueueFullError)


def test_no_server():
    with Client("127.0.0.1:1") as client, pytest.raises(ServerError) as caught:
        client.generate("a", use_tqdm=False)
    assert caught.value.code == "UNAVAILABLE"


def test_tokenize_and_detokenize(client, llm):
    ids = client.tokenize("Hé 🎉")
    assert ids == llm.tokenizer.encode("Hé 🎉")
    assert client.detokenize(ids) == "Hé 🎉"
    assert client.tokenize(MESSAGES) == llm.chat_token_ids(MESSAGES)
    with pytest.raises(RequestError, match="surrogate"):
        client.generate("\ud800", use_tqdm=False)


def test_coroutines(server, llm):
    async def use() -> None:
        async with AsyncClient(server.target) as client:
            outputs = await client.generate(["One", "Two", "x" * 600], max_tokens=5, temperature=0)
            assert [output.text for output in outputs[:2]] == [
                output.text for output in llm.generate(["One", "Two"], max_tokens=5, temperature=0, use_tqdm=False)]
            assert isinstance(outputs[2].error, RequestError)
            with pytest.raises(RequestError):
                await client.generate("x" * 600)
            chat = await client.chat(MESSAGES, max_tokens=3, temperature=0)
            events = [event async for event in client.stream_chat(MESSAGES, max_tokens=3, temperature=0)]
            assert events[-1].output.text == chat[0].text
            assert await client.detokenize(await client.tokenize("Hello")) == "Hello"
            stream = client.stream("a", LONG, request_id="by-coroutine")
            await anext(stream)
            await client.abort("by-coroutine")
            assert [event async for event in stream][-1].finish_reason == "abort"
            stream = client.stream("a", LONG)
            await anext(stream)
            await stream.aclose()

    server.run(use())
    server.assert_idle()


EVERY_OPTION = SamplingParams(
    n=2, max_tokens=9, min_tokens=1, temperature=0.0, top_k=-1, top_p=0.5, min_p=0.0, repetition_penalty=1.1,
    presence_penalty=-1.5, frequency_penalty=0.25, logit_bias={3: -100.0, 4: 0.0}, allowed_token_ids=[0, 5],
    bad_words=["x"], stop=["y", "z"], stop_token_ids=[9], include_stop_str_in_output=True, ignore_eos=True, seed=-5,
    logprobs=0, prompt_logprobs=3, detokenize=True, skip_special_tokens=False, spaces_between_special_tokens=False,
    priority=-2, cache_salt="salt")


def test_every_option_survives_the_wire():
    assert sampling_params(sampling_message(EVERY_OPTION)) == EVERY_OPTION
    assert sampling_params(sampling_message(SamplingParams())) == SamplingParams()
    assert sampling_params(sampling_message(SamplingParams(detokenize=False))) == SamplingParams(detokenize=False)
    unchanged = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "detokenize"
                 and getattr(EVERY_OPTION, field.name) == getattr(SamplingParams(), field.name)]
    assert unchanged == [], "EVERY_OPTION is to have each option at another value than its default"


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, 2**63 - 1, -5, -(2**63)])
def test_seeds_are_those_of_the_offline_llm(client, llm, seed):
    params = SamplingParams(seed=seed, temperature=1.0, max_tokens=8, ignore_eos=True)
    assert client.generate("a", params)[0].outputs[0].token_ids == llm.generate(
        "a", params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("given", [5, b"x", ["a"], "\ud800"])
def test_request_ids_are_texts(client, given):
    for start in (client.stream, lambda text, **options: client.stream_chat(
            [{"role": "user", "content": text}], **options)):
        with pytest.raises(RequestError, match="request_id"):
            start("a", request_id=given)


def test_tls_files_that_are_missing(tmp_path):
    for tls in (ClientTls(ca=tmp_path / "none"), ClientTls(certificate=tmp_path / "none", key=tmp_path / "none")):
        with pytest.raises(ConfigError, match="none"):
            Client("localhost:1", tls=tls)
    with pytest.raises(ConfigError, match="go together"):
        Client("localhost:1", tls=ClientTls(certificate=tmp_path))


@pytest.mark.parametrize("missing", ["grpc", "google.rpc", "grpc_status"])
def test_without_grpc_it_says_what_to_install(missing):
    program = ("import sys, importlib.util\n"
               "find = importlib.util.find_spec\n"
               f"importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)\n"
               "import jaxserve.client")
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 1 and process.stderr.endswith("pip install 'jaxserve[serve]'\n")


def test_the_client_needs_no_jax():
    subprocess.run([sys.executable, "-c", "import sys, jaxserve.client; assert 'jax' not in sys.modules"], check=True)


@pytest.mark.parametrize("target", [None, "", " ", 50051, b"localhost", "http://localhost:50051", "https://a"])
def test_what_is_no_target(target):
    for make in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="target must be") as caught:
            make(target)
        assert repr(target) in str(caught.value)


@pytest.mark.parametrize(("target", "full"), [
    ("localhost", "localhost:50051"), ("10.0.0.1", "10.0.0.1:50051"), ("[::1]", "[::1]:50051"),
    ("a-b.example", "a-b.example:50051"), ("a_b:1", "a_b:1"), ("[::1]:443", "[::1]:443"), ("::1", "::1"),
    ("dns:///a", "dns:///a"), ("unix:/run/a", "unix:/run/a"), ("unix:a", "unix:a"),
    ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:1")])
def test_the_port_is_the_servers_default(target, full):
    assert full_target(target) == full


def test_a_closed_client_says_so(server):
    with Client(server.target) as client:
        assert client.tokenize("a")
    client.close()
    for ask in (lambda: client.generate("a", use_tqdm=False), lambda: client.generate(["a"], use_tqdm=False),
                lambda: client.stream("a"), lambda: client.tokenize("a"), lambda: client.abort("a")):
        with pytest.raises(EngineClosedError, match="client has been closed"):
            ask()


def test_a_closed_async_client_says_so(server):
    async def use() -> None:
        async with AsyncClient(server.target) as client:
            assert await client.tokenize("a")
        for ask in (lambda: client.generate("a"), lambda: client.generate(["a"]), lambda: anext(client.stream("a")),
                    lambda: client.tokenize("a"), lambda: client.abort("a")):
            with pytest.raises(EngineClosedError, match="client has been closed"):
                await ask()

    server.run(use())
