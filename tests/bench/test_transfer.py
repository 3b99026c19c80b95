"""`kvkeep bench transfer`: it runs, names its figures as promised, and holds them against the floor of its own run.

Must not judge a time: that is the bench's own business.
"""

import pytest

from bench._simulating import SeedFailed, operations
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report

RATES = {"floor_memcpy_gbps", "h2d_gbps", "d2h_gbps", "pieces_gbps"}
COSTS = {"manager_us_per_page_64", "manager_us_per_page_1000", "manager_us_plan_of_one"}
SIMULATED = {"sim_ops_per_s", "sim_ops_per_s_checked"}
UNITS = {name: unit for names, unit in ((RATES, "GB/s"), (COSTS, "us"), (SIMULATED, "ops/s")) for name in names}


@pytest.fixture(scope="module")
def smoke() -> Report:
    return run_bench("transfer", ["--smoke"])


def test_the_promised_metrics_are_there(smoke: Report):
    """Every metric that the results format names is there, above zero, in its unit, and rests on samples."""
    assert smoke.metrics.keys() >= UNITS.keys()
    for name, unit in UNITS.items():
        metric = smoke.metrics[name]
        assert metric.value is not None and metric.value > 0 and metric.samples, name
        assert unit == metric.unit


def test_copies_are_held_against_the_floor_of_the_run(smoke: Report):
    """The floor is the best plain memcpy; whole pages must reach 85 % of it, pieces 75 %; ok is all of that."""
    rows = {row["metric"]: row for row in smoke.rows}
    floor = max(float(str(row["median"])) for name, row in rows.items() if str(name).startswith("memcpy"))
    assert floor == rows["floor_memcpy_gbps"]["median"] == smoke.metrics["floor_memcpy_gbps"].value
    for name, ratio in (("h2d_gbps", 0.85), ("d2h_gbps", 0.85), ("pieces_h2d_gbps", 0.75), ("pieces_d2h_gbps", 0.75)):
        assert float(str(rows[name]["bound"])) == pytest.approx(ratio * floor, abs=0.02)
    assert smoke.ok == all(row.get("reached", True) for row in smoke.rows)


def test_checked_simulation_is_held_against_its_limit(smoke: Report):
    """10,000 seeds of 200 operations in 6 minutes; a slower machine has a lower bound, and without checks there is
    none."""
    rows = {row["metric"]: row for row in smoke.rows}
    checked, unchecked = rows["sim_ops_per_s_checked"], rows["sim_ops_per_s"]
    assert (5556, False) == (checked["limit"], "limit" in unchecked)
    bound, median, spin = (float(str(checked[key])) for key in ("bound", "median", "spin_us"))
    assert bound == pytest.approx(2_000_000 / 360 / max(1.0, spin / 300), rel=0.01)
    assert checked["reached"] == (median >= bound)
    assert "2 processes" in str(checked["what"])
    assert float(str(checked["ops_per_cpu_s"])) > 0


def test_seed_that_fails_is_no_rate():
    """What the simulator says ends the bench, instead of a figure."""
    with pytest.raises(SeedFailed, match=r"tests\.sim"):
        operations(-1, checked=True)()


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "0"], ["--nonsense"]])
def test_bad_arguments_are_bad_input(arguments: list[str]):
    """They end in one line, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("transfer", arguments)
