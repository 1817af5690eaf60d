from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.request import ScheduledRow, Sequence, SequenceOptions
from jaxserve.runtime.batch import NUM_COLUMNS, NUM_TOKENS, SAMPLES, SLOT, START, pack
from jaxserve.runtime.buckets import Bucket

QUERY_BLOCK, SLOTS, PAGES = 8, 6, 5
SEQ = Sequence(seq_id=0, prompt_len=1, token_ids=[1], options=SequenceOptions(max_tokens=1), arrival=0)

rows = st.lists(st.builds(
    ScheduledRow, st.just(SEQ), st.integers(0, 100), st.integers(1, 8), st.booleans(), st.integers(0, SLOTS - 1),
    st.just(0)), max_size=3)


@given(decodes=rows, prefills=rows, seed=st.integers(0, 100))
def test_equals_a_naive_model(decodes, prefills, seed):
    tables = np.random.default_rng(seed).integers(1, 1000, (SLOTS + 1, PAGES), np.int32)
    tables[-1] = 0
    bucket = Bucket(4, 4 * QUERY_BLOCK)
    batch = pack(decodes, prefills, bucket, tables, QUERY_BLOCK)

    assert batch.dtype == np.int32 and batch.flags.c_contiguous
    wanted = [[SLOTS, 0, 0, 0] + [0] * PAGES for _ in range(4 + 4)]
    for first, given_rows in ((0, decodes), (4, prefills)):
        for i, row in enumerate(given_rows):
            wanted[first + i] = [row.slot, row.start, row.num_tokens, int(row.samples), *tables[row.slot].tolist()]
    assert batch.tolist() == wanted


def test_the_columns():
    row = ScheduledRow(SEQ, 7, 3, True, 2, 0)
    tables = np.arange(21, dtype=np.int32).reshape(7, 3)
    [first, *_] = pack([row], [], Bucket(1, 0), tables, QUERY_BLOCK)
    assert (first[SLOT], first[START], first[NUM_TOKENS], first[SAMPLES]) == (2, 7, 3, 1)
    assert first[NUM_COLUMNS:].tolist() == [6, 7, 8]


def test_later_changes_of_the_scheduler_s_tables_do_not_reach_a_packed_batch():
    tables = np.ones((3, 2), np.int32)
    batch = pack([ScheduledRow(SEQ, 0, 1, True, 0, 0)], [], Bucket(2, 0), tables, QUERY_BLOCK)
    before = batch.copy()
    tables[:] = 9
    np.testing.assert_array_equal(batch, before)
