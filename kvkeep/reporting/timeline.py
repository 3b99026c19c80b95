"""The timeline of a run: requests, gates, copies, evictions, pages and the machine, on one clock.

Must not read files.  It takes a trace, or, where there is none, the rows of `bench agent`, which know less.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvkeep.benching.results import Results
from kvkeep.report import JsonValue
from kvkeep.reporting.figure import Figure, LeftOut, Table, drawn
from kvkeep.reporting.inputs import Inputs, Origin, origin, origin_of_trace
from kvkeep.reporting.svg import NARROW, Scale, Svg, number, ticks
from kvkeep.telemetry.chrome import Span, Trace

Points = list[tuple[float, float]]

#: A longer run is cut, and says so: more requests are no picture any more.
REQUESTS_MAX = 64
POINTS_MAX = 240
LANE, GAP = 13.0, 3.0

STAGES = {
    "queued": "waits",
    "room": "waits for room",
    "gate": "gate: waits for copies",
    "prefill": "prefill",
    "decode": "decode",
}
#: Of the machine's counters, those that are drawn if they are there: name, words, factor.
MACHINE = (
    ("gpu_busy_pct", "GPU busy [%]", 1.0),
    ("gpu_power_w", "GPU power [W]", 1.0),
    ("gpu_memory_used_nbytes", "GPU memory [GiB]", 1 / 2**30),
    ("host_rss_nbytes", "resident memory [GiB]", 1 / 2**30),
)
CPU = "host_cpu_s"
MACHINE_MAX = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a request, or a copy.   lane: its row; inner: how much of it moved bytes, in seconds."""

    lane: int
    kind: str
    begin: float
    end: float
    tip: str
    inner: float | None = None


@dataclass(slots=True)
class Timeline:
    """What is drawn, in seconds from `begin`.

    marks: (tier, time, pages, words).   pages: stacked, from below.   machine: words and points.
    requests: of `requests_all` of the run.   note: what to know when reading it.
    """

    title: str
    origin: Origin
    begin: float = 0.0
    end: float = 0.0
    bars: list[Bar] = field(default_factory=list)
    lanes: int = 0
    copies: dict[str, list[Bar]] = field(default_factory=dict)
    marks: list[tuple[str, float, int, str]] = field(default_factory=list)
    pages: list[tuple[str, str, Points]] = field(default_factory=list)
    machine: list[tuple[str, Points]] = field(default_factory=list)
    requests: int = 0
    requests_all: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    note: str = ""


def timelines(inputs: Inputs) -> list[Figure | LeftOut]:
    """One of each trace; without traces that of `bench agent`."""
    found = [t for trace in inputs.traces if (t := of_trace(trace)) is not None]
    if not found:
        agent = next((one for one in inputs.of("bench agent") if one.rows), None)
        found = [t] if agent is not None and (t := _of_rows(agent)) is not None else []
    if not found:
        reason = "neither a trace (`--trace FILE` of `kvkeep demo`, say) nor a result of `kvkeep bench agent` was given"
        return [LeftOut("Timeline of a run", reason)]
    return [_figure(timeline, n) for n, timeline in enumerate(found)]


# ---------------------------------------------------------------------- from a trace


