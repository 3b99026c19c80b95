"""When counters are read, how often, and what becomes of those that do not answer.

Must not know NVML or the host: the counters here are functions of a test's clock.
"""

import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.telemetry import sampling
from kvkeep.telemetry.counters import Answer, Counter, CounterMissing, Field, NoAnswer, SourceLost, Updates
from kvkeep.telemetry.sampling import Sampler, Settings
from kvkeep.telemetry.series import Series
from kvkeep.telemetry.track import CHANGES_WANTED, COST_READS, FAILURES_MAX
from tests.telemetry.recorded import TestClock

GAUGE = (Field("some", "W", "a number"),)
SHORT = Settings(interval_s=0.1, probe_s=1.5)


class Probe:
    """A counter whose answers are a function of the clock, and the times at which it was read.

    Time passes while it is read, and processor time.
    """

    def __init__(
        self,
        clock: TestClock,
        answer: Callable[[float], float],
        *,
        name: str = "some",
        source: str = "test",
        updates: Updates = "paced",
        window_s: float = 0.0,
        cpu_s: float = 20e-6,
    ) -> None:
        self.times_s: list[float] = []
        self.cpu_s = cpu_s
        self.clock = clock
        self._answer = answer
        self.counter = Counter(source, (Field(name, "W", "a number"),), self._read, updates, window_s)

    def _read(self) -> Answer:
        self.times_s.append(self.clock())
        self.clock.now_s += self.counter.window_s or 1e-5
        Costs.cpu_s += self.cpu_s
        return (self._answer(self.clock()),)

    def gaps(self, since_s: float) -> list[float]:
        times = [time_s for time_s in self.times_s if time_s >= since_s]
        return [after - before for before, after in pairwise(times)]


class Costs:
    """Processor time of a test: one thread runs at a time, so one count will do."""

    cpu_s = 0.0


def step(every_s: float) -> Callable[[float], float]:
    return lambda now_s: float(int(now_s / every_s))


def sampler(clock: TestClock, probes: Sequence[Probe], settings: Settings = SHORT) -> Sampler:
    return Sampler(
        [probe.counter for probe in probes], settings, clock=clock, cpu_clock=lambda: Costs.cpu_s, stopping=clock
    )


def run(clock: TestClock, probes: Sequence[Probe], seconds: float, settings: Settings = SHORT) -> tuple[Sampler, float]:
    """A whole run; and when it began, behind the looking."""
    made = sampler(clock, probes, settings)
    made.look()
    began_s = clock()
    made.start()
    clock.run_to(began_s + seconds)
    made.stop()
    return made, began_s


# ---------------------------------------------------------------------- pace


@pytest.mark.parametrize("every_s", [0.13, 0.25, 0.4])
def test_counter_is_sampled_no_faster_than_it_changes(every_s: float):
    """The time between its changes is found out before the run, and what lies between two samples is no less."""
    clock = TestClock()
    probe = Probe(clock, step(every_s))
    made, began_s = run(clock, [probe], 10.0)
    assert made["some"].update_s == pytest.approx(every_s, abs=2 * sampling.LOOK_S)
    gaps = probe.gaps(began_s)[:-1]  # the last one is the end of the run
    assert len(gaps) > 10 and min(gaps) >= every_s - 2 * sampling.LOOK_S
    assert max(gaps) < every_s + 0.02


def test_counter_that_changes_often_is_read_at_the_interval():
    """Not as often as it changes; looking for its pace is over as soon as that is known."""
    clock = TestClock()
    probe = Probe(clock, step(0.02))
    before_s = clock()
    made, began_s = run(clock, [probe], 5.0)
    assert made["some"].update_s == pytest.approx(0.02, abs=2 * sampling.LOOK_S)
    assert began_s - before_s < (CHANGES_WANTED + 2) * 0.02
    gaps = probe.gaps(began_s)[:-1]
    assert min(gaps) >= 0.1 and max(gaps) < 0.11


def test_pace_that_does_not_show_is_not_told():
    """A counter that does not change, or too seldom, has no pace: it is looked at for as long as was said, no longer,
    and then sampled at the interval."""
    clock = TestClock()
    constant, slow = Probe(clock, lambda _: 7.0), Probe(clock, step(0.7), name="slow")
    before_s = clock()
    made, began_s = run(clock, [constant, slow], 5.0)
    assert (None, None) == (made["some"].update_s, made["slow"].update_s)
    assert 0 == made["some"].changes and made["slow"].changes in (1, 2)
    assert SHORT.probe_s <= began_s - before_s < SHORT.probe_s + 0.01
    assert max(constant.gaps(began_s)) < 0.11


def test_counter_of_the_moment_is_not_looked_at_for_a_pace():
    """Nor does anybody wait for it."""
    clock = TestClock()
    probe = Probe(clock, step(0.2), updates="live")
    made = sampler(clock, [probe])
    before_s = clock()
    made.look()
    assert COST_READS + 1 == len(probe.times_s) and clock() - before_s < 0.001


