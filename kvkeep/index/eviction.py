"""The order in which cached pages leave.

Must not know tokens, names or who owns a page: it ranks runs, the run tree trims them.

An order sees every use of a run (through the stamps that the run carries) and says which run's tail is coldest.
Only leaves can be trimmed, and only their tail, so an order deals in whole leaf runs.
"""

import heapq
from typing import Protocol

from kvkeep.index.run import Run


class EvictionOrder(Protocol):
    """Ranks the runs whose tails may leave.  A run is offered when it may have become a leaf or come free."""

    def offer(self, run: Run) -> None:
        """`run` may be trimmed from now on; it may be offered again at any time."""

    def coldest(self) -> Run | None:
        """The leaf run whose tail page should leave first, or None when nothing is on offer."""

    def trimmed(self, run: Run) -> None:
        """The run that `coldest` gave has lost pages, maybe all; no run was offered in between."""

    def shelve(self, run: Run) -> None:
        """The tail of the run that `coldest` gave is owned; it will be offered again when that ends."""

    def clear(self) -> None:
        """Forgets every run."""


class LruOrder:
    """Exact least-recently-used by page, tail first.

    A lazy heap of (stamp of the tail page, serial, run), at most one entry a run.  Stamps only grow, so an entry
    is a lower bound: a stale one is put back where it belongs when it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run]] = []

    def offer(self, run: Run) -> None:
        if not run.queued and run.pages and not run.children:
            run.queued = True
            heapq.heappush(self._heap, (run.stamps[0], run.serial, run))

    def coldest(self) -> Run | None:
        heap = self._heap
        while heap:
            stamp, serial, run = heap[0]
            if not run.pages or run.children:
                heapq.heappop(heap)
                run.queued = False
            elif run.stamps[0] != stamp:
                heapq.heapreplace(heap, (run.stamps[0], serial, run))
            else:
                return run
        return None

    def trimmed(self, run: Run) -> None:
        if not run.pages:
            heapq.heappop(self._heap)
            run.queued = False

    def shelve(self, run: Run) -> None:
        heapq.heappop(self._heap)
        run.queued = False

    def clear(self) -> None:
        for _, _, run in self._heap:
            run.queued = False
        self._heap.clear()
