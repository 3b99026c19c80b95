"""What a telemetry has sampled, as JSON: the device, each series with its pace, energy, the link beside our copies.

Must not know when or how anything was read.  What is not to be had is None, with the reason beside it.
"""

from dataclasses import dataclass
from typing import Any

from kvkeep.telemetry.energy import EnergyReading, energy_between
from kvkeep.telemetry.host import CPU
from kvkeep.telemetry.nvml import PCIE_RX, PCIE_TX, PCIE_WINDOW_S, POWER, THROTTLE_REASONS, THROTTLING
from kvkeep.telemetry.nvml import SOURCE as NVML
from kvkeep.telemetry.sampling import Sampler
from kvkeep.telemetry.series import Sums
from kvkeep.telemetry.track import Track

OWN_H2D, OWN_D2H = "own_h2d_nbytes", "own_d2h_nbytes"
NO_TRANSFERS = "no transfers were given"
LINK_NOTE = (
    "nvml_kb_s: the mean of windows of 20 ms, all traffic of the device in that direction, KB taken as 1,000 bytes; "
    "own_kb_s: bytes of our copies that ended, over the whole run"
)

#: What a report shows of a run beside its own figures: name, unit, field, what of it.
FIGURES = (
    ("gpu_power_w", "W", POWER, "mean"),
    ("gpu_busy_pct", "%", "gpu_busy_pct", "mean"),
    ("gpu_memory_peak_nbytes", "bytes", "gpu_memory_used_nbytes", "most"),
    ("host_rss_peak_nbytes", "bytes", "host_rss_nbytes", "most"),
    ("host_pss_peak_nbytes", "bytes", "host_pss_nbytes", "most"),
    ("host_cpu_s", "s", CPU, "rise"),
    ("host_minor_faults", "faults", "host_minor_faults", "rise"),
    ("host_major_faults", "faults", "host_major_faults", "rise"),
    ("children_cpu_s", "s", "children_cpu_s", "rise"),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What there is to tell of.

    facts: of the device, missing: of those that it does not say, why; no_device: why there is none.
    first, last: energy readings at the start, and at the end, or now while `over` is False.
    """

    facts: dict[str, Any]
    missing: dict[str, str]
    no_device: str | None
    sampler: Sampler
    first: EnergyReading
    last: EnergyReading
    over: bool
    probe_s: float

    @property
    def seconds(self) -> float:
        """Of the run so far."""
        return self.last.time_s - self.first.time_s

    def sums(self, name: str) -> Sums | None:
        """All samples of a field; None where it is not sampled."""
        track = self.sampler.track(name)
        if track is None:
            return None
        return track.series.sums([field.name for field in track.counter.fields].index(name))


def figures(sampled: Sampled) -> dict[str, tuple[float | None, str]]:
    """The main numbers with their units, for the metrics of a report; None where there is none."""
    energy = energy_between(sampled.first, sampled.last)
    out: dict[str, tuple[float | None, str]] = {"gpu_energy_j": (rounded(energy.joules), "J")}
    for called, unit, name, what in FIGURES:
        sums = sampled.sums(name)
        out[called] = (None if sums is None else rounded(getattr(sums, what)), unit)
    return out


def to_json(sampled: Sampled) -> dict[str, Any]:
    """Everything."""
    energy = energy_between(sampled.first, sampled.last)
    return {
        "clock": "time.perf_counter",
        "began_s": rounded(sampled.first.time_s),
        "ended_s": rounded(sampled.last.time_s) if sampled.over else None,
        "nvml": _device(sampled),
        "energy": {
            "joules": rounded(energy.joules),
            "how": energy.how,
            "resolution_s": rounded(energy.resolution_s),
            "reason": energy.reason,
        },
        "throttling": _throttling(sampled),
        "pcie": [_link(sampled, "h2d", PCIE_RX, OWN_H2D), _link(sampled, "d2h", PCIE_TX, OWN_D2H)],
        "cost": _cost(sampled),
        "series": [one for track in sampled.sampler.tracks for one in _rows(track, sampled.probe_s)],
    }


def _device(sampled: Sampled) -> dict[str, Any]:
    if sampled.no_device is not None:
        return {"present": False, "reason": sampled.no_device, "lost_s": None}
    lost = sampled.sampler.lost.get(NVML)
    reason, lost_s = (None, None) if lost is None else (lost.why, rounded(lost.time_s))
    return {"present": True, "reason": reason, "lost_s": lost_s, **sampled.facts, "missing": dict(sampled.missing)}


def _throttling(sampled: Sampled) -> dict[str, Any]:
    """Of the samples, the share in which each reason was given."""
    track = sampled.sampler.track(THROTTLING)
    if track is None:
        return {"shares": None, "reason": sampled.no_device}
    seen = [int(value) for value in track.series.kept().values[0] if value is not None]
    if not seen:
        return {"shares": None, "reason": track.ended or track.failure}
    bits = [1 << place for place in range(64) if any(value >> place & 1 for value in seen)]
    shares = {
        THROTTLE_REASONS.get(bit, f"{bit:#x}"): round(sum(bool(value & bit) for value in seen) / len(seen), 4)
        for bit in bits
    }
    return {"shares": shares, "reason": None}


def _link(sampled: Sampled, direction: str, seen: str, moved: str) -> dict[str, Any]:
    """What NVML saw in its windows, beside what our copies moved all the while."""
    track, sums, own, seconds = sampled.sampler.track(seen), sampled.sums(seen), sampled.sums(moved), sampled.seconds
    mean = None if sums is None else sums.mean
    rise = None if own is None else own.rise
    own_kb_s = rise / seconds / 1000 if rise is not None and seconds > 0 else None
    reason = sampled.no_device if track is None else track.ended or track.failure
    return {
        "direction": direction,
        "nvml_kb_s": rounded(mean),
        "nvml_reason": reason if mean is None else None,
        "window_s": PCIE_WINDOW_S,
        "windows": 0 if sums is None else sums.samples,
        "window_share": round(sums.samples * PCIE_WINDOW_S / seconds, 4) if sums is not None and seconds > 0 else None,
        "own_nbytes": rounded(rise),
        "own_kb_s": rounded(own_kb_s),
        "own_reason": NO_TRANSFERS if own is None else None,
        "nvml_over_own": round(mean / own_kb_s, 4) if mean is not None and own_kb_s else None,
        "note": LINK_NOTE,
    }


def _cost(sampled: Sampled) -> dict[str, Any]:
    sampler, seconds = sampled.sampler, sampled.seconds
    cpu_s = sampler.thread_cpu_s
    return {
        "thread_cpu_s": rounded(cpu_s),
        "core_share": round(cpu_s / seconds, 6) if cpu_s is not None and seconds > 0 else None,
        "samples": sum(track.series.sums(0).samples for track in sampler.tracks),
        "reason": (sampler.stuck or "its thread has not ended") if cpu_s is None else None,
    }


def _rows(track: Track, probe_s: float) -> list[dict[str, Any]]:
    """A series of each field."""
    kept, counter = track.series.kept(), track.counter
    times = [round(time_s, 6) for time_s in kept.times_s]
    rows = []
    for field, values, sums in zip(counter.fields, kept.values, kept.sums, strict=True):
        row: dict[str, Any] = {
            "name": field.name,
            "unit": field.unit,
            "what": field.what,
            "kind": field.kind,
            "source": counter.source,
            "update_s": rounded(track.update_s),
            "update": _pace(track, probe_s),
            "interval_s": round(track.interval_s, 4),
            "samples": sums.samples,
            "missing_samples": sums.missing,
            "failures": track.failures,
            "failure": track.failure,
            "reason": track.ended,
            "ended_s": None if track.ended is None else rounded(track.ended_s),
            "first": rounded(sums.first),
            "last": rounded(sums.last),
        }
        if field.kind == "gauge":
            row |= {"mean": rounded(sums.mean), "least": rounded(sums.least), "most": rounded(sums.most)}
        elif field.kind == "total":
            row |= {"rise": rounded(sums.rise), "falls": sums.falls}
        rows.append({**row, "kept_one_in": kept.stride, "times_s": times, "values": [rounded(one) for one in values]})
    return rows


def _pace(track: Track, probe_s: float) -> str:
    """How often it changes, in words."""
    if track.counter.updates == "live":
        return "of the moment it is read"
    if track.counter.updates == "window":
        return f"counted over {track.counter.window_s:g} s while it is read"
    if track.update_s is None:
        return f"not found out: {track.changes} changes in {probe_s:g} s before the run"
    return f"the median time between {track.changes} changes before the run"


def rounded(value: float | None) -> float | None:
    """For a report: whole numbers as such, others to a millionth."""
    if value is None:
        return None
    return int(value) if float(value).is_integer() else round(value, 6)
