"""Slots: parts of pages beside each other, counted like pages, and the pages that they make idle or free.

Must not know what is kept in them.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.ledger import INDEX, SLOTS, Ledger, State, page_ids
from kvkeep.tiers.slots import Slots
from kvkeep.tiers.tracing import TracingLedger

PAGE_NBYTES = 10_000
PAGES = 6


def ledger_with_slots(kind: type[Ledger] = TracingLedger, pages: int = PAGES) -> Ledger:
    ledger = kind(pages)
    ledger.allow_slots(PAGE_NBYTES)
    return ledger


def opened(ledger: Ledger, nbytes: int, owner: object = "a") -> int:
    slot = ledger.open_slot(nbytes, owner)
    assert slot is not None
    return slot


def cached(ledger: Ledger, nbytes: int) -> int:
    """A slot that the index alone owns."""
    slot = opened(ledger, nbytes)
    ledger.seal(page_ids((slot,)), "a")
    ledger.keep(page_ids((slot,)))
    ledger.release(page_ids((slot,)), "a")
    return slot


class SlotMachine(RuleBasedStateMachine):
    """Pages and slots open, are sealed, kept, shared and let go of; a dict knows who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_with_slots()
        self.owners: dict[int, list[str]] = {}  # of pages and slots
        self.nbytes: dict[int, int] = {}  # of slots

    def any_of(self, data: st.DataObject, ids: list[int]) -> int:
        return data.draw(st.sampled_from(sorted(ids)))

    @rule(nbytes=st.integers(1, PAGE_NBYTES), owner=st.sampled_from("ab"))
    def open_slot(self, nbytes: int, owner: str) -> None:
        slots = self.ledger.slots
        assert slots is not None
        fits = slots.has_room(nbytes) is not None
        slot = self.ledger.open_slot(nbytes, owner) if slots.cut(nbytes)[1] else None
        if not slots.cut(nbytes)[1]:
            return
        if slot is None:
            assert not fits
            assert not self.ledger.free
            return
        assert slot >= PAGES
        self.owners[slot], self.nbytes[slot] = [owner], nbytes

    @precondition(lambda self: self.ledger.free)
    @rule(owner=st.sampled_from("ab"))
    def open_page(self, owner: str) -> None:
        (page,) = self.ledger.open(1, owner)
        self.owners[page] = [owner]

    @rule(data=st.data())
    def seal_and_keep(self, data: st.DataObject) -> None:
        fresh = [p for p in self.owners if self.ledger.state(p) is State.OPEN]
        if fresh:
            page = self.any_of(data, fresh)
            self.ledger.seal(page_ids((page,)), self.owners[page][0])
            self.ledger.keep(page_ids((page,)))
            self.owners[page].append(INDEX)

    @rule(data=st.data(), owner=st.sampled_from("cd"))
    def retain(self, data: st.DataObject, owner: str) -> None:
        ready = [p for p, who in self.owners.items() if self.ledger.state(p) is State.READY and owner not in who]
        if ready:
            count = data.draw(st.integers(1, len(ready)))
            batch = page_ids(sorted(ready)[-count:])
            self.ledger.retain(batch, owner)
            for page in batch:
                self.owners[page].append(owner)

    @rule(owner=st.sampled_from("abcd"))
    def release_all(self, owner: str) -> None:
        batch = page_ids(sorted(p for p, who in self.owners.items() if owner in who))
        self.ledger.release(batch, owner)
        self.lose(list(batch), owner)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        kept = sorted(p for p, who in self.owners.items() if INDEX in who)
        if kept:
            batch = kept[-data.draw(st.integers(1, len(kept))) :]
            self.ledger.drop(page_ids(batch))
            self.lose(batch, INDEX)

    def lose(self, batch: list[int], owner: str) -> None:
        for page in batch:
            self.owners[page].remove(owner)
            if not self.owners[page]:
                del self.owners[page]
                self.nbytes.pop(page, None)

    @invariant()
    def counts_and_places_agree(self) -> None:
        ledger = self.ledger
        ledger.check_invariants()
        held: dict[int, list[tuple[int, int]]] = {}
        alone: dict[int, bool] = {p: who == [INDEX] for p, who in self.owners.items() if p < PAGES}
        for slot, nbytes in self.nbytes.items():
            place = ledger.place(slot)
            assert place.nbytes == nbytes
            assert place.page not in self.owners
            assert 0 <= place.offset <= PAGE_NBYTES - nbytes
            held.setdefault(place.page, []).append((place.offset, place.offset + nbytes))
            alone[place.page] = alone.get(place.page, True) and self.owners[slot] == [INDEX]
        for spans in held.values():
            spans.sort()
            assert all(a_end <= b for (_, a_end), (b, _) in pairwise(spans))
        assert ledger.idle == sum(alone.values())
        assert ledger.free == PAGES - len(alone)
        assert ledger.held == len(alone) - sum(alone.values())


