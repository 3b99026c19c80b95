"""When will a chain be used again?  Learned from the uses seen so far.

Must not know pages, runs or tiers: it is told of gaps between uses and of chains that still wait.

1. Scale.  A ridge regression, fed while serving, predicts the logarithm of the gap to a chain's next use from its own
   gaps and the length of its last completion.  Before any data it answers "as long as the last time".
2. Rhythm.  Age over scale goes into a histogram of uses, and of chains that waited through each bin, so that those
   that never come back count; one for each class of turns, leaning on what all classes have in common.
3. Pause.  A chain that has waited eight times its scale has left its rhythm, and the scale tells no more.  From there
   on all chains are alike, in one histogram of ages in seconds, and what has waited longer never costs less.
4. Cost.  What keeping a page costs for each hit it brings: the least, over all horizons, of the expected waiting over
   the chance of a use within the horizon (a Gittins index).  Where gaps are certain that is the time left, as in
   Belady's order; in a pause it only grows with age, as in LRU.
"""

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import log2
from typing import Any, Protocol

import numpy as np

#: Ages over scale in bins of a quarter of an octave, from 2**-4 to 2**4.
LOW, PER_OCTAVE, BINS = -4.0, 4, 32
#: Below this age over scale there is one bin; from that one on a chain is in a pause.
YOUNG, PAUSE = 2.0**LOW, 8.0
#: Ages in a pause, in bins of half an octave, from 2**-4 seconds to 12 days.
PAUSE_LOW, PAUSE_PER_OCTAVE, PAUSE_BINS = -4.0, 2, 48
#: Classes of chains: those that went on 0, 1-3, 4-15 and more times; and those whose return was announced.
ANNOUNCED, CLASSES = 4, 5
#: Uses after which costs are computed afresh, at first and after that many uses; then the regression every second time.
REFRESH_USES_FIRST, REFRESH_USES, SETTLED_USES = 32, 128, 1024
#: What a use still counts in the histogram after as many more: a memory of about 1,250 uses.
KEEP_HISTOGRAM = 0.9992
#: Hazard of a bin before any data, and how many waits that is worth; how many waits the pooled curve is worth.
PRIOR, PRIOR_WAITS, LEAN = 0.1, 4.0, 16.0
#: What a gap still counts in the regression after one more; variance of its prior; the most it moves by one gap (log).
KEEP_GAPS, RIDGE, SURPRISE_MAX = 0.998, 3.0, 2.0
#: Tokens of a completion from which on its length tells in the gap; of shorter ones all are alike.
OUT_TOKENS = 256

#: Predicted gaps are kept between a millisecond and two weeks (log).
LOG_GAP_MIN, LOG_GAP_MAX = -7.0, 14.0


def edges(low: float, per_octave: int, bins: int) -> list[float]:
    """Where the bins begin and end; the first begins at 0."""
    return [0.0, *(2.0 ** (low + b / per_octave) for b in range(1, bins + 1))]


_WIDTHS = [b - a for a, b in pairwise(edges(LOW, PER_OCTAVE, BINS))]
_PAUSE_WIDTHS = [b - a for a, b in pairwise(edges(PAUSE_LOW, PAUSE_PER_OCTAVE, PAUSE_BINS))]
# All histograms lie in one array: a row for each class, then the pauses'; each has a place more than bins.
_ROW = BINS + 1
_PAUSES = CLASSES * _ROW
_PLACES = _PAUSES + PAUSE_BINS + 1


