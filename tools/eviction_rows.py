"""How much of the distance from LRU to the best possible an eviction order collects, row by row; see docs/eviction.md.

Must not judge: tests/traces/test_rhythm.py holds what must be reached.

    python -m tools.eviction_rows TRACES [--rows PART] [--seeds N] [--set forecast.LEAN=2 ...]

TRACES: the folder of the recorded traces.   --rows: only rows whose trace and order contain PART.
--set: another value for a constant of kvkeep/index/forecast.py, uses.py or rhythm.py, to see what it is worth.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from kvkeep.config import EvictionName
from kvkeep.index import forecast, rhythm, uses
from kvkeep.index.orders import make_order
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.replaying import best_possible, known_future
from kvkeep.replay.result import Settings
from kvkeep.replay.seat import TraceClock
from kvkeep.replay.trace import Arrivals

MODULES = {"forecast": forecast, "uses": uses, "rhythm": rhythm}
K = 1024


class Row(NamedTuple):
    """A trace, the order of its requests, how many of its sessions, the page size, and pools in thousands of tokens."""

    trace: str
    order: str
    sessions: int | None
    page_size: int
    pools_k: tuple[int, ...]


ROWS = (
    Row("tau_retail_200", "rotate:16", None, 128, (16, 32)),
    Row("tau_retail_200", "rotate:32", None, 128, (32, 64)),
    Row("tau_retail_200", "rotate:100", None, 128, (64, 128)),
    Row("mini_swe_500", "rotate:8", None, 128, (64, 128)),
    Row("mini_swe_500", "rotate:16", None, 128, (64, 128, 256)),
    Row("mini_swe_500", "recorded", None, 128, (64, 128, 256, 512)),
    Row("claude_code_355.jsonl.gz", "open:8", 40, 128, (128, 256, 1024)),
    Row("claude_code_355.jsonl.gz", "open:24", 60, 128, (128, 512, 1024, 4096)),
    Row("claude_code_355.jsonl.gz", "open:100", 355, 128, (1024, 4096)),
    Row("magentic_one_25", "open:12", None, 128, (64, 128, 256)),
    Row("mooncake_conversation.jsonl.gz", "recorded", None, 512, (1024, 4096)),
)


def matched(name: EvictionName, pages: Pages, arrivals: Arrivals, pool: int, seed: int = 0) -> int:
    """Matched pages in a pool of `pool` tokens."""
    clock, capacity = TraceClock(), pool // pages.page_size
    order = make_order(name, capacity, clock, seed)
    return Reference(pages, capacity, order, clock).replay(arrivals.requests).matched_pages_gpu


def show(row: Row, folder: Path, seeds: int) -> None:
    """A line a pool: shares of prompt tokens, and the share of the distance."""
    pages = Pages(read_trace(folder / row.trace), row.page_size)
    arrivals = Order.parse(row.order).arrivals(pages.trace, row.sessions)
    part = row.page_size / sum(request.prompt_len for request in arrivals.requests)
    pools = [size * K for size in row.pools_k]
    future = known_future(pages, arrivals, Settings(gpu_tokens=max(pools), accounting="reference"))
    best = best_possible(future, row.page_size, pools)
    for pool in pools:
        low = matched("lru", pages, arrivals, pool)
        got = sum(matched("rhythm", pages, arrivals, pool, seed) for seed in range(seeds)) / seeds
        closed = f"{(got - low) / (best[pool] - low):6.1%}" if best[pool] > low else "     -"
        shares = " ".join(f"{pages_ * part:6.2%}" for pages_ in (low, got, best[pool]))
        print(f"{row.trace.split('.')[0]:22} {row.order:10} {pool // K:5}k {shares} {closed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.eviction_rows")
    parser.add_argument("traces", type=Path)
    parser.add_argument("--rows", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE")
    options = parser.parse_args()
    for change in options.set:
        where, _, value = change.partition("=")
        module, _, name = where.partition(".")
        old = getattr(MODULES[module], name)
        setattr(MODULES[module], name, type(old)(float(value)))
    print(f"{'trace':22} {'order':10} {'pool':>6} {'LRU':>6} {'rhythm':>6} {'best':>6} closed")
    for row in ROWS:
        if options.rows in f"{row.trace} {row.order}":
            show(row, options.traces, options.seeds)


if __name__ == "__main__":
    main()
