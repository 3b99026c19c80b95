"""The backend of a group: a copy is over when every rank has made it, whatever becomes of a rank meanwhile."""

import pytest

from kvkeep.agreement import wire
from kvkeep.agreement.leader import GroupBackend
from kvkeep.transfer.backend import NO_WAIT, BackendDied, Job, JobNumber, StillCopying
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.transfer.pools import plan


def launched(size: int = 2) -> tuple[GroupBackend, SimulatedBackend, Job]:
    """A copy that runs on all ranks."""
    inner = SimulatedBackend(page_nbytes=16, when=When.EARLY)
    backend = GroupBackend(inner, size)
    job = Job(JobNumber(7), plan("demote", [0], [0]), NO_WAIT, 16, 0.0)
    backend.launch(job)
    return backend, inner, job


def ended(inner: SimulatedBackend) -> None:
    for _ in range(20):
        inner.step()


def test_a_copy_is_over_when_every_rank_says_so() -> None:
    """Its time is that of the slowest, its error that of any; nobody is heard twice."""
    backend, inner, job = launched(3)
    assert [job] == backend.take() and [] == backend.take()
    ended(inner)
    backend.hear(1, [wire.Report(7, "no space", 50)], None)
    backend.hear(1, [wire.Report(7, None, 50)], None)
    assert [] == backend.completions()
    backend.hear(2, [wire.Report(7, None, 10**9), wire.Report(99, None, 0)], None)
    (outcome,) = backend.completions()
    assert (job, "rank 1: no space", 10**9) == (outcome.job, outcome.error, outcome.copy_ns)
    assert [] == backend.completions()
    assert not backend.order_after(job, object())


def test_a_dead_rank_ends_the_backend_once_nothing_moves_any_more() -> None:
    """The leader's own copies go on to their end first, and no new ones begin."""
    backend, inner, job = launched()
    backend.hear(1, [], "gone")
    assert [] == backend.completions()
    late = Job(JobNumber(8), plan("demote", [1], [1]), NO_WAIT, 16, 0.0)
    backend.launch(late)
    assert [job] == backend.take() and [job] == inner.jobs
    ended(inner)
    (outcome,) = backend.completions()
    assert "rank 1: gone" == outcome.error
    with pytest.raises(BackendDied, match="rank 1: gone"):
        backend.completions()


def test_a_backend_that_dies_when_a_copy_begins_frees_no_page_of_others() -> None:
    """The leader's copies have ended, and those of a follower go on: their pages are theirs until it says so."""

    class Dying(SimulatedBackend):
        def launch(self, job: Job) -> None:
            """The second copy finds that the device is gone."""
            if self.jobs:
                self.die("cable cut")
            super().launch(job)

    backend = GroupBackend(Dying(page_nbytes=16, when=When.EARLY), 2)
    manager = TransferManager(backend, bytes_in_flight_max=1 << 10, queue_pages_max=10, deadline_s=1e9)
    jobs = []
    for page in range(2):
        jobs.append(manager.submit(plan("demote", [page], [page]), after=NO_WAIT))
        assert [] == manager.poll()
    assert jobs == backend.take() and [] == manager.poll()
    for job in jobs:
        assert job is not None
        backend.hear(1, [wire.Report(job.number, None, 1)], None)
        done = manager.poll()
        assert [(job, "rank 0: cable cut")] == [(one.job, one.error) for one in done]
    late = manager.submit(plan("demote", [2], [2]), after=NO_WAIT)
    assert [late] == [one.job for one in manager.poll()] and "rank 0: cable cut" == manager.dead


def test_nothing_is_closed_while_other_ranks_copy() -> None:
    """The cache may go on without its host tier, so the pages of copies that others still make stay theirs."""
    backend, inner, job = launched(3)
    ended(inner)
    backend.hear(2, [wire.Report(7, None, 1)], None)
    for _ in range(2):
        with pytest.raises(StillCopying, match="rank 1 has not said that its copies are over"):
            backend.close(1.0)
    backend.hear(1, [wire.Report(7, None, 1)], None)
    assert [(job, None)] == [(one.job, one.error) for one in backend.close(0.0)]


def test_closing_reports_what_ranks_had_not_said_when_their_group_is_over() -> None:
    """A copy that one rank has not confirmed has failed; nobody will be heard any more."""
    backend, inner, job = launched()
    ended(inner)
    backend.leave()
    (outcome,) = backend.close(1.0)
    assert job is outcome.job and outcome.error is not None and "before every rank" in outcome.error
    backend, _, _ = launched()
    backend.hear(1, [], "gone")
    with pytest.raises(BackendDied):
        backend.close(1.0)