def class_of(turns: int) -> int:
    """The class of a chain that went on `turns` times."""
    return min((turns.bit_length() + 1) // 2, ANNOUNCED - 1)


def bin_of(ratio: float) -> int:
    """The bin of an age over scale; BINS behind the last one."""
    return min(int((log2(ratio) - LOW) * PER_OCTAVE), BINS) if ratio > YOUNG else 0


def pause_bin_of(age: float) -> int:
    """The bin of an age in a pause, in seconds."""
    return min(int((log2(age) - PAUSE_LOW) * PAUSE_PER_OCTAVE), PAUSE_BINS - 1) if age > 2.0**PAUSE_LOW else 0


def bins(values: Any, low: float, per_octave: int, last: int) -> Any:
    """The bins of many values."""
    found = (np.log2(np.maximum(values, 2.0**low)) - low) * per_octave
    return np.minimum(found.astype(np.intp), last)


class Waiting(Protocol):
    """A chain that waits for its next use.

    scale: in how many seconds it is expected.   group: its class.
    counted, paused: up to which bin the forecast knows that it waited, in its rhythm and in a pause (-1: in none yet).
    """

    @property
    def scale(self) -> float: ...
    @property
    def group(self) -> int: ...
    @property
    def counted(self) -> int: ...
    @property
    def paused(self) -> int: ...


class Forecast:
    """Predicts gaps, and says what keeping a page costs.  O(1) a use, amortised.

    table: costs by class and bin, in scales.   pause: by bin of a pause, in seconds.
    Of a chain it is told `typical` and `last`, its smoothed and its last gap (logarithms of seconds), and `log_out` of
    its last completion.
    """

    table: list[list[float]]
    pause: list[float]

    def __init__(self) -> None:
        self._weights = [0.0, 1.0, 0.0, 0.0]  # of 1, typical, last and log_out
        self._lean = np.array(self._weights) / RIDGE
        self._xx = np.zeros((4, 4))
        self._xy = np.zeros(4)
        self._gaps = array("d")  # in fours
        # By place: uses, and the steps by which the number of chains that waited through it changes.
        self._uses = np.zeros(_PLACES)
        self._waits = np.zeros(_PLACES)
        self._new_uses = array("i")
        self._new_first = array("i")
        self._new_last = array("i")
        self._count = self._total = self._refreshed = 0
        self._tabulate()

    @staticmethod
    def log_out(out: int) -> float:
        """What the forecast is told of a completion of `out` tokens."""
        return math.log(out + OUT_TOKENS)

    def predict(self, typical: float, last: float, log_out: float) -> float:
        """Seconds to the next use."""
        one, of_typical, of_last, of_out = self._weights
        log = one + of_typical * typical + of_last * last + of_out * log_out
        if log < LOG_GAP_MIN:
            log = LOG_GAP_MIN
        elif log > LOG_GAP_MAX:
            log = LOG_GAP_MAX
        return math.exp(log)

    def learn(self, typical: float, last: float, log_out: float, found: float) -> None:
        """A chain was used again after exp(`found`) seconds."""
        self._gaps.extend((typical, last, log_out, found))

    def waited(self, chains: dict[str, Any], some: Any, now_s: float) -> None:
        """`some` chains, each of them once, still wait: columns as in `Waiting`, and `ended_s`."""
        scale, age = chains["scale"][some], now_s - chains["ended_s"][some]
        first, last = chains["counted"][some], bins(age / scale, LOW, PER_OCTAVE, BINS)
        chains["counted"][some] = last = np.maximum(first, last)
        self._add_waits(chains["group"][some] * _ROW, first, last)
        there = np.flatnonzero(age > PAUSE * scale)
        some, scale, age = some[there], scale[there], age[there]
        first = chains["paused"][some]
        first = np.where(first < 0, bins(PAUSE * scale, PAUSE_LOW, PAUSE_PER_OCTAVE, PAUSE_BINS - 1), first)
        last = bins(age, PAUSE_LOW, PAUSE_PER_OCTAVE, PAUSE_BINS - 1)
        chains["paused"][some] = last = np.maximum(first, last)
        self._add_waits(_PAUSES, first, last)

    def used(self, chain: Waiting, gap: float) -> None:
        """`chain` was used after `gap` seconds, and now waits no more."""
        at = bin_of(gap / chain.scale)
        self._use(chain.group * _ROW, min(chain.counted, at), at, BINS)
        if gap > PAUSE * chain.scale:
            at = pause_bin_of(gap)
            first = chain.paused if chain.paused >= 0 else pause_bin_of(PAUSE * chain.scale)
            self._use(_PAUSES, min(first, at), at, PAUSE_BINS)

    def tick(self) -> bool:
        """A request has used a chain; now and then what was seen is worked in.   True: it is time to tell of waits."""
        self._count += 1
        if self._count < (REFRESH_USES_FIRST if self._total < SETTLED_USES else REFRESH_USES):
            return False
        self._total += self._count
        self._count_up(KEEP_HISTOGRAM**self._count)
        self._count = 0
        self._tabulate()
        self._refreshed += 1
        if self._total > SETTLED_USES and self._refreshed % 2:
            return False
        self._regress()
        return True

    # ------------------------------------------------------------------ inside

    def _use(self, row: int, first: int, at: int, count: int) -> None:
        """A use in bin `at` of `count`, or behind them, of a chain that was known to have waited up to bin `first`."""
        self._new_first.append(row + first)
        if at < count:
            self._new_uses.append(row + at)
            at += 1
        self._new_last.append(row + at)

    def _add_waits(self, row: Any, first: Any, last: Any) -> None:
        self._waits += np.bincount(row + first, minlength=_PLACES)
        self._waits -= np.bincount(row + last, minlength=_PLACES)

    def _count_up(self, keep: float) -> None:
        """What was counted before is worth `keep` of what was counted since."""
        self._uses = keep * self._uses + count_places(self._new_uses)
        self._waits = keep * self._waits + count_places(self._new_first) - count_places(self._new_last)

    def _regress(self) -> None:
        if not self._gaps:
            return
        seen = np.array(self._gaps).reshape(-1, 4)
        del self._gaps[:]
        count = len(seen)
        y = seen[:, 3].copy()
        seen[:, 1:] = seen[:, :3]
        seen[:, 0] = 1.0
        expected = (seen * self._weights).sum(axis=1)
        y = expected + np.clip(y - expected, -SURPRISE_MAX, SURPRISE_MAX)
        weighted = seen * (KEEP_GAPS ** np.arange(count - 1, -1, -1.0))[:, None]
        keep = KEEP_GAPS**count
        # Without BLAS: its threads may wait for milliseconds for a processor, and we hold the cache's lock.
        self._xx = keep * self._xx + np.einsum("gi,gj->ij", weighted, seen)
        self._xy = keep * self._xy + (weighted * y[:, None]).sum(axis=0)
        self._weights = solve((self._xx + np.eye(4) / RIDGE).tolist(), (self._xy + self._lean).tolist())

    def _tabulate(self) -> None:
        waits = self._waits.cumsum()
        uses, pause_uses = self._uses[:_PAUSES].reshape(CLASSES, _ROW)[:, :BINS], self._uses[_PAUSES:-1]
        waits, pause_waits = waits[:_PAUSES].reshape(CLASSES, _ROW)[:, :BINS], waits[_PAUSES:-1]
        pooled = (uses.sum(axis=0) + PRIOR_WAITS * PRIOR) / (waits.sum(axis=0) + PRIOR_WAITS)
        hazard = (uses + LEAN * pooled) / (waits + LEAN)
        known = (waits[:, 0] > 0.5).tolist()
        common = cost_row(pooled.tolist(), _WIDTHS)
        self.table = [
            cost_row(row, _WIDTHS) if any_ else common for row, any_ in zip(hazard.tolist(), known, strict=True)
        ]
        hazard = (pause_uses + PRIOR_WAITS * PRIOR) / (pause_waits + PRIOR_WAITS)
        pause = np.maximum.accumulate(cost_row(hazard.tolist(), _PAUSE_WIDTHS))
        self.pause = (pause * (1.0 + 1e-6 * np.arange(PAUSE_BINS + 1))).tolist()  # where it is level, the older first


def count_places(places: "array[int]") -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """How often each place is in the array, which is emptied."""
    counts = np.bincount(np.array(places), minlength=_PLACES)
    del places[:]
    return counts


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


def cost_row(hazard: Sequence[float], widths: Sequence[float]) -> list[float]:
    """For each bin, the least waiting for a use over all horizons, in the bins' unit; the last value twice.

    Seen from the right, a bin joins the stretch behind it while that has the smaller cost: the stretches are the
    edges of a lower convex hull, so this takes O(bins).
    """
    bins = len(hazard)
    row = [0.0] * (bins + 1)
    stack: list[tuple[float, float, float, float]] = []  # waiting, chance of a use, chance of none, cost
    for b in range(bins - 1, -1, -1):
        chance = min(hazard[b], 0.999)
        left = 1.0 - chance
        waiting = widths[b] * (1.0 - 0.5 * chance)
        cost = waiting / chance
        while stack and stack[-1][3] <= cost:
            w, c, s, _ = stack.pop()
            waiting += left * w
            chance += left * c
            left *= s
            cost = waiting / chance
        stack.append((waiting, chance, left, cost))
        row[b] = cost
    row[bins] = row[bins - 1]
    return row
