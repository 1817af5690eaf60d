"""The padded shapes that a step is compiled for, and why these.

A bucket is (decode rows, prefill rows). The decode-only shapes ascend by about 2x, because a decode
step's time grows with its rows once it is no longer bound by reading the weights. A shape with prefill
costs far more than its decode rows, so there the decode part is either absent or full. Prefill shapes
ascend by 4x from one query block: short follow-up turns, ordinary prompts, the whole token budget.
That makes 5 + 2 * 3 shapes; with the slot upload 12 executables, however long requests are.

With `deterministic` there is one shape for prefill and one for decode, and a step that needs both
launches twice: a row's arithmetic then never depends on what else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import ResolvedConfig


@dataclass(frozen=True, order=True)
class Bucket:
    """`decode_rows` sequences with one token each, then `prefill_rows` rows of prefill chunks.

    `decode_steps` > 1: up to so many decode steps run in one launch (only without prefill rows).
    """

    decode_rows: int
    prefill_rows: int
    decode_steps: int = 1

    def num_chunks(self, query_block: int) -> int:
        return self.prefill_rows // query_block

    def num_seqs(self, query_block: int) -> int:
        return self.decode_rows + self.num_chunks(query_block)

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.prefill_rows

    def __str__(self) -> str:
        steps = f"x{self.decode_steps}" if self.decode_steps > 1 else ""
        return f"decode{self.decode_rows}{steps}+prefill{self.prefill_rows}"


def prefill_capacity(config: ResolvedConfig) -> int:
    """Most prefill rows in a step: the token budget in whole query blocks."""
    return max(config.max_num_batched_tokens // config.query_block, 1) * config.query_block


def make_buckets(config: ResolvedConfig, min_decode_rows: int = 1) -> tuple[Bucket, ...]:
    """All buckets of an engine, ascending.

    `min_decode_rows`: smallest decode shape. 2 where the matmul of a single row is slow (bfloat16 on CPU).
    """
    most, capacity = max(config.max_num_seqs, min_decode_rows), prefill_capacity(config)
    if config.deterministic:
        return (Bucket(0, capacity), Bucket(most, 0))
    decode = {max(rows, min_decode_rows) for rows in (most, most // 2, most // 4, most // 8, 1)}
    prefill = {capacity}
    for rows in (config.query_block, capacity // 4):
        prefill.add(max(rows // config.query_block, 1) * config.query_block)
    buckets = [Bucket(rows, 0, config.decode_steps) for rows in decode]
    buckets += [Bucket(rows, chunk) for rows in (0, most) for chunk in prefill]
    return tuple(sorted(buckets))


def choose_bucket(buckets: tuple[Bucket, ...], decode_rows: int, prefill_rows: int) -> Bucket:
    """The bucket with the fewest token rows that holds the step. `prefill_rows`: in whole query blocks."""
    fitting = [b for b in buckets if b.decode_rows >= decode_rows and b.prefill_rows >= prefill_rows
               and (b.prefill_rows == 0) == (prefill_rows == 0)]
    assert fitting, (buckets, decode_rows, prefill_rows)
    return min(fitting, key=lambda b: (b.num_tokens, b.decode_rows))
