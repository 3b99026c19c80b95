"""The order in which cached pages leave a tier.

Must not know tokens, names or who owns a page: it ranks runs, the run tree trims them.

An order sees every use of a run (through the stamps that the run carries) and says which run's tail is coldest.
In each tier only some runs can lose pages, and only their tail: that is what a `Tier` knows.
"""

import heapq
from enum import IntEnum
from typing import Protocol

from kvkeep.index.run import Run
from kvkeep.index.uses import Uses


class Tier(IntEnum):
    """The value is the tier's bit in `Run.queued`."""

    GPU = 1
    HOST = 2


NO_TAIL = -1


def gpu_stamp(run: Run) -> int:
    """When the GPU copy that leaves first was last used, or NO_TAIL: the run has none, or its children have some."""
    pages = run.pages
    if run.gpu_children or not pages:
        return NO_TAIL
    return run.stamps[0] if len(pages) == len(run.names) else run.stretch(run.gpu_end - 1)[0]


def host_stamp(run: Run) -> int:
    """When the host copy that leaves first was last used, or NO_TAIL: it is not a last copy at the end of a chain."""
    if run.children or run.host is None or len(run.pages) == len(run.names):
        return NO_TAIL
    return run.stamps[0]


class EvictionOrder(Protocol):
    """Ranks the runs whose tails may leave.  A run is offered when that may have come true.

    uses: what is told of every use of a path when its request ends; None for an order that goes by stamps alone.
    """

    uses: Uses | None

    def offer(self, run: Run) -> None:
        """`run` may be trimmed from now on; it may be offered again at any time."""

    def coldest(self) -> Run | None:
        """The run whose tail page should leave first, or None when nothing is on offer."""

    def shelve(self, run: Run) -> None:
        """The tail of the run that `coldest` has just given is owned; it will be offered again when that ends."""

    def clear(self) -> None:
        """Forgets every run."""

    def rank(self, stamp: int) -> float:
        """How soon pages last used at `stamp` should leave: the greater, the sooner."""

    def for_tier(self, tier: Tier) -> "EvictionOrder":
        """An order of the same kind for another tier, which learns from the same uses."""


class LruOrder:
    """Exact least-recently-used by page, tail first.

    A lazy heap of (stamp of the tail page, serial, run), at most one entry a run.  Stamps only grow, so an entry
    is a lower bound: a stale one is put back where it belongs, or dropped, when it surfaces.
    """

    uses: Uses | None = None

    def __init__(self, tier: Tier = Tier.GPU) -> None:
        self._bit = int(tier)
        self._stamp = gpu_stamp if tier is Tier.GPU else host_stamp
        self._heap: list[tuple[int, int, Run]] = []

    def offer(self, run: Run) -> None:
        if run.queued & self._bit:
            return
        stamp = self._stamp(run)
        if stamp != NO_TAIL:
            run.queued |= self._bit
            heapq.heappush(self._heap, (stamp, run.serial, run))

    def coldest(self) -> Run | None:
        heap = self._heap
        while heap:
            stamp, serial, run = heap[0]
            now = self._stamp(run)
            if now == stamp:
                return run
            if now == NO_TAIL:
                self.shelve(run)
            else:
                heapq.heapreplace(heap, (now, serial, run))
        return None

    def shelve(self, run: Run) -> None:
        heapq.heappop(self._heap)
        run.queued &= ~self._bit

    def rank(self, stamp: int) -> float:
        return -stamp

    def for_tier(self, tier: Tier) -> "LruOrder":
        return LruOrder(tier)

    def clear(self) -> None:
        for _, _, run in self._heap:
            run.queued &= ~self._bit
        self._heap.clear()
