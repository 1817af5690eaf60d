"""jaxserve.v1.Inference, by its own stubs."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxserve import EngineError, QueueFullError, RequestError, SamplingParams
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.request_stream import RequestStream
from tests.serving.grpc.harness import PATIENCE, running

LONG = pb.SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)


def failure(call) -> grpc.RpcError:
    """The error that a call, or reading all of a stream, ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    return caught.value


def details(error, kind):
    for packed in rpc_status.from_call(error).details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    raise AssertionError(f"no {kind.__name__} in {error}")


def violation(error) -> str:
    """The field that is wrong."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    return details(error, error_details_pb2.BadRequest).field_violations[0].field


@pytest.fixture
def says(parrot_server):
    with grpc.insecure_channel(parrot_server.target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def test_the_first_message_has_the_prompt_and_the_last_usage_and_timings(stub):
    request = pb.GenerateRequest(request_id="mine", text="Hello", return_prompt_token_ids=True,
                                 sampling=pb.SamplingParams(n=2, max_tokens=3, temperature=0))
    messages = list(stub.Generate(request))
    assert messages[0].prompt == pb.PromptInfo(request_id="mine", num_tokens=5, token_ids=b"Hello")
    assert not any(message.HasField("prompt") for message in messages[1:])
    assert sorted(m.index for m in messages if m.HasField("finish")) == [0, 1]
    assert not any(m.HasField("usage") or m.HasField("timings") for m in messages[:-1])
    usage, timings = messages[-1].usage, messages[-1].timings
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 6)
    assert 0 <= timings.queue <= timings.first_token <= timings.total


def test_cached_tokens_are_counted(stub):
    request = pb.GenerateRequest(text="a prefix of its own for this test, " * 2,
                                 sampling=pb.SamplingParams(max_tokens=1))
    list(stub.Generate(request))
    assert list(stub.Generate(request))[-1].usage.cached_tokens == 64


def test_no_increment_holds_half_a_character(says):  # case 1
    messages = list(says.Generate(pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=b"["), sampling=pb.SamplingParams(max_tokens=7, temperature=0))))
    assert "".join(message.text for message in messages) == "é🎉]"
    assert "�" not in "".join(message.text for message in messages)


def test_what_stopped_it_is_told(says):  # case 5
    def finish(**sampling) -> tuple[str, pb.Finish]:
        messages = list(says.Generate(pb.GenerateRequest(
            text="a", sampling=pb.SamplingParams(temperature=0, **sampling))))
        return "".join(message.text for message in messages), messages[-1].finish

    assert finish(stop=["def"]) == ("bc", pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="def"))
    assert finish(stop=["def"], include_stop_str_in_output=True)[0] == "bcdef"
    assert finish(stop_token_ids=[ord("d")]) == (
        "bc", pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=ord("d")))
    assert finish() == ("bcdefghijklmnopqrstuvwxyz", pb.Finish(reason=pb.FINISH_REASON_STOP))
    assert finish(max_tokens=2) == ("bc", pb.Finish(reason=pb.FINISH_REASON_LENGTH))


def test_chat_renders_the_models_template(stub, llm):
    messages = [{"role": "user", "content": "Hi"}]
    request = pb.ChatRequest(conversation=pb.Conversation(messages=[pb.Message(role="user", content="Hi")]),
                             sampling=pb.SamplingParams(max_tokens=1), return_prompt_token_ids=True)
    first = next(iter(stub.Chat(request)))
    assert list(first.prompt.token_ids) == llm.chat_token_ids(messages)


@pytest.mark.parametrize("request_fields, field", [
    ({}, "prompt"),
    ({"text": "x" * 512}, "prompt"),  # cases 43 and 44
    ({"token_ids": pb.TokenIds()}, "prompt"),  # case 42
    ({"token_ids": pb.TokenIds(ids=[100_000])}, "prompt"),
    ({"text": "a", "sampling": pb.SamplingParams(temperature=-1)}, "sampling.temperature"),
    ({"text": "a", "sampling": pb.SamplingParams(top_k=-2)}, "sampling.top_k"),
    ({"text": "a", "sampling": pb.SamplingParams(n=0)}, "sampling.n"),
    ({"text": "a", "sampling": pb.SamplingParams(max_tokens=600)}, "sampling.max_tokens"),  # case 45
    ({"text": "a", "sampling": pb.SamplingParams(stop=[""])}, "sampling.stop"),  # case 10
    ({"text": "a", "sampling": pb.SamplingParams(logprobs=1_000_000)}, "sampling.logprobs"),  # case 34
    ({"text": "a", "sampling": pb.SamplingParams(logit_bias={191222: -100})}, "sampling.logit_bias"),  # case 30
    ({"text": "a", "sampling": pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="a"))},
     "sampling.structured_outputs"),
    ({"text": "a", "request_id": "x" * 129}, "request_id"),  # case 71
    ({"text": "a", "request_id": "line\nfeed"}, "request_id"),
])
def test_a_wrong_field_is_named(stub, request_fields, field):
    assert violation(failure(lambda: stub.Generate(pb.GenerateRequest(**request_fields)))) == field
    assert len(list(stub.Generate(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))))) == 1


@pytest.mark.parametrize("conversation, field", [
    (pb.Conversation(), "conversation.messages"),
    (pb.Conversation(messages=[pb.Message(role="user")]), "conversation.messages[0]"),
    (pb.Conversation(messages=[pb.Message(role="user", content="a")], tools_json="{"), "conversation.tools_json"),
    (pb.Conversation(messages=[pb.Message(role="user", content="a")], chat_template_kwargs_json="[]"),
     "conversation.chat_template_kwargs_json"),
    (pb.Conversation(messages=[pb.Message(role="assistant", content="a")], add_generation_prompt=True,
                     continue_final_message=True), "conversation.continue_final_message"),  # case 108
])
def test_a_wrong_field_of_a_conversation_is_named(stub, conversation, field):
    assert violation(failure(lambda: stub.Chat(pb.ChatRequest(conversation=conversation)))) == field


def test_absent_and_zero_differ(stub):
    def ids(**sampling):
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=8, ignore_eos=True, **sampling))
        return [token_id for message in stub.Generate(request) for token_id in message.token_ids]

    assert ids(temperature=0) == ids(temperature=0)
    assert ids() != ids()  # the neutral temperature is 1, and there is no seed


def test_tokenize_and_detokenize(stub):
    response = stub.Tokenize(pb.TokenizeRequest(text="né"))
    assert (list(response.token_ids), response.max_model_len) == (list("né".encode()), 512)
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[*b"a", 256])).text == "a<s>"
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[*b"a", 256], skip_special_tokens=True)).text == "a"
    error = failure(lambda: [stub.Tokenize(pb.TokenizeRequest())])
    assert violation(error) == "text"


def test_cancelling_ends_the_request(stub, server):
    before = server.llm.metrics()["steps"]
    call = stub.Generate(pb.GenerateRequest(text="a", sampling=LONG))
    next(call)
    call.cancel()
    server.assert_idle()
    assert server.llm.metrics()["steps"] - before < 400


def test_the_deadline_ends_the_request(stub, server, monkeypatch):
    causes, abort = [], RequestStream.abort

    def note(stream: RequestStream, cause: str) -> None:
        abort(stream, cause)
        causes.append(stream.abort_cause)

    monkeypatch.setattr(RequestStream, "abort", note)

    def call():
        for _ in range(100):  # a fast machine may need more than one
            yield from stub.Generate(pb.GenerateRequest(text="a", sampling=LONG), timeout=0.1)

    assert failure(call).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.assert_idle()
    assert "deadline" in causes and "client" not in causes  # the client ends the call too, by the same clock


def test_abort_ends_the_stream_and_unknown_ids_are_fine(stub, server):  # case 74
    request = pb.GenerateRequest(request_id="long", text="a", sampling=pb.SamplingParams(n=3, max_tokens=400,
                                                                                         ignore_eos=True))
    call = stub.Generate(request)
    next(call)
    for _ in range(2):
        stub.Abort(pb.AbortRequest(request_ids=["long", "unknown"]))
    messages = list(call)
    assert [message.finish.reason for message in messages if message.HasField("finish")] == [pb.FINISH_REASON_ABORT] * 3
    assert messages[-1].HasField("usage")
    server.assert_idle()


def test_a_live_id_is_taken(stub, server):  # case 69
    request = pb.GenerateRequest(request_id="twice", text="a", sampling=LONG)
    call = stub.Generate(request)
    next(call)
    error = failure(lambda: stub.Generate(request))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert details(error, error_details_pb2.BadRequest).field_violations[0].field == "request_id"
    call.cancel()
    server.assert_idle()
    assert len(list(stub.Generate(pb.GenerateRequest(request_id="twice", text="a",
                                                     sampling=pb.SamplingParams(max_tokens=1))))) == 1


def test_a_full_queue_says_when_to_come_again(loop, llm, monkeypatch):
    def refuse(_: int) -> None:
        raise QueueFullError("full")

    with running(loop, llm) as full:
        monkeypatch.setattr(full.service, "_check_tokens", refuse)
        with grpc.insecure_channel(full.target) as channel:
            error = failure(lambda: inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error, error_details_pb2.RetryInfo).retry_delay.seconds > 0


def test_a_fault_in_mid_stream_is_never_ok(stub, server, llm):  # case 56
    call = stub.Generate(pb.GenerateRequest(request_id="faulty", text="a", sampling=LONG))
    assert next(call).token_ids
    core = llm._core
    llm._thread.call(lambda: core._fail(core._requests["faulty"], EngineError("the fault of this test")))
    error = failure(lambda: call)
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the fault of this test")
    server.assert_idle()


def test_a_fault_of_the_client_in_mid_stream_is_called_so(stub, server, llm):
    call = stub.Generate(pb.GenerateRequest(request_id="masked", text="a", sampling=LONG))
    assert next(call).token_ids
    core, error = llm._core, RequestError("bad_words leaves no token to choose", "bad_words")
    llm._thread.call(lambda: core._fail(core._requests["masked"], error))
    assert violation(failure(lambda: call)) == "sampling.bad_words"
    nothing_left = pb.SamplingParams(max_tokens=4, allowed_token_ids=[97], bad_words=["aa"])
    call = stub.Generate(pb.GenerateRequest(text="b", sampling=nothing_left))
    assert violation(failure(lambda: call)) == "sampling.bad_words"
    server.assert_idle()


def test_a_reader_that_does_not_read_holds_nothing_up(stub, server):
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(
        max_tokens=500, ignore_eos=True, temperature=0, logprobs=20))
    call = stub.Generate(request)
    messages = [next(call)]
    assert server.run(server.service.idle(PATIENCE)), "the engine waited for the reader"
    messages += call
    assert sum(len(message.token_ids) for message in messages) == 500
    assert sum(len(message.logprobs) for message in messages) == 500
    assert len(messages) < 500, "what waited should have been merged"


def test_many_requests_of_which_some_are_dropped(stub, server, llm):
    ids = [[i, i + 1] for i in range(40)]
    sampling = pb.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    calls = [stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=one), sampling=sampling)) for one in ids]
    for call in calls[::3]:
        call.cancel()
    alone = llm.generate([one for i, one in enumerate(ids) if i % 3], SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0), use_tqdm=False)
    for call, expected in zip([call for i, call in enumerate(calls) if i % 3], alone, strict=True):
        assert "".join(message.text for message in call) == expected.text
    server.assert_idle()


def test_unknown_ids_have_no_text(stub, llm):
    known = llm.tokenizer.vocab_size
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, known - 1])).text.startswith("a")
    for unknown in (known, 2**32 - 1):
        error = failure(lambda unknown=unknown: [stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, unknown]))])
        assert violation(error) == "token_ids" and str(unknown) in error.details()


def test_megabytes_are_refused_by_their_length(stub):
    text = "x" * 2**21
    conversation = pb.Conversation(messages=[pb.Message(role="user", content=text)])
    for call, field in ((lambda: stub.Generate(pb.GenerateRequest(text=text)), "prompt"),
                        (lambda: stub.Chat(pb.ChatRequest(conversation=conversation)), "conversation.messages"),
                        (lambda: [stub.Tokenize(pb.TokenizeRequest(text=text))], "prompt"),
                        (lambda: [stub.Tokenize(pb.TokenizeRequest(conversation=conversation))],
                         "conversation.messages")):
        error = failure(call)
        assert violation(error) == field and "characters" in error.details()
