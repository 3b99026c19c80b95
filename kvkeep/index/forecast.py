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
from typing import NamedTuple

import numpy as np

#: Ages over scale in bins of an eighth of an octave, from 2**-6 to 2**8; the last two stand for "gone".
LOW, PER_OCTAVE, BINS = -6.0, 8, 112
#: Classes of turns: 0, 1, 2-3, 4-7, 8-15, 16 and more; and one for chains whose return was announced.
TURN_CLASSES, ANNOUNCED, CLASSES = 6, 6, 7
#: Uses after which regression and table are computed afresh.
REFRESH_USES = 32
#: What a use still counts in the histogram after as many more: a memory of about 1,250 uses.
KEEP_HISTOGRAM = 0.9992
#: Hazard of a bin before any data, and how many waits that is worth; how many waits the pooled curve is worth.
PRIOR, PRIOR_WAITS, LEAN = 0.05, 4.0, 8.0
#: What a gap still counts in the regression after one more; variance of its prior; the most it moves by one gap (log).
KEEP_GAPS, RIDGE, SURPRISE_MAX = 0.998, 3.0, 2.0
FEATURES = 7

_EDGES = [0.0, *(2.0 ** (LOW + b / PER_OCTAVE) for b in range(1, BINS + 1))]
#: Of each bin: half its width, and its width.
_WIDTH = [b - a for a, b in pairwise(_EDGES)]
_HALF = [width / 2 for width in _WIDTH]
GONE = BINS - 2


class Gap(NamedTuple):
    """What is known of a chain when a request has used it.

    typical, last: its smoothed gap and its last one, logarithms of seconds.   out: tokens of the last completion.
    turns: how often it went on.   new: whether it began, or branched off another, with this use.
    """

    typical: float
    last: float
    out: int
    turns: int
    new: bool


def features(gap: Gap) -> tuple[float, ...]:
    """What the regression sees."""
    log = math.log
    return (1.0, gap.typical, gap.last, log(gap.out + 8), log(gap.out + 256), log(1 + gap.turns), float(gap.new))


def bin_of(ratio: float) -> float:
    """The bin, with fraction, of an age over scale."""
    if ratio <= 0.0:
        return 0.0
    u = (math.log2(ratio) - LOW) * PER_OCTAVE
    return 0.0 if u < 0.0 else min(u, BINS - 1.001)


class Forecast:
    """Predicts gaps, and says what keeping a page costs: `table[class][bin]`, in scales.  O(1) a use, amortised."""

    def __init__(self) -> None:
        self.weights = [0.0, 1.0] + [0.0] * (FEATURES - 2)
        self._lean = np.array(self.weights) / RIDGE
        self._xx = np.eye(FEATURES) / RIDGE * 0.0
        self._xy = np.zeros(FEATURES)
        self._seen: list[tuple[float, ...]] = []
        # Of each class and bin: uses, and the steps by which the number of chains that waited through it changes.
        self._uses = np.zeros((CLASSES, BINS))
        self._waits = np.zeros((CLASSES, BINS + 1))
        self._new_uses: list[int] = []
        self._new_waits: list[int] = []
        self._count = 0
        self.table = self._cost_table()

    def predict(self, gap: Gap) -> float:
        """Seconds to the next use."""
        log = sum(map(float.__mul__, self.weights, features(gap)))
        return math.exp(min(max(log, -7.0), 14.0))

    def learn(self, gap: Gap, log_gap: float) -> None:
        """The chain that stood as `gap` says was used again after exp(`log_gap`) seconds."""
        self._seen.append((*features(gap), log_gap))

    def waited(self, group: int, first: int, last: int) -> None:
        """A chain has waited through bins `first` up to `last`."""
        self._new_waits.append(group * (BINS + 1) + first)
        self._new_waits.append(~(group * (BINS + 1) + last))

    def used(self, group: int, first: int, at: int) -> None:
        """A chain that was known to have waited up to bin `first` was used in bin `at`."""
        self.waited(group, min(first, at), at + 1)
        self._new_uses.append(group * BINS + at)

    def tick(self) -> None:
        """A request has used a chain; now and then what was seen is worked in."""
        self._count += 1
        if self._count >= REFRESH_USES:
            self._work_in()
            self._count = 0

    # ------------------------------------------------------------------ inside

    def _work_in(self) -> None:
        keep = KEEP_HISTOGRAM**self._count
        self._uses *= keep
        self._waits *= keep
        uses, waits = self._uses.reshape(-1), self._waits.reshape(-1)
        for i in self._new_uses:
            uses[i] += 1
        for i in self._new_waits:
            if i >= 0:
                waits[i] += 1
            else:
                waits[~i] -= 1
        self._new_uses.clear()
        self._new_waits.clear()
        if self._seen:
            self._regress()
        self.table = self._cost_table()

    def _regress(self) -> None:
        seen = np.array(self._seen)
        self._seen.clear()
        x, y = seen[:, :FEATURES], seen[:, FEATURES]
        expected = x @ np.array(self.weights)
        y = expected + np.clip(y - expected, -SURPRISE_MAX, SURPRISE_MAX)
        count = len(y)
        weighted = x * (KEEP_GAPS ** np.arange(count - 1, -1, -1.0))[:, None]
        self._xx = KEEP_GAPS**count * self._xx + weighted.T @ x
        self._xy = KEEP_GAPS**count * self._xy + weighted.T @ y
        self.weights = np.linalg.solve(self._xx + np.eye(FEATURES) / RIDGE, self._xy + self._lean).tolist()

    def _cost_table(self) -> list[list[float]]:
        waits = self._waits.cumsum(axis=1)[:, :BINS]
        pooled = (self._uses.sum(axis=0) + PRIOR_WAITS * PRIOR) / (waits.sum(axis=0) + PRIOR_WAITS)
        hazard = (self._uses + LEAN * pooled) / (waits + LEAN)
        return [cost_row(row) for row in hazard.tolist()]


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
