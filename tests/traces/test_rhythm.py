"""How much of what LRU leaves to the best possible the rhythm order collects on real traces, in reference accounting.

Must not count anything itself: LRU, the order and the bound are the product's.
"""

from collections.abc import Sequence

import pytest

from kvkeep.index.hints import Discard
from kvkeep.index.orders import make_order
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.replaying import best_possible, known_future
from kvkeep.replay.result import Settings
from kvkeep.replay.seat import TraceClock
from kvkeep.replay.trace import Arrivals
from tests.traces.conftest import Cut
from tests.traces.counts import lru_matches

SEEDS = (0, 1, 2)
K = 1024


def matches(pages: Pages, arrivals: Arrivals, capacity: int, *, seed: int, discard: bool = False) -> int:
    """Matched pages of the rhythm order in a pool of `capacity` tokens.   discard: a session's last request says so."""
    clock = TraceClock()
    order = make_order("rhythm", capacity // pages.page_size, clock, seed)
    pool = Reference(pages, capacity // pages.page_size, order, clock)
    last = {request.session: number for number, request in enumerate(arrivals.requests)}
    for number, request in enumerate(arrivals.requests):
        clock.now_s = request.time_s
        pool.serve(request)
        if discard and last[request.session] == number and pool.last_use is not None:
            assert order.uses is not None
            order.uses.hint(pool.last_use, Discard())
    pool.ledger.check_invariants()
    return pool.counts.matched_pages_gpu


def closed(
    pages: Pages, order: str, capacities: Sequence[int], *, sessions: int | None = None, discard: bool = False
) -> dict[int, float]:
    """By capacity, what share of the distance from LRU to the best possible it collects, as a mean over the seeds."""
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    low = lru_matches(pages, capacities, arrivals)
    future = known_future(pages, arrivals, Settings(gpu_tokens=max(capacities), accounting="reference"))
    best = best_possible(future, pages.page_size, capacities)
    out = {}
    for c in capacities:
        got = sum(matches(pages, arrivals, c, seed=seed, discard=discard) for seed in SEEDS) / len(SEEDS)
        out[c // K] = round((got - low[c]) / (best[c] - low[c]), 3)
    return out


def test_a_rotation_of_tau_sessions(cut: Cut) -> None:
    """At least 85 % of the distance, and 95 % when sessions say that they end."""
    pages = cut("tau_retail_200", 128)
    found = closed(pages, "rotate:32", [32 * K, 64 * K])
    assert all(share >= 0.85 for share in found.values()), found
    found = closed(pages, "rotate:32", [32 * K, 64 * K], discard=True)
    assert all(share >= 0.95 for share in found.values()), found


@pytest.mark.slow
def test_claude_sessions_at_their_own_pace(cut: Cut) -> None:
    """At least 45 % where LRU is below 75 %."""
    found = closed(cut("claude_code_355", 128), "open:24", [128 * K, 512 * K], sessions=60)
    assert all(share >= 0.45 for share in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "sessions", "capacities", "least"),
    [("open:8", 40, [128 * K], 0.44), ("open:100", 355, [1024 * K], 0.60)],
)
def test_more_claude_sessions(cut: Cut, order: str, sessions: int, capacities: list[int], least: float) -> None:
    """Few sessions, which is the least that it wins where LRU is below 75 %, and all of them."""
    found = closed(cut("claude_code_355", 128), order, capacities, sessions=sessions)
    assert all(share >= least for share in found.values()), found


@pytest.mark.parametrize(("order", "sessions", "capacity"), [("open:8", 40, 1024 * K), ("open:24", 60, 4096 * K)])
def test_it_is_lru_where_all_that_is_left_are_pauses(cut: Cut, order: str, sessions: int, capacity: int) -> None:
    """Where LRU hits 95 %, the chains that it drops are in pauses, and so nothing is lost to it."""
    pages = cut("claude_code_355", 128)
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    tokens = sum(request.prompt_len for request in arrivals.requests)
    low = lru_matches(pages, [capacity], arrivals)[capacity]
    for seed in SEEDS:
        assert (matches(pages, arrivals, capacity, seed=seed) - low) * 128 / tokens >= -0.0005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "capacities", "least"),
    [
        ("rotate:8", [64 * K, 128 * K], 0.93),
        ("rotate:16", [64 * K, 128 * K, 256 * K], 0.93),
        ("recorded", [64 * K, 128 * K, 256 * K], 0.70),
    ],
)
def test_mini_swe_sessions(cut: Cut, order: str, capacities: list[int], least: float) -> None:
    """At least 93 % in rotation, 70 % as recorded."""
    found = closed(cut("mini_swe_500", 128), order, capacities)
    assert all(share >= least for share in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order", "sessions"),
    [
        ("magentic_one_25", "rotate:4", None),
        ("magentic_one_25", "open:12", None),
        ("tau_retail_200", "rotate:8", None),
        ("tau_retail_200", "rotate:100", None),
        ("claude_code_355", "open:8", 40),
        ("claude_code_355", "open:24", 60),
        ("mini_swe_500", "recorded", None),
    ],
)
def test_it_is_nowhere_much_worse_than_lru(cut: Cut, name: str, order: str, sessions: int | None) -> None:
    """At every capacity from 32k to 4M tokens at most half a point of the prompt tokens is lost to LRU."""
    pages = cut(name, 128)
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    tokens = sum(request.prompt_len for request in arrivals.requests)
    for c in (32 * K << i for i in range(8)):
        low = lru_matches(pages, [c], arrivals)[c]
        got = matches(pages, arrivals, c, seed=0)
        assert (got - low) * 128 / tokens >= -0.005, f"{c} tokens: {got} pages where LRU matches {low}"
