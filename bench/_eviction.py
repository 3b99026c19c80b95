"""What an eviction order costs: a page that leaves, and a use that is learned, in a pool of many short runs.

Must not know a trace: chains come back at random, some sooner than others, and a few never do.
"""

import gc
from time import perf_counter_ns as now_ns

import numpy as np

from bench._cases import PAGE, Sample
from kvkeep.index.eviction import EvictionOrder, LruOrder
from kvkeep.index.forecast import REFRESH_USES
from kvkeep.index.names import TOKEN_NBYTES, make_identity
from kvkeep.index.rhythm import RhythmOrder
from kvkeep.index.runs import Place, RunTree
from kvkeep.index.uses import NO_STAMP, Began, PathUse, Uses
from kvkeep.tiers.ledger import Ledger

#: Pages that leave together.
BATCH = 8
#: Uses after which what was learned is worked in: a figure must not leave that out.
BLOCK = REFRESH_USES


class ManyRuns:
    """A pool full of `runs` cached chains: in each step one is used, `BATCH` pages leave, and new chains come in."""

    def __init__(self, pages: int, runs: int, name: str) -> None:
        self.seconds = 0.0
        self.uses = Uses(pages, lambda: self.seconds) if name == "rhythm" else None
        order: EvictionOrder = LruOrder() if self.uses is None else RhythmOrder(self.uses)
        self.ledger = Ledger(pages)
        self.tree = RunTree(self.ledger, order, PAGE * TOKEN_NBYTES)
        self.identity = make_identity(b"bench eviction")
        self.random = np.random.Generator(np.random.PCG64(7))
        self.sizes = np.maximum(1, self.random.poisson(pages / runs, 4 * runs)).tolist()
        self.ends: list[tuple[int, int]] = []  # the last page of each chain, with its generation
        self.learn_ns: list[int] = []
        self.evict_ns: list[int] = []
        while self.ledger.free > max(self.sizes):
            self.store()

    def store(self) -> None:
        """A request that stores a new chain."""
        count = min(self.sizes[len(self.ends) % len(self.sizes)], self.ledger.free)
        pages = self.ledger.open(count, 0)
        self.ledger.seal(pages, 0)
        names = self.random.integers(0, 2**64, count, dtype=np.uint64).tolist()
        raw = self.random.integers(0, 128_000, count * PAGE, dtype=np.int32).data.cast("B")
        self.tree.insert(self.tree.root(self.identity), names, raw, pages)
        self.ledger.release(pages, 0)
        self.tree.offer(pages[-1:])
        place = self.tree.place(pages[-1])
        assert place is not None
        self.used(place, 0, names, NO_STAMP)
        self.ends.append((pages[-1], self.ledger.generation(pages[-1])))

    def used(self, place: Place, base: int, names: list[int], stamp: int) -> None:
        """The end of a request, as the cache tells an order that learns."""
        self.seconds += 0.1
        run, depth = place
        name = run.names[base - 1 - run.start] if base else self.identity.name
        start = now_ns()
        if self.uses is not None:
            now = run.stretch(depth - 1)[0]
            self.uses.used(PathUse(now, run, depth, base, name, names, Began(self.seconds, stamp, 100), 200))
        self.learn_ns.append(now_ns() - start)

    def step(self) -> None:
        """One chain is used again; `BATCH` pages leave, and new chains come in."""
        for _ in range(64):
            page, generation = self.ends[int(len(self.ends) * (1 - self.random.random() ** 2))]
            place = self.tree.place(page) if self.ledger.generation(page) == generation else None
            if place is not None:
                stamp = place.run.stretch(place.depth - 1)[0]
                self.tree.touch(place)
                self.used(place, place.depth, [], stamp)
                break
        start = now_ns()
        gone = self.tree.evict(BATCH)
        self.evict_ns.append(now_ns() - start)
        self.ledger.drop(gone)
        while self.ledger.free >= BATCH:
            self.store()

    def sample(self, what: str, times: int) -> Sample:
        """Microseconds: of a page that leaves ("evict"), or of a use that is learned ("learn": means of BLOCK uses)."""

        def sample() -> list[float]:
            self.learn_ns.clear()
            self.evict_ns.clear()
            gc.disable()  # a full collection, ten milliseconds for all that the other cases left, would fall to one use
            for _ in range(times):
                self.step()
            gc.enable()
            if what == "learn":
                blocks = range(0, len(self.learn_ns) - BLOCK + 1, BLOCK)
                return [sum(self.learn_ns[at : at + BLOCK]) / BLOCK / 1e3 for at in blocks]
            return [ns / 1e3 / BATCH for ns in self.evict_ns]

        return sample
