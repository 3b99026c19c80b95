"""`kvkeep bench media`: it runs, names its figures as promised, and judges those that it should.

Must not judge a time: that is the bench's own business.
"""

import pytest

from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report


@pytest.fixture(scope="module")
def quick() -> Report:
    return run_bench("media", ["--quick"])


def test_the_promised_metrics_are_there(quick: Report):
    """With their units, above zero; the ratio is that of the slowest source that is judged."""
    units = {"digest_ratio": "ratio", "digest_memo_us": "us", "floor_sha256_ms": "ms", "spin_us": "us"}
    assert units == {name: quick.metrics[name].unit for name in units}
    assert all((metric.value or 0) > 0 for metric in quick.metrics.values())
    judged = [float(str(row["median"])) for row in quick.rows if "reached" in row and row["unit"] == "ms"]
    assert 4 == len(judged)
    floor = quick.metrics["floor_sha256_ms"].value
    assert floor is not None
    assert quick.metrics["digest_ratio"].value == pytest.approx(max(judged) / floor, rel=1e-2)


def test_a_row_says_what_its_limit_is_and_whether_it_is_reached(quick: Report):
    """Sources in one piece are held against the hash alone, those seen before against a time."""
    limits = {str(row["metric"]): row["limit"] for row in quick.rows if "limit" in row}
    assert {"1.3 x floor_sha256_ms", 10.0} == set(limits.values())
    assert {"digest_ms_bytes", "digest_ms_file", "digest_ms_array", "digest_ms_tensor"} <= set(limits)
    assert {"digest_memo_us_bytes", "digest_memo_us_array", "digest_memo_us_tensor", "digest_memo_us_pil"} <= set(
        limits
    )
    assert quick.ok == all(row["reached"] for row in quick.rows if "reached" in row)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rounds", "many"], ["--fast"]])
def test_unknown_options_are_refused(arguments: list[str]):
    """Bad options end in one line that says what was wrong, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("media", arguments)
