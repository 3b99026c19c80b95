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
#: Sums are kept of so many neighbours (a power of two), of as many of those sums, and so on.
NEIGHBOURS_LOG2 = 6
NEIGHBOURS = 1 << NEIGHBOURS_LOG2


class Stack:
    """The pages of all requests so far, latest used first.

    pages_max: above every page id.   weight: by page id; None: 1 each.
    """

    def __init__(self, pages_max: int, weight: npt.NDArray[np.int64] | None = None) -> None:
        self._weight = weight
        self._weight_of = None if weight is None else weight.data  # of one page: faster than numpy
        self.last_use = np.full(pages_max, UNUSED, dtype=np.int32)  # by page id
        self.last_use_of = self.last_use.data
        self.pages = 0
        self._hits = np.zeros(1024, dtype=np.int64)  # by distance
        self._uses = 0
        self._sums = self._new_sums(USES_MIN)  # pages by their last use, and sums of those

    def use(self, pages: PageIds, found: int) -> None:
        """A request uses `pages`, its chain from the first page on; each weighs 1, and none of them has left.

        found: how many of the first pages the prompt looks up.
        """
        if self._uses == len(self._sums[0]):
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
        if self._uses == len(self._sums[0]):
            self._renumber()
        last_use, weight_of, latest = self.last_use_of, self._weight_of, self._uses - 1
        before = weight = later = 0  # of the chain so far; of the stretch; used since
        use, left = UNUSED, len(found)
        for page in pages:
            last = last_use[page]
            if last != use:
                if weight:
                    self._add(use, -weight)
                use, weight = last, 0
                if last != UNUSED:
                    later = self.pages - self._used_until(last) if last != latest else 0
            one = 1 if weight_of is None else weight_of[page]
            if last != UNUSED:
                if left > 0:
                    self._reach(later + before + 1)
                    self._hits[later + before] += found[-left]
                weight += one
            left -= 1
            before += one
        if weight:
            self._add(use, -weight)
        latest = self._uses
        for page in pages:
            last_use[page] = latest
        self._add(latest, before)
        self._uses = latest + 1

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
        self._sums = self._new_sums(2 * len(uses))
        for use, weight in enumerate(np.bincount(numbers, self._weights(used)).tolist()):
            self._add(use, int(weight))

    @staticmethod
    def _new_sums(uses: int) -> "list[array[int]]":
        """Zeros for `uses` uses, and for the sums above them up to a level of one group of neighbours."""
        count, out = max(USES_MIN, uses), []
        while True:
            out.append(array("q", bytes(8 * count)))
            if count <= NEIGHBOURS:
                return out
            count = -(-count // NEIGHBOURS)

    def _add(self, use: int, pages: int) -> None:
        self.pages += pages
        for level in self._sums:
            level[use] += pages
            use >>= NEIGHBOURS_LOG2

    def _used_until(self, use: int) -> int:
        """Pages whose last use was `use` or earlier."""
        end, found = use + 1, 0
        for level in self._sums:
            found += sum(level[end & -NEIGHBOURS : end])
            end >>= NEIGHBOURS_LOG2
        return found
