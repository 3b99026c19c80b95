"""`kvkeep bench index`: it runs, names its figures as promised, and measures the workload that others were measured on.

Must not judge a time: that is the bench's own business.
"""

from itertools import product

import pytest

from bench._measure import Case, Measured
from bench._requests import Requests
from bench._workload import Workload, agent_workload
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report

PROMISED = {
    "floor_xxh3_us_1000",
    "floor_memcmp_us_1000",
    "names_us_1000",
    "floor_memcmp_us_8000",
    "spin_us",
    "match_us_1000_one_run",
    "match_us_1000_rotation",
    "match_us_1000_30_branches",
    "match_us_8000",
    "seal_us_per_page",
    "release_oldest_us_1000_cached",
    "release_oldest_us_1000_own",
    "seal_us_one_page",
    *(f"alloc_us_per_page_{count}{runs}" for count, runs in product((1, 8, 64), ("", "_short_runs"))),
    "rhythm_evict_us_per_page",
    "rhythm_learn_us",
    "w1_request_us_4m",
    "w1_request_us_1m",
    "w1_request_us_256k",
    "bytes_per_page",
}


@pytest.fixture(scope="module")
def smoke() -> Report:
    return run_bench("index", ["--smoke"])


@pytest.fixture(scope="module")
def w1() -> Workload:
    return agent_workload()


def test_the_promised_metrics_are_there(smoke: Report):
    """Every metric that the results format names is there and above zero; times have a tail and a count."""
    assert smoke.metrics.keys() >= PROMISED
    for name in PROMISED:
        metric = smoke.metrics[name]
        assert metric.value is not None and metric.value > 0, name
        if name != "bytes_per_page":
            assert metric.unit == "us" and metric.p99 is not None and metric.p99 >= metric.value and metric.samples, (
                name
            )


def test_a_row_says_what_its_limit_is_and_whether_it_is_reached(smoke: Report):
    """Every promised figure that is no floor is held against a limit, and the report is ok when all are reached."""
    judged = {str(row["metric"]): row for row in smoke.rows if "reached" in row}
    assert {name for name in PROMISED if not name.startswith(("floor", "spin"))} == judged.keys()
    for row in judged.values():
        median, bound = row["median"], row["bound"]
        assert isinstance(median, float) and isinstance(bound, float)
        assert row["reached"] == (median <= bound)
    assert smoke.ok == all(row["reached"] for row in judged.values())


def test_a_limit_scales_with_the_spin_or_stands_on_a_floor():
    """On a machine a third slower than the quiet one a limit is a third higher; a faster one keeps it."""
    slow = Measured(Case("a", "", list, limit=60.0), samples=[70.0], spins=[400.0])
    fast = Measured(Case("b", "", list, limit=60.0), samples=[70.0], spins=[200.0])
    ratio = Measured(Case("c", "", list, floor="a", floor_ratio=1.5), samples=[70.0], spins=[400.0])
    assert 80.0 == slow.bound({})
    assert 60.0 == fast.bound({})
    assert 105.0 == ratio.bound({"a": slow})


def test_w1_is_the_workload_that_others_were_measured_on(w1: Workload):
    """Its requests, tokens and ceiling are the published ones."""
    assert 1920 == len(w1.turns)
    assert 45_611_047 == w1.prompt_tokens
    assert 1_969_626 == w1.distinct_tokens
    assert 39_901 == max(len(ids) for ids in w1.ids)
    assert 0.96493 == round(w1.ceiling(128), 5)


@pytest.mark.parametrize(("capacity", "share"), [(256_000, 0.35254), (1_000_000, 0.50095), (4_000_000, 0.96493)])
def test_w1_matches_what_an_ideal_lru_matches(w1: Workload, capacity: int, share: float):
    """The share of prompt tokens that the pool matches is that of an ideal page LRU computed by other code."""
    requests = Requests(w1, capacity)
    assert len(w1.turns) == len(requests.sample())
    assert share == round(requests.matched_share, 5)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rounds", "many"], ["--fast"]])
def test_unknown_options_are_refused(arguments: list[str]):
    """Bad options end in one line that says what was wrong, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("index", arguments)
