"""Figures of what a cache brings to requests: times to first token by turn, hits over size, the cost of misses.

Must not read files.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvkeep.benching.results import Results
from kvkeep.benching.samples import median
from kvkeep.errors import BadInput
from kvkeep.report import JsonValue
from kvkeep.reporting.figure import Figure, LeftOut, Table, drawn
from kvkeep.reporting.inputs import Inputs, Origin, origin, origin_of_trace, value_of
from kvkeep.reporting.svg import PERCENT, PLAIN, TIMES, WIDE, Say, Scale, Svg, apart, number, ticks

Row = Mapping[str, JsonValue]
Points = list[tuple[float, float]]

SAID = {"off": "cache off", "gpu": "GPU tier", "both": "both tiers", "ample": "all on the GPU"}
GIB = 2**30
#: A gain in hits that is none.
NOTHING = 0.0005


# ---------------------------------------------------------------------- time to first token by turn


@dataclass(frozen=True, slots=True)
class _Series:
    """One configuration.   points: (turn, seconds) of each request."""

    kind: str
    points: Points

    @property
    def name(self) -> str:
        return SAID[self.kind]

    def medians(self) -> Points:
        """By turn."""
        by_turn: dict[float, list[float]] = defaultdict(list)
        for turn, seconds in self.points:
            by_turn[turn].append(seconds)
        return [(turn, median(found)) for turn, found in sorted(by_turn.items())]


def ttft_by_turn(inputs: Inputs) -> list[Figure | LeftOut]:
    """A figure of the load that the engine without a cache still keeps up with; one of each demo."""
    title = "Time to first token, turn by turn"
    out: list[Figure | LeftOut] = []
    for results in inputs.of("bench agent"):
        found, load = _of_agent(results)
        if found:
            what = f"sessions that come back turn after turn, at {load:g} of what the engine serves without a cache"
            out.append(_ttft(f"{title}, under load", f"ttft-agent-{len(out)}", what, found, origin(results)))
            break
    names = {"gpu": "one tier", "both": "two tiers"}
    for results in inputs.of("demo"):
        found = _of_demo(results)
        if found:
            out.append(
                _ttft(
                    f"{title}, one request at a time, {names[found[-1].kind]}",
                    f"ttft-demo-{len(out)}",
                    "sessions in rotation",
                    found,
                    origin(results),
                )
            )
    return out or [LeftOut(title, "no result of `kvkeep bench agent` or `kvkeep demo` was given")]


def _of_agent(results: Results) -> tuple[list[_Series], float]:
    rows = [row for row in results.rows if row.get("series") == "request"]
    if not rows:
        return [], 0.0
    first = rows[0]
    rows = [row for row in rows if (row["workload"], row["load"]) == (first["workload"], first["load"])]
    by: dict[str, Points] = defaultdict(list)
    for row in rows:
        by[str(row["config"])].append((_f(row["turn"]), _f(row["ttft_s"])))
    least = min(turn for points in by.values() for turn, _ in points)  # turns are counted from 1
    return [_Series(k, [(t - least + 1, s) for t, s in by[k]]) for k in ("off", "gpu", "both") if k in by], _f(
        first["load"]
    )


def _of_demo(results: Results) -> list[_Series]:
    kept = "both" if any(row.get("matched_host_tokens") for row in results.rows) else "gpu"
    columns = {"off": "ttft_without_ms", "ample": "ttft_gpu_hit_ms", kept: "ttft_ms"}
    found = {
        kind: [(_f(row["turn"]), _f(row[key]) / 1000) for row in results.rows if row.get(key) is not None]
        for kind, key in columns.items()
    }
    return [_Series(kind, points) for kind, points in found.items() if points]


def _ttft(title: str, slug: str, what: str, found: Sequence[_Series], source: Origin) -> Figure:
    last = {one.kind: one.medians()[-1][1] for one in found}
    best = "both" if "both" in last else found[-1].kind
    turn = found[0].medians()[-1][0]
    says = f"By turn {turn:g} the first token comes after {_seconds(last[best])} with {SAID[best]}"
    if "off" in last and best != "off":
        says += f", after {_seconds(last['off'])} without a cache: {number(last['off'] / last[best])} {TIMES} as long"
    table = Table(
        ("turn", *(f"{one.name}, median [s]" for one in found), "requests"),
        [
            [int(t), *(dict(one.medians()).get(t) for one in found), sum(x == t for x, _ in found[0].points)]
            for t, _ in found[0].medians()
        ],
    )
    note = f"A point is a request, the line the median of its turn; {what}."
    picture = drawn(title, f"{says}.", lambda width: _draw_ttft(found, width))
    return Figure(
        slug, f"First token, {title.rsplit(', ', 1)[-1]}", title, f"{says}.", picture, table, [source], note=note
    )


def _draw_ttft(found: Sequence[_Series], width: float) -> Svg:
    svg = Svg(width, 300 if width == WIDE else 270)
    left, right, top, bottom = 48.0, width - 104, 22.0, svg.height - 40
    turns = [turn for one in found for turn, _ in one.points]
    high = ticks(max(seconds for one in found for _, seconds in one.points))
    x = Scale(min(turns), max(turns), left + 14, right - 10)
    y = Scale(0, high[-1], bottom, top)
    svg.y_axis(y, high, left, right, PLAIN)
    svg.text(0, 12, "seconds to the first token", "axis")
    svg.x_axis(x, sorted(set(turns)), bottom, PLAIN)
    svg.text((left + right) / 2, svg.height - 6, "turn of the session", "axis", "middle")
    ends = [y(one.medians()[-1][1]) for one in found]
    for n, (one, label) in enumerate(zip(found, apart(ends, 16, top, bottom), strict=True)):
        shift = (n - (len(found) - 1) / 2) * 5
        for turn, seconds in one.points:
            tip = f"{one.name}, turn {turn:g}: {_seconds(seconds)}"
            svg.dot(x(turn) + shift, y(seconds), 2.6, f"dot c-{one.kind}", tip)
        svg.path([(x(turn), y(seconds)) for turn, seconds in one.medians()], f"series c-{one.kind}")
        svg.text(right + 2, label + 4, one.name, f"direct t-{one.kind}")
    return svg


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{number(1e6 * value)} us"
    return f"{number(1000 * value)} ms" if value < 1 else f"{number(value)} s"


# ---------------------------------------------------------------------- hits over size


@dataclass(frozen=True, slots=True)
class _Curve:
    """Hits over sizes.   unit: of the sizes.   lines: (class, name, points); dots are measured.   point: the user's."""

    title: str
    unit: str
    log: bool
    lines: Sequence[tuple[str, str, Points]]
    dots: Points
    point: tuple[float, str] | None
    source: Origin


