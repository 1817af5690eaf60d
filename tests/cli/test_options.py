"""Command line options are the fields of EngineConfig and SamplingParams, no more and no fewer."""

import dataclasses
import re

import click
import pytest
from click.testing import CliRunner

from jaxserve.cli.main import CONTEXT_SETTINGS, main
from jaxserve.cli.options import given, options_of
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.field_docs import field_docs
from jaxserve.sampling_params import SamplingParams


def parse(cls, *args: str) -> dict:
    @click.command(context_settings=CONTEXT_SETTINGS)
    @options_of(cls)
    def command(**options):
        chosen.update(given(cls, options))

    chosen: dict = {}
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return chosen


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_field_has_an_option_and_a_help_text(cls):
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        assert docs.get(field.name), f"{cls.__name__}.{field.name} is not in the docstring"


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_only_what_the_user_gives_is_passed_on(cls):
    assert parse(cls) == {}


@pytest.mark.parametrize(("args", "expected"), [
    (["--max-model-len", "512"], {"max_model_len": 512}),
    (["--max_model_len", "512"], {"max_model_len": 512}),
    (["--kv-cache-memory-fraction", "0.5"], {"kv_cache_memory_fraction": 0.5}),
    (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
    (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
    (["--deterministic"], {"deterministic": True}),
    (["--compilation-cache-dir", ""], {"compilation_cache_dir": ""}),
])
def test_engine_options(args, expected):
    options = parse(EngineConfig, *args)
    assert options == expected
    EngineConfig(**options)


@pytest.mark.parametrize(("args", "expected"), [
    (["--temperature", "0"], {"temperature": 0.0}),
    (["--top-k", "-1"], {"top_k": -1}),
    (["--stop", "END", "--stop", "\n"], {"stop": ("END", "\n")}),
    (["--stop-token-ids", "1", "--stop-token-ids", "2"], {"stop_token_ids": (1, 2)}),
    (["--logit-bias", "17=-100", "--logit-bias", "3=1.5"], {"logit_bias": {17: -100.0, 3: 1.5}}),
    (["--no-detokenize", "--ignore-eos"], {"detokenize": False, "ignore_eos": True}),
    (["--cache-salt", "me"], {"cache_salt": "me"}),
])
def test_sampling_options(args, expected):
    assert parse(SamplingParams, *args) == expected


def test_a_malformed_bias_says_what_is_expected():
    result = CliRunner().invoke(main, ["generate", "demo", "-p", "x", "--logit-bias", "17:1"])
    assert result.exit_code == 2
    assert "17=-100" in result.output


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_help_lists_every_option_once(name):
    text = CliRunner().invoke(main, [name, "--help"]).output
    listed = re.findall(r"^  (?:-\w, )?--([\w-]+)", text.partition("Options:")[2], re.MULTILINE)
    for cls in (SamplingParams, EngineConfig):
        for field in dataclasses.fields(cls):
            if name != "chat" or field.name not in ("n", "logprobs", "prompt_logprobs"):  # a chat cannot show them
                assert listed.count(field.name.replace("_", "-")) == 1, field.name
    assert text.index("Options:") < text.index("Sampling options:") < text.index("Engine options:")


def test_help_shows_the_dataclass_defaults():
    text = " ".join(CliRunner().invoke(main, ["generate", "--help"]).output.split())
    assert "that a request may ask for. Default 20." in text
    assert "Reuse the KV pages of equal prompt prefixes. Default on." in text


@pytest.mark.parametrize("wrong", [
    {"deterministic": "no"}, {"enable_prefix_caching": "false"}, {"use_generation_config": 0}, {"seed": "abc"},
    {"seed": 1.5}, {"kv_cache_memory_fraction": "0.1"}, {"compilation_cache_dir": 5}])
def test_values_of_a_wrong_type_are_refused_by_name(wrong):
    """A YAML file can hold anything, and so can a call from Python."""
    (name, value), = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} must be .*{re.escape(repr(value))}"):
        EngineConfig(**wrong)


@pytest.mark.parametrize("option, value, least, most", [
    ("max_model_len", 1, 2, 1048576), ("max_model_len", 10**9, 2, 1048576), ("max_num_seqs", 10**6, 1, 65536),
    ("max_num_batched_tokens", 10**9, 1, 1048576), ("num_pages", 2**31, 2, 16777216), ("num_pages", 1, 2, 16777216),
    ("decode_steps", 10**9, 1, 256)])
def test_absurd_values_are_refused_with_the_limits(option, value, least, most):
    with pytest.raises(ConfigError, match=f"{option} must be from {least} to {most}, got {value}"):
        EngineConfig(**{option: value})
    EngineConfig(**{option: least}), EngineConfig(**{option: most})
