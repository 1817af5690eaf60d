"""StepPlan -> the one int32 array that a step uploads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.request import ScheduledRow
from jaxserve.runtime.buckets import Bucket

# Columns of the packed batch; the block table follows.
SLOT, START, NUM_TOKENS, SAMPLES = range(4)
NUM_COLUMNS = 4


def pack(decodes: Sequence[ScheduledRow], prefills: Sequence[ScheduledRow], bucket: Bucket,
         block_tables: np.ndarray, query_block: int) -> np.ndarray:
    """Packs rows into i32[num_seqs, NUM_COLUMNS + pages_per_seq].

    Decode rows come first, prefill chunks start at `bucket.decode_rows`. Padding rows have the dummy slot
    (the last row of `block_tables`, whose pages are all 0) and zero tokens.
    """
    batch = np.zeros((bucket.num_seqs(query_block), NUM_COLUMNS + block_tables.shape[1]), np.int32)
    batch[:, SLOT] = block_tables.shape[0] - 1
    for first, rows in ((0, decodes), (bucket.decode_rows, prefills)):
        if rows:
            part = batch[first:first + len(rows)]
            part[:, :NUM_COLUMNS] = [(row.slot, row.start, row.num_tokens, row.samples) for row in rows]
            np.take(block_tables, part[:, SLOT], axis=0, out=part[:, NUM_COLUMNS:])
    return batch
