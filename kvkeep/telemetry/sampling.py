"""A thread that reads counters when they are due.

Must not know what is counted.

    look     what a read costs, how often each counter changes; a first sample of each
    start    a thread
    step     in the thread: what is due is read
    stop     the thread ends; a last sample of each, so that what rises is known to the end
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Protocol

from kvkeep.config import check_int
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.telemetry.counters import Counter, SourceLost
from kvkeep.telemetry.track import Clock, Track

#: Between two looks at the counters whose pace is looked for: what a pace is known to.
LOOK_S = 0.002
#: What becomes due so soon after something else is read together with it: one waking for all of them.
GATHER_S = 0.005
#: How long `stop` waits for a call that does not come back.
STOP_S = 5.0


class Stopping(Protocol):
    """What a `threading.Event` does of it."""

    def set(self) -> None:
        """The end has come."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the end has come, so many seconds at most; whether it has."""


@dataclass(frozen=True, slots=True)
class Settings:
    """interval_s: seconds between two samples of a counter at least.
    probe_s: seconds before the run, at most, in which it is found out how often counters change; 0: not.
    samples_max: samples that are kept of each, 16 to 48 bytes a sample.
    """

    interval_s: float = 0.2
    probe_s: float = 1.5
    samples_max: int = 4096

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise BadInput(f"interval_s is {self.interval_s!r}: it must be a number of seconds above 0")
        if not self.probe_s >= 0:
            raise BadInput(f"probe_s is {self.probe_s!r}: it must be a number of seconds, or 0")
        check_int("samples_max", self.samples_max, at_least=2)


@dataclass(frozen=True, slots=True)
class Lost:
    """A source that is gone.   time_s: since when."""

    why: str
    time_s: float


class Sampler:
    """Samples these counters from `start` to `stop`; before that, `look`.

    lost: sources that are gone.   thread_cpu_s: processor time of its thread; None before it has ended.
    stuck: why the thread did not end; it ends with the process.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        settings: Settings,
        *,
        clock: Clock = time.perf_counter,
        cpu_clock: Clock = time.thread_time,
        stopping: Stopping | None = None,
    ) -> None:
        self.tracks = [
            Track(counter, settings.interval_s, settings.samples_max, clock, cpu_clock) for counter in counters
        ]
        self.lost: dict[str, Lost] = {}
        self.thread_cpu_s: float | None = None
        self.stuck: str | None = None
        self._probe_s = settings.probe_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._stopping = stopping if stopping is not None else Event()
        self._started = False
        self._thread: Thread | None = None
        self._failed: BaseException | None = None

    # ------------------------------------------------------------------ for the one who measures

    def look(self) -> None:
        """Finds out what reads cost and how often counters change, `probe_s` at most; then a first sample of each."""
        self._probe()
        self._ends()

    def start(self) -> None:
        """Begins to sample, once."""
        if self._started:
            raise InvariantViolation("a sampler is started once")
        self._started = True
        self._thread = Thread(target=self._run, name="kvkeep-telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread.  Raises what it died of, if that was a bug."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join(STOP_S)
        if thread.is_alive():
            self.stuck = f"a call did not come back for {STOP_S:g} s: its thread is left to the end of the process"
            return
        self._ends()
        if self._failed is not None:
            raise self._failed

    def track(self, name: str) -> Track | None:
        """The counter with a field of this name; None where it is not sampled."""
        named = (track for track in self.tracks if any(field.name == name for field in track.counter.fields))
        return next(named, None)

    def __getitem__(self, name: str) -> Track:
        """The counter with a field of this name."""
        track = self.track(name)
        if track is None:
            raise InvariantViolation(f"there is no counter {name}")
        return track

    def read_now(self, name: str) -> bool:
        """Takes a sample of this counter in the calling thread; whether there was an answer."""
        return self._take(self[name])

    # ------------------------------------------------------------------ inside

    def _probe(self) -> None:
        for track in self.tracks:
            self._guarded(track, track.price)
        until_s = self._clock() + self._probe_s
        while self._clock() < until_s:
            open_ones = [track for track in self.tracks if track.pace_is_open]
            if not open_ones or self._stopping.wait(LOOK_S):
                return
            for track in open_ones:
                self._guarded(track, track.look)

    def _ends(self) -> None:
        """One sample of all but those that would hold up the caller for a window."""
        for track in self.tracks:
            if track.counter.updates != "window":
                self._take(track)

    def _run(self) -> None:
        began_s = self._cpu_clock()
        try:
            while not self._stopping.wait(self._step()):
                pass
        except BaseException as error:  # it is raised by `stop`
            self._failed = error
        finally:
            self.thread_cpu_s = self._cpu_clock() - began_s

    def _step(self) -> float | None:
        """Reads what is due; seconds until something is again, None when nothing ever will be."""
        now_s = self._clock()
        for track in self.tracks:
            if track.due_s <= now_s:
                self._take(track)
        due_s = min((track.due_s for track in self.tracks if track.ended is None), default=None)
        return None if due_s is None else max(0.0, due_s + GATHER_S - self._clock())

    def _take(self, track: Track) -> bool:
        return self._guarded(track, track.take)

    def _guarded(self, track: Track, read: Callable[[], bool]) -> bool:
        """Reads, unless the counter has ended, and notices when its source is lost; whether there was an answer."""
        try:
            return track.ended is None and read()
        except SourceLost as error:
            source = track.counter.source
            self.lost[source] = Lost(str(error), self._clock())
            for one in self.tracks:
                if one.counter.source == source:
                    one.end(str(error))
            return False
