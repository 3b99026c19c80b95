"""Where in the run tree each page of one tier is.

Must not know what the other tier holds, nor how runs are found.
"""

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.index.eviction import EvictionOrder
from kvkeep.index.run import Run
from kvkeep.index.watch import Reason, Watch
from kvkeep.tiers.ledger import SCALAR_PAGES_MAX, Ledger, as_index


class TierMap:
    """One tier as the tree sees it: its ledger, its eviction order, and run and depth of each of its pages.

    watch: is told of every page that enters or leaves; None while nobody listens.
    """

    def __init__(self, ledger: Ledger, order: EvictionOrder) -> None:
        self.ledger = ledger
        self.order = order
        self.watch: Watch | None = None
        self.run_of: npt.NDArray[Any] = np.empty(0, dtype=object)
        self.depth_of = array("i")
        self.fit()

    def put(self, pages: "array[int]", run: Run, depth: int, reason: Reason | None = None) -> None:
        """`pages` are consecutive entries of `run` from `depth` on, whose names are there already."""
        self.fit()
        if len(pages) <= SCALAR_PAGES_MAX:
            for d, p in enumerate(pages, depth):
                self.run_of[p] = run
                self.depth_of[p] = d
        else:
            ids = as_index(pages)
            self.run_of[ids] = run
            self._depth_of_np[ids] = np.arange(depth, depth + len(pages), dtype=np.int32)
        if self.watch is not None and not run.whole:
            self.watch.put(run, depth, len(pages), reason)

    def remove(self, pages: "array[int]", reason: Reason = "evicted") -> None:
        """`pages` are in the tree no more; their names still are."""
        if self.watch is not None and pages and not self.run_of[pages[0]].whole:
            ids = as_index(pages)
            self.watch.remove(self.run_of[ids], self._depth_of_np[ids], reason)
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                self.run_of[p] = None
        else:
            self.run_of[as_index(pages)] = None

    def deepest(self, pages: "array[int]") -> Run | None:
        """The run of the last of `pages` that is in the tree; None when none is."""
        run_of = self.run_of
        for page in reversed(pages[-SCALAR_PAGES_MAX:]):
            if run_of[page] is not None:
                return run_of[page]  # type: ignore[no-any-return]
        rest = pages[:-SCALAR_PAGES_MAX]
        if not rest:
            return None
        runs = run_of.take(as_index(rest))
        here = runs[runs != None]  # noqa: E711 (elementwise)
        return here[-1] if len(here) else None

    def fit(self) -> None:
        """Has a place for every id of the ledger: there may be more slots than there were."""
        more = self.ledger.ids - len(self.depth_of)
        if not more:
            return
        self.run_of = np.concatenate([self.run_of, np.empty(more, dtype=object)])
        self.depth_of = self.depth_of + array("i", bytes(4 * more))
        self._depth_of_np = np.frombuffer(self.depth_of, dtype=np.int32)

    def clear(self) -> int:
        """Forgets every page; returns how many that freed."""
        cached = np.flatnonzero(self.run_of != None).astype(np.int32)  # noqa: E711 (elementwise)
        self.run_of[:] = None
        self.order.clear()
        if self.watch is not None:
            self.watch.clear()
        before = self.ledger.free
        self.ledger.drop(array("i", cached.tobytes()))
        return self.ledger.free - before
