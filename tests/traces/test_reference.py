"""Reference accounting over the product's index and eviction code gives the known counts of real traces, exactly."""

from typing import Any

import pytest

from kvkeep.index.check import check_tree
from tests.traces.accounting import reference_accounting
from tests.traces.conftest import Trace
from tests.traces.reader import in_order

CASES = [
    ("mini_swe_500", "round_robin_8", [49152, 65536, 98304, 131072, 196608, 262144]),
    ("tau_retail_200", "round_robin_32", [16384, 24576, 32768, 49152, 65536, 98304]),
]
NEVER_EVICTS = 1 << 26

Expected = dict[str, list[dict[str, Any]]]


def entry(expected_reuse: Expected, name: str, order: str, page_size: int) -> dict[str, Any]:
    """The reference's counts for a trace in an order, prompts and completions stored."""
    found = [
        e for e in expected_reuse[name] if (e["order"], e["page"], e["store"]) == (order, page_size, "prompt+generated")
    ]
    assert 1 == len(found)
    return found[0]


@pytest.mark.parametrize(("name", "order", "capacities"), CASES)
def test_lru_matches_the_known_counts(
    trace: Trace, expected_reuse: Expected, name: str, order: str, capacities: list[int]
):
    """At six capacities the pages matched, one by one through the tree, are those of an exact page LRU."""
    known = entry(expected_reuse, name, order, 128)["lru_matched_pages_by_capacity_tokens"]
    sessions = trace(name)
    done = reference_accounting(sessions, in_order(sessions, order), capacities, 128)
    assert {c: known[str(c)] for c in capacities} == {c: done[c].matched_pages for c in capacities}
    for replay in done.values():
        check_tree(replay.tree)
        replay.ledger.check_invariants()


@pytest.mark.parametrize(("name", "order"), [case[:2] for case in CASES])
def test_without_eviction_matches_the_known_ceiling(trace: Trace, expected_reuse: Expected, name: str, order: str):
    """A pool that never evicts matches the ceiling and ends with the known number of distinct pages."""
    known = entry(expected_reuse, name, order, 128)
    sessions = trace(name)
    done = reference_accounting(sessions, in_order(sessions, order), [NEVER_EVICTS], 128)[NEVER_EVICTS]
    assert known["matched_pages"] == done.matched_pages
    assert known["distinct_pages_stored"] == done.ledger.idle


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini_swe_500", "tau_retail_200"])
def test_every_known_count(trace: Trace, expected_reuse: Expected, name: str):
    """Every order, page size and capacity of the reference comes out, prompts and completions stored."""
    sessions = trace(name)
    for known in expected_reuse[name]:
        if known["store"] != "prompt+generated":
            continue
        ceiling, page_size = known["matched_pages"], known["page"]
        by_capacity = {int(c): n for c, n in known.get("lru_matched_pages_by_capacity_tokens", {}).items()}
        # Beyond the smallest pool that reaches the ceiling nothing changes.
        enough = min((c for c, n in by_capacity.items() if n == ceiling), default=NEVER_EVICTS)
        wanted = {c: n for c, n in by_capacity.items() if c <= enough} | {NEVER_EVICTS: ceiling}
        done = reference_accounting(sessions, in_order(sessions, known["order"]), wanted, page_size)
        assert wanted == {c: done[c].matched_pages for c in wanted}, known["order"]
