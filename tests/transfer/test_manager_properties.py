"""The manager over the simulated backend, against a model that keeps lists and recounts everything each time."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from kvkeep.transfer.backend import NO_WAIT, After, Job, Outcome
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import DIRECTION_OF, Cause
from kvkeep.transfer.simulated import PendingWrite, SimulatedBackend
from tests.transfer.pools import LAYOUT, fill_all, host_memory, plan

PAGES = 24
IN_FLIGHT_PAGES_MAX = 5
QUEUE_PAGES_MAX = 7
DEADLINE_S = 3.0
PAGE = LAYOUT.page_nbytes


@dataclass(eq=False)
class Entry:
    """What the model knows of a job: `state` is queued, running, reported (by the backend), over or revoked."""

    cause: Cause
    sources: list[int]
    targets: list[int]
    submitted: float
    expected: list[bytes]
    state: str = "queued"
    said_overdue: bool = False
    finals: int = 0
    untouched: list[bytes] = field(default_factory=list)

    @property
    def load(self) -> bool:
        return DIRECTION_OF[self.cause] == "h2d"


class ManagerMachine(RuleBasedStateMachine):
    """Pages of the two pools are numbered alike; a job takes pages that no other job has, of either pool."""

    jobs = Bundle("jobs")
    writes = Bundle("writes")

    rates = st.sampled_from([0.0, 0.2])

    @initialize(seed=st.integers(0, 2**32), fail_rate=rates, stuck_rate=rates)
    def start_empty(self, seed: int, fail_rate: float, stuck_rate: float) -> None:
        self.device, self.host = host_memory(PAGES), host_memory(PAGES)
        fill_all(self.device, PAGES, 0)
        fill_all(self.host, PAGES, 1000)
        machine = self

        class Watched(SimulatedBackend):
            """Tells the model of each launch and each outcome, in order."""

            def launch(self, job: Job) -> None:
                machine.launched(job)
                super().launch(job)

            def completions(self) -> list[Outcome]:
                said = super().completions()
                for outcome in said:
                    machine.reported(outcome)
                return said

        self.backend = Watched(self.device, self.host, seed=seed, fail_rate=fail_rate, stuck_rate=stuck_rate)
        self.now = 0.0
        self.manager = TransferManager(
            self.backend,
            bytes_in_flight_max=IN_FLIGHT_PAGES_MAX * PAGE,
            queue_pages_max=QUEUE_PAGES_MAX,
            deadline_s=DEADLINE_S,
            clock=lambda: self.now,
        )
        self.entries: dict[Job, Entry] = {}
        self.open_writes: list[PendingWrite] = []
        self.refused = 0
        self.dead = False
        self.closing = False
        self.expires = True  # `poll` and `close` end what is overdue before they start anything; `start` does not

    # ------------------------------------------------------------------ the model

    def queued(self, load: bool) -> list[Job]:
        return [job for job, entry in self.entries.items() if entry.state == "queued" and entry.load == load]

    def may_start(self, load: bool) -> list[Job]:
        return [job for job in self.queued(load) if not (self.expires and self.is_overdue(self.entries[job]))]

    def is_overdue(self, entry: Entry) -> bool:
        return self.now >= entry.submitted + DEADLINE_S

    def running_pages(self) -> int:
        return sum(len(entry.sources) for entry in self.entries.values() if entry.state == "running")

    def queued_pages(self, load: bool) -> int:
        return sum(len(self.entries[job].sources) for job in self.queued(load))

    def launched(self, job: Job) -> None:
        """What must hold at the moment of a launch."""
        entry = self.entries[job]
        assert "queued" == entry.state, "a job starts once, and never after it was revoked or is over"
        assert entry.load or not self.may_start(load=True), "a store started while a load waits"
        assert [job] == self.may_start(entry.load)[:1], "jobs of one direction start in order of submission"
        together = self.running_pages() + len(entry.sources)
        beside = [one for one in self.entries.values() if one.state == "running"]
        alone = self.running_pages() < IN_FLIGHT_PAGES_MAX and all(self.is_overdue(one) for one in beside)
        assert together <= IN_FLIGHT_PAGES_MAX or alone
        entry.state = "running"

    def reported(self, outcome: Outcome) -> None:
        """The backend says that a copy is over."""
        entry = self.entries[outcome.job]
        assert "running" == entry.state
        entry.state = "reported"
        if outcome.error is None:
            assert entry.expected == self.target_bytes(entry)

    def in_jobs(self) -> set[int]:
        busy = [entry for entry in self.entries.values() if entry.state in ("queued", "running")]
        return {page for entry in busy for page in entry.sources + entry.targets}

    def taken(self) -> set[int]:
        return self.in_jobs() | {page for write in self.open_writes for page in write.pages}

    def target_bytes(self, entry: Entry) -> list[bytes]:
        memory = self.device if entry.load else self.host
        return [memory.page_bytes(page) for page in entry.targets]

    def hear(self, said: list[Completion]) -> None:
        """What must hold of what the manager says."""
        for completion in said:
            entry = self.entries[completion.job]
            assert completion.ok == (completion.error is None)
            if not completion.final:
                assert (False, False) == (entry.said_overdue, completion.ok)
                assert entry.state == "running" or (self.closing and entry.state == "reported")  # it tells all at once
                assert self.is_overdue(entry)
                entry.said_overdue = True
                continue
            entry.finals += 1
            if entry.state == "queued":
                assert not completion.ok and entry.untouched == self.target_bytes(entry)
                assert self.dead or self.closing or self.is_overdue(entry)
            else:
                assert entry.state == "reported" or (entry.state == "running" and self.dead and not completion.ok)
                assert completion.late == entry.said_overdue
            entry.state = "over"

    # ------------------------------------------------------------------ what may happen

    @rule(
        target=jobs,
        cause=st.sampled_from(sorted(DIRECTION_OF)),
        count=st.integers(1, 6),
        shift=st.integers(0, PAGES - 1),
        write=st.none() | writes,
    )
    def submit(self, cause: Cause, count: int, shift: int, write: PendingWrite | None) -> object:
        taken = self.taken()
        free = [page for i in range(PAGES) if (page := (shift + i) % PAGES) not in taken]
        after: After = NO_WAIT
        if write in self.open_writes and DIRECTION_OF[cause] == "d2h" and write is not None:
            after, sources = write, [page for page in write.pages if page not in self.in_jobs()]
            count = len(sources)
        else:
            sources, free = free[:count], free[count:]
        targets = free[:count]
        if not count or len(sources) < count or len(targets) < count:
            return multiple()
        load = DIRECTION_OF[cause] == "h2d"
        pending = self.running_pages() + self.queued_pages(True) + self.queued_pages(False)
        if load:
            fits = not self.queued(True) or self.queued_pages(True) + count <= QUEUE_PAGES_MAX
        else:
            running = [entry for entry in self.entries.values() if entry.state == "running"]
            alone = self.running_pages() == pending < IN_FLIGHT_PAGES_MAX and all(one.said_overdue for one in running)
            fits = alone or pending + count <= IN_FLIGHT_PAGES_MAX
        job = self.manager.submit(plan(cause, sources, targets), after=after)
        assert (fits and not self.manager.dead) == (job is not None)
        if job is None:
            self.refused += 1
            return multiple()
        memory = self.host if load else self.device
        entry = Entry(cause, sources, targets, self.now, [memory.page_bytes(page) for page in sources])
        entry.untouched = self.target_bytes(entry)
        self.entries[job] = entry
        return job

    @rule(job=jobs)
    def revoke(self, job: Job) -> None:
        entry = self.entries[job]
        assert (entry.state == "queued") == self.manager.revoke(job)
        if entry.state == "queued":
            entry.state = "revoked"

    @rule()
    def poll(self) -> None:
        self.hear(self.manager.poll())
        for entry in self.entries.values():
            assert not (self.dead and entry.state in ("queued", "running"))
            assert "reported" != entry.state, "an outcome was lost"
            if self.is_overdue(entry):
                assert "queued" != entry.state, "a job that could not start ends at its deadline"
                assert entry.said_overdue or "running" != entry.state

    @rule()
    def start(self) -> None:
        self.expires = False
        self.manager.start()
        self.expires = True

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.backend.step()

    @rule(choice=st.integers(0, 99))
    def step_one(self, choice: int) -> None:
        movable = self.backend.movable
        if movable:
            self.backend.step(movable[choice % len(movable)])

    @rule(target=writes, first=st.integers(0, PAGES - 1), count=st.integers(1, 3))
    def begin_write(self, first: int, count: int) -> object:
        pages = [page for page in range(first, min(first + count, PAGES)) if page not in self.taken()]
        if not pages:
            return multiple()
        write = self.backend.writing(pages)
        self.open_writes.append(write)
        return write

    @rule(write=writes)
    def finish_write(self, write: PendingWrite) -> None:
        if write in self.open_writes:
            self.open_writes.remove(write)
            write.finish()

    @rule(choice=st.integers(0, 99))
    def unstick(self, choice: int) -> None:
        if self.backend.jobs:
            self.backend.free(self.backend.jobs[choice % len(self.backend.jobs)])

    @rule(seconds=st.sampled_from([1.0, 2.0]), times=st.integers(1, 4), polls=st.booleans())
    def pass_time(self, seconds: float, times: int, polls: bool) -> None:
        for _ in range(times):
            self.now += seconds
            if polls:
                self.poll()

    @precondition(lambda self: len(self.entries) > 4)
    @rule()
    def die(self) -> None:
        self.backend.die()
        self.dead = True

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        stats = self.manager.stats()
        running = [entry for entry in self.entries.values() if entry.state == "running"]
        assert len(running) == stats.queues.in_flight
        assert self.running_pages() * PAGE == stats.queues.in_flight_nbytes
        assert len(self.queued(True)) == stats.queues.loads
        assert len(self.queued(False)) == stats.queues.stores
        assert self.queued_pages(True) == stats.queues.load_pages
        assert stats.queues.load_pages <= QUEUE_PAGES_MAX or stats.queues.loads == 1
        assert self.refused == stats.refused_loads + stats.refused_stores
        states = [entry.state for entry in self.entries.values()]
        assert states.count("revoked") == stats.revoked
        assert states.count("over") == sum(one.copies + one.failures for one in stats.by.values())
        for entry in self.entries.values():
            if entry.state == "revoked":
                assert 0 == entry.finals
            assert entry.finals == (entry.state == "over")

    def teardown(self) -> None:
        """Closing gives every job that is left its one final completion, and nothing moves afterwards."""
        if not hasattr(self, "manager"):
            return
        drain = not len(self.entries) % 2 and not self.open_writes
        for job in self.backend.jobs:
            self.backend.free(job)
        left = [job for job, entry in self.entries.items() if entry.state in ("queued", "running")]
        self.closing = True
        said = self.manager.close(drain=drain, timeout_s=10.0)
        self.hear(said)
        assert sorted(job.number for job in left) == sorted(one.job.number for one in said if one.final)
        self.counts_are_right()
        frozen = [memory.page_bytes(page) for memory in (self.device, self.host) for page in range(PAGES)]
        for _ in range(5):
            self.backend.step()
        assert frozen == [memory.page_bytes(page) for memory in (self.device, self.host) for page in range(PAGES)]
        assert not self.manager.busy


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(stateful_step_count=60, max_examples=settings().max_examples * 2 // 5)
