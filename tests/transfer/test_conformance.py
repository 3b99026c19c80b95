"""What every backend promises, over every way in which pages lie in memory."""

import time
from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.errors import InvariantViolation
from kvkeep.transfer.backend import NO_WAIT, BackendDied, Job, JobNumber
from kvkeep.transfer.plan import Cause, Plan, SlotCopy
from tests.transfer.pools import LAYOUT, PAGES, carried_out, content, fill, plan
from tests.transfer.rigs import MEMORIES, RIGS, Rig

NEVER_BLOCKS_S = 2.0  # a backend that waited for an event that is never done would take for ever


@pytest.fixture(params=RIGS)
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MEMORIES)
def rig(request: pytest.FixtureRequest, backend_name: str) -> Iterator[Rig]:
    """A rig over each kind of memory."""
    with RIGS[backend_name](request.param) as made:
        yield made


@pytest.fixture
def numpy_rig(backend_name: str) -> Iterator[Rig]:
    """A rig over the simplest memory: for promises that do not depend on it."""
    with RIGS[backend_name]("numpy") as made:
        yield made


# ---------------------------------------------------------------------- bytes


def test_load_moves_its_pages_and_no_others(rig: Rig):
    """Page sources[i] of the host's pool arrives in page targets[i] of the device's, bit for bit, and nothing else."""
    job = rig.launch(plan("promote", [7, 0, 11], [2, 5, 0]))
    outcome = rig.finish(job)[job]
    expected = list(rig.device_bytes)
    expected[2], expected[5], expected[0] = rig.host_bytes[7], rig.host_bytes[0], rig.host_bytes[11]
    assert None is outcome.error
    assert (expected, rig.host_bytes) == rig.bytes()


def test_store_moves_its_pages_and_no_others(rig: Rig):
    """The same, from the device's pool to the host's."""
    job = rig.launch(plan("demote", [7, 0, 11], [2, 5, 0]))
    outcome = rig.finish(job)[job]
    expected = list(rig.host_bytes)
    expected[2], expected[5], expected[0] = rig.device_bytes[7], rig.device_bytes[0], rig.device_bytes[11]
    assert None is outcome.error
    assert (rig.device_bytes, expected) == rig.bytes()


def test_order_of_pages_is_kept(numpy_rig: Rig):
    """Sources and targets stay co-indexed in whatever order they are listed."""
    for order in permutations([1, 4, 9]):
        job = numpy_rig.launch(plan("promote", order, [3, 2, 8]))
        numpy_rig.finish(job)
        device, _ = numpy_rig.bytes()
        assert [numpy_rig.host_bytes[page] for page in order] == [device[3], device[2], device[8]]


def test_one_source_may_have_several_targets(numpy_rig: Rig):
    """A page can be copied to two places, in one plan or in two at once."""
    one = numpy_rig.launch(plan("promote", [5, 5], [1, 2]))
    two = numpy_rig.launch(plan("promote", [5], [3]))
    numpy_rig.finish(one, two)
    device, _ = numpy_rig.bytes()
    assert [numpy_rig.host_bytes[5]] * 3 == device[1:4]


