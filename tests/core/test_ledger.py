"""The ledger against a naive one: a dict that knows every owner of every page by name.

Must not know what pages are for: no names, no tokens, no cache.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.ledger import INDEX, SCALAR_PAGES_MAX, Ledger, State, page_ids
from kvkeep.tiers.tracing import TracingLedger

PAGES_TOTAL = 48
OWNERS = ("a", "b", "c")
BOTH = pytest.mark.parametrize("kind", [Ledger, TracingLedger])
#: Batches below, at and above the size where the vectorised path begins.
SIZES = pytest.mark.parametrize("size", [1, SCALAR_PAGES_MAX, SCALAR_PAGES_MAX + 1, 40])


class NaivePage:
    """One page: how often each owner holds it, its state, how often it changed hands."""

    def __init__(self) -> None:
        self.owners: Counter[str] = Counter()
        self.state = State.FREE
        self.generation = 0


Which = Callable[[NaivePage], bool]


def ready(page: NaivePage) -> bool:
    return page.state is State.READY


def keepable(page: NaivePage) -> bool:
    return ready(page) and not kept(page)


def kept(page: NaivePage) -> bool:
    return page.owners[INDEX] > 0


def idle(page: NaivePage) -> bool:
    return set(page.owners) == {INDEX}


def held_by(owner: str) -> Which:
    return lambda page: page.owners[owner] > 0


def written_by(owner: str) -> Which:
    return lambda page: page.state is State.OPEN and set(page.owners) == {owner}


def no(which: Which) -> Which:
    return lambda page: not which(page)


class LedgerMachine(RuleBasedStateMachine):
    """Random legal batches; the same illegal ones must be refused and change nothing."""

    kind: type[Ledger] = Ledger

    @initialize(
        held=st.integers(0, PAGES_TOTAL // 3),
        idle=st.integers(0, PAGES_TOTAL // 3),
        both=st.integers(0, PAGES_TOTAL // 3),
    )
    def begin(self, held: int, idle: int, both: int) -> None:
        """A ledger where some pages are READY: held by a request, by the index, or by both."""
        self.ledger = self.kind(PAGES_TOTAL)
        self.pages = {p: NaivePage() for p in range(PAGES_TOTAL)}
        for count, owners in ((held, ("a",)), (idle, (INDEX,)), (both, ("a", INDEX))):
            pages = self.ledger.open(count, "a")
            self.ledger.seal(pages, "a")
            if INDEX in owners:
                self.ledger.keep(pages)
            if "a" not in owners:
                self.ledger.release(pages, "a")
            for p in pages:
                self.pages[p].state = State.READY
                self.pages[p].owners.update(owners)

    def those(self, which: Which) -> list[int]:
        return [p for p, page in self.pages.items() if which(page)]

    def some(self, data: st.DataObject, which: Which) -> "array[int]":
        """A batch of distinct pages for which `which` holds, in one order or another; large ones as often as small."""
        fit = self.those(which)
        if not fit:
            return array("i")
        begin = data.draw(st.integers(0, len(fit) - 1), label="first of the batch")
        count = data.draw(st.sampled_from([1, 2, 3, SCALAR_PAGES_MAX, SCALAR_PAGES_MAX + 1, len(fit)]), label="pages")
        step = data.draw(st.sampled_from([1, -1]), label="step")
        return page_ids((fit[begin:] + fit[:begin])[:count][::step])

    def lose(self, page: int, owner: str) -> None:
        naive = self.pages[page]
        naive.owners[owner] -= 1
        naive.owners += Counter()
        if not naive.owners:
            naive.state = State.FREE
            naive.generation += 1

    # ------------------------------------------------------------------ legal

    @rule(count=st.integers(0, PAGES_TOTAL), owner=st.sampled_from(OWNERS))
    def open(self, count: int, owner: str) -> None:
        free = self.those(lambda page: page.state is State.FREE)
        if count > len(free):
            self.refused(lambda: self.ledger.open(count, owner))
            return
        taken = self.ledger.open(count, owner)
        assert (count, True) == (len(set(taken)), set(taken) <= set(free))
        for p in taken:
            self.pages[p].state = State.OPEN
            self.pages[p].owners[owner] += 1

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def seal(self, data: st.DataObject, owner: str) -> None:
        pages = self.some(data, written_by(owner))
        self.ledger.seal(pages, owner)
        for p in pages:
            self.pages[p].state = State.READY

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def retain(self, data: st.DataObject, owner: str) -> None:
        pages = self.some(data, ready)
        self.ledger.retain(pages, owner)
        for p in pages:
            self.pages[p].owners[owner] += 1

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def release(self, data: st.DataObject, owner: str) -> None:
        pages = self.some(data, held_by(owner))
        freed = self.ledger.release(pages, owner)
        for p in pages:
            self.lose(p, owner)
        assert sum(self.pages[p].state is State.FREE for p in pages) == freed

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pages = self.some(data, keepable)
        self.ledger.keep(pages)
        for p in pages:
            self.pages[p].owners[INDEX] += 1

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        pages = self.some(data, kept)
        freed = self.ledger.drop(pages)
        for p in pages:
            self.lose(p, INDEX)
        assert sum(self.pages[p].state is State.FREE for p in pages) == freed

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def recycle(self, data: st.DataObject, owner: str) -> None:
        pages = self.some(data, idle)
        self.ledger.recycle(pages, owner)
        for p in pages:
            self.pages[p].owners = Counter({owner: 1})
            self.pages[p].state = State.OPEN
            self.pages[p].generation += 1

    @rule(data=st.data())
    def idle_tail(self, data: st.DataObject) -> None:
        order = self.some(data, lambda page: True) + self.some(data, idle)
        count = data.draw(st.integers(0, len(order)), label="count")
        expected = 0
        while expected < count and idle(self.pages[order[-1 - expected]]):
            expected += 1
        assert expected == self.ledger.idle_tail(order, count)

    # ------------------------------------------------------------------ illegal

    def refused(self, act: Callable[[], Any]) -> None:
        with pytest.raises(InvariantViolation, match="page"):
            act()

    def with_one(self, data: st.DataObject, good: Which, bad: Which) -> Any:
        """A batch of good pages with one bad one somewhere in it; None when there is no bad one."""
        wrong = self.those(bad)
        if not wrong:
            return None
        pages = self.some(data, good)
        at = data.draw(st.integers(0, len(pages)), label="at")
        pages.insert(at, data.draw(st.sampled_from(wrong), label="bad page"))
        return pages

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def seal_of_what_is_not_open(self, data: st.DataObject, owner: str) -> None:
        pages = self.with_one(data, written_by(owner), lambda page: page.state is not State.OPEN)
        if pages is not None:
            self.refused(lambda: self.ledger.seal(pages, owner))

    @rule(data=st.data())
    def retain_of_what_is_not_ready(self, data: st.DataObject) -> None:
        pages = self.with_one(data, ready, no(ready))
        if pages is not None:
            self.refused(lambda: self.ledger.retain(pages, "a"))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def release_of_what_nobody_holds(self, data: st.DataObject, owner: str) -> None:
        pages = self.with_one(data, held_by(owner), lambda page: set(page.owners) <= {INDEX})
        if pages is not None:
            self.refused(lambda: self.ledger.release(pages, owner))

    @rule(data=st.data())
    def keep_of_what_is_kept_or_open_or_free(self, data: st.DataObject) -> None:
        pages = self.with_one(data, keepable, no(keepable))
        if pages is not None:
            self.refused(lambda: self.ledger.keep(pages))

    @rule(data=st.data())
    def drop_of_what_is_not_kept(self, data: st.DataObject) -> None:
        pages = self.with_one(data, kept, no(kept))
        if pages is not None:
            self.refused(lambda: self.ledger.drop(pages))

    @rule(data=st.data())
    def recycle_of_what_is_not_idle(self, data: st.DataObject) -> None:
        pages = self.with_one(data, idle, no(idle))
        if pages is not None:
            self.refused(lambda: self.ledger.recycle(pages, "a"))

    # ------------------------------------------------------------------ always

    @invariant()
    def equals_the_naive_one(self) -> None:
        ledger = self.ledger
        ledger.check_invariants()
        for p, page in self.pages.items():
            holders = page.owners.total() - page.owners[INDEX]
            expected = (page.state, holders, kept(page), idle(page), page.generation)
            got = (ledger.state(p), ledger.holders(p), ledger.kept(p), ledger.is_idle(p), ledger.generation(p))
            assert expected == got, p
        free, droppable = len(self.those(lambda page: page.state is State.FREE)), len(self.those(idle))
        assert (free, droppable, PAGES_TOTAL - free - droppable) == (ledger.free, ledger.idle, ledger.held)


class TracingLedgerMachine(LedgerMachine):
    """The tracing twin is a ledger, and refuses besides what counts alone cannot see."""

    kind = TracingLedger
    ledger: TracingLedger

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def release_by_a_stranger(self, data: st.DataObject, owner: str) -> None:
        pages = self.with_one(data, held_by(owner), lambda page: bool(page.owners) and not page.owners[owner])
        if pages is not None:
            self.refused(lambda: self.ledger.release(pages, owner))

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def seal_by_a_stranger(self, data: st.DataObject, owner: str) -> None:
        pages = self.with_one(data, written_by(owner), lambda page: page.state is State.OPEN and not page.owners[owner])
        if pages is not None:
            self.refused(lambda: self.ledger.seal(pages, owner))

    @precondition(lambda self: any(page.state is State.READY for page in self.pages.values()))
    @rule(data=st.data(), what=st.sampled_from(["retain", "release", "keep", "drop", "recycle"]))
    def a_page_twice_in_a_batch(self, data: st.DataObject, what: str) -> None:
        pages = self.some(data, ready)
        pages.append(pages[data.draw(st.integers(0, len(pages) - 1), label="twice")])
        by = ("a",) if what in ("retain", "release", "recycle") else ()
        self.refused(lambda: getattr(self.ledger, what)(pages, *by))

    @invariant()
    def knows_the_owners(self) -> None:
        assert [self.pages[p].owners for p in range(PAGES_TOTAL)] == [Counter(o) for o in self.ledger.owners]


MACHINES = pytest.mark.parametrize("machine", [LedgerMachine, TracingLedgerMachine])


@MACHINES
def test_a_ledger_equals_the_naive_one(machine: type[LedgerMachine]) -> None:
    """States, owners, generations and counts are those of the naive ledger, whatever is done, legal or not."""
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40))


@pytest.mark.slow
@MACHINES
def test_a_ledger_equals_the_naive_one_at_length(machine: type[LedgerMachine]) -> None:
    """The same, for minutes."""
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=80))


def ready_pages(ledger: Ledger, count: int, owner: object = "a") -> "array[int]":
    pages = ledger.open(count, owner)
    ledger.seal(pages, owner)
    return pages


@BOTH
@SIZES
def test_double_release_is_refused_with_the_story_of_the_page(kind: type[Ledger], size: int) -> None:
    """Releasing twice raises, names the page, and the free list is what it was."""
    ledger = kind(64)
    pages = ready_pages(ledger, size)
    assert size == ledger.release(pages, "a")
    with pytest.raises(InvariantViolation, match=rf"page {pages[0]} released.*state FREE, 0 holders"):
        ledger.release(pages, "a")
    assert 64 == ledger.free
    ledger.check_invariants()


@SIZES
def test_no_page_is_freed_twice_even_by_one_batch(size: int) -> None:
    """A batch that lists a page twice is stopped by the plain ledger, too, before the page is free twice."""
    ledger = Ledger(64)
    pages = ready_pages(ledger, size)
    pages.append(pages[-1])
    with pytest.raises(InvariantViolation, match=rf"page {pages[-1]} (released|freed) twice"):
        ledger.release(pages, "a")


def test_the_index_lets_go_of_a_page_once_in_a_batch() -> None:
    """A small batch to drop that lists a page twice is stopped, though a request holds the page as well."""
    ledger = Ledger(8)
    pages = ready_pages(ledger, 2)
    ledger.keep(pages)
    with pytest.raises(InvariantViolation, match=f"page {pages[1]} dropped twice"):
        ledger.drop(array("i", [pages[0], pages[1], pages[1]]))


@BOTH
def test_pages_of_two_owners_are_freed_by_the_last(kind: type[Ledger]) -> None:
    """A page that two requests hold is free when both have let go, and not before."""
    ledger = kind(8)
    pages = ready_pages(ledger, 3, "a")
    ledger.retain(pages, "b")
    assert 0 == ledger.release(pages, "a")
    assert (2, 3) == (State.READY, ledger.held)
    assert 3 == ledger.release(pages, "b")
    assert 8 == ledger.free


@BOTH
@SIZES
def test_a_page_that_changed_hands_has_another_generation(kind: type[Ledger], size: int) -> None:
    """(page, generation) names one content for good: freeing and recycling both end it."""
    ledger = kind(size)

    def content() -> set[tuple[int, int]]:
        return {(page, ledger.generation(page)) for page in range(size)}

    first = content()
    ledger.release(ready_pages(ledger, size), "a")
    second = content()
    pages = ready_pages(ledger, size)
    ledger.keep(pages)
    ledger.release(pages, "a")
    assert second == content()
    ledger.recycle(pages, "b")
    assert 3 * size == len(first | second | content())


def test_the_tracing_twin_tells_who_and_where() -> None:
    """An error of the twin names each owner and the function that made it one."""
    ledger = TracingLedger(4)

    def the_place_of_the_acquire() -> None:
        ready_pages(ledger, 1, "the request")

    the_place_of_the_acquire()
    with pytest.raises(InvariantViolation, match=r"'the request' x1 since .*the_place_of_the_acquire"):
        ledger.release(page_ids([3 - i for i in range(4) if ledger.state(3 - i) is State.READY]), "somebody else")


def test_a_corrupted_ledger_is_found() -> None:
    """`check_invariants` sees each kind of disagreement between words, states, free list and idle count."""

    def fresh() -> Ledger:
        ledger = Ledger(8)
        ledger.keep(ready_pages(ledger, 2))
        return ledger

    def free_twice(ledger: Ledger) -> None:
        ledger._free[1] = ledger._free[0]

    def owned_and_free(ledger: Ledger) -> None:
        ledger._words[ledger._free[0]] = 2

    def state_of_an_owned_page(ledger: Ledger) -> None:
        ledger._states[0] = State.FREE

    def below_zero(ledger: Ledger) -> None:
        ledger._words[0] = -1

    def two_writers(ledger: Ledger) -> None:
        ledger._words[ledger.open(1, "b")[0]] = 4

    def idle_count(ledger: Ledger) -> None:
        ledger.idle += 1

    for harm in (free_twice, owned_and_free, state_of_an_owned_page, below_zero, two_writers, idle_count):
        ledger = fresh()
        ledger.check_invariants()
        harm(ledger)
        with pytest.raises(InvariantViolation, match="ledger: "):
            ledger.check_invariants()
