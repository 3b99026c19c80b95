"""What the manager promises, one case at a time."""

import gc
import logging
import time
from collections.abc import Callable

import pytest

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.transfer.backend import NO_WAIT, Job, Outcome
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import Cause
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.transfer.pools import LAYOUT, PAGES, fill_all, host_memory, plan

PAGE = LAYOUT.page_nbytes
DEADLINE_S = 5.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recording(SimulatedBackend):
    """Remembers what was launched."""

    def __init__(self, when: When = When.LATE) -> None:
        self.device, self.host = host_memory(), host_memory()
        self.device_bytes = fill_all(self.device, PAGES, 0)
        self.host_bytes = fill_all(self.host, PAGES, 1000)
        super().__init__(self.device, self.host, when=when)
        self.launched: list[Job] = []

    def launch(self, job: Job) -> None:
        self.launched.append(job)
        super().launch(job)

    def run(self) -> None:
        """Steps until nothing moves."""
        while self.step():
            pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend() -> Recording:
    return Recording()


@pytest.fixture
def manager(backend: Recording, clock: Clock) -> TransferManager:
    return make(backend, clock)


def make(backend: SimulatedBackend, clock: Callable[[], float], pages_in_flight: int = 4) -> TransferManager:
    return TransferManager(
        backend,
        bytes_in_flight_max=pages_in_flight * backend.page_nbytes,
        queue_pages_max=8,
        deadline_s=DEADLINE_S,
        clock=clock,
    )


def submit(manager: TransferManager, cause: Cause, *pages: int) -> Job:
    """Submits copies of pages to pages of the same number; it must be taken."""
    job = manager.submit(plan(cause, pages, pages), after=NO_WAIT)
    assert job is not None
    return job


# ---------------------------------------------------------------------- submit


def test_copy_begins_in_poll_and_lands_in_poll(manager: TransferManager, backend: Recording):
    """Submitting touches nothing; a poll starts the copy, a later one reports it, once."""
    job = submit(manager, "promote", 1, 2)
    assert [] == backend.launched
    assert [] == manager.poll()
    backend.run()
    (done,) = manager.poll()
    assert (job, True, True, None, False, 2 * PAGE) == (
        done.job, done.ok, done.final, done.error, done.late, done.nbytes
    )  # fmt: skip
    assert done.copy_ns > 0 and done.plan is job.plan
    assert [] == manager.poll()
    assert backend.host_bytes[1:3] == [backend.device.page_bytes(page) for page in (1, 2)]


def test_after_has_no_default(manager: TransferManager):
    """Whoever submits says what the copy comes after: leaving it out, or passing None, is a bug."""
    with pytest.raises(TypeError):
        manager.submit(plan("demote", [1], [1]))  # type: ignore[call-arg]
    with pytest.raises(InvariantViolation, match="NO_WAIT"):
        manager.submit(plan("demote", [1], [1]), after=None)  # type: ignore[arg-type]


def test_store_comes_after_its_write(manager: TransferManager, backend: Recording):
    """The event reaches the backend: a store of a page that is still being written is not begun."""
    write = backend.writing([3])
    job = manager.submit(plan("demote", [3], [4]), after=write)
    manager.poll()
    backend.run()
    assert [] == manager.poll()
    write.finish()
    backend.run()
    assert [job] == [done.job for done in manager.poll()]


def test_simulated_backend_sees_a_missing_barrier(manager: TransferManager, backend: Recording):
    """A store submitted with nothing to wait for, while its page is being written, stops the program."""
    backend.writing([3])
    manager.submit(plan("demote", [3], [4]), after=NO_WAIT)
    with pytest.raises(InvariantViolation, match="missing barrier"):
        manager.poll()


# ---------------------------------------------------------------------- bounds and order


def test_loads_start_before_stores_that_came_first(manager: TransferManager, backend: Recording):
    """A store that waits does not hold up a load; loads among themselves start in order of submission."""
    store = submit(manager, "demote", 0, 1)
    loads = [submit(manager, "promote", 2, 3), submit(manager, "resume", 4)]
    manager.poll()
    assert loads == backend.launched, "the store is the fifth page of four in flight"
    backend.run()
    manager.poll()
    assert [*loads, store] == backend.launched


def test_no_store_starts_while_a_load_waits(manager: TransferManager, backend: Recording):
    """A load that does not fit yet is not overtaken, not even by a store that would fit."""
    submit(manager, "promote", 0, 1)
    manager.poll()
    store = submit(manager, "clean", 5)
    large = submit(manager, "promote", 2, 3, 4)
    manager.poll()
    assert 1 == len(backend.launched)
    backend.run()
    manager.poll()
    assert [large, store] == backend.launched[1:]


