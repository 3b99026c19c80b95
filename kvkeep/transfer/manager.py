"""TransferManager: which copies run, which wait and which are not made; what became of each.

Must not know names, tokens or how bytes move.  Reads as the life of a job: submit, revoke or start, settle; then
deadlines, a backend's death, the end.

    queued --start--> in flight --the backend says it is over--> final completion
      |  \\--deadline, death, close--> final completion (failed; no byte was touched)
      \\--revoke--> gone

Decisions are taken under the lock; the backend is called outside it, by one thread at a time.  `submit`, `revoke` and
`stats` may be called under a cache's lock: they take no other lock and never call the backend.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from kvkeep.config import check_int
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.transfer.backend import After, Backend, BackendDied, Job, JobNumber, Outcome, StillCopying
from kvkeep.transfer.plan import Plan
from kvkeep.transfer.tally import Queues, Tally, TransferStats

log = logging.getLogger(__name__)

#: How long `close` waits for the backend before it looks at its own clock again.
CLOSE_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a job, or (`final` is False) that it is overdue.

    final: the copy is over, or never began, or its backend is dead: no byte of it moves any more, and its pages are
        the caller's again.  Each job has exactly one final completion, unless it was revoked.  An overdue one is
        reported once before that, so that those who wait can be released; its pages stay owned.
    ok: every page and slot has arrived; otherwise the targets hold garbage and `error` says why.
    late: the job was overdue.   nbytes: what has been copied: 0 unless ok.   copy_ns: from its first byte to its last.
    """

    job: Job
    ok: bool
    final: bool
    error: str | None
    late: bool
    nbytes: int
    copy_ns: int

    @property
    def plan(self) -> Plan:
        """What the job was to copy."""
        return self.job.plan


class Watcher(Protocol):
    """Hears of jobs, with the manager's lock held: it must be quick, and must not call the manager."""

    def started(self, job: Job) -> None:
        """The backend gets it now."""

    def over(self, completion: Completion) -> None:
        """It is over; one that was not started is heard of here too."""


