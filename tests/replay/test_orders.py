"""In which order requests come."""

import numpy as np
import pytest

from kvkeep.errors import BadInput
from kvkeep.replay.orders import Order
from kvkeep.replay.trace import Clock, Request, Trace


def trace(clock: Clock, *sessions: list[float]) -> Trace:
    """Sessions of requests at the given times; prompts number them 1, 2, ..."""
    made = [
        [Request(number, 0, k + 1, k + 1, k + 1, time_s) for k, time_s in enumerate(times)]
        for number, times in enumerate(sessions)
    ]
    return Trace("t", "0", None, [np.zeros(9, dtype=np.int32)], made, clock)


def shown(order: str, of: Trace, sessions: int | None = None) -> list[tuple[int, int, float]]:
    """(session, which of its requests, seconds)."""
    return [(r.session, r.prompt_len, r.time_s) for r in Order.parse(order).arrivals(of, sessions).requests]


def test_rotation():
    """A session that ends gives its seat to the next of the trace, whose first request is in the next round."""
    arrivals = Order("rotate", 2).arrivals(trace("none", [0], [0, 0], [], [0, 0, 0]))
    assert not arrivals.timed
    assert [(0, 1), (1, 1), (3, 1), (1, 2), (3, 2), (3, 3)] == [(r.session, r.prompt_len) for r in arrivals.requests]
    assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] == [r.time_s for r in arrivals.requests]
    arrivals = Order("rotate", 2).arrivals(trace("none", [0, 0], [0], [0, 0]))
    assert [(0, 1), (1, 1), (0, 2), (2, 1), (2, 2)] == [(r.session, r.prompt_len) for r in arrivals.requests]


def test_recorded():
    """By time, and where it is equal by place in the trace."""
    of = trace("shared", [5, 7], [1, 5], [5])
    assert [(1, 1, 1), (0, 1, 5), (1, 2, 5), (2, 1, 5), (0, 2, 7)] == shown("recorded", of)
    assert [(1, 1, 1), (0, 1, 5), (1, 2, 5), (0, 2, 7)] == shown("recorded", of, 2)


def test_open():
    """Sessions begin 7 s apart and keep their own pace; the next begins 30 s after one has ended."""
    of = trace("session", [100, 101], [0, 50], [3, 2], [8])
    assert [(0, 1, 0), (0, 2, 1), (1, 1, 7), (2, 2, 31), (2, 1, 32), (1, 2, 57), (3, 1, 62)] == shown("open:2", of)


@pytest.mark.parametrize(
    ("order", "clock", "words"),
    [
        ("recorded", "none", "has no times"),
        ("open:2", "none", "has no times"),
        ("recorded", "session", "begin anew"),
    ],
)
def test_times_that_are_not_there_are_not_made_up(order: str, clock: Clock, words: str):
    """An order by time is refused where the trace has none, or none that can be compared."""
    with pytest.raises(BadInput, match=words):
        Order.parse(order).arrivals(trace(clock, [1], [2]))


@pytest.mark.parametrize("text", ["rr8", "rotate", "rotate:0", "rotate:x", "open:-1", "recorded:2", ""])
def test_an_unknown_order_is_refused(text: str):
    """The message lists what there is."""
    with pytest.raises(BadInput, match="recorded, rotate:N or open:N"):
        Order.parse(text)