def test_bytes_in_flight_are_bounded(manager: TransferManager, backend: Recording):
    """Loads beyond the bound wait until what runs is over."""
    jobs = [submit(manager, "promote", 2 * i, 2 * i + 1) for i in range(4)]
    manager.poll()
    assert jobs[:2] == backend.launched
    assert 4 * PAGE == manager.stats().queues.in_flight_nbytes
    backend.run()
    manager.poll()
    assert jobs == backend.launched


def test_load_larger_than_the_bound_runs_alone(manager: TransferManager, backend: Recording):
    """It waits for what runs, and nothing starts beside it."""
    first = submit(manager, "promote", 0)
    manager.poll()
    large = submit(manager, "promote", 1, 2, 3, 4, 5)
    submit(manager, "promote", 6)
    manager.poll()
    assert [first] == backend.launched
    backend.run()
    manager.poll()
    assert [first, large] == backend.launched


def test_store_beyond_the_bound_is_not_made(manager: TransferManager, backend: Recording):
    """Stores count what runs and what waits, loads too; a refused one is counted and leaves nothing."""
    submit(manager, "promote", 0, 1)
    assert None is manager.submit(plan("demote", range(5), range(5)), after=NO_WAIT)
    manager.poll()
    submit(manager, "promote", 2)
    submit(manager, "demote", 4)
    assert 0 == manager.store_pages
    assert None is manager.submit(plan("clean", [6], [6]), after=NO_WAIT)
    stats = manager.stats()
    assert (2, 1, 1) == (stats.refused_stores, stats.queues.loads, stats.queues.stores)


def test_store_larger_than_the_bound_runs_alone(manager: TransferManager, backend: Recording):
    """It is made when nothing runs or waits: a request of many pages can be suspended."""
    assert 4 == manager.store_pages
    large = submit(manager, "suspend", *range(5))
    assert 0 == manager.store_pages
    assert None is manager.submit(plan("suspend", range(5, 11), range(5, 11)), after=NO_WAIT)
    submit(manager, "promote", 11)
    manager.poll()
    assert large not in backend.launched
    backend.run()
    manager.poll()
    assert large is backend.launched[-1]


def test_a_copy_that_hangs_does_not_hold_up_larger_ones_for_ever(
    manager: TransferManager, backend: Recording, clock: Clock
):
    """Once it is overdue a load larger than what is left of the bound runs beside it; none when it fills the bound."""
    hung = submit(manager, "promote", 0)
    manager.poll()
    backend.stick(hung)
    large = submit(manager, "promote", 1, 2, 3, 4)
    clock.now = DEADLINE_S - 0.1
    manager.poll()
    assert manager.revoke(large)
    clock.now = DEADLINE_S
    manager.poll()
    large = submit(manager, "promote", 1, 2, 3, 4)
    manager.poll()
    assert [hung, large] == backend.launched
    backend.stick(large)
    clock.now = 2 * DEADLINE_S
    manager.poll()
    submit(manager, "promote", 5)
    manager.poll()
    assert [hung, large] == backend.launched


def test_load_larger_than_the_queue_waits_alone(manager: TransferManager):
    """It is refused while another waits, and taken when none does: a request of many pages can be resumed."""
    submit(manager, "promote", 0)
    assert None is manager.submit(plan("resume", range(1, 10), range(1, 10)), after=NO_WAIT)
    manager.poll()
    submit(manager, "resume", *range(1, 10))
    assert 9 == manager.stats().queues.load_pages


def test_queue_of_loads_is_bounded_in_pages(manager: TransferManager):
    """The load that would be the ninth queued page of eight is refused; a smaller one still fits."""
    submit(manager, "promote", *range(7))
    assert None is manager.submit(plan("promote", [7, 8], [7, 8]), after=NO_WAIT)
    submit(manager, "promote", 9)
    assert (1, 8) == (manager.stats().refused_loads, manager.stats().queues.load_pages)


def test_bound_smaller_than_a_page_is_bad_input(backend: Recording):
    """No copy could ever be made."""
    with pytest.raises(BadInput, match="bytes_in_flight_max"):
        TransferManager(backend, bytes_in_flight_max=PAGE - 1, queue_pages_max=1, deadline_s=1.0)
    with pytest.raises(BadInput, match="deadline_s"):
        TransferManager(backend, bytes_in_flight_max=PAGE, queue_pages_max=1, deadline_s=0.0)


# ---------------------------------------------------------------------- revoke


