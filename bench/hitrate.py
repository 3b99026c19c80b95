"""kvkeep bench hitrate: what orders of eviction and tiers hit over recorded traces, beside the best possible.

Must not know how a replay counts.

    kvkeep bench hitrate [--smoke] [--traces DIR] [--json FILE]

No model runs, and the same trace gives the same hits on every machine.  A trace that is not there is left out, with a
reason; README.md beside this file says what each figure means.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench._measure import beside_checkout, case_parser, traces_folder
from kvkeep.benching.record import work_checksum
from kvkeep.benching.samples import exact
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import best_possible, known_future, replay
from kvkeep.replay.result import Settings
from kvkeep.replay.trace import Arrivals
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.sizing.sizing import exact_lru

Row = dict[str, JsonValue]

K, M = 1024, 1024 * 1024
LRU, RHYTHM, BEST = "lru", "rhythm", "best"
NO_TRACES = "there are no recorded traces beside this checkout (--traces DIR names their folder)"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One trace in one order.

    file: of the reference material.   sizes: of one pool, in tokens, that only counts cached pages.
    tiers: GPU and CPU tier, in tokens, driven as an engine does; None: not.   sessions: the first ones only; None: all.
    """

    name: str
    file: str
    order: str
    sizes: tuple[int, ...]
    tiers: tuple[int, int] | None = None
    page_size: int = 128
    sessions: int | None = None


FULL = (
    Replayed("mini_swe", "mini_swe_500", "rotate:8", (64 * K, 128 * K, 256 * K), (64 * K, 192 * K)),
    Replayed("mini_swe", "mini_swe_500", "recorded", (128 * K, 256 * K, 512 * K), (256 * K, 768 * K)),
    Replayed("tau_retail", "tau_retail_200", "rotate:32", (32 * K, 64 * K, 128 * K), (32 * K, 96 * K)),
    Replayed("claude_code", "claude_code_355.jsonl.gz", "rotate:4", (256 * K, 512 * K, M), (256 * K, M)),
    Replayed("mooncake", "mooncake_conversation.jsonl.gz", "recorded", (M, 4 * M, 16 * M), None, page_size=512),
)
SMOKE = (Replayed("tau_retail", "tau_retail_200", "rotate:8", (16 * K, 32 * K), (16 * K, 32 * K), sessions=24),)


def missing() -> str | None:
    """What this checkout lacks."""
    return None if beside_checkout() is not None else NO_TRACES


def run(arguments: list[str]) -> Report:
    """Replay everything, print the table, return the report."""
    options = _parse(arguments)
    rows: list[Row] = []
    for one in SMOKE if options.smoke else FULL:
        reason = NO_TRACES if options.traces is None else _absent(options.traces, one)
        absent: list[Row] = [{"trace": one.name, "order": one.order, "left_out": reason}]
        for row in replayed(one, options.traces) if reason is None else absent:
            rows.append(row)
            print(_line(row), flush=True)
    metrics = {str(row["metric"]): _metric(row) for row in rows if "metric" in row}
    gains = list(_gains(rows))
    if gains:
        metrics["rhythm_over_lru_points_min"] = exact(round(100 * min(gains), 2), "points", "higher", len(gains))
        metrics["rhythm_over_lru_points_max"] = exact(round(100 * max(gains), 2), "points", "higher", len(gains))
    work = work_checksum([[row["metric"], row["matched_pages"]] for row in rows if "metric" in row])
    return Report("bench hitrate", True, metrics, rows, work)


