"""Samples: what is said of many observations of one thing.

Must not know what was observed.

Samples come in groups, those of a round together: what changes a machine's speed lasts longer than a round, so samples
of one round are alike, and the median of a run lies less surely than their number suggests.  The bootstrap therefore
draws groups first and then samples inside each.  It is seeded: equal samples have equal intervals.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvkeep.report import Metric

LEVEL = 0.95
DRAWS = 1000
#: Of a group with more samples so many of its quantiles stand for it.
GROUP_MAX = 64
#: Numbers that are drawn at most, all draws together.
DRAWN_MAX = 8_000_000

Interval = tuple[float, float]
Floats = npt.NDArray[np.float64]


def median(samples: Sequence[float]) -> float:
    """The middle sample; the mean of the two middle ones where their number is even."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    if not ordered:
        raise ValueError("median of no samples")
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quantile(samples: Sequence[float], share: float) -> float:
    """A quantile by nearest rank: the smallest sample that at least `share` of them do not exceed."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError(f"p{100 * share:g} of no samples")
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def p90(samples: Sequence[float]) -> float:
    """The 90th percentile by nearest rank."""
    return quantile(samples, 0.90)


def p99(samples: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: the smallest sample that at least 99 % do not exceed."""
    return quantile(samples, 0.99)


def spread(samples: Sequence[float]) -> float | None:
    """The distance of the quartiles as a share of the median; None where the median is 0."""
    middle = median(samples)
    return (quantile(samples, 0.75) - quantile(samples, 0.25)) / abs(middle) if middle else None


def interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval | None:
    """Where the median lies at 95 %, by the bootstrap; None of fewer than 3 samples.

    groups: samples by round; see above.
    """
    groups = [group for group in groups if group]
    if sum(map(len, groups)) < 3:
        return None
    medians = np.median(_drawn(groups, _draws(groups), seed), axis=1)
    return _bounds(medians, median([sample for group in groups for sample in group]), groups)


def ratio_interval(
    above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], seed: int = 0
) -> Interval | None:
    """The same of the ratio of two medians; groups of equal place belong together, and are drawn together.

    None of fewer than 3 samples, or where the lower median may be 0.
    """
    if min(sum(map(len, above)), sum(map(len, below))) < 3:
        return None
    if len(above) != len(below):
        raise ValueError(f"a ratio of {len(above)} groups over {len(below)}")
    draws = min(_draws(above), _draws(below))
    # One seed for both sides: they draw the same groups, and the same samples where they have as many in each.
    tops, bottoms = (np.median(_drawn(side, draws, seed), axis=1) for side in (above, below))
    whole = [median([sample for group in side for sample in group]) for side in (above, below)]
    if not bottoms.all() or not whole[1]:
        return None
    return _bounds(tops / bottoms, whole[0] / whole[1], above)


def summary(
    samples: Sequence[float],
    unit: str,
    *,
    groups: Sequence[Sequence[float]] | None = None,
    digits: int | None = None,
    better: Literal["lower", "higher"] | None = None,
) -> Metric:
    """What is said of `samples`: median, p90, p99, count, spread, interval of the median.

    groups: the same samples by round; None: each stands for itself.   digits: to round to; None: not.
    """

    def rounded(value: float) -> float:
        return value if digits is None else round(value, digits)

    found = interval([[sample] for sample in samples] if groups is None else groups)
    wide = spread(samples)
    return Metric(
        rounded(median(samples)),
        unit,
        p99=rounded(p99(samples)),
        samples=len(samples),
        p90=rounded(p90(samples)),
        spread=None if wide is None else round(wide, 4),
        interval=None if found is None else (rounded(found[0]), rounded(found[1])),
        better=better,
    )


def exact(
    value: float, unit: str, better: Literal["lower", "higher"] | None = None, samples: int | None = None
) -> Metric:
    """A number that is the same each time the same is done: its interval is itself."""
    return Metric(value, unit, samples=samples, interval=(value, value), better=better)


def ratio(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    better: Literal["lower", "higher"] | None = None,
    unit: str = "ratio",
    digits: int = 4,
) -> Metric:
    """The ratio of two medians, with its interval; None where there is nothing to divide."""
    tops, bottoms = ([sample for group in side for sample in group] for side in (above, below))
    if not tops or not bottoms or not median(bottoms):
        return Metric(None, unit, samples=0, better=better)
    found = ratio_interval(above, below)
    return Metric(
        round(median(tops) / median(bottoms), digits),
        unit,
        samples=min(len(tops), len(bottoms)),
        interval=None if found is None else (round(found[0], digits), round(found[1], digits)),
        better=better,
    )


def _size(groups: Sequence[Sequence[float]]) -> int:
    """How many samples stand for a group."""
    return min(GROUP_MAX, max(1, round(sum(map(len, groups)) / len(groups))))


def _draws(groups: Sequence[Sequence[float]]) -> int:
    return max(100, min(DRAWS, DRAWN_MAX // (_size(groups) * len(groups))))


def _drawn(groups: Sequence[Sequence[float]], draws: int, seed: int) -> Floats:
    """[draws, samples]: groups with replacement, and samples with replacement in each of those."""
    rng, size = np.random.default_rng(seed), _size(groups)
    table = np.array([_standing_for(group, size) for group in groups], dtype=np.float64)
    chosen = rng.integers(0, len(groups), (draws, len(groups), 1))
    inside = rng.integers(0, size, (draws, len(groups), size)) if size > 1 else np.zeros((1, 1, 1), dtype=np.int64)
    drawn: Floats = table[chosen, inside].reshape(draws, -1)
    return drawn


def _standing_for(group: Sequence[float], size: int) -> Sequence[float]:
    """`size` samples for a group: itself where it has as many, else its quantiles."""
    if len(group) == size:
        return group
    ordered = sorted(group)
    return [ordered[min(int((at + 0.5) / size * len(ordered)), len(ordered) - 1)] for at in range(size)]


def _bounds(found: Floats, value: float, groups: Sequence[Sequence[float]]) -> Interval:
    """The middle 95 % of what was drawn; `value` is always inside.

    What is drawn from k groups varies less than the groups do, by (k - 1) / k: with few of them that is made good.
    """
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    drawn_from = len(groups) if len(groups) > 1 else max(2, len(groups[0]))
    wider = math.sqrt(drawn_from / (drawn_from - 1))
    return value - wider * max(0.0, value - low), value + wider * max(0.0, high - value)
