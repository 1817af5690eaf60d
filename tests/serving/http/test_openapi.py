"""The OpenAPI document is true: of what is taken, and of what is answered."""

from __future__ import annotations

import openapi_spec_validator
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.serving.http.app import Endpoints, HttpOptions
from jaxserve.serving.http.errors import ApiError
from jaxserve.serving.http.openapi import ANSWERS, OPERATIONS, document
from jaxserve.serving.http.requests import (
    CHAT,
    COMPLETION,
    TOKENIZE,
    chat_request,
    completion_request,
    tokenize_request,
)
from jaxserve.serving.http.responses_request import RESPONSES, responses_request
from tests.serving.http.conftest import TIMEOUT

MESSAGES = [{"role": "user", "content": "Hi"}]
READERS = {
    "CompletionRequest": (COMPLETION, {"prompt": "Hi"}, lambda body: completion_request(body, "tiny")),
    "ChatRequest": (CHAT, {"messages": MESSAGES}, lambda body: chat_request(body, "tiny", trust_templates=True)),
    "ResponsesRequest": (RESPONSES, {"input": "Hi"}, lambda body: responses_request(body, "tiny")),
    "TokenizeRequest": (TOKENIZE, {"prompt": "Hi"}, lambda body: tokenize_request(body, "tiny", trust_templates=True)),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(
        ["", "a", "text", "auto", "none", "user", "input_text", 2**31, -(2**70), 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "format", "effort", "1", "x", "include_usage"]), inner,
        max_size=3),
    max_leaves=6)


@pytest.fixture(scope="module")
def schemas() -> dict[str, Draft202012Validator]:
    components = document()["components"]["schemas"]
    for schema in components.values():
        Draft202012Validator.check_schema(schema)
    return {name: Draft202012Validator(schema) for name, schema in components.items()}


def test_the_document_is_valid_and_served(http):
    served = http.get("/openapi.json").json()
    assert served == document()
    openapi_spec_validator.validate(served)


def test_every_route_is_described(server):
    endpoints = Endpoints(server.service, None, HttpOptions())
    routes = {(method.lower(), route.path.replace(":path}", "}")) for route in endpoints.routes()
              for method in route.methods - {"HEAD"}}
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}


def test_every_sampling_option_is_a_field():
    options = set(SamplingParams.__dataclass_fields__) - {"detokenize"}
    assert options <= COMPLETION.fields.keys() and options <= CHAT.fields.keys()
    assert options - {"n", "max_tokens", "logprobs", "prompt_logprobs"} <= RESPONSES.fields.keys()


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_the_schema_does_not_admit_is_refused(schemas, name, data):
    table, body, read = READERS[name]
    field = data.draw(st.sampled_from([*table.fields, "nonsense"]))
    body = body | {field: data.draw(JSON)}
    try:
        read(body)
    except (ApiError, RequestError):
        return
    schemas[name].validate(body)


@pytest.mark.parametrize("name", READERS)
def test_what_a_field_is_by_default_is_admitted(schemas, name):
    table, body, read = READERS[name]
    for field, description in schemas[name].schema["properties"].items():
        for value in ([description["default"]] if "default" in description else []) + [
                value for value in description.get("enum", ()) if value is not None]:
            given_body = body | {field: value}
            schemas[name].validate(given_body)
            read(given_body)
        if not table.fields[field].required:
            read({field: None} | body)


@pytest.mark.parametrize(("path", "answer", "body"), [
    ("/v1/completions", "Completion", {"prompt": ["a", "bc"], "n": 2}),
    ("/v1/completions", "Completion", {"prompt": "a", "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", "Completion", {"prompt": "a", "prompt_logprobs": 1}),
    ("/v1/completions", "Completion", {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 0}),
    ("/v1/chat/completions", "ChatCompletion", {"messages": MESSAGES, "n": 2}),
    ("/v1/chat/completions", "ChatCompletion", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2,
                                                "return_token_ids": True, "prompt_logprobs": 0}),
    ("/v1/responses", "Response", {"input": "Hi", "max_tokens": None, "max_output_tokens": 3}),
    ("/v1/responses", "Response", {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1,
                                   "max_tokens": None, "max_output_tokens": 3, "instructions": "x"}),
    ("/tokenize", "Tokens", {"prompt": "a", "return_token_strs": True, "max_tokens": None}),
    ("/detokenize", "Text", {"tokens": [97], "max_tokens": None}),
])
def test_answers_are_as_described(http, schemas, path, answer, body):
    body = {name: value for name, value in ({"max_tokens": 3} | body).items() if value is not None}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    schemas[answer].validate(response.json())
    refusal = http.post(path, json=body | {"nonsense": 1})
    assert refusal.status_code == 400
    schemas["Error"].validate(refusal.json())


def test_other_answers_are_as_described(http, schemas):
    for operation in OPERATIONS:
        if operation.method == "get" and operation.answer in ANSWERS:
            schemas[operation.answer].validate(http.get(operation.path.format(model="tiny")).json())


# -- fuzzing with a client that knows only the document


@pytest.mark.slow
def test_fuzzed_requests_get_described_answers(server):
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # What a schema admits may still be too long, or need another field.
    excluded = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
    count = 0

    def check(case) -> None:
        nonlocal count
        count += 1
        case.call_and_validate(base_url=server.url, excluded_checks=excluded, timeout=TIMEOUT)

    for operation in (result.ok() for result in schema.get_all_operations()):
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
                continue  # there is nothing to get wrong
            run = settings(max_examples=25, deadline=None, database=None, derandomize=True,
                           suppress_health_check=list(HealthCheck))(
                given(case=operation.as_strategy(generation_mode=mode))(check))
            run()
    assert count > 200
