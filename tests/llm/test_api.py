"""The forms of prompts and options, and what comes back."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, ConfigError, RequestError, SamplingParams
from tests.llm import tiny
from tests.llm.tiny import BOS, END_OF_TURN

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
USER = {"role": "user", "content": "hi"}


def test_forms_of_prompts(llm):
    ids = list(b"hello")
    forms = ["hello", ids, tuple(ids), np.array(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, jnp.array(ids),
             {"prompt_token_ids": np.array(ids)}]
    each = [llm.generate(form, PARAMS, use_tqdm=False)[0] for form in forms]
    together = llm.generate(forms, PARAMS, use_tqdm=False)
    lazily = llm.generate((form for form in forms), PARAMS, use_tqdm=False)
    for outputs in (each, together, lazily):
        assert [output.prompt_token_ids for output in outputs] == [ids] * 8
        assert [output.prompt for output in outputs] == ["hello", None, None, None, "hello", None, None, None]
        assert {output.text for output in outputs} == {each[0].text}


def test_no_prompts(llm):
    assert llm.generate([], PARAMS, use_tqdm=False) == []
    assert llm.chat([], PARAMS, use_tqdm=False) == []


@pytest.mark.parametrize("prompts", [
    5, np.array(5), jnp.array(5), None, 1.5, b"text", {9, 3, 200, 100}, frozenset({"a"}), {"prompt_token_ids": {9, 3}},
    {"prompt_token_ids": np.array([1.0, 2.0])}, {"prompt_token_ids": np.array([[1, 2]])}], ids=repr)
def test_what_is_no_prompt(llm, prompts):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, PARAMS, use_tqdm=False)


def test_params_for_each_prompt(llm):
    outputs = llm.generate(["a", "b"], [PARAMS, PARAMS.clone(max_tokens=2)], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 2]


def test_what_an_output_holds(llm):
    llm.reset_prefix_cache()
    first, second = (llm.generate(["x" * 20], PARAMS, use_tqdm=False)[0] for _ in range(2))
    assert (first.prompt, first.prompt_token_ids, first.finished, first.error) == (
        "x" * 20, [ord("x")] * 20, True, None)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    [completion] = first.outputs
    assert first.text == completion.text == tiny.tokenizer().decode(completion.token_ids)
    assert (completion.index, completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == (
        0, "length", None, 6)
    assert completion.logprobs is completion.cumulative_logprob is first.prompt_logprobs is None
    assert 0 < first.timings.queue <= first.timings.first_token <= first.timings.total
    assert first.request_id != second.request_id


def test_a_stream_adds_up_to_the_output(llm):
    events = list(llm.stream("hello", PARAMS.clone(n=2, temperature=1, seed=1)))
    output = events[-1].output
    for completion in output.outputs:
        own = [event for event in events if event.index == completion.index]
        assert "".join(event.text for event in own) == completion.text
        assert [token for event in own for token in event.token_ids] == completion.token_ids
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + ["length"]
    assert all(event.output is None for event in events[:-1])


def test_an_invalid_stream_fails_at_the_call(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.stream([])
    with pytest.raises(RequestError, match="messages"):
        llm.stream_chat([])


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], [{"prompt": "a"}]])
def test_a_stream_takes_one_prompt(llm, prompts):
    with pytest.raises(RequestError, match=rf"a stream takes one prompt, got a list of {len(prompts)}; .*generate"):
        llm.stream(prompts)


def test_a_stream_takes_one_conversation(llm):
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="a stream takes one conversation, got a list of 2; .*chat"):
        llm.stream_chat([chat, chat])


def test_progress_in_terminals_and_notebooks(llm, capsys, monkeypatch):
    llm.generate(["a"], PARAMS)
    assert capsys.readouterr().err == ""  # no terminal, no bar
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    llm.generate(["a", ""], PARAMS)
    error = capsys.readouterr().err
    assert "2/2" in error and "tok/s" in error
    llm.generate(["a"], PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setitem(sys.modules, "ipykernel", None)  # a notebook shows bars, though it is no terminal
    llm.generate(["a"], PARAMS)
    assert "1/1" in capsys.readouterr().err


# -- chat


def prompt_of(output) -> str:
    return tiny.tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False,
                                   spaces_between_special_tokens=False)


def test_chat(llm):
    [output] = llm.chat([USER], PARAMS, use_tqdm=False)
    assert prompt_of(output) == "<s>user: hi<|end|><s>assistant: "
    assert output.prompt_token_ids[0] == BOS and END_OF_TURN in output.prompt_token_ids
    assert list(llm.stream_chat([USER], PARAMS))[-1].output.text == output.text


def test_chat_with_several_conversations(llm):
    one, two = [USER], [USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "bye"}]
    outputs = llm.chat([one, [], two], PARAMS, use_tqdm=False)
    assert isinstance(outputs[1].error, RequestError)
    assert prompt_of(outputs[0]) == "<s>user: hi<|end|><s>assistant: "
    assert prompt_of(outputs[2]) == (
        "<s>user: hi<|end|><s>assistant: yes?<|end|><s>user: bye<|end|><s>assistant: ")
    assert outputs[0].text == llm.chat(one, PARAMS, use_tqdm=False)[0].text


def test_continuing_the_assistants_message(llm):
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    [output] = llm.chat(messages, PARAMS, continue_final_message=True, use_tqdm=False)
    assert prompt_of(output) == "<s>user: hi<|end|><s>assistant: The answer is"
    streamed = list(llm.stream_chat(messages, PARAMS, continue_final_message=True))[-1].output
    assert streamed.outputs == output.outputs
    with pytest.raises(RequestError, match="exclude each other"):
        llm.chat(messages, PARAMS, continue_final_message=True, add_generation_prompt=True, use_tqdm=False)


def test_another_template_and_its_variables(llm):
    template = "{{ greeting }}{% if tools %}{{ tools|length }}{% endif %} {{ messages[0].content }}"
    for call in (lambda **options: llm.chat([USER], PARAMS, use_tqdm=False, **options)[0],
                 lambda **options: list(llm.stream_chat([USER], PARAMS, **options))[-1].output):
        output = call(chat_template=template, chat_template_kwargs={"greeting": "hey"})
        assert prompt_of(output) == "hey hi"
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        assert prompt_of(call(chat_template=template, tools=[tool])) == "1 hi"
        with pytest.raises(RequestError, match="tools cannot be given as variables"):
            call(chat_template_kwargs={"tools": [tool]})


def test_chat_errors(llm):
    for messages in ([{}], [{"role": "user"}], [{"content": "x"}], "hi", USER, 3):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages, PARAMS, use_tqdm=False)


# -- without a tokenizer


def test_ids_without_a_tokenizer(make_llm, llm):
    with make_llm(tokenizer=None) as plain:
        params = PARAMS.clone(max_tokens=1)
        [output] = plain.generate([1, 2, 3], params, use_tqdm=False)
        assert output.text == ""
        assert output.outputs[0].token_ids == llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids
        for call in (lambda: plain.generate("text", use_tqdm=False), lambda: plain.chat([USER], use_tqdm=False),
                     lambda: plain.generate([1], stop="x", use_tqdm=False)):
            with pytest.raises(RequestError, match="tokenizer"):
                call()


# -- options of the engine


def test_defaults_come_from_the_checkpoint_unless_switched_off(tmp_path, xla_cache, dense):
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 9.0, "top_k": 1}))
    save_file(tiny.random_tensors(), tmp_path / "model.safetensors")
    tiny.tokenizer().save(tmp_path)
    options = tiny.ENGINE | {"compilation_cache_dir": xla_cache}
    with LLM(tmp_path, **options) as llm:
        [output] = llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True, use_tqdm=False)
        assert output.outputs[0].token_ids == dense.greedy([1, 2, 3], 8)
        [output] = llm.generate([1, 2, 3], max_tokens=8, top_k=0, ignore_eos=True, use_tqdm=False)
        assert output.outputs[0].token_ids != dense.greedy([1, 2, 3], 8)
    with LLM(tmp_path, use_generation_config=False, **options) as llm:
        [output] = llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True, use_tqdm=False)
        assert output.outputs[0].token_ids != dense.greedy([1, 2, 3], 8)


@pytest.mark.parametrize(("options", "message"), [
    ({"page_sise": 8}, r"unknown option.s. page_sise .did you mean page_size"),
    ({"max_seq": 8}, "did you mean max_num_seqs"), ({"zzz": 1}, "unknown option.*zzz; known: .*page_size"),
    ({"page_size": 12}, "power of two"), ({"dtype": "int8"}, "dtype"),
    ({"max_model_len": 513}, "512 positions"), ({"max_num_batched_tokens": 31}, "32"),
    ({"max_logprobs": 5000}, "vocabulary"), ({"deterministic": True, "decode_steps": 2}, "decode_steps=1"),
], ids=str)
def test_wrong_options(make_llm, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)


def test_wrong_sources():
    for arguments in ({}, {"model": "demo", "config": tiny.CONFIG}, {"config": tiny.CONFIG}, {"params": {}},
                      {"model": "demo", "params": {}}, {"model": "demo", "tokenizer": tiny.tokenizer()},
                      {"model": 5}, {"model": b"demo"}, {"model": ["demo"]}):
        with pytest.raises(ConfigError):
            LLM(**arguments)