def hit_curves(inputs: Inputs, point: str | None) -> list[Figure | LeftOut]:
    """Of the sweep, and of `kvkeep size`.   point: the user's pool, as it was said."""
    curves = [c for one in inputs.of("bench sweep") if (c := _of_sweep(one, inputs, point)) is not None]
    curves += [c for one in inputs.of("size") if (c := _of_size(one, point)) is not None]
    if not curves:
        reason = "no result of `kvkeep bench sweep` or `kvkeep size` was given"
        return [LeftOut("Hits over the size of the pool", reason)]
    return [_curve(curve, number, point) for number, curve in enumerate(curves)]


def parse_point(said: str) -> tuple[float, str]:
    """A size and its unit: pages, tokens or GiB.  Raises `BadInput`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(pages?|tokens?|gib)?\s*", said, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"--point {said}: it must be a size above 0 with its unit: 18 (pages), 131072tokens or 24GiB")
    unit = (match[2] or "pages").lower()
    return float(match[1]), "GiB" if unit == "gib" else f"{unit.rstrip('s')}s"


def _of_sweep(results: Results, inputs: Inputs, said: str | None) -> _Curve | None:
    rows = sorted((row for row in results.rows if row.get("series") == "sweep"), key=lambda row: _f(row["pool_pages"]))
    if not rows:
        return None
    sizes = [_f(row["pool_pages"]) for row in rows]
    lines = [
        (kind, name, list(zip(sizes, (_f(row[key]) for row in rows), strict=True)))
        for kind, name, key in (("gpu", "replay says", "predicted_share"), ("off", "LRU", "predicted_lru_share"))
        if all(key in row for row in rows)
    ]
    page_tokens = _f(rows[0]["pool_tokens"]) / _f(rows[0]["pool_pages"])
    point = None
    if said is not None:
        size, unit = parse_point(said)
        if unit != "GiB":
            point = (size if unit == "pages" else size / page_tokens, "your pool")
    else:
        agent, whole = inputs.first("bench agent", "pool_share"), value_of(results, "working_set_pages")
        share = None if agent is None else value_of(agent, "pool_share")
        if share is not None and whole is not None:
            point = (share * whole, "a pool as of bench agent")
    dots = [(size, _f(row["matched_share"])) for size, row in zip(sizes, rows, strict=True)]
    title = "Hits over the size of the pool, measured"
    return _Curve(title, "pages", False, lines, dots, point, origin(results))


def _of_size(results: Results, said: str | None) -> _Curve | None:
    rows = [row for row in results.rows if isinstance(row.get("tokens"), int) and _f(row["tokens"]) > 0]
    skip = {"trace", "order", "page_size", "note", "tokens"}
    names = [name for name in (rows[0] if rows else {}) if name not in skip]
    if not names:
        return None
    nbytes = value_of(results, "kv_nbytes_per_token")
    factor, unit = (nbytes / GIB, "GiB") if nbytes else (1.0, "tokens")
    kinds = {"lru": "off", "rhythm": "both", "best": "ample", "best possible": "ample"}
    lines = [
        (
            kinds.get(name, "gpu"),
            "best possible" if name.startswith("best") else name,
            [(factor * _f(r["tokens"]), _f(r[name])) for r in rows],
        )
        for name in names
    ]
    point = None
    if said is not None:
        size, of = parse_point(said)
        tokens = {
            "tokens": size,
            "pages": size * _f(rows[0].get("page_size", 1)),
            "GiB": size * GIB / nbytes if nbytes else 0.0,
        }[of]
        point = (tokens * factor, "your pool") if tokens else None
    elif (both := value_of(results, "tiers_tokens")) is not None:
        point = (both * factor, "your tiers")
    title = f"Hits over the size of the tiers, {rows[0].get('trace', 'a trace')}"
    return _Curve(title, unit, True, lines, [], point, origin(results))


def _curve(curve: _Curve, count: int, said: str | None) -> Figure:
    main = curve.dots or curve.lines[-1][2]
    for kind, _, points in curve.lines:
        if kind == "both" and not curve.dots:
            main = points
    best_size, best = max(main, key=lambda pair: (pair[1], -pair[0]))
    says = f"At most {_percent(best)} of the prompt tokens are hits, from {number(best_size)} {curve.unit} up"
    if curve.point is not None:
        at = interpolated(main, curve.point[0])
        here = f"{curve.point[1][0].upper()}{curve.point[1][1:]} of {number(round(curve.point[0], 1))} {curve.unit}"
        says = f"{here} hits {_percent(at)} of the prompt tokens"
        more = f"{number(best_size)} {curve.unit} hit {_percent(best)}"
        says += f"; {more}" if best - at >= NOTHING else "; more buys nothing"
    measured = [("measured", curve.dots)] if curve.dots else []
    columns = [*measured, *((name, points) for _, name, points in curve.lines)]
    table = Table(
        (f"size [{curve.unit}]", *(f"{name} [share]" for name, _ in columns)),
        [[round(size, 4), *(round(dict(points)[size], 4) for _, points in columns)] for size, _ in main],
    )
    picture = drawn(curve.title, f"{says}.", lambda width: _draw_curve(curve, main, width))
    note = (
        "Points are measured, lines are a replay of the same requests."
        if curve.dots
        else "Both tiers together, by factors of two."
    )
    if said is not None and curve.point is None:
        note += f" The point {said} is not shown: these sizes are {curve.unit}, and a token's bytes are not known."
    return Figure(
        f"hits-{count}",
        f"Hits, {curve.title.rsplit(', ', 1)[-1]}",
        curve.title,
        f"{says}.",
        picture,
        table,
        [curve.source],
        note=note,
    )


def _draw_curve(curve: _Curve, main: Points, width: float) -> Svg:
    svg = Svg(width, 300 if width == WIDE else 270)
    left, right, top, bottom = 48.0, width - 96, 26.0, svg.height - 40
    sizes = [size for size, _ in main]
    high = ticks(
        max(share for _, _, points in curve.lines for _, share in points) if curve.lines else max(s for _, s in main)
    )
    x = Scale(min(sizes) if curve.log else 0, max(sizes), left + 6, right - 8, curve.log)
    y = Scale(0, high[-1], bottom, top)
    svg.y_axis(y, high, left, right, PERCENT)
    svg.text(0, 12, "of the prompt tokens, hits", "axis")
    count = 6 if width == WIDE else 3
    marks = sizes[:: max(1, -(-len(sizes) // count))] if curve.log else ticks(max(sizes), count)[:-1]
    svg.x_axis(x, marks, bottom, _Short() if curve.unit == "tokens" else PLAIN)
    svg.text((left + right) / 2, svg.height - 6, f"size [{curve.unit}]", "axis", "middle")
    ends = [y(points[-1][1]) for _, _, points in curve.lines]
    for (kind, name, points), label in zip(curve.lines, apart(ends, 16, top, bottom), strict=True):
        svg.path([(x(size), y(share)) for size, share in points], f"series c-{kind}")
        svg.text(right, label + 4, name, f"direct t-{kind}")
        for size, share in points if not curve.dots else ():
            svg.dot(x(size), y(share), 2.6, f"dot c-{kind}", f"{name}, {number(size)} {curve.unit}: {_percent(share)}")
    for size, share in curve.dots:
        svg.dot(x(size), y(share), 4.5, "dot c-both", f"measured, {number(size)} {curve.unit}: {_percent(share)}")
    if curve.point is not None:
        size, name = curve.point
        at, share = min(max(x(size), left), right), interpolated(main, size)
        svg.line(at, top, at, bottom, "yours")
        svg.dot(at, y(share), 6, "here", f"{name}, {number(size)} {curve.unit}: {_percent(share)}")
        near_end = at > (left + right) / 2
        svg.text(
            at + (-9 if near_end else 9),
            top + 9,
            f"{name}: {_percent(share)}",
            "strong halo",
            "end" if near_end else "start",
        )
    return svg


class _Short(Say):
    """Tokens, in thousands and millions."""

    def __call__(self, value: float) -> str:
        return f"{value / 2**20:.3g}M" if value >= 2**20 else f"{value / 1024:.3g}k"


def interpolated(points: Points, size: float) -> float:
    """The share at a size between those that are known; that of the nearest outside of them."""
    known = sorted(points)
    for (low, share), (high, then) in pairwise(known):
        if low <= size <= high:
            return share + (then - share) * ((size - low) / (high - low) if high > low else 0)
    return known[0][1] if size < known[0][0] else known[-1][1]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---------------------------------------------------------------------- misses


def misses(inputs: Inputs) -> list[Figure | LeftOut]:
    """What was not found, by cause, and what it took to compute: of the traces, and of replays that explain."""
    out: list[Figure | LeftOut] = []
    for trace in inputs.traces:
        told = trace.other.get("missed_tokens")
        names = trace.processes
        engines = (
            {int(p): c for p, c in told.items() if c and "cache off" not in names.get(int(p), "")}
            if isinstance(told, dict)
            else {}
        )
        if not engines:
            continue
        pid = max(engines, key=lambda p: ("host 0" not in names[p], sum(engines[p].values())))
        forwards = [
            s for s in trace.spans() if s.pid == pid and not s.cat and s.name == "prefill" and not s.args.get("decodes")
        ]
        tokens = sum(_f(span.args.get("prompt_tokens", 0)) for span in forwards)
        each = sum(span.end - span.begin for span in forwards) / tokens if tokens else None
        out.append(_missed(engines[pid], each, names[pid], origin_of_trace(trace), len(out)))
    for results in inputs.of("replay"):
        found = {
            name.removeprefix("missed_pages_").replace("_", " "): int(metric.value or 0)
            for name, metric in results.metrics.items()
            if name.startswith("missed_pages_") and metric.value
        }
        if found:
            out.append(_missed(found, None, "pages of a replay", origin(results), len(out), "pages"))
    reason = (
        "neither a trace of an engine with a cache (`--trace FILE`) nor a result of `kvkeep replay --explain` was given"
    )
    return out or [LeftOut("The cost of a miss, by cause", reason)]


def _missed(
    found: Mapping[str, int], each_s: float | None, of: str, source: Origin, count: int, unit: str = "tokens"
) -> Figure:
    rows = sorted(found.items(), key=lambda pair: -pair[1])
    whole = sum(found.values())
    says = f"{_percent(rows[0][1] / whole)} of what was not found was {rows[0][0]}"
    lost = found.get("evicted", 0)
    if rows[0][0] != "evicted" and lost:
        says += f"; {_percent(lost / whole)} had been evicted"
    if each_s is not None:
        says += f". A missed token took {_seconds(each_s)} to compute, {_seconds(each_s * whole)} in all"
    table = Table(
        ("cause", unit, "share", "to compute [s]"),
        [[cause, n, round(n / whole, 4), None if each_s is None else round(n * each_s, 4)] for cause, n in rows],
    )

    def draw(width: float) -> Svg:
        svg = Svg(width, 34 * len(rows) + 8)
        top = Scale(0, rows[0][1], 0, width - 150)
        for i, (cause, n) in enumerate(rows):
            at = 34.0 * i + 4
            words = f"{n:,} {unit}" + ("" if each_s is None else f", {_seconds(n * each_s)}")
            svg.text(0, at + 10, cause, "label")
            svg.rect(
                0, at + 15, top(n), 10, "fill c-gate" if cause == "evicted" else "fill c-off", f"{cause}: {words}", 2
            )
            svg.text(max(top(n), 1) + 6, at + 24, words, "tick")
        return svg

    title = "The cost of a miss, by cause"
    note = (
        f"{of}. Seconds are the tokens at the pace of the forwards that computed nothing but prompts." if each_s else of
    )
    return Figure(
        f"misses-{count}", "Misses by cause", title, f"{says}.", drawn(title, says, draw), table, [source], note=note
    )


def _f(value: JsonValue) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"a results file has {value!r} where a number belongs; measure it again")
    return float(value)
