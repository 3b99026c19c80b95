"""What LRU and the rhythm order hit before and after the pattern of requests changes; see docs/eviction.md.

Must not judge: it prints what a thousand requests hit, and when what was learned before no longer hurts.

    python -m tools.pattern_change TRACES

mini_swe_500, page 128, a pool of 128k tokens: the first half of the sessions, 16 in rotation, and then something else.
`fresh` begins there, with an empty pool and nothing learned.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.config import EvictionName
from kvkeep.index.orders import make_order
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.seat import TraceClock
from kvkeep.replay.trace import Request, Trace

PAGE, POOL = 128, 128 * 1024
SHOWN, STEP = 1000, 50

Hits = npt.NDArray[np.int64]


def one_after_the_other(parts: Iterable[Sequence[Request]]) -> list[Request]:
    """Each part begins a second after the end of the one before it."""
    out: list[Request] = []
    for part in parts:
        shift_s = (out[-1].time_s + 1.0 if out else 0.0) - part[0].time_s
        out += [request._replace(time_s=request.time_s + shift_s) for request in part]
    return out


def while_seats_are_taken(rotation: Sequence[Request]) -> Sequence[Request]:
    """A rotation up to its last newcomer: from there on fewer and fewer sessions are in it."""
    begins = {request.session: number for number, request in reversed(list(enumerate(rotation)))}
    return rotation[: max(begins.values())]


def changes(trace: Trace) -> dict[str, tuple[Sequence[Request], Sequence[Request]]]:
    """By name, the requests before and after the change."""
    sessions = [session for session in trace.sessions if session]
    half = len(sessions) // 2
    before = while_seats_are_taken(Order("rotate", 16).arrivals(trace, half).requests)
    second = Trace(trace.name, trace.digest, trace.block, trace.chains, sessions[half:], trace.clock)
    middle = len(before) // 2
    once = [session[-1]._replace(time_s=float(number)) for number, session in enumerate(second.sessions)]
    return {
        "as recorded": (before, Order("recorded").arrivals(second).requests),
        "32 in rotation": (before, Order("rotate", 32).arrivals(second).requests),
        "8 in rotation": (before, Order("rotate", 8).arrivals(second).requests),
        f"{half} prompts that never return, then the rotation goes on": (
            before[:middle],
            one_after_the_other((once, before[middle:])),
        ),
    }


def hits(name: EvictionName, pages: Pages, requests: Sequence[Request], capacity_pages: int, seed: int = 0) -> Hits:
    """Matched pages of each request."""
    clock = TraceClock()
    pool = Reference(pages, capacity_pages, make_order(name, capacity_pages, clock, seed), clock)
    out = np.zeros(len(requests), dtype=np.int64)
    for number, request in enumerate(requests):
        clock.now_s = request.time_s
        already = pool.counts.matched_pages_gpu
        pool.serve(request)
        out[number] = pool.counts.matched_pages_gpu - already
    return out


def caught_up(kept: Hits, fresh: Hits) -> int | None:
    """After how many requests the next thousand hit as much as if learning had begun at the change; None: never."""
    for first in range(0, len(fresh) - SHOWN + 1, STEP):
        if kept[first : first + SHOWN].sum() >= fresh[first : first + SHOWN].sum():
            return first
    return None


def show(title: str, pages: Pages, before: Sequence[Request], after: Sequence[Request]) -> None:
    """Shares of prompt tokens in stretches of a thousand requests, the last two before the change first."""
    both = one_after_the_other((before, after))
    fresh_requests = both[len(before) :]
    lru, kept = (hits(name, pages, both, POOL // PAGE) for name in ("lru", "rhythm"))
    fresh = hits("rhythm", pages, fresh_requests, POOL // PAGE)
    tokens = np.array([request.prompt_len for request in both])
    print(f"\n{title}\n\n| requests | LRU | rhythm | fresh |\n|---|---|---|---|")
    for start in range(len(before) - 2 * SHOWN, min(len(both), len(before) + 6 * SHOWN), SHOWN):
        part = slice(start, start + SHOWN)
        since = start - len(before)
        shares = [f"{counts[part].sum() * PAGE / tokens[part].sum():.1%}" for counts in (lru, kept)]
        late = fresh[since : since + SHOWN].sum() * PAGE / tokens[part].sum() if since >= 0 else None
        print(f"| {since} | {' | '.join(shares)} | {'' if late is None else f'{late:.1%}'} |")
    print(f"\nAs good as fresh after {caught_up(kept[len(before) :], fresh)} requests.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.pattern_change")
    parser.add_argument("traces", type=Path)
    pages = Pages(read_trace(parser.parse_args().traces / "mini_swe_500"), PAGE)
    for title, (before, after) in changes(pages.trace).items():
        show(title, pages, before, after)


if __name__ == "__main__":
    main()
