"""The event stream: what a naive follower makes of it is what the index holds, always.

Must not look into the log: it is read as a router would.
"""

import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvkeep.errors import EventsLost, OutOfPages
from kvkeep.index.eviction import Tier
from kvkeep.index.names import Hash64, as_token_ids, chain_names, hash64, make_identity
from kvkeep.index.run import NOWHERE
from kvkeep.index.watch import names_in
from kvkeep.lease import Lease
from kvkeep.telemetry.events import Copies, Event, EventLog
from tests.core.naive import constant_hash, narrow_hash
from tests.examples import examples
from tests.telemetry.rigs import PAGE_SIZE, TwoTiers, prompt


class Follower:
    """A subscriber with a plain set for each tier; every rule of the stream is checked as it is read."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.resyncs = -1
        self.seen: list[Event] = []
        self.resync()

    def resync(self) -> None:
        now = self.log.snapshot()
        self.sequence = now.sequence
        self.names = {tier: set(names) for tier, names in now.names.items()}
        self.resyncs += 1

    def catch_up(self) -> list[Event]:
        """Applies what is new; begins again after a gap."""
        try:
            events = self.log.read(self.sequence)
        except EventsLost:
            self.resync()
            return []
        for event in events:
            self.apply(event)
        self.seen += events
        return events

    def apply(self, event: Event) -> None:
        assert self.sequence + 1 == event.sequence
        self.sequence = event.sequence
        held, names = self.names[event.tier], set(event.names)
        if event.kind == "cleared":
            held.clear()
            return
        assert len(names) == len(event.names) > 0
        if event.kind == "stored":
            assert not held & names, "stored twice"
            held |= names
        else:
            assert names <= held, "removed without having been stored"
            assert event.kind == "removed" or (Tier.GPU is event.tier and names <= self.names[Tier.HOST])
            held -= names


class EventMachine(RuleBasedStateMachine):
    """A few live requests over small tiers, names that collide, copies that fail, and a follower."""

    hash_fn: Hash64 = staticmethod(hash64)
    nbytes_max = 1 << 20

    @initialize(seed=st.integers(0, 2**32), fail=st.sampled_from([0.0, 0.3]))
    def begin(self, seed: int, fail: float) -> None:
        self.tiers = TwoTiers(8, 6, hash_fn=self.hash_fn, seed=seed, fail_rate=fail)
        self.leases: list[Lease] = []
        self.follower = Follower(EventLog(self.tiers.cache, nbytes_max=self.nbytes_max, first=0))

    @rule(tokens=st.lists(st.sampled_from([(1,) * PAGE_SIZE, (2,) * PAGE_SIZE]), max_size=4), tail=st.integers(0, 3))
    def admit(self, tokens: list[tuple[int, ...]], tail: int) -> None:
        flat = [token for page in tokens for token in page] + [9] * tail
        try:
            self.leases.append(self.tiers.cache.admit(flat or [3]))
        except OutOfPages:
            return

    def pick(self, choice: int) -> Lease | None:
        self.leases = [lease for lease in self.leases if lease.live]
        ready = [lease for lease in self.leases if not lease.read_in_progress]
        return ready[choice % len(ready)] if ready else None

    @rule(choice=st.integers(0, 9), count=st.integers(1, PAGE_SIZE))
    def extend(self, choice: int, count: int) -> None:
        lease = self.pick(choice)
        if lease is not None:
            try:
                self.tiers.cache.extend(lease, [2] * count)
            except OutOfPages:
                return
            self.tiers.cache.seal(lease, lease.length - 1)

    @rule(choice=st.integers(0, 9))
    def finish(self, choice: int) -> None:
        lease = self.pick(choice)
        if lease is not None:
            self.tiers.cache.finish(lease, lease.length - 1)

    @rule(choice=st.integers(0, 9))
    def abort(self, choice: int) -> None:
        self.leases = [lease for lease in self.leases if lease.live]
        if self.leases:
            self.tiers.cache.abort(self.leases[choice % len(self.leases)])

    @rule(steps=st.integers(1, 8))
    def copies_go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.tiers.backend.step()
        self.tiers.cache.poll()

    @rule()
    def reset(self) -> None:
        self.tiers.cache.reset()

    @precondition(lambda self: self.follower.sequence > 3)
    @rule(back=st.integers(1, 3))
    def replay(self, back: int) -> None:
        """Reading again from an earlier number gives the same events again."""
        now = self.follower.sequence
        try:
            again = self.follower.log.read(now - back)
        except EventsLost:
            return
        kept = {event.sequence: event for event in self.follower.seen}
        assert [kept[n] for n in range(now - back + 1, now + 1)] == again

    @invariant()
    def the_follower_knows_the_index(self) -> None:
        self.follower.catch_up()
        now = names_in(self.tiers.cache._tree)
        assert {tier: set(names.tolist()) for tier, names in now.items()} == self.follower.names
        assert self.follower.names == {tier: set(names) for tier, names in self.follower.log.snapshot().names.items()}

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.check()


class NarrowNames(EventMachine):
    hash_fn = staticmethod(narrow_hash)


class EqualNames(EventMachine):
    hash_fn = staticmethod(constant_hash)


class ShortMemory(NarrowNames):
    """The buffer holds about two events: the follower has to begin again, often."""

    nbytes_max = 600


@pytest.mark.parametrize("machine", [EventMachine, NarrowNames, EqualNames, ShortMemory])
def test_a_follower_knows_the_index(machine: type[EventMachine]) -> None:
    """Applying the stream to a set for each tier gives the names in the tree, after every step."""
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=40))


def summary(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    return [(event.kind, event.tier.name.lower(), event.reason, len(event.names)) for event in events]


def names_of(tokens: list[int]) -> list[int]:
    pages = len(tokens) // PAGE_SIZE
    raw = memoryview(as_token_ids(tokens[: pages * PAGE_SIZE]).tobytes())
    return chain_names(make_identity(b"fp").name, raw, PAGE_SIZE * 4)


def test_a_chain_is_told_with_its_parents() -> None:
    """A stored event names consecutive pages and the name before the first: the root's, or the page's before."""
    tiers = TwoTiers()
    follower = Follower(EventLog(tiers.cache))
    tokens = prompt(1, 3)
    names = names_of([*tokens, *range(8)])
    tiers.store(tokens)
    [first] = follower.catch_up()
    assert (make_identity(b"fp").name, names[:3], PAGE_SIZE) == (first.parent, list(first.names), first.page_size)
    tiers.store([*tokens, *range(8)])
    [second] = follower.catch_up()
    assert ("stored", None, names[2], names[3:5]) == (second.kind, second.reason, second.parent, list(second.names))


def test_every_chain_has_its_own_event() -> None:
    """A branch names the page where it leaves another chain; chains stored one after the other stay two."""
    tiers = TwoTiers(32)
    follower = Follower(EventLog(tiers.cache))
    trunk, branch = prompt(1, 3), [*prompt(1, 2)[:-1], *prompt(2, 2)]
    tiers.store(trunk)
    tiers.store(branch)
    tiers.store(prompt(3, 1))
    found = [(event.parent, list(event.names)) for event in follower.catch_up()]
    root = make_identity(b"fp").name
    assert [
        (root, names_of(trunk)),
        (names_of(trunk)[1], names_of(branch)[2:]),
        (root, names_of(prompt(3, 1))),
    ] == found


def totals(events: Iterable[Event]) -> dict[tuple[Any, ...], int]:
    """Names by kind, tier and reason: in how many events they came depends on when copies were made."""
    out: Counter[tuple[Any, ...]] = Counter()
    for *what, count in summary(events):
        out[tuple(what)] += count
    return dict(out)


def test_row_55_an_eviction_is_told_from_a_demotion() -> None:
    """Copied down, gone from the GPU with a copy below, copied up, and lost for good are four different things."""
    tiers = TwoTiers(8, 32)
    follower = Follower(EventLog(tiers.cache))
    tiers.store(prompt(1, 4))
    tiers.store(prompt(2, 7))
    tiers.settle()
    seen = totals(follower.catch_up())
    assert 11 == seen["stored", "gpu", None]
    assert 4 == seen["demoted", "gpu", "demoted"]
    assert 4 <= seen["stored", "host", "demoted"]
    assert {"stored", "demoted"} == {kind for kind, *_ in seen}
    tiers.store(prompt(1, 4))
    seen = totals(follower.catch_up())
    assert (4, None) == (seen["stored", "gpu", "promoted"], seen.get(("stored", "gpu", None)))

    small = TwoTiers(4, 0)
    follower = Follower(EventLog(small.cache))
    small.store(prompt(1, 2))
    small.store(prompt(2, 3))
    assert {("stored", "gpu", None): 5, ("removed", "gpu", "evicted"): 2} == totals(follower.catch_up())


def test_one_page_that_leaves_is_told() -> None:
    """The short way that a decode's next page takes is told like every other."""
    tiers = TwoTiers(4, 0)
    follower = Follower(EventLog(tiers.cache))
    tiers.store(prompt(1, 3))
    tiers.cache.abort(tiers.cache.admit(prompt(2, 1)))
    assert [("stored", "gpu", None, 3), ("removed", "gpu", "evicted", 1)] == summary(follower.catch_up())


