"""`kvkeep bench media`: it runs, names its figures as promised, and judges those that it should.

Must not judge a time: that is the bench's own business.
"""

import pytest

from bench._budget import waste_share
from bench._encoders import missing
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report

pytestmark = pytest.mark.slow  # half a minute of digests


@pytest.fixture(scope="module")
def smoke() -> Report:
    return run_bench("media", ["--smoke"])


def test_the_promised_metrics_are_there(smoke: Report):
    """With their units, above zero; the ratio is that of the slowest source that is judged."""
    units = {
        "digest_ratio": "ratio",
        "digest_memo_us": "us",
        "floor_sha256_ms": "ms",
        "spin_us": "us",
        "encoder_hit_us": "us",
        "encoder_speedup": "ratio",
        "slot_waste_share": "of bytes",
        "budget_gain_share": "of seconds saved",
    }
    assert units == {name: smoke.metrics[name].unit for name in units}
    may_be = {"budget_gain_share"} | ({"encoder_speedup"} if missing("vision") else set())
    assert all((metric.value or 0) > 0 for name, metric in smoke.metrics.items() if name not in may_be)
    judged = [float(str(row["median"])) for row in smoke.rows if row.get("limit") == "1.3 x floor_sha256_ms"]
    assert 4 == len(judged)
    floor = smoke.metrics["floor_sha256_ms"].value
    assert floor is not None
    assert smoke.metrics["digest_ratio"].value == pytest.approx(max(judged) / floor, rel=1e-2)


def test_a_row_says_what_its_limit_is_and_whether_it_is_reached(smoke: Report):
    """Sources in one piece are held against the hash alone, those seen before against a time."""
    limits = {str(row["metric"]): row["limit"] for row in smoke.rows if "limit" in row}
    expected = {"1.3 x floor_sha256_ms", 10.0, 30.0, 0.12, 0.0}
    assert expected | (set() if missing("vision") else {"0.02 x encoder_ms_image_miss"}) == set(limits.values())
    assert {"digest_ms_bytes", "digest_ms_file", "digest_ms_array", "digest_ms_tensor"} <= set(limits)
    assert {"digest_memo_us_bytes", "digest_memo_us_array", "digest_memo_us_tensor", "digest_memo_us_pil"} <= set(
        limits
    )
    assert smoke.ok == all(row["reached"] for row in smoke.rows if "reached" in row)


def test_what_a_byte_of_a_pool_holds_does_not_depend_on_luck():
    """Two seeds leave nearly the same share of bytes empty; KV alone leaves none."""
    first, second = (waste_share(0.5, 200, 4_000, seed) for seed in (0, 1))
    assert 0 < first < 0.12
    assert abs(first - second) < 0.03
    assert waste_share(1.0, 50, 400) == 0.0


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rounds", "many"], ["--fast"]])
def test_unknown_options_are_refused(arguments: list[str]):
    """Bad options end in one line that says what was wrong, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("media", arguments)
