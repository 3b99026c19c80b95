"""One screen of what the GPU check found: a line for each part, its verdict and its main figures.

Must not know how anything was measured; a figure that is not there leaves its place empty.
"""

from collections.abc import Callable, Iterator, Mapping

from kvkeep.report import JsonValue, Report

WIDTH = 118
#: The page size whose rates are shown: the largest, then what smaller runs have.
PAGES_MIB = (16, 4, 1)
PIECES_KIB = (32, 64, 256)

Rows = Mapping[str, Mapping[str, JsonValue]]


def summary(report: Report) -> Iterator[str]:
    """The lines, none longer than `WIDTH`."""
    rows: Rows = {str(row["metric"]): row for row in report.rows}
    judged = [row for row in report.rows if "reached" in row]
    missed = sum(row["reached"] is False for row in judged)
    device = str(rows.get("machine", {}).get("device", "no device"))
    yield f"gpu_check on {device}: {missed} of {len(judged)} limits missed"
    for part in dict.fromkeys(str(row["part"]) for row in report.rows if "part" in row):
        of_part = [row for row in report.rows if row.get("part") == part]
        verdict = _verdict(of_part, part)
        said = _note(of_part, part) if verdict in ("FAILED", "skipped") else LINES[part](rows) if part in LINES else ""
        yield f"  {part:<13}{verdict:<9}{said}"[:WIDTH].rstrip()
    if "telemetry" in rows:
        yield f"  {'telemetry':<22}{rows['telemetry'].get('note', '')}"[:WIDTH].rstrip()


def _note(rows: "list[Mapping[str, JsonValue]]", part: str) -> str:
    return next(str(row.get("note", "")).removeprefix("skipped: ") for row in rows if row["metric"] == part)


def _verdict(rows: "list[Mapping[str, JsonValue]]", part: str) -> str:
    own = [row for row in rows if row["metric"] == part]
    if own and own[0].get("reached") is False and "value" not in own[0]:
        return "FAILED"
    if any(row.get("reached") is False for row in rows):
        return "MISSED"
    if own and str(own[0].get("note", "")).startswith("skipped"):
        return "skipped"
    return "ok" if any("reached" in row for row in rows) else "measured"


def _value(rows: Rows, metric: str, digits: int = 0) -> str:
    value = rows.get(metric, {}).get("value")
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "-"


def _admit_path(rows: Rows) -> str:
    names = ("blocking_calls", "calls_that_waited", "longest_call_us")
    blocking, waited, longest = (_value(rows, name) for name in names)
    return f"{blocking} blocking calls, {waited} that waited; the longest took {longest} us"


def _bytes(rows: Rows) -> str:
    trips = [row for name, row in rows.items() if name.startswith("round_trip")]
    bad = sum(row.get("reached") is False for row in trips)
    return f"{len(trips)} ways there and back, {bad} with pages that differ"


def _rates(rows: Rows) -> str:
    said = []
    mib = next((size for size in PAGES_MIB if f"h2d_{size}_mib_gbps" in rows), None)
    for name in ("h2d", "d2h", "both"):
        row = rows.get(f"{name}_{mib}_mib_gbps", {})
        said.append(f"{name} {_value(rows, f'{name}_{mib}_mib_gbps', 1)} of {_value(rows, f'floor_{name}_gbps', 1)}")
        said[-1] += f" ({row['of_floor']:.0%})" if isinstance(row.get("of_floor"), float) else ""
    kib = next((size for size in PIECES_KIB if f"pieces_{size}_kib_dma_h2d_gbps" in rows), None)
    pieces = [f"{way} {_value(rows, f'pieces_{kib}_kib_{way}_h2d_gbps', 1)}" for way in ("dma", "batch", "kernel")]
    return f"{mib} MiB: {', '.join(said)} GB/s; {kib} KiB up: {', '.join(pieces)}"


def _hits(rows: Rows) -> str:
    lock, ready, wrong = (_value(rows, name) for name in ("admit_lock_us", "hit_ready_us", "hit_wrong_pages"))
    rate = _value(rows, "hit_ready_gbps", 1)
    return f"{lock} us under the lock; readable after {ready} us, {rate} GB/s; {wrong} wrong pages"


def _model(rows: Rows) -> str:
    ttft = " / ".join(_value(rows, f"model_ttft_{name}_ms", 1) for name in ("off", "gpu", "both"))
    joules = " / ".join(_value(rows, f"model_{name}_joules_per_1k", 2) for name in ("off", "both"))
    ratio, wrong = _value(rows, "model_ttft_ratio", 1), _value(rows, "model_wrong_positions")
    return f"TTFT off / pool / both {ttft} ms, {ratio} x; off / both {joules} J a 1,000 tokens; {wrong} wrong"


def _device_tests(rows: Rows) -> str:
    row = rows.get("device_tests", {})
    return f"{row['value']} passed, {row.get('note', '')}" if "value" in row else str(row.get("note", ""))


LINES: Mapping[str, Callable[[Rows], str]] = {
    "admit_path": _admit_path,
    "bytes": _bytes,
    "rates": _rates,
    "hits": _hits,
    "pinning": lambda rows: f"{_value(rows, 'pin_s_per_gib', 2)} s a GiB",
    "device_tests": _device_tests,
    "model": _model,
    "engine": lambda rows: "kvkeep demo, kvkeep verify",
}