class TransferManager:
    """Runs the copies of one pair of pools over one backend.

    bytes_in_flight_max: bytes of the copies that run at the same time.  A load that is larger runs alone; a store is
        not made unless it fits with everything that runs or waits before it, or there is nothing.  It bounds how long a
        new load waits for copies that run already: 256 MiB are about 5 ms of a PCIe 5 link.
    queue_pages_max: pages of the loads that wait, a load of slots alone as one; one load always may, however large.
    deadline_s: seconds from submission after which a job is overdue.
    clock: seconds that never go back.
    watch: told of every job that starts and ends, if set.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bytes_in_flight_max: int,
        queue_pages_max: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_nbytes = backend.page_nbytes
        check_int("bytes_in_flight_max", bytes_in_flight_max, at_least=self._page_nbytes)
        check_int("queue_pages_max", queue_pages_max, at_least=1)
        if not deadline_s > 0:
            raise BadInput(f"deadline_s is {deadline_s!r}: it must be a number of seconds above 0")
        self._backend = backend
        self._in_flight_nbytes_max = bytes_in_flight_max
        self._queue_pages_max = queue_pages_max
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = Lock()  # guards every field below; never held while the backend is called
        self._driving = Lock()  # held by the one thread that calls the backend
        self._loads: dict[Job, None] = {}  # queued, in order of submission
        self._stores: dict[Job, None] = {}
        self._in_flight: dict[Job, None] = {}
        self._queued_load_pages = 0
        self._queued_nbytes = 0
        self._in_flight_nbytes = 0
        self._next_due = float("inf")  # no job becomes overdue before
        self._submitted = 0
        self._closed = False
        self._stopping = False  # closed, and the backend has not stopped yet
        self._dead: str | None = None
        self._tally = Tally()
        self.watch: Watcher | None = None

    # ------------------------------------------------------------------ questions

    @property
    def backend(self) -> Backend:
        """What makes the copies."""
        return self._backend

    @property
    def dead(self) -> str | None:
        """Why the backend died; None while it lives."""
        return self._dead

    @property
    def ended(self) -> bool:
        """Whether it makes no copy any more: it was closed, or its backend died."""
        return self._closed or self._dead is not None

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs, so that `poll` can have something to say."""
        return bool(self._in_flight or self._loads or self._stores)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs, but for copies that are overdue: they may never end."""
        if not self.busy:
            return True
        with self._lock:
            return not self._loads and not self._stores and self._all_overdue()

    @property
    def store_pages(self) -> int:
        """Pages of a store that fit now with everything that runs or waits; 0 when no copy is made any more."""
        with self._lock:
            left = self._in_flight_nbytes_max - self._in_flight_nbytes - self._queued_nbytes
        return max(0, left // self._page_nbytes) if not self.ended else 0

    def takes_load(self, queue_pages: int) -> bool:
        """Whether `submit` would take a load of so many pages (`Plan.queue_pages`) now."""
        with self._lock:
            return not self.ended and self._queue_takes(queue_pages)

    def stats(self) -> TransferStats:
        """Counters since the start, and the queues now."""
        with self._lock:
            queues = Queues(
                len(self._loads),
                len(self._stores),
                self._queued_load_pages,
                len(self._in_flight),
                self._in_flight_nbytes,
            )
            return self._tally.snapshot(queues, self._dead)

    # ------------------------------------------------------------------ the life of a job

    def submit(self, plan: Plan, *, after: After) -> Job | None:
        """Takes a plan to be copied; `poll` starts it.

        after: the copy may begin when this is done: for a store the event recorded after the last write of its
            sources; `NO_WAIT` says that there is nothing to wait for.
        None when the copy is not made: a bound refuses it, the backend is dead, or the manager is closed.
        """
        if after is None:
            raise InvariantViolation(f"{plan} without `after`: pass an event or NO_WAIT")
        nbytes = plan.nbytes(self._page_nbytes)
        with self._lock:
            if self._closed or self._dead is not None or not self._has_room(plan, nbytes):
                self._tally.refused(plan)
                return None
            job = Job(JobNumber(self._submitted), plan, after, nbytes, self._clock() + self._deadline_s)
            self._submitted += 1
            self._queued_nbytes += nbytes
            self._next_due = min(self._next_due, job.due)
            if plan.direction == "h2d":
                self._queued_load_pages += plan.queue_pages
                self._loads[job] = None
            else:
                self._stores[job] = None
        return job

    def revoke(self, job: Job) -> bool:
        """Takes back a job that has not started: True, and its pages are not touched and no completion follows.

        False when it has started or is over.
        """
        with self._lock:
            if not self._unqueue(job):
                return False
            self._tally.revoked += 1
            return True

    def order_after(self, job: Job, stream: object) -> bool:
        """Puts what is queued on `stream` from now on behind a job that runs; never blocks.

        False when the host has to wait for it: it has not started, there are no streams, or another thread drives the
        backend at this moment.
        """
        if not self._driving.acquire(blocking=False):
            return False
        try:
            return self._backend.order_after(job, stream)
        finally:
            self._driving.release()

    def start(self) -> None:
        """Starts what may start now, loads first.  For callers who cannot wait for the next `poll`; never blocks."""
        if not self.busy or not self._driving.acquire(blocking=False):
            return
        try:
            self._start_queued()
        except BackendDied as death:
            # The next poll asks the backend, hears it again and reports the jobs.
            log.debug("start: %s", death)
        finally:
            self._driving.release()

    def poll(self) -> list[Completion]:
        """What has become of jobs since the last call; starts what may start now, loads first.  Never blocks.

        Everything is done in the caller's thread.  While another thread is in here it returns at once with nothing:
        that thread has the completions.
        """
        if not self.busy or not self._driving.acquire(blocking=False):
            return []
        try:
            return self._drive()
        finally:
            self._driving.release()

    def close(self, *, drain: bool, timeout_s: float) -> list[Completion]:
        """Ends: nothing runs afterwards, and every job has had its one final completion, the rest of them here.

        But for copies that cannot be stopped in time: they are overdue, keep their pages, and `poll` ends them later.

        drain: finish what is queued and in flight, for `timeout_s` seconds at most; otherwise cancel what has not
            started and cut the rest short.
        """
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        until = time.monotonic() + timeout_s
        with self._driving:
            done: list[Completion] = []
            while drain and self.busy and time.monotonic() < until:
                done += self._drive()
                if self.busy:
                    self._backend.wait(min(CLOSE_WAIT_S, max(0.0, until - time.monotonic())))
            done += self._end_queued("cancelled: the transfers were closed before it started")
            try:
                outcomes = self._backend.close(max(0.0, until - time.monotonic()))
                done += [self._settle(outcome) for outcome in outcomes]
            except StillCopying as error:
                log.error("%s: the pages of %s stay theirs", error, list(self._in_flight))
                return done + self._give_up(str(error))
            except BackendDied as death:
                done += self._bury(death)
            if self._in_flight:
                raise InvariantViolation(f"the backend has closed and did not report {list(self._in_flight)}")
            return done

    # ------------------------------------------------------------------ driving the backend

    def _drive(self) -> list[Completion]:
        """One round: what is over, what is overdue, what starts.  The caller holds `_driving`."""
        done: list[Completion] = []
        try:
            if self._stopping:
                return [self._settle(outcome) for outcome in self._backend.close(0.0)]
            done += [self._settle(outcome) for outcome in self._backend.completions()]
            done += self._expire()
            self._start_queued()
        except StillCopying as error:
            log.debug("poll: %s", error)
        except BackendDied as death:
            done += self._bury(death)
        return done

    def _start_queued(self) -> None:
        while True:
            with self._lock:
                job = self._next()
                if job is None:
                    return
                self._unqueue(job)
                self._in_flight[job] = None
                self._in_flight_nbytes += job.nbytes
                if self.watch is not None:
                    self.watch.started(job)
            self._backend.launch(job)

    def _next(self) -> Job | None:
        """The job to start now: the oldest load; a store only when no load waits; nothing while it does not fit."""
        job = next(iter(self._loads or self._stores), None)
        if job is None or self._in_flight_nbytes + job.nbytes <= self._in_flight_nbytes_max or self._alone():
            return job
        return None

    def _alone(self) -> bool:
        """Whether a job that is larger than the bound may run: copies that may never end do not hold it up for ever."""
        return self._in_flight_nbytes < self._in_flight_nbytes_max and self._all_overdue()

    def _all_overdue(self) -> bool:
        return all(job.overdue for job in self._in_flight)

    def _has_room(self, plan: Plan, nbytes: int) -> bool:
        if plan.direction == "h2d":
            return self._queue_takes(plan.queue_pages)
        if not self._loads and not self._stores and self._alone():
            return True
        return self._in_flight_nbytes + self._queued_nbytes + nbytes <= self._in_flight_nbytes_max

    def _queue_takes(self, pages: int) -> bool:
        return not self._loads or self._queued_load_pages + pages <= self._queue_pages_max

    def _unqueue(self, job: Job) -> bool:
        queue = self._loads if job.plan.direction == "h2d" else self._stores
        if job not in queue:
            return False
        del queue[job]
        self._queued_nbytes -= job.nbytes
        if queue is self._loads:
            self._queued_load_pages -= job.plan.queue_pages
        return True

    # ------------------------------------------------------------------ ends

    def _settle(self, outcome: Outcome) -> Completion:
        """The final completion of a job that was in flight."""
        job = outcome.job
        with self._lock:
            if job not in self._in_flight:
                raise InvariantViolation(f"the backend reported {job}, which is not in flight: reported twice?")
            del self._in_flight[job]
            self._in_flight_nbytes -= job.nbytes
            return self._finish(job, outcome.error, outcome.copy_ns)

    def _finish(self, job: Job, error: str | None, copy_ns: int = 0) -> Completion:
        """Under the lock; the job is in no queue any more."""
        ok = error is None
        self._tally.ended(job, ok, copy_ns)
        done = Completion(job, ok, True, error, job.overdue, job.nbytes if ok else 0, copy_ns)
        if self.watch is not None:
            self.watch.over(done)
        return done

    def _end_queued(self, error: str) -> list[Completion]:
        """The final completions of everything that has not started."""
        with self._lock:
            ended = [*self._loads, *self._stores]
            for job in ended:
                self._unqueue(job)
            return [self._finish(job, error) for job in ended]

    def _expire(self) -> list[Completion]:
        """Jobs that have become overdue: those in flight are reported and stay, those queued end."""
        now = self._clock()
        if now < self._next_due:
            return []
        done = []
        with self._lock:
            for job in self._overdue(now):
                job.overdue = True
                self._tally.overdue += 1
                error = f"overdue: not over {self._deadline_s:g} s after it was submitted"
                if self._unqueue(job):
                    done.append(self._finish(job, f"{error}; it had not started"))
                else:
                    done.append(Completion(job, False, False, error, True, 0, 0))
            waiting = [job.due for job in self._every_job() if not job.overdue]
            self._next_due = min(waiting, default=float("inf"))
        return done

    def _give_up(self, error: str) -> list[Completion]:
        """What still runs is overdue, all of it; it keeps its pages."""
        self._stopping = True
        with self._lock:
            jobs = [job for job in self._in_flight if not job.overdue]
            for job in jobs:
                job.overdue = True
                self._tally.overdue += 1
        return [Completion(job, False, False, error, True, 0, 0) for job in jobs]

    def _overdue(self, now: float) -> list[Job]:
        return [job for job in self._every_job() if job.due <= now and not job.overdue]

    def _every_job(self) -> Iterator[Job]:
        yield from self._in_flight
        yield from self._loads
        yield from self._stores

    def _bury(self, death: BackendDied) -> list[Completion]:
        """The backend is dead: what was in flight is over and failed, and so is what waited for it."""
        error = f"the copy backend died: {death}"
        with self._lock:
            if self._dead is None:
                self._dead = str(death)
                log.error("%s; no more copies are made", error)
            lost = list(self._in_flight)
            self._in_flight.clear()
            self._in_flight_nbytes = 0
            done = [self._finish(job, error) for job in lost]
        return done + self._end_queued(error)
