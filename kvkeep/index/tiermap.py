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
        self.run_of: npt.NDArray[Any] = np.empty(ledger.total, dtype=object)
        self.depth_of = array("i", bytes(4 * ledger.total))
        self._depth_of_np = np.frombuffer(self.depth_of, dtype=np.int32)

    def put(self, pages: "array[int]", run: Run, depth: int, reason: Reason | None = None) -> None:
        """`pages` are consecutive entries of `run` from `depth` on, whose names are there already."""
        if len(pages) <= SCALAR_PAGES_MAX:
            for d, p in enumerate(pages, depth):
                self.run_of[p] = run
                self.depth_of[p] = d
        else:
            ids = as_index(pages)
            self.run_of[ids] = run
            self._depth_of_np[ids] = np.arange(depth, depth + len(pages), dtype=np.int32)
        if self.watch is not None:
            self.watch.put(run, depth, len(pages), reason)

    def remove(self, pages: "array[int]", reason: Reason = "evicted") -> None:
        """`pages` are in the tree no more; their names still are."""
        if self.watch is not None and pages:
            ids = as_index(pages)
            self.watch.remove(self.run_of[ids], self._depth_of_np[ids], reason)
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                self.run_of[p] = None
        else:
            self.run_of[as_index(pages)] = None

    def clear(self) -> int:
        """Forgets every page; returns how many that freed."""
        cached = np.flatnonzero(self.run_of != None).astype(np.int32)  # noqa: E711 (elementwise)
        self.run_of[:] = None
        self.order.clear()
        if self.watch is not None:
            self.watch.clear()
        return self.ledger.drop(array("i", cached.tobytes()))
