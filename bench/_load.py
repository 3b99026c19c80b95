"""Load: requests that come when they are due, whatever becomes of those before them; and what each of them got.

Must not know engines, prompts or limits.

An open loop.  The schedule is made beforehand and nothing that the server does changes it, so requests queue where it
is too slow for them.  Latency counts from when a request was due, not from when it could be handed over: a server that
stands still for ten seconds has made all wait that were due meanwhile, and no coordinated omission can hide it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

#: Seconds that the loop sleeps at most when there is nothing to do.
NAP_S = 0.05


class Clock(Protocol):
    """What a loop reads and waits by; in tests it is made up."""

    def now_s(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The monotonic clock."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


# ---------------------------------------------------------------------- when requests are due


@dataclass(frozen=True, slots=True)
class Arrivals:
    """due_s: when each request is due, in seconds from the beginning, never falling.   what: how it came about."""

    due_s: tuple[float, ...]
    what: str

    @property
    def span_s(self) -> float:
        """The time that the requests are spread over: so many intervals as there are requests."""
        count = len(self.due_s)
        return (self.due_s[-1] - self.due_s[0]) * count / (count - 1) if count > 1 else 0.0

    @property
    def per_s(self) -> float:
        """Requests a second that are offered."""
        return len(self.due_s) / self.span_s if self.span_s else float("inf")


def poisson(count: int, per_s: float, seed: int) -> Arrivals:
    """Arrivals without memory, `per_s` of them a second: gaps are exponential, scaled so that the rate is exact."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return Arrivals(_at_rate(np.cumsum(gaps).tolist(), per_s), f"Poisson, {per_s:.3g} a second, seed {seed}")


def recorded(times_s: Sequence[float], per_s: float) -> Arrivals:
    """Arrivals as they were recorded, faster or slower as a whole, so that `per_s` come a second.

    times_s: when each came, in any order.
    """
    due_s = _at_rate(sorted(times_s), per_s)
    as_it_was = max(times_s) - min(times_s)
    factor = (due_s[-1] - due_s[0]) / as_it_was if as_it_was else 1.0
    return Arrivals(due_s, f"as recorded, time x {factor:.3g}: {per_s:.3g} a second")


def _at_rate(times_s: Sequence[float], per_s: float) -> tuple[float, ...]:
    """Moved to begin at 0 and stretched to a rate; all at once where they were recorded so."""
    first, count = times_s[0], len(times_s)
    length = times_s[-1] - first
    stretch = (count - 1) / per_s / length if length else 0.0
    return tuple((at - first) * stretch for at in times_s)


# ---------------------------------------------------------------------- what came of them


@dataclass(slots=True)
class Served:
    """One request, by the clock of its loop, in seconds from the beginning.

    due_s: when it was to come.   sent_s: when it was handed over; how late the loop itself was, and part of no latency.
    tokens_s: when each of its tokens came.   wanted: how many are to come.
    """

    number: int
    due_s: float
    wanted: int
    sent_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether all of its tokens have come."""
        return len(self.tokens_s) >= self.wanted

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token."""
        return self.tokens_s[0] - self.due_s

    @property
    def total_s(self) -> float:
        """From when it was due to its last token."""
        return self.tokens_s[-1] - self.due_s

    @property
    def itl_s(self) -> list[float]:
        """Between each of its tokens and the next."""
        return [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    @property
    def itl_mean_s(self) -> float:
        """The mean of these; 0 for a single token."""
        gaps = len(self.tokens_s) - 1
        return (self.tokens_s[-1] - self.tokens_s[0]) / gaps if gaps else 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must get to count: its first token within `ttft_s` of when it was due, and on average at most
    `itl_s` between its tokens."""

    ttft_s: float
    itl_s: float

    def __str__(self) -> str:
        return (
            f"first token within {self.ttft_s:.3g} s of when it was due, {self.itl_s:.3g} s between tokens on average"
        )

    def met(self, served: Served) -> bool:
        """Whether a request got it; one without its last token has not."""
        return served.whole and served.ttft_s <= self.ttft_s and served.itl_mean_s <= self.itl_s


def goodput_per_s(served: Sequence[Served], arrivals: Arrivals, slo: Slo) -> float:
    """Requests a second that got what the SLO asks for: the offered rate times their share."""
    return arrivals.per_s * sum(map(slo.met, served)) / len(served)


class OpenLoop:
    """Hands requests to a server when they are due."""

    def __init__(self, arrivals: Arrivals, clock: Clock | None = None) -> None:
        self.arrivals = arrivals
        self._clock: Clock = RealClock() if clock is None else clock
        self._began_s = self._clock.now_s()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.now_s() - self._began_s

    def run(self, wanted: int, send: Callable[[Served], None], step: Callable[[], bool]) -> list[Served]:
        """Serves all requests; returns them in the order in which they were due.

        wanted: tokens that each is to get.
        send: hands one to the server, without waiting for it; the server notes each token by `token`.
        step: lets the server work for a while; False when there is nothing to do.
        """
        self._began_s = self._clock.now_s()
        out = [Served(number, due_s, wanted) for number, due_s in enumerate(self.arrivals.due_s)]
        coming = 0
        while True:
            while coming < len(out) and out[coming].due_s <= self.now_s:
                out[coming].sent_s = self.now_s
                send(out[coming])
                coming += 1
            if step():
                continue
            if coming == len(out):
                return out
            self._clock.sleep(min(NAP_S, max(0.0, out[coming].due_s - self.now_s)))

    def token(self, served: Served) -> None:
        """A token of a request has come."""
        served.tokens_s.append(self.now_s)
