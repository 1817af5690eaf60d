"""What is wrong with a request is said in the API's own form, and costs nobody else anything."""

from __future__ import annotations

import gc
import json

import openai
import pytest

from jaxserve.serving.http import fields
from tests.serving.http.conftest import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def refused(http, path, body, status=400) -> dict:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=content)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.fixture(autouse=True)
def the_next_request_is_served(http):
    yield
    assert http.post(COMPLETIONS, json={"prompt": "ok", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"\xff", b'{"temperature": NaN}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
def test_bodies_that_are_no_json_object(http, path, body):
    refused(http, path, body)


@pytest.mark.parametrize(("field", "value"), [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 1.5), ("max_tokens", "5"),  # case 45
    ("temperature", -1), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.1),
    ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 1000), ("n", 1.0), ("seed", 2**70),
    ("stop", [""]), ("stop", 5), ("stop", ["\udfff"]), ("stop", ["x"] * 100),  # cases 10, 53
    ("logit_bias", {"191222": -100}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}),  # case 30
    ("logit_bias", {"1": 101}), ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", [1]), ("logit_bias", {"²": 1}),
    ("allowed_token_ids", []), ("allowed_token_ids", [272]), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("bad_words", 5), ("stop_token_ids", [-1]), ("priority", 1), ("cache_salt", ""), ("min_tokens", 10**6),
    ("stream", "yes"), ("ignore_eos", 1), ("stream_options", {}), ("stream_options", {"include_usage": True}),
    ("frequenzy_penalty", 1), ("response_format", {"type": "json_object"}), ("tools", [{"type": "function"}]),
    ("guided_json", "{}"), ("structured_outputs", {"regex": "a"}), ("best_of", 3), ("prompt_logprobs", 21),
    ("tool_choice", "required"), ("suffix", "x"), ("truncate_prompt_tokens", 0), ("return_token_ids", 1)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_wrong_fields(http, path, field, value):
    body = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": MESSAGES}
    error = refused(http, path, body | {field: value})
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or "") or field in error["message"]


@pytest.mark.parametrize(("field", "value"), [
    ("user", "me"), ("metadata", {"a": "b"}), ("store", False), ("tools", []), ("tool_choice", "none"),
    ("response_format", {"type": "text"}), ("logit_bias", {}), ("stop", []), ("stop", None), ("top_k", 10**6),
    ("top_k", -1), ("temperature", 1e-40), ("service_tier", "auto"), ("best_of", 1), ("stop_token_ids", []),
    ("response_format", None), ("seed", 2**63)])
def test_fields_that_ask_for_nothing_unusual(http, field, value):
    """case 107, and what clients send by habit"""
    assert http.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1, field: value}).status_code == 200
    if field != "best_of":
        assert http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, field: value}).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, 5, [1, "a"], [["a"]], [True], [-1], [272], "a\ud800",
                                    {"a": 1}, [None]])
def test_wrong_prompts(http, prompt):
    """cases 42, 53"""
    refused(http, COMPLETIONS, {"prompt": prompt})
    refused(http, COMPLETIONS, {"prompt": prompt, "stream": True})


@pytest.mark.parametrize("messages", [
    [], None, "Hi", [5], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}],
    [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]])
def test_wrong_messages(http, messages):
    """cases 52, 53"""
    refused(http, CHAT, {"messages": messages})
    refused(http, CHAT, {"messages": messages, "stream": True})


