"""The record of a measurement: clocks, noise, what the process used, a checksum of the work.

Must not know what is measured.  What the system does not say is left out, never guessed.
"""

import hashlib
import json
import os
import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.benching.samples import median, p90, quantile, summary
from kvkeep.report import JsonValue, Metric

SPIN_ADDITIONS = 10_000
SPINS = 25
#: Above these the record calls the machine noisy: how far the spins of a run lie apart (p90 over p10, less 1), the
#: share of the processor's time that other guests of the host took.
NOISY_SPREAD, NOISY_STEAL = 0.15, 0.01

CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def spin_us(rounds: int = SPINS) -> Metric:
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


def work_checksum(*facts: object) -> str:
    """16 hexadecimal digits of what was done and found: equal for equal facts, whatever the run.

    facts: values that JSON has a word for, sequences and mappings of them.  No times.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a checksum of a {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Watch:
    """What was so when a measurement began."""

    began_s: float
    wall_ns: int
    usage: resource.struct_rusage
    spins: tuple[float, ...]
    stolen: tuple[int, int] | None

    @staticmethod
    def begin() -> "Watch":
        """Calibrates, then starts the clock."""
        spins = _spins()
        return Watch(time.time(), time.perf_counter_ns(), resource.getrusage(resource.RUSAGE_SELF), spins, _stolen())

    def record(self, arguments: Sequence[str], work: str | None) -> dict[str, JsonValue]:
        """The record of all since then.   work: the case's checksum."""
        wall_s = (time.perf_counter_ns() - self.wall_ns) / 1e9
        now = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = (now.ru_utime + now.ru_stime) - (self.usage.ru_utime + self.usage.ru_stime)
        return {
            "arguments": list(arguments),
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began_s)),
            "work": work,
            "clocks": clocks(),
            "noise": self._noise(_spins()),
            "process": {
                "wall_s": round(wall_s, 3),
                "cpu_s": round(cpu_s, 3),
                "rss_peak_mib": round(now.ru_maxrss / 1024, 1),
                "page_faults": now.ru_minflt + now.ru_majflt - self.usage.ru_minflt - self.usage.ru_majflt,
                "preempted": now.ru_nivcsw - self.usage.ru_nivcsw,
            },
        }

    def _noise(self, after: Sequence[float]) -> dict[str, JsonValue]:
        """spread: of the calibrations before and after, p90 over p10 less 1.   noisy: a few percent mean nothing."""
        both = [*self.spins, *after]
        spread = p90(both) / quantile(both, 0.1) - 1
        out: dict[str, JsonValue] = {
            "spin_us": round(median(both), 1),
            "spin_us_before": round(median(self.spins), 1),
            "spin_us_after": round(median(after), 1),
            "spread": round(spread, 4),
        }
        if hasattr(os, "getloadavg"):
            out["load_1_min"] = round(os.getloadavg()[0], 2)
        steal = _share(self.stolen, _stolen())
        if steal is not None:
            out["stolen_share"] = round(steal, 4)
        out["noisy"] = spread > NOISY_SPREAD or (steal is not None and steal > NOISY_STEAL)
        return out


def clocks() -> dict[str, JsonValue]:
    """The processor's frequency now and at most, who governs it, and the resolution of the clock that is read."""
    out: dict[str, JsonValue] = {"perf_counter_ns": round(time.get_clock_info("perf_counter").resolution * 1e9, 3)}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("cpu MHz"):
            out["cpu_mhz"] = float(line.partition(":")[2])
            break
    most = _text(CPUFREQ / "cpuinfo_max_freq").strip()
    if most.isdigit():
        out["cpu_mhz_max"] = int(most) / 1000
    governor = _text(CPUFREQ / "scaling_governor").strip()
    if governor:
        out["governor"] = governor
    return out


def _spins() -> tuple[float, ...]:
    return tuple(_spin_once_us() for _ in range(SPINS))


def _stolen() -> tuple[int, int] | None:
    """Ticks that other guests of the host took, and ticks in all, since the start of the system."""
    fields = _text(Path("/proc/stat")).partition("\n")[0].split()[1:]
    ticks = [int(field) for field in fields if field.isdigit()]
    return (ticks[7], sum(ticks[:8])) if len(ticks) >= 8 else None


def _share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
