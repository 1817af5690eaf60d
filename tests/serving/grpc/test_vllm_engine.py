"""vllm.grpc.engine.VllmEngine, by the stubs of the package that defines it."""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxserve import LLM
from jaxserve.tokenizer import Tokenizer
from tests.llm import tiny
from tests.serving.grpc.harness import running
from tests.serving.grpc.test_inference import failure, violation


@pytest.fixture
def engine(channel):
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture
def says(parrot_server):
    with grpc.insecure_channel(parrot_server.target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(ids=b"a", *, stream=False, request_id="", **sampling):
    return pb.GenerateRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_ids=ids), stream=stream,
                              sampling_params=pb.SamplingParams(**sampling))


def test_without_stream_there_is_one_complete_for_each_index(engine):
    responses = list(engine.Generate(request(n=3, max_tokens=4, ignore_eos=True)))
    assert [r.complete.index for r in responses] == [0, 1, 2]
    assert all(len(r.complete.output_ids) == r.complete.completion_tokens == 4 for r in responses)
    assert {(r.complete.finish_reason, r.complete.prompt_tokens) for r in responses} == {("length", 1)}


def test_chunks_join_to_the_complete(engine):
    *chunks, last = engine.Generate(request(stream=True, max_tokens=10, ignore_eos=True, temperature=0, logprobs=2,
                                            prompt_logprobs=1))
    ids = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert ids == list(last.complete.output_ids) and len(ids) == 10
    assert chunks[-1].chunk.completion_tokens == 10
    logprobs = last.complete.output_logprobs
    assert list(logprobs.token_ids) == ids
    assert [list(top.token_ids)[0] for top in logprobs.top_logprobs] == ids, "greedy takes the best"
    assert all(len(top.values) == 2 for top in logprobs.top_logprobs)
    assert not last.complete.input_logprobs.token_logprobs[0].HasField("value")


def test_streamed_or_not_the_answer_is_the_same(engine):
    *_, streamed = engine.Generate(request(stream=True, max_tokens=10, temperature=0))
    (whole,) = engine.Generate(request(max_tokens=10, temperature=0))
    assert streamed.complete.output_ids == whole.complete.output_ids