@pytest.mark.parametrize(("body", "param"), [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"), ({"logprobs": 3}, "logprobs")])
def test_wrong_logprobs_of_chats(http, body, param):
    """case 34"""
    error = refused(http, CHAT, {"messages": MESSAGES} | body)
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_too_many_tokens_of_chats(http, field):
    error = refused(http, CHAT, {"messages": MESSAGES, field: 10**6})
    assert error["param"] == field and error["message"].startswith(f"{field} is 1000000")


def test_which_prompt_is_wrong(http):
    for prompts in (["a", "x" * 1280], [[1], [2] * 1280], ["a", ""], [[1], [272]]):
        error = refused(http, COMPLETIONS, {"prompt": prompts})
        assert error["message"].startswith("prompt[1]: "), error
        alone = refused(http, COMPLETIONS, {"prompt": prompts[1:]})
        assert error["message"] == f"prompt[1]: {alone['message']}"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_at_the_limit(http, stream):
    """cases 43, 44: streamed or not, the refusal is a status and no event."""
    for length, status in ((126, 200), (127, 200), (128, 400), (129, 400), (1280, 400)):
        answer = http.post(COMPLETIONS, json={"prompt": "x" * length, "max_tokens": 1, "stream": stream})
        assert answer.status_code == status
    error = refused(http, COMPLETIONS, {"prompt": "x" * 1280, "stream": stream})
    assert "1280 tokens" in error["message"] and "128" in error["message"]
    refused(http, CHAT, {"messages": [{"role": "user", "content": "x" * 1280}], "stream": stream})
    refused(http, COMPLETIONS, {"prompt": "x" * 123, "max_tokens": 6, "stream": stream})


def test_nul_is_text(http):
    """case 53"""
    answer = http.post(COMPLETIONS, json={"prompt": "a\0b", "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == 3


def test_errors_that_quote_surrogates_are_json(http):
    assert "udfff" in refused(http, COMPLETIONS, {"prompt": "a", "\udfff": 1})["message"]


def test_unknown_models(http, client):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES}), ("/tokenize", {"prompt": "a"})):
        error = refused(http, path, body | {"model": "gpt"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    refused(http, COMPLETIONS, {"prompt": "a", "model": 5})


def test_unknown_paths_and_methods(http):
    """case 97"""
    refused(http, "/v1/nothing", {}, 404)
    answer = http.get(COMPLETIONS)
    assert answer.status_code == 405 and answer.json()["error"]["message"]
    assert answer.headers["allow"] == "POST"


def test_one_bad_prompt_refuses_the_call(server, http):
    refused(http, COMPLETIONS, {"prompt": ["good", "x" * 1280]})
    refused(http, COMPLETIONS, {"prompt": ["a"] * 1000, "n": 2})
    server.wait_until_idle()  # the good one may have begun
    assert http.get("/load").json()["server_load"] == 0


NESTED = b'[' * 900 + b']' * 900


@pytest.mark.parametrize("message", [
    {"role": "user", "content": "a", "tool_calls": 5}, {"role": "assistant", "content": "a", "tool_calls": [5]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, {"role": ["user"]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, None]}, {"role": "user", "content": {"text": "a"}},
    {"role": "", "content": "a"}, {"role": "user", "content": [[]]}, {"role": "\udfff", "content": "a"}])
def test_messages_that_break_templates(http, message):
    for path in (CHAT, "/tokenize"):
        answer = http.post(path, content=json.dumps({"messages": [message]}).encode())
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [
    b'"chat_template_kwargs": {"x": ' + NESTED + b'}', b'"metadata": {"a": ' + NESTED + b'}', b'"stop": ' + NESTED,
    b'"logit_bias": {"1": 1e400}', b'"temperature": 1e400', b'"max_completion_tokens": 1e400', b'"n": 1e400',
    b'"logit_bias": {"1": ' + NESTED + b'}', b'"user": ' + NESTED, b'"nonsense": ' + NESTED,
    b'"seed": ' + b"9" * 4000, b'"chat_template_kwargs": {"messages": []}', b'"chat_template_kwargs": {"tools": [1]}',
    b'"chat_template_kwargs": {"\\udfff": 1}', b'"chat_template_kwargs": {"bos_token": "\\udfff"}',
    b'"user": 5', b'"stop": {"a": 1}', b'"stream_options": {"include_usage": 1}, "stream": true',
    b'"stream_options": {"x": true}, "stream": true', b'"cache_salt": "\\udfff"', b'"bad_words": ["\\udfff"]'])
def test_nasty_fields(http, fields):
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], ' + fields + b"}"
    answer = http.post(CHAT, content=body)
    # What a template does not use may be anything.
    assert answer.status_code == 400 or (answer.status_code == 200 and b"kwargs" in fields), answer.text
    if answer.status_code == 400:
        assert len(answer.content) < 2000 and answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models/%00", "/v1/models/%ff", "/v1/responses/%2e%2e/x", "/v1//models",
                                  "/v1/responses/", "/v1/models/", "/%E2%82%AC"])
