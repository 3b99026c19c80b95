"""The classic orders that docs/eviction.md compares with.

Must not judge them: only that the pool they share is a prefix pool, and that each does what its paper says of it; and
the arithmetic of the tool that changes the pattern.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import best_possible, known_future
from kvkeep.replay.result import Settings
from kvkeep.replay.trace import Arrivals, Request
from tests.replay.test_replaying import PAGE, counted, made
from tools.classic_orders import ORDERS, LeCaR
from tools.pattern_change import caught_up, one_after_the_other
from tools.prefix_pool import Ids, Related, Tree, replay
from tools.related_orders import related_matches

EACH = pytest.mark.parametrize("name", ORDERS)


def flat(*pages: int) -> list[tuple[Ids, int]]:
    """Prompts of one page each: no page hangs behind another."""
    return [(np.array([page], dtype=np.int32), 1) for page in pages]


def pool(name: str, capacity: int, distinct: int = 10_000) -> tuple[Tree, Related]:
    tree = Tree(capacity, distinct)
    return tree, ORDERS[name](tree, 0)


def test_the_end_of_a_chain_leaves_for_a_page_before_it():
    """An order of pages that names a page in the middle loses the chain from its end."""
    tree, order = pool("S3-FIFO", 10)
    long, other = np.arange(9, dtype=np.int32), np.arange(20, 24, dtype=np.int32)
    replay([(long[:4], 4), (long, 9), (other, 4)], tree, order)
    assert [0, 1, 2, 3, 4, 5, 20, 21, 22, 23] == np.flatnonzero(tree.resident).tolist()


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 60))
def test_lru_matches_what_the_product_matches(seed: int, capacity: int):
    """Page for page the same count, by other code."""
    trace, order = made(seed)
    right = counted(trace, order, accounting="reference", gpu_tokens=capacity * PAGE).matched_pages_gpu
    assert right == related_matches("LRU", Pages(trace, PAGE), order, capacity)


@EACH
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 60))
def test_nothing_leaves_before_what_is_behind_it(name: str, seed: int, capacity: int):
    """Resident pages are beginnings of chains, no more than fit, and match no more than is possible."""
    trace, order = made(seed)
    pages = Pages(trace, PAGE)
    tree, kind = pool(name, capacity, pages.distinct)
    matched = 0
    for request in order:
        matched += replay([pages.pages_of(request)], tree, kind)
        assert tree.size == np.count_nonzero(tree.resident) <= capacity
        for ids in pages.page_ids:
            assert tree.resident[ids][: tree.known(ids)].all()
    bare = {page for page in np.flatnonzero(tree.resident).tolist() if page not in tree.children}
    assert bare == set(tree.leaves)
    future = known_future(
        pages, Arrivals(order, False), Settings(gpu_tokens=capacity * PAGE, accounting="reference", eviction="lru")
    )
    assert matched <= best_possible(future, PAGE, [capacity * PAGE])[capacity * PAGE]


@pytest.mark.parametrize("name", ["ARC", "S3-FIFO", "LFU-DA"])
def test_a_scan_passes(name: str):
    """Pages used again and again survive as many pages used once as would fill the pool, of which LRU keeps none."""
    found = []
    for kind in ("LRU", name):
        tree, order = pool(kind, 20)
        for number in range(100):
            replay(flat(*range(8), *range(100 + 8 * number, 108 + 8 * number)), tree, order)
        replay(flat(*range(5000, 5020)), tree, order)
        found.append(replay(flat(*range(8)), tree, order))
    assert [0, 8] == found


def test_lhd_keeps_a_part_of_a_loop():
    """A loop a little too long for the pool: LRU matches nothing, LHD learns to let go of what was just used."""
    loop = flat(*range(100)) * 100
    tree, kind = pool("LRU", 80)
    assert 0 == replay(loop, tree, kind)
    tree, kind = pool("LHD", 80)
    assert replay(loop, tree, kind) > 0.6 * len(loop)


def test_lecar_turns_to_the_expert_that_would_have_kept():
    """Where LRU lets go of pages that soon return, and LFU of pages that do not, the weight of LRU falls."""
    tree, order = pool("LeCaR", 20)
    assert isinstance(order, LeCaR)
    for number in range(100):
        replay(flat(*range(8)) * 2 + flat(*range(100 + 24 * number, 124 + 24 * number)), tree, order)
    assert order.lru_weight < 0.2


def test_a_part_begins_when_the_one_before_it_has_ended():
    """Times go on from part to part, and stand as they were apart within one."""
    parts = [[Request(0, 0, 1, 1, 1, time_s) for time_s in times] for times in ((5.0, 7.0), (100.0, 100.5))]
    assert [0.0, 2.0, 3.0, 3.5] == [request.time_s for request in one_after_the_other(parts)]


def test_caught_up_is_when_the_next_thousand_hit_as_much():
    """The first request from which on a thousand together hit as much as fresh."""
    fresh = np.full(3000, 10)
    kept = fresh.copy()
    assert 0 == caught_up(kept, fresh)
    kept[:500] = 0
    assert 500 == caught_up(kept, fresh)
    kept[500:1500] = 15
    assert 200 == caught_up(kept, fresh)
    assert caught_up(fresh - 1, fresh) is None
