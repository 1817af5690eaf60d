"""Page pool and prefix hashes: pages are neither lost nor handed out twice, and what is cached stays right."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jaxserve.engine.page_pool import DUMMY_PAGE, PagePool
from jaxserve.engine.prefix_hash import PrefixHasher


def published(pool: PagePool, pages: list[int], names: str) -> list[bytes]:
    """Publishes the pages under one-letter names; returns the hashes."""
    hashes = [name.encode() * 32 for name in names]
    for page, page_hash in zip(pages, hashes):
        pool.publish(page, page_hash)
    return hashes


# -- pages


def test_every_page_but_the_dummy_is_handed_out_once():
    pool = PagePool(8, 4)
    pages = pool.allocate(7)
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7] and DUMMY_PAGE not in pages
    assert pool.num_free == 0
    pool.check_invariants([pages])


def test_a_shared_page_is_free_only_after_its_last_holder():
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    pool.acquire(pages[:1])
    pool.release(pages)
    assert pool.num_free == 2
    pool.check_invariants([pages[:1]])
    pool.release(pages[:1])
    assert pool.num_free == 3


def test_releasing_a_page_twice_is_caught():
    pool = PagePool(4, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(pages)


def test_invariant_check_finds_a_leaked_page():
    pool = PagePool(4, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, held by 0"):
        pool.check_invariants([])


# -- reuse


def test_freed_cached_pages_can_be_taken_back_until_they_are_reused():
    pool = PagePool(6, 4)
    pages = pool.allocate(2)
    hashes = published(pool, pages, "ab")
    pool.release(pages)
    assert pool.num_free == 5
    hit = pool.lookup(hashes, 9)
    assert hit == pages and pool.num_unused(hit) == 2
    pool.acquire(hit)
    assert pool.num_free == 3
    pool.check_invariants([hit])


def test_empty_pages_are_used_before_cached_ones():
    pool = PagePool(6, 4)
    pages = pool.allocate(5)
    published(pool, pages[:2], "ab")
    pool.release(pages)
    assert set(pool.allocate(3)) == set(pages[2:])
    assert len(pool._page_of) == 2 and pool.stats.evictions == 0


def test_cached_pages_are_reused_least_recently_freed_first_and_tail_first():
    pool = PagePool(5, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    published(pool, first, "ab")
    hashes = published(pool, second, "cd")
    pool.release(first)
    pool.release(second)
    assert pool.allocate(3) == [first[1], first[0], second[1]]
    assert pool.stats.evictions == 3
    assert pool.lookup(hashes, 9) == second[:1], "the head of the prefix is still there"


def test_a_reused_page_is_not_found_any_more():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    hashes = published(pool, pages, "ab")
    pool.release(pages)
    pool.allocate(2)
    assert pool.lookup(hashes, 9) == [] and not pool._page_of


# -- lookup


def test_lookup_stops_at_the_first_page_that_is_missing():
    pool = PagePool(6, 4)
    hashes = published(pool, pool.allocate(3), "abc")
    assert len(pool.lookup([hashes[0], b"?" * 32, hashes[2]], 100)) == 1


@pytest.mark.parametrize(("num_tokens", "hit_pages"), [(12, 2), (13, 3), (8, 1), (4, 0), (1, 0)])
def test_lookup_leaves_one_token_to_compute(num_tokens, hit_pages):
    pool = PagePool(6, 4)
    hashes = published(pool, pool.allocate(3), "abc")
    assert len(pool.lookup(hashes, num_tokens)) == hit_pages


def test_of_two_pages_with_equal_content_the_first_stays_published():
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    published(pool, pages, "aa")
    assert pool.lookup([b"a" * 32], 100) == pages[:1]
    pool.check_invariants([pages])


def test_without_prefix_caching_nothing_is_published():
    pool = PagePool(4, 4, enable_prefix_caching=False)
    assert pool.lookup(published(pool, pool.allocate(1), "a"), 100) == []


def test_reset_of_the_prefix_cache_leaves_held_pages_with_their_holders():
    pool = PagePool(6, 4)
    held, freed = pool.allocate(2), pool.allocate(2)
    hashes = published(pool, held + freed, "abcd")
    pool.release(freed)
    pool.reset_prefix_cache()
    assert not pool._page_of and pool.lookup(hashes, 100) == [] and pool.num_free == 3
    published(pool, held, "xy")
    assert len(pool._page_of) == 2
    pool.check_invariants([held])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: sets, and an ordered dict as the queue of cached pages."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9, 4)
        self.held: list[list[int]] = []
        self.hash_of: dict[int, bytes] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()  # free and published, the next to be reused first

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            return
        empty = self.pool.num_free - len(self.cached)
        pages = self.pool.allocate(count)
        evicted = [page for page in pages if page in self.cached]
        assert evicted == list(self.cached)[:max(0, count - empty)]
        for page in evicted:
            del self.cached[page], self.hash_of[page]
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        pages = self.held.pop(pick % len(self.held))
        self.pool.release(pages)
        for page in reversed(pages):
            if page in self.hash_of and not any(page in other for other in self.held):
                self.cached[page] = None

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), name=st.integers(0, 5))
    def publish_first_page(self, pick, name):
        pages = self.held[pick % len(self.held)]
        page_hash = bytes([name]) * 32
        if pages:
            self.pool.publish(pages[0], page_hash)
            if pages[0] not in self.hash_of and page_hash not in self.hash_of.values():
                self.hash_of[pages[0]] = page_hash

    @rule(name=st.integers(0, 5))
    def hit(self, name):
        page_hash = bytes([name]) * 32
        pages = self.pool.lookup([page_hash], 5)
        assert pages == [page for page, known in self.hash_of.items() if known == page_hash]
        self.pool.acquire(pages)
        self.held.append(pages)
        for page in pages:
            self.cached.pop(page, None)

    @rule()
    def reset_cache(self):
        self.pool.reset_prefix_cache()
        self.hash_of.clear()
        self.cached.clear()

    @invariant()
    def books_balance(self):
        self.pool.check_invariants(self.held)
        assert len(self.pool._page_of) == len(self.hash_of)


def test_the_pool_behaves_like_its_model():
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=60, stateful_step_count=30))


# -- hashes


def chain(hasher: PrefixHasher, ids: list[int], extra_keys=()) -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, ids, len(ids) // hasher.page_size, extra_keys)
    return hashes


def test_a_hash_stands_for_the_whole_prefix():
    hasher = PrefixHasher(2)
    a, b = chain(hasher, [1, 2, 3, 4, 5, 6]), chain(hasher, [1, 2, 9, 4, 5, 6])
    assert a[0] == b[0] and a[1] != b[1] and a[2] != b[2]


def test_a_chain_extended_piecewise_is_the_chain_hashed_at_once():
    hasher, ids, hashes = PrefixHasher(4), list(range(19)), []
    for pages in (1, 1, 3, 2, 4):
        hasher.extend(hashes, ids, pages, (("cache_salt", "x"),))
    assert hashes == chain(hasher, ids, (("cache_salt", "x"),)) and len(hashes) == 4


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=2, max_size=2, unique_by=repr))
def test_different_extra_keys_never_hash_alike(pair):
    """Also not by moving a boundary: ("ab", "c") and ("a", "bc")."""
    hasher = PrefixHasher(1)
    one, other = ([("key", value) for value in values] for values in pair)
    assert chain(hasher, [7], one) != chain(hasher, [7], other)


def test_extra_keys_separate_all_pages_though_only_the_first_carries_them():
    hasher = PrefixHasher(2)
    plain, salted = chain(hasher, [1, 2, 3, 4]), chain(hasher, [1, 2, 3, 4], (("cache_salt", "tenant"),))
    assert not set(plain) & set(salted)
    parent, ids = plain[0], (3).to_bytes(4, "little") + (4).to_bytes(4, "little")
    assert plain[1] == hasher.hash_page(parent, ids), "later pages are hashed without extra keys"


def test_hashers_draw_their_own_keys():
    ids = [1, 2, 3, 4]
    assert chain(PrefixHasher(2), ids) != chain(PrefixHasher(2), ids)


def test_a_lone_surrogate_in_a_salt_is_hashed_like_any_character():
    hasher = PrefixHasher(1)
    assert chain(hasher, [1], (("cache_salt", "\ud800"),)) != chain(hasher, [1], (("cache_salt", "\ud801"),))