def replayed(one: Replayed, traces: Path) -> Iterator[Row]:
    """Rows of one trace: each order at each size, the bound, and two tiers."""
    began = time.monotonic()
    trace = read_trace(traces / one.file)
    arrivals, pages = Order.parse(one.order).arrivals(trace, one.sessions), Pages(trace, one.page_size)
    curve = exact_lru(pages, arrivals)
    best = best_possible(known_future(pages, arrivals, Settings(1, accounting="reference")), one.page_size, one.sizes)
    wanted = [Settings(size, accounting="reference", eviction=RHYTHM) for size in one.sizes]
    if one.tiers is not None:
        wanted += [Settings(*one.tiers, eviction=eviction) for eviction in (LRU, RHYTHM)]
    results = _in_parallel(pages, arrivals, wanted)
    for size, result in zip(one.sizes, results, strict=False):
        hits = {LRU: curve.matched_pages(size), RHYTHM: result[0], BEST: best[size]}
        for name, matched in hits.items():
            yield _row(one, curve.prompt_tokens, f"{_size(size)}_{name}", matched) | {
                "series": "pool",
                "eviction": name,
                "tokens": size,
            }
    if one.tiers is not None:
        for eviction, (gpu, cpu, stalls, unserved) in zip((LRU, RHYTHM), results[len(one.sizes) :], strict=True):
            name = f"{_size(one.tiers[0])}_{_size(one.tiers[1])}_{eviction}"
            yield _row(one, curve.prompt_tokens, name, gpu + cpu) | {
                "series": "tiers",
                "eviction": eviction,
                "gpu_tokens": one.tiers[0],
                "cpu_tokens": one.tiers[1],
                "hit_share_gpu": round(gpu * one.page_size / curve.prompt_tokens, 4),
                "hit_share_cpu": round(cpu * one.page_size / curve.prompt_tokens, 4),
                "stalls": stalls,
                "unserved": unserved,
            }
    print(f"{one.name}, {one.order}: {len(arrivals.requests):,} requests, {time.monotonic() - began:.1f} s", flush=True)


def _row(one: Replayed, prompt_tokens: int, name: str, matched: int) -> Row:
    return {
        "metric": f"{one.name}_{one.order.replace(':', '')}_{name}",
        "trace": one.name,
        "order": one.order,
        "page_size": one.page_size,
        "hit_share": round(matched * one.page_size / prompt_tokens, 4),
        "matched_pages": matched,
    }


_at_hand: dict[str, Any] = {}  # what forked processes inherit: a trace is not sent to each


def _in_parallel(pages: Pages, arrivals: Arrivals, wanted: list[Settings]) -> list[tuple[int, int, int, int]]:
    """Pages matched in either tier, stalls and requests that do not fit, of each replay; the last ones first: they take
    longest."""
    _at_hand.update(pages=pages, arrivals=arrivals, wanted=wanted)
    numbers = list(range(len(wanted)))[::-1]
    try:
        with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
            found = dict(zip(numbers, pool.map(_one, numbers), strict=True))
    finally:
        _at_hand.clear()
    return [found[number] for number in range(len(wanted))]


def _one(number: int) -> tuple[int, int, int, int]:
    counts = replay(_at_hand["pages"], _at_hand["arrivals"], _at_hand["wanted"][number]).counts
    return counts.matched_pages_gpu, counts.matched_pages_cpu, counts.stalls, counts.unserved


def _metric(row: Row) -> Metric:
    return exact(float(str(row["hit_share"])), "of prompt tokens", "higher")


def _gains(rows: list[Row]) -> Iterator[float]:
    """What rhythm hits more than LRU, trace by trace and size by size."""
    shares = {str(row["metric"]): float(str(row["hit_share"])) for row in rows if "metric" in row}
    for name, share in shares.items():
        if name.endswith(f"_{RHYTHM}"):
            yield share - shares[name.removesuffix(RHYTHM) + LRU]


def _absent(traces: Path, one: Replayed) -> str | None:
    there = any(traces.glob(f"{one.file}*"))
    return None if there else f"{one.file} is not in {traces.name}"


def _size(tokens: int) -> str:
    return f"{tokens // M}m" if tokens % M == 0 else f"{tokens // K}k"


def _line(row: Row) -> str:
    if "left_out" in row:
        return f"{row['trace']}, {row['order']}: left out: {row['left_out']}"
    tiers = ""
    if row["series"] == "tiers":
        tiers = f"  GPU {row['hit_share_gpu']:.1%}, CPU {row['hit_share_cpu']:.1%}, {row['stalls']} stalls"
        tiers += f", {row['unserved']} too long"
    return f"{row['metric']!s:<44}{row['hit_share']:>7.1%}{tiers}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("hitrate")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the recorded traces (../shared/traces)")
    options = parser.parse_args(arguments)
    options.traces = traces_folder(parser, options.traces)
    return options
