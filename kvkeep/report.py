"""Report: what a command measured, as one JSON object, written whole or not at all.

Must not know what the numbers mean; every command hands in its own metrics and rows.
"""

import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from kvkeep import __version__
from kvkeep.errors import BadInput

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

GIT_SECONDS_MAX = 10.0
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Metric:
    """One number: `value` in `unit`; `p90` and `p99` in the same unit; `samples` is how many observations it rests on.

    `value` is None where nothing could be measured (no turn was long enough, say), never a stand-in number.
    spread: the distance of the quartiles over the median.   interval: where the value lies, at 95 %.
    better: which way is better, "lower" or "higher", where the unit does not say.
    """

    value: int | float | None
    unit: str
    p99: float | None = None
    samples: int | None = None
    p90: float | None = None
    spread: float | None = None
    interval: tuple[float, float] | None = None
    better: Literal["lower", "higher"] | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """The metric as `{"value", "unit"}`, with those of the other fields that there are."""
        out: dict[str, JsonValue] = {"value": self.value, "unit": self.unit}
        for name in ("p90", "p99", "samples", "spread", "interval", "better"):
            value = getattr(self, name)
            if value is not None:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out


@dataclass(frozen=True)
class Report:
    """The result of one command. `ok` is False when a promise was broken or the command was interrupted.

    work: a checksum of what was done and found, the same wherever the same was done.   record: how it was measured.
    """

    command: str
    ok: bool
    metrics: Mapping[str, Metric]
    rows: Sequence[Mapping[str, JsonValue]] = field(default_factory=tuple)
    work: str | None = None
    record: Mapping[str, JsonValue] | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """The object that `--json` writes, with version, commit and machine filled in."""
        out: dict[str, JsonValue] = {
            "command": self.command,
            "version": __version__,
            "commit": commit(),
            "machine": machine(),
        }
        if self.record is not None:
            out["record"] = dict(self.record)
        out |= {
            "ok": self.ok,
            "metrics": {name: metric.to_json() for name, metric in self.metrics.items()},
            "rows": [dict(row) for row in self.rows],
        }
        return out

    def write(self, path: Path) -> None:
        """Write the object to `path`, whole or not at all. Raises BadInput when it cannot."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            write_whole(path, text)
        except OSError as error:
            raise BadInput(f"--json {path}: cannot write ({error.strerror}); nothing was written") from error


def check_writable(path: Path, option: str = "--json") -> None:
    """Raise BadInput unless `path`, which `option` names, can be written. Called before the work; leaves nothing."""
    target = Path(os.path.realpath(path))
    try:
        if path.exists():
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise BadInput(f"{option} {path}: is a directory; name a file in it, such as {path}/result.json")
            if not os.access(path, os.W_OK):
                raise BadInput(f"{option} {path}: the file may not be written; change its mode or name another one")
            if not stat.S_ISREG(mode):
                return
        if not target.parent.is_dir():
            raise BadInput(f"{option} {path}: there is no directory {path.parent}; create it or name another file")
        probe = _temporary_beside(target)
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"{option} {path}: cannot be written ({error.strerror}); name a file where you may write"
        ) from error


def interrupted(command: str) -> Report:
    """The report of a command that was stopped before it had measured anything."""
    return Report(command, ok=False, metrics={INTERRUPTED: Metric(1, "bool")})


def checkout_root() -> Path | None:
    """The source tree that this package is imported from, or None when it is an installed copy."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def commit() -> str | None:
    """The checked-out commit, 40 hex digits; None outside a checkout or where git cannot say."""
    root = checkout_root()
    if root is None or not (root / ".git").exists():  # git would look for one around it
        return None
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def machine() -> dict[str, JsonValue]:
    """What the numbers were measured on. No host name and no path: the report is made to be shared."""
    out: dict[str, JsonValue] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in ("numpy", "xxhash", "torch", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            out[name] = str(getattr(module, "__version__", "unknown"))
    return out


def memory_nbytes() -> int | None:
    """Bytes of main memory in this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _memory_gib() -> float | None:
    nbytes = memory_nbytes()
    return None if nbytes is None else round(nbytes / 2**30, 1)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _temporary_beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all.  Raises `OSError`."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe: there is nothing to replace
        return
    target = Path(os.path.realpath(path))
    temporary = _temporary_beside(target)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