def test_zero_is_not_set(engine):
    """A gateway sends zeros for everything that its client left out."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=4)
    explicit = pb.SamplingParams(temperature=0, max_tokens=4, top_p=1, repetition_penalty=1, n=1)
    answers = [list(engine.Generate(pb.GenerateRequest(text="a", sampling_params=params)))
               for params in (sampling, explicit)]
    assert answers[0][0].complete.output_ids == answers[1][0].complete.output_ids


def test_what_stopped_it(says):
    (eos,) = says.Generate(request(temperature=0))
    assert (eos.complete.finish_reason, eos.complete.WhichOneof("matched_stop")) == ("stop", None)
    (by_id,) = says.Generate(request(temperature=0, stop_token_ids=b"d"))
    assert by_id.complete.matched_token_id == ord("d")
    (by_text,) = says.Generate(request(temperature=0, stop=["def"]))
    assert by_text.complete.matched_stop_str == "def"
    assert bytes(by_text.complete.output_ids) == b"bcdef"


def test_abort_and_duplicates(engine, server):
    call = engine.Generate(request(request_id="vllm-long", stream=True, max_tokens=500, ignore_eos=True))
    next(call)
    error = failure(lambda: engine.Generate(request(request_id="vllm-long", max_tokens=1)))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    engine.Abort(pb.AbortRequest(request_ids=["vllm-long", "unknown"]))
    *_, last = call
    assert last.complete.finish_reason == "abort"
    server.assert_idle()


def test_wrong_fields_are_named(engine):
    assert violation(failure(lambda: engine.Generate(pb.GenerateRequest()))) == "input"
    assert violation(failure(lambda: engine.Generate(request(top_p=2)))) == "sampling_params.top_p"
    assert violation(failure(lambda: engine.Generate(request(regex="a+")))) == "sampling_params.regex"


@pytest.mark.parametrize("fields", [
    {"kv_transfer_params_json": "{}"}, {"mm_inputs": pb.MultimodalInputs()}, {"data_parallel_rank": 1},
    {"sampling_params": pb.SamplingParams(truncate_prompt_tokens=5)}], ids=str)
def test_what_is_not_served_is_refused(engine, fields):
    error = failure(lambda: engine.Generate(pb.GenerateRequest(text="a", **fields)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_methods_that_are_not_served(engine):
    for call in (lambda: [engine.Embed(pb.EmbedRequest())],
                 lambda: [engine.StartProfile(common_pb2.StartProfileRequest())],
                 lambda: [engine.StopProfile(common_pb2.StopProfileRequest())],
                 lambda: engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())):
        error = failure(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED and "not served; " in error.details()


def test_model_and_server_info(engine):
    model = engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.model_type, model.is_generation) == ("tiny", "llama", True)
    assert (model.max_context_length, model.max_req_input_len) == (512, 511)
    assert (list(model.eos_token_ids), model.bos_token_id) == ([257, 258], 256)
    assert json.loads(model.default_sampling_params_json)["temperature"] == 1.0
    info = engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.active_requests, info.is_paused, info.max_num_seqs, info.block_size) == (0, False, 3, 8)
    assert info.kv_cache_dtype == "auto"


def test_what_the_cache_holds(loop, xla_cache):
    with LLM(config=tiny.CONFIG, params=tiny.random_tensors(), tokenizer=tiny.tokenizer(), kv_cache_dtype="int8",
             **tiny.ENGINE, compilation_cache_dir=xla_cache) as llm, running(loop, llm) as server:
        with grpc.insecure_channel(server.target) as channel:
            info = vllm_engine_pb2_grpc.VllmEngineStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    assert info.kv_cache_dtype == "int8"


def test_loads(engine, server):
    call = engine.Generate(request(stream=True, max_tokens=500, ignore_eos=True))
    next(call)
    (load,) = engine.GetLoads(pb.GetLoadsRequest()).loads
    assert load.num_running_reqs == load.num_total_reqs == 1
    assert 0 < load.token_usage < 1 and load.num_used_tokens > 0 and load.gen_throughput > 0
    call.cancel()
    server.assert_idle()
    (load,) = engine.GetLoads(pb.GetLoadsRequest()).loads
    assert (load.num_total_reqs, load.num_used_tokens, load.token_usage) == (0, 0, 0)


def test_the_tokenizer_can_be_fetched(engine, llm, tmp_path):
    chunks = list(engine.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    copy = Tokenizer.from_directory(tmp_path)
    assert copy.encode(" exaggerated é") == llm.tokenizer.encode(" exaggerated é")
    assert copy.chat_templates == llm.tokenizer.chat_templates


def test_the_prefix_cache_is_flushed_only_when_idle(engine, server):
    prompt = list(range(40))
    list(engine.Generate(request(prompt, max_tokens=1)))
    call = engine.Generate(request(request_id="in-flight", stream=True, max_tokens=500, ignore_eos=True))
    next(call)
    assert not engine.FlushCache(common_pb2.FlushCacheRequest()).success
    call.cancel()
    error = failure(lambda: [engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=math.nan))])
    assert violation(error) == "timeout_s"
    assert engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=300)).success
    assert list(engine.Generate(request(prompt, max_tokens=1)))[0].complete.cached_tokens == 0
    assert list(engine.Generate(request(prompt, max_tokens=1)))[0].complete.cached_tokens == 32


def test_health_check(engine, loop, llm):
    assert engine.HealthCheck(pb.HealthCheckRequest()).healthy
    with running(loop, llm, started=False) as starting, grpc.insecure_channel(starting.target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        response = stub.HealthCheck(pb.HealthCheckRequest())
        assert (response.healthy, response.message) == (False, "starting")
        assert failure(lambda: stub.Generate(request())).code() is grpc.StatusCode.UNAVAILABLE
