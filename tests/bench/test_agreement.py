"""`kvkeep bench agreement`: it runs, names its figures as promised, and holds them against the all-reduce of its run.

Must not judge a time: that is the bench's own business.
"""

import pytest

from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report

FIGURES = {f"{how}_{what}_us" for how in ("minimum", "leader") for what in ("all_reduce", "admit", "run", "extend")}


@pytest.fixture(scope="module")
def smoke() -> Report:
    return run_bench("agreement", ["--smoke", "--ranks", "2"])


def test_the_promised_metrics_are_there(smoke: Report):
    """Every figure is there for both mechanisms, above zero, and rests on samples."""
    assert FIGURES <= smoke.metrics.keys()
    for name in FIGURES:
        metric = smoke.metrics[name]
        assert metric.value is not None and metric.value > 0 and 5 == metric.samples and "us" == metric.unit
    assert (2, 20) == (smoke.metrics["ranks"].value, smoke.metrics["pages"].value)


def test_an_agreement_is_held_against_the_all_reduce_beside_it(smoke: Report):
    """1 ms more at the median; nothing else is judged; ok is all of that."""
    rows = {str(row["metric"]): row for row in smoke.rows}
    for how in ("minimum", "leader"):
        row = rows[f"{how}_admit_us"]
        bound, floor = float(str(row["bound"])), float(str(rows[f"{how}_all_reduce_us"]["median"]))
        assert bound == pytest.approx(floor + 1000, abs=0.2)
        assert row["reached"] == (float(str(row["median"])) <= bound)
    judged = [name for name, row in rows.items() if "reached" in row]
    assert ["minimum_admit_us", "leader_admit_us"] == judged
    assert smoke.ok == all(row.get("reached", True) for row in smoke.rows)


@pytest.mark.parametrize("options", [["--ranks", "1"], ["--rounds", "0"], ["--ranks", "many"]])
def test_bad_options_are_refused(options: list[str]):
    """One line that says what would be right."""
    with pytest.raises(BadInput, match=options[0]):
        run_bench("agreement", options)
