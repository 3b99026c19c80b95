"""The recorder and the strict reader of what it writes."""

from pathlib import Path
from typing import Any

import pytest

from kvkeep.telemetry.chrome import check, read_trace
from kvkeep.telemetry.trace import Recorder, add_series, current, recording


class Clock:
    """Nanoseconds that are set."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


def recorded() -> tuple[Recorder, Clock]:
    """A request that queues, is computed and ends, beside a row of forwards and a counter."""
    clock = Clock()
    to = Recorder(clock=clock)
    pid = to.process("engine")
    to.thread(pid, 1, "forwards")
    to.span(pid, 1, "prefill", 1_500_000, 1_900_000, {"prompt_tokens": 5})
    to.begin(pid, "request", "0", "request 0", 1_100_000)  # told late, as of a request that waited
    to.begin(pid, "request", "0", "queued", 1_100_000)
    to.end(pid, "request", "0", "queued", 1_500_000)
    to.counter(pid, "pages", 1_600_000, {"free": 3})
    clock.now = 2_000_000
    to.instant(pid, 2, "GPU: evicted", {"pages": 4})
    to.end(pid, "request", "0", "request 0", 2_000_000, {"output_tokens": 1})
    return to, clock


def test_trace_is_what_perfetto_opens_sorted_and_in_microseconds() -> None:
    """Whatever order things were told in."""
    to, _ = recorded()
    found = to.to_json()
    assert [] == check(found)
    first = next(event for event in found["traceEvents"] if event["ph"] == "b")
    assert 100.0 == first["ts"]
    spans = {span.name: span for span in read_trace(Path("t"), found).spans()}
    assert (0.0001, 0.001) == (spans["request 0"].begin, spans["request 0"].end)
    assert 1 == spans["request 0"].args["output_tokens"]


def test_span_that_has_not_ended_is_cut_where_the_trace_ends() -> None:
    """An interrupted run leaves a trace that opens."""
    to, clock = recorded()
    to.begin(1, "request", "1", "request 1", 2_100_000)
    to.begin(1, "request", "1", "queued", 2_100_000)
    clock.now = 2_500_000
    to.instant(1, 2, "stopped", {})
    found = to.to_json()
    assert [] == check(found)
    ends = [event for event in found["traceEvents"] if event["ph"] == "e" and event["id"] == "1"]
    assert ["queued", "request 1"] == [event["name"] for event in ends]
    assert {1500.0} == {event["ts"] for event in ends}


def test_recorder_keeps_so_many_events_and_says_how_many_it_dropped() -> None:
    """Memory is bounded, and what is there still opens."""
    clock = Clock()
    to = Recorder(events_max=3, clock=clock)
    pid = to.process("engine")
    for number in range(4):
        to.begin(pid, "request", str(number), "request", 2_000_000 + number)
        to.end(pid, "request", str(number), "request", 2_000_000 + number)
    found = to.to_json()
    assert [] == check(found)
    assert 2 == found["otherData"]["events_dropped"]


def _unsorted(events: list[dict[str, Any]]) -> None:
    events.reverse()


def _open(events: list[dict[str, Any]]) -> None:
    events.remove(next(event for event in events if event["ph"] == "e"))


def _crossing(events: list[dict[str, Any]]) -> None:
    ends = [event for event in events if event["ph"] == "e"]
    ends[0]["name"], ends[1]["name"] = ends[1]["name"], ends[0]["name"]


def _unnamed(events: list[dict[str, Any]]) -> None:
    events.remove(next(event for event in events if event["name"] == "process_name"))


def _without_ts(events: list[dict[str, Any]]) -> None:
    del next(event for event in events if event["ph"] == "C")["ts"]


def _overlapping(events: list[dict[str, Any]]) -> None:
    events.append({"ph": "X", "name": "late", "pid": 1, "tid": 1, "ts": 800.0, "dur": 900.0, "args": {}})
    events.sort(key=lambda event: float(event["ts"]))


def _words(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["ph"] == "C")["args"]["free"] = "three"


@pytest.mark.parametrize("spoil", [_unsorted, _open, _crossing, _unnamed, _without_ts, _overlapping, _words])
def test_reader_finds_what_would_not_open(spoil: Any) -> None:
    """Each fault alone."""
    found = recorded()[0].to_json()
    spoil(found["traceEvents"])
    assert check(found)


def test_recorder_is_found_while_it_records_and_not_afterwards() -> None:
    """Nothing is recorded unless somebody asks."""
    assert current() is None
    with recording(Recorder()) as recorder:
        assert recorder is current()
    assert current() is None


def test_machine_samples_are_counters_on_the_same_clock() -> None:
    """Seconds become microseconds of the trace; samples from before it, and missing ones, are left out."""
    to, _ = recorded()
    pid = to.process("machine")
    add_series(to, pid, [{"name": "rss", "unit": "bytes", "times_s": [0.0005, 0.0012, 0.0015], "values": [1, 7, None]}])
    found = [event for event in to.to_json()["traceEvents"] if event["ph"] == "C" and event["pid"] == pid]
    assert [(200.0, {"rss": 7})] == [(event["ts"], event["args"]) for event in found]
