"""jaxserve.v1.Inference: text in, text out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import grpc

from jaxserve.engine.processor import Prompt
from jaxserve.errors import RequestError
from jaxserve.outputs import PositionLogprobs, RequestOutput, StreamEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.grpc.calls import Calls, check_request_id
from jaxserve.serving.logs import AccessLog
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.request_stream import RequestStream
from jaxserve.serving.service import Service

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} | {"structured_outputs"}
_CONVERSATION_FIELDS = {"tools": "tools_json", "chat_template_kwargs": "chat_template_kwargs_json"}
_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH, "abort": pb.FINISH_REASON_ABORT}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Answers over a Service. Responses are written, not yielded: so a cancelled call is interrupted here, where
    its request is ended, and not inside grpc with our generator left to the garbage collector."""

    def __init__(self, service: Service, access_log: AccessLog | None = None):
        self._service = service
        self.calls = Calls(_field_path, access_log)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with self.calls.answer(context):
            stream = await self._service.generate(
                _prompt(request), sampling_params(request.sampling), request_id=check_request_id(request.request_id),
                deadline=context.time_remaining())
            await _answer(stream, context, request.return_prompt_token_ids)

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        async with self.calls.answer(context):
            stream = await self._service.chat(
                _messages(request.conversation), sampling_params(request.sampling),
                template=_template_options(request.conversation), request_id=check_request_id(request.request_id),
                deadline=context.time_remaining())
            await _answer(stream, context, request.return_prompt_token_ids)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with self.calls.answer(context):
            if request.HasField("conversation"):
                if request.HasField("add_special_tokens"):
                    raise RequestError("add_special_tokens is for texts; a conversation's special tokens come from "
                                       "the chat template", "add_special_tokens")
                ids = await self._service.tokenize_chat(_messages(request.conversation),
                                                        _template_options(request.conversation))
            else:
                if not request.HasField("text"):
                    raise RequestError("there is nothing to tokenize; give text or conversation", "text")
                add = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._service.tokenize(request.text, add_special_tokens=add, must_fit=False)
            return pb.TokenizeResponse(token_ids=ids, max_model_len=self._service.config.max_model_len)
        raise AssertionError("answer() ends a call that has failed")

    async def Detokenize(self, request: pb.DetokenizeRequest,
                         context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        async with self.calls.answer(context):
            text = await self._service.detokenize(request.token_ids, param="token_ids",
                                                  skip_special_tokens=request.skip_special_tokens)
            return pb.DetokenizeResponse(text=text)
        raise AssertionError("answer() ends a call that has failed")

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with self.calls.answer(context):
            for request_id in request.request_ids:
                self._service.abort(request_id)
        return pb.AbortResponse()


async def _answer(stream: RequestStream, context: grpc.aio.ServicerContext, return_prompt_token_ids: bool) -> None:
    prompt = pb.PromptInfo(request_id=stream.request_id, num_tokens=len(stream.prompt_token_ids),
                           token_ids=stream.prompt_token_ids if return_prompt_token_ids else ())
    async with stream:
        async for event in stream:
            if event.finish_reason != "error":  # the error itself comes with the last completion's event
                await context.write(response(event, prompt))
                prompt = None


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """The fields that are there; the others keep their defaults. Raises RequestError."""
    if message.HasField("structured_outputs"):
        raise RequestError("structured outputs are not implemented; leave structured_outputs out",
                           "structured_outputs")
    options = {}
    for field, value in message.ListFields():
        options[field.name] = dict(value) if field.name == "logit_bias" else value
    for name in ("allowed_token_ids", "bad_words", "stop", "stop_token_ids"):
        if name in options:
            options[name] = list(options[name])
    return SamplingParams(**options)


def response(event: StreamEvent, prompt: pb.PromptInfo | None) -> pb.GenerateResponse:
    """One message of a stream; `prompt` for the first."""
    message = pb.GenerateResponse(index=event.index, text=event.text, token_ids=event.token_ids, prompt=prompt,
                                  logprobs=map(_position_logprobs, event.logprobs or ()))
    if event.finish_reason is not None:
        message.finish.reason = _FINISH_REASONS[event.finish_reason]
        if isinstance(event.stop_reason, str):
            message.finish.stop_string = event.stop_reason
        elif event.stop_reason is not None:
            message.finish.stop_token_id = event.stop_reason
    if event.output is not None:
        _add_output(message, event.output)
    return message


def _add_output(message: pb.GenerateResponse, output: RequestOutput) -> None:
    message.usage.prompt_tokens = len(output.prompt_token_ids)
    message.usage.completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    message.usage.cached_tokens = output.num_cached_tokens
    message.timings.SetInParent()
    for field in dataclasses.fields(output.timings):
        if (seconds := getattr(output.timings, field.name)) is not None:
            setattr(message.timings, field.name, seconds)
    message.prompt_logprobs.extend(map(_position_logprobs, output.prompt_logprobs or ()))


def _position_logprobs(position: PositionLogprobs | None) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(entries=[
        pb.Logprob(token_id=token_id, logprob=entry.logprob, rank=entry.rank, decoded=entry.decoded)
        for token_id, entry in (position or {}).items()])


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise RequestError("the request has no prompt; give text or token_ids", "prompt")
    return request.text if kind == "text" else {"prompt_token_ids": request.token_ids.ids}


def _messages(conversation: pb.Conversation) -> list[dict[str, Any]]:
    messages = []
    for i, message in enumerate(conversation.messages):
        fields = _json(message.extra_json, dict, f"messages[{i}].extra_json") or {}
        fields["role"] = message.role
        if message.HasField("content"):
            fields["content"] = message.content
        messages.append(fields)
    return messages


def _template_options(conversation: pb.Conversation) -> dict[str, Any]:
    return {
        "add_generation_prompt":
            conversation.add_generation_prompt if conversation.HasField("add_generation_prompt") else None,
        "continue_final_message": conversation.continue_final_message,
        "tools": _json(conversation.tools_json, list, "tools"),
        "chat_template_kwargs": _json(conversation.chat_template_kwargs_json, dict, "chat_template_kwargs"),
    }


def _json(text: str, kind: type[list[Any]] | type[dict[str, Any]], param: str) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not JSON: {error}", param) from None
    if not isinstance(value, kind):
        raise RequestError(f"{param} must be a JSON {'array' if kind is list else 'object'}", param)
    return value


def _field_path(param: str) -> str:
    """From the name of a Python argument to the field of the message."""
    if param in _SAMPLING_FIELDS:
        return f"sampling.{param}"
    if param in _CONVERSATION_FIELDS:
        return f"conversation.{_CONVERSATION_FIELDS[param]}"
    if param.startswith("messages") or param in ("add_generation_prompt", "continue_final_message"):
        return f"conversation.{param}"
    return param