def test_row_54_a_reset_is_an_event_of_each_tier() -> None:
    """After a reset a follower holds nothing of either tier."""
    tiers = TwoTiers(8, 32)
    follower = Follower(EventLog(tiers.cache))
    tiers.store(prompt(1, 4))
    tiers.store(prompt(2, 7))
    tiers.settle()
    follower.catch_up()
    assert follower.names[Tier.GPU] and follower.names[Tier.HOST]
    tiers.cache.reset()
    assert [("cleared", "gpu", "reset", 0), ("cleared", "host", "reset", 0)] == summary(follower.catch_up())
    assert {Tier.GPU: set(), Tier.HOST: set()} == follower.names


def test_a_failed_copy_is_a_reason() -> None:
    """A copy down that did not arrive leaves the host tier again, failed; so does a chain whose load failed."""
    tiers = TwoTiers(8, 32)
    follower = Follower(EventLog(tiers.cache))
    tiers.store(prompt(1, 4))
    lease = tiers.cache.admit(prompt(2, 7))  # the four have to leave
    fail(tiers, lease, "demote")
    tiers.cache.abort(lease)
    seen = totals(follower.catch_up())
    assert 4 == seen["demoted", "gpu", "demoted"]
    assert 4 == seen["removed", "host", "failed"]

    tiers = TwoTiers(8, 32)
    follower = Follower(EventLog(tiers.cache))
    tiers.store(prompt(1, 4))
    tiers.store(prompt(2, 7))
    tiers.settle()
    follower.catch_up()
    lease = tiers.cache.admit(prompt(1, 4))
    fail(tiers, lease, "promote")
    assert 0 == lease.matched_len
    seen = totals(follower.catch_up())
    assert (4, 4) == (seen["removed", "gpu", "failed"], seen["removed", "host", "failed"])


