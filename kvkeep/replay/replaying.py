"""`replay` and `best_possible`: one trace, one order of requests, one size of pools.

Must not read files or print.  What a trace and its page size determine is in `Pages`, so that thousands of replays
share it.
"""

import time
from collections.abc import Iterable

from kvkeep.errors import BadInput
from kvkeep.replay.best import NextUses, best_matches, next_uses
from kvkeep.replay.engine import Engine
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.result import Counts, Progress, ReplayResult, Settings
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Arrivals


def replay(pages: Pages, arrivals: Arrivals, settings: Settings, progress: Progress | None = None) -> ReplayResult:
    """Serves `arrivals` and counts what matched.

    progress: called now and then with the number of requests done, of all passes together (see `passes`).
    Raises `BadInput` for a tier that holds no page, or an eviction order that there is not.
    """
    for name, tokens in (("--gpu-tokens", settings.gpu_tokens), ("--cpu-tokens", settings.cpu_tokens)):
        if tokens and tokens < pages.page_size:
            raise BadInput(f"{name} {tokens}: it must be a page of {pages.page_size} tokens or more")
    begun = time.perf_counter()
    if settings.accounting == "reference":
        counts = _reference(pages, arrivals, settings, progress)
        simulated_s = arrivals.requests[-1].time_s if arrivals.requests else 0.0
    else:
        engine = Engine(pages, settings)
        counts = engine.replay(arrivals, progress)
        engine.cache.check_invariants()
        simulated_s = engine.clock.now_s
    return ReplayResult(settings, pages.page_size, counts, time.perf_counter() - begun, simulated_s)


def passes(settings: Settings) -> int:
    """How often `replay` goes through the requests."""
    return 2 if settings.accounting == "reference" and settings.cpu_tokens else 1


def _reference(pages: Pages, arrivals: Arrivals, settings: Settings, progress: Progress | None) -> Counts:
    """Two tiers by the stack property: what a pool of the GPU's size hits, and what one of both sizes hits more.

    With LRU that is what exclusive tiers hit; for an order without the property it is a definition.
    """
    gpu_pages = settings.gpu_tokens // pages.page_size
    counts = _one_pool(pages, arrivals, settings, gpu_pages, progress)
    if settings.cpu_tokens:
        done = len(arrivals.requests)
        later: Progress | None = None if progress is None else lambda more: progress(done + more)
        both_pages = gpu_pages + settings.cpu_tokens // pages.page_size
        both = _one_pool(pages, arrivals, settings, both_pages, later)
        counts.matched_pages_cpu = both.matched_pages_gpu - counts.matched_pages_gpu
    return counts


def _one_pool(
    pages: Pages, arrivals: Arrivals, settings: Settings, capacity_pages: int, progress: Progress | None
) -> Counts:
    clock = TraceClock()
    order = make_order(settings.eviction, capacity_pages, clock)
    return Reference(pages, capacity_pages, order, clock).replay(arrivals.requests, progress)


def known_future(pages: Pages, arrivals: Arrivals, settings: Settings) -> NextUses:
    """What `best_possible` needs of the requests: the same for all sizes of pools."""
    unwritten = int(settings.accounting == "engine")
    return next_uses((pages.pages_of(request, unwritten) for request in arrivals.requests), pages.distinct)


def best_possible(future: NextUses, page_size: int, capacities_tokens: Iterable[int]) -> dict[int, int]:
    """Matched pages by capacity in tokens when the page that is used last is evicted first."""
    return {tokens: best_matches(future, tokens // page_size) for tokens in capacities_tokens}
