"""Slots outside the backends: the parts in which they are copied, and how plans and the manager count them."""

from array import array
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import InvariantViolation
from kvkeep.transfer.backend import NO_WAIT
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.pieces import slot_parts
from kvkeep.transfer.plan import Plan, SlotCopy
from kvkeep.transfer.simulated import SimulatedBackend
from tests.transfer.pools import LAYOUT, plan

PAGE = LAYOUT.page_nbytes
SLOT = SlotCopy(1, 10, 2, 20, 100)


def manager_of(backend: SimulatedBackend, pages_in_flight: int = 10, queue_pages: int = 10) -> TransferManager:
    return TransferManager(
        backend,
        bytes_in_flight_max=pages_in_flight * PAGE,
        queue_pages_max=queue_pages,
        deadline_s=5.0,
        clock=backend.clock,
    )


@pytest.mark.parametrize(
    ("source_ends", "target_ends", "parts"),
    [
        ([192], [192], [(0, 10, 0, 20, 100)]),
        ([64, 128, 192], [192], [(0, 10, 0, 20, 54), (1, 0, 0, 74, 46)]),
        ([192], [64, 128, 192], [(0, 10, 0, 20, 44), (0, 54, 1, 0, 56)]),
        ([64, 128, 192], [64, 128, 192], [(0, 10, 0, 20, 44), (0, 54, 1, 0, 10), (1, 0, 1, 10, 46)]),
        ([64, 128, 192], [100, 192], [(0, 10, 0, 20, 54), (1, 0, 0, 74, 26), (1, 26, 1, 0, 20)]),
    ],
)
def test_parts_of_a_slot(source_ends: list[int], target_ends: list[int], parts: list[tuple[int, ...]]):
    """It is cut where a plane ends on either side, and nowhere else."""
    assert parts == [tuple(part) for part in slot_parts(SLOT, source_ends, target_ends)]


@given(st.data())
def test_parts_are_the_fewest(data: st.DataObject):
    """Joined they are the slot, and each ends where it must: with a plane of either side, or with the slot."""
    planes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
    source_ends, target_ends = (list(accumulate(data.draw(planes))) for _ in range(2))
    nbytes = data.draw(st.integers(1, min(source_ends[-1], target_ends[-1])))
    at = data.draw(st.integers(0, source_ends[-1] - nbytes))
    to = data.draw(st.integers(0, target_ends[-1] - nbytes))
    done = 0
    for part in slot_parts(SlotCopy(0, at, 0, to, nbytes), source_ends, target_ends):
        assert at + done == ([0, *source_ends][part.source_plane] + part.source_offset)
        assert to + done == ([0, *target_ends][part.target_plane] + part.target_offset)
        done += part.nbytes
        assert done == nbytes or at + done in source_ends or to + done in target_ends
        assert at + done <= source_ends[part.source_plane] and to + done <= target_ends[part.target_plane]
    assert nbytes == done


def test_plan_says_what_it_copies():
    """Bytes of pages and of slots; pages are whole ones; a plan that copies nothing is a bug."""
    both = plan("promote", [1, 2], [3, 4], SLOT, SlotCopy(1, 10, 2, 0, 7))
    slots = plan("promote", [], [], SLOT)
    assert (2 * PAGE + 107, 2, "promote 2 pages, 2 slots") == (both.nbytes(PAGE), len(both), str(both))
    assert (100, 0) == (slots.nbytes(PAGE), len(slots))
    assert (2 * PAGE, "clean 2 pages") == (
        plan("clean", [1, 2], [3, 4]).nbytes(PAGE),
        str(plan("clean", [1, 2], [3, 4])),
    )
    with pytest.raises(InvariantViolation, match="nothing"):
        plan("promote", [], [])


def test_plan_keeps_its_own_slots():
    """What a caller does to its list afterwards does not show in the plan."""
    slots = [SLOT]
    none, generations = array("i"), array("q")
    made = Plan("h2d", "promote", none, none, generations, generations, slots)  # type: ignore[arg-type]
    slots.append(SLOT)
    assert (SLOT,) == made.slots


def test_bytes_of_slots_are_counted():
    """In flight, in the completion and in the counters; no page is counted for them."""
    backend = SimulatedBackend(page_nbytes=PAGE)
    manager = manager_of(backend)
    both, slots = plan("promote", [1], [2], SlotCopy(3, 0, 4, 0, 10)), plan("demote", [], [], SlotCopy(3, 0, 4, 0, 7))
    for what in (both, slots):
        assert manager.submit(what, after=NO_WAIT) is not None
    manager.start()
    assert PAGE + 17 == manager.stats().queues.in_flight_nbytes
    while backend.step():
        pass
    assert [PAGE + 10, 7] == sorted((done.nbytes for done in manager.poll()), reverse=True)
    by = manager.stats().by
    assert (1, 1, PAGE + 10) == (by["h2d", "promote"].copies, by["h2d", "promote"].pages, by["h2d", "promote"].nbytes)
    assert (1, 0, 7) == (by["d2h", "demote"].copies, by["d2h", "demote"].pages, by["d2h", "demote"].nbytes)
    assert 0 == manager.stats().queues.in_flight_nbytes


def test_bytes_of_slots_are_bounded():
    """A store whose slots go past the bound is not made, however few its pages."""
    manager = manager_of(SimulatedBackend(page_nbytes=PAGE), pages_in_flight=2)
    assert manager.submit(plan("demote", [1], [1], SlotCopy(2, 0, 2, 0, PAGE)), after=NO_WAIT)
    assert None is manager.submit(plan("demote", [], [], SlotCopy(3, 0, 3, 0, 1)), after=NO_WAIT)


def test_loads_of_slots_count_as_a_page_in_the_queue():
    """One page each: the queue is bounded though no page is in it; leaving it gives the room back."""
    manager = manager_of(SimulatedBackend(page_nbytes=PAGE), queue_pages=3)
    jobs = [manager.submit(plan("promote", [], [], SlotCopy(i, 0, i, 0, 9)), after=NO_WAIT) for i in range(4)]
    assert [True, True, True, False] == [job is not None for job in jobs]
    assert (3, 3) == (manager.stats().queues.loads, manager.stats().queues.load_pages)
    assert jobs[0] is not None and manager.revoke(jobs[0])
    assert manager.submit(plan("promote", [9], [9], SLOT), after=NO_WAIT)
    assert 3 == manager.stats().queues.load_pages
    manager.start()
    assert 0 == manager.stats().queues.load_pages
