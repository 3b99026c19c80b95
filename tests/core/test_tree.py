"""The run tree against a naive index: the same matches, the same pages evicted in the same order.

Must not know requests: pages are opened, sealed, pinned and let go here as the cache would.
"""

from array import array
from copy import deepcopy
from typing import NamedTuple

import numpy as np
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

from kvkeep.index import hints
from kvkeep.index.check import check_tree
from kvkeep.index.eviction import EvictionOrder, LruOrder
from kvkeep.index.media import MediaItem
from kvkeep.index.names import TOKEN_NBYTES, Hash64, Identity, chain_names, hash64, make_identity
from kvkeep.index.rhythm import RhythmOrder
from kvkeep.index.runs import Place, RunTree
from kvkeep.index.uses import NO_STAMP, Began, PathUse, Uses
from kvkeep.tiers.tracing import TracingLedger
from tests.core.naive import NaiveIndex, PageContent, constant_hash, narrow_hash
from tests.examples import examples

PAGE_SIZE = 2
PAGE_NBYTES = PAGE_SIZE * TOKEN_NBYTES
PAGES_TOTAL = 56
TAIL_PAGES_MAX = 7
HEADS = [0, 0, 0, 0, 17, 30]  #: pages that chains begin with; some more than the tree treats one by one
CHAIN_PAGES_MAX = max(HEADS) + TAIL_PAGES_MAX

Chain = tuple[PageContent, ...]
Media = dict[int, tuple[MediaItem, ...]]


class Pin(NamedTuple):
    """A holder of pages along one path, as a request is."""

    owner: str
    pages: "array[int]"


def item(digest: bytes, page: int, pages: int) -> MediaItem:
    return MediaItem(offset=page * PAGE_SIZE + 1, length=pages * PAGE_SIZE - 1, digest=digest)


