"""Stack distances against a pool that is really kept in order, and against known counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import stack as stacks
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.sizing.curve import HitCurve, knee
from kvkeep.sizing.lru import lru_curve
from kvkeep.sizing.sizing import exact_lru
from kvkeep.stack import Stack

CHAINS = 24


def chain_of(digits: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> list[int]:
    """Page ids of a chain: equal prefixes have equal ids."""
    return [numbers.setdefault(digits[: i + 1], len(numbers)) for i in range(len(digits))]


def pool_hits(requests: list[tuple[list[int], int]], capacity: int) -> int:
    """Matched pages of a pool of `capacity` pages that is kept in order of use, latest last."""
    pool: list[int] = []
    hits = 0
    for pages, prompt_pages in requests:
        found = 0
        while found < prompt_pages and pages[found] in pool:
            found += 1
        hits += found
        for page in reversed(pages):
            if page in pool:
                pool.remove(page)
            pool.append(page)
        del pool[: max(0, len(pool) - capacity)]
    return hits


chains = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=7), st.integers(0, 7)), max_size=CHAINS)


@given(chains)
def test_every_size_hits_what_a_pool_of_that_size_hits(drawn: list[tuple[list[int], int]]) -> None:
    """The curve of one pass is the count of a pool in order of use, for every size at once."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = [(chain_of(tuple(digits), numbers), min(prompt, len(digits))) for digits, prompt in drawn]
    arrays = [(np.array(pages, dtype=np.int32), prompt) for pages, prompt in requests]
    curve = lru_curve(arrays, len(numbers) + 1, page_size=4, prompt_tokens=1000)
    for capacity in range(len(numbers) + 3):
        assert pool_hits(requests, capacity) == curve.matched_pages(4 * capacity + 3)


def test_uses_may_be_renumbered_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack whose uses are renumbered all the time counts the same as one where they never are."""
    rng = np.random.default_rng(5)
    uses = [np.arange(start, start + rng.integers(1, 9), dtype=np.int32) for start in rng.integers(0, 5, 300) * 10]
    hits = []
    for uses_min in (4096, 4):
        monkeypatch.setattr(stacks, "USES_MIN", uses_min)
        stack = Stack(60)
        for pages in uses:
            stack.use(pages, len(pages))
        hits.append(stack.hits().tolist())
    assert hits[0] == hits[1] and hits[0][-1] > 1000


def test_pages_that_are_forgotten_are_new_again() -> None:
    """A forgotten page counts for no distance, and is not found when it is used next, even amid a chain."""
    stack = Stack(6)
    stack.use_few([0, 1, 2], [1, 1, 1])
    stack.use_few([3, 4], [1, 1])
    stack.forget(np.array([1, 4], dtype=np.int32))
    assert 3 == stack.pages
    stack.use_few([0, 1, 2], [1, 1, 1])
    assert [0, 0, 1, 1, 2] == stack.hits().tolist(), "page 3 was used later; of the chain, 0 and 2 are known"
    assert 4 == stack.pages


def test_weights_are_distances() -> None:
    """A page of weight 5 takes the room of five."""
    stack = Stack(4, np.array([5, 1, 1, 1], dtype=np.int64))
    for page in (1, 0, 1):
        stack.use_few([page], [1])
    assert [0] * 6 + [1] == stack.hits().tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), max_size=40))
def test_a_loop_over_few_pages_counts_what_arrays_do(uses: list[tuple[int, int, int]]) -> None:
    """Chains of one to nine pages, and prompts of fewer: both ways of using them give the same curve."""
    arrays, loop = Stack(60), Stack(60)
    for chain, length, prompt in uses:
        pages = np.arange(10 * chain, 10 * chain + length, dtype=np.int32)
        arrays.use(pages, min(prompt, length))
        loop.use_few(pages.tolist(), [1] * min(prompt, length))
    assert arrays.hits().tolist() == loop.hits().tolist() and arrays.pages == loop.pages


def test_a_knee_is_where_more_buys_little() -> None:
    """The smallest size with 95 % of all there is, also where a curve is flat first."""
    assert 8 == knee([1, 2, 4, 8, 16], [0.0, 0.0, 0.1, 0.96, 1.0])
    assert 1 == knee([1, 2, 4], [0.5, 0.5, 0.5])


def test_the_smallest_size_that_hits_all() -> None:
    """`full_tokens` is exact to the page."""
    curve = HitCurve(np.array([0, 1, 1, 3, 3, 3]), 16, 100)
    assert (48, 3, 0.48) == (curve.full_tokens, curve.matched_pages(10**9), curve.hit_share(48))


# ---------------------------------------------------------------------- real traces


@pytest.mark.parametrize(("name", "order"), [("tau_retail_200", "rotate:32"), ("mini_swe_500", "rotate:8")])
def test_known_counts_of_real_traces(shared_dir: Path, name: str, order: str) -> None:
    """One pass gives the published LRU count at every capacity."""
    known = json.loads((shared_dir / "traces" / "expected_reuse.json").read_text())["results"][name]
    (counts,) = [
        row["lru_matched_pages_by_capacity_tokens"]
        for row in known
        if (row["order"], row["page"], row["store"])
        == (f"round_robin_{order.partition(':')[2]}", 128, "prompt+generated")
    ]
    trace = read_trace(shared_dir / "traces" / name)
    curve = exact_lru(Pages(trace, 128), Order.parse(order).arrivals(trace))
    assert len(counts) > 20
    assert counts == {tokens: curve.matched_pages(int(tokens)) for tokens in counts}