def test_revoked_job_touches_nothing(manager: TransferManager, backend: Recording):
    """A job that has not started can be taken back: no byte moves, no completion follows, its room is free again."""
    job = submit(manager, "promote", *range(8))
    assert manager.revoke(job)
    assert not manager.revoke(job)
    other = submit(manager, "promote", *range(8))
    manager.poll()
    backend.run()
    assert [other] == [done.job for done in manager.poll()] == backend.launched
    assert (1, False) == (manager.stats().revoked, manager.busy)


def test_started_job_cannot_be_revoked(manager: TransferManager, backend: Recording):
    """Once it has started its pages are its own until it is over."""
    job = submit(manager, "promote", 1)
    manager.start()
    assert [job] == backend.launched
    assert not manager.revoke(job)
    backend.run()
    assert [job] == [done.job for done in manager.poll()]
    assert not manager.revoke(job)


# ---------------------------------------------------------------------- failure


def test_failure_is_a_completion(manager: TransferManager, backend: Recording):
    """A copy that failed is reported once, with its reason and without bytes."""
    load, store = submit(manager, "promote", 1), submit(manager, "demote", 2)
    manager.poll()
    backend.fail(load, "a cosmic ray")
    backend.fail(store)
    backend.run()
    done = {completion.job: completion for completion in manager.poll()}
    assert {load, store} == set(done)
    assert (False, True, "a cosmic ray", 0) == (
        done[load].ok, done[load].final, done[load].error, done[load].nbytes
    )  # fmt: skip
    assert 2 == manager.stats().failures


def test_overdue_copy_is_said_once_and_stays_owned(manager: TransferManager, backend: Recording, clock: Clock):
    """A deadline releases those who wait; the final completion comes when the copy is over, however late."""
    job = submit(manager, "promote", 1)
    manager.poll()
    backend.stick(job)
    backend.run()
    clock.now = DEADLINE_S
    (overdue,) = manager.poll()
    assert (job, False, False, True) == (overdue.job, overdue.ok, overdue.final, overdue.late)
    assert overdue.error is not None and "overdue" in overdue.error
    clock.now *= 10
    assert [] == manager.poll()
    assert PAGE == manager.stats().queues.in_flight_nbytes
    backend.free(job)
    backend.run()
    (final,) = manager.poll()
    assert (job, True, True, True) == (final.job, final.ok, final.final, final.late)
    assert (1, 1) == (manager.stats().overdue, manager.stats().late)


def test_queued_job_ends_at_its_deadline(manager: TransferManager, backend: Recording, clock: Clock):
    """A job that could not start in time ends untouched, so that nobody waits for ever behind a stuck copy."""
    stuck = submit(manager, "promote", 0, 1, 2, 3)
    manager.poll()
    backend.stick(stuck)
    clock.now = 1.0
    waiting = submit(manager, "promote", 4)
    clock.now = 1.0 + DEADLINE_S
    said = {completion.job: completion for completion in manager.poll()}
    assert (False, True) == (said[stuck].final, said[waiting].final)
    assert not said[waiting].ok
    backend.free(stuck)
    backend.run()
    assert [stuck] == [done.job for done in manager.poll()] == backend.launched
    assert backend.device_bytes[4] == backend.device.page_bytes(4)


def test_each_job_has_its_own_deadline(manager: TransferManager, backend: Recording, clock: Clock):
    """When one has passed its deadline, those submitted later still reach theirs."""
    jobs = []
    for number in range(3):
        clock.now = float(number)
        jobs.append(submit(manager, "promote", number))
    manager.poll()
    for job in jobs:
        backend.stick(job)
    for number, job in enumerate(jobs):
        clock.now = DEADLINE_S + number
        assert [(job, False)] == [(said.job, said.final) for said in manager.poll()]


def test_late_job_that_lands_in_time_is_not_overdue(manager: TransferManager, backend: Recording, clock: Clock):
    """What is over by the time of the poll is not reported overdue first."""
    job = submit(manager, "promote", 1)
    manager.poll()
    backend.run()
    clock.now = DEADLINE_S
    assert [(job, True, False)] == [(done.job, done.ok, done.late) for done in manager.poll()]


def test_dead_backend_ends_every_job_and_is_said_once(
    manager: TransferManager, backend: Recording, caplog: pytest.LogCaptureFixture
):
    """Jobs in flight and queued each get a final failed completion; later plans are refused; one line in the log."""
    running, queued = submit(manager, "promote", 0, 1, 2), submit(manager, "promote", 3, 4)
    manager.poll()
    backend.die("the device fell off the bus")
    with caplog.at_level(logging.DEBUG):
        done = manager.poll()
        assert None is manager.submit(plan("promote", [1], [1]), after=NO_WAIT)
        assert [] == manager.poll()
        assert [] == manager.close(drain=True, timeout_s=1.0)
    assert [(running, False, True), (queued, False, True)] == [(one.job, one.ok, one.final) for one in done]
    assert "the device fell off the bus" == manager.dead
    assert 1 == len([record for record in caplog.records if record.levelno >= logging.INFO])
    assert (0, 0) == (manager.stats().queues.in_flight_nbytes, manager.stats().queues.load_pages)


