"""What the running estimate of other sizes costs a request, and how far it is from the exact curve.

Must not judge.

    python -m tools.ghost_cost TRACES

TRACES: the folder of the recorded traces.  Errors are in points of prompt tokens, the largest over all sizes that the
estimate tells; the exact curve is of the same pages, LRU's, one pass over the trace.  Processor times.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkeep.ghosts import Ghosts, sizes
from kvkeep.replay.engine import Engine
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.result import Settings
from kvkeep.sizing.sizing import exact_lru

CALLS = ("admit", "extend", "seal", "finish")
ROWS = (
    ("tau_retail_200", "rotate:32", None, (32, 64)),
    ("mini_swe_500", "rotate:8", None, (64, 128, 256)),
    ("mini_swe_500", "rotate:16", None, (128, 256, 4096)),
    ("claude_code_355.jsonl.gz", "open:8", 40, (1024, 4096)),
)


def timed(spent: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, its time added up under its name."""

    def measured(*args: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args, **more)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ghost_cost")
    parser.add_argument("traces", type=Path)
    traces = parser.parse_args().traces
    print(f"{'trace':18} {'order':10} {'pool':>6} one in   us  of a request's calls  error, points")
    for name, order, sessions, pools_k in ROWS:
        pages = Pages(read_trace(traces / name), 128)
        arrivals = Order.parse(order).arrivals(pages.trace, sessions)
        exact = exact_lru(pages, arrivals)
        for pool_k in pools_k:
            engine = Engine(pages, Settings(pool_k * 1024, eviction="lru"))
            cache, capacity = engine.cache, pool_k * 1024 // 128
            ghosts = cache._ghosts = Ghosts(pages.width, capacity)
            spent: dict[str, float] = {}
            for call in CALLS:
                setattr(cache, call, timed(spent, call, getattr(cache, call)))
            ghosts.used = timed(spent, "ghosts", ghosts.used)  # type: ignore[method-assign]
            engine.replay(arrivals)
            told, prompts = ghosts.stats(), sum(request.prompt_len for request in arrivals.requests)
            off = max(
                abs(told.found_tokens[what] // pages.width * 128 / prompts - exact.hit_share(size * 128))
                for what, size in sizes(capacity, 0).items()
            )
            us = 1e6 * spent["ghosts"] / engine.counts.requests
            share = spent["ghosts"] / (sum(spent[call] for call in CALLS) - spent["ghosts"])
            where = f"{name.split('.')[0]:18} {order:10} {pool_k:5}k"
            print(f"{where} {ghosts._every:6} {us:5.1f} {share:20.1%} {100 * off:14.2f}", flush=True)


if __name__ == "__main__":
    main()