def test_many_jobs_at_once(numpy_rig: Rig):
    """Jobs of both directions in flight together each move their own pages and are each reported once."""
    loads = [numpy_rig.launch(plan("promote", [i], [i])) for i in range(PAGES // 2)]
    stores = [numpy_rig.launch(plan("clean", [i], [i])) for i in range(PAGES // 2, PAGES)]
    outcomes = numpy_rig.finish(*loads, *stores)
    half = PAGES // 2
    assert {*loads, *stores} == set(outcomes)
    assert (
        numpy_rig.host_bytes[:half] + numpy_rig.device_bytes[half:],
        numpy_rig.host_bytes[:half] + numpy_rig.device_bytes[half:],
    ) == numpy_rig.bytes()


def test_round_trip(rig: Rig):
    """What went to host memory comes back bit for bit, to another page."""
    pages = list(range(PAGES))
    rig.finish(rig.launch(plan("suspend", pages, pages[::-1])))
    rig.device.poison(pages)
    rig.finish(rig.launch(plan("resume", pages[::-1], pages)))
    assert rig.device_bytes == rig.bytes()[0]


def test_copy_time_is_measured(numpy_rig: Rig):
    """An outcome says how long the copy took, which is not nothing and no longer than the test."""
    start = time.perf_counter_ns()
    job = numpy_rig.launch(plan("promote", range(PAGES), range(PAGES)))
    outcome = numpy_rig.finish(job)[job]
    real = time.perf_counter_ns() - start
    assert 0 < outcome.copy_ns <= max(real, 10**9)


# ---------------------------------------------------------------------- bytes of slots

PAGE = LAYOUT.page_nbytes
ONE_LAYER = PAGE // LAYOUT.layers
K_OR_V = ONE_LAYER // 2

SLOTS = {
    "a part of one layer": [SlotCopy(7, 5, 2, 9, 11)],
    "from one layer, into two": [SlotCopy(7, 3, 2, ONE_LAYER - 4, 10)],
    "from three layers, into two": [SlotCopy(7, ONE_LAYER - 1, 2, K_OR_V, ONE_LAYER + 2)],
    "ends where a layer does": [SlotCopy(7, ONE_LAYER - 8, 2, 2 * ONE_LAYER - 8, 8)],
    "starts where a layer does": [SlotCopy(7, ONE_LAYER, 2, 0, 16)],
    "one byte": [SlotCopy(7, 0, 2, PAGE - 1, 1)],
    "all but a byte": [SlotCopy(7, 1, 2, 0, PAGE - 1)],
    "a page": [SlotCopy(7, 0, 2, 0, PAGE)],
    "several of one page, side by side": [
        SlotCopy(7, 60, 2, 40, 20),
        SlotCopy(7, 0, 2, 60, 60),
        SlotCopy(8, 100, 2, 0, 40),
        SlotCopy(7, 60, 3, 100, 20),
    ],
}


def moves_just_its_bytes(rig: Rig, what: Plan) -> None:
    """The plan's bytes arrive and no other byte of either pool changes."""
    expected = carried_out(what, *rig.bytes())
    job = rig.launch(what)
    assert None is rig.finish(job)[job].error
    assert expected == rig.bytes()


@pytest.mark.parametrize("slots", SLOTS.values(), ids=list(SLOTS))
@pytest.mark.parametrize("cause", ["promote", "demote"])
def test_slot_moves_its_bytes_and_no_others(rig: Rig, cause: Cause, slots: list[SlotCopy]):
    """Of a plan of slots alone, each arrives at its own offset; its neighbours in the same page stay as they were."""
    moves_just_its_bytes(rig, plan(cause, [], [], *slots))


@pytest.mark.parametrize("cause", ["promote", "demote"])
def test_slots_beside_pages(rig: Rig, cause: Cause):
    """A plan of pages and slots moves both; a page may be copied whole and in part."""
    slots = [SlotCopy(7, 20, 4, 100, 50), SlotCopy(1, 0, 4, 50, 50), SlotCopy(1, 100, 6, 0, 92)]
    moves_just_its_bytes(rig, plan(cause, [1, 7, 0], [2, 3, 5], *slots))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Some pages and some slots whose targets do not overlap."""
    page = st.integers(0, PAGES - 1)
    targets = draw(st.lists(page, max_size=2, unique=True))
    free = {target: set(range(PAGE)) for target in range(PAGES) if target not in targets}
    slots = []
    for _ in range(draw(st.integers(0 if targets else 1, 4))):
        nbytes = draw(st.integers(1, PAGE))
        offsets = st.integers(0, PAGE - nbytes)
        slot = SlotCopy(draw(page), draw(offsets), draw(st.sampled_from([*free][:3])), draw(offsets), nbytes)
        place = set(range(slot.target_offset, slot.target_offset + nbytes))
        if place <= free[slot.target]:
            free[slot.target] -= place
            slots.append(slot)
    sources = draw(st.lists(page, min_size=len(targets), max_size=len(targets)))
    return plan(draw(st.sampled_from(["promote", "demote"])), sources, targets, *slots)


def test_slots_of_any_place_and_size(rig: Rig):
    """Whatever the offsets and sizes on either side."""

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(what=plans())
    def any_plan(what: Plan) -> None:
        moves_just_its_bytes(rig, what)

    any_plan()


# ---------------------------------------------------------------------- order


def test_copy_waits_for_its_event(rig: Rig):
    """Nothing of a store is read before the event it comes after, however long that takes; then the new bytes are."""
    written = rig.new_event()
    start = time.monotonic()
    job = rig.launch(plan("demote", [3], [4]), after=written)
    for _ in range(10):
        rig.tick()
        assert [] == rig.backend.completions()
    assert rig.host_bytes == rig.bytes()[1]
    assert time.monotonic() - start < NEVER_BLOCKS_S
    fill(rig.device, 3, 77)
    written.done = True
    rig.finish(job)
    assert content(77) == rig.bytes()[1][4]


def test_slots_wait_for_their_event(rig: Rig):
    """No byte of a slot is read before the event that its copy comes after; then the new ones are."""
    written = rig.new_event()
    job = rig.launch(plan("demote", [], [], SlotCopy(3, 10, 4, 20, 100)), after=written)
    for _ in range(10):
        rig.tick()
    assert rig.host_bytes == rig.bytes()[1]
    fill(rig.device, 3, 77)
    written.done = True
    rig.finish(job)
    assert content(77)[10:110] == rig.bytes()[1][4][20:120]


def test_load_waits_for_its_event(numpy_rig: Rig):
    """A load writes nothing into pages that somebody may still be using."""
    unused = numpy_rig.new_event()
    job = numpy_rig.launch(plan("promote", [3], [4]), after=unused)
    for _ in range(10):
        numpy_rig.tick()
    assert numpy_rig.device_bytes == numpy_rig.bytes()[0]
    unused.done = True
    numpy_rig.finish(job)
    assert numpy_rig.host_bytes[3] == numpy_rig.bytes()[0][4]


def test_job_that_waits_keeps_nobody_up(numpy_rig: Rig):
    """Jobs behind one whose event is not done go on; on a stream, those of the other direction."""
    numpy_rig.launch(plan("demote", [0], [0]), after=numpy_rig.new_event())
    cause: Cause = "promote" if numpy_rig.in_order else "clean"
    others = [numpy_rig.launch(plan(cause, [i], [i])) for i in range(1, PAGES)]
    assert set(others) == set(numpy_rig.finish(*others))


def test_stream_is_not_ordered_behind_a_job_never_launched(numpy_rig: Rig):
    """`order_after` does not pretend."""
    job = numpy_rig.launch(plan("demote", [0], [0]))
    numpy_rig.finish(job)
    stranger = Job(JobNumber(99), plan("demote", [1], [1]), NO_WAIT, 1, 0.0)
    assert False is numpy_rig.backend.order_after(stranger, None)


# ---------------------------------------------------------------------- trouble


def test_failed_copy_is_an_outcome(rig: Rig):
    """A copy that fails is reported once, with its reason, and those after it may work again."""
    rig.fail_next()
    job = rig.launch(plan("promote", [1, 2], [3, 4]))
    outcome = rig.finish(job)[job]
    assert outcome.error


@pytest.mark.parametrize("pages", [[], [1, 2]])
def test_failed_copy_of_slots_leaves_their_neighbours(rig: Rig, pages: list[int]):
    """It is an outcome, with pages and without; the other bytes of the slots' page are whole."""
    rig.fail_next()
    job = rig.launch(plan("promote", pages, pages, SlotCopy(3, 10, 4, 20, 100), SlotCopy(3, 0, 4, 150, 10)))
    assert rig.finish(job)[job].error
    page, before = rig.bytes()[0][4], rig.device_bytes[4]
    assert (before[:20], before[120:150], before[160:]) == (page[:20], page[120:150], page[160:])


@pytest.mark.parametrize(
    "slots",
    [
        [SlotCopy(-1, 0, 1, 0, 1)],
        [SlotCopy(1, 0, -1, 0, 1)],
        [SlotCopy(PAGES, 0, 1, 0, 1)],
        [SlotCopy(1, 0, PAGES, 0, 1)],
        [SlotCopy(1, -1, 1, 0, 1)],
        [SlotCopy(1, 0, 1, -1, 1)],
        [SlotCopy(1, 0, 1, 0, 0)],
        [SlotCopy(1, PAGE - 4, 1, 0, 5)],
        [SlotCopy(1, 0, 1, PAGE - 4, 5)],
        [SlotCopy(1, 0, 1, 0, 5), SlotCopy(2, 0, 1, 4, 5)],
        [SlotCopy(1, 0, 1, 4, 5), SlotCopy(2, 0, 3, 0, 9), SlotCopy(2, 0, 1, 0, 50)],
    ],
    ids=str,
)
@pytest.mark.parametrize("pages", [[], [9]])
def test_slot_outside_its_page_is_a_bug(numpy_rig: Rig, pages: list[int], slots: list[SlotCopy]):
    """A slot that is not in its page or pool, or is written twice, stops the program instead of copying others'
    bytes; no byte has moved."""
    with pytest.raises(InvariantViolation, match=r"SlotCopy|pool of"):
        numpy_rig.launch(plan("promote", pages, pages, *slots))
    for _ in range(5):
        numpy_rig.tick()
    assert (numpy_rig.device_bytes, numpy_rig.host_bytes) == numpy_rig.bytes()


def test_slot_of_a_page_copied_whole_is_a_bug():
    """One of the two would overwrite the other."""
    with pytest.raises(InvariantViolation, match="whole"):
        plan("promote", [1, 2], [3, 9], SlotCopy(1, 0, 9, 0, 5))


@pytest.mark.parametrize("page", [-1, PAGES])
@pytest.mark.parametrize("side", ["source", "target"])
def test_page_outside_the_pool_is_a_bug(numpy_rig: Rig, page: int, side: str):
    """A page that is not there stops the program instead of copying another one."""
    bad = plan("promote", [page], [1]) if side == "source" else plan("promote", [1], [page])
    with pytest.raises(InvariantViolation, match=r"pool of \d+"):
        numpy_rig.launch(bad)


def test_close_reports_every_job_and_ends_all_copying(numpy_rig: Rig):
    """With copies in flight and others waiting, close reports each job once; afterwards no byte moves."""
    events = [numpy_rig.new_event(done=i % 3 > 0) for i in range(PAGES)]
    jobs = {numpy_rig.launch(plan("promote", [i], [i]), after=event) for i, event in enumerate(events)}
    said = numpy_rig.backend.completions()
    if numpy_rig.in_order:  # what a device has been told to do it does; here the work before it ends
        for event in events:
            event.done = True
    numpy_rig.let_go()
    said += numpy_rig.backend.close(10.0)
    assert sorted(job.number for job in jobs) == sorted(outcome.job.number for outcome in said)
    device = numpy_rig.bytes()[0]
    for outcome in said:
        page = outcome.job.plan.targets[0]
        if outcome.error is None:
            assert numpy_rig.host_bytes[page] == device[page]
    for _ in range(5):
        numpy_rig.tick()
    assert device == numpy_rig.bytes()[0]


def test_dead_backend_says_so_every_time(numpy_rig: Rig):
    """Death is not a hang: whatever is asked from then on raises it, and no byte moves any more."""
    numpy_rig.launch(plan("promote", [1], [1]), after=numpy_rig.new_event())
    numpy_rig.kill()
    until = time.monotonic() + 10.0
    with pytest.raises(BackendDied):
        while time.monotonic() < until:
            numpy_rig.tick()
            numpy_rig.backend.completions()
    with pytest.raises(BackendDied):
        numpy_rig.backend.completions()
    with pytest.raises(BackendDied):
        numpy_rig.launch(plan("promote", [2], [2]))
    assert numpy_rig.device_bytes[2] == numpy_rig.bytes()[0][2]
