"""What a real pool matches on real traces: the committed counts, and why they are what they are.

README.md beside this file explains each source of difference from the reference.
"""

from typing import Any

import pytest

from kvkeep.config import IndexAt
from tests.traces.accounting import engine_accounting, reference_accounting
from tests.traces.conftest import Trace
from tests.traces.in_flight import copies, in_flight
from tests.traces.reader import in_order

PAGE = 128
CASES = [
    ("mini_swe_500", "round_robin_8", [131072, 196608, 262144, 393216]),
    ("tau_retail_200", "round_robin_32", [24576, 32768, 49152, 65536, 98304, 131072]),
]
BURST = 8


@pytest.mark.parametrize(("name", "order", "capacities"), CASES)
def test_a_real_pool_gives_the_committed_counts(
    trace: Trace, own_counts: dict[str, Any], name: str, order: str, capacities: list[int]
):
    """One live request at a time through the public interface: matched pages by capacity in tokens."""
    sessions = trace(name)
    requests = list(in_order(sessions, order))
    got = {str(c): engine_accounting(sessions, requests, c, PAGE).matched_tokens // PAGE for c in capacities}
    assert own_counts["one_live_request"][f"{name} {order}"] == got


@pytest.mark.parametrize(("name", "order", "capacities"), CASES)
def test_the_committed_counts_are_the_reference_with_three_rules(
    trace: Trace, own_counts: dict[str, Any], name: str, order: str, capacities: list[int]
):
    """One prompt token stays to compute, the last sampled one has no KV, a live request has one tail page: no more."""
    sessions = trace(name)
    pools = [c - PAGE for c in capacities]
    done = reference_accounting(sessions, in_order(sessions, order), pools, PAGE, unwritten=1)
    got = {str(c + PAGE): replay.matched_pages for c, replay in done.items()}
    assert own_counts["one_live_request"][f"{name} {order}"] == got


@pytest.mark.parametrize("index_at", ["seal", "finish"])
def test_requests_in_flight_give_the_committed_counts(trace: Trace, own_counts: dict[str, Any], index_at: IndexAt):
    """Up to 8 requests in flight: matched pages when pages become visible as they fill, and when requests end."""
    sessions = trace("tau_retail_200")
    plain = list(in_order(sessions, "round_robin_32"))
    bursts = copies(in_order(sessions[:40], "round_robin_8"), BURST)
    got = {
        f"{label} {capacity}": in_flight(
            sessions, requests, capacity=capacity, page_size=PAGE, index_at=index_at, live_max=BURST
        ).matched_tokens
        // PAGE
        for label, requests, capacity in (
            ("single", plain, 98304),
            ("single", plain, 1048576),
            ("bursts of 8", bursts, 1048576),
        )
    }
    assert own_counts["in_flight"][index_at] == got
