"""Reference accounting over the product's index and eviction code gives the known counts of real traces, exactly."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from kvkeep.index.check import check_tree
from kvkeep.replay.orders import Order
from kvkeep.replay.replaying import best_possible, known_future, replay
from kvkeep.replay.result import Settings
from tests.traces.conftest import Cut
from tests.traces.counts import in_order, lru_matches, lru_pool

ALL, PROMPTS = "prompt+generated", "prompt_only"
CASES = [
    ("mini_swe_500", "round_robin_8", ALL, 128, [65536, 131072]),
    pytest.param(*("mini_swe_500", "round_robin_8", ALL, 128, [49152, 98304, 196608, 262144]), marks=pytest.mark.slow),
    ("tau_retail_200", "round_robin_32", ALL, 128, [16384, 24576, 32768, 49152, 65536, 98304]),
    ("magentic_one_25", "round_robin_1", PROMPTS, 128, [16384, 49152, 131072]),
    ("mooncake_conversation", "recorded_time", PROMPTS, 512, [1048576]),
    ("claude_code_355", "round_robin_4", PROMPTS, 128, [1048576]),
]
NEVER_EVICTS = 1 << 28

Expected = dict[str, list[dict[str, Any]]]


def entry(expected_reuse: Expected, name: str, order: str, stored: str, page_size: int) -> dict[str, Any]:
    """The reference's counts for a trace in an order."""
    found = [e for e in expected_reuse[name] if (e["order"], e["page"], e["store"]) == (order, page_size, stored)]
    assert 1 == len(found)
    return found[0]


@pytest.mark.parametrize(("name", "order", "stored", "page_size", "capacities"), CASES)
def test_lru_matches_the_known_counts(
    cut: Cut, expected_reuse: Expected, name: str, order: str, stored: str, page_size: int, capacities: list[int]
):
    """At some capacities the pages matched, one by one through the tree, are those of an exact page LRU."""
    known = entry(expected_reuse, name, order, stored, page_size)["lru_matched_pages_by_capacity_tokens"]
    pages = cut(name, page_size)
    arrivals = in_order(pages, order)
    assert {c: known[str(c)] for c in capacities} == lru_matches(pages, capacities, arrivals)


@pytest.mark.parametrize(("name", "order", "stored"), [case[:3] for case in (CASES[0], CASES[2])])
def test_without_eviction_matches_the_known_ceiling(
    cut: Cut, expected_reuse: Expected, name: str, order: str, stored: str
):
    """A pool that never evicts matches the ceiling, and holds the known number of distinct pages in a sound tree."""
    known = entry(expected_reuse, name, order, stored, 128)
    pages = cut(name, 128)
    pool = lru_pool(pages, 1 << 26, in_order(pages, order))
    assert known["matched_pages"] == pool.counts.matched_pages_gpu
    assert known["distinct_pages_stored"] == pool.ledger.idle
    check_tree(pool.tree)
    pool.ledger.check_invariants()


def test_two_tiers_share_the_known_counts(cut: Cut, expected_reuse: Expected):
    """By the stack property the GPU hits what a pool of its size hits, and both together what one of their sum hits."""
    known = entry(expected_reuse, "tau_retail_200", "round_robin_32", ALL, 128)["lru_matched_pages_by_capacity_tokens"]
    pages = cut("tau_retail_200", 128)
    settings = Settings(gpu_tokens=32768, cpu_tokens=65536, accounting="reference", eviction="lru")
    counts = replay(pages, in_order(pages, "round_robin_32"), settings).counts
    both = counts.matched_pages_gpu + counts.matched_pages_cpu
    assert (known["32768"], known["98304"]) == (counts.matched_pages_gpu, both)


EVERY_ORDER = [
    *(("mini_swe_500", f"round_robin_{n}") for n in (1, 4, 8, 16, 32)),
    ("mini_swe_500", "recorded_time"),
    *(("tau_retail_200", f"round_robin_{n}") for n in (1, 8, 32)),
    ("magentic_one_25", "round_robin_1"),
    ("mooncake_conversation", "recorded_time"),
    *(("claude_code_355", f"round_robin_{n}") for n in (1, 4, 16)),
]


