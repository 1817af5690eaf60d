"""The workloads: fixed shapes and random token ids, the same for every engine and every machine.

Random ids make the work independent of the tokenizer and of what a model says; EOS is ignored, so the
number of tokens is fixed. Each repetition has the same shapes and fresh ids, so that no prefix cache can
answer from an earlier one; repetition 0 is the warm-up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 1234
FIRST_ID, LAST_ID = 300, 48_999  # above the byte and special tokens, below the smallest common vocabulary


@dataclass(frozen=True)
class Batch:
    """Prompts submitted together, and how many tokens each generates."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)

    def first(self, count: int) -> Batch:
        return Batch(self.prompts[:count], self.max_tokens[:count])


@dataclass(frozen=True)
class Repetition:
    """One repetition of every workload.

    Attributes:
        first_token: one prompt of 128 tokens, one token out: the time to the first token.
        stream: another prompt of 128 tokens, 128 tokens out.
        mixed: 32 requests, prompts of 32 to 512 tokens, 32 to 256 tokens out (8104 in, 4264 out).
        shared_prefix: 32 requests with the same 512 tokens and 32 of their own, 32 tokens out.
        no_shared_prefix: the shape of `shared_prefix` with nothing in common.
    """

    first_token: Batch
    stream: Batch
    mixed: Batch
    shared_prefix: Batch
    no_shared_prefix: Batch


def repetition(index: int, vocab_size: int = LAST_ID + 1) -> Repetition:
    """Repetition `index` of the workloads; ids are below `vocab_size`."""
    shapes = random.Random(SEED)
    mixed_shapes = [(shapes.randint(32, 512), shapes.randint(32, 256)) for _ in range(32)]
    rng = random.Random(SEED - 234 + index)
    end = min(LAST_ID + 1, vocab_size)
    start = min(FIRST_ID, end // 2)

    def ids(count: int) -> list[int]:
        return [rng.randrange(start, end) for _ in range(count)]

    # The order of these draws is part of the workload.
    first_token = Batch([ids(128)], [1])
    stream = Batch([ids(128)], [128])
    mixed = Batch([ids(prompt) for prompt, _ in mixed_shapes], [output for _, output in mixed_shapes])
    prefix = ids(512)
    shared_prefix = Batch([prefix + ids(32) for _ in range(32)], [32] * 32)
    no_shared_prefix = Batch([ids(544) for _ in range(32)], [32] * 32)
    return Repetition(first_token, stream, mixed, shared_prefix, no_shared_prefix)