letters = st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 1), (1, 0)])


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Chains of few letters, so that they meet, split and diverge; now and then a page of another medium."""
    head = draw(st.sampled_from(HEADS), label="head")
    tokens = [(0, 0)] * head + draw(st.lists(letters, min_size=1, max_size=TAIL_PAGES_MAX), label="tail")
    media: dict[int, MediaItem] = {}
    if draw(st.integers(0, 3)) == 3:
        first = draw(st.integers(0, len(tokens) - 1))
        span = draw(st.integers(1, len(tokens) - first))
        digest = draw(st.sampled_from([b"A" * 16, b"A" * 15 + b"B"]))
        media = {depth: item(digest, first, span) for depth in range(first, first + span)}
    return tuple((page, (media[d],) if d in media else ()) for d, page in enumerate(tokens))


def raw_of(chain: Chain) -> memoryview:
    return np.array([t for tokens, _ in chain for t in tokens], dtype=np.int32).data.cast("B")


def media_of(chain: Chain) -> Media | None:
    return {d: items for d, (_, items) in enumerate(chain) if items} or None


class TreeMachine(RuleBasedStateMachine):
    """Random stores, pins and evictions of short chains over a small pool."""

    hash_fn: Hash64 = staticmethod(hash64)

    @initialize()
    def begin(self) -> None:
        self.ledger = TracingLedger(PAGES_TOTAL)
        self.tree = RunTree(self.ledger, self.order(), PAGE_NBYTES, self.hash_fn)
        self.roots = [make_identity(b"fp", salt=salt, hash_fn=self.hash_fn) for salt in (b"", b"s")]
        self.naive = NaiveIndex()
        self.pins: list[Pin] = []
        self.owners = 0

    def order(self) -> EvictionOrder:
        return LruOrder()

    def new_owner(self) -> str:
        self.owners += 1
        return f"request {self.owners}"

    def names(self, root: Identity, chain: Chain) -> list[int]:
        return chain_names(root.name, raw_of(chain), PAGE_NBYTES, 0, media_of(chain), self.hash_fn)

    def match(self, root: Identity, chain: Chain, limit: int) -> "array[int]":
        """Matches in the tree, and sees that the naive index matches the same."""
        found = self.tree.match(root, raw_of(chain), limit, media_of(chain))
        expected = self.naive.match(root.record, chain, limit)
        assert expected == list(found.pages)
        assert (self.names(root, chain)[: len(expected)] or [root.name])[-1] == found.name
        return found.pages

    def release(self, pin: Pin) -> None:
        self.ledger.release(pin.pages, pin.owner)
        self.tree.offer(pin.pages)

    def place(self, root: Identity, pages: "array[int]") -> Place:
        place = self.tree.place(pages[-1]) if pages else self.tree.root(root)
        assert place is not None
        return place

    # ------------------------------------------------------------------ rules

    @rule(which=st.integers(0, 1), chain=chains(), limit=st.integers(0, CHAIN_PAGES_MAX))
    def lookup(self, which: int, chain: Chain, limit: int) -> None:
        self.match(self.roots[which], chain, min(limit, len(chain)))

    @rule(which=st.integers(0, 1), chain=chains(), hold=st.booleans())
    def store_behind_a_match(self, which: int, chain: Chain, hold: bool) -> None:
        """A request that reuses what there is and stores the rest."""
        root, owner = self.roots[which], self.new_owner()
        matched = self.match(root, chain, len(chain))
        if len(chain) - len(matched) > self.ledger.free:
            return
        self.ledger.retain(matched, owner)
        self.store(root, chain, matched, owner, hold)

    @rule(which=st.integers(0, 1), chain=chains(), hold=st.booleans())
    def store_from_the_root(self, which: int, chain: Chain, hold: bool) -> None:
        """A request that computed all of it: its pages stay out where there are pages already."""
        if len(chain) <= self.ledger.free:
            self.store(self.roots[which], chain, array("i"), self.new_owner(), hold)

    def store(self, root: Identity, chain: Chain, matched: "array[int]", owner: str, hold: bool) -> None:
        at = len(matched)
        own = self.ledger.open(len(chain) - at, owner)
        self.ledger.seal(own, owner)
        pages = matched + own
        if own:
            done = self.tree.insert(
                self.place(root, matched), self.names(root, chain)[at:], raw_of(chain[at:]), own, media_of(chain)
            )
            twins = len(self.naive.match(root.record, chain, len(chain))) - at
            added = self.naive.insert(root.record, chain, list(pages))
            assert (at + twins, len(added)) == (at + done.twins, len(own) - done.twins)
            assert self.naive.match(root.record, chain, len(chain))[-1] == done.last
        pin = Pin(owner, pages)
        if hold:
            self.pins.append(pin)
        else:
            self.release(pin)

    @rule(which=st.integers(0, 1), chain=chains())
    def pin(self, which: int, chain: Chain) -> None:
        pages = self.match(self.roots[which], chain, len(chain))
        if pages:
            owner = self.new_owner()
            self.ledger.retain(pages, owner)
            self.pins.append(Pin(owner, pages))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.release(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1), label="pin")))

    @rule(which=st.integers(0, 1), chain=chains())
    def touch(self, which: int, chain: Chain) -> None:
        root = self.roots[which]
        pages = self.match(root, chain, len(chain))
        if pages:
            self.tree.touch(self.place(root, pages))
            self.naive.touch(root.record, chain[: len(pages)])

    @rule(count=st.one_of(st.integers(1, 3), st.integers(1, 3), st.integers(1, PAGES_TOTAL)))
    def evict(self, count: int) -> None:
        expected = self.naive.evict(count, self.ledger.is_idle)
        pages = self.tree.evict(count)
        assert sorted(expected) == sorted(pages)
        self.ledger.recycle(pages, "room")
        self.ledger.release(pages, "room")

    @rule(which=st.integers(0, 1), chain=chains())
    def replace(self, which: int, chain: Chain) -> None:
        """The index takes another page of equal content in place of one that nobody holds."""
        root = self.roots[which]
        pages = self.match(root, chain, len(chain))
        old = [d for d, p in enumerate(pages) if self.ledger.is_idle(p)]
        if not old or not self.ledger.free:
            return
        new = self.ledger.open(1, "twin")
        self.ledger.seal(new, "twin")
        self.tree.replace(pages[old[0]], new[0])
        self.naive.entries[root.record, chain[: old[0] + 1]].page = new[0]
        self.release(Pin("twin", new))

    @rule(sure=st.integers(0, 9))
    def clear(self, sure: int) -> None:
        if sure:
            return
        idle = self.ledger.idle
        assert idle == self.tree.clear().gpu
        self.naive.entries.clear()

    # ------------------------------------------------------------------ always

    @invariant()
    def the_tree_holds_what_the_naive_index_holds(self) -> None:
        self.ledger.check_invariants()
        check_tree(self.tree)
        pages = {entry.page: prefix for prefix, entry in self.naive.entries.items()}
        assert len(pages) == self.tree_pages()
        for page, (root, chain) in pages.items():
            place = self.tree.place(page)
            assert place is not None
            assert len(chain) == place.depth
            assert page == self.tree.page_at(place, len(chain) - 1)
            tokens, _, media = self.tree.page_content(page)
            assert (bytes(raw_of(chain[-1:])), chain[-1][1]) == (tokens, (media or {}).get(len(chain) - 1, ()))
            assert self.naive.match(root, chain, len(chain))[-1] == page

    def tree_pages(self) -> int:
        return sum(len(run.pages) for run in self.tree.runs())

    def teardown(self) -> None:
        """When every holder has let go, everything can leave, in the naive order, and the pool is whole again."""
        if not hasattr(self, "tree"):
            return
        while self.pins:
            self.release(self.pins.pop())
        for _ in range(len(self.naive.entries)):
            self.evict(1)
        assert (PAGES_TOTAL, 0) == (self.ledger.free, self.tree_pages())
        check_tree(self.tree)


class RhythmTreeMachine(TreeMachine):
    """With an order that chooses by what it has learned: any page may leave that nothing hangs behind."""

    def order(self) -> EvictionOrder:
        self.seconds = 0.0
        self.uses = Uses(PAGES_TOTAL, lambda: self.seconds)
        return RhythmOrder(self.uses)

    def release(self, pin: Pin) -> None:
        """The end of a request, of which the order is told when the request was the last to stamp its path."""
        self.seconds += 1.0
        inside = [p for p in pin.pages if p in self.tree]
        place = self.tree.place(inside[-1]) if inside else None
        if place is not None:
            run, depth = place
            stamp = run.stretch(depth - 1)[0]
            if stamp not in self.uses.of_stamp:
                begin = Began(self.seconds - 0.5, NO_STAMP, PAGE_SIZE)
                name = run.names[depth - 1 - run.start]
                use = self.uses.used(PathUse(stamp, run, depth, depth, name, (), begin, self.owners % 7))
                hint = (None, None, None, hints.Discard(), hints.Pin(5.0), hints.Expect(3.0))[self.owners % 6]
                if hint is not None:
                    self.uses.hint(use, hint)
        super().release(pin)

    @rule(seconds=st.sampled_from([1.0, 10.0, 1e4]))
    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    @rule(count=st.one_of(st.integers(1, 3), st.integers(1, 3), st.integers(1, PAGES_TOTAL)))
    def evict(self, count: int) -> None:
        room = len(deepcopy(self.naive).evict(count, self.ledger.is_idle))
        pages = self.tree.evict(count)
        assert room == len(pages)
        self.naive.let_leave(list(pages), self.ledger.is_idle)
        self.ledger.recycle(pages, "room")
        self.ledger.release(pages, "room")


class NarrowTreeMachine(TreeMachine):
    """With names of 8 bits."""

    hash_fn = staticmethod(narrow_hash)


class ConstantTreeMachine(TreeMachine):
    """With one name for everything."""

    hash_fn = staticmethod(constant_hash)


MACHINES = pytest.mark.parametrize("machine", [TreeMachine, RhythmTreeMachine, NarrowTreeMachine, ConstantTreeMachine])


@MACHINES
def test_a_tree_equals_the_naive_index(machine: type[TreeMachine]) -> None:
    """Matches and evictions are exactly those of a dict by exact prefix, however names collide."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(140), stateful_step_count=50, report_multiple_bugs=False)
    )


