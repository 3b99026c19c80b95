"""Statistics of samples: medians and tails are the textbook ones, intervals hold what they promise.

Must not measure anything: samples are drawn from generators with seeds.
"""

import numpy as np
import pytest

from kvkeep.benching.samples import exact, interval, median, p90, p99, quantile, ratio, ratio_interval, spread, summary
from kvkeep.report import Metric


def drawn(seed: int, rounds: int = 7, size: int = 24, between: float = 0.03, inside: float = 0.02) -> list[list[float]]:
    """Rounds of samples around 100; a round as a whole is off by `between`, its samples by `inside` more."""
    rng = np.random.default_rng(seed)
    levels = 100 * (1 + between * rng.standard_normal(rounds))
    return [(level * (1 + inside * rng.standard_normal(size))).tolist() for level in levels]


def test_quantiles_are_the_textbook_ones():
    """Median of an odd and an even count; others by nearest rank; none of nothing."""
    assert 2 == median([3, 1, 2])
    assert 2.5 == median([4, 1, 2, 3])
    assert (90, 99) == (p90(list(range(1, 101))), p99(list(range(1, 101))))
    assert (7, 7) == (p90([7]), p99([7]))
    assert (1, 3) == (quantile([1, 2, 3], 0.0), quantile([1, 2, 3], 1.0))
    for statistic in (median, p90, p99):
        with pytest.raises(ValueError, match="of no samples"):
            statistic([])


def test_spread_is_that_of_the_quartiles():
    """As a share of the median; there is none around 0."""
    assert 0.4 == spread([75, 100, 100, 140, 150])  # quartiles 100 and 140 by nearest rank
    assert spread([0, 0, 0]) is None


def test_an_interval_holds_the_true_median_as_often_as_it_says():
    """Of 200 runs whose rounds differ, 19 in 20 intervals hold 100, and not by being wide: the mean width is 6 %."""
    found = [interval(drawn(seed)) for seed in range(200)]
    assert all(one is not None for one in found)
    sure = [one for one in found if one is not None]
    held = sum(low <= 100 <= high for low, high in sure)
    assert held >= 0.92 * len(sure)
    assert sum(high - low for low, high in sure) / len(sure) < 8


def test_two_runs_of_the_same_overlap_19_times_in_20():
    """Of 200 pairs of runs of the same thing at least 190 pairs of intervals have a value in common."""
    pairs = [(interval(drawn(2 * seed)), interval(drawn(2 * seed + 1))) for seed in range(200)]
    overlap = sum(a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1] for a, b in pairs)
    assert overlap >= 190


def test_rounds_count_and_not_only_samples():
    """Where rounds differ and their samples do not, taking all samples for independent would be too sure of itself."""
    groups = drawn(1, inside=0.001)
    by_round, as_one = interval(groups), interval([[sample] for group in groups for sample in group])
    assert by_round is not None and as_one is not None
    assert by_round[1] - by_round[0] > 1.5 * (as_one[1] - as_one[0])


def test_equal_samples_have_equal_intervals():
    """The bootstrap is seeded; the value lies inside; large and uneven rounds are taken too."""
    groups = [*drawn(3), [100.0] * 500, [99.0]]
    once, again = interval(groups), interval(groups)
    assert once is not None and once == again
    assert once[0] <= median([sample for group in groups for sample in group]) <= once[1]
    assert once != interval(groups, seed=1)


def test_few_samples_have_no_interval():
    """Two samples say nothing about their median; three do, and equal ones are sure."""
    assert interval([[1.0], [2.0]]) is None
    assert interval([[], [1.0, 2.0]]) is None
    assert (5.0, 5.0) == interval([[5.0], [5.0], [5.0]])


def test_ratio_is_drawn_in_pairs():
    """What makes a round slow makes both sides slow: the ratio is surer than either."""
    above = drawn(4, inside=0.001)
    below = [[sample / 4 for sample in group] for group in above]
    found, alone = ratio_interval(above, below), interval(above)
    assert found is not None and alone is not None
    assert (4.0, 4.0) == pytest.approx(found)
    assert alone[1] - alone[0] > 1
    assert ratio(above, below, "higher").interval == pytest.approx((4.0, 4.0))


def test_ratio_of_nothing_has_no_value():
    """No samples, or a lower side of 0: no value, not a stand-in."""
    assert ratio([], [[1.0]]).value is None
    assert ratio([[1.0], [1.0], [1.0]], [[0.0], [0.0], [0.0]]).value is None
    with pytest.raises(ValueError, match="1 groups over 2"):
        ratio_interval([[1.0, 2.0, 3.0]], [[1.0, 2.0], [3.0]])


def test_summary_says_all_of_it():
    """Median, tails, count, spread and interval, rounded together; which way is better where that is said."""
    found = summary([1, 2, 3], "us", better="lower")
    assert (2, "us", 3, 3, 3, "lower") == (found.value, found.unit, found.p90, found.p99, found.samples, found.better)
    assert found.interval is not None and found.interval[0] <= 2 <= found.interval[1] and found.spread == 1.0
    assert summary([1.23456, 1.23456, 1.23456], "us", digits=2).interval == (1.23, 1.23)
    assert Metric(3, "pages", interval=(3, 3)) == exact(3, "pages")
