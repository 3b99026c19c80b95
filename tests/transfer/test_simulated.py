"""The simulated backend is never kinder than a device, and always the same for the same seed."""

import pytest

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.memory import POISON_BYTE
from kvkeep.transfer.backend import NO_WAIT, After, Job, JobNumber
from kvkeep.transfer.plan import Plan, SlotCopy
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.transfer.pools import LAYOUT, PAGES, Flag, content, fill, fill_all, host_memory, plan

GARBAGE = bytes([POISON_BYTE]) * LAYOUT.page_nbytes


class Bench:
    def __init__(
        self, when: When | None = None, seed: int = 0, fail_rate: float = 0.0, stuck_rate: float = 0.0
    ) -> None:
        self.device, self.host = host_memory(), host_memory()
        self.device_bytes = fill_all(self.device, PAGES, 0)
        self.host_bytes = fill_all(self.host, PAGES, 1000)
        self.backend = SimulatedBackend(
            self.device, self.host, seed=seed, when=when, fail_rate=fail_rate, stuck_rate=stuck_rate
        )
        self._jobs = 0

    def launch(self, what: Plan, after: After = NO_WAIT) -> Job:
        job = Job(JobNumber(self._jobs), what, after, 1, 0.0)
        self._jobs += 1
        self.backend.launch(job)
        return job

    def run(self) -> list[tuple[int, str | None]]:
        while self.backend.step():
            pass
        return [(outcome.job.number, outcome.error) for outcome in self.backend.completions()]


@pytest.mark.parametrize(
    ("when", "read"), [(When.EARLY, "at launch"), (When.SPLIT, "at launch"), (When.LATE, "at the end")]
)
def test_sources_are_read_at_the_first_or_the_last_moment(when: When, read: str):
    """What is written into a source meanwhile is seen by a late copy and not by an early one."""
    bench = Bench(when)
    bench.launch(plan("promote", [1], [2]))
    fill(bench.host, 1, 77)
    assert [(0, None)] == bench.run()
    assert (content(77) if read == "at the end" else bench.host_bytes[1]) == bench.device.page_bytes(2)


def test_targets_hold_garbage_until_the_last_moment():
    """Whoever reads a page before its load has landed reads garbage, unless the copy happened to be early."""
    for when, held in ((When.EARLY, None), (When.SPLIT, GARBAGE), (When.LATE, GARBAGE)):
        bench = Bench(when)
        bench.launch(plan("promote", [1], [2]))
        assert (held or bench.host_bytes[1]) == bench.device.page_bytes(2)


def test_failed_copy_leaves_garbage():
    """At least one page of a copy that failed has not arrived."""
    bench = Bench(fail_rate=1.0)
    bench.launch(plan("promote", [1, 2, 3], [4, 5, 6]))
    ((number, error),) = bench.run()
    assert (0, True) == (number, error is not None)
    arrived = [bench.device.page_bytes(page) for page in (4, 5, 6)]
    assert arrived != bench.host_bytes[1:4]
    assert set(arrived) <= {GARBAGE, *bench.host_bytes[1:4]}


SLOT = SlotCopy(1, 10, 2, 20, 100)


@pytest.mark.parametrize(
    ("when", "read"), [(When.EARLY, "at launch"), (When.SPLIT, "at launch"), (When.LATE, "at the end")]
)
def test_slots_are_read_at_the_first_or_the_last_moment(when: When, read: str):
    """As pages are; until they land their targets, and nothing beside them, hold garbage."""
    bench = Bench(when)
    bench.launch(plan("promote", [], [], SLOT))
    before, page = bench.device_bytes[2], bench.device.page_bytes(2)
    assert (before[:20], before[120:]) == (page[:20], page[120:])
    assert (bench.host_bytes[1][10:110] if when is When.EARLY else GARBAGE[:100]) == page[20:120]
    fill(bench.host, 1, 77)
    assert [(0, None)] == bench.run()
    source = content(77) if read == "at the end" else bench.host_bytes[1]
    assert source[10:110] == bench.device.page_bytes(2)[20:120]


