"""The trace of a run: spans, instants and counters on one clock, in the format that Perfetto and chrome://tracing open.

Must not know what a span means: whoever runs something names it.  Nothing is recorded unless somebody asks for it.

    with recording(Recorder()) as recorder:      # what begins in here finds it by `current()`
        ...
    recorder.to_json()                           # what a file holds

Times are those of `time.perf_counter_ns`, written in microseconds since the recorder began.  A process of the trace is
an engine, or the machine; a thread is a row of it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kvkeep.config import check_int

#: About 200 bytes each; what comes after so many is counted and left out.
EVENTS_MAX = 1_000_000

Args = Mapping[str, Any]

_current: ContextVar["Recorder | None"] = ContextVar("kvkeep_recorder", default=None)


class Recorder:
    """Events so far.   Any thread may record: an event is appended whole.

    events_max: after so many, events are dropped, and `dropped` counts them; spans that have begun still end.
    clock: nanoseconds that never go back.
    """

    def __init__(self, *, events_max: int = EVENTS_MAX, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        check_int("events_max", events_max, at_least=1)
        self.now = clock
        self.began_ns = clock()
        self.dropped = 0
        self.other: dict[str, Any] = {}
        self._events_max = events_max
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._named: list[dict[str, Any]] = []
        self._processes = 0
        self._open: set[tuple[int, str, str, str]] = set()

    # ------------------------------------------------------------------ what is recorded

    def process(self, name: str) -> int:
        """A new process of the trace; its number."""
        self._processes += 1
        self._name("process_name", self._processes, 0, name)
        return self._processes

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Names a row of a process."""
        self._name("thread_name", pid, tid, name)

    def span(self, pid: int, tid: int, name: str, begin_ns: int, end_ns: int, args: Args) -> None:
        """Something that is over, on a row where nothing else runs meanwhile but what it contains."""
        self._add(begin_ns, {"ph": "X", "name": name, "pid": pid, "tid": tid, "args": args, "dur": end_ns - begin_ns})

    def begin(self, pid: int, cat: str, of: str, name: str, at_ns: int, args: Args | None = None) -> None:
        """A span begins, of the thing `of` (a request, a copy); spans of one thing nest, things overlap freely."""
        event = {"ph": "b", "name": name, "cat": cat, "id": of, "pid": pid, "tid": 0, "args": args or {}}
        if self._add(at_ns, event):
            self._open.add((pid, cat, of, name))

    def end(self, pid: int, cat: str, of: str, name: str, at_ns: int, args: Args | None = None) -> None:
        """It ends; nothing where its beginning was not recorded."""
        if (pid, cat, of, name) in self._open:
            self._open.discard((pid, cat, of, name))
            event = {"ph": "e", "name": name, "cat": cat, "id": of, "pid": pid, "tid": 0, "args": args or {}}
            self._events.append((at_ns, event))

    def instant(self, pid: int, tid: int, name: str, args: Args) -> None:
        """Something happened now."""
        self._add(self.now(), {"ph": "i", "s": "p", "name": name, "pid": pid, "tid": tid, "args": args})

    def counter(self, pid: int, name: str, at_ns: int, values: Mapping[str, float]) -> None:
        """Numbers of that moment; several are stacked."""
        self._add(at_ns, {"ph": "C", "name": name, "pid": pid, "tid": 0, "args": values})

    def _add(self, at_ns: int, event: dict[str, Any]) -> bool:
        if len(self._events) >= self._events_max:
            self.dropped += 1
            return False
        self._events.append((at_ns, event))
        return True

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._named.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}})

    # ------------------------------------------------------------------ the file

    def to_json(self) -> dict[str, Any]:
        """The trace, sorted by time; spans that have not ended end with the last event."""
        events = list(self._events)
        last = max((at + event.get("dur", 0) for at, event in events), default=self.began_ns)
        began = {
            (e["pid"], e["cat"], e["id"], e["name"]): (at, n) for n, (at, e) in enumerate(events) if e["ph"] == "b"
        }
        for pid, cat, of, name in sorted(self._open, key=lambda key: began[key], reverse=True):
            event = {"ph": "e", "name": name, "cat": cat, "id": of, "pid": pid, "tid": 0, "args": {"cut": True}}
            events.append((last, event))
        events.sort(key=lambda pair: pair[0])  # stable: of one moment, in the order in which they were recorded
        out = []
        for at, event in events:
            timed: dict[str, Any] = {**event, "ts": _us(at - self.began_ns)}
            if "dur" in event:
                timed["dur"] = _us(timed["dur"])
            out.append(timed)
        other = {**self.other, "events_dropped": self.dropped}
        return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [*self._named, *out]}


def current() -> Recorder | None:
    """The recorder of the run that we are in; None where nothing is recorded."""
    return _current.get()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """What begins in here is recorded."""
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)


def add_series(recorder: Recorder, pid: int, series: list[dict[str, Any]]) -> None:
    """The samples of a machine's telemetry (`MachineTelemetry.to_json()["series"]`) as counters of a process."""
    for one in series:
        name = f"{one['name']} [{one['unit']}]"
        for time_s, value in zip(one["times_s"], one["values"], strict=True):
            at_ns = round(time_s * 1e9)
            if value is not None and at_ns >= recorder.began_ns:
                recorder.counter(pid, name, at_ns, {one["name"]: value})


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)
