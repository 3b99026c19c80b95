"""HostBackend: threads that copy between two pools in host memory.

Must not know who waits for a copy.  The threads touch what is in this file and page bytes, nothing else.

A job is cut into tasks of whole pages, the last with its slots; idle threads take tasks, loads first.  The thread that
ends a job's last task leaves its outcome for `completions`.  numpy lets go of the interpreter while a piece is copied.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvkeep.config import check_int
from kvkeep.errors import BadInput
from kvkeep.tiers.memory import PageMemory, Plane
from kvkeep.transfer.backend import NO_WAIT, BackendDied, Job, Outcome, StillCopying
from kvkeep.transfer.pieces import Rows, SlotRoute, check_fits, pieces
from kvkeep.transfer.plan import Direction

#: Bytes a thread copies before it looks for the next task: small enough that two threads end a job together and that a
#: load overtakes queued stores soon, large enough that the handing over (about 10 us) does not show.
TASK_NBYTES = 8 * 2**20

#: How often `wait` asks for events that jobs have to wait for; nobody tells when one is done.
EVENT_PERIOD_S = 0.0005

CUT_SHORT = "cut short: the transfers were closed"


@dataclass(slots=True)
class _Running:
    """A job and what is left of it.  Changed under the backend's lock only."""

    job: Job
    tasks_left: int
    started_ns: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    """Pages `first` to `last` of a job's plan; its slots too when `last` is the last one."""

    running: _Running
    first: int
    last: int


