"""The headline: what is promised, what was found, and whether it holds; and the table of everything else.

Must not know how a figure is drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal

from kvkeep.benching.compare import better_of
from kvkeep.benching.results import Results
from kvkeep.report import Metric
from kvkeep.reporting.figure import Table
from kvkeep.reporting.inputs import Inputs, Origin, origin, value_of
from kvkeep.reporting.svg import TIMES, number

Verdict = Literal["reached", "missed", "noise", "smoke"]
WORDS: dict[Verdict, str] = {
    "reached": "reached",
    "missed": "missed",
    "noise": "within noise of the limit",
    "smoke": "smoke run, not judged",
}


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure that must be reached.   least: it is a lower bound.   share: it is shown in percent."""

    command: str
    metric: str
    limit: float
    least: bool
    title: str
    share: bool = False

    def text(self, value: float) -> str:
        """A value as people read it."""
        return f"{number(100 * value)} %" if self.share else f"{number(value)} {TIMES}"

    @property
    def bound(self) -> str:
        """The limit in words."""
        return f"{'at least' if self.least else 'at most'} {self.text(self.limit)}"


PROMISES = (
    Promise("bench agent", "ttft_ratio", 4.0, True, "sooner to the first token, both tiers against no cache"),
    Promise("bench agent", "goodput_ratio", 2.0, True, "the goodput at the SLO, both tiers against no cache"),
    Promise("bench overhead", "overhead_share", 0.01, False, "cost where nothing repeats", share=True),
    Promise("bench peers", "w1_ratio_vllm", 12.0, True, "faster than vLLM's manager, W1 a request"),
    Promise("bench peers", "w1_ratio_sglang_rust", 4.0, True, "faster than SGLang's Rust core, W1 a request"),
    Promise("bench peers", "w1_ratio_lmcache", 0.0, True, "faster than LMCache, W1 a request"),
)


@dataclass(frozen=True, slots=True)
class Tile:
    """A promise and what was found.   verdict: None where nothing is promised."""

    promise: Promise
    metric: Metric
    verdict: Verdict | None
    origin: Origin

    def to_html(self) -> str:
        """The tile."""
        p, value = self.promise, float(self.metric.value or 0)
        kind = self.verdict or "free"
        interval = ""
        if self.metric.interval is not None:
            low, high = self.metric.interval
            interval = f"{p.text(low)} to {p.text(high)} at 95 %"
        said = f"{p.bound}: {WORDS[self.verdict]}" if self.verdict else "no limit"
        big, unit = p.text(value).rsplit(" ", 1)
        return (
            f'<li class="tile {kind}"><p class="big">{big}<span>{unit}</span></p><p class="what">{escape(p.title)}</p>'
            f'<p class="verdict"><span class="mark" aria-hidden="true"></span>{escape(said)}</p>'
            f'<p class="fine">{escape(interval)}</p>'
            f'<p class="fine cmd"><code>{escape(self.origin.command)}</code></p></li>'
        )


def tiles(inputs: Inputs) -> tuple[list[Tile], list[str]]:
    """What there is, and a line for each promise of which nothing was measured."""
    found, absent = [], []
    for promise in PROMISES:
        results = _having(inputs, promise)
        if results is None:
            absent.append(f"{promise.metric}: {_why_absent(inputs, promise)}")
            continue
        metric = results.metrics[promise.metric]
        verdict = judge(metric, promise, smoke=results.smoke) if promise.limit else None
        found.append(Tile(promise, metric, verdict, origin(results)))
    return found, absent


def _having(inputs: Inputs, promise: Promise) -> Results | None:
    """The result of the promise's command with a value for it, or any that has one; smoke runs come last."""
    by = sorted(inputs.results, key=lambda one: (one.command != promise.command, one.smoke))
    return next((one for one in by if value_of(one, promise.metric) is not None), None)


def _why_absent(inputs: Inputs, promise: Promise) -> str:
    """The reason that a result gives for a peer that is not there, or that there is no result."""
    peer = promise.metric.removeprefix("w1_ratio_")
    for results in inputs.results:
        for row in results.rows:
            if peer in (row.get("peer"), row.get("variant")) and row.get("reason"):
                return str(row["reason"])
    how = "make bench-peers" if promise.command == "bench peers" else f"kvkeep {promise.command}"
    return f"no result of `{how}` has it"


def judge(metric: Metric, promise: Promise, *, smoke: bool) -> Verdict:
    """A limit that lies inside the interval is neither reached nor missed for sure."""
    if smoke:
        return "smoke"
    low, high = metric.interval if metric.interval is not None else (metric.value or 0.0,) * 2
    if low < promise.limit < high:
        return "noise"
    value = float(metric.value or 0)
    return "reached" if (value >= promise.limit) == promise.least or value == promise.limit else "missed"


# ---------------------------------------------------------------------- everything else


def metric_tables(inputs: Inputs) -> Iterator[tuple[Results, Table]]:
    """All metrics of each result, with the limits that its rows know."""
    for results in inputs.results:
        rows = [_row(results, name, metric) for name, metric in results.metrics.items()]
        if rows:
            yield results, Table(("metric", "value", "unit", "95 %", "p99", "samples", "limit", "verdict"), rows)


def _row(results: Results, name: str, metric: Metric) -> list[str | float | int | None]:
    value = metric.value
    low_high = "" if metric.interval is None else f"{number(metric.interval[0], 4)} to {number(metric.interval[1], 4)}"
    limit, reached = _limit(results, name)
    verdict = "" if reached is None else "smoke, not judged" if results.smoke else "reached" if reached else "missed"
    better = better_of(metric)
    unit = metric.unit + ("" if better is None else " ↓" if better == "lower" else " ↑")
    p99 = "" if metric.p99 is None else number(metric.p99, 4)
    return [name, value, unit, low_high, p99, "" if metric.samples is None else metric.samples, limit, verdict]


def _limit(results: Results, name: str) -> tuple[str, bool | None]:
    for row in results.rows:
        if row.get("metric") == name and isinstance(row.get("reached"), bool):
            return str(row.get("limit", row.get("bound", ""))), bool(row["reached"])
    for promise in PROMISES:
        if promise.command == results.command and promise.metric == name and promise.limit:
            value = value_of(results, name)
            return promise.bound, None if value is None else judge(
                results.metrics[name], promise, smoke=False
            ) != "missed"
    return "", None
