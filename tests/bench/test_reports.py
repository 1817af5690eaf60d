"""Benchmarks measure the work they name, and their reports say on what."""

import json

import pytest
from click.testing import CliRunner

from jaxserve.bench import measure, offline
from jaxserve.bench.host import host
from jaxserve.bench.report import Report
from jaxserve.cli.main import main


def test_throughput_runs_the_mixed_workload_and_a_warm_up(fake_llm):
    llm = fake_llm("m")
    report = offline.throughput(llm, repetitions=2)
    calls = [prompts for _, prompts, _ in llm.calls]
    assert [len(prompts) for prompts in calls] == [32, 32, 32]
    assert calls[0] != calls[1] != calls[2]
    seconds = report.samples["total_s"]
    assert len(seconds) == 2
    assert report.samples["output_tok_per_s"] == [4264 / s for s in seconds]
    assert report.samples["all_tok_per_s"] == [(4264 + 8104) / s for s in seconds]
    assert report.facts == {"steps per run": 10, "padding (share of computed rows)": 0.25, "executables": 3,
                            "executables compiled in the timed runs": 0}


def test_requests_are_greedy_and_ignore_eos(fake_llm):
    llm = fake_llm("m")
    offline.throughput(llm, repetitions=1)
    for _, _, params in llm.calls:
        assert all(p.temperature == 0 and p.ignore_eos and not p.detokenize for p in params)
        assert sum(p.max_tokens for p in params) == 4264


def test_latency_streams_for_the_gaps_between_tokens(fake_llm):
    report = offline.latency(fake_llm("m"), repetitions=2)
    assert {len(values) for values in report.samples.values()} == {2}
    for p50, p99 in zip(report.samples["token_gap_p50_ms"], report.samples["token_gap_p99_ms"]):
        assert 0 < p50 <= p99


def test_prefix_counts_cached_tokens_and_compares_with_nothing_shared(fake_llm):
    report = offline.prefix(fake_llm("m"), repetitions=1, baseline=True)
    assert report.samples["cached_tok"] == [32 * 8]
    assert report.facts["nothing shared / shared"] == (
        report.samples["nothing_shared_total_s"][0] / report.samples["total_s"][0])


def test_a_short_answer_is_no_measurement(fake_llm):
    llm = fake_llm("m")
    llm._answer = lambda prompt, params, answer=llm._answer: answer(prompt, type(params)(max_tokens=3))
    with pytest.raises(RuntimeError, match="instead of"):
        offline.throughput(llm, repetitions=1)


@pytest.mark.parametrize("command", ["throughput", "startup", "host"])
def test_a_report_that_cannot_be_written_is_known_before_the_run(fake_llm, tmp_path, command):
    for place in (tmp_path / "absent" / "report.json", tmp_path):
        result = CliRunner().invoke(main, ["bench", command, "--json", str(place)])
        assert result.exit_code == 2
        assert str(place) in result.stderr
    assert not fake_llm.instances


def test_host_times_every_phase():
    report = host(running=4, steps=20, repetitions=2)
    assert list(report.samples) == ["schedule_ms", "pack_ms", "commit_ms", "step_ms", "step_p99_ms"]
    assert all(len(values) == 2 and min(values) > 0 for values in report.samples.values())


def test_json_report_has_environment_options_and_single_runs(fake_llm, tmp_path):
    file = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["bench", "prefix", "m", "--repetitions", "2", "--page-size", "32",
                                       "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    data = json.loads(file.read_text())
    assert data["benchmark"] == "prefix"
    assert (data["model"], data["options"]) == ("m", {"page_size": 32})
    assert len(data["metrics"]["total_s"]["runs"]) == 2
    assert data["environment"]["cpu"] and data["environment"]["versions"]["jax"] and data["environment"]["date"]
    assert data["facts"]["peak memory (MB)"] > 0
    assert len(data["foreign_cpu"]) == 2
    assert fake_llm.instances[0].closed


def test_the_table_shows_medians(capsys):
    Report("demo", "some work", {"total_s": [1.0, 9.0, 2.0]}, facts={"steps": 7}).print()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("│")[1:5] == [" total_s  ", "      2 ", "   1 ", "   9 "] for line in lines), lines


@pytest.mark.parametrize(("samples", "percent", "expected"), [
    ([3, 1, 2], 50, 2), ([3, 1, 2], 99, 3), ([5], 50, 5), (list(range(1, 101)), 99, 99)])
def test_percentile_is_a_sample(samples, percent, expected):
    assert measure.percentile(samples, percent) == expected


def test_a_stopwatch_measures_its_block():
    with measure.Stopwatch() as watch:
        sum(range(1000))
    assert watch.seconds > 0
    assert watch.foreign_cpu is None or watch.foreign_cpu >= 0
