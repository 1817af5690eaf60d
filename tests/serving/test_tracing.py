"""Spans: one for each request, with numbers and without texts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve import LLM, ConfigError, EngineError, RequestError, SamplingParams
from jaxserve.serving.config import ServeConfig
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.service import Service
from jaxserve.serving.tracing import Tracing
from tests.serving.http.test_serve_command import run_and, terminate

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def llm(make_llm) -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def spans_of(llm, act) -> list[ReadableSpan]:
    """The spans of what `act(service)` does."""
    exporter = InMemorySpanExporter()

    async def main() -> None:
        tracing = Tracing(SimpleSpanProcessor(exporter), "tiny")
        service = Service(model_name="tiny", observers=(tracing,))
        await service.start(llm)
        await act(service)
        await service.drain(60)
        service.close()
        tracing.close()

    asyncio.run(main())
    return list(exporter.get_finished_spans())


def test_a_span_has_the_numbers_of_a_request_and_none_of_its_texts(llm):
    async def act(service):
        params = SamplingParams(n=2, max_tokens=5, temperature=0.5, top_k=7, seed=3, ignore_eos=True, stop=["secret"],
                                presence_penalty=0.5)
        messages = [{"role": "user", "content": "secret"}]
        async with await service.chat(messages, params) as stream:
            prompt_tokens.append(len(stream.prompt_token_ids))
            async for _ in stream:
                pass

    prompt_tokens: list[int] = []
    span, = spans_of(llm, act)
    assert span.name == "chat tiny" and span.kind is SpanKind.SERVER and span.parent is None
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.id")
    assert 0 < attributes.pop("jaxserve.queue_seconds") < attributes.pop("gen_ai.response.time_to_first_chunk")
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "jaxserve", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.choice.count": 2, "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_k": 7, "gen_ai.request.seed": 3,
        "gen_ai.request.presence_penalty": 0.5, "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.finish_reasons": ("length", "length"), "gen_ai.usage.input_tokens": prompt_tokens[0],
        "gen_ai.usage.output_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 0}
    assert span.status.status_code is StatusCode.UNSET and span.end_time > span.start_time
    assert "secret" not in span.to_json()


def test_what_ends_badly_has_an_error_type(llm):
    async def act(service):
        with pytest.raises(RequestError):
            await service.generate([VOCAB_PLUS], SamplingParams())
        stream = await service.generate("Hello", SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(stream)
        await stream.aclose()

    VOCAB_PLUS = 10**6
    refused, left = spans_of(llm, act)
    assert refused.attributes["error.type"] == "invalid" and refused.name == "text_completion tiny"
    assert left.attributes["error.type"] == "cancelled"
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert refused.status.status_code is left.status.status_code is StatusCode.ERROR


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of one's own."""

    def __init__(self):
        self.spans: list = []
        self.services: set[str] = set()

    def Export(self, request, context):
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector = Collector()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_spans_of_a_start_that_fails_are_sent():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def before(_):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError, match="starting"):
                list(stub.Generate(pb.GenerateRequest(text="a"), wait_for_ready=True))

    with collecting() as (collector, endpoint):
        assert run_and(EngineError("no first token"), None, before, grpc_port=port, otlp_endpoint=endpoint) == 1
    assert len(collector.spans) == 1


def test_both_faces_send_spans_that_continue_the_client_s_trace(llm):
    with socket.create_server(("127.0.0.1", 0)) as free:
        grpc_port = free.getsockname()[1]

    def act(http):
        sampled, ignored = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
        for header in (sampled, ignored, "rubbish"):
            answer = http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2},
                               headers={"traceparent": header, "X-Request-Id": "mine"})
            assert answer.status_code == 200
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = pb.GenerateRequest(text="c", sampling=pb.SamplingParams(max_tokens=2))
            list(stub.Generate(request, metadata=[("traceparent", sampled)], wait_for_ready=True))
        terminate()

    with collecting() as (collector, endpoint):
        assert run_and(llm, act, grpc_port=grpc_port, otlp_endpoint=endpoint) == 0
    traced = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    # Two prompts are two requests of the engine; the call that was not to be sampled has none.
    assert len(traced) == 3 and len(collector.spans) == 5
    assert {span.parent_span_id.hex() for span in traced} == {PARENT_ID}
    ids = [attribute.value.string_value for span in traced for attribute in span.attributes
           if attribute.key == "gen_ai.response.id"]
    assert sum(request_id.startswith("mine-") for request_id in ids) == 2
    assert collector.services == {"jaxserve"}


def test_a_collector_that_is_away_disturbs_nobody(make_llm):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def act(http):
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        terminate()

    with make_llm() as llm:
        assert run_and(llm, act, otlp_endpoint=f"http://127.0.0.1:{port}") == 0


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://"])
def test_endpoints_that_are_no_urls(endpoint):
    with pytest.raises(ConfigError, match="otlp_endpoint must be a URL"):
        ServeConfig(otlp_endpoint=endpoint)
