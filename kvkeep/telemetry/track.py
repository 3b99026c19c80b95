"""One counter while it is sampled: how often it changes, when it is due, what it said, why it says nothing any more.

Must not know what is counted, or which thread asks.

A counter that changes at a pace of its own is read again and again before the run, until the time between changes is
known; afterwards it is read no oftener.  Nor is one so often that its reads take more than 1 / 5,000 of a core.
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from threading import Lock

from kvkeep.telemetry.counters import Answer, Counter, CounterMissing, NoAnswer
from kvkeep.telemetry.series import Series

#: Of the time, that a counter's reads may take: of a processor, and of waiting until a window is over.
CPU_SHARE_MAX = 0.0002
WINDOW_SHARE_MAX = 0.1
#: The time between changes is the median of what lies between so many; of fewer gaps than two it is not told.
CHANGES_WANTED = 9
GAPS_MIN = 2
#: A counter that failed so often in a row is not asked any more.
FAILURES_MAX = 20
#: Reads that tell what a read costs.
COST_READS = 3
#: How long a reader waits for another one of the same counter: longer only where a call does not come back.
READER_WAIT_S = 1.0

Clock = Callable[[], float]


class Track:
    """A counter, and its samples so far.

    clock: seconds, those of the samples.   cpu_clock: seconds of processor time of the calling thread.
    interval_s: what lies between two reads at least.   due_s: when the next one is due.
    update_s: time between changes; None where it was not found out.   changes: so many were seen while looking for it.
    cpu_s: processor time of a read.
    ended: why there are no more answers; ended_s: since when.
    failures: reads without an answer; failure: what the last one said.
    """

    def __init__(self, counter: Counter, interval_s: float, samples_max: int, clock: Clock, cpu_clock: Clock) -> None:
        self.counter = counter
        self.series = Series(counter.fields, samples_max)
        self.update_s: float | None = None
        self.changes = 0
        self.cpu_s = 0.0
        self.due_s = clock()
        self.ended: str | None = None
        self.ended_s = 0.0
        self.failures = 0
        self.failure: str | None = None
        self._failed_in_a_row = 0
        self._last_cpu_s = 0.0
        self._interval_s = interval_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._reading = Lock()  # one read of a counter at a time, so that its samples are in order
        self._changed_s: list[float] = []
        self._seen: Answer | None = None

    @property
    def interval_s(self) -> float:
        """No less than the time between changes, and than what keeps its reads cheap."""
        window_s = self.counter.window_s / WINDOW_SHARE_MAX
        return max(self._interval_s, self.update_s or 0.0, window_s, self.cpu_s / CPU_SHARE_MAX)

    # ------------------------------------------------------------------ before the run

    @property
    def pace_is_open(self) -> bool:
        """Whether looking on may still tell how often it changes."""
        return self.counter.updates == "paced" and self.ended is None and self.changes < CHANGES_WANTED

    def price(self) -> bool:
        """Finds out what a read costs; whether there are answers at all."""
        costs = []
        for _ in range(1 if self.counter.updates == "window" else COST_READS):
            before = self._cpu_clock()
            self._look()
            costs.append(self._cpu_clock() - before)
            if self.ended is not None:
                return False
        self.cpu_s = self._last_cpu_s = median(costs)
        return True

    def look(self) -> bool:
        """Reads, only to see whether it has changed since the last time; whether there was an answer."""
        answer = self._look()
        if answer is None:
            return False
        if self._seen is not None and answer != self._seen:
            self.changes += 1
            self._changed_s.append(self._clock())
        self._seen = answer
        gaps = [after - before for before, after in pairwise(self._changed_s)]
        if len(gaps) >= GAPS_MIN:
            self.update_s = median(gaps)
        return True

    def _look(self) -> Answer | None:
        try:
            return tuple(self.counter.read())
        except NoAnswer:
            return None  # it is asked again, and what it does in the run is counted
        except CounterMissing as error:
            self.end(str(error))
            return None

    # ------------------------------------------------------------------ in the run

    def take(self) -> bool:
        """Reads, and keeps the answer; whether there was one.  Raises `SourceLost`.  Any thread may."""
        if not self._reading.acquire(timeout=READER_WAIT_S):
            return False
        try:
            return self.ended is None and self._take()
        finally:
            self._reading.release()

    def end(self, why: str) -> None:
        """There are no more answers."""
        if self.ended is None:
            self.ended, self.ended_s = why, self._clock()

    def _take(self) -> bool:
        began_s, cpu_s = self._clock(), self._cpu_clock()
        answer: Answer | None = None
        try:
            answer = tuple(self.counter.read())
            self._failed_in_a_row = 0
        except NoAnswer as error:
            self._failed(str(error))
        except CounterMissing as error:
            self.end(str(error))
            return False
        ended_s = self._clock()
        last, self._last_cpu_s = self._last_cpu_s, self._cpu_clock() - cpu_s
        self.cpu_s = min(last, self._last_cpu_s)  # one slow read does not make a slow counter
        self.series.add((began_s + ended_s) / 2, answer or [None] * len(self.counter.fields))
        self.due_s = ended_s + self.interval_s
        return answer is not None

    def _failed(self, why: str) -> None:
        self.failures += 1
        self.failure = why
        self._failed_in_a_row += 1
        if self._failed_in_a_row == FAILURES_MAX:
            self.end(f"not asked any more after {FAILURES_MAX} failures in a row, the last one: {why}")