def test_failed_copy_of_slots_leaves_garbage():
    """At least one page or slot of a copy that failed has not arrived, whichever the seed."""
    for seed in range(10):
        bench = Bench(seed=seed, fail_rate=1.0)
        bench.launch(plan("promote", [3], [4], SLOT, SlotCopy(1, 0, 2, 120, 10)))
        ((_, error),) = bench.run()
        page = bench.device.page_bytes(2)
        assert error is not None
        assert GARBAGE[:10] == page[120:130] or GARBAGE == bench.device.page_bytes(4)
        assert page[20:120] in (GARBAGE[:100], bench.host_bytes[1][10:110])


def test_copies_of_one_pages_slots_may_overlap_in_time():
    """Jobs, and a write, that use other bytes of the same page are nobody's mistake."""
    for seed in range(10):
        bench = Bench(seed=seed)
        bench.launch(plan("promote", [], [], SlotCopy(1, 0, 2, 0, 50)))
        bench.backend.writing([], parts=[(2, 150, 10)])
        bench.launch(plan("promote", [], [], SlotCopy(1, 0, 2, 50, 50)))
        bench.launch(plan("demote", [], [], SlotCopy(2, 100, 3, 0, 50)))
        assert 3 == len(bench.run())
        page, before = bench.device.page_bytes(2), bench.device_bytes[2]
        assert bench.host_bytes[1][:50] * 2 + before[100:] == page
        assert before[100:150] == bench.host.page_bytes(3)[:50]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plan("promote", [], [], SLOT), plan("promote", [], [], SlotCopy(3, 0, 2, 119, 5))),
        (plan("promote", [], [], SLOT), plan("promote", [], [], SlotCopy(3, 0, 2, 0, 21))),
        (plan("promote", [], [], SLOT), plan("demote", [], [], SlotCopy(2, 100, 5, 0, 5))),
        (plan("promote", [], [], SLOT), plan("promote", [3], [2])),
        (plan("promote", [3], [2]), plan("promote", [], [], SLOT)),
        (plan("demote", [2], [3]), plan("promote", [], [], SLOT)),
        (plan("promote", [], [], SLOT), plan("demote", [1], [1])),
    ],
)
def test_overlapping_slots_are_seen(one: Plan, other: Plan):
    """One writes bytes that the other writes or reads, in part or in a whole page."""
    bench = Bench(When.LATE)
    bench.launch(one)
    with pytest.raises(InvariantViolation, match=r"while Job 0 .* does"):
        bench.launch(other)


@pytest.mark.parametrize("part", [(2, 119, 1), (2, 0, 21), (2, 0, 192)])
def test_slot_that_is_being_written_is_seen(part: tuple[int, int, int]):
    """In either order: a copy of bytes that are being written, a write of bytes that are being copied."""
    bench = Bench(When.LATE)
    bench.backend.writing([], parts=[part])
    with pytest.raises(InvariantViolation, match="missing barrier"):
        bench.launch(plan("promote", [], [], SLOT))
    bench = Bench(When.LATE)
    bench.launch(plan("promote", [], [], SLOT))
    with pytest.raises(InvariantViolation, match="uses"):
        bench.backend.writing([], parts=[part])


def transcript(seed: int) -> list[object]:
    bench = Bench(seed=seed, fail_rate=0.3, stuck_rate=0.2)
    out: list[object] = []
    for i in range(PAGES):
        bench.launch(plan("promote" if i % 2 else "demote", [i], [i]))
        bench.backend.step()
        out += [(one.job.number, one.error, one.copy_ns) for one in bench.backend.completions()]
    out += bench.run()
    return [*out, *(bench.device.page_bytes(page) for page in range(PAGES))]


def test_a_seed_is_one_run():
    """Twice the same with one seed; with others, other orders."""
    assert transcript(3) == transcript(3)
    assert 10 <= len({repr(transcript(seed)) for seed in range(20)})


def test_copies_end_out_of_order():
    """Somewhere among the seeds, a later job is reported before an earlier one."""
    orders = set()
    for seed in range(20):
        bench = Bench(seed=seed)
        for i in range(3):
            bench.launch(plan("promote", [i], [i]))
        orders.add(tuple(number for number, _ in bench.run()))
    assert len(orders) > 3