def of_trace(trace: Trace) -> Timeline | None:
    """The engine of the trace that has most to show."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans():
        spans[span.pid].append(span)
    whole = {
        pid: [s for s in own if s.cat == "request" and s.name.startswith("request ")] for pid, own in spans.items()
    }
    engines = [pid for pid in spans if whole[pid]]
    if not engines:
        return None
    names = trace.processes

    def worth(pid: int) -> tuple[bool, int, int]:
        return "cache off" not in names[pid], sum(s.cat in ("h2d", "d2h") for s in spans[pid]), len(whole[pid])

    pid = max(engines, key=worth)
    chosen = sorted(whole[pid], key=lambda span: span.begin)[:REQUESTS_MAX]
    out = Timeline(
        names[pid].removeprefix("engine: "), origin_of_trace(trace), requests=len(chosen), requests_all=len(whole[pid])
    )
    out.begin, out.end = chosen[0].begin, max(span.end for span in chosen)
    _requests(out, chosen, [s for s in spans[pid] if s.cat == "request"])
    for span in spans[pid]:
        if span.cat in ("h2d", "d2h") and span.begin <= out.end and span.end >= out.begin:
            moved = float(span.args.get("copy_us", 0)) / 1e6
            cause, pages = span.args.get("cause", ""), span.args.get("pages", "?")
            tip = f"{cause}, {pages} pages, bytes moved for {_seconds(moved)}"
            out.copies.setdefault(span.cat, []).append(Bar(0, span.cat, span.begin, span.end, tip, moved))
    _events(out, trace, pid)
    _counters(out, trace, pid)
    out.note = "A copy is pale from its start to the poll that saw it end, solid for as long as its bytes moved."
    if sum(span.end - span.begin for span in chosen) < (out.end - out.begin) / 2:
        out.note += " In the gaps other engines of the same run were asked, or none was."
    return out


def _requests(out: Timeline, chosen: Sequence[Span], stages: Sequence[Span]) -> None:
    free: list[float] = []
    lane_of = {}
    for span in chosen:
        lane = next((n for n, end in enumerate(free) if end <= span.begin), len(free))
        free[lane : lane + 1] = [span.end]
        lane_of[span.of] = lane
    out.lanes = len(free)
    args = {span.of: span.args for span in chosen}
    for span in sorted(stages, key=lambda s: (s.begin, -s.end)):
        if span.name in STAGES and span.of in lane_of:
            told = args[span.of]
            tip = (
                f"request {span.of}: {STAGES[span.name]} {_seconds(span.end - span.begin)}; "
                f"{told.get('prompt_tokens', 0):,} tokens, "
                f"found {told.get('matched_gpu', 0):,} on the GPU, {told.get('matched_cpu', 0):,} in host memory"
            )
            out.bars.append(Bar(lane_of[span.of], span.name, span.begin, span.end, tip))
            out.stages[span.name] = out.stages.get(span.name, 0.0) + span.end - span.begin


def _events(out: Timeline, trace: Trace, pid: int) -> None:
    for event in trace.events:
        if event["ph"] == "i" and event["pid"] == pid and "tier" in event.get("args", {}):
            at, told = event["ts"] / 1e6, event["args"]
            if out.begin <= at <= out.end:
                out.marks.append((told["tier"], at, int(told.get("pages", 0)), event["name"]))


def _counters(out: Timeline, trace: Trace, pid: int) -> None:
    pool: dict[str, Points] = defaultdict(list)
    machine: dict[str, Points] = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "C":
            at = event["ts"] / 1e6
            if event["pid"] == pid and event["name"].startswith("GPU pool"):
                for kind, value in event["args"].items():
                    pool[kind].append((at, float(value)))
            elif event["pid"] != pid:
                for name, value in event["args"].items():
                    machine[name].append((at, float(value)))
    words = {"live": ("c-both", "in use"), "cached": ("c-gpu", "cached"), "free": ("c-free", "free")}
    out.pages = [(*words[kind], _thin(_within(pool[kind], out))) for kind in words if pool.get(kind)]
    found = [
        (said, [(t, v * factor) for t, v in _thin(_within(machine[name], out))])
        for name, said, factor in MACHINE
        if name in machine
    ]
    if CPU in machine:
        found.append(("processors busy", _thin(_slopes(_within(machine[CPU], out)))))
    out.machine = [(said, points) for said, points in found if len(points) > 1][:MACHINE_MAX]


def _within(points: Points, out: Timeline) -> Points:
    return [(t, v) for t, v in points if out.begin <= t <= out.end]


def _thin(points: Points) -> Points:
    """So many points that more could not be seen; the first and the last are kept."""
    every = -(-len(points) // POINTS_MAX)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def _slopes(points: Points) -> Points:
    """Of a total, how fast it rises."""
    return [((a + b) / 2, max(0.0, (w - v) / (b - a))) for (a, v), (b, w) in pairwise(points) if b > a]


# ---------------------------------------------------------------------- from the rows of bench agent


def _of_rows(results: Results) -> Timeline | None:
    """Both tiers at the highest load: what a row tells is when it came, got its first token, and ended."""
    rows = [row for row in results.rows if row.get("series") == "request" and row.get("config") == "both"]
    if not rows:
        return None
    first = rows[0]["workload"]
    load = max(float(str(row["load"])) for row in rows if row["workload"] == first)

    def same(row: Mapping[str, JsonValue]) -> bool:
        return (row.get("workload"), row.get("load"), row.get("config")) == (first, load, "both")

    chosen = [row for row in rows if same(row)][:REQUESTS_MAX]
    whole, stages = [], []
    for n, row in enumerate(chosen):
        due, token, end = (float(str(row[key])) for key in ("due_s", "first_s", "end_s"))
        told = {
            "prompt_tokens": row["prompt_tokens"],
            "matched_gpu": row["matched_gpu_tokens"],
            "matched_cpu": row["matched_cpu_tokens"],
        }
        whole.append(Span(0, "request", str(n), f"request {n}", due, end, told))
        stages += [
            Span(0, "request", str(n), "prefill", due, token, told),
            Span(0, "request", str(n), "decode", token, end, told),
        ]
    title = f"both tiers, {first}, {load:g} of what is served without a cache"
    out = Timeline(title, origin(results), requests=len(chosen), requests_all=sum(map(same, rows)))
    out.begin, out.end = min(s.begin for s in whole), max(s.end for s in whole)
    _requests(out, whole, stages)
    looks = [row for row in results.rows if row.get("series") == "cache" and same(row)]
    at = [float(str(row["t_s"])) for row in looks]
    for kind, words, key in (
        ("c-both", "in use", "pages_live"),
        ("c-gpu", "cached", "pages_cached"),
        ("c-free", "free", "pages_free"),
    ):
        points = [(t, float(str(row[key]))) for t, row in zip(at, looks, strict=True)]
        if len(points) > 1:
            out.pages.append((kind, words, points))
    for tier, key, words in (
        ("GPU", "pages_demoted", "GPU: left to the tier below"),
        ("GPU", "pages_evicted", "GPU: evicted"),
        ("host", "pages_lost", "host: evicted"),
    ):
        for t, before, now in zip(at[1:], looks, looks[1:], strict=False):
            pages = int(str(now[key])) - int(str(before[key]))
            if pages > 0:
                out.marks.append((tier, t, pages, words))
    out.note = (
        "Of rows, not of a trace: waiting and prefill are one, and copies are not known; `--trace FILE` has them."
    )
    return out


# ---------------------------------------------------------------------- the figure


def _figure(timeline: Timeline, count: int) -> Figure:
    cut = f", the first of {timeline.requests_all}" if timeline.requests < timeline.requests_all else ""
    span = timeline.end - timeline.begin
    waits = timeline.stages.get("gate", 0.0) + timeline.stages.get("room", 0.0)
    says = f"{timeline.requests} requests{cut} in {_seconds(span)}"
    if timeline.copies:
        copies = [bar for own in timeline.copies.values() for bar in own]
        moved = sum(bar.inner or 0.0 for bar in copies)
        says += f"; {len(copies)} copies moved bytes for {_seconds(moved)}"
        says += f", requests waited {_seconds(waits)} for copies and room"
    rows: list[list[str | float | int | None]] = [[STAGES[k], round(s, 4)] for k, s in timeline.stages.items()]
    for name, own in timeline.copies.items():
        rows.append([f"copies {name}: {len(own)}, bytes moving", round(sum(bar.inner or 0 for bar in own), 4)])
    gone: dict[str, int] = defaultdict(int)
    for _, _, pages, words in timeline.marks:
        gone[words] += pages
    rows += [[f"{words} [pages]", pages] for words, pages in gone.items()]
    used = [(f"s-{kind}", words) for kind, words in STAGES.items() if kind in timeline.stages]
    title = f"Timeline of a run: {timeline.title}"
    picture = drawn(title, f"{says}.", lambda width: _draw(_moved(timeline), width))
    table = Table(("what", "seconds, or pages"), rows)
    return Figure(
        f"timeline-{count}",
        "Timeline",
        title,
        f"{says}.",
        picture,
        table,
        [timeline.origin],
        key=used,
        note=timeline.note,
    )


def _moved(t: Timeline) -> Timeline:
    """On a clock that begins with the first request."""
    by = t.begin

    def bar(one: Bar) -> Bar:
        return replace(one, begin=one.begin - by, end=one.end - by)

    def move(points: Points) -> Points:
        return [(at - by, value) for at, value in points]

    return replace(
        t,
        begin=0.0,
        end=t.end - by,
        bars=[bar(b) for b in t.bars],
        copies={name: [bar(b) for b in own] for name, own in t.copies.items()},
        marks=[(tier, at - by, pages, words) for tier, at, pages, words in t.marks],
        pages=[(kind, words, move(points)) for kind, words, points in t.pages],
        machine=[(words, move(points)) for words, points in t.machine],
    )


def _draw(t: Timeline, width: float) -> Svg:
    svg = Svg(width, 0)
    left, right = 0.0, width - 8
    x = Scale(0, t.end, left, right)
    at = 18.0
    marks = ticks(t.end, 8 if width > NARROW else 4)
    marks = [value for value in marks if value <= t.end]
    svg.text(0, 11, f"requests, {t.lanes} at a time at most" if t.lanes > 1 else "requests, one at a time", "axis")
    for bar in t.bars:
        y = at + bar.lane * (LANE + GAP)
        svg.rect(x(bar.begin), y, x(bar.end) - x(bar.begin), LANE, f"s-{bar.kind}", bar.tip, 1.5)
    at += t.lanes * (LANE + GAP) + 12
    for name, words in (("h2d", "copies, host to GPU"), ("d2h", "copies, GPU to host")):
        if name in t.copies:
            svg.text(0, at + 9, words, "axis")
            for bar in t.copies[name]:
                svg.rect(x(bar.begin), at + 14, x(bar.end) - x(bar.begin), 9, "pale c-gate", bar.tip)
                if bar.inner:
                    svg.rect(
                        x(bar.begin),
                        at + 14,
                        x(min(bar.end, bar.begin + bar.inner)) - x(bar.begin),
                        9,
                        "fill c-gate",
                        bar.tip,
                    )
            at += 34
    for tier in ("GPU", "host"):
        own = [mark for mark in t.marks if mark[0] == tier]
        if own:
            most = max(pages for _, _, pages, _ in own)
            svg.text(0, at + 9, f"pages leave the {tier} tier, up to {most:,}; red: lost", "axis")
            for _, when, pages, words in own:
                tall = 4 + 14 * (pages / most if most else 0)
                kind = "evict lost" if words.endswith("evicted") else "evict"
                svg.rect(x(when) - 1, at + 33 - tall, 2, tall, kind, f"{words}: {pages:,} pages at {_seconds(when)}")
            svg.line(left, at + 33, right, at + 33, "zero")
            at += 46
    if t.pages:
        at = _draw_pages(svg, t, x, at)
    for words, points in t.machine:
        at = _draw_counter(svg, words, points, x, at)
    for value in marks:
        svg.parts.insert(0, f'<line class="grid" x1="{x(value):.1f}" y1="16" x2="{x(value):.1f}" y2="{at:.1f}"/>')
        svg.text(
            x(value),
            at + 15,
            f"{number(value)} s",
            "tick",
            "middle" if 20 < x(value) < width - 20 else "start" if value == 0 else "end",
        )
    svg.height = at + 22
    return svg


def _draw_pages(svg: Svg, t: Timeline, x: Scale, at: float) -> float:
    """Stacked, as steps."""
    by_time = [dict(points) for _, _, points in t.pages]
    times = sorted(set.intersection(*(set(one) for one in by_time)))
    total = max((sum(one[when] for one in by_time) for when in times), default=0)
    if not total:
        return at
    tall, base = 58.0, [0.0] * len(times)
    y = Scale(0, total, at + 14 + tall, at + 14)
    svg.text(0, at + 9, f"GPU pool, {total:,.0f} pages:", "axis")
    across = 122.0
    for (kind, words, _), one in zip(t.pages, by_time, strict=True):
        top = [low + one[when] for low, when in zip(base, times, strict=True)]
        points: Points = []
        for n, when in enumerate(times):
            until = times[n + 1] if n + 1 < len(times) else x.high
            points += [(x(when), y(top[n])), (x(until), y(top[n]))]
        back: Points = []
        for n in reversed(range(len(times))):
            until = times[n + 1] if n + 1 < len(times) else x.high
            back += [(x(until), y(base[n])), (x(times[n]), y(base[n]))]
        svg.area([*points, *back], f"fill {kind}")
        svg.rect(across, at + 1, 9, 9, f"fill {kind}", round_by=2)
        svg.text(across + 13, at + 9, words, "axis")
        across += 24 + 6.6 * len(words)
        base = top
    return at + tall + 30


def _draw_counter(svg: Svg, words: str, points: Points, x: Scale, at: float) -> float:
    most = max(value for _, value in points)
    y = Scale(0, most or 1, at + 48, at + 16)
    svg.text(0, at + 9, f"{words}, up to {number(most)}", "axis")
    svg.area([(x(points[0][0]), y(0)), *((x(t), y(v)) for t, v in points), (x(points[-1][0]), y(0))], "wash")
    svg.path([(x(t), y(v)) for t, v in points], "series thin c-off")
    return at + 64


def _seconds(value: float) -> str:
    return f"{number(1000 * value)} ms" if value < 1 else f"{number(value)} s"
