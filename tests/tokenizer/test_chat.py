"""Chat templates: what goes in, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest

from jaxserve.errors import RequestError
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.tiny_tokenizers import TEMPLATE, byte_level, byte_level_backend

USER = [{"role": "user", "content": "hi"}]


def refused(messages, match, tokenizer=None, **kwargs):
    with pytest.raises(RequestError, match=match) as error:
        (tokenizer or byte_level()).render_chat(messages, **kwargs)
    return error.value.param


def test_the_generation_prompt_is_there_by_default():
    tokenizer = byte_level()
    assert tokenizer.render_chat(USER) == "<s><|user|>hi</s><|assistant|>"
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<s><|user|>hi</s>"


def test_continue_final_message_ends_right_after_the_text():
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    assert byte_level().render_chat(messages, continue_final_message=True).endswith("<|assistant|>The answer is")
    assert refused(messages, "exclude each other", continue_final_message=True,
                   add_generation_prompt=True) == "continue_final_message"


def test_missing_template():
    assert refused(USER, "no chat template", byte_level(templates={})) == "messages"


def test_a_given_template_wins():
    tokenizer = byte_level(templates={})
    assert tokenizer.render_chat(USER, chat_template="{{ messages[0].content }}!") == "hi!"


def test_named_templates():
    tokenizer = byte_level(templates={"default": "plain", "tool_use": "{{ tools | length }} tools"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=tools) == "1 tools"
    assert tokenizer.render_chat(USER, chat_template="tool_use", tools=tools) == "1 tools"
    assert tokenizer.render_chat(USER, tools=[]) == "plain"


@pytest.mark.parametrize("template", [
    "{{ raise_exception('roles must alternate') }}", "{{ messages[0]['content'] + 1 }}", "{{ nothing.at.all }}",
    "{% for %}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_the_requests_error(template):
    assert refused(USER, "does not accept these messages", byte_level(templates={"default": template})) == "messages"


def test_the_reason_the_template_gives_is_passed_on():
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('tool cannot be first') }}{% endif %}"
    refused([{"role": "tool", "content": "x"}], "tool cannot be first", byte_level(templates={"default": template}))


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% include '/etc/passwd' %}", "{{ messages.append(1) }}"])
def test_templates_cannot_reach_out_of_the_sandbox(template):
    refused(USER, "does not accept", byte_level(templates={"default": template}))


@pytest.mark.parametrize(("messages", "match"), [
    ([], "non-empty list"), ("hi", "non-empty list"), ({"role": "user", "content": "x"}, "non-empty list"),
    (["hi"], r"messages\[0\] must be an object"),
    ([{"content": "x"}], r"messages\[0\].role must be"), ([{"role": 3, "content": "x"}], r"\.role must be"),
    ([*USER, {"role": "", "content": "x"}], r"messages\[1\]\.role"),
    ([{"role": "user", "content": None}], r"\.content is missing"), ([{"role": "user"}], r"\.content is missing"),
    ([{"role": "user", "content": 5}], r"\.content must be a text or a list of text parts, got int"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "may list only parts"),
    ([{"role": "user", "content": ["hi"]}], "may list only parts"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
])
def test_malformed_messages(messages, match):
    refused(messages, match)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert byte_level().render_chat([{"role": "user", "content": parts}]) == "<s><|user|>a\nb</s><|assistant|>"


def test_tool_calls_need_no_content_and_their_arguments_become_an_object():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    template = "{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    tokenizer = byte_level(templates={"default": template})
    assert tokenizer.render_chat([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "False 2"


def test_further_variables_reach_the_template():
    tokenizer = byte_level(templates={"default": "{{ enable_thinking }}"})
    assert tokenizer.render_chat(USER, enable_thinking=False) == "False"
    assert refused(USER, "documents cannot be given", tokenizer, documents=[]) == "chat_template_kwargs"


def test_lone_surrogates_in_messages():
    tokenizer = byte_level()
    with pytest.raises(RequestError, match="lone surrogate") as error:
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "\ud800"}]), param="messages")
    assert error.value.param == "messages"


def test_templates_in_files_of_their_own(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    stored = [{"name": "default", "template": "old"}, {"name": "rag", "template": "rag"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": TEMPLATE, "rag": "rag", "tool_use": "tools"}


def test_the_advice_to_install_torch_is_not_shown(capfd):
    byte_level().render_chat(USER)
    assert "PyTorch" not in "".join(capfd.readouterr())
    filters = list(logging.getLogger("transformers").filters)
    byte_level().render_chat(USER)
    assert logging.getLogger("transformers").filters == filters
