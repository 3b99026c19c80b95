"""kvkeep bench routing: simulated replicas behind each policy, and what the proxy costs.

Must not know how a case is simulated or measured.

    kvkeep bench routing [--traces DIR] [--only simulation|proxy] [--smoke] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench._measure import SPIN_QUIET_US, case_parser, traces_folder
from bench._proxied import OFFERED_PER_S, Proxied, measure_proxy
from bench._routing_cases import KVKEEP, Found, find, fleets
from bench._stub_replica import PIECE_EVERY_S
from kvkeep.benching import median, p99, spin_us, summary
from kvkeep.benching.record import work_checksum
from kvkeep.benching.samples import Interval
from kvkeep.report import JsonValue, Metric, Report

#: Why `bench all` leaves it out.
LONG = "8 minutes of simulated fleets: kvkeep bench routing"

ADDED_MS_MAX = 1.0
#: A stream is not buffered when a piece is read before the next one is sent, with time to spare.
PIECE_MS_MAX = PIECE_EVERY_S * 1e3 / 2
#: Of the offered requests, those that are answered in the same time.
KEPT_MIN = 0.98

PAIRS, SECONDS = 1_000, 10.0
SMOKE_PAIRS, SMOKE_SECONDS = 60, 1.0


def run(arguments: list[str]) -> Report:
    """Measure everything, print the tables, return the report."""
    options = _parse(arguments)
    rows: list[dict[str, JsonValue]] = []
    metrics: dict[str, Metric] = {}
    if options.only != "proxy":
        found = _simulate(options)
        rows += [row for one in found for row in one.rows()]
        metrics |= _judge(found)
    if options.only != "simulation":
        before = spin_us()
        proxied = measure_proxy(*((SMOKE_PAIRS, SMOKE_SECONDS) if options.smoke else (PAIRS, SECONDS)))
        scale = max(1.0, float(before.value or 0) / SPIN_QUIET_US)
        proxy_rows = list(_proxy_rows(proxied, scale))
        for row in proxy_rows:
            print(_proxy_line(row))
        rows += proxy_rows
        metrics |= _proxy_metrics(proxied) | {"spin_us": before}
    missed = [_name(row) for row in rows if row.get("reached") is False]
    for name, metric in metrics.items():
        print(f"{name} {metric.value}")
    print(f"limits missed: {', '.join(missed) or 'none'}")
    work = work_checksum(
        [[row[key] for key in ("traffic", "policy", "hit_share", "moves")] for row in rows if "policy" in row]
    )
    return Report("bench routing", not missed, metrics, rows, work)


def _name(row: dict[str, JsonValue]) -> str:
    if row["metric"] != "routing":
        return str(row["metric"])
    return f"{row['traffic']} on {row['replicas']} of {row['tokens_each']:,} tokens"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("routing")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the recorded traces (../shared/traces)")
    parser.add_argument("--only", choices=("simulation", "proxy"), help="one of the two parts")
    options = parser.parse_args(arguments)
    options.traces = traces_folder(parser, options.traces)
    return options


def _simulate(options: argparse.Namespace) -> list[Found]:
    if options.traces is None:
        print("no recorded traces beside this checkout: only made ones are routed (--traces DIR)")
    found = []
    for fleet in fleets(options.traces, options.smoke):
        found.append(find(fleet))
        for line in _lines(found[-1]):
            print(line, flush=True)
    return found


def _lines(one: Found) -> Iterator[str]:
    fleet = one.fleet
    yield (
        f"{one.traffic}: {one.requests:,} requests, {one.per_s:.3g} sessions a second, {fleet.replicas} replicas of "
        f"{fleet.tokens_each:,} tokens, longest session {one.longest_tokens:,}"
    )
    for name, out in one.outcomes.items():
        verdict = "" if name != KVKEEP else "reached" if one.reached else "NOT REACHED"
        p50, tail = out.ttft_quantile_s(0.5), out.ttft_quantile_s(0.99)
        yield (
            f"    {name:<14}hits {out.hit_share:6.1%}  copies {out.copies:6.1%}  busy {out.busy:4.0%}  "
            f"TTFT {p50:8.3f} s p50 {tail:9.3f} s p99  {verdict}".rstrip()
        )


def _judge(found: Sequence[Found]) -> dict[str, Metric]:
    hot = [one for one in found if one.fleet.hot]

    def worst(what: Callable[[Found], float], of: Sequence[Found], digits: int) -> float | None:
        return max((round(what(one), digits) for one in of), default=None)

    gap, copies = worst(lambda one: one.gap_points, found, 2), worst(_copies, found, 4)
    middle, tail = worst(lambda one: one.ttft_ratio(0.5), hot, 3), worst(lambda one: one.ttft_ratio(0.99), hot, 3)
    return {
        "routing_hit_gap_points": _simulated(gap, "points", len(found)),
        "routing_copies_share": _simulated(copies, "of pages held", len(found)),
        "hot_ttft_p50_ratio": _simulated(middle, "of random", len(hot)),
        "hot_ttft_p99_ratio": _simulated(tail, "of random", len(hot)),
    }


def _copies(one: Found) -> float:
    return one.outcomes[KVKEEP].copies


def _simulated(value: float | None, unit: str, samples: int) -> Metric:
    """Less is better, and the same simulation gives the same."""
    interval: Interval | None = None if value is None else (value, value)
    return Metric(value, unit, samples=samples, interval=interval, better="lower")


def _proxy_metrics(proxied: Proxied) -> dict[str, Metric]:
    return {
        "proxy_added_ms": Metric(round(proxied.added, 3), "ms", samples=len(proxied.proxied)),
        "proxy_offered_per_s": Metric(round(proxied.offered_per_s, 1), "requests/s", samples=len(proxied.offered)),
        "proxy_most_per_s": Metric(round(proxied.most_per_s), "requests/s"),
        "proxy_cpu_ms": Metric(round(proxied.cpu, 3), "ms"),
        "proxy_stream_piece_ms": summary([round(delay, 3) for delay in proxied.pieces], "ms"),
        "proxy_failures": Metric(proxied.failures, "requests"),
    }


def _proxy_rows(proxied: Proxied, scale: float) -> Iterator[dict[str, JsonValue]]:
    """scale: how much slower than a quiet machine this one is now."""
    for name, what, samples in (
        ("direct_ms", "a request of 9 KB to a stub replica", proxied.direct),
        ("proxied_ms", "the same through the proxy, in turn", proxied.proxied),
        ("large_direct_ms", "a request of 400 KB to a stub replica", proxied.large_direct),
        ("large_proxied_ms", "the same through the proxy, in turn", proxied.large_proxied),
        (
            "offered_ms",
            f"through the proxy at {OFFERED_PER_S} requests a second, from when each was due",
            proxied.offered,
        ),
    ):
        row: dict[str, JsonValue] = {"metric": name, "what": what, "unit": "ms", "samples": len(samples)}
        yield row | {"median": round(median(samples), 3), "p99": round(p99(samples), 3)}
    for name, what, value, limit, bound, reached in (
        ("proxy_added_ms", "difference of the medians", proxied.added, ADDED_MS_MAX, ADDED_MS_MAX * scale, "at most"),
        (
            *("proxy_offered_per_s", f"answers a second when {OFFERED_PER_S} are offered", proxied.offered_per_s),
            *(OFFERED_PER_S, OFFERED_PER_S * KEPT_MIN, "at least"),
        ),
        (
            "proxy_stream_piece_ms",
            "a piece of a stream on its way",
            median(proxied.pieces),
            PIECE_MS_MAX,
            PIECE_MS_MAX,
            "at most",
        ),
        ("proxy_failures", "requests that got no whole answer", proxied.failures, 0, 0, "at most"),
    ):
        met = value <= bound if reached == "at most" else value >= bound
        yield {"metric": name, "what": what, "median": round(value, 3), "limit": limit, "bound": bound, "reached": met}


def _proxy_line(row: dict[str, JsonValue]) -> str:
    said = {key: row[key] for key in ("median", "p99", "limit", "reached") if key in row}
    return f"{row['metric']:<24}" + "  ".join(f"{key} {value}" for key, value in said.items()) + f"  ({row['what']})"
