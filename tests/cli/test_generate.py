"""`jaxserve generate`."""

import json

import pytest
from click.testing import CliRunner

from jaxserve.cli.generate import _summary
from jaxserve.cli.main import main
from jaxserve.outputs import CompletionOutput, RequestOutput


def run(*args: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["generate", "some/model", *args], input=stdin)


def test_prompts_and_messages_are_answered_in_order(fake_llm):
    result = run("-p", "one", "-p", "two", "-m", "three", "--system", "Be short.", "--max-tokens", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout == "one word word\n\ntwo word word\n\n> three\n word word\n\n"
    (llm,) = fake_llm.instances
    assert llm.model == "some/model"
    assert llm.closed
    assert llm.calls[0][1] == ["one", "two"]
    assert llm.calls[1][1] == [[{"role": "system", "content": "Be short."}, {"role": "user", "content": "three"}]]


def test_the_summary_counts_tokens_and_cache_hits(fake_llm):
    result = run("-p", "one", "-p", "two", "--max-tokens", "3", "--n", "2")
    assert "2 requests, 12 tokens in " in result.stderr
    assert "16 of 20 prompt tokens from the prefix cache" in result.stderr


def test_options_reach_engine_and_request(fake_llm):
    run("-p", "x", "--page-size", "32", "--dtype", "float32", "--top-p", "0.5", "--seed", "7")
    (llm,) = fake_llm.instances
    assert (llm.options.page_size, llm.options.dtype, llm.options.seed) == (32, "float32", None)
    params = llm.calls[0][2]
    assert (params.top_p, params.seed, params.max_tokens) == (0.5, 7, 256)


def test_standard_input_is_a_prompt(fake_llm):
    assert run("--max-tokens", "1", stdin="two\nlines\n").stdout == "two\nlines word\n\n"


@pytest.mark.parametrize("name, text", [("a.txt", "one\ntwo"), ("a.jsonl", '"one"\n"two"')])
def test_a_byte_order_mark_is_no_part_of_a_prompt(fake_llm, tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    run("--prompt-file", str(tmp_path / name))
    assert fake_llm.instances[0].calls[0][1] == ["one", "two"]


def test_prompt_files(fake_llm, tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    (tmp_path / "b.jsonl").write_text('"line\\nbreak"\n[1, 2, 3]\n')
    run("--prompt-file", str(tmp_path / "a.txt"), "--prompt-file", str(tmp_path / "b.jsonl"))
    assert fake_llm.instances[0].calls[0][1] == ["first", "second", "line\nbreak", [1, 2, 3]]


@pytest.mark.parametrize("line", ['{"bad": 1}', "[" * 100_000, f"[{'1' * 5000}]"], ids=["object", "deep", "long id"])
def test_a_broken_prompt_file_names_the_line(fake_llm, tmp_path, line):
    (tmp_path / "b.jsonl").write_text(f'"good"\n{line}\n')
    result = run("--prompt-file", str(tmp_path / "b.jsonl"))
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    assert not fake_llm.instances


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_prompt_that_no_output_can_hold_is_shown_as_json_has_it(fake_llm, tmp_path, as_json):
    (tmp_path / "a.jsonl").write_text('"a\\ud800"')
    result = run("--prompt-file", str(tmp_path / "a.jsonl"), *as_json)
    assert result.exit_code == 0, result.output
    assert "a\\ud800" in result.stdout


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_prompt_file_that_is_not_utf_8(fake_llm, tmp_path, name):
    path = tmp_path / name
    path.write_bytes('"Müsli"\n'.encode("latin-1"))
    result = run("--prompt-file", str(path))
    assert result.exit_code == 2
    assert f"{path} is not UTF-8 text (byte 0xfc" in " ".join(result.stderr.split())
    assert not fake_llm.instances


def test_standard_input_that_is_not_utf_8(fake_llm):
    result = CliRunner().invoke(main, ["generate", "m"], input=b"M\xfcsli")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


def test_a_prompt_file_without_an_end(fake_llm, monkeypatch):
    monkeypatch.setattr("jaxserve.cli.generate.MAX_PROMPT_FILE_BYTES", 3 << 20)
    result = run("--prompt-file", "/dev/zero")
    assert result.exit_code == 2
    assert "/dev/zero has more than 3 MiB" in result.stderr


def test_an_interrupt_is_exit_code_130_and_one_line(fake_llm, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_llm, "generate", interrupted)
    result = run("-p", "one")
    assert result.exit_code == 130
    assert (result.stdout, result.stderr) == ("", "interrupted\n")
    assert fake_llm.instances[0].closed


def test_json_lines_hold_what_the_api_returns(fake_llm):
    result = run("-p", "one", "--json", "--max-tokens", "2")
    (record,) = map(json.loads, result.stdout.splitlines())
    assert record["prompt"] == "one"
    assert record["num_cached_tokens"] == 8
    assert record["error"] is None
    assert record["timings"] == {"queue": 0.0, "first_token": 0.5, "total": 1.5}
    assert record["outputs"][0]["token_ids"] == [0, 1]
    assert record["outputs"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_are_refused_where_they_would_not_be_shown(fake_llm, option):
    result = run("-p", "one", option, "2")
    assert result.exit_code == 2 and f"{option} needs --json" in result.stderr
    assert not fake_llm.instances
    assert run("-p", "one", option, "2", "--json").exit_code == 0


def test_one_failed_prompt_is_reported_in_its_place(fake_llm):
    result = run("-p", "one", "-p", "too long", "-p", "two", "--max-tokens", "1")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line] == [
        "one word", "too long", "error: the prompt has 9999 tokens, at most 1024 fit; shorten it", "two word"]


def test_nothing_to_do_is_a_usage_error(fake_llm):
    for args, stdin, expected in [((), "", "--prompt"), (("--system", "x", "-p", "y"), None, "--message")]:
        result = run(*args, stdin=stdin)
        assert result.exit_code == 2
        assert expected in result.stderr
    assert not fake_llm.instances


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_user_error_is_one_line_and_exit_code_2(fake_llm, command):
    result = CliRunner().invoke(main, [command, "m", "--page-size", "12"], input="hello")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["Error: page_size must be a power of two from 8 to 256, got 12"]


def test_the_rate_leaves_out_the_time_spent_on_compiling():
    output = RequestOutput("0", "x", [1] * 5, [CompletionOutput(0, "", [1] * 60, "length")])
    assert _summary([output], seconds=5.0, compiling=2.0) == (
        "1 requests, 60 tokens in 5.00 s, of which 2.00 s compiling or loading programs: 20.0 tok/s; "
        "0 of 5 prompt tokens from the prefix cache")
