"""Comparing two results of one case: better, worse or within noise, metric by metric, from their intervals.

Must not measure or read files.

A difference counts where the intervals do not overlap.  Where both results say how fast their machine was (the spin), a
time or a rate must differ both as it stands and as it would be at the other's speed: a machine that has become slower
makes nothing worse, and one that has become faster nothing better.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvkeep.benching.samples import Interval
from kvkeep.report import JsonValue, Metric

#: Units of times and of sizes, where less is better; rates are "something/s", and more of those is better.
TIMES = ("ns", "us", "ms", "s")
LESS_IS_BETTER = (*TIMES, "bytes")
RATE = "/s"

Better = Literal["lower", "higher"]


class Verdict(Enum):
    BETTER = "better"
    WORSE = "worse"
    WITHIN_NOISE = "within noise"
    SAME = "the same"
    DIFFERENT = "different"
    """Outside the noise, of a number of which neither more nor less is better."""
    UNKNOWN = "no interval"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric, before and now.   change: of the value, as a share of what it was; None where that was 0."""

    name: str
    before: Metric
    now: Metric
    verdict: Verdict

    @property
    def change(self) -> float | None:
        before, now = self.before.value, self.now.value
        return None if not before or now is None else now / before - 1

    def row(self) -> dict[str, JsonValue]:
        """As a row of the report."""
        return {
            "metric": self.name,
            "unit": self.now.unit,
            "before": self.before.value,
            "now": self.now.value,
            "change": None if self.change is None else round(self.change, 4),
            "verdict": self.verdict.value,
        }


def compare(
    before: Mapping[str, Metric],
    now: Mapping[str, Metric],
    spin_before_us: float | None = None,
    spin_now_us: float | None = None,
) -> list[Comparison]:
    """The metrics that both results have, in the order of the later one.

    spin_before_us, spin_now_us: how fast the machine was; None: not known.
    """
    slower = spin_now_us / spin_before_us if spin_before_us and spin_now_us else 1.0
    return [
        Comparison(name, before[name], metric, judge(before[name], metric, slower))
        for name, metric in now.items()
        if name in before and before[name].unit == metric.unit and name != "spin_us"
    ]


def better_of(metric: Metric) -> Better | None:
    """Which way is better, as the metric says or else as its unit does."""
    if metric.better is not None:
        return metric.better
    if metric.unit in LESS_IS_BETTER:
        return "lower"
    return "higher" if metric.unit.endswith(RATE) else None


def judge(before: Metric, now: Metric, slower: float = 1.0) -> Verdict:
    """slower: how many times slower the machine is now."""
    if before.value == now.value and before.value is not None:
        return Verdict.SAME
    if before.interval is None or now.interval is None:
        return Verdict.UNKNOWN
    scale = slower if now.unit in TIMES else 1 / slower if now.unit.endswith(RATE) else 1.0
    at_its_speed = _apart(before.interval, now.interval)
    at_ours = _apart((before.interval[0] * scale, before.interval[1] * scale), now.interval)
    if at_its_speed != at_ours or not at_ours:
        return Verdict.WITHIN_NOISE
    better = better_of(now)
    if better is None:
        return Verdict.DIFFERENT
    return Verdict.BETTER if (at_ours > 0) == (better == "higher") else Verdict.WORSE


def table(found: list[Comparison]) -> Iterator[str]:
    """The comparison as lines of text."""
    yield f"{'metric':<34}{'before':>26}{'now':>26}{'change':>9}  {'unit':<12}verdict"
    for one in found:
        change = "" if one.change is None else f"{one.change:+.1%}"
        sides = [_cell(one.before), _cell(one.now)]
        yield f"{one.name:<34}{sides[0]:>26}{sides[1]:>26}{change:>9}  {one.now.unit:<12}{one.verdict.value}"


def _apart(before: Interval, now: Interval) -> int:
    """1: now lies above; -1: below; 0: they overlap."""
    return int(now[0] > before[1]) - int(now[1] < before[0])


def _cell(metric: Metric) -> str:
    if metric.value is None:
        return "none"
    if metric.interval is None:
        return f"{metric.value:.5g}"
    return f"{metric.value:.5g} ({metric.interval[0]:.4g}..{metric.interval[1]:.4g})"
