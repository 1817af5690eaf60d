"""Keys of the prefix cache: one hash per full page, chained, so that a key stands for a whole prefix."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

ROOT = bytes(32)  # the parent of a sequence's first page

ExtraKey = tuple[str, str]  # (what it is, its value), e.g. ("cache_salt", "tenant-7")


class PrefixHasher:
    """Hashes pages with keyed BLAKE2b-256 over (parent hash, the page's token ids, extra keys).

    Everything that changes a page's K/V beside its tokens must be among the extra keys. Those of the
    first page reach all later ones through the chain.

    Each hasher draws its own secret key, so that a hash that leaks (into a log, say) does not let anyone
    confirm a guess of someone's prompt. Only equality matters to scheduling, so results do not depend on it.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size  # in tokens
        self._empty = blake2b(key=secrets.token_bytes(32), digest_size=32, person=b"jaxserve page v1")

    def hash_page(self, parent: bytes, ids: bytes, extra_keys: Sequence[ExtraKey] = ()) -> bytes:
        """Hash of one page. `ids`: the page's token ids, u32 little-endian."""
        h = self._empty.copy()  # skips the work of absorbing the key
        # Parent and ids have fixed sizes within a pool, so the concatenation is unambiguous.
        h.update(parent + ids)
        for name, value in extra_keys:
            h.update(_encode(name))
            h.update(_encode(value))
        return h.digest()

    def extend(self, chain: list[bytes], token_ids: Sequence[int], num_pages: int,
               extra_keys: Sequence[ExtraKey] = ()) -> None:
        """Extends `chain`, the hashes of the first len(chain) pages of `token_ids`, to `num_pages` in place."""
        first = len(chain)
        if num_pages <= first:
            return
        ids = np.asarray(token_ids[first * self.page_size:num_pages * self.page_size], dtype="<u4").tobytes()
        page_bytes = 4 * self.page_size
        parent = chain[-1] if chain else ROOT
        for i in range(num_pages - first):
            page = ids[i * page_bytes:(i + 1) * page_bytes]
            parent = self.hash_page(parent, page, extra_keys if first + i == 0 else ())
            chain.append(parent)


def _encode(value: str) -> bytes:
    """Length and payload, so that moving a boundary between two values is seen."""
    payload = value.encode("utf-8", "surrogatepass")
    return len(payload).to_bytes(4, "little") + payload