def test_slots_against_a_naive_ledger() -> None:
    run_state_machine_as_test(SlotMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_slots_against_a_naive_ledger_long() -> None:
    run_state_machine_as_test(SlotMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None))


@given(st.integers(1, 5_000_000), st.integers(1, 20_000_000))
@settings(max_examples=300, deadline=None)
def test_an_output_gets_the_bytes_that_it_needs(page_nbytes: int, nbytes: int) -> None:
    slots = Slots(page_nbytes, 0)
    pages, rest = slots.cut(nbytes)
    assert pages * page_nbytes + rest >= nbytes
    assert pages * page_nbytes + rest < nbytes + page_nbytes
    if rest:
        slots.add_page(0)
        place = slots.place(slots.open(0, rest))
        assert place.offset + rest <= page_nbytes
        assert not place.offset % 64


def test_the_shortest_hole_that_holds_it_is_taken() -> None:
    ledger = ledger_with_slots()
    slots = [opened(ledger, 1000, i) for i in range(9)]
    ledger.release(page_ids((slots[1],)), 1)  # a hole of one
    ledger.release(page_ids((slots[4],)), 4)
    ledger.release(page_ids((slots[5],)), 5)  # and one of two
    hole = ledger.place(opened(ledger, 900)).offset
    assert hole == ledger.place(slots[0]).offset + 1024
    assert ledger.free == PAGES - 1


def test_the_fullest_page_that_holds_it_is_taken() -> None:
    ledger = ledger_with_slots()
    a, b = opened(ledger, 9_000), opened(ledger, 5_000)
    assert ledger.place(a).page != ledger.place(b).page
    assert ledger.place(opened(ledger, 500)).page == ledger.place(a).page


def test_a_page_is_idle_when_all_of_its_slots_are() -> None:
    ledger = ledger_with_slots()
    a, b = cached(ledger, 3000), cached(ledger, 3000)
    assert (ledger.idle, ledger.free) == (1, PAGES - 1)
    ledger.retain(page_ids((a,)), "r")
    assert ledger.idle == 0
    ledger.drop(page_ids((b,)))
    assert (ledger.idle, ledger.held) == (0, 1)
    ledger.release(page_ids((a,)), "r")
    assert ledger.idle == 1
    opened(ledger, 100)
    assert ledger.idle == 0


def test_the_last_slot_frees_its_page() -> None:
    ledger = ledger_with_slots()
    a, b = cached(ledger, 3000), opened(ledger, 3000)
    ledger.drop(page_ids((a,)))
    assert ledger.free == PAGES - 1
    ledger.release(page_ids((b,)), "a")
    assert ledger.free == PAGES
    assert not ledger.slots.pages if ledger.slots else False


def test_ids_come_back_with_another_generation() -> None:
    ledger = ledger_with_slots()
    a = opened(ledger, 3000)
    before = ledger.generation(a)
    ledger.release(page_ids((a,)), "a")
    assert opened(ledger, 4000) == a
    assert ledger.generation(a) == before + 1


def test_more_slots_than_there_was_room_for() -> None:
    ledger = ledger_with_slots(pages=40)
    slots = [opened(ledger, 100) for _ in range(1000)]
    assert len(set(slots)) == 1000
    ledger.check_invariants()
    ledger.release(page_ids(slots), "a")
    assert ledger.free == 40


def free_twice(ledger: Ledger) -> Iterator[None]:
    slot = page_ids((cached(ledger, 100),))
    ledger.drop(slot)
    yield
    ledger.drop(slot)


@pytest.mark.parametrize("kind", [Ledger, TracingLedger])
def test_a_slot_cannot_be_freed_twice(kind: type[Ledger]) -> None:
    ledger = ledger_with_slots(kind)
    steps = free_twice(ledger)
    next(steps)
    with pytest.raises(InvariantViolation):
        next(steps)
    ledger.check_invariants()


def test_pages_and_slots_of_one_batch() -> None:
    ledger = ledger_with_slots()
    batch = ledger.open(2, "a") + page_ids((opened(ledger, 2000),))
    ledger.seal(batch, "a")
    ledger.keep(batch)
    ledger.release(batch, "a")
    assert ledger.idle == 3
    assert [list(part) for part in ledger.split(batch)] == [list(batch[:2]), list(batch[2:])]
    assert ledger.drop(batch) == 3
    assert ledger.free == PAGES


def test_the_owner_of_a_page_with_slots() -> None:
    ledger = ledger_with_slots()
    slot = opened(ledger, 2000)
    page = ledger.place(slot).page
    assert ledger.state(page) is State.OPEN
    assert isinstance(ledger, TracingLedger)
    assert dict(ledger.owners[page]) == {SLOTS: 1}
