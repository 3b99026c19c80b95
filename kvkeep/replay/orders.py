"""In which order, and when, the requests of a trace come.

Must not know pages or caches.

    rotate:N    N sessions open, a request of each in turn; when one ends the next of the trace takes its seat
    recorded    by the times of the trace
    open:N      N sessions open, each at its own recorded pace; when one ends the next begins 30 s later
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvkeep.errors import BadInput
from kvkeep.replay.trace import Arrivals, Request, Trace

#: `open:N`: seconds between the first sessions' beginnings, and between a session's end and its successor.
STAGGER_S, PAUSE_S = 7.0, 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """kind: one of the three.   open_at_once: N; 0 for `recorded`."""

    kind: str
    open_at_once: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.open_at_once}" if self.open_at_once else self.kind

    @classmethod
    def parse(cls, text: str) -> "Order":
        """`recorded`, `rotate:N` or `open:N`; `BadInput` for anything else."""
        kind, _, count = text.partition(":")
        if text == "recorded":
            return cls(kind)
        if kind in ("rotate", "open") and count.isascii() and count.isdigit() and int(count):
            return cls(kind, int(count))
        raise BadInput(f"--order {text}: it must be recorded, rotate:N or open:N with N of 1 or more, such as rotate:8")

    def arrivals(self, trace: Trace, sessions: int | None = None) -> Arrivals:
        """The requests of the first `sessions` sessions of a trace (all for None) in this order."""
        chosen = trace.sessions if sessions is None else trace.sessions[:sessions]
        if self.kind == "rotate":
            return Arrivals(_rotation(chosen, self.open_at_once), timed=False)
        if trace.clock == "none":
            raise BadInput(f"--order {self.kind}: {trace.name} has no times; use rotate:N")
        if self.kind == "open":
            return Arrivals(_at_their_pace(chosen, self.open_at_once), timed=True)
        if trace.clock == "session":
            raise BadInput(
                f"--order recorded: the times of {trace.name} begin anew in each session; use open:N or rotate:N"
            )
        return Arrivals(_recorded(chosen), timed=True)


def _rotation(sessions: Sequence[list[Request]], open_at_once: int) -> list[Request]:
    """The newcomer's first request is in the next round."""
    waiting = iter([session for session in sessions if session])
    seats = [(session, 0) for session in islice(waiting, open_at_once)]
    out: list[Request] = []
    while seats:
        after = []
        for session, turn in seats:
            out.append(session[turn]._replace(time_s=float(len(out))))
            if turn + 1 < len(session):
                after.append((session, turn + 1))
            else:
                after += [(newcomer, 0) for newcomer in islice(waiting, 1)]
        seats = after
    return out


def _recorded(sessions: Sequence[list[Request]]) -> list[Request]:
    """By time of arrival, and where that is equal by place in the trace."""
    return sorted((request for session in sessions for request in session), key=lambda request: request.time_s)


def _at_their_pace(sessions: Sequence[list[Request]], open_at_once: int) -> list[Request]:
    waiting = iter([session for session in sessions if session])
    ends: list[float] = []
    out: list[Request] = []

    def begin(session: list[Request], start_s: float) -> None:
        session = sorted(session, key=lambda request: request.time_s)  # those of sub-agents overlap
        shift_s = start_s - session[0].time_s
        out.extend(request._replace(time_s=request.time_s + shift_s) for request in session)
        heapq.heappush(ends, out[-1].time_s + PAUSE_S)

    for seat, session in enumerate(islice(waiting, open_at_once)):
        begin(session, seat * STAGGER_S)
    while ends:
        now_s = heapq.heappop(ends)
        for session in islice(waiting, 1):
            begin(session, now_s)
    out.sort(key=lambda request: request.time_s)
    return out