def fail(tiers: TwoTiers, lease: Lease, cause: str) -> None:
    """The copies of a cause fail, and whoever waits for copies goes on."""
    jobs = [job for job in tiers.backend.jobs if job.plan.cause == cause]
    assert jobs
    for job in jobs:
        tiers.backend.fail(job)
    while lease.read_in_progress:
        tiers.backend.step()
        tiers.cache.poll()


def test_row_54_a_gap_is_reported_and_a_snapshot_mends_it() -> None:
    """Who reads too late is told so, and never reads across the gap; a snapshot goes on from its number."""
    tiers = TwoTiers(64, 0)
    log = EventLog(tiers.cache, nbytes_max=1000, first=0)
    follower = Follower(log)
    for first in range(5):
        tiers.store(prompt(first, 3))
        log.snapshot()
    with pytest.raises(EventsLost, match="take a snapshot"):
        log.read(0)
    follower.catch_up()
    assert (1, 15) == (follower.resyncs, len(follower.names[Tier.GPU]))
    for first in range(5, 15):
        tiers.store(prompt(first, 3))  # nobody reads: the tree's news are dropped too
    follower.catch_up()
    assert (2, 45) == (follower.resyncs, len(follower.names[Tier.GPU]))
    tiers.store(prompt(15, 3))
    assert [("stored", "gpu", None, 3)] == summary(follower.catch_up())