def test_reads_that_cost_much_are_seldom():
    """A read of 1 ms of processor time comes each 5 s at most; one that is slow once does not make a slow counter."""
    clock = TestClock()
    dear, cheap = Probe(clock, step(0.1), updates="live", cpu_s=1e-3), Probe(clock, step(0.1), name="b", updates="live")
    made = sampler(clock, [dear, cheap])
    made.look()
    began_s = clock()
    made.start()
    clock.run_to(began_s + 10.0)
    cheap.cpu_s = 10e-3
    clock.run_to(began_s + 10.1)
    cheap.cpu_s = 20e-6
    clock.run_to(began_s + 20.0)
    made.stop()
    assert min(dear.gaps(began_s)[:-1]) >= 5.0 and max(dear.gaps(began_s)) < 5.1
    assert max(cheap.gaps(began_s)) < 0.11


def test_windows_take_a_tenth_of_the_time_at_most():
    """A call that waits for 20 ms comes each 200 ms at most, and neither end of the run waits for one."""
    clock = TestClock()
    probe = Probe(clock, step(0.001), updates="window", window_s=0.02)
    made = sampler(clock, [probe])
    made.look()
    assert 1 == len(probe.times_s)
    began_s = clock()
    made.start()
    clock.run_to(began_s + 10.0)
    seen = len(probe.times_s)
    made.stop()
    assert seen == len(probe.times_s)
    assert min(probe.gaps(began_s)) >= 0.2 + 0.02 and max(probe.gaps(began_s)) < 0.24


def test_what_is_due_together_is_read_together():
    """Ten counters of one interval make one waking of the thread."""
    clock = TestClock()
    probes = [Probe(clock, step(0.05), name=f"p{number}") for number in range(10)]
    run(clock, probes, 10.0)
    assert 90 < clock.waits < 105


def test_time_of_a_sample_is_the_middle_of_its_window():
    """What NVML counted for 20 ms belongs to the middle of them."""
    clock = TestClock()
    probe = Probe(clock, step(1.0), updates="window", window_s=0.02)
    made, _ = run(clock, [probe], 1.0)
    times = made["some"].series.kept().times_s
    assert probe.times_s[1:] == pytest.approx([time_s - 0.01 for time_s in times])


# ---------------------------------------------------------------------- no answers


def failing(error: Exception, since_s: float, until_s: float = math.inf) -> Callable[[float], float]:
    def answer(now_s: float) -> float:
        if since_s <= now_s < until_s:
            raise error
        return now_s

    return answer


def test_answer_that_does_not_come_is_a_gap():
    """It is None in the series, counted, and the counter goes on."""
    clock = TestClock()
    probe = Probe(clock, failing(NoAnswer("busy"), 1003.0, 1003.5), updates="live")
    made, _ = run(clock, [probe], 6.0)
    track = made["some"]
    values = track.series.kept().values[0]
    assert 4 <= values.count(None) <= 6 and values[-1] is not None
    assert values.count(None) == track.failures and ("busy", None) == (track.failure, track.ended)
    assert 1 == track.series.sums(0).breaks


def test_counter_that_fails_for_ever_is_given_up():
    """After so many failures in a row, and the reason is kept; the others go on."""
    clock = TestClock()
    bad = Probe(clock, failing(NoAnswer("Unknown Error"), 1003.0), name="bad", updates="live")
    good = Probe(clock, step(0.1), updates="live")
    made, began_s = run(clock, [bad, good], 20.0)
    assert FAILURES_MAX == made["bad"].failures
    assert (
        f"not asked any more after {FAILURES_MAX} failures in a row, the last one: Unknown Error" == made["bad"].ended
    )
    assert good.times_s[-1] > began_s + 19.9


def test_missing_counter_says_why_and_is_not_asked_again():
    """From the first answer on."""
    clock = TestClock()
    probe = Probe(clock, failing(CounterMissing("Not Supported"), 0.0))
    made, _ = run(clock, [probe], 5.0)
    assert ("Not Supported", 1) == (made["some"].ended, len(probe.times_s))
    assert [] == made["some"].series.kept().times_s


def test_source_that_is_lost_takes_its_counters_along_and_no_others():
    """They are not asked again; when it was lost is known; what was sampled before stays."""
    clock = TestClock()
    lost = Probe(clock, failing(SourceLost("GPU is lost"), 1004.0), source="gpu", updates="live")
    beside = Probe(clock, step(0.1), name="beside", source="gpu", updates="live")
    other = Probe(clock, step(0.1), name="other", source="host", updates="live")
    made, began_s = run(clock, [lost, beside, other], 10.0)
    assert 4.0 == pytest.approx(made.lost["gpu"].time_s - 1000.0, abs=0.2)
    assert "GPU is lost" == made["some"].ended == made["beside"].ended and ["gpu"] == list(made.lost)
    assert beside.times_s[-1] < 1004.2 and other.times_s[-1] > began_s + 9.9
    assert len(made["beside"].series.kept().times_s) > 20


# ---------------------------------------------------------------------- the thread


