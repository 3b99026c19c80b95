"""Classic eviction orders of pages, as published but for leaves: those that rank pages rank the leaves of the pool.

Must not know traces or tokens.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tools.prefix_pool import ROOT, Ids, LeafHeap, Related, Tree

Queue = OrderedDict[int, None]


class Lru:
    """Least recently used."""

    def __init__(self, tree: Tree, seed: int) -> None:
        self._stamps = np.zeros(tree.distinct, dtype=np.int64)
        self._now = 0
        self._heap = LeafHeap(tree, lambda page: (int(self._stamps[page]), 0))
        self.bare, self.coldest = self._heap.push, self._heap.least

    def used(self, pages: Ids, known: int) -> None:
        self._now += 1
        self._stamps[pages] = self._now

    def left(self, page: int) -> None:
        pass


class Lfu:
    """LFU with dynamic ageing (Arlitt, Cherkasova, Dilley, Friedrich, Jin 2000).

    A use sets a page's rank to its uses while resident plus the rank of what left last.  Equals leave oldest first.
    """

    def __init__(self, tree: Tree, seed: int) -> None:
        self._uses, self._ranks, self._stamps = (np.zeros(tree.distinct, dtype=np.int64) for _ in range(3))
        self._now = self._floor = 0
        self._heap = LeafHeap(tree, lambda page: (int(self._ranks[page]), int(self._stamps[page])))
        self.bare, self.coldest = self._heap.push, self._heap.least

    def used(self, pages: Ids, known: int) -> None:
        self._now += 1
        self._uses[pages[known:]] = 0
        self._uses[pages] += 1
        self._ranks[pages] = self._uses[pages] + self._floor
        self._stamps[pages] = self._now

    def left(self, page: int) -> None:
        self._floor = int(self._ranks[page])


class Arc:
    """ARC (Megiddo, Modha 2003): pages used once, pages used again, and how much room each gets, learned by ghosts."""

    def __init__(self, tree: Tree, seed: int) -> None:
        self._capacity = tree.capacity
        self._once, self._again, self._once_ghosts, self._again_ghosts = (Queue() for _ in range(4))
        self._room = 0.0  # for pages used once

    def used(self, pages: Ids, known: int) -> None:
        once, again = self._once, self._again
        ids = pages.tolist()
        for page in reversed(ids[known:]):
            if page in self._once_ghosts:
                self._room += max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
                self._room = min(self._room, self._capacity)
                del self._once_ghosts[page]
                again[page] = None
            elif page in self._again_ghosts:
                self._room -= max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
                self._room = max(self._room, 0.0)
                del self._again_ghosts[page]
                again[page] = None
            else:
                once[page] = None
        for page in reversed(ids[:known]):
            if page in again:
                again.move_to_end(page)
            else:
                del once[page]
                again[page] = None

    def bare(self, page: int) -> None:
        pass

    def coldest(self) -> int:
        first = self._once if len(self._once) > self._room or not self._again else self._again
        return next(iter(first))

    def left(self, page: int) -> None:
        pages, ghosts = self._once, self._once_ghosts
        if page in self._again:
            pages, ghosts = self._again, self._again_ghosts
        del pages[page]
        ghosts[page] = None
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and len(self._once_ghosts) + len(self._again_ghosts) > self._capacity:
            self._again_ghosts.popitem(last=False)


class S3Fifo:
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi 2023): a small queue of a tenth, a main queue, and ghosts of the small."""

    def __init__(self, tree: Tree, seed: int) -> None:
        self._small_max = max(1, tree.capacity // 10)
        self._ghosts_max = tree.capacity - self._small_max
        self._uses = np.zeros(tree.distinct, dtype=np.int8)
        self._small, self._main, self._ghosts = Queue(), Queue(), Queue()

    def used(self, pages: Ids, known: int) -> None:
        self._uses[pages[:known]] = np.minimum(self._uses[pages[:known]] + 1, 3)
        self._uses[pages[known:]] = 0
        for page in reversed(pages[known:].tolist()):
            if page in self._ghosts:
                del self._ghosts[page]
                self._main[page] = None
            else:
                self._small[page] = None

    def bare(self, page: int) -> None:
        pass

    def coldest(self) -> int:
        small, main, uses = self._small, self._main, self._uses
        while True:
            if len(small) >= self._small_max or not main:
                page = next(iter(small))
                if uses[page] <= 1:
                    return page
                del small[page]
                main[page] = None
                uses[page] = 0
            else:
                page = next(iter(main))
                if not uses[page]:
                    return page
                uses[page] -= 1
                main.move_to_end(page)

    def left(self, page: int) -> None:
        if page in self._main:
            del self._main[page]
            return
        del self._small[page]
        self._ghosts[page] = None
        if len(self._ghosts) > self._ghosts_max:
            self._ghosts.popitem(last=False)


class Lhd:
    """LHD (Beckmann, Chen, Cidon 2018): hits to expect for the room a page takes until its hit or its end, by its age.

    Ages are in page uses, eight bins an octave; a page's class is the octave of its age at its last hit.  32 leaves are
    drawn.  While no request ends, the page before one that left goes next, unless it is worth more.
    """

    BINS, CLASSES, DRAWN, KEEP = 8 * 26, 27, 32, 0.9

    def __init__(self, tree: Tree, seed: int) -> None:
        self._tree, self._random = tree, random.Random(seed)
        self._last = np.zeros(tree.distinct, dtype=np.int64)
        self._class = np.zeros(tree.distinct, dtype=np.int8)
        self._hits, self._gone, self._density = (np.zeros((self.CLASSES, self.BINS)) for _ in range(3))
        self._widths = np.diff(2.0 ** (np.arange(self.BINS + 1) / 8))
        self._now = self._learned = 0
        self._held, self._worst = ROOT, -1.0

    def used(self, pages: Ids, known: int) -> None:
        self._now += len(pages)
        hit = pages[:known]
        bins = self._bins(hit)
        np.add.at(self._hits, (self._class[hit], bins), 1.0)
        self._class[hit] = bins // 8 + 1
        self._class[pages[known:]] = 0
        self._last[pages] = self._now
        self._worst = -1.0
        if self._now - self._learned >= self._tree.capacity:
            self._learn()

    def _bins(self, pages: Ids) -> npt.NDArray[np.int64]:
        ages = self._now - self._last[pages]
        bins: npt.NDArray[np.int64] = np.minimum(8 * np.log2(ages + 1.0), self.BINS - 1).astype(np.int64)
        return bins

    def _learn(self) -> None:
        """Hits behind an age, for the time that all who reached it go on to take."""
        ends = self._hits + self._gone
        time = (behind(ends) - ends / 2) * self._widths
        self._density = behind(self._hits) / np.maximum(behind(time), 1e-9)
        self._hits *= self.KEEP
        self._gone *= self.KEEP
        self._learned = self._now

    def bare(self, page: int) -> None:
        self._held = page

    def coldest(self) -> int:
        if self._held in self._tree.leaf_at and self._worth(np.array([self._held]))[0] <= self._worst:
            return self._held
        drawn = self._random.choices(self._tree.leaves, k=self.DRAWN)
        worths = self._worth(np.array(drawn))
        at = int(worths.argmin())
        self._worst = float(worths[at])
        return drawn[at]

    def _worth(self, pages: Ids) -> npt.NDArray[np.float64]:
        worths: npt.NDArray[np.float64] = self._density[self._class[pages], self._bins(pages)]
        return worths

    def left(self, page: int) -> None:
        age = self._now - int(self._last[page])
        self._gone[self._class[page], min(int(8 * math.log2(age + 1.0)), self.BINS - 1)] += 1.0


def behind(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each bin and all later ones together."""
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1]


class LeCaR:
    """LeCaR (Vietri, Rodriguez, Martinez, Lyons, Liu, Rangaswami, Zhao, Narasimhan 2018): LRU or LFU, a weighted coin.

    What comes back soon after one of them let it go moves weight to the other.  Weights stay between 1 and 99 %.
    """

    RATE, LEFT_AT_CAPACITY = 0.45, 0.005

    def __init__(self, tree: Tree, seed: int) -> None:
        self._capacity, self._random = tree.capacity, random.Random(seed)
        self._uses, self._stamps = (np.zeros(tree.distinct, dtype=np.int64) for _ in range(2))
        self._now = self._time = 0  # in requests; in page uses
        self._oldest = LeafHeap(tree, lambda page: (int(self._stamps[page]), 0))
        self._rarest = LeafHeap(tree, lambda page: (int(self._uses[page]), int(self._stamps[page])))
        self._gone: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())  # page -> time, by who chose it
        self._chosen_by: int | None = None
        self.lru_weight = 0.5

    def used(self, pages: Ids, known: int) -> None:
        self._now += 1
        self._time += len(pages)
        regrets = [0.0, 0.0]
        for page in pages[known:].tolist():
            for expert, gone in enumerate(self._gone):
                if page in gone:
                    regrets[expert] += self.LEFT_AT_CAPACITY ** ((self._time - gone.pop(page)) / self._capacity)
                    break
            else:
                self._uses[page] = 0
        odds = math.log(self.lru_weight / (1 - self.lru_weight)) + self.RATE * (regrets[1] - regrets[0])
        self.lru_weight = min(max(1 / (1 + math.exp(-max(min(odds, 50.0), -50.0))), 0.01), 0.99)
        self._uses[pages] += 1
        self._stamps[pages] = self._now

    def bare(self, page: int) -> None:
        self._oldest.push(page)
        self._rarest.push(page)

    def coldest(self) -> int:
        choices = self._oldest.least(), self._rarest.least()
        expert = 0 if self._random.random() < self.lru_weight else 1
        self._chosen_by = None if choices[0] == choices[1] else expert
        return choices[expert]

    def left(self, page: int) -> None:
        if self._chosen_by is None:
            return
        gone = self._gone[self._chosen_by]
        gone[page] = self._time
        if len(gone) > self._capacity:
            gone.popitem(last=False)


ORDERS: dict[str, Callable[[Tree, int], Related]] = {
    "LRU": Lru,
    "ARC": Arc,
    "S3-FIFO": S3Fifo,
    "LFU-DA": Lfu,
    "LHD": Lhd,
    "LeCaR": LeCaR,
}
