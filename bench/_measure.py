"""Measuring: cases in rounds, each beside a spin; limits that scale with the spin or with a floor of the same run.

Must not know what a case measures.

Every round runs every case once, so that a floor and what is held against it are measured in the same minutes, and a
case's samples come from all over the run.  This kind of machine has two speed states: the spin of a case is the
median of those timed right before each of its rounds, and its limit is `limit * max(1, spin / 300 us)`.
"""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Literal

from kvkeep.benching import median, p90, p99, spin_us, summary
from kvkeep.benching.results import SMOKE
from kvkeep.benching.samples import ratio
from kvkeep.parsing import Parser
from kvkeep.report import JsonValue, Metric, checkout_root

#: The spin of a quiet machine of the kind that the limits were set on.
SPIN_QUIET_US = 300.0
SPINS = 5

#: What the embedded engine is made of.
ENGINE = ("torch", "transformers", "tokenizers", "gguf")

now_ns = perf_counter_ns


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    sample: one round; returns its samples in `unit`.
    limit: what the median must reach, in `unit`, on a quiet machine; None: for information.
    floor, floor_ratio: the metric that it is held against instead, and the ratio it must reach.
    what: the row's explanation.
    """

    name: str
    what: str
    sample: Callable[[], Sequence[float]]
    limit: float | None = None
    floor: str | None = None
    floor_ratio: float = 0.0
    unit: str = "us"


@dataclass(slots=True)
class Measured:
    """A case's samples, and the spins beside them.   rounds: the same samples by round."""

    case: Case
    samples: list[float] = field(default_factory=list)
    spins: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spin(self) -> float:
        return median(self.spins)

    def metric(self, digits: int = 4) -> Metric:
        """Median, tails, spread, and the interval over rounds."""
        return summary(self.samples, self.case.unit, groups=self.rounds or None, digits=digits)

    def over(self, other: "Measured", better: Literal["lower", "higher"] | None = None, digits: int = 4) -> Metric:
        """The ratio of the two medians, with its interval: rounds are drawn together."""
        return ratio(self.rounds or [self.samples], other.rounds or [other.samples], better, digits=digits)

    def bound(self, others: "dict[str, Measured]") -> float | None:
        """What the median must not exceed in this run."""
        if self.case.floor is not None:
            return self.case.floor_ratio * others[self.case.floor].median
        return None if self.case.limit is None else self.case.limit * max(1.0, self.spin / SPIN_QUIET_US)


def case_parser(name: str) -> Parser:
    """The parser of a case's own options; its help names the one that `kvkeep bench` understands before it."""
    made = Parser(
        prog=f"kvkeep bench {name}", allow_abbrev=False, epilog="--json FILE writes the result as JSON to FILE."
    )
    made.add_argument(*SMOKE, action="store_true", dest="smoke", help="a run of seconds; its figures mean little")
    return made


def beside_checkout() -> Path | None:
    """The recorded traces beside the checkout; None where there are none."""
    root = checkout_root()
    beside = None if root is None else root.parent / "shared" / "traces"
    return beside if beside is not None and beside.is_dir() else None


def traces_folder(parser: Parser, said: Path | None) -> Path | None:
    """The recorded traces: where --traces said, or beside the checkout; None where there are none."""
    if said is None:
        return beside_checkout()
    if not said.is_dir():
        parser.error(f"--traces {said}: there is no such folder; name the one with mini_swe_500 in it")
    return said


def lacking(modules: Sequence[str], extra: str) -> str | None:
    """Which of these modules are not installed, and the extra that has them; None when all are there."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: pip install 'kvkeep[{extra}]'" if absent else None


def measure(cases: Sequence[Case], rounds: int) -> dict[str, Measured]:
    """Every case `rounds` times, interleaved; the first round of each is preceded by one that does not count."""
    measured = {case.name: Measured(case) for case in cases}
    with quiet_gc():
        for case in cases:
            case.sample()
        for _ in range(rounds):
            for case in cases:
                entry = measured[case.name]
                entry.spins.append(_spin())
                entry.rounds.append(list(case.sample()))
                entry.samples.extend(entry.rounds[-1])
    return measured


def row(entry: Measured, others: dict[str, Measured]) -> dict[str, JsonValue]:
    """A measured case as a row of the report."""
    case, bound = entry.case, entry.bound(others)
    out: dict[str, JsonValue] = {
        "metric": case.name,
        "what": case.what,
        "unit": case.unit,
        "median": round(entry.median, 4),
        "p90": round(p90(entry.samples), 4),
        "p99": round(p99(entry.samples), 4),
        "samples": len(entry.samples),
        "spin_us": round(entry.spin, 1),
    }
    if bound is not None:
        limit = case.limit if case.floor is None else f"{case.floor_ratio} x {case.floor}"
        out |= {"limit": limit, "bound": round(bound, 4), "reached": entry.median <= bound}
    return out


def table(rows: Sequence[dict[str, JsonValue]]) -> Iterator[str]:
    """The rows as lines of text; `limit` is the one of this run."""
    yield f"{'metric':<34}{'median':>10}{'p99':>10}{'limit':>10}  {'unit':<8}{'spin':>6}  reached"
    for entry in rows:
        median, tail, bound = (_cell(entry.get(key), 2) for key in ("median", "p99", "bound"))
        reached = "" if "reached" not in entry else "yes" if entry["reached"] else "NO"
        spin = _cell(entry.get("spin_us"), 0)
        name, unit = str(entry["metric"]), str(entry["unit"])
        yield f"{name:<34}{median:>10}{tail:>10}{bound:>10}  {unit:<8}{spin:>6}  {reached}".rstrip()


def _cell(value: JsonValue, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else ""


@contextmanager
def quiet_gc() -> Iterator[None]:
    """What stands now is not walked by the collector; what a measured call makes still is."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _spin() -> float:
    value = spin_us(SPINS).value
    assert value is not None
    return float(value)
