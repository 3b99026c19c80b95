"""Benching: where bench cases live, how one is run, and the measuring helpers that all of them share.

Must not know any case. A case is a file `bench/NAME.py` beside the package, with one public function:

    def run(arguments: list[str]) -> Report

It parses its own arguments, measures, and returns a report whose `command` is "bench NAME"; the command line
writes it.
"""

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from kvkeep.errors import BadInput
from kvkeep.report import Metric, Report, checkout_root

SPIN_ADDITIONS = 10_000


def bench_directory() -> Path:
    """The folder of bench cases. Raises BadInput in an installed copy, which has none."""
    root = checkout_root()
    if root is None:
        raise BadInput(
            "bench: the cases are not installed with the package; run it from a checkout of the repository "
            "(.venv/bin/kvkeep bench ... after `make setup`)"
        )
    return root / "bench"


def bench_names(directory: Path) -> list[str]:
    """Names of the cases in `directory`, sorted. One that starts with "_" is a helper."""
    return sorted(file.stem for file in directory.glob("[a-z]*.py"))


def run_bench(name: str, arguments: Sequence[str]) -> Report:
    """Run the case `name` and return its report. Raises BadInput for a name that is not there."""
    directory = bench_directory()
    names = bench_names(directory)
    if name not in names:
        raise BadInput(f"bench: there is no case {name!r}; known: {', '.join(names) or 'none'}")
    run: Callable[[list[str]], Report] = _load(directory, name).run
    return run(list(arguments))


def median(samples: Sequence[float]) -> float:
    """The middle sample; the mean of the two middle ones where their number is even."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    if not ordered:
        raise ValueError("median of no samples")
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def p99(samples: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: the smallest sample that at least 99 % do not exceed."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("p99 of no samples")
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def summary(samples: Sequence[float], unit: str) -> Metric:
    """Median, p99 and count of `samples` as a metric in `unit`."""
    return Metric(median(samples), unit, p99=p99(samples), samples=len(samples))


def spin_us(rounds: int = 25) -> Metric:
    """Microseconds of a pure-Python loop of 10,000 additions: how fast this machine is right now.

    A shared machine changes speed by the minute; limits are scaled by this number over its quiet value.
    """
    return summary([_spin_once_us() for _ in range(rounds)], "us")


def _spin_once_us() -> float:
    start = time.perf_counter_ns()
    total = 0
    for number in range(SPIN_ADDITIONS):
        total += number
    return (time.perf_counter_ns() - start) / 1000


def _load(directory: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvkeep_bench_{name}", directory / f"{name}.py")
    if spec is None or spec.loader is None:
        raise BadInput(f"bench: {name}.py cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being executed
    spec.loader.exec_module(module)
    return module