def test_every_order_of_the_reference_is_replayed(expected_reuse: Expected):
    """The list above is the reference's."""
    assert set(EVERY_ORDER) == {(name, e["order"]) for name, entries in expected_reuse.items() for e in entries}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), EVERY_ORDER)
def test_every_known_count(cut: Cut, expected_reuse: Expected, name: str, order: str):
    """Every page size, capacity and store of the reference comes out; two tiers are differences of these."""
    for known in (e for e in expected_reuse[name] if e["order"] == order):
        pages = cut(name, known["page"])
        arrivals = in_order(pages, order)
        if known["store"] == PROMPTS:
            arrivals = arrivals.prompts_only()
        ceiling = known["matched_pages"]
        by_capacity = {int(c): n for c, n in known.get("lru_matched_pages_by_capacity_tokens", {}).items()}
        # Beyond the smallest pool that reaches the ceiling nothing changes.
        enough = min((c for c, n in by_capacity.items() if n == ceiling), default=NEVER_EVICTS)
        wanted = {c: n for c, n in by_capacity.items() if c <= enough} | {NEVER_EVICTS: ceiling}
        assert wanted == lru_matches(pages, wanted, arrivals), (known["store"], known["page"])


# ---------------------------------------------------------------------- the best possible


@pytest.mark.parametrize(
    ("name", "order", "sessions", "page_size", "shares"),
    [
        ("mini_swe_500", "rotate:8", None, 128, {65536: 48.1, 131072: 85.2}),
        ("mini_swe_500", "rotate:16", None, 128, {65536: 24.9, 131072: 48.9, 262144: 89.0}),
        ("mini_swe_500", "recorded", None, 128, {65536: 24.6, 131072: 42.0, 262144: 66.8, 524288: 91.6}),
        ("tau_retail_200", "rotate:32", None, 128, {32768: 63.5, 65536: 86.3}),
        ("claude_code_355", "open:8", 40, 128, {262144: 83.2, 1048576: 95.0}),
        ("claude_code_355", "open:24", 60, 128, {131072: 38.5, 524288: 76.1, 1048576: 88.9, 4194304: 95.0}),
        ("claude_code_355", "open:100", None, 128, {1048576: 59.8, 4194304: 91.2}),
        ("mooncake_conversation", "recorded", None, 512, {1048576: 26.2, 4194304: 37.3}),
    ],
)
def test_the_best_possible_is_the_known_bound(
    cut: Cut, name: str, order: str, sessions: int | None, page_size: int, shares: dict[int, float]
):
    """Per cent of prompt tokens hit by an order that knows the future, as other code has counted them."""
    pages = cut(name, page_size)
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    future = known_future(pages, arrivals, Settings(1, accounting="reference"))
    prompt_tokens = sum(request.prompt_len for request in arrivals.requests)
    found = best_possible(future, page_size, shares)
    assert shares == {c: round(100 * n * page_size / prompt_tokens, 1) for c, n in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order", "sessions", "capacities"),
    [
        ("tau_retail_200", "rotate:32", None, [16384, 32768, 65536, 98304]),
        ("mini_swe_500", "rotate:16", None, [131072]),
        ("claude_code_355", "open:24", 60, [131072]),
        ("magentic_one_25", "rotate:5", None, [16384, 65536]),
    ],
)
def test_the_best_possible_is_belady_by_pages(
    cut: Cut, shared_dir: Path, name: str, order: str, sessions: int | None, capacities: list[int]
):
    """The bound counted by groups is the one that a plain page-by-page program counts, to the page."""
    pages = cut(name, 128)
    arrivals = Order.parse(order).arrivals(pages.trace, sessions)
    found = best_possible(known_future(pages, arrivals, Settings(1, accounting="reference")), 128, capacities)
    plain = runpy.run_path(str(shared_dir / "trials/belady.py"))["belady"]
    requests = []
    for request in arrivals.requests:
        left, prompt = pages.pages_of(request)
        requests.append((left.tolist(), prompt, request.prompt_len))
    prompt_tokens = sum(request.prompt_len for request in arrivals.requests)
    assert found == {c: round(plain(requests, pages.distinct, c // 128) * prompt_tokens / 128) for c in capacities}
