"""The bench counts right, and runs on whatever is here."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import kernels_pallas as kernels
from kernels_pallas import bench


def case(**changes) -> bench.Case:
    return bench.Case(**({"rows": 1, "batch": 2, "context": 24, "heads": 4, "kv_heads": 2, "head_dim": 16,
                          "dtype": "float32", "page_size": 8} | changes))


@pytest.mark.parametrize("rows", [1, 5])
def test_flops_are_those_of_what_each_row_sees(rows: int):
    """Two multiplications and two additions for each number of K or V, and each query head that reads it."""
    one = case(rows=rows)
    assert one.flops == sum(4 * 16 * (position + 1) for _ in range(2) for _ in range(4)
                            for position in range(24 - rows, 24))


@pytest.mark.parametrize("dtype, row_bytes", [("float32", 64), ("bfloat16", 32), ("int8", 20)])
def test_bytes_are_those_of_contexts_scales_and_activations(dtype: str, row_bytes: int):
    one = case(dtype=dtype)
    kv = 2 * (24 + 1) * 2 * row_bytes
    assert one.bytes_moved == 2 * (kv + (4 + 4 + 2 + 2) * 16 * one.activations.itemsize)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_case_s_batch_has_its_rows_at_the_end_of_its_context(rows: int):
    batch = bench.make_batch(case(rows=rows, context=48))
    seq, position, valid = (np.asarray(x) for x in kernels.token_rows(batch))
    for i in range(2):
        np.testing.assert_array_equal(position[valid & (seq == i)], np.arange(48 - rows, 48))
    assert len(set(np.asarray(batch.block_tables).ravel())) == 2 * 6 and np.asarray(batch.block_tables).min() == 1


def test_the_table_and_its_json_have_every_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "MIN_SECONDS", 0)
    monkeypatch.setattr(bench, "POOL_BYTES", dict.fromkeys(("cpu", "gpu", "tpu"), 1 << 16))
    monkeypatch.setattr(bench, "MATMUL_SIZE", dict.fromkeys(("cpu", "gpu", "tpu"), 64))
    bench.main(["--backend", "xla", "reference", "--heads", "2/1x16", "--dtype", "int8", "--batch", "2",
                "--context", "32", "64", "--prefill", "40", "--page-size", "16", "--json", str(tmp_path / "rows.json")])
    report = json.loads((tmp_path / "rows.json").read_text())
    rows = report["rows"]
    # Two backends, each with two decode cases and the one prefill case whose context is long enough.
    assert len(rows) == 2 * 3 and report["jax"] == jax.__version__
    assert {row["backend"] for row in rows} == {"xla", "reference"}
    assert all(row["us"] > 0 and row["of_stream"] > 0 and row["of_matmul"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert printed.count("2/1x16") == len(rows) and "prefill 40" in printed


def test_what_cannot_run_here_is_named(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "why_not", lambda backend, device, spec: f"{backend} needs a quantum computer")
    bench.main(["--backend", "xla"])
    assert "left out: xla needs a quantum computer" in capsys.readouterr().out


def test_heads_are_read_or_explained(capsys):
    assert bench.parse(["--heads", "32/8x128"], cpu=True).heads == [(32, 8, 128)]
    with pytest.raises(SystemExit):
        bench.parse(["--heads", "32"], cpu=True)
    assert "for example 32/8x128" in capsys.readouterr().err
