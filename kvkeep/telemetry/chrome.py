"""Reading traces back: strictly, so that what we write opens elsewhere too.

Must not know what spans mean.  The format is Chrome's Trace Event Format, in its JSON object form.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

#: What an event must have, by phase.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "M": ("name", "pid", "tid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "b": ("name", "cat", "id", "pid", "tid", "ts"),
    "e": ("name", "cat", "id", "pid", "tid", "ts"),
    "i": ("name", "pid", "tid", "ts", "s"),
    "C": ("name", "pid", "ts", "args"),
}

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """From `begin` to `end`, in seconds of the trace.   of: the thing it is of, or its row; cat: "" on a row."""

    pid: int
    cat: str
    of: str
    name: str
    begin: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that `check` has nothing to say of."""

    path: Path
    events: Sequence[Event]
    other: Mapping[str, Any]

    @property
    def processes(self) -> dict[int, str]:
        """Names by number."""
        return {e["pid"]: e["args"]["name"] for e in self.events if e["ph"] == "M" and e["name"] == "process_name"}

    def spans(self) -> list[Span]:
        """Spans of all kinds, by their ends."""
        out: list[Span] = []
        begun: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                of, args = str(event["tid"]), event.get("args", {})
                out.append(Span(event["pid"], "", of, event["name"], begin, end, args))
            elif event["ph"] == "b":
                begun[_thing(event)].append(event)
            elif event["ph"] == "e":
                first = begun[_thing(event)].pop()
                args = {**first.get("args", {}), **event.get("args", {})}
                pid, cat, of = _thing(event)
                out.append(Span(pid, cat, of, event["name"], first["ts"] / 1e6, event["ts"] / 1e6, args))
        return out


def is_trace(found: object) -> bool:
    """Whether a JSON document is a trace, good or bad."""
    return isinstance(found, dict) and "traceEvents" in found


def read_trace(path: Path, found: Mapping[str, Any]) -> Trace:
    """A trace that was read from `path`.  Raises `ValueError` with the first of its faults."""
    faults = check(found)
    if faults:
        more = f", and {len(faults) - 1} faults more" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}")
    return Trace(path, found["traceEvents"], found.get("otherData") or {})


def check(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace, a line for each fault; nothing where all is well."""
    events = found.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is no list"]
    faults = [fault for number, event in enumerate(events) for fault in _check_event(number, event)]
    if faults:
        return faults
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if any(later < earlier for earlier, later in pairwise(times)):
        faults.append("events are not sorted by ts")
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    faults += [f"process {pid} has no name" for pid in sorted({event["pid"] for event in events} - named)]
    return faults + _check_nesting(events) + _check_rows(events)


def _check_event(number: int, event: object) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in REQUIRED:
        phase = event.get("ph") if isinstance(event, dict) else event
        return [f"event {number}: phase {phase!r}; known: {', '.join(REQUIRED)}"]
    faults = [f"event {number} ({event['ph']}): no {key}" for key in REQUIRED[event["ph"]] if key not in event]
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            faults.append(f"event {number}: {key} {value!r}: microseconds from 0 up")
    for key in ("pid", "tid"):
        if not isinstance(event.get(key, 0), int):
            faults.append(f"event {number}: {key} {event[key]!r}: it must be a whole number")
    if not isinstance(event.get("name", ""), str) or not event.get("name", "-"):
        faults.append(f"event {number}: name {event['name']!r}")
    if event["ph"] == "C" and not faults:
        bad = [v for v in event["args"].values() if isinstance(v, bool) or not isinstance(v, int | float)]
        faults += [f"event {number}: counter {event['name']} says {value!r}" for value in bad]
    return faults


def _check_nesting(events: Sequence[Event]) -> list[str]:
    """Spans of one thing are brackets."""
    faults, begun = [], defaultdict[tuple[Any, ...], list[str]](list)
    for event in events:
        if event["ph"] == "b":
            begun[_thing(event)].append(event["name"])
        elif event["ph"] == "e":
            stack = begun[_thing(event)]
            if not stack or stack[-1] != event["name"]:
                faults.append(f"{_thing(event)}: {event['name']!r} ends while {stack[-1:]} is open")
            else:
                stack.pop()
    return faults + [f"{thing}: {stack[-1]!r} does not end" for thing, stack in begun.items() if stack]


def _check_rows(events: Sequence[Event]) -> list[str]:
    """Spans of one row lie in each other, or apart.  Rounded times may touch."""
    faults, rows = [], defaultdict[tuple[int, int], list[Event]](list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row, spans in rows.items():
        ends: list[float] = []
        for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
            while ends and ends[-1] <= span["ts"] + 0.002:
                ends.pop()
            end = span["ts"] + span["dur"]
            if ends and end > ends[-1] + 0.002:
                faults.append(f"row {row}: {span['name']!r} at {span['ts']} us ends after what it began in")
            ends.append(end)
    return faults


def _thing(event: Event) -> tuple[Any, ...]:
    return event["pid"], event["cat"], str(event["id"])


def load(path: Path) -> object:
    """The JSON document of a file.  Raises `OSError` and `ValueError`."""
    return json.loads(path.read_text(encoding="utf-8"))
