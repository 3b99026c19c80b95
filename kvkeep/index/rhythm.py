"""The rhythm order: first leaves what costs most to keep for each hit that it brings.

Must not know how costs are learned (`uses.py`, `forecast.py`) or who asks for room.
"""

from math import inf
from operator import itemgetter
from random import Random

from kvkeep.index.eviction import NO_TAIL, Tier, gpu_stamp, host_stamp
from kvkeep.index.run import Run
from kvkeep.index.uses import Uses

#: So many runs on offer are all compared; of more, so many are drawn for each choice, and the costliest ones seen so
#: far are kept in mind.
ALL_MAX, DRAWN, KEPT = 64, 4, 24
#: Before an encoder output leaves so many more are drawn: where most runs on offer are outputs, the runs of pages that
#: cost more to keep are seldom among the few.
DRAWN_WHOLE = 16


_cost = itemgetter(0)


class RhythmOrder:
    """Compares a few runs on offer, drawn at random, and takes the costliest, tail first, use by use.

    uses: what is known of the uses of pages; an order for another tier shares it.   seed: of the draws.
    """

    def __init__(self, uses: Uses, tier: Tier = Tier.GPU, seed: int = 0) -> None:
        self.uses: Uses | None = uses
        self._uses = uses
        self._tier = tier
        self._bit = int(tier)
        self._stamp = gpu_stamp if tier is Tier.GPU else host_stamp
        self._random = Random(seed).random
        self._runs: list[Run] = []
        # Candidates: (cost when last seen, place in the list, stamp of the tail, run), the costliest last.
        self._seen: list[tuple[float, int, int, Run]] = []
        self._seen_at = -1
        self._chosen = False

    def offer(self, run: Run) -> None:
        if not run.queued & self._bit and self._stamp(run) != NO_TAIL:
            run.queued |= self._bit
            self._runs.append(run)

    def coldest(self) -> Run | None:
        runs, fresh = self._runs, self._seen_at == self._uses.count  # no request has ended since the last comparison
        if self._chosen and fresh:
            _, _, stamp, run = self._seen[-1]
            if self._stamp(run) == stamp:
                return run
        if not fresh or len(runs) <= ALL_MAX:
            self._compare(DRAWN)
        if not self._find():
            return None
        if self._seen[-1][3].whole:
            self._compare(DRAWN_WHOLE)
            self._find()
        return self._seen[-1][3]

    def shelve(self, run: Run) -> None:
        _, at, _, chosen = self._seen.pop()
        assert run is chosen
        self._chosen = False
        self._drop(at)

    def clear(self) -> None:
        for run in self._runs:
            run.queued &= ~self._bit
        self._runs.clear()
        self._seen.clear()
        self._chosen = False
        if self._tier is Tier.GPU:
            self._uses.clear()

    def rank(self, stamp: int) -> float:
        return self._uses.cost(stamp, None, self._uses.now())

    def for_tier(self, tier: Tier) -> "RhythmOrder":
        return RhythmOrder(self._uses, tier)

    # ------------------------------------------------------------------ inside

    def _find(self) -> bool:
        """Whether there is a costliest one, which is the last candidate then."""
        while not self._choose():
            if not self._runs:
                return False
            self._compare(DRAWN)
        return True

    def _compare(self, draws: int) -> None:
        """Draws, drops what cannot leave any more, and keeps the costliest in mind."""
        runs, random, tail_stamp, cost = self._runs, self._random, self._stamp, self._uses.cost
        now_s, seen, count = self._uses.now(), self._seen, len(self._runs)
        least = -inf  # what costs less than all that is kept in mind is passed over
        if count <= ALL_MAX:
            seen.clear()
            drawn = list(range(count))
        else:
            drawn = [int(random() * count) for _ in range(draws if len(seen) >= KEPT // 2 else ALL_MAX)]
            if len(seen) == KEPT:
                least = seen[0][0]
        for at in drawn:
            while at < len(runs):
                run = runs[at]
                stamp = tail_stamp(run)
                if stamp != NO_TAIL:
                    costs = cost(stamp, run, now_s)
                    if costs >= least:
                        seen.append((costs, at, stamp, run))
                    break
                self._drop(at)  # another run comes in its place
        if len(seen) != KEPT or least == -inf:
            seen.sort(key=_cost)
            del seen[:-KEPT]
        self._seen_at = self._uses.count

    def _choose(self) -> bool:
        """Whether the last candidate is the costliest and can leave; those that cannot any more are forgotten."""
        seen, runs, now_s = self._seen, self._runs, self._uses.now()
        while seen:
            was, at, stamp, run = seen[-1]
            found = self._stamp(run) if at < len(runs) and runs[at] is run else None
            if found != stamp:
                seen.pop()
                if found == NO_TAIL:
                    self._drop(at)
                continue
            cost = self._uses.cost(stamp, run, now_s)
            if cost >= was or len(seen) == 1 or cost >= seen[-2][0]:
                self._chosen = True
                self._uses.let_go.append(stamp)
                return True
            seen[-1] = (cost, at, stamp, run)
            seen.sort(key=_cost)
        self._chosen = False
        return False

    def _drop(self, at: int) -> None:
        """Takes the run at `at` off the list; the last one comes in its place."""
        runs = self._runs
        runs[at].queued &= ~self._bit
        last = runs.pop()
        if at < len(runs):
            runs[at] = last
