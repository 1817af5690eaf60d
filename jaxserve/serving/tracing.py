"""A span for each request, by OpenTelemetry's conventions for generative AI, sent by OTLP.

A client's trace context is honoured, and so is its decision on sampling. Spans have counts and times, and never a
text of the user or the model. The convention: github.com/open-telemetry/semantic-conventions-genai.
"""

from __future__ import annotations

import time
from typing import Any

from jaxserve.engine.core import StepStats
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.serving.request_stream import RequestStream

CLOSE_MILLISECONDS = 5000  # a collector that is away does not hold up the end of the process for longer
_ABORT_ERRORS = {"client": "cancelled", "abort": "cancelled", "deadline": "timeout", "drain": "unavailable"}


class Tracing:
    """Observes one service (see service.Observer).

    Args:
        processor: an opentelemetry SpanProcessor, which gets the spans.

    Raises:
        ConfigError: opentelemetry-sdk is missing.
    """

    def __init__(self, processor: Any, model_name: str):
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise _missing() from None
        # Not the process' own provider: who embeds a server may have one.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "jaxserve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._model = model_name

    @classmethod
    def to_endpoint(cls, endpoint: str, model_name: str) -> Tracing:
        """Sends them to `endpoint` (http://host:port, https:// with TLS) by OTLP over gRPC, in batches and from a
        thread. Headers, certificates and sizes: OpenTelemetry's own environment variables."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise _missing() from None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)), model_name)

    def close(self) -> None:
        """Sends what is left. Waits for the network."""
        self._provider.force_flush(CLOSE_MILLISECONDS)
        self._provider.shutdown()

    # -- service.Observer

    def step(self, stats: StepStats) -> None:
        pass

    def increment(self, stream: RequestStream, event: StreamEvent, at: float) -> None:
        pass

    def rejected(self, stream: RequestStream, reason: str) -> None:
        self._span(stream, {}, reason, time.perf_counter())

    def finished(self, stream: RequestStream, output: RequestOutput, at: float) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.response.id": output.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [str(completion.finish_reason) for completion in output.outputs],
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in output.outputs),
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        }
        if stream.first_event is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = stream.first_event - stream.arrival
        if output.timings.queue is not None:
            attributes["jaxserve.queue_seconds"] = output.timings.queue
        error = None
        if output.error is not None:
            error = type(output.error).__name__
        elif stream.abort_cause is not None:
            error = _ABORT_ERRORS[stream.abort_cause]
        self._span(stream, attributes, error, at)

    def _span(self, stream: RequestStream, attributes: dict[str, Any], error: str | None, end: float) -> None:
        params, call = stream.params, stream.incoming
        attributes |= {
            "gen_ai.operation.name": stream.operation,
            "gen_ai.provider.name": "jaxserve",
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": params.n,
        }
        for name in ("max_tokens", "temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "seed"):
            if (value := getattr(params, name)) is not None:
                attributes[f"gen_ai.request.{name}"] = value
        if error is not None:
            attributes["error.type"] = error
        context = None
        if call is not None and call.traceparent is not None:
            carrier = {"traceparent": call.traceparent, "tracestate": call.tracestate or ""}
            context = self._propagator.extract(carrier)
        # The clock of spans is the wall's, that of a request is monotonic.
        offset = time.time() - time.perf_counter()
        span = self._tracer.start_span(f"{stream.operation} {self._model}", context, self._kind, attributes,
                                       start_time=int((stream.arrival + offset) * 1e9))
        if error is not None:
            span.set_status(self._error)
        span.end(int((end + offset) * 1e9))


def _missing() -> ConfigError:
    return ConfigError(f"otlp_endpoint needs OpenTelemetry: {how_to_install('otel')}")
