"""What tiers of one size and another hit, and which size to buy.

Must not read files or print.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import best_possible, known_future, replay
from kvkeep.replay.result import Settings
from kvkeep.replay.trace import Arrivals, prompt_tokens
from kvkeep.sizing.curve import HitCurve, knee
from kvkeep.sizing.lru import lru_curve

LRU, BEST = "lru", "best"


@dataclass(frozen=True, slots=True)
class Sizing:
    """Hit shares by size of both tiers together, in tokens, for some orders of eviction.

    sizes: growing.   shares: by order, of the prompt tokens, one for each size; `BEST` is the bound, not an order.
    gpu_tokens, cpu_tokens: what the user has.   full_tokens: the smallest size where LRU hits all there is to hit.
    """

    sizes: list[int]
    shares: dict[str, list[float]]
    page_size: int
    gpu_tokens: int
    cpu_tokens: int
    full_tokens: int

    @property
    def order(self) -> str:
        """The order that the advice is for."""
        return [name for name in self.shares if name != BEST][-1]

    @property
    def octaves(self) -> list[int]:
        """The powers of two among the sizes."""
        return [size for size in self.sizes if size & (size - 1) == 0]

    @property
    def knee_tokens(self) -> int:
        """Where more begins to buy little."""
        return knee(self.octaves, [self.share(size) for size in self.octaves])

    def share(self, tokens: int, order: str | None = None) -> float:
        """Of an order (the advice's for None) at one of `sizes`."""
        return self.shares[order or self.order][self.sizes.index(tokens)]


class Mark(NamedTuple):
    """A size that matters to the user, and why."""

    tokens: int
    what: str


def marks(sizing: Sizing) -> list[Mark]:
    """What the user has, what either tier doubled would be, and the knee."""
    gpu, both = sizing.gpu_tokens, sizing.gpu_tokens + sizing.cpu_tokens
    out = [Mark(gpu, "your GPU tier"), Mark(sizing.knee_tokens, "the knee"), Mark(both + gpu, "GPU tier doubled")]
    if sizing.cpu_tokens:
        out += [Mark(both, "your tiers"), Mark(both + sizing.cpu_tokens, "host tier doubled")]
    return out


def sizes_of_interest(page_size: int, full_tokens: int, gpu_tokens: int, cpu_tokens: int) -> list[int]:
    """Powers of two up to the first that holds all there is to hit; the user's, and either tier doubled."""
    smallest = max(page_size, 16_384)
    sizes = {gpu_tokens, gpu_tokens + cpu_tokens, 2 * gpu_tokens + cpu_tokens, gpu_tokens + 2 * cpu_tokens, smallest}
    size = smallest
    while size < full_tokens:
        size *= 2
        sizes.add(size)
    return sorted(sizes)


def size_tiers(
    pages: Pages,
    arrivals: Arrivals,
    orders: Sequence[str],
    *,
    gpu_tokens: int,
    cpu_tokens: int = 0,
    best: bool = True,
    processes: int | None = None,
) -> Sizing:
    """Hit shares of `arrivals` over many sizes: LRU in one pass, other orders by a replay for each size.

    A pool counts cached full pages only: pages of requests that run come on top.
    """
    curve = exact_lru(pages, arrivals)
    sizes = sizes_of_interest(pages.page_size, curve.full_tokens, gpu_tokens, cpu_tokens)
    shares: dict[str, list[float]] = {}
    for name in orders:
        if name == LRU:
            shares[name] = [curve.hit_share(size) for size in sizes]
        else:
            shares[name] = _replayed(pages, arrivals, name, sizes, processes)
    if best:
        future = known_future(pages, arrivals, Settings(1, accounting="reference"))
        found = best_possible(future, pages.page_size, sizes)
        shares[BEST] = [found[size] * pages.page_size / max(1, curve.prompt_tokens) for size in sizes]
    return Sizing(sizes, shares, pages.page_size, gpu_tokens, cpu_tokens, curve.full_tokens)


def exact_lru(pages: Pages, arrivals: Arrivals) -> HitCurve:
    """LRU's curve over a trace."""
    return lru_curve(
        (pages.pages_of(request) for request in arrivals.requests),
        pages.distinct,
        page_size=pages.page_size,
        prompt_tokens=prompt_tokens(arrivals.requests),
    )


_at_hand: dict[str, Any] = {}  # what forked processes inherit: a trace is not sent to each


def _replayed(
    pages: Pages, arrivals: Arrivals, eviction: str, sizes: Sequence[int], processes: int | None
) -> list[float]:
    """The largest first: it takes longest."""
    _at_hand.update(pages=pages, arrivals=arrivals, eviction=eviction)
    run: Callable[[int], float] = _replay_one
    by_size = sorted(sizes, reverse=True)
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            found = dict(zip(by_size, pool.map(run, by_size), strict=True))
    finally:
        _at_hand.clear()
    return [found[size] for size in sizes]


def _replay_one(gpu_tokens: int) -> float:
    settings = Settings(gpu_tokens, accounting="reference", eviction=_at_hand["eviction"])
    return replay(_at_hand["pages"], _at_hand["arrivals"], settings).hit_share
