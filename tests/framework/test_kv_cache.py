"""Pages of the KV cache: nothing leaks, nothing is owned twice, cached content is what its hash says."""

from __future__ import annotations

import pytest
from crossdock.errors import MisuseError
from crossdock.kv_cache import ROOT_HASH, SCRATCH_PAGE, BlockPool, page_hash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

PAGE_TOKENS = 2
NUM_PAGES = 9
POISON = (-1,)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet allocate, share, publish and release pages; ``content`` is what the pages really hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_PAGES, PAGE_TOKENS, seed=7)
        self.content: dict[int, tuple[int, ...]] = {}
        self.owners: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start_sequence(self, tokens: list[int]) -> None:
        chain = self.pool.hash_chain(tokens)
        found = self.pool.match(chain)
        for index, page in enumerate(found):
            prefix = tuple(tokens[: (index + 1) * PAGE_TOKENS])
            assert self.content[page] == prefix, "a hash led to a page with other content"
        self.pool.hold(found)
        new = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(found))
        if new is None:
            self.pool.release(found)
            return
        assert SCRATCH_PAGE not in new
        held = {page for pages in self.owners for page in pages} | set(found)
        assert not held & set(new), "a page was given to two owners"
        for page in new:
            self.content[page] = POISON
        pages = found + new
        for index in range(len(found), len(tokens) // PAGE_TOKENS):
            self.content[pages[index]] = tuple(tokens[: (index + 1) * PAGE_TOKENS])
            self.pool.publish(pages[index], chain[index])
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(place))

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert self.pool.usage().cached == 0

    @invariant()
    def counts_add_up(self) -> None:
        usage = self.pool.usage()
        assert usage.free + usage.cached + usage.held == NUM_PAGES - 1
        expected = [0] * NUM_PAGES
        for pages in self.owners:
            for page in pages:
                expected[page] += 1
        assert [self.pool.holders(page) for page in range(NUM_PAGES)] == expected
        assert usage.held == sum(count > 0 for count in expected)

    def teardown(self) -> None:
        while self.owners:
            self.pool.release(self.owners.pop())
        assert self.pool.available_pages == NUM_PAGES - 1


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNoPageLeaksAndNoneIsOwnedTwice = PoolMachine.TestCase


def test_hashes_are_chained_so_that_equal_pages_after_different_prefixes_differ() -> None:
    pool = BlockPool(4, 2, seed=1)
    first, second = pool.hash_chain([1, 2, 9, 9]), pool.hash_chain([3, 4, 9, 9])
    assert first[1] != second[1]
    assert pool.hash_chain([1, 2, 9, 9, 5]) == first
    assert pool.hash_chain([1, 2, 9, 9], known=first[:1]) == first


def test_the_seed_changes_every_hash() -> None:
    assert BlockPool(4, 2, seed=1).hash_chain([1, 2]) != BlockPool(4, 2, seed=2).hash_chain([1, 2])


def test_the_least_recently_used_page_is_evicted_first_and_a_sequence_loses_its_tail_first() -> None:
    pool = BlockPool(5, 1, seed=1)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None and new is not None
    chains = pool.hash_chain([1, 2]), pool.hash_chain([3, 4])
    for pages, chain in zip((old, new), chains, strict=True):
        for page, digest in zip(pages, chain, strict=True):
            pool.publish(page, digest)
        pool.release(pages)
    assert pool.allocate(1) == [old[1]]
    assert pool.match(chains[0]) == [old[0]]
    assert pool.match(chains[1]) == new


def test_without_prefixes_nothing_is_found_again() -> None:
    pool = BlockPool(3, 1, seed=1, keep_prefixes=False)
    pages = pool.allocate(1)
    assert pages is not None
    assert pool.hash_chain([5]) == [], "and nothing is hashed"
    digest = page_hash(ROOT_HASH, [5], 1)
    pool.publish(pages[0], digest)
    pool.release(pages)
    assert pool.match([digest]) == []
    assert pool.usage().free == 2


def test_allocation_beyond_the_pool_changes_nothing() -> None:
    pool = BlockPool(3, 4, seed=1)
    assert pool.allocate(3) is None
    assert pool.available_pages == 2


def test_adopted_blocks_are_found_by_their_hash_once_published() -> None:
    source, target = BlockPool(4, 2, seed=3), BlockPool(4, 2, seed=3)
    chain = source.hash_chain([1, 2, 3, 4])
    adopted = target.adopt(chain)
    assert adopted is not None
    for digest, page in adopted.items():
        target.publish(page, digest)
    target.release(adopted.values())
    assert target.match(chain) == [adopted[digest] for digest in chain]
    assert target.adopt(chain) == {}
    assert target.adopt(source.hash_chain([9, 9, 8, 8, 7, 7, 6, 6])) is None


@pytest.mark.parametrize("page", [SCRATCH_PAGE, 1])
def test_releasing_a_page_nobody_holds_is_an_error(page: int) -> None:
    with pytest.raises(MisuseError, match=f"page {page} was released"):
        BlockPool(3, 1).release([page])


def test_holding_a_free_page_is_an_error() -> None:
    with pytest.raises(MisuseError, match="its content is gone"):
        BlockPool(3, 1).hold([1])


def test_publishing_a_page_nobody_holds_is_an_error() -> None:
    with pytest.raises(MisuseError, match="nobody holds it"):
        BlockPool(3, 1).publish(1, b"x")


@pytest.mark.parametrize(("pages", "tokens"), [(1, 16), (2, 0)])
def test_a_pool_too_small_for_anything_is_refused(pages: int, tokens: int) -> None:
    with pytest.raises(MisuseError, match="at least 2 pages"):
        BlockPool(pages, tokens)
