"""`kvkeep bench soak`: a short one, and what it would say of a leak.

Must not judge a time.
"""

from dataclasses import replace

import pytest

from bench.soak import Stretch, _judge, growth
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput

IDLE = Stretch(10.0, 100, 5, 0.5, 400.0, 1000, 2, 6, {"leases": 0, "pages_gone": 0})


def judged(stretches: list[Stretch]) -> dict[str, object]:
    return {str(row["metric"]): row["reached"] for row in _judge(stretches, smoke=False) if "reached" in row}


def test_a_short_soak_holds_nothing_when_it_is_idle():
    """Sessions are served from both tiers, some are given up, and after every stretch nothing is held by anybody."""
    report = run_bench("soak", ["--smoke", "--minutes", "0.03"])
    assert report.ok and 0 == report.metrics["held_when_idle"].value
    assert (report.metrics["requests"].value or 0) > 8 and 0 < (report.metrics["matched_share"].value or 0) < 1
    rows = [row for row in report.rows if row.get("series") == "soak"]
    idle = ("leases", "pages_gone", "host_pages_gone", "running")
    assert rows and all(0 == row[name] for row in rows for name in idle)
    assert all(float(str(row["rss_mib"])) > 1 for row in rows)


def test_flat_numbers_pass():
    """Twelve stretches that are alike, after a beginning that filled memory."""
    filling = [replace(IDLE, rss_mib=100.0 * number) for number in range(4)]
    assert all(judged([*filling, *[IDLE] * 12]).values())


@pytest.mark.parametrize(
    ("leak", "metric"),
    [
        (lambda number: {"rss_mib": 400.0 + 2 * number}, "rss_growth_mib"),
        (lambda number: {"objects": 1000 + 400 * number}, "objects_growth"),
        (lambda number: {"threads": 2 + number}, "threads_growth"),
        (lambda number: {"files": 6 + number // 4}, "files_growth"),
        (lambda number: {"held": {"leases": 0, "pages_gone": int(number == 7)}}, "held_when_idle"),
        (lambda number: {"held": {"leases": 0, "pages_gone": -int(number == 7)}}, "held_when_idle"),
    ],
)
def test_what_grows_or_is_held_is_told(leak: object, metric: str):
    """Each kind of leak misses its own limit and no other one."""
    assert callable(leak)
    found = judged([replace(IDLE, **leak(number)) for number in range(16)])
    assert {metric} == {name for name, reached in found.items() if not reached}


def test_growth_is_between_medians():
    """One stretch in which something large was held for a moment is no growth; of nothing there is none."""
    spike = [IDLE, replace(IDLE, rss_mib=900.0), IDLE]
    assert 0.0 == growth(spike, [IDLE] * 3, lambda one: one.rss_mib)
    assert growth([], [IDLE], lambda one: one.rss_mib) is None


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "inf"], ["--seed", "-1"], ["--hours", "1"]])
def test_bad_options_are_refused(arguments: list[str]):
    """One line, before a model is loaded."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("soak", arguments)
