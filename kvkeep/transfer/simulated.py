"""SimulatedBackend: copies that a seed, or a test by hand, makes as early, as late, as disordered as they may be.

Must not be kinder than a device.  Nothing moves but in `step` and at the earliest legal moment; nothing is random but
by the seed, so the same calls give the same run.

A job, once what it comes after is done:

    early   reads and writes at once, is reported late       `read` .............. `report`   (sources as they are now)
    split   reads at once, writes late                       `read` ... `write` .. `report`
    late    reads and writes at the last moment              ........... `read` `write` `report`

While it runs its targets hold garbage.  It stops the program (`InvariantViolation`) when a job could touch bytes that
somebody else is using: a page whose write is not done (a store without its barrier), or another job's pages; of pages
that slots are parts of, only the bytes.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.memory import POISON_BYTE, PageMemory, Plane
from kvkeep.transfer.backend import NO_WAIT, BackendDied, Job, Outcome
from kvkeep.transfer.pieces import Rows, SlotRoute, check_fits, pieces
from kvkeep.transfer.plan import Direction

STEP_NS = 10_000
IDLE_STEPS_MAX = 4


class When(Enum):
    """At which of the legal moments a job reads its sources and writes its targets."""

    EARLY = "early"
    SPLIT = "split"
    LATE = "late"


#: Page, offset and bytes: a part of a page.
PagePart: TypeAlias = tuple[int, int, int]


class Touched:
    """Whole pages of one pool, and parts of pages of it."""

    def __init__(self, pool: str, pages: Iterable[int], parts: Iterable[PagePart]) -> None:
        self.pages = {(pool, page) for page in pages}
        self.parts = [((pool, page), offset, offset + nbytes) for page, offset, nbytes in parts]

    def meets(self, other: "Touched") -> set[tuple[str, int]]:
        """The pages, as (pool, page), of which both have a byte."""
        met = self.pages & other.pages
        for page, start, end in self.parts:
            if page in other.pages or any(
                page == its and start < its_end and end > its_start for its, its_start, its_end in other.parts
            ):
                met.add(page)
        met.update(page for page, _, _ in other.parts if page in self.pages)
        return met


class Stream(Protocol):
    """Where whoever writes device pages queues the writes."""

    def follow(self, job: Job) -> None:
        """Writes that are queued from now on are made when `job` is over (no longer one of `SimulatedBackend.jobs`)."""


class PendingWrite:
    """An event of whoever writes device pages, or parts of them: not done until `finish`.

    behind: jobs that it begins after.
    """

    def __init__(
        self, backend: "SimulatedBackend", pages: "array[int]", parts: Iterable[PagePart], behind: Iterable[Job]
    ) -> None:
        self.pages = pages
        self.touched = Touched("device", pages, parts)
        self.behind = frozenset(behind)
        self.done = False
        self._backend = backend

    def query(self) -> bool:
        """Whether the write is over."""
        return self.done

    def finish(self) -> None:
        """The write is over; jobs that come after it may begin this very moment."""
        self.done = True
        self._backend.written(self)


class _Running:
    """A job that was launched: `moves` are what it does in its next steps, None for a step that passes."""

    def __init__(self, job: Job, when: When, moves: list[str | None], error: str | None) -> None:
        self.job = job
        self.when = when
        self.moves = moves
        self.error = error
        self.begun = False
        self.stuck = False
        self.began_step = 0
        self.read: list[Rows] = []
        self.read_slots: list[list[Rows]] = []


class SimulatedBackend:
    """A `Backend` that a test drives by `step`.

    device, host: the memory of the two pools; None for pools without bytes, of `page_nbytes` bytes a page.
    seed: decides everything that is random.
    fail_rate, stuck_rate: how often a launched job fails, or never ends (until `free` or `close`).
    when: the moment of every job; by the seed when None.
    """

    def __init__(
        self,
        device: PageMemory | None = None,
        host: PageMemory | None = None,
        *,
        page_nbytes: int | None = None,
        seed: int = 0,
        fail_rate: float = 0.0,
        stuck_rate: float = 0.0,
        when: When | None = None,
    ) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._fail_rate = fail_rate
        self._stuck_rate = stuck_rate
        self._when = when
        self._routes: dict[Direction, list[tuple[Rows, Rows]]] = {"h2d": [], "d2h": []}
        self._slot_routes: dict[Direction, SlotRoute] = {}
        self._pieces = pieces(device, host) if device is not None and host is not None else []
        if device is not None and host is not None:
            page_nbytes = self._map(device, host)
        if page_nbytes is None:
            raise BadInput("a simulated backend needs the memory of both pools, or page_nbytes")
        self._page_nbytes = page_nbytes
        self._running: dict[Job, _Running] = {}
        self._writes: list[PendingWrite] = []
        self._outcomes: list[Outcome] = []
        self._death: str | None = None
        self._closed = False
        self.steps = 0

    # ------------------------------------------------------------------ the test's side

    def clock(self) -> float:
        """Seconds that pass with steps: a clock for the manager."""
        return self.steps * STEP_NS / 1e9

    @property
    def jobs(self) -> list[Job]:
        """Jobs in flight, in the order of their launch."""
        return list(self._running)

    @property
    def movable(self) -> list[Job]:
        """Jobs that `step` can move: those whose event is done and that are not stuck."""
        return [job for job, running in self._running.items() if self._ready(running) and not running.stuck]

    def step(self, job: Job | None = None) -> bool:
        """Moves one job by one move, the given one or one of the seed's choice; False when none can move."""
        self.steps += 1
        if self._death is not None:
            return False
        self._begin_ready()
        if job is None:
            choice = self.movable
            if not choice:
                return False
            job = self._random.choice(choice)
        running = self._running.get(job)
        if running is None or running.stuck or not running.begun:
            return False
        self._move(running)
        return True

    def writing(
        self, pages: Iterable[int], behind: Iterable[Job] = (), *, parts: Iterable[PagePart] = ()
    ) -> PendingWrite:
        """Device pages are being written from now on: the event that ends it.  No job may touch them before.

        behind: jobs that the write is ordered after.   parts: bytes of pages of which others may be touched.
        """
        write = PendingWrite(self, array("i", pages), parts, behind)
        self._check_write(write)
        self._writes.append(write)
        return write

    def written(self, write: PendingWrite) -> None:
        """`PendingWrite.finish` says so."""
        self._writes.remove(write)
        self._begin_ready()

    def fail(self, job: Job, error: str = "injected failure") -> None:
        """The job will fail."""
        self._running[job].error = error

    def stick(self, job: Job) -> None:
        """The job does not go on until it is freed, or until `close`."""
        self._running[job].stuck = True

    def free(self, job: Job) -> None:
        """A stuck job goes on."""
        self._running[job].stuck = False

    def die(self, reason: str = "injected death") -> None:
        """The device is gone: what was in flight has stopped half-way."""
        self._death = reason
        self._running.clear()

    # ------------------------------------------------------------------ the manager's side

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self._page_nbytes

    def launch(self, job: Job) -> None:
        """Takes the job; an early one whose event is done moves its bytes here and now."""
        self._check_alive()
        if self._closed or job in self._running:
            raise InvariantViolation(f"{job} launched twice, or after close")
        if self._pieces:
            check_fits(job.plan, self._pieces[0], self._page_nbytes)
        when = self._when or self._random.choice(list(When))
        error = "simulated failure" if self._random.random() < self._fail_rate else None
        running = _Running(job, when, self._script(when), error)
        running.stuck = self._random.random() < self._stuck_rate
        self._running[job] = running
        self._begin_ready()

    def completions(self) -> list[Outcome]:
        """What `step` has ended."""
        self._check_alive()
        out, self._outcomes = self._outcomes, []
        return out

    def order_after(self, job: Job, stream: object) -> bool:
        """The `Stream` of a test follows a job that has been launched; anything else is no stream."""
        if job not in self._running or not hasattr(stream, "follow"):
            return False
        stream.follow(job)
        return True

    def wait(self, timeout_s: float) -> None:
        """Time passes."""
        self.step()

    def close(self, timeout_s: float) -> list[Outcome]:
        """What has begun lands now, at the latest moment that there is; what has not is cut short."""
        self._check_alive()
        self._begin_ready()
        for running in list(self._running.values()):
            if running.begun:
                running.stuck = False
                while running.job in self._running:
                    self._move(running)
            else:
                running.error = "cut short: the transfers were closed"
                self._report(running)
        self._closed = True
        return self.completions()

    # ------------------------------------------------------------------ inside

    def _map(self, device: PageMemory, host: PageMemory) -> int:
        page_nbytes = 0
        for piece in self._pieces:
            device_rows, host_rows = _host_rows([piece.device, piece.host])
            self._routes["h2d"].append((host_rows, device_rows))
            self._routes["d2h"].append((device_rows, host_rows))
            page_nbytes += host_rows.shape[1]
        device_planes, host_planes = _host_rows(device.planes()), _host_rows(host.planes())
        self._slot_routes = {
            "h2d": SlotRoute(host_planes, device_planes),
            "d2h": SlotRoute(device_planes, host_planes),
        }
        return page_nbytes

    def _script(self, when: When) -> list[str | None]:
        """What is left to do once the job has begun, in the order of `list.pop`."""
        idle: list[str | None] = [None] * self._random.randint(0, IDLE_STEPS_MAX)
        if when is When.LATE:
            return ["report", "write", "read", *idle]
        if when is When.SPLIT:
            return ["report", *idle, "write"]
        return ["report", *idle]

    def _ready(self, running: _Running) -> bool:
        after = running.job.after
        return running.begun or after is NO_WAIT or after.query()

    def _begin_ready(self) -> None:
        for running in self._running.values():
            if not running.begun and self._ready(running):
                self._begin(running)

    def _begin(self, running: _Running) -> None:
        """The earliest moment at which the job may touch bytes."""
        self._check_free(running)
        running.begun = True
        running.began_step = self.steps
        self._scribble(running.job)
        if running.when is not When.LATE:
            self._read(running)
        if running.when is When.EARLY:
            self._write(running)

    def _move(self, running: _Running) -> None:
        move = running.moves.pop()
        if move == "read":
            self._read(running)
        elif move == "write":
            self._write(running)
        elif move == "report":
            self._report(running)

    def _report(self, running: _Running) -> None:
        del self._running[running.job]
        steps = self.steps - running.began_step + 1 if running.begun else 0
        self._outcomes.append(Outcome(running.job, running.error, steps * STEP_NS))

    def _read(self, running: _Running) -> None:
        plan = running.job.plan
        running.read = [source[list(plan.sources)] for source, _ in self._routes[plan.direction]]
        running.read_slots = [[source.copy() for source, _ in parts] for parts in self._slot_views(running.job)]

    def _write(self, running: _Running) -> None:
        """A copy that fails writes some of its pages and slots, not all."""
        plan = running.job.plan
        every = len(plan) + len(plan.slots)
        count = every if running.error is None else self._random.randrange(every)
        for (_, target), read in zip(self._routes[plan.direction], running.read, strict=True):
            for i in range(min(count, len(plan))):
                target[plan.targets[i]] = read[i]
        slots = list(zip(self._slot_views(running.job), running.read_slots, strict=True))
        for parts, reads in slots[: max(0, count - len(plan))]:
            for (_, part), bytes_read in zip(parts, reads, strict=True):
                part[:] = bytes_read

    def _scribble(self, job: Job) -> None:
        for _, target in self._routes[job.plan.direction]:
            target[list(job.plan.targets)] = POISON_BYTE
        for parts in self._slot_views(job):
            for _, part in parts:
                part[:] = POISON_BYTE

    def _slot_views(self, job: Job) -> list[list[tuple[Rows, Rows]]]:
        """Source and target bytes of each part of each slot; nothing of pools without bytes."""
        route = self._slot_routes.get(job.plan.direction)
        return [list(route.views(slot)) for slot in job.plan.slots] if route is not None else []

    def _check_alive(self) -> None:
        if self._death is not None:
            raise BackendDied(self._death)

    def _check_free(self, running: _Running) -> None:
        """Nobody else may be using what the job is going to touch."""
        job = running.job
        reads, writes = _touched(job)
        for write in self._writes:
            both = reads.meets(write.touched) | writes.meets(write.touched)
            if both and job not in write.behind:
                raise InvariantViolation(f"{job} may touch {min(both)} while it is being written: a missing barrier")
        for other in self._running.values():
            if other is running or not other.begun:
                continue
            others_reads, others_writes = _touched(other.job)
            both = writes.meets(others_reads) | writes.meets(others_writes) | reads.meets(others_writes)
            if both:
                raise InvariantViolation(f"{job} may touch {min(both)} while {other.job} does")

    def _check_write(self, write: PendingWrite) -> None:
        for running in self._running.values():
            reads, writes = _touched(running.job)
            both = reads.meets(write.touched) | writes.meets(write.touched)
            if running.begun and both and running.job not in write.behind:
                raise InvariantViolation(f"a write of {sorted(both)} begins while {running.job} uses it")


def _touched(job: Job) -> tuple[Touched, Touched]:
    """What a job reads and what it writes."""
    plan = job.plan
    source, target = ("host", "device") if plan.direction == "h2d" else ("device", "host")
    return (
        Touched(source, plan.sources, ((slot.source, slot.source_offset, slot.nbytes) for slot in plan.slots)),
        Touched(target, plan.targets, ((slot.target, slot.target_offset, slot.nbytes) for slot in plan.slots)),
    )


def _host_rows(planes: Sequence[Plane]) -> list[Rows]:
    rows = [plane for plane in planes if isinstance(plane, np.ndarray)]
    if len(rows) < len(planes):
        raise BadInput("a simulated backend copies host memory only")
    return rows
