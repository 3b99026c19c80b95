"""The open-loop load generator: schedules that keep what they say, latencies that hide nothing, goodput.

Must not wait: the clock is made up.
"""

import numpy as np
import pytest

from bench._load import Arrivals, OpenLoop, Served, Slo, goodput_per_s, poisson, recorded


class MadeUpClock:
    """Time passes only when somebody says so."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a loop that does not sleep while nothing is to be done takes the server's core"
        self.s += seconds


class Server:
    """One request at a time, `service_s` each, a token in the middle and one at the end; before one it stands still."""

    def __init__(self, loop: OpenLoop, clock: MadeUpClock, service_s: float, pause: tuple[int, float] = (-1, 0.0)):
        self.loop, self.clock, self.service_s, self.pause = loop, clock, service_s, pause
        self.waiting: list[Served] = []
        self.sent: list[int] = []

    def send(self, served: Served) -> None:
        self.waiting.append(served)
        self.sent.append(served.number)

    def step(self) -> bool:
        if not self.waiting:
            return False
        served = self.waiting.pop(0)
        self.clock.s += self.pause[1] if served.number == self.pause[0] else 0.0
        for _ in range(2):
            self.clock.s += self.service_s / 2
            self.loop.token(served)
        return True


def run(due_s: tuple[float, ...], service_s: float, pause: tuple[int, float] = (-1, 0.0)) -> list[Served]:
    clock = MadeUpClock()
    loop = OpenLoop(Arrivals(due_s, "made up"), clock)
    server = Server(loop, clock, service_s, pause)
    out = loop.run(2, server.send, server.step)
    assert list(range(len(due_s))) == server.sent == [one.number for one in out]
    return out


# ---------------------------------------------------------------------- schedules


def test_poisson_arrivals_have_their_rate_and_no_memory():
    """The rate is exact, gaps are exponential (mean equals deviation), and a seed gives the same ones again."""
    arrivals = poisson(4000, per_s=5.0, seed=3)
    assert 5.0 == pytest.approx(arrivals.per_s)
    gaps = np.diff(arrivals.due_s)
    assert 0.0 == arrivals.due_s[0] and (gaps >= 0).all()
    assert 0.2 == pytest.approx(gaps.mean(), rel=0.01) and 0.2 == pytest.approx(gaps.std(), rel=0.05)
    assert 0.368 == pytest.approx((gaps > 0.2).mean(), abs=0.03)
    assert arrivals == poisson(4000, 5.0, 3) != poisson(4000, 5.0, 4)


def test_recorded_arrivals_keep_their_shape():
    """Gaps stay in proportion, the rate is the one asked for, and it is said by how much time was stretched."""
    arrivals = recorded([50.0, 10.0, 20.0, 30.0], per_s=2.0)
    assert (0.0, 0.375, 0.75, 1.5) == pytest.approx(arrivals.due_s)
    assert 2.0 == pytest.approx(arrivals.per_s)
    assert "time x 0.0375" in arrivals.what


def test_requests_that_came_at_once_come_at_once():
    """A burst has no rate to be scaled to, and one request is a schedule too."""
    assert (0.0, 0.0, 0.0) == recorded([5.0, 5.0, 5.0], per_s=2.0).due_s
    assert (0.0,) == poisson(1, per_s=2.0, seed=0).due_s


# ---------------------------------------------------------------------- latencies


def test_a_server_that_keeps_up_is_measured_alone():
    """Each request is handed over when it is due; its times are those of the service."""
    out = run((0.0, 10.0, 20.0), service_s=2.0)
    assert [1.0, 1.0, 1.0] == pytest.approx([one.ttft_s for one in out], abs=1e-6)
    assert [2.0, 2.0, 2.0] == pytest.approx([one.total_s for one in out], abs=1e-6)
    assert [0.0, 10.0, 20.0] == pytest.approx([one.sent_s for one in out], abs=1e-6)
    assert [[1.0]] * 3 == [one.itl_s for one in out] and 1.0 == out[0].itl_mean_s


def test_a_server_that_is_too_slow_makes_requests_wait():
    """Twice the load that it can serve: each waits one second more than the one before it."""
    out = run((0.0, 1.0, 2.0, 3.0, 4.0), service_s=2.0)
    assert [1.0, 2.0, 3.0, 4.0, 5.0] == pytest.approx([one.ttft_s for one in out], abs=1e-6)


def test_requests_are_handed_over_when_they_are_due_however_many_wait():
    """An open loop: at ten times the load, all have been handed over before the second one is answered."""
    clock = MadeUpClock()
    loop = OpenLoop(Arrivals((0.0, 0.1, 0.2, 0.3), "made up"), clock)
    waiting: list[Served] = []
    waits: list[int] = []

    def step() -> bool:
        if not waiting:
            return False
        waits.append(len(waiting))
        clock.s += 1.0
        loop.token(waiting.pop(0))
        return True

    loop.run(1, waiting.append, step)
    assert [1, 3, 2, 1] == waits


def test_a_pause_is_seen_by_all_who_were_due_meanwhile():
    """A server stands still for ten seconds: every request that was due meanwhile has waited for what was left of them,
    though the loop itself could not hand it over before they were over."""
    out = run(tuple(map(float, range(20))), service_s=0.5, pause=(2, 10.0))
    late = [one.ttft_s for one in out]
    # Half a second of the backlog goes with each request.
    assert [0.25, 0.25, *(10.25 - 0.5 * number for number in range(18))] == pytest.approx(late, abs=1e-6)
    assert [one + 0.25 for one in late] == pytest.approx([one.total_s for one in out], abs=1e-6)
    assert 12.0 < (out[5].sent_s or 0.0), "the loop could not hand it over before the pause was over"


def test_tokens_without_end_are_not_waited_for():
    """The loop ends when the server has nothing to do, whole or not; a request without its last token is not whole."""
    clock = MadeUpClock()
    loop = OpenLoop(Arrivals((0.0, 1.0), "made up"), clock)
    out = loop.run(2, loop.token, lambda: False)
    assert [False, False] == [one.whole for one in out]


# ---------------------------------------------------------------------- goodput


def served(due_s: float, *tokens_s: float, wanted: int = 2) -> Served:
    return Served(0, due_s, wanted, tokens_s=list(tokens_s))


def test_only_what_the_slo_asks_for_counts():
    """First token in time from when it was due, tokens apart no more than allowed on average, and all of them there."""
    slo = Slo(ttft_s=1.0, itl_s=0.5)
    assert slo.met(served(5.0, 6.0, 6.5))
    assert not slo.met(served(5.0, 6.01, 6.5))
    assert not slo.met(served(5.0, 5.5, 6.01))
    assert not slo.met(served(5.0, 5.5))
    assert slo.met(served(5.0, 5.5, wanted=1))
    assert slo.met(served(0.0, 0.1, 1.0, 1.1, wanted=3)), "one gap may be longer"
    assert "within 1 s" in str(slo) and "0.5 s" in str(slo)


def test_goodput_is_the_offered_rate_times_the_share_that_got_it():
    """Four a second are offered and half of them are served in time: two a second."""
    arrivals = poisson(8, per_s=4.0, seed=0)
    out = [served(0.0, 0.1, 0.2) for _ in range(4)] + [served(0.0, 9.0, 9.1) for _ in range(4)]
    assert 2.0 == pytest.approx(goodput_per_s(out, arrivals, Slo(1.0, 1.0)))
