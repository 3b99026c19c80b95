"""LRU stack distances of requests for chains of pages: one pass for every size of pool.

Must not know names, tokens or caches.

A page's stack distance is how many other pages were used since its last use: a pool of C pages under LRU holds exactly
the pages of distance below C (Mattson et al., "Evaluation techniques for storage hierarchies", 1970).  A request uses
all pages of its chain, the first one last, so the pages whose last use was one request are a stretch of one chain,
and a request is a few stretches: what is counted is stretches, not pages.

Sampled, only some pages are in the stack, each with a weight: how many pages it stands for in distances (Waldspurger et
al., "Efficient MRC construction with SHARDS", 2015).  Pages of one chain stand next to each other in the stack, so what
is found of a page that is not in it is taken from the nearest one of its chain that is.
"""

from array import array

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]

UNUSED = -1

#: Uses between two renumberings, at least.
USES_MIN = 4096


class Stack:
    """The pages of all requests so far, latest used first.

    pages_max: above every page id.   weight: by page id; None: 1 each.
    """

    def __init__(self, pages_max: int, weight: npt.NDArray[np.int64] | None = None) -> None:
        self._weight = weight
        self.last_use = np.full(pages_max, UNUSED, dtype=np.int32)  # by page id
        self.pages = 0
        self._hits = np.zeros(1024, dtype=np.int64)  # by distance
        self._uses = 0
        self._tree = array("q", bytes(8 * (USES_MIN + 1)))  # Fenwick: pages by their last use

    def use(self, pages: PageIds, found: int) -> None:
        """A request uses `pages`, its chain from the first page on; each weighs 1, and none of them has left.

        found: how many of the first pages the prompt looks up.
        """
        if self._uses + 1 == len(self._tree):
            self._renumber()
        last = self.last_use[pages]
        known = int(np.argmax(last == UNUSED)) if len(last) and last[-1] == UNUSED else len(last)
        first = 0
        ends = (np.flatnonzero(last[1:known] != last[: known - 1]) + 1).tolist() if known else []
        for end in (*ends, known):
            if end == first:
                continue
            use, stop = int(last[first]), min(end, found)
            if stop > first:
                later = self.pages - self._used_until(use)  # besides the chain before it
                self._reach(later + stop)
                self._hits[later + first : later + stop] += 1
            self._add(use, first - end)
            first = end
        self.last_use[pages] = self._uses
        self._add(self._uses, len(pages))
        self._uses += 1

    def use_few(self, pages: list[int], found: list[int]) -> None:
        """The same for a few pages, weighed, some of which may have left; a loop is faster then.

        found: for each of the first pages how many it stands for among those that the prompt looks up.
        """
        if self._uses + 1 == len(self._tree):
            self._renumber()
        ids = np.array(pages)
        weights = self._weights(ids).tolist()
        before = weight = later = 0  # of the chain so far; of the stretch; used since
        use = UNUSED
        for i, last in enumerate(self.last_use[ids].tolist()):
            if last != use:
                if weight:
                    self._add(use, -weight)
                use, weight = last, 0
                if last != UNUSED:
                    later = self.pages - self._used_until(last)
            if last != UNUSED:
                if i < len(found):
                    self._reach(later + before + 1)
                    self._hits[later + before] += found[i]
                weight += weights[i]
            before += weights[i]
        if weight:
            self._add(use, -weight)
        self.last_use[ids] = self._uses
        self._add(self._uses, before)
        self._uses += 1

    def forget(self, pages: PageIds) -> None:
        """Pages that have been used leave the stack."""
        uses, at = np.unique(self.last_use[pages], return_inverse=True)
        for use, weight in zip(uses.tolist(), np.bincount(at, self._weights(pages)).tolist(), strict=True):
            self._add(use, -int(weight))
        self.last_use[pages] = UNUSED

    def hits(self) -> npt.NDArray[np.int64]:
        """By size of the pool in pages, from 0 on: what prompts have found; the last is for all sizes above."""
        size = int(self._hits.nonzero()[0][-1]) + 1 if self._hits.any() else 0
        return np.concatenate([[0], np.cumsum(self._hits[:size])])

    def _reach(self, distance: int) -> None:
        if distance > len(self._hits):
            self._hits = np.concatenate([self._hits, np.zeros(distance, dtype=np.int64)])

    def _weights(self, pages: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int64]:
        return np.ones(len(pages), dtype=np.int64) if self._weight is None else self._weight[pages]

    def _renumber(self) -> None:
        """Uses of which no page is left are forgotten."""
        used = np.flatnonzero(self.last_use != UNUSED)
        uses, numbers = np.unique(self.last_use[used], return_inverse=True)
        self.last_use[used] = numbers
        self._uses, self.pages = len(uses), 0
        self._tree = array("q", bytes(8 * (max(USES_MIN, 2 * len(uses)) + 1)))
        for use, weight in enumerate(np.bincount(numbers, self._weights(used)).tolist()):
            self._add(use, int(weight))

    def _add(self, use: int, pages: int) -> None:
        self.pages += pages
        at, tree = use + 1, self._tree
        while at < len(tree):
            tree[at] += pages
            at += at & -at

    def _used_until(self, use: int) -> int:
        """Pages whose last use was `use` or earlier."""
        at, tree, found = use + 1, self._tree, 0
        while at:
            found += tree[at]
            at &= at - 1
        return found
