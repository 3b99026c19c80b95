"""What a real pool matches on real traces: the committed counts, and why they are what they are.

README.md beside this file explains each source of difference from the reference.
"""

from typing import Any

import pytest

from kvkeep.config import IndexAt
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import replay
from kvkeep.replay.result import Counts, Settings
from kvkeep.replay.trace import Arrivals
from tests.traces.conftest import Cut
from tests.traces.counts import in_order, lru_matches

PAGE = 128
CASES = [
    pytest.param("mini_swe_500", "round_robin_8", [131072, 262144], marks=pytest.mark.slow),
    pytest.param("mini_swe_500", "round_robin_8", [196608, 393216], marks=pytest.mark.slow),
    ("tau_retail_200", "round_robin_32", [24576, 32768, 49152, 65536, 98304, 131072]),
]
BURST = 8


def copies(arrivals: Arrivals, count: int) -> Arrivals:
    """Every request `count` times in a row: the burst of a client that samples several answers to one prompt."""
    return Arrivals([request for request in arrivals.requests for _ in range(count)], timed=False)


def counted(pages: Pages, arrivals: Arrivals, settings: Settings) -> Counts:
    return replay(pages, arrivals, settings).counts


@pytest.mark.parametrize(("name", "order", "capacities"), CASES)
def test_a_real_pool_gives_the_committed_counts(
    cut: Cut, own_counts: dict[str, Any], name: str, order: str, capacities: list[int]
):
    """One live request at a time through the public interface: matched pages by capacity in tokens."""
    pages = cut(name, PAGE)
    arrivals = in_order(pages, order)
    committed = own_counts["one_live_request"][f"{name} {order}"]
    found = {c: counted(pages, arrivals, Settings(c, eviction="lru")).matched_pages_gpu for c in capacities}
    assert {c: committed[str(c)] for c in capacities} == found


@pytest.mark.parametrize(("name", "order", "capacities"), CASES)
def test_the_committed_counts_are_the_reference_with_three_rules(
    cut: Cut, own_counts: dict[str, Any], name: str, order: str, capacities: list[int]
):
    """One prompt token stays to compute, the last sampled one has no KV, a live request has one tail page: no more."""
    pages = cut(name, PAGE)
    committed = own_counts["one_live_request"][f"{name} {order}"]
    found = lru_matches(pages, [c - PAGE for c in capacities], in_order(pages, order), unwritten=1)
    assert {c - PAGE: committed[str(c)] for c in capacities} == found


@pytest.mark.parametrize("index_at", ["seal", "finish"])
def test_requests_in_flight_give_the_committed_counts(cut: Cut, own_counts: dict[str, Any], index_at: IndexAt):
    """Up to 8 requests in flight: matched pages when pages become visible as they fill, and when requests end."""
    pages = cut("tau_retail_200", PAGE)
    plain = in_order(pages, "round_robin_32")
    bursts = copies(Order.parse("rotate:8").arrivals(pages.trace, 40), BURST)
    got = {
        f"{label} {capacity}": counted(
            pages, arrivals, Settings(capacity, index_at=index_at, concurrency=BURST, eviction="lru")
        ).matched_pages_gpu
        for label, arrivals, capacity in (
            ("single", plain, 98304),
            ("single", plain, 1048576),
            ("bursts of 8", bursts, 1048576),
        )
    }
    assert own_counts["in_flight"][index_at] == got


TIMED = [
    pytest.param("mini_swe_500", "recorded", None, 524288, 0, marks=pytest.mark.slow),
    ("claude_code_355", "open:8", 40, 1048576, 0),
    ("claude_code_355", "open:8", 40, 262144, 1048576),
    ("magentic_one_25", "open:5", None, 65536, 0),
]


@pytest.mark.parametrize(("name", "order", "sessions", "gpu_tokens", "cpu_tokens"), TIMED)
def test_requests_that_last_give_the_committed_counts(
    cut: Cut, own_counts: dict[str, Any], name: str, order: str, sessions: int | None, gpu_tokens: int, cpu_tokens: int
):
    """By the times of the trace: what each tier matched, who waited for pages, who had to give its pages back."""
    pages = cut(name, PAGE)
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    counts = counted(pages, arrivals, Settings(gpu_tokens, cpu_tokens, eviction="lru"))
    got = {
        "gpu": counts.matched_pages_gpu,
        "cpu": counts.matched_pages_cpu,
        "stalls": counts.stalls,
        "preemptions": counts.preemptions,
    }
    assert own_counts["in_time"][f"{name} {order} {gpu_tokens} {cpu_tokens}"] == got