class HostBackend:
    """Really asynchronous copies between `device` (the pool that the model reads) and `host`, both in host memory.

    threads: copies at the same time.  Two come near the bandwidth of most memory; each is a core that the model
        does not have while it copies.
    """

    def __init__(self, device: PageMemory, host: PageMemory, *, threads: int = 2) -> None:
        check_int("threads", threads, at_least=1)
        found = pieces(device, host)
        device_rows = [_host_rows(piece.device, "device") for piece in found]
        host_rows = [_host_rows(piece.host, "host") for piece in found]
        device_planes = [_host_rows(plane, "device") for plane in device.planes()]
        host_planes = [_host_rows(plane, "host") for plane in host.planes()]
        self._first_piece = found[0]
        self._page_nbytes = sum(int(rows.shape[1]) for rows in host_rows)
        self._routes: dict[Direction, list[tuple[Rows, Rows]]] = {
            "h2d": list(zip(host_rows, device_rows, strict=True)),
            "d2h": list(zip(device_rows, host_rows, strict=True)),
        }
        self._slot_routes: dict[Direction, SlotRoute] = {
            "h2d": SlotRoute(host_planes, device_planes),
            "d2h": SlotRoute(device_planes, host_planes),
        }
        self._held: list[Job] = []  # launched, but what they come after is not done; the manager's thread only
        self._changed = threading.Condition()  # guards what follows
        self._tasks: dict[Direction, deque[_Task]] = {"h2d": deque(), "d2h": deque()}
        self._running: dict[Job, _Running] = {}
        self._outcomes: list[Outcome] = []
        self._stopping = False
        self._fault: str | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"kvkeep-copy-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ the manager's side

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self._page_nbytes

    def launch(self, job: Job) -> None:
        """Hands the job to the threads, now or when what it comes after is done."""
        self._check_alive()
        check_fits(job.plan, self._first_piece, self._page_nbytes)
        self._held.append(job)
        self._release_held()

    def completions(self) -> list[Outcome]:
        """What has ended; raises `BackendDied` once every thread has stopped and all that ended has been said."""
        self._release_held()
        with self._changed:
            out, self._outcomes = self._outcomes, []
        if not out:
            self._check_alive()
        return out

    def order_after(self, job: Job, stream: object) -> bool:
        """False: whoever writes host memory is no stream that could be told to wait."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Blocks until a job has ended or a thread has died."""
        until = time.monotonic() + timeout_s
        while self._held and not self._outcomes and time.monotonic() < until:
            self._release_held()
            time.sleep(EVENT_PERIOD_S)
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes or self._fault, max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> list[Outcome]:
        """Each thread ends the page at hand; what no thread has begun is cut short."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise StillCopying(f"copies did not stop within {timeout_s:g} s")
        if self._fault:
            raise BackendDied(self._fault)
        out, self._outcomes = self._outcomes, []
        out += [self._outcome(running, running.error or CUT_SHORT) for running in self._running.values()]
        out += [Outcome(job, CUT_SHORT, 0) for job in self._held]
        self._running.clear()
        self._held.clear()
        return out

    # ------------------------------------------------------------------ inside, the manager's thread

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for job in held:
            try:
                ready = job.after is NO_WAIT or job.after.query()
            except Exception as error:
                self._outcomes.append(Outcome(job, f"its event failed: {type(error).__name__}: {error}", 0))
                continue
            if ready:
                self._hand_over(job)
            else:
                self._held.append(job)

    def _hand_over(self, job: Job) -> None:
        with self._changed:
            running = _Running(job, 0)
            tasks = list(self._cut(running))
            running.tasks_left = len(tasks)
            self._running[job] = running
            self._tasks[job.plan.direction].extend(tasks)
            self._changed.notify_all()

    def _cut(self, running: _Running) -> Iterator[_Task]:
        pages = len(running.job.plan)
        share = -(-pages // len(self._threads))
        step = max(1, min(share, TASK_NBYTES // self._page_nbytes))
        for first in range(0, max(pages, 1), step):
            yield _Task(running, first, min(first + step, pages))

    def _check_alive(self) -> None:
        """`BackendDied` when a thread has ended that nobody has stopped; not before the others have stopped too."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if not dead or (self._stopping and not self._fault):
            return
        with self._changed:
            self._fault = self._fault or f"{dead[0]} ended"
            self._stopping = True
            self._changed.notify_all()
        if len(dead) == len(self._threads) and not self._outcomes:
            raise BackendDied(self._fault)

    # ------------------------------------------------------------------ inside, the copying threads

    def _work(self) -> None:
        try:
            while (task := self._take()) is not None:
                error = self._copy(task)
                self._end(task, error)
        except BaseException as error:  # nothing may end a thread unseen
            self._fault = f"{threading.current_thread().name} ended with {type(error).__name__}: {error}"
            with self._changed:
                self._stopping = True
                self._changed.notify_all()

    def _take(self) -> _Task | None:
        """The next task, loads first; None when it is time to stop."""
        with self._changed:
            while not self._stopping:
                for queue in self._tasks.values():
                    if queue:
                        task = queue.popleft()
                        task.running.started_ns = task.running.started_ns or time.perf_counter_ns()
                        return task
                self._changed.wait()
            return None

    def _copy(self, task: _Task) -> str | None:
        """Copies the pages of a task, and the slots; what went wrong, or None."""
        plan = task.running.job.plan
        route = self._routes[plan.direction]
        try:
            for i in range(task.first, task.last):
                if task.running.error is not None or self._stopping:
                    return task.running.error or CUT_SHORT
                source_page, target_page = plan.sources[i], plan.targets[i]
                for source, target in route:
                    target[target_page] = source[source_page]
            for slot in plan.slots if task.last == len(plan) else ():
                if task.running.error is not None or self._stopping:
                    return task.running.error or CUT_SHORT
                for source, target in self._slot_routes[plan.direction].views(slot):
                    target[:] = source
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _end(self, task: _Task, error: str | None) -> None:
        running = task.running
        with self._changed:
            running.error = running.error or error
            running.tasks_left -= 1
            if not running.tasks_left:
                del self._running[running.job]
                self._outcomes.append(self._outcome(running, running.error))
                self._changed.notify_all()

    @staticmethod
    def _outcome(running: _Running, error: str | None) -> Outcome:
        ns = time.perf_counter_ns() - running.started_ns if running.started_ns else 0
        return Outcome(running.job, error, ns)


def _host_rows(plane: Plane, side: str) -> Rows:
    if not isinstance(plane, np.ndarray):
        raise BadInput(f"the {side} pool is in the memory of {plane.device}: this backend copies host memory only")
    return plane
