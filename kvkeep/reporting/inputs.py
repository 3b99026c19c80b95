"""What a report is made of: results and traces, read from files and folders; what cannot be used is said.

Must not know any figure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvkeep.benching.results import Results, Unusable, read_results, series
from kvkeep.errors import BadInput
from kvkeep.report import Metric
from kvkeep.telemetry import chrome

ALL = "bench all"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a figure's numbers come from.

    command: what makes them again.   noisy: the machine was, by its own record.   smoke: sizes that mean little.
    """

    command: str
    commit: str | None
    machine: str
    noisy: bool = False
    smoke: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that could be read.   skipped: a line for each file that could not."""

    results: Sequence[Results]
    traces: Sequence[chrome.Trace]
    skipped: Sequence[str]

    def of(self, command: str) -> Iterator[Results]:
        """Results of a command; measured ones before smoke runs."""
        yield from sorted((one for one in self.results if one.command == command), key=lambda one: one.smoke)

    def first(self, command: str, *metrics: str) -> Results | None:
        """The first that has one of these metrics with a value, or any where none is named."""
        has = (
            one for one in self.of(command) if not metrics or any(value_of(one, name) is not None for name in metrics)
        )
        return next(has, None)


def read_inputs(paths: Iterable[Path]) -> Inputs:
    """Reads files, and the *.json of folders.  Raises `BadInput` for one that is not there."""
    results: list[Results] = []
    traces, skipped = [], []
    for path in _files(paths):
        try:
            found = _read(path)
        except Unusable as reason:
            skipped.append(str(reason).replace(str(path), path.name))
            continue
        if isinstance(found, chrome.Trace):
            traces.append(found)
        else:
            results += _parts(found)
    return Inputs(results, traces, skipped)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise BadInput(
                f"{path}: there is no such file or folder; name what `--json FILE` or `--trace FILE` has written"
            )
        if path.is_dir():
            found = sorted(path.glob("*.json"))
            if not found:
                raise BadInput(f"{path}: there is no *.json in that folder; name results files, or their folder")
            yield from found
        else:
            yield path


def _read(path: Path) -> Results | chrome.Trace:
    try:
        found = chrome.load(path)
    except (OSError, ValueError):
        return read_results(path)  # which says why
    if not isinstance(found, dict) or not chrome.is_trace(found):
        return read_results(path)
    other = found.get("otherData")
    made_by = other.get("version") if isinstance(other, dict) else None
    if not isinstance(made_by, str):
        raise Unusable(f"{path}: a trace, but none of kvkeep: skipped")
    if series(made_by) != series(chrome_version()):
        raise Unusable(f"{path}: a trace of version {made_by}, this is {chrome_version()}: skipped; record it again")
    try:
        return chrome.read_trace(path, found)
    except ValueError as fault:
        raise Unusable(f"{path}: no whole trace ({fault}): skipped") from fault


def chrome_version() -> str:
    """The version that traces must be of."""
    from kvkeep import __version__

    return __version__


def _parts(found: Results) -> list[Results]:
    """The result of `bench all` as a result for each case."""
    if found.command != ALL:
        return [found]
    by_case: dict[str, dict[str, Metric]] = {}
    for name, metric in found.metrics.items():
        case, dot, own = name.partition(".")
        if dot:
            by_case.setdefault(case, {})[own] = metric
    records: Mapping[str, Any] = found.record.get("cases", {})
    return [
        replace(
            found,
            command=f"bench {case}",
            metrics=metrics,
            rows=[row for row in found.rows if row.get("case") == case and "exit_code" not in row],
            record={**dict(records.get(case) or {}), "arguments": found.record.get("arguments", ())},
        )
        for case, metrics in by_case.items()
    ]


def value_of(results: Results, name: str) -> float | None:
    """A metric's value; None where there is no such metric, or it has none."""
    metric = results.metrics.get(name)
    return None if metric is None or metric.value is None else float(metric.value)


def origin(results: Results) -> Origin:
    """Where a result comes from."""
    words = [str(word) for word in results.record.get("arguments", ())]
    noise = results.record.get("noise")
    noisy = isinstance(noise, dict) and bool(noise.get("noisy"))
    command = " ".join(["kvkeep", results.command, *words])
    return Origin(command, results.commit, machine_line(results.machine), noisy, results.smoke)


def origin_of_trace(trace: chrome.Trace) -> Origin:
    """Where a trace comes from."""
    other = trace.other
    machine = other.get("machine")
    command = f"{other.get('command', 'kvkeep')} --trace {trace.path.name}"
    return Origin(command, other.get("commit"), machine_line(machine if isinstance(machine, dict) else {}))


def machine_line(machine: Mapping[str, Any]) -> str:
    """A machine in a line."""
    parts = [str(machine.get("cpu") or "unknown processor")]
    if machine.get("gpu"):
        parts.insert(0, str(machine["gpu"]))
    if machine.get("cores"):
        parts.append(f"{machine['cores']} cores")
    if machine.get("memory_gib"):
        parts.append(f"{machine['memory_gib']} GiB")
    return ", ".join(parts)
