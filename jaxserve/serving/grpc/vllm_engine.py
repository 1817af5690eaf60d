"""vllm.grpc.engine.VllmEngine: token ids in and out, as the SMG gateway speaks to its workers.

Fields that are no `optional` in that protocol cannot be absent; where zero makes no sense as a value it stands for
the model's or the engine's default. Requests that use what this engine does not have are refused, not ignored.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import math
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

import jaxserve
from jaxserve.engine.processor import Prompt
from jaxserve.errors import RequestError
from jaxserve.outputs import PositionLogprobs, RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.grpc.calls import Calls, UnimplementedError, check_request_id
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.protos.vllm import common_pb2, vllm_engine_pb2_grpc
from jaxserve.serving.protos.vllm import vllm_engine_pb2 as pb
from jaxserve.serving.request_stream import RequestStream
from jaxserve.serving.service import Service, State
from jaxserve.tokenizer import Tokenizer

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
HEALTH_METHOD = f"/{SERVICE_NAME}/HealthCheck"

_CHUNK_BYTES = 1 << 20
_INPUT_FIELDS = {"prompt": "input"}
_NOT_SERVED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs", "extra_mm_inputs")


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers over a Service. Responses of Generate are written, not yielded: see InferenceServicer."""

    def __init__(self, service: Service, access_log: AccessLog | None = None):
        self._service = service
        self._started = time.monotonic()
        self._last_request = 0.0
        self._tokenizer_zip: bytes | None = None
        self.calls = Calls(_field_path, access_log)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._last_request = time.time()
        async with self.calls.answer(context):
            _check_served(request)
            params = sampling_params(request.sampling_params)
            stream = await self._service.generate(_prompt(request), params,
                                                  request_id=check_request_id(request.request_id),
                                                  deadline=context.time_remaining())
            await _answer(stream, context, params, request.stream)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with self.calls.answer(context):
            for request_id in request.request_ids:
                self._service.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest,
                          context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        async with self.calls.answer(context, polled=True):
            state = self._service.state
            return pb.HealthCheckResponse(healthy=state is State.READY, message=state.value)
        raise AssertionError("answer() ends a call that has failed")

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> None:
        await self._refuse(context, "embeddings are not served; this server generates")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext) -> None:
        await self._refuse(context, "profiles are not served; jaxserve bench measures")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> None:
        await self._refuse(context, "profiles are not served; jaxserve bench measures")

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest,
                                context: grpc.aio.ServicerContext) -> None:
        await self._refuse(context, "events of the KV cache are not served; GetLoads has its use")

    async def _refuse(self, context: grpc.aio.ServicerContext, message: str) -> None:
        async with self.calls.answer(context):
            raise UnimplementedError(message)

    async def FlushCache(self, request: common_pb2.FlushCacheRequest,
                         context: grpc.aio.ServicerContext) -> common_pb2.FlushCacheResponse:
        async with self.calls.answer(context):
            if math.isnan(request.timeout_s):  # the event loop's timers are ordered by time
                raise RequestError("timeout_s must be a number of seconds, got NaN", "timeout_s")
            if not await self._service.idle(request.timeout_s):
                return common_pb2.FlushCacheResponse(
                    success=False, message=f"{self._service.num_active} requests are running; nothing was flushed")
            await self._service.reset_prefix_cache()
        return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest,
                           context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        async with self.calls.answer(context):
            service, tokenizer = self._service, self._service.tokenizer
            special = {} if tokenizer is None else {
                role: tokenizer.token_to_id(token) for role, token in tokenizer.special_tokens.items()}
            return pb.GetModelInfoResponse(
                model_path=service.model_name, served_model_name=service.model_name, tokenizer_path=service.model_name,
                is_generation=True, max_context_length=service.config.max_model_len,
                vocab_size=service.config.vocab_size, model_type=service.model_config.get("model_type", ""),
                architectures=service.model_config.get("architectures") or (),
                eos_token_ids=sorted(service.eos_ids), bos_token_id=special.get("bos_token") or 0,
                pad_token_id=special.get("pad_token") or 0, max_req_input_len=service.config.max_model_len - 1,
                default_sampling_params_json=json.dumps(service.default_sampling))
        raise AssertionError("answer() ends a call that has failed")

    async def GetServerInfo(self, request: pb.GetServerInfoRequest,
                            context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        async with self.calls.answer(context):
            config = self._service.config
            return pb.GetServerInfoResponse(
                active_requests=self._service.num_active, is_paused=self._service.state is not State.READY,
                last_receive_timestamp=self._last_request, uptime_seconds=time.monotonic() - self._started,
                server_type="jaxserve-grpc", data_parallel_size=1, kv_cache_dtype=self._service.kv_cache_dtype,
                block_size=config.page_size, max_num_seqs=config.max_num_seqs)
        raise AssertionError("answer() ends a call that has failed")

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        async with self.calls.answer(context, polled=True):
            metrics = await self._service.engine_metrics()  # empty while the service starts
            asked = request.dp_rank == 0  # absent, or the only one there is
            loads = [scheduler_load(self._service, metrics)] if asked and metrics else []
            return pb.GetLoadsResponse(timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
                                       version=jaxserve.__version__, dp_rank_count=1, loads=loads)
        raise AssertionError("answer() ends a call that has failed")

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        async with self.calls.answer(context):
            tokenizer = self._service.tokenizer
            if tokenizer is None:
                raise UnimplementedError("the model has no tokenizer")
            if self._tokenizer_zip is None:
                self._tokenizer_zip = await self._service.run_text(lambda: tokenizer_zip(tokenizer))
            data = self._tokenizer_zip
            for start in range(0, len(data), _CHUNK_BYTES):
                last = start + _CHUNK_BYTES >= len(data)
                await context.write(common_pb2.GetTokenizerChunk(
                    data=data[start:start + _CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if last else ""))


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Raises RequestError, UnimplementedError."""
    if (constraint := message.WhichOneof("constraint")) is not None:
        raise RequestError(f"structured outputs are not implemented; leave {constraint} out", constraint)
    if message.HasField("truncate_prompt_tokens"):
        raise UnimplementedError("truncate_prompt_tokens is not served; send a prompt that fits")

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return SamplingParams(
        n=message.n or 1,
        max_tokens=given("max_tokens"),
        min_tokens=message.min_tokens,
        temperature=given("temperature"),
        top_k=message.top_k or None,
        top_p=message.top_p or None,
        min_p=message.min_p or None,
        repetition_penalty=message.repetition_penalty or None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        stop=list(message.stop),
        stop_token_ids=list(message.stop_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
        ignore_eos=message.ignore_eos,
        seed=given("seed"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        detokenize=bool(message.stop),  # ids are all that goes back; text is only needed to find stop strings
        skip_special_tokens=message.skip_special_tokens,
        spaces_between_special_tokens=message.spaces_between_special_tokens,
    )


def scheduler_load(service: Service, metrics: dict[str, Any]) -> pb.SchedulerLoad:
    """From `LLM.metrics`. Tokens are counted as the slots of their pages."""
    config = service.config
    pages, free = metrics["pages_total"], metrics["pages_free"]
    queried = metrics["prefix_query_tokens"]
    return pb.SchedulerLoad(
        num_running_reqs=metrics["running"], num_waiting_reqs=metrics["waiting"],
        num_total_reqs=metrics["running"] + metrics["waiting"], num_used_tokens=(pages - free) * config.page_size,
        max_total_num_tokens=pages * config.page_size, token_usage=(pages - free) / pages,
        cache_hit_rate=metrics["prefix_hit_tokens"] / queried if queried else 0.0,
        utilization=metrics["running"] / config.max_num_seqs, max_running_requests=config.max_num_seqs,
        num_waiting_uncached_tokens=service.num_waiting_tokens, gen_throughput=service.generation_rate)


def tokenizer_zip(tokenizer: Tokenizer) -> bytes:
    """What a gateway needs to build the tokenizer, the same bytes each time."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(Path(directory))
        files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    if "default" in tokenizer.chat_templates:
        files["chat_template.jinja"] = tokenizer.chat_templates["default"].encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)  # ZipInfo: a date of its own
    return packed.getvalue()


class _Completion:
    """What one completion has sent so far; GenerateComplete repeats it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs = pb.OutputLogProbs()
        self.last: StreamEvent | None = None


async def _answer(stream: RequestStream, context: grpc.aio.ServicerContext, params: SamplingParams,
                  streaming: bool) -> None:
    """Sends chunks if `streaming`, and at the end one GenerateComplete for each completion: only then is it known
    how much of the prompt the prefix cache had."""
    completions = [_Completion() for _ in range(params.n)]
    prompt_tokens = len(stream.prompt_token_ids)
    async with stream:
        async for event in stream:
            completion = completions[event.index]
            logprobs = None
            if event.logprobs is not None:
                assert params.logprobs is not None
                logprobs = output_logprobs(event.token_ids, event.logprobs, params.logprobs)
                completion.logprobs.MergeFrom(logprobs)
            completion.token_ids += event.token_ids
            if event.finish_reason is not None:
                completion.last = event
            if streaming and event.token_ids:
                await context.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(
                    token_ids=event.token_ids, prompt_tokens=prompt_tokens,
                    completion_tokens=len(completion.token_ids), output_logprobs=logprobs, index=event.index)))
            if event.output is not None:
                for index, completion in enumerate(completions):
                    await context.write(pb.GenerateResponse(
                        complete=_complete(index, completion, event.output, params)))


def _complete(index: int, completion: _Completion, output: RequestOutput,
              params: SamplingParams) -> pb.GenerateComplete:
    assert completion.last is not None
    message = pb.GenerateComplete(
        output_ids=completion.token_ids, finish_reason=completion.last.finish_reason,
        prompt_tokens=len(output.prompt_token_ids), completion_tokens=len(completion.token_ids),
        cached_tokens=output.num_cached_tokens, index=index,
        output_logprobs=None if params.logprobs is None else completion.logprobs)
    if output.prompt_logprobs is not None:
        assert params.prompt_logprobs is not None
        message.input_logprobs.CopyFrom(
            input_logprobs(output.prompt_token_ids, output.prompt_logprobs, params.prompt_logprobs))
    stop_reason = completion.last.stop_reason
    if isinstance(stop_reason, str):
        message.matched_stop_str = stop_reason
    elif stop_reason is not None:
        message.matched_token_id = stop_reason
    return message


def output_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs], k: int) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[position[token_id].logprob for token_id, position in zip(token_ids, positions)],
        token_ids=token_ids, top_logprobs=[_top_logprobs(position, k) for position in positions])


def input_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None],
                   k: int) -> pb.InputLogProbs:
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if position is None else position[token_id].logprob)
                        for token_id, position in zip(token_ids, positions)],
        token_ids=token_ids, top_logprobs=[_top_logprobs(position or {}, k) for position in positions])


def _top_logprobs(position: PositionLogprobs, k: int) -> pb.TopLogProbs:
    top = list(position.items())[:k]  # best first; behind them, perhaps, the position's own token
    return pb.TopLogProbs(values=[entry.logprob for _, entry in top], token_ids=[token_id for token_id, _ in top])


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("input")
    if kind is None:
        raise RequestError("the request has no input; give tokenized or text", "prompt")
    return request.text if kind == "text" else {"prompt_token_ids": request.tokenized.input_ids}


def _check_served(request: pb.GenerateRequest) -> None:
    present = {field.name for field, _ in request.ListFields()}
    for name in _NOT_SERVED:
        if name in present:
            raise UnimplementedError(f"{name} is not served; leave it out")
    if request.data_parallel_rank != 0:
        raise UnimplementedError(f"data_parallel_rank is {request.data_parallel_rank}, but there is only rank 0")


def _field_path(param: str) -> str:
    """From the name of a Python argument to the field of the message."""
    if param in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        return f"sampling_params.{param}"
    return _INPUT_FIELDS.get(param, param)