def test_nasty_paths(http, path):
    answer = http.get(path)
    assert answer.status_code == 404 and answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", [
    {"Content-Type": "text/plain"}, {"Content-Type": "nonsense"}, {"Accept": "image/png"},
    {"Content-Encoding": "identity"}])
def test_a_body_is_json_whatever_its_headers_say(http, headers):
    """curl -d says that it is a form."""
    body = json.dumps({"prompt": "ok", "max_tokens": 1}).encode()
    assert http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_bodies_are_not_decompressed(http, path, encoding):
    answer = http.post(path, content=b"{}", headers={"Content-Encoding": encoding})
    assert answer.status_code == 415 and encoding in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"


ORIGIN = "https://example.org"


def test_web_pages_of_others_cannot_send_what_a_form_could(server, http):
    body = json.dumps({"prompt": "ok", "max_tokens": 1}).encode()

    def status(client, origin, kind) -> int:
        headers = {"Origin": origin} | ({} if kind is None else {"Content-Type": kind})
        return client.post(COMPLETIONS, content=body, headers=headers).status_code

    for origin in (ORIGIN, "null", server.url.replace("127.0.0.1", "localhost")):
        for kind in ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "", None):
            assert status(http, origin, kind) == 415
        # A page cannot send this without asking first, and is refused then.
        assert status(http, origin, "application/json; charset=utf-8") == 200
    assert status(http, server.url, "text/plain") == 200, "its own page"
    for allowed in (ORIGIN, "*"):
        with serving(server.llm, cors_allow_origins=[allowed]) as open_to, open_to.http() as other:
            assert status(other, ORIGIN, "text/plain") == 200


def test_unknown_ids_have_no_text(server, http):
    known = server.llm.tokenizer.vocab_size
    assert http.post("/detokenize", json={"tokens": [97, known - 1]}).status_code == 200
    for unknown in (known, 10**6):  # the model has some rows more
        error = refused(http, "/detokenize", {"tokens": [97, unknown]})
        assert error["param"] == "tokens" and f"{unknown}, but the vocabulary ends at {known - 1}" in error["message"]
    answer = http.post(COMPLETIONS, json={"prompt": [97, known], "echo": True, "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == "a"


@pytest.mark.parametrize(("path", "body", "param"), [
    (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt"), (COMPLETIONS, {"prompt": ["a", "x" * 10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 10**6}, "prompt"), (COMPLETIONS, {"prompt": [[1], [1] * 10**6]}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 2**21, "truncate_prompt_tokens": 5}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 10**6]}, "bad_words"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}, "messages"),
    ("/v1/responses", {"input": "x" * 10**6}, "input"),
    ("/tokenize", {"prompt": "x" * 2**21}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2**21}]}, "messages")])
def test_megabytes_are_refused_by_their_length(http, path, body, param):
    error = refused(http, path, body)
    assert error["param"] == param and ("characters" in error["message"] or "1000000 tokens" in error["message"])


@pytest.mark.parametrize("collecting", [True, False])
def test_reading_json_leaves_the_garbage_collector_as_it_was(collecting):
    text, before = b"[" + b"[]," * (1 << 19) + b"[]]", gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with fields._no_collection():
            assert len(fields.parse_json(text)) == (1 << 19) + 1
            assert not gc.isenabled(), "the other one still reads"
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_a_long_text_may_be_tokenized_and_cut(http):
    """Longer than the context: it is for the client to see how long, or for the server to take its end."""
    text = "x" * 10_000
    assert http.post("/tokenize", json={"prompt": text}).json()["count"] == 10_000
    answer = http.post(COMPLETIONS, json={"prompt": text, "truncate_prompt_tokens": 5, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == 5
