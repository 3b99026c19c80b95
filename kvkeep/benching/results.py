"""Results files, read back: what `--json` wrote, whole and of this version, or why it cannot be used.

Must not know what the numbers mean.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep import __version__
from kvkeep.errors import BadInput, KvkeepError
from kvkeep.report import JsonValue, Metric

BETTER = ("lower", "higher")
#: How a smoke run is asked for; the first is the name, the second an older one.
SMOKE = ("--smoke", "--quick")


class Unusable(KvkeepError):
    """A file that holds no result that this version can read; says which file, and why."""


@dataclass(frozen=True, slots=True)
class Results:
    """One result, as it was written.

    record: how it was measured; empty in results of commands that keep none.
    """

    path: Path
    command: str
    version: str
    commit: str | None
    machine: Mapping[str, JsonValue]
    ok: bool
    metrics: Mapping[str, Metric]
    rows: Sequence[Mapping[str, JsonValue]]
    record: Mapping[str, Any]

    @property
    def smoke(self) -> bool:
        """Whether its figures are those of a smoke run."""
        return bool(set(SMOKE) & set(self.record.get("arguments", ())))

    @property
    def spin_us(self) -> float | None:
        """How fast the machine was; None where it was not looked at."""
        noise = self.record.get("noise")
        found = noise.get("spin_us") if isinstance(noise, dict) else None
        if not isinstance(found, int | float) and "spin_us" in self.metrics:
            found = self.metrics["spin_us"].value
        return float(found) if isinstance(found, int | float) and found > 0 else None


def read_results(path: Path) -> Results:
    """Reads one file.  Raises `BadInput` where there is none, `Unusable` where it cannot be used."""
    if path.is_dir() or not path.exists():
        raise BadInput(f"{path}: there is no such results file; name one that `--json FILE` has written")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{path}: cannot be read ({error.strerror}): skipped") from error
    except ValueError as error:
        raise Unusable(f"{path}: cut short, or no JSON ({str(error).splitlines()[0]}): skipped") from error
    if not isinstance(found, dict) or not isinstance(found.get("version"), str):
        raise Unusable(f"{path}: no result of kvkeep: it has no version: skipped")
    if series(found["version"]) != series(__version__):
        raise Unusable(f"{path}: of version {found['version']}, this is {__version__}: skipped; measure it again")
    try:
        return _results(path, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unusable(f"{path}: no whole result of kvkeep ({type(error).__name__}: {error}): skipped") from error


def read_all(paths: Iterable[Path]) -> tuple[list[Results], list[str]]:
    """What could be read, and a line for each file that could not.  Raises `BadInput` for one that is not there."""
    found, skipped = [], []
    for path in paths:
        try:
            found.append(read_results(path))
        except Unusable as reason:
            skipped.append(str(reason))
    return found, skipped


def series(version: str) -> str:
    """The part of a version within which results have the same form: of 0.3.2 it is 0.3."""
    return ".".join(version.split(".")[:2])


def _results(path: Path, found: dict[str, Any]) -> Results:
    return Results(
        path=path,
        command=str(found["command"]),
        version=found["version"],
        commit=found["commit"],
        machine=dict(found["machine"]),
        ok=bool(found["ok"]),
        metrics={name: _metric(metric) for name, metric in found["metrics"].items()},
        rows=[dict(row) for row in found["rows"]],
        record=dict(found.get("record") or {}),
    )


def _metric(found: dict[str, Any]) -> Metric:
    value, better, interval = found["value"], found.get("better"), found.get("interval")
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"a metric whose value is {value!r}")
    return Metric(
        value,
        str(found["unit"]),
        p99=found.get("p99"),
        samples=found.get("samples"),
        p90=found.get("p90"),
        spread=found.get("spread"),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        better=better if better in BETTER else None,
    )