def test_a_test_picks_which_job_moves():
    """Stepped by hand, no other job moves than the one that is named."""
    bench = Bench(When.LATE)
    first, second = bench.launch(plan("promote", [1], [2])), bench.launch(plan("promote", [3], [4]))
    while second in bench.backend.jobs:
        assert bench.backend.step(second)
    assert not bench.backend.step(second)
    assert [second] == [outcome.job for outcome in bench.backend.completions()]
    assert (GARBAGE, bench.host_bytes[3]) == (bench.device.page_bytes(2), bench.device.page_bytes(4))
    assert [first] == bench.backend.jobs == bench.backend.movable


def test_job_that_waits_or_is_stuck_does_not_move():
    """Until its event is done, or it is freed."""
    bench = Bench()
    event = Flag()
    waiting, stuck = bench.launch(plan("demote", [1], [2]), after=event), bench.launch(plan("promote", [3], [4]))
    bench.backend.stick(stuck)
    assert ([], []) == (bench.backend.movable, bench.run())
    assert not bench.backend.step(waiting)
    event.done = True
    bench.backend.free(stuck)
    assert [(0, None), (1, None)] == sorted(bench.run())


def test_store_of_a_page_that_is_being_written_is_seen():
    """The earliest moment counts, also for a copy that would have read late and been lucky."""
    bench = Bench(When.LATE)
    write = bench.backend.writing([1, 2])
    with pytest.raises(InvariantViolation, match="missing barrier"):
        bench.launch(plan("demote", [2], [3]))
    bench = Bench(When.LATE)
    write = bench.backend.writing([1, 2])
    job = bench.launch(plan("demote", [2], [3]), after=write)
    fill(bench.device, 2, 77)
    write.finish()
    assert [(job.number, None)] == bench.run()
    assert content(77) == bench.host.page_bytes(3)


def test_load_into_a_page_that_is_being_written_is_seen():
    """A load that is not ordered behind the page's last writer would be overwritten."""
    bench = Bench()
    bench.backend.writing([5])
    with pytest.raises(InvariantViolation, match="missing barrier"):
        bench.launch(plan("promote", [1], [5]))


def test_write_into_a_page_that_is_being_copied_is_seen():
    """A page handed over while its copy still runs must not be written."""
    bench = Bench(When.LATE)
    job = bench.launch(plan("demote", [1], [2]))
    with pytest.raises(InvariantViolation, match=r"while Job 0 .* uses"):
        bench.backend.writing([1])
    assert [(job.number, None)] == bench.run()
    bench.backend.writing([1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plan("promote", [1], [2]), plan("promote", [3], [2])),
        (plan("promote", [1], [2]), plan("demote", [2], [3])),
        (plan("demote", [1], [2]), plan("promote", [2], [3])),
    ],
)
def test_overlapping_jobs_are_seen(one: Plan, other: Plan):
    """One writes what the other writes or reads."""
    bench = Bench()
    bench.launch(one)
    with pytest.raises(InvariantViolation, match=r"while Job 0 .* does"):
        bench.launch(other)


def test_pools_without_bytes_work_too():
    """Order, failure and time without memory, for caches that only keep books."""
    backend = SimulatedBackend(page_nbytes=1000, seed=1)
    job = Job(JobNumber(0), plan("promote", [10**6], [10**6]), NO_WAIT, 1000, 0.0)
    backend.launch(job)
    while backend.step():
        pass
    (outcome,) = backend.completions()
    assert (job, None) == (outcome.job, outcome.error)
    assert backend.clock() > 0.0
    job = Job(JobNumber(1), plan("promote", [], [], SlotCopy(10**6, 0, 1, 500, 500)), NO_WAIT, 500, 0.0)
    backend.launch(job)
    while backend.step():
        pass
    assert [None] == [outcome.error for outcome in backend.completions()]
    with pytest.raises(BadInput, match="page_nbytes"):
        SimulatedBackend()
