"""When will a chain be used again?  Learned from the uses seen so far.

Must not know pages, runs or tiers: it is told of gaps between uses and of chains that still wait.

1. Scale.  A ridge regression, fed while serving, predicts the logarithm of the gap to a chain's next use from its own
   gaps, its turns and the length of its last completion.  Before any data it answers "as long as the last time".
2. Hazard.  Age over scale goes into a histogram of uses, and of chains that waited through each bin, so that those
   that never come back count; one for each class of turns, leaning on what all classes have in common.
3. Cost.  What keeping a page costs for each hit it brings: the least, over all horizons, of the expected waiting over
   the chance of a use within the horizon (a Gittins index).  Where gaps are certain that is the time left, as in
   Belady's order; where the chance of a use falls with age it grows with age, as in LRU.
"""

import math
from itertools import pairwise

import numpy as np

#: Ages over scale in bins of a quarter of an octave, from 2**-4 to 2**8; the last two stand for "gone".
LOW, PER_OCTAVE, BINS = -4.0, 4, 48
#: Classes of chains: those that went on 0, 1-3, 4-15 and more times; and those whose return was announced.
ANNOUNCED, CLASSES = 4, 5
#: Uses after which regression and table are computed afresh: at first, and after that many uses.
REFRESH_USES_FIRST, REFRESH_USES, SETTLED_USES = 32, 256, 1024
#: What a use still counts in the histogram after as many more: a memory of about 1,250 uses.
KEEP_HISTOGRAM = 0.9992
#: Hazard of a bin before any data, and how many waits that is worth; how many waits the pooled curve is worth.
PRIOR, PRIOR_WAITS, LEAN = 0.1, 4.0, 8.0
#: What a gap still counts in the regression after one more; variance of its prior; the most it moves by one gap (log).
KEEP_GAPS, RIDGE, SURPRISE_MAX = 0.998, 3.0, 2.0
#: Tokens of a completion from which on its length tells in the gap; of shorter ones all are alike.
OUT_TOKENS = 256

#: Predicted gaps are kept between a millisecond and two weeks (log).
LOG_GAP_MIN, LOG_GAP_MAX = -7.0, 14.0

_EDGES = [0.0, *(2.0 ** (LOW + b / PER_OCTAVE) for b in range(1, BINS + 1))]
#: Of each bin: half its width, and its width.
_WIDTH = [b - a for a, b in pairwise(_EDGES)]
_HALF = [width / 2 for width in _WIDTH]
GONE = BINS - 2


