"""Prometheus metrics: under vLLM's names, which dashboards and routers know, and `jaxserve:` ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from jaxserve.engine.core import StepStats
from jaxserve.errors import RequestError
from jaxserve.outputs import RequestOutput, StreamEvent
from jaxserve.serving.request_stream import RequestStream

__all__ = ["CONTENT_TYPE", "ServingMetrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COUNTS = (1, 2, 5, 10, 20)


class ServingMetrics:
    """Observes one service (see service.Observer), and adds the engine's own counters when it is read."""

    def __init__(self, model_name: str):
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._model = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            family = Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token.").labels(
            model_name)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(model_name)
        self._ended = counter("vllm:request_success", "Completions that ended, by reason.", "finished_reason")
        self._rejections = counter("vllm:admission_rejections", "Requests that were refused.", "reason")
        self._aborts = counter("jaxserve:aborts", "Requests that were aborted, by who did it.", "cause")
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between the increments of a completion.",
                                  _SECONDS)
        self._total = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "In the waiting queue.", _SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From schedule to the first token.", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._inference = histogram("vllm:request_inference_time_seconds", "From schedule to the end.", _SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generations = histogram("vllm:request_generation_tokens", "Tokens of a completion.", _TOKENS)
        self._step = histogram("jaxserve:step_seconds", "A turn of the engine: one step launched, one taken in.",
                               _STEP_SECONDS)
        self._host = histogram("jaxserve:step_host_seconds", "Of it, what was not spent waiting for the device.",
                               _STEP_SECONDS)
        self._iteration_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        self._n = histogram("vllm:request_params_n", "Completions asked for.", _COUNTS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens, where given.", _TOKENS)

    def render(self, engine: Mapping[str, Any]) -> bytes:
        """The text to scrape. `engine`: LLM.metrics()."""
        self._engine.numbers = engine
        return generate_latest(self._registry)

    # -- service.Observer

    def step(self, stats: StepStats) -> None:
        self._step.observe(stats.seconds)
        self._host.observe(stats.host_seconds)
        self._iteration_tokens.observe(stats.num_tokens)

    def rejected(self, stream: RequestStream, reason: str) -> None:
        self._rejections.labels(self._model, reason).inc()

    def increment(self, stream: RequestStream, event: StreamEvent, at: float) -> None:
        if stream.first_event is None:
            self._first_token.observe(at - stream.arrival)
            self._prompt_tokens.inc(len(stream.prompt_token_ids))
        before = stream.last_events.get(event.index)
        if before is not None:
            self._between.observe(at - before)
        self._generation_tokens.inc(len(event.token_ids))

    def finished(self, stream: RequestStream, output: RequestOutput, at: float) -> None:
        if isinstance(output.error, RequestError):  # a fault of the client's that only showed on the way
            self.rejected(stream, "invalid")
        for completion in output.outputs:
            if not isinstance(output.error, RequestError):
                self._ended.labels(self._model, completion.finish_reason).inc()
            self._generations.observe(len(completion.token_ids))
        if stream.abort_cause is not None:
            self._aborts.labels(self._model, stream.abort_cause).inc()
        self._prompts.observe(len(output.prompt_token_ids))
        params, timings = stream.processed.params, output.timings
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._total.observe(at - stream.arrival)
        if timings.queue is not None:
            self._queue.observe(timings.queue)
            if timings.total is not None:
                self._inference.observe(timings.total - timings.queue)
            if timings.first_token is not None:
                self._prefill.observe(timings.first_token - timings.queue)
                if timings.total is not None:
                    self._decode.observe(timings.total - timings.first_token)


class _EngineCollector(Collector):
    """The engine's numbers as metrics. They are counted there already."""

    def __init__(self, model_name: str):
        self.numbers: Mapping[str, Any] = {}
        self._model = model_name

    def describe(self) -> list[Metric]:
        return []  # of unknown value before the engine has told

    def collect(self) -> Iterator[Metric]:
        numbers = self.numbers
        if not numbers:
            return

        def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
            family.add_metric([self._model, *labels.values()], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            return family

        pages, free = numbers["pages_total"], numbers["pages_free"]
        yield gauge("vllm:num_requests_running", "Sequences that have a slot.", numbers["running"])
        yield gauge("vllm:num_requests_waiting", "Sequences in the waiting queue.", numbers["waiting"])
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV pages that sequences hold (0 to 1).",
                    (pages - free) / pages)
        yield gauge("vllm:cache_config_info", "The KV pool.", 1, block_size=str(numbers["page_size"]),
                    num_gpu_blocks=str(pages))
        yield counter("vllm:num_preemptions", "Sequences that lost their pages to others.", numbers["preemptions"])
        yield counter("vllm:prefix_cache_queries", "Tokens that the prefix cache was asked for.",
                      numbers["prefix_query_tokens"])
        yield counter("vllm:prefix_cache_hits", "Tokens that it had.", numbers["prefix_hit_tokens"])
        cached = numbers["pages_cached"]
        states = GaugeMetricFamily("jaxserve:pages", "KV pages: in use, held by the prefix cache alone, or free.",
                                   labels=["model_name", "state"])
        for state, value in (("used", pages - free), ("cached", cached), ("free", free - cached)):
            states.add_metric([self._model, state], value)
        yield states
        yield gauge("jaxserve:pages_free", "KV pages that no sequence holds, with those of the prefix cache.", free)
        yield counter("jaxserve:prefix_cache_evictions", "Cached pages that were used for something else.",
                      numbers["prefix_evictions"])
        yield counter("jaxserve:steps", "Steps launched.", numbers["steps"])
        yield counter("jaxserve:step_failures", "Steps that failed; what ran was computed again, or ended.",
                      numbers["failed_steps"])
        yield counter("vllm:corrupted_requests", "Requests that ended because of NaN or infinite logits.",
                      numbers["not_finite"])
        yield counter("jaxserve:token_rows", "Tokens computed.", numbers["token_rows"])
        yield counter("jaxserve:token_rows_padded", "Rows computed, with those that only fill a bucket.",
                      numbers["token_rows_padded"])
        yield counter("jaxserve:compile_seconds", "Time that compiling took.", sum(numbers["compile_seconds"].values()))
        yield gauge("jaxserve:executables", "Compiled programs.", numbers["executables"])
        if numbers["compilations_after_warmup"] is not None:  # with compile_mode="eager"
            yield counter("jaxserve:compilations", "XLA compilations after warm-up; each one stalls all requests.",
                          numbers["compilations_after_warmup"])