def test_a_number_of_another_process_is_a_gap() -> None:
    """A reader that comes with a number of an earlier log, or one from the future, is told to begin again."""
    tiers = TwoTiers()
    earlier = EventLog(tiers.cache).snapshot().sequence
    log = EventLog(tiers.cache, first=earlier + 1)
    for number in (earlier, earlier + 2):
        with pytest.raises(EventsLost):
            log.read(number)
    assert [] == log.read(earlier + 1)


def test_first_copy_and_last_copy() -> None:
    """Of two entries of equal name the first is stored and the last is removed."""
    copies = Copies(np.array([7, 7], dtype=np.uint64))
    assert [False, True] == copies.add(np.array([7, 8], dtype=np.uint64)).tolist()
    assert [False, False, True, True] == copies.drop(np.array([7, 7, 8, 7], dtype=np.uint64)).tolist()
    assert [True] == copies.add(np.array([7], dtype=np.uint64)).tolist()


def test_without_a_log_nothing_is_told() -> None:
    """A cache that nobody follows, or no longer, has no watch; a log that was closed keeps what it had."""
    tiers = TwoTiers()
    assert tiers.cache._tree.gpu.watch is None
    log = EventLog(tiers.cache, first=0)
    tiers.store(prompt(1, 3))
    log.close()
    tiers.store(prompt(2, 3))
    assert tiers.cache._tree.gpu.watch is None
    assert [("stored", "gpu", None, 3)] == summary(log.read(0))


def test_reading_beside_a_busy_cache() -> None:
    """A follower in another thread, with a buffer that overflows now and then, ends up with the names in the tree."""
    tiers = TwoTiers(64, 0, hash_fn=narrow_hash)
    follower = Follower(EventLog(tiers.cache, nbytes_max=4000))
    stop = threading.Event()
    failures: list[BaseException] = []

    def follow() -> None:
        try:
            while not stop.is_set():
                follower.catch_up()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    for first in range(600):
        tiers.store(prompt(first % 97, 1 + first % 7))
    stop.set()
    thread.join()
    assert [] == failures
    follower.catch_up()
    assert set(names_in(tiers.cache._tree)[Tier.GPU].tolist()) == follower.names[Tier.GPU]


def test_copies_of_several_chains_leave_in_any_order() -> None:
    """Host copies that leave at once, of A, of B and of A again, are told by their own names."""
    tiers = TwoTiers(8, 16)
    follower = Follower(EventLog(tiers.cache))
    a, b = prompt(1, 2), prompt(2, 1)
    tiers.cache.admit(prompt(9, 3))  # few pages are free: all are copied down
    for tokens in (a[: PAGE_SIZE + 1], b, a):
        tiers.store(tokens)
        tiers.settle()
    tree = tiers.cache._tree
    assert tree.host is not None
    follower.catch_up()
    pages = array("i", [page for page in range(16) if tree.host.run_of[page] is not None])
    runs = [tree.host.run_of[page] for page in pages]
    assert runs[0] is runs[2] is not runs[1]
    for page, run in zip(pages, runs, strict=True):
        run.host[tree.host.depth_of[page] - run.start] = NOWHERE
    tree.host.remove(pages)
    tree.host.ledger.drop(pages)
    follower.catch_up()
    held = names_in(tree)
    assert {tier: set(held[tier].tolist()) for tier in held} == follower.names