def class_of(turns: int) -> int:
    """The class of a chain that went on `turns` times."""
    return min((turns.bit_length() + 1) // 2, ANNOUNCED - 1)


def bin_of(ratio: float) -> float:
    """The bin, with fraction, of an age over scale."""
    if ratio <= 0.0:
        return 0.0
    u = (math.log2(ratio) - LOW) * PER_OCTAVE
    return 0.0 if u < 0.0 else min(u, BINS - 1.001)


class Forecast:
    """Predicts gaps, and says what keeping a page costs: `table[class][bin]`, in scales.  O(1) a use, amortised.

    Of a chain it is told `typical` and `last`, its smoothed and its last gap (logarithms of seconds), and `out`, the
    length of its last completion in tokens.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 1.0, 0.0, 0.0]  # of 1, typical, last and the logarithm of out
        self._lean = np.array(self._weights) / RIDGE
        self._xx = np.zeros((4, 4))
        self._xy = np.zeros(4)
        self._gaps: list[tuple[float, float, float, float]] = []
        # Of each class and bin: uses, and the steps by which the number of chains that waited through it changes.
        self._uses = np.zeros((CLASSES, BINS))
        self._waits = np.zeros((CLASSES, BINS + 1))
        self._new_uses: list[int] = []
        self._new_first: list[int] = []
        self._new_last: list[int] = []
        self._count = self._total = 0
        self.table = self._cost_table()

    def predict(self, typical: float, last: float, out: int) -> float:
        """Seconds to the next use."""
        one, of_typical, of_last, of_out = self._weights
        log = one + of_typical * typical + of_last * last + of_out * math.log(out + OUT_TOKENS)
        return math.exp(min(max(log, LOG_GAP_MIN), LOG_GAP_MAX))

    def learn(self, typical: float, last: float, out: int, found: float) -> None:
        """A chain was used again after exp(`found`) seconds."""
        self._gaps.append((typical, last, math.log(out + OUT_TOKENS), found))

    def waited(self, group: int, first: int, last: int) -> None:
        """A chain has waited through bins `first` up to `last`."""
        self._new_first.append(group * (BINS + 1) + first)
        self._new_last.append(group * (BINS + 1) + last)

    def used(self, group: int, first: int, at: int) -> None:
        """A chain that was known to have waited up to bin `first` was used in bin `at`."""
        self.waited(group, min(first, at), at + 1)
        self._new_uses.append(group * BINS + at)

    def tick(self) -> None:
        """A request has used a chain; now and then what was seen is worked in."""
        self._count += 1
        if self._count >= (REFRESH_USES_FIRST if self._total < SETTLED_USES else REFRESH_USES):
            self._total += self._count
            self._count_up(KEEP_HISTOGRAM**self._count)
            self._count = 0
            self._regress()
            self.table = self._cost_table()

    # ------------------------------------------------------------------ inside

    def _count_up(self, keep: float) -> None:
        """What was counted before is worth `keep` of what was counted since."""
        steps = np.bincount(self._new_first, minlength=self._waits.size)
        steps -= np.bincount(self._new_last, minlength=self._waits.size)
        uses = np.bincount(np.array(self._new_uses, dtype=np.intp), minlength=self._uses.size)
        self._waits = keep * self._waits + steps.reshape(self._waits.shape)
        self._uses = keep * self._uses + uses.reshape(self._uses.shape)
        self._new_uses.clear()
        self._new_first.clear()
        self._new_last.clear()

    def _regress(self) -> None:
        if not self._gaps:
            return
        seen = np.array(self._gaps)
        self._gaps.clear()
        count = len(seen)
        y = seen[:, 3].copy()
        seen[:, 1:] = seen[:, :3]
        seen[:, 0] = 1.0
        expected = (seen * self._weights).sum(axis=1)
        y = expected + np.clip(y - expected, -SURPRISE_MAX, SURPRISE_MAX)
        weighted = seen * (KEEP_GAPS ** np.arange(count - 1, -1, -1.0))[:, None]
        keep = KEEP_GAPS**count
        # Without BLAS: its threads may wait for milliseconds for a processor, and we hold the cache's lock.
        self._xx = keep * self._xx + (weighted[:, :, None] * seen[:, None, :]).sum(axis=0)
        self._xy = keep * self._xy + (weighted * y[:, None]).sum(axis=0)
        self._weights = solve((self._xx + np.eye(4) / RIDGE).tolist(), (self._xy + self._lean).tolist())

    def _cost_table(self) -> list[list[float]]:
        waits = self._waits.cumsum(axis=1)[:, :BINS]
        pooled = (self._uses.sum(axis=0) + PRIOR_WAITS * PRIOR) / (waits.sum(axis=0) + PRIOR_WAITS)
        hazard = (self._uses + LEAN * pooled) / (waits + LEAN)
        common = cost_row(pooled.tolist())
        return [cost_row(row) if any_ else common for row, any_ in zip(hazard.tolist(), waits[:, 0] > 0.0, strict=True)]


def solve(rows: list[list[float]], values: list[float]) -> list[float]:
    """x of `rows` x = `values`, where `rows` are symmetric and positive definite: elimination without pivots."""
    count = len(values)
    for i in range(count):
        for k in range(i + 1, count):
            part = rows[k][i] / rows[i][i]
            rows[k] = [a - part * b for a, b in zip(rows[k], rows[i], strict=True)]
            values[k] -= part * values[i]
    out = [0.0] * count
    for i in range(count - 1, -1, -1):
        known = sum(rows[i][k] * out[k] for k in range(i + 1, count))
        out[i] = (values[i] - known) / rows[i][i]
    return out


def cost_row(hazard: list[float]) -> list[float]:
    """For each bin, the least waiting for a use over all horizons, in scales; the last value twice.

    Seen from the right, a bin joins the stretch behind it while that has the smaller cost: the stretches are the
    edges of a lower convex hull, so this takes O(bins).
    """
    row = [0.0] * (BINS + 1)
    stack: list[tuple[float, float, float, float]] = []  # waiting, chance of a use, chance of none, cost
    for b in range(BINS - 1, -1, -1):
        chance = min(hazard[b], 0.999)
        left = 1.0 - chance
        waiting = chance * _HALF[b] + left * _WIDTH[b]
        cost = waiting / chance
        while stack and stack[-1][3] <= cost:
            w, c, s, _ = stack.pop()
            waiting += left * w
            chance += left * c
            left *= s
            cost = waiting / chance
        stack.append((waiting, chance, left, cost))
        row[b] = cost
    row[BINS] = row[BINS - 1]
    return row
