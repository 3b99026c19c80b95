"""A pool of pages that are prefixes, for any order of eviction; reference accounting.

Must not know orders, traces or the product: it is a second opinion on its index.

Capacity counts cached full pages only; a request's pages enter at its end, touched from tail to head, and may trim
their own tail.  A page may leave only when no resident page hangs behind it.  Where an order names one that has some,
the end of a chain behind it leaves instead, and the order may name it again.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

ROOT = -1


class Tree:
    """Which pages are resident, and what hangs behind what.   leaves: those with nothing behind them, in no order."""

    def __init__(self, capacity: int, distinct: int) -> None:
        self.capacity = capacity
        self.distinct = distinct
        self.size = 0
        self.resident = np.zeros(distinct, dtype=np.bool_)
        self.children: dict[int, dict[int, None]] = {}
        self.leaves: list[int] = []
        self.leaf_at: dict[int, int] = {}
        self._parents = np.full(distinct, ROOT, dtype=np.int32)

    def known(self, pages: Ids) -> int:
        """How many of a chain's pages are resident: as nothing leaves before what is behind it, the leading ones."""
        return int(np.count_nonzero(self.resident[pages]))

    def enter(self, pages: Ids, known: int) -> None:
        """Those of `pages` behind the first `known`, of which there is one or more."""
        new = pages[known:].tolist()
        parent = int(pages[known - 1]) if known else ROOT
        if parent in self.leaf_at:
            self._cover(parent)
        self.children.setdefault(parent, {})[new[0]] = None
        self.children.update((page, {behind: None}) for page, behind in pairwise(new))
        self._parents[new[0]] = parent
        self._parents[pages[known + 1 :]] = pages[known:-1]
        self.resident[pages[known:]] = True
        self.size += len(new)
        self._bare(new[-1])

    def leave(self, page: int) -> int:
        """The parent of a leaf that leaves, if it is a leaf now, or ROOT."""
        self._cover(page)
        self.resident[page] = False
        self.size -= 1
        parent = int(self._parents[page])
        siblings = self.children[parent]
        del siblings[page]
        if siblings:
            return ROOT
        del self.children[parent]
        if parent != ROOT:
            self._bare(parent)
        return parent

    def _bare(self, page: int) -> None:
        self.leaf_at[page] = len(self.leaves)
        self.leaves.append(page)

    def _cover(self, page: int) -> None:
        at, last = self.leaf_at.pop(page), self.leaves.pop()
        if last != page:
            self.leaves[at] = last
            self.leaf_at[last] = at


class Related(Protocol):
    """An order of pages."""

    def used(self, pages: Ids, known: int) -> None:
        """A request ends; the first `known` of its pages were resident, the others enter."""

    def bare(self, page: int) -> None:
        """`page` has no page behind it any more."""

    def coldest(self) -> int:
        """A resident page that should leave."""

    def left(self, page: int) -> None:
        """`page` leaves."""


def replay(requests: Iterable[tuple[Ids, int]], tree: Tree, order: Related) -> int:
    """Matched pages.   requests: the pages that each leaves behind, and how many of them its prompt can match."""
    matched_pages = 0
    for pages, prompt in requests:
        known = tree.known(pages)
        matched_pages += min(known, prompt)
        order.used(pages, known)
        if known < len(pages):
            tree.enter(pages, known)
            order.bare(int(pages[-1]))
            trim(tree, order)
    return matched_pages


def trim(tree: Tree, order: Related) -> None:
    """Down to the capacity."""
    path: list[int] = []
    while tree.size > tree.capacity:
        named = order.coldest()
        if not path or path[0] != named:
            path = [named]
        while path[-1] in tree.children:
            path.append(next(iter(tree.children[path[-1]])))
        page = path.pop()
        order.left(page)
        parent = tree.leave(page)
        if parent != ROOT:
            order.bare(parent)


class LeafHeap:
    """The leaf with the least key, of keys that only grow while a page is resident: an entry is a lower bound."""

    def __init__(self, tree: Tree, key: Callable[[int], tuple[int, int]]) -> None:
        self._tree, self._key = tree, key
        self._heap: list[tuple[tuple[int, int], int]] = []

    def push(self, page: int) -> None:
        heapq.heappush(self._heap, (self._key(page), page))

    def least(self) -> int:
        heap, leaf_at = self._heap, self._tree.leaf_at
        while True:
            key, page = heap[0]
            if page not in leaf_at:
                heapq.heappop(heap)
                continue
            now = self._key(page)
            if now == key:
                return page
            heapq.heapreplace(heap, (now, page))