def test_error_of_ours_in_the_thread_is_raised_by_stop():
    """It does not die silently, though the last sample goes well."""
    clock = TestClock()
    errors = [ZeroDivisionError("a bug")]

    def once(now_s: float) -> float:
        if now_s > 1000.5 and errors:
            raise errors.pop()
        return now_s

    made = sampler(clock, [Probe(clock, once, updates="live")])
    made.look()
    made.start()
    thread = made._thread
    assert thread is not None
    clock._limit_s = math.inf
    with clock._moved:
        clock._moved.notify_all()
    thread.join(30.0)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        made.stop()


def test_no_thread_is_left_and_both_ends_are_sampled():
    """Under the real clock; stopping twice is once."""
    before = threading.active_count()
    made = Sampler([Counter("test", GAUGE, lambda: (1.0,), "live")], Settings(interval_s=60.0))
    made.look()
    made.start()
    assert before + 1 == threading.active_count()
    made.stop()
    made.stop()
    assert before == threading.active_count()
    assert 2 == made["some"].series.sums(0).samples and made.thread_cpu_s is not None
    with pytest.raises(InvariantViolation, match="once"):
        made.start()


def test_call_that_does_not_come_back_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    """It is said that its thread is left; another counter can still be read."""
    monkeypatch.setattr(sampling, "STOP_S", 0.05)
    hangs, entered, free = threading.Event(), threading.Event(), threading.Event()

    def read() -> Answer:
        if hangs.is_set():
            entered.set()
            free.wait(60.0)
        return (1.0,)

    fine = Counter("test", (Field("fine", "W", "a number"),), lambda: (2.0,), "live")
    made = Sampler([Counter("test", GAUGE, read, "live"), fine], Settings(interval_s=0.001))
    made.look()
    hangs.set()
    made.start()
    assert entered.wait(30.0)
    assert made.read_now("fine")
    thread = made._thread
    made.stop()
    assert made.stuck is not None and "did not come back" in made.stuck and made.thread_cpu_s is None
    free.set()
    assert thread is not None
    thread.join(30.0)
    assert not thread.is_alive()


def test_reading_in_between_is_a_sample_in_order():
    """Whoever reads a counter meanwhile adds to its series, and puts off its next turn."""
    clock = TestClock()
    probe = Probe(clock, step(0.01), updates="live")
    made = sampler(clock, [probe])
    made.look()
    began_s = clock()
    made.start()
    clock.run_to(began_s + 1.05)
    assert made.read_now("some")
    now_s = clock()
    clock.run_to(began_s + 2.0)
    made.stop()
    times = made["some"].series.kept().times_s
    assert sorted(times) == times and any(abs(time_s - now_s) < 1e-4 for time_s in times)
    assert min(probe.gaps(now_s)[:-1]) >= 0.1


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"interval_s": 0.0}, "interval_s"), ({"probe_s": -1.0}, "probe_s"), ({"samples_max": 1}, "samples_max")],
)
def test_settings_that_make_no_sense_are_bad_input(bad: dict[str, float], says: str):
    """One line that names the setting."""
    with pytest.raises(BadInput, match=says):
        Settings(**bad)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- series


def test_memory_is_bounded_and_the_whole_run_stays_in_sight():
    """Of 10,000 samples 16 are kept at most, evenly over all of the run; what all of them say is exact."""
    series = Series(GAUGE, 16)
    for number in range(10_000):
        series.add(float(number), (float(number % 7),))
    kept = series.kept()
    assert 8 <= len(kept.times_s) <= 16
    steps = {after - before for before, after in pairwise(kept.times_s)}
    assert {float(kept.stride)} == steps and 0.0 == kept.times_s[0] and kept.times_s[-1] >= 10_000 - 2 * kept.stride
    sums = kept.sums[0]
    assert (10_000, 0.0, 6.0) == (sums.samples, sums.least, sums.most)


@given(st.lists(st.one_of(st.none(), st.integers(0, 100))), st.integers(2, 9))
def test_sums_are_those_of_all_samples(values: list[int | None], samples_max: int):
    """Whatever is kept: counts, bounds, mean, falls, and the area between answers that follow each other."""
    series = Series(GAUGE, samples_max)
    for number, value in enumerate(values):
        series.add(2.0 * number, (None if value is None else float(value),))
    told, known = series.sums(0), [value for value in values if value is not None]
    assert (len(known), len(values) - len(known)) == (told.samples, told.missing)
    assert (min(known, default=None), max(known, default=None)) == (told.least, told.most)
    assert told.mean == (pytest.approx(sum(known) / len(known)) if known else None)
    pairs = list(pairwise(values))
    assert told.area == pytest.approx(sum(a + b for a, b in pairs if a is not None and b is not None))
    assert sum(a is not None and b is None for a, b in pairs) == told.breaks
    falls = sum(b < a for a, b in pairwise(known))
    assert (falls, None if falls or not known else known[-1] - known[0]) == (told.falls, told.rise)
    kept = series.kept()
    assert len(kept.times_s) <= samples_max
    assert [values[int(time_s / 2)] for time_s in kept.times_s] == kept.values[0]
