"""`kvkeep bench transfer`: it runs, names its figures as promised, and holds them against the floor of its own run.

Must not judge a time: that is the bench's own business.
"""

import pytest

from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report

RATES = {"floor_memcpy_gbps", "h2d_gbps", "d2h_gbps", "pieces_gbps"}
COSTS = {"manager_us_per_page_64", "manager_us_per_page_1000", "manager_us_plan_of_one"}


@pytest.fixture(scope="module")
def quick() -> Report:
    return run_bench("transfer", ["--quick"])


def test_the_promised_metrics_are_there(quick: Report):
    """Every metric that the results format names is there, above zero, in its unit, and rests on samples."""
    assert quick.metrics.keys() >= RATES | COSTS
    for name in RATES | COSTS:
        metric = quick.metrics[name]
        assert metric.value is not None and metric.value > 0 and metric.samples, name
        assert ("GB/s" if name in RATES else "us") == metric.unit


def test_copies_are_held_against_the_floor_of_the_run(quick: Report):
    """The floor is the best plain memcpy; whole pages must reach 85 % of it, pieces 75 %; ok is all of that."""
    rows = {row["metric"]: row for row in quick.rows}
    floor = max(float(str(row["median"])) for name, row in rows.items() if str(name).startswith("memcpy"))
    assert floor == rows["floor_memcpy_gbps"]["median"] == quick.metrics["floor_memcpy_gbps"].value
    for name, ratio in (("h2d_gbps", 0.85), ("d2h_gbps", 0.85), ("pieces_h2d_gbps", 0.75), ("pieces_d2h_gbps", 0.75)):
        assert float(str(rows[name]["bound"])) == pytest.approx(ratio * floor, abs=0.02)
    assert quick.ok == all(row.get("reached", True) for row in quick.rows)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "0"], ["--nonsense"]])
def test_bad_arguments_are_bad_input(arguments: list[str]):
    """They end in one line, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("transfer", arguments)