def test_what_ended_before_the_death_is_not_lost(manager: TransferManager, backend: Recording):
    """A backend that dies at a launch does not take the completions of the same poll with it."""
    first = submit(manager, "promote", 0)
    manager.poll()
    backend.run()
    second = submit(manager, "promote", 1)

    class DiesAtLaunch(type(backend)):  # type: ignore[misc]
        def launch(self, job: Job) -> None:
            self.die()
            super().launch(job)

    backend.__class__ = DiesAtLaunch
    done = manager.poll()
    assert [(first, True), (second, False)] == [(one.job, one.ok) for one in done]


def test_job_reported_twice_is_a_bug(manager: TransferManager, backend: Recording):
    """A backend that reports a job again must not free somebody else's pages."""
    job = submit(manager, "promote", 1)
    manager.poll()
    backend.run()
    manager.poll()
    submit(manager, "promote", 2)
    backend._outcomes.append(Outcome(job, None, 1))
    with pytest.raises(InvariantViolation, match="twice"):
        manager.poll()


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("drain", [True, False])
def test_close_completes_every_job_once(manager: TransferManager, backend: Recording, drain: bool):
    """With copies in flight and queued: drained, all arrive; cancelled, those that had not started fail untouched."""
    running, queued = submit(manager, "promote", 0, 1, 2), submit(manager, "promote", 3, 4)
    manager.poll()
    done = manager.close(drain=drain, timeout_s=10.0)
    assert 2 == len(done)
    assert {(running, True, True), (queued, drain, True)} == {(one.job, one.ok, one.final) for one in done}
    assert (backend.host_bytes if drain else backend.device_bytes)[3] == backend.device.page_bytes(3)
    assert [] == manager.close(drain=drain, timeout_s=10.0)
    assert None is manager.submit(plan("promote", [1], [1]), after=NO_WAIT)


def test_drain_gives_up_at_its_limit(backend: Recording):
    """A copy that never ends does not hold up the end for ever; what waits behind it is cancelled."""
    manager = make(backend, time.monotonic)
    stuck, queued = submit(manager, "promote", 0, 1, 2), submit(manager, "promote", 3, 4)
    manager.poll()
    backend.stick(stuck)
    start = time.monotonic()
    done = {completion.job: completion for completion in manager.close(drain=True, timeout_s=0.2)}
    assert 0.2 <= time.monotonic() - start < 5.0
    assert (True, False) == (done[stuck].final, done[queued].ok)


def test_jobs_are_forgotten(manager: TransferManager, backend: Recording):
    """Nothing of a job that is over stays behind, in the manager or in the backend."""
    job = submit(manager, "promote", 1)
    revoked = submit(manager, "promote", 2)
    manager.revoke(revoked)
    manager.poll()
    backend.run()
    manager.poll()
    backend.launched.clear()
    both = [job, revoked]
    del job, revoked
    gc.collect()
    assert [[both]] * 2 == [gc.get_referrers(one) for one in both]


# ---------------------------------------------------------------------- counters


def test_counters_tell_direction_and_cause(manager: TransferManager, backend: Recording):
    """Copies, pages, bytes, time and failures are counted by direction and cause."""
    submit(manager, "promote", 1, 2)
    submit(manager, "suspend", 3)
    bad = submit(manager, "demote", 4)
    manager.poll()
    backend.fail(bad)
    backend.run()
    nbytes = sum(done.nbytes for done in manager.poll())
    by = manager.stats().by
    assert 3 * PAGE == nbytes
    promoted, suspended, demoted = by["h2d", "promote"], by["d2h", "suspend"], by["d2h", "demote"]
    assert (1, 2, 2 * PAGE, 0) == (promoted.copies, promoted.pages, promoted.nbytes, promoted.failures)
    assert (1, 1, PAGE, 0) == (suspended.copies, suspended.pages, suspended.nbytes, suspended.failures)
    assert (0, 0, 0, 1) == (demoted.copies, demoted.pages, demoted.nbytes, demoted.failures)
    assert promoted.copy_s > 0.0
    assert 0 == by["d2h", "clean"].copies


def test_overlapping_jobs_are_seen(manager: TransferManager):
    """Two jobs of which one writes what the other touches are a bug of whoever submitted them."""
    submit(manager, "promote", 1)
    manager.submit(plan("promote", [2], [1]), after=NO_WAIT)
    with pytest.raises(InvariantViolation, match="while Job 0"):
        manager.poll()
