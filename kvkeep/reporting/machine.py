"""Figures of what a cache takes from the machine, and of others beside it: transfers, peers.

Must not read files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.benching.results import Results
from kvkeep.reporting.figure import Cell, Figure, LeftOut, Table, drawn
from kvkeep.reporting.inputs import Inputs, origin, value_of
from kvkeep.reporting.svg import NARROW, TIMES, Scale, Svg, number, ticks

DIRECTIONS = ("h2d", "d2h", "both")


@dataclass(frozen=True, slots=True)
class _Rate:
    """A measured rate in GB/s.   floor: what the machine can do; bound: what must be reached; None: nothing is said."""

    name: str
    what: str
    rate: float
    floor: float | None
    bound: float | None
    reached: bool | None


def transfers(inputs: Inputs) -> list[Figure | LeftOut]:
    """Ours against the ceiling, of the host's bench and of the GPU's."""
    out: list[Figure | LeftOut] = []
    for command, title in (
        ("bench gpu_check", "Copies between the tiers, on the GPU's link"),
        ("bench transfer", "Copies between the tiers, against plain memcpy"),
    ):
        for results in inputs.of(command):
            rates = [rate for name in results.metrics if (rate := _rate(results, name)) is not None]
            if rates:
                out.append(_transfer(title, f"transfer-{len(out)}", rates, results))
                break
    reason = "no result of `kvkeep bench transfer` or `make gpu-check` was given"
    return out or [LeftOut("Copies between the tiers, against the ceiling", reason)]


def _rate(results: Results, name: str) -> _Rate | None:
    metric = results.metrics[name]
    if metric.unit != "GB/s" or metric.value is None or name.startswith(("floor", "memcpy", "hit_ready")):
        return None
    row = next((row for row in results.rows if row.get("metric") == name), {})
    direction = next((one for one in DIRECTIONS if one in name), None)
    floor = value_of(results, "floor_memcpy_gbps")
    if floor is None and direction is not None:
        floor = value_of(results, f"floor_{direction}_gbps")
    elif direction == "both":
        floor = None  # both directions of a memcpy at once have no floor of their own
    bound, reached = row.get("bound"), row.get("reached")
    return _Rate(
        _called(name),
        str(row.get("what", "")),
        float(metric.value),
        floor,
        float(bound) if isinstance(bound, int | float) else None,
        reached if isinstance(reached, bool) else None,
    )


def _called(name: str) -> str:
    """A metric in words: of pieces_64_kib_batch_h2d_gbps "pieces 64 kib batch, host to GPU"."""
    words = f" {name.removesuffix('_gbps').replace('_', ' ')} "
    for direction, said in (("h2d", "host to GPU"), ("d2h", "GPU to host"), ("both", "both ways")):
        words = words.replace(f" {direction} ", f", {said}, ")
    return ", ".join(part for part in (one.strip() for one in words.split(",")) if part)


def _transfer(title: str, slug: str, rates: Sequence[_Rate], results: Results) -> Figure:
    judged = [rate for rate in rates if rate.bound is not None]
    shares = [rate.rate / rate.floor for rate in judged or rates if rate.floor]
    says = f"From {number(max(r.rate for r in rates))} down to {number(min(r.rate for r in rates))} GB/s"
    if shares:
        span = f"{100 * min(shares):.0f} to {100 * max(shares):.0f}"
        says = f"Our copies run at {span} % of the ceiling that was measured beside them"
        missed = [rate.name for rate in judged if rate.reached is False]
        says += f"; below their limit: {', '.join(missed)}" if missed else "; every limit is reached" if judged else ""
    rows: list[list[Cell]] = []
    for r in rates:
        verdict = "" if r.reached is None else "reached" if r.reached else "missed"
        rows.append(
            [r.name, r.rate, r.floor, round(r.rate / r.floor, 3) if r.floor else None, r.bound, verdict, r.what]
        )
    table = Table(("copies", "GB/s", "ceiling", "of it", "limit", "verdict", "what"), rows)
    picture = drawn(title, f"{says}.", lambda width: _draw_rates(rates, width))
    key = [("c-gpu", "ours, median"), ("k-floor", "ceiling"), ("k-bound", "limit")]
    note = (
        "More than 100 %: the plain copy was slower than ours in this run, so it was no ceiling there."
        if shares and max(shares) > 1
        else ""
    )
    return Figure(slug, "Copies", title, f"{says}.", picture, table, [origin(results)], key=key, note=note)


def _draw_rates(rates: Sequence[_Rate], width: float) -> Svg:
    svg = Svg(width, 38 * len(rates) + 30)
    right = width - 112
    high = ticks(max(max(r.rate, r.floor or 0) for r in rates), 6 if width > NARROW else 3)
    x = Scale(0, high[-1], 0, right)
    bottom = svg.height - 26
    for value in high:
        svg.line(x(value), 0, x(value), bottom, "zero" if value == 0 else "grid")
        svg.text(x(value), bottom + 16, number(value), "tick", "middle" if value else "start")
    svg.text(right + 14, bottom + 16, "GB/s", "axis")
    for i, rate in enumerate(rates):
        at = 38.0 * i
        share = "" if not rate.floor else f" · {100 * rate.rate / rate.floor:.0f} %"
        tip = f"{rate.name}: {number(rate.rate)} GB/s{share.replace(' · ', ', ')}{' of the ceiling' if share else ''}"
        svg.text(2, at + 13, rate.name, "label halo")
        svg.rect(0, at + 18, x(rate.rate), 12, "fill c-gpu", tip, 2)
        if rate.bound is not None:
            svg.line(x(rate.bound), at + 16, x(rate.bound), at + 32, "bound")
        if rate.floor is not None:
            svg.line(x(rate.floor), at + 14, x(rate.floor), at + 34, "floor")
        furthest = max(rate.rate, rate.floor or 0, rate.bound or 0)
        svg.text(x(furthest) + 8, at + 28, f"{number(rate.rate)}{share}", "strong halo")
    return svg


#: Ours in their order, exact LRU without estimates, which the ratios are over; and as it is by default.
LIKE_FOR_LIKE, DEFAULT = "kvkeep_lru", "kvkeep"


def peers(inputs: Inputs) -> list[Figure | LeftOut]:
    """Everybody's managers in one run: a row for each case and manager."""
    title = "Beside the managers of others"
    results = next((one for one in inputs.of("bench peers") if any("variant" in row for row in one.rows)), None)
    if results is None:
        return [LeftOut(title, "no result of `make bench-peers` was given")]
    cells: list[list[Cell]] = []
    for row in results.rows:
        if "variant" not in row:
            continue
        case, who = str(row["case"]), str(row["variant"])
        took = results.metrics.get(f"{case}_us_{who}")
        ours = value_of(results, f"{case}_us_{LIKE_FOR_LIKE}")
        us = None if took is None else took.value
        spread = "" if took is None or took.interval is None else " to ".join(number(end, 4) for end in took.interval)
        times = f"{number(us / ours)} {TIMES}" if us is not None and ours and who != LIKE_FOR_LIKE else ""
        matched = value_of(results, f"{case}_matched_{who}")
        share = "" if matched is None else f"{matched:.1%}"
        cells.append([case, who, us, spread, times, share, str(row.get("reason") or "")])
    head = ("case", "manager", "us", "95 %", f"over {LIKE_FOR_LIKE}", "matched", "note")
    said = []
    for peer, name in (("vllm", "vLLM's"), ("sglang_rust", "SGLang's Rust core"), ("lmcache", "LMCache's")):
        value, default = (value_of(results, f"w1_ratio_{peer}{suffix}") for suffix in ("", "_default"))
        if value is not None:
            beside = "" if default is None else f" ({number(default)} by default)"
            said.append(f"{number(value)} {TIMES} faster than {name}{beside}")
    says = (
        f"W1, all that a manager does for a request, verified: with the same order, LRU, ours is {', '.join(said)}."
        if said
        else f"{len(cells)} rows, interleaved in one run."
    )
    return [Figure("peers", "Peers", title, says, Table(head, cells).to_html(), None, [origin(results)])]