@pytest.mark.slow
@MACHINES
def test_a_tree_equals_the_naive_index_at_length(machine: type[TreeMachine]) -> None:
    """The same, for minutes."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=1000, stateful_step_count=100, report_multiple_bugs=False)
    )


def stored(tree: RunTree, *chains: Chain) -> None:
    """Stores chains, each used later than those before it, and lets go of them."""
    for chain in chains:
        root = make_identity(b"fp")
        found = tree.match(root, raw_of(chain), len(chain), media_of(chain))
        at = len(found.pages)
        place = tree.place(found.pages[-1]) if found.pages else tree.root(root)
        assert place is not None
        pages = tree.gpu.ledger.open(len(chain) - at, "a")
        tree.gpu.ledger.seal(pages, "a")
        names = chain_names(found.name, raw_of(chain[at:]), PAGE_NBYTES, at, media_of(chain))
        tree.insert(place, names, raw_of(chain[at:]), pages, media_of(chain))
        tree.gpu.ledger.release(pages, "a")
        tree.offer(pages[-1:])


def plain(*pages: tuple[int, int]) -> Chain:
    return tuple((tokens, ()) for tokens in pages)


def test_a_page_that_is_held_stays_though_it_is_the_coldest() -> None:
    """Eviction passes over a tail that a request holds, one page or many at a time, and finds it again later."""
    for count in (1, 2):
        ledger = TracingLedger(8)
        tree = RunTree(ledger, LruOrder(), PAGE_NBYTES)
        stored(tree, plain((0, 0), (1, 1)), plain((2, 2), (3, 3)))
        cold = tree.match(make_identity(b"fp"), raw_of(plain((0, 0), (1, 1))), 2).pages
        ledger.retain(cold, "reader")
        gone = tree.evict(count)
        assert (count, set()) == (len(gone), set(gone) & set(cold))
        ledger.release(cold, "reader")
        tree.offer(cold[-1:])
        assert sorted(cold) == sorted([*tree.evict(1), *tree.evict(1)])


def test_a_match_stops_at_its_limit_in_every_run() -> None:
    """A limit that lies in a later run of the path cuts the match there."""
    ledger = TracingLedger(8)
    tree = RunTree(ledger, LruOrder(), PAGE_NBYTES)
    chain = plain((0, 0), (1, 1), (2, 2), (3, 3), (4, 4))
    stored(tree, chain, plain((0, 0), (1, 1), (5, 5)))
    assert [0, 1, 2, 3, 4, 5] == [
        len(tree.match(make_identity(b"fp"), raw_of(chain), limit).pages) for limit in range(6)
    ]


def test_a_split_shares_out_recency_and_media() -> None:
    """Where a chain diverges, either part keeps when its pages were used, and the media of its own pages."""
    ledger = TracingLedger(16)
    tree = RunTree(ledger, LruOrder(), PAGE_NBYTES)
    picture = item(b"A" * 16, 1, 3)
    chain = tuple((tokens, (picture,) if d in (1, 2, 3) else ()) for d, tokens in enumerate([(n, n) for n in range(5)]))
    stored(tree, chain)
    pages = tree.match(make_identity(b"fp"), raw_of(chain), 5, media_of(chain)).pages
    tree.touch(tree.place(pages[2]) or tree.root(make_identity(b"fp")))
    branch = (*chain[:2], ((7, 7), (picture,)))
    stored(tree, branch)
    check_tree(tree)
    assert 5 == len(tree.match(make_identity(b"fp"), raw_of(chain), 5, media_of(chain)).pages)
    other_media = {**(media_of(chain) or {}), 3: ()}
    assert 3 == len(tree.match(make_identity(b"fp"), raw_of(chain), 5, other_media).pages)
    tip = tree.match(make_identity(b"fp"), raw_of(branch), 3, media_of(branch)).pages[2]
    coldest_first = [pages[4], pages[3], pages[2], tip, pages[1], pages[0]]
    assert coldest_first == [tree.evict(1)[0] for _ in range(6)]


def test_a_parent_can_leave_after_a_child_used_as_late_as_itself() -> None:
    """When the last page behind a page leaves, that page is next, also when one use stamped both."""
    ledger = TracingLedger(8)
    tree = RunTree(ledger, LruOrder(), PAGE_NBYTES)
    stored(tree, plain((0, 0), (1, 1)), plain((0, 0), (2, 2)))
    assert [1, 1, 1, 0] == [len(tree.evict(1)) for _ in range(4)]
