"""The rhythm order: first leaves what costs most to keep for each hit that it brings.

Must not know how costs are learned (`uses.py`, `forecast.py`) or who asks for room.
"""

from operator import itemgetter
from random import Random

from kvkeep.index.eviction import NO_TAIL, Tier, gpu_stamp, host_stamp
from kvkeep.index.run import Run
from kvkeep.index.uses import Uses

#: Runs that are compared for a choice, and how many of them, the costliest, leave before others are compared.
SAMPLE, TAKEN = 32, 4


class RhythmOrder:
    """Compares a few runs on offer, drawn at random, and takes the costliest, tail first, use by use.

    uses: what is known of the uses of pages; an order for another tier shares it.   seed: of the draws.
    """

    def __init__(self, uses: Uses, tier: Tier = Tier.GPU, seed: int = 0) -> None:
        self.uses = uses
        self._tier = tier
        self._bit = int(tier)
        self._stamp = gpu_stamp if tier is Tier.GPU else host_stamp
        self._random = Random(seed).random
        self._runs: list[Run] = []
        # The choice: (cost, place in the list, stamp of the tail, run), the costliest last.
        self._chosen: list[tuple[float, int, int, Run]] = []
        self._chosen_at = -1

    def offer(self, run: Run) -> None:
        if not run.queued & self._bit and self._stamp(run) != NO_TAIL:
            run.queued |= self._bit
            self._runs.append(run)

    def coldest(self) -> Run | None:
        chosen, runs = self._chosen, self._runs
        if self._chosen_at != self.uses.count:  # a request has ended since: choose anew
            chosen.clear()
        while True:
            while chosen:
                _, at, stamp, run = chosen[-1]
                if at < len(runs) and runs[at] is run:
                    now = self._stamp(run)
                    if now == stamp:
                        return run
                    if now == NO_TAIL:
                        self._drop(at)
                chosen.pop()
            if not runs:
                return None
            self._choose()

    def shelve(self, run: Run) -> None:
        _, at, _, chosen = self._chosen.pop()
        assert run is chosen
        self._drop(at)

    def clear(self) -> None:
        for run in self._runs:
            run.queued &= ~self._bit
        self._runs.clear()
        self._chosen.clear()
        if self._tier is Tier.GPU:
            self.uses.clear()

    def rank(self, stamp: int, run: Run) -> float:
        return self.uses.cost(stamp, run, self.uses.now())

    def for_tier(self, tier: Tier) -> "RhythmOrder":
        return RhythmOrder(self.uses, tier)

    # ------------------------------------------------------------------ inside

    def _choose(self) -> None:
        """Draws, drops what cannot leave any more, and keeps the costliest few."""
        runs, random, tail_stamp, cost = self._runs, self._random, self._stamp, self.uses.cost
        now_s = self.uses.now()
        count = len(runs)
        drawn = range(count) if count <= SAMPLE else sorted({int(random() * count) for _ in range(SAMPLE)})
        found = []
        for at in reversed(drawn):  # from the end, so that the place of those still to come stays
            run = runs[at]
            stamp = tail_stamp(run)
            if stamp == NO_TAIL:
                self._drop(at)
            else:
                found.append((cost(stamp, run, now_s), at, stamp, run))
        found.sort(key=itemgetter(0))
        self._chosen = found[-TAKEN:]
        self._chosen_at = self.uses.count

    def _drop(self, at: int) -> None:
        """Takes the run at `at` off the list; the last one comes in its place."""
        runs = self._runs
        runs[at].queued &= ~self._bit
        last = runs.pop()
        if at < len(runs):
            runs[at] = last
