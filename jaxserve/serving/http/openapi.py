"""The OpenAPI 3.1 document. Its request bodies are the tables that read them, so they cannot differ from what is taken.

Answers are described here, and strictly: a field that is not described is a fault, which the tests would find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jaxserve
from jaxserve.serving.http.fields import Schema, Table, nullable
from jaxserve.serving.http.requests import CHAT, COMPLETION, DETOKENIZE, TOKEN_IDS_SCHEMA, TOKENIZE
from jaxserve.serving.http.responses_request import RESPONSES

INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def _const(value: Any) -> Schema:
    return {"const": value}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _object(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": required | (optional or {}),
            "required": list(required)}


# -- answers

ERROR = _object(error=_object(message=STRING, type=STRING, param=nullable(STRING), code=nullable(STRING)))

_USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
                 prompt_tokens_details=_object(cached_tokens=COUNT))
_FINISH = {"enum": ["stop", "length", "abort"]}
_STOP_REASON = {"type": ["string", "integer", "null"]}
_PROMPT_LOGPROBS = _list(nullable(_map(_object(logprob=NUMBER, rank=INTEGER, decoded_token=nullable(STRING)))))
_IDS = {"token_ids": TOKEN_IDS_SCHEMA, "prompt_token_ids": TOKEN_IDS_SCHEMA, "prompt_logprobs": _PROMPT_LOGPROBS}

_COMPLETION_LOGPROBS = _object(
    tokens=_list(STRING), token_logprobs=_list(nullable(NUMBER)), top_logprobs=_list(nullable(_map(NUMBER))),
    text_offset=_list(COUNT))
COMPLETION_ANSWER = _object(
    id=STRING, object=_const("text_completion"), created=COUNT, model=STRING, usage=_USAGE,
    choices=_list(_object(_IDS, index=COUNT, text=STRING, logprobs=nullable(_COMPLETION_LOGPROBS),
                          finish_reason=_FINISH, stop_reason=_STOP_REASON)))

_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": _list(COUNT)}
_TOKEN_LOGPROBS = _list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN))))
CHAT_ANSWER = _object(
    {name: _IDS[name] for name in ("prompt_token_ids", "prompt_logprobs")},
    id=STRING, object=_const("chat.completion"), created=COUNT, model=STRING, usage=_USAGE,
    choices=_list(_object(
        {"token_ids": TOKEN_IDS_SCHEMA}, index=COUNT,
        message=_object(role=_const("assistant"), content=STRING, refusal=NULL),
        logprobs=nullable(_object(content=_TOKEN_LOGPROBS, refusal=NULL)), finish_reason=_FINISH,
        stop_reason=_STOP_REASON)))

_RESPONSES_ITEM = _object(
    id=STRING, type=_const("message"), role=_const("assistant"), status={"enum": ["completed", "incomplete"]},
    content=_list(_object(type=_const("output_text"), text=STRING, annotations=_list(_object()),
                          logprobs=_TOKEN_LOGPROBS)))
RESPONSES_ANSWER = _object(
    id=STRING, object=_const("response"), created_at=COUNT, completed_at=nullable(COUNT), model=STRING,
    status={"enum": ["completed", "incomplete"]}, output=_list(_RESPONSES_ITEM), error=NULL,
    incomplete_details=nullable(_object(reason=nullable(_const("max_output_tokens")))),
    usage=_object(
        input_tokens=COUNT, input_tokens_details=_object(cached_tokens=COUNT, cache_write_tokens=COUNT),
        output_tokens=COUNT, output_tokens_details=_object(reasoning_tokens=COUNT), total_tokens=COUNT),
    instructions=nullable(STRING), max_output_tokens=nullable(COUNT), metadata=_map(STRING), temperature=NUMBER,
    top_p=NUMBER, top_logprobs=COUNT, background=_const(False), parallel_tool_calls=FLAG, previous_response_id=NULL,
    store=_const(False), text=_object(format=_object(type=_const("text"))), tool_choice=_const("auto"),
    tools=_list(_object()), truncation=_const("disabled"))

MODEL = _object(
    id=STRING, object=_const("model"), created=COUNT, owned_by=STRING, root=STRING, parent=NULL, max_model_len=COUNT)
TOKENIZE_ANSWER = _object({"token_strs": _list(STRING)}, count=COUNT, max_model_len=COUNT, tokens=TOKEN_IDS_SCHEMA)
STATUS = _object(status=STRING)

ANSWERS = {
    "Error": ERROR, "Completion": COMPLETION_ANSWER, "ChatCompletion": CHAT_ANSWER, "Response": RESPONSES_ANSWER,
    "Model": MODEL, "Models": _object(object=_const("list"), data=_list(MODEL)), "Tokens": TOKENIZE_ANSWER,
    "Text": _object(prompt=STRING), "Status": STATUS, "Version": _object(version=STRING),
    "Load": _object(server_load=COUNT, waiting=COUNT, waiting_tokens=COUNT),
}

# -- operations


@dataclass(frozen=True)
class Operation:
    """What one method of one path does.

    Attributes:
        answer: its name in ANSWERS, or a media type if it is no JSON. None: it only refuses.
        body: the fields that it reads.
        streams: it can answer with server-sent events.
        parameter: the one in the path.
        unready: 503 has the same form as 200.
    """

    method: str
    path: str
    summary: str
    answer: str | None
    body: Table | None = None
    streams: bool = False
    parameter: str | None = None
    unready: bool = False


_STORED = "/v1/responses/{response_id}"
OPERATIONS: Sequence[Operation] = (
    Operation("post", "/v1/completions", "Continue prompts.", "Completion", COMPLETION, streams=True),
    Operation("post", "/v1/chat/completions", "Answer a conversation.", "ChatCompletion", CHAT, streams=True),
    Operation("post", "/v1/responses", "Answer a conversation, in the newer form.", "Response", RESPONSES,
              streams=True),
    Operation("get", _STORED, "Answers are not stored: 404.", None, parameter="response_id"),
    Operation("delete", _STORED, "Answers are not stored: 404.", None, parameter="response_id"),
    Operation("post", _STORED, "Answers are not stored: 404.", None, parameter="response_id"),
    Operation("get", "/v1/models", "The served model, as a list.", "Models"),
    Operation("get", "/v1/models/{model}", "The served model.", "Model", parameter="model"),
    Operation("post", "/tokenize", "The token ids of a text or a conversation.", "Tokens", TOKENIZE),
    Operation("post", "/detokenize", "The text of token ids.", "Text", DETOKENIZE),
    Operation("get", "/health", "Whether requests are taken.", "Status", unready=True),
    Operation("get", "/ping", "The same.", "Status", unready=True),
    Operation("post", "/ping", "The same.", "Status", unready=True),
    Operation("get", "/load", "What runs and what waits.", "Load"),
    Operation("get", "/version", "Of jaxserve.", "Version"),
    Operation("get", "/metrics", "For Prometheus.", "text/plain"),
    Operation("get", "/openapi.json", "This document.", "application/json"),
)

EVENTS = ("With stream=true: server-sent events. Those of completions and chats are chunks in the API's form, and end "
          "with [DONE]; those of responses have the API's types, and end with response.completed, .incomplete or "
          ".failed.")


def document() -> Schema:
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    tables = {operation.body.name: operation.body.schema for operation in OPERATIONS if operation.body is not None}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__, "license": {
            "name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": tables | ANSWERS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # whether a key is needed is the server's configuration
    }


def _operation(operation: Operation) -> Schema:
    answers: dict[str, Any] = {}
    if operation.answer is not None:
        content = _content(operation.answer)
        if operation.streams:
            content["text/event-stream"] = {"schema": STRING | {"description": EVENTS}}
        answers["200"] = {"description": operation.summary, "content": content}
    if operation.unready:
        answers["503"] = {"description": "Starting, draining or failed.", "content": _content("Status")}
    errors = {"content": _content("Error")}
    answers |= {"4XX": {"description": "The request is at fault."} | errors,
                "5XX": {"description": "The server is at fault, or not ready."} | errors}
    described: Schema = {
        "operationId": operation.method + operation.path.translate(str.maketrans("/.{}", "____")),
        "summary": operation.summary, "responses": answers}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body.name)}
    if operation.parameter is not None:
        described["parameters"] = [{"name": operation.parameter, "in": "path", "required": True, "schema": STRING}]
    return described


def _content(name: str) -> Schema:
    """Of a schema in the components, or of a media type."""
    if "/" in name:
        return {name: {"schema": {"type": "object"} if name.endswith("json") else STRING}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
