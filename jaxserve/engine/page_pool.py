"""The KV pages as the host sees them: ids, reference counts, a free list and the prefix cache.

Every page but the dummy is in exactly one of three states:

- used: its reference count is the number of sequences that hold it; it is not in the free list;
- free: in the free list, holding nothing of use;
- cached: in the free list and published, so a sequence with the same prefix may take it back until it
  is handed out for something else. `num_cached` of the `num_free` pages are.

A used page may be published too; then it is shared by reference count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.engine.prefix_hash import PrefixHasher

DUMMY_PAGE = 0  # takes the writes of padding rows; never handed out


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since start. `query_tokens`: tokens for which a hit was sought; `hit_tokens`: those found;
    `evictions`: published pages that were handed out for something else."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class PagePool:
    """Hands out page ids 1 .. num_pages - 1. All operations are O(1) per page.

    The free list is doubly linked through two arrays, with the dummy page as its head. Pages are taken
    from its front. Released pages that are published go to its back, so that the least recently used
    goes first; others go to the front, so that nothing cached is lost while an empty page is left.

    Args:
        num_pages: pages in the device's pool, the dummy page included.
        page_size: tokens in a page.
        enable_prefix_caching: if False, `publish` does nothing and `lookup` finds nothing.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True):
        assert num_pages >= 2, "a pool needs the dummy page and one more"
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hasher = PrefixHasher(page_size)
        self.stats = PrefixCacheStats()
        self.reset()

    def reset(self) -> None:
        """Forgets everything: all pages are free and unpublished. The counters stay."""
        n = self.num_pages
        self._refs = [0] * n
        self._hash_of: list[bytes | None] = [None] * n
        self._page_of: dict[bytes, int] = {}
        self._next = [*range(1, n), DUMMY_PAGE]
        self._prev = [n - 1, *range(n - 1)]
        self.num_free = n - 1
        self.num_cached = 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    # -- handing out and taking back

    def allocate(self, count: int) -> list[int]:
        """Takes `count` <= num_free pages, the least useful first. They leave the prefix cache."""
        assert count <= self.num_free, f"{count} pages asked, {self.num_free} free"
        pages = []
        for _ in range(count):
            page = self._next[DUMMY_PAGE]
            self._unlink(page)
            if self._hash_of[page] is not None:
                self._unpublish(page)
                self.stats.evictions += 1
            self._refs[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages found by `lookup`."""
        for page in pages:
            if self._refs[page] == 0:
                self._unlink(page)
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page of a sequence (in the sequence's order).

        The tail goes first: a prefix page is of use to more sequences than the pages after it, and
        those are of no use without it.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} released more often than held"
            if self._refs[page] == 0:
                after = self._prev[DUMMY_PAGE] if self._hash_of[page] is not None else DUMMY_PAGE
                self._link(page, after)

    # -- the prefix cache

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Pages of the longest published prefix of a sequence with `num_tokens` tokens.

        At least one token is always left to compute, since its logits are wanted. The pages are not
        held yet: call `acquire` before the next `allocate`.

        Args:
            hashes: of the sequence's full pages, see PrefixHasher.extend.
        """
        pages = []
        for h in hashes[:(num_tokens - 1) // self.page_size]:
            page = self._page_of.get(h)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unused(self, pages: Iterable[int]) -> int:
        """How many of the pages are in the free list, so that acquiring them makes it shorter."""
        return sum(self._refs[page] == 0 for page in pages)

    def publish(self, page: int, page_hash: bytes) -> None:
        """Offers a full page to others. If another page has this hash already, that one stays."""
        assert self._refs[page] > 0, f"page {page} published but not held"
        if self.enable_prefix_caching and self._hash_of[page] is None and page_hash not in self._page_of:
            self._hash_of[page] = page_hash
            self._page_of[page_hash] = page

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Pages that sequences hold stay theirs, unpublished."""
        for page in self._page_of.values():
            self._hash_of[page] = None
        self._page_of.clear()
        self.num_cached = 0

    def check_invariants(self, holders: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless each page is in exactly one state and the counts agree with what
        `holders`, the page lists of all sequences, hold."""
        free = []
        page = self._next[DUMMY_PAGE]
        while page != DUMMY_PAGE and len(free) < self.num_pages:
            if self._prev[self._next[page]] != page:
                raise AssertionError(f"free list broken behind page {page}")
            free.append(page)
            page = self._next[page]
        if len(free) != self.num_free or len(set(free)) != len(free):
            raise AssertionError(f"free list has {len(free)} pages, {self.num_free} counted")
        if self.num_cached != sum(self._hash_of[page] is not None for page in free):
            raise AssertionError(f"{self.num_cached} cached pages counted, the free list has another number of them")
        held = Counter(page for pages in holders for page in pages)
        for page in range(1, self.num_pages):
            if self._refs[page] != held[page]:
                raise AssertionError(f"page {page}: {self._refs[page]} references, held by {held[page]}")
        if held[DUMMY_PAGE] or self._refs[DUMMY_PAGE]:
            raise AssertionError("the dummy page was handed out")
        if any(self._refs[page] for page in free) or len(free) + len(held) != self.num_pages - 1:
            raise AssertionError("a page is both free and held, or neither")
        if {page: h for h, page in self._page_of.items()} != {p: h for p, h in enumerate(self._hash_of) if h}:
            raise AssertionError("prefix cache and pages disagree")

    # -- internals

    def _unpublish(self, page: int) -> None:
        page_hash = self._hash_of[page]
        assert page_hash is not None
        del self._page_of[page_hash]
        self._hash_of[page] = None

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
        self.num_cached -= self._hash_of[page] is not None

    def _link(self, page: int, before: int) -> None:
        """Puts the page behind `before`; behind the dummy page is the front."""
        after = self._next[before]
        self._next[before] = self._prev[after] = page
        self._prev[page], self._next[page] = before, after
        self.num_free += 1
        self.num_cached += self._hash_of[page] is not None
