"""Random histories of a group: what every rank is asked is by one seed, what only one of them meets by another.

Must not look at other ranks: a history returns what this rank saw, and that is compared by others.

    by the seed of all       prompts, polls, forwards, tokens that are appended, ends, resets
    by the rank's own        how far its copies are, which of them fail, what else fills its pool, what it forgets
"""

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvkeep.agreement.channel import Channel
from kvkeep.agreement.group import GroupLease
from kvkeep.errors import OutOfPages
from tests.agreement.rank import PAGE_SIZE, Rank

ROUNDS = 24  # after the last operation: then every copy is over


@dataclass
class Seen:
    """What one rank saw.   log: what must be equal on all.   counts: what happened, so that a test sees that it did."""

    log: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Live:
    """A request of the group that has not ended."""

    lease: GroupLease
    tokens: "array[int]"
    kv_len: int = 0
    seen: bool = False  # that it became ready


def history(channel: Channel, mechanism: str, seed: int, operations: int = 80) -> Seen:
    """Lives one history on this rank."""
    shared = random.Random(seed)
    host_pages = shared.choice((0, 12, 24))
    rank = Rank(
        channel,
        mechanism,
        pages=shared.choice((7, 10, 14)),
        host_pages=host_pages,
        seed=seed,
        fail_rate=shared.choice((0.0, 0.0, 0.4)),
        stuck_rate=shared.choice((0.0, 0.0, 0.1)),
        deadline_s=0.002,
        eviction=shared.choice(("lru", "rhythm")),
    )
    world = World(rank, shared, mechanism)
    for _ in range(operations):
        world.operation()
    world.end()
    return world.seen


class World:
    """One rank's side of a history."""

    def __init__(self, rank: Rank, shared: random.Random, mechanism: str) -> None:
        self.rank = rank
        self.group = rank.group
        self.shared = shared
        self.mechanism = mechanism
        self.alone_share = shared.choice((0.01, 0.05, 0.2))  # of operations after which a rank does something alone
        self.live: dict[int, Live] = {}
        self.seen = Seen()

    def operation(self) -> None:
        """The next thing that happens."""
        ready = [one for one in self.live.values() if one.lease.ready]
        names = ["admit"] * 4 * (len(self.live) < 3) + ["poll"] * 6
        names += (
            ["extend"] * 3 * bool(ready)
            + ["compute"] * 6 * bool(ready)
            + ["finish"] * 5 * bool(ready)
            + ["abort"] * bool(self.live)
            + ["reset"] * (self.shared.random() < 0.05)
        )
        name = self.shared.choice(names)
        self.rank.now += 1.0
        getattr(self, name)(*([self.shared.choice(ready)] if name in ("extend", "compute", "finish") else ()))
        self.alone()
        self.rank.check_invariants()

    # ------------------------------------------------------------------ what all do

    def prompt(self) -> "array[int]":
        """One of a few documents, more of them than the GPU's pages hold; now and then with another page in it."""
        pages, document = self.shared.randint(2, 5), self.shared.choice((100, 200, 300, 400))
        content = [document + at + 50 * (self.shared.random() < 0.05) for at in range(pages)]
        ids = [one for one in content for _ in range(PAGE_SIZE)]
        return array("i", ids[: len(ids) - self.shared.randrange(PAGE_SIZE)])

    def admit(self) -> None:
        """A prompt, on every rank or on none."""
        tokens, reuse = self.prompt(), self.shared.random() < 0.9
        try:
            lease = self.group.admit(tokens, reuse=reuse)
        except OutOfPages as refusal:
            self.note("refused", str(refusal))
            return
        self.live[lease.number] = Live(lease, tokens)
        self.note("admitted", lease.number, lease.page_count)

    def poll(self) -> None:
        """Copies go on, here so far and there so far; then all say who may run."""
        self.rank.step_copies(self.rank.random.randrange(6))
        for lease in self.group.poll():
            one = self.live[lease.number]
            if lease.revoked:
                del self.live[lease.number]
                self.note("revoked", lease.number)
                continue
            one.kv_len = lease.matched_len
            wrong = self.rank.wrong(lease, one.tokens, lease.matched_len)
            assert not wrong, f"{lease}: positions {wrong} of {lease.matched_len} that matched are another prefix's"
            self.note("ready", lease.number, lease.matched_len, self.ids(lease))
            self.seen.counts["hits"] += bool(lease.matched_len)

    def compute(self, one: Live) -> None:
        """A forward over all that has no KV yet; pages that are full are sealed."""
        self.rank.write(one.lease, one.tokens, one.kv_len, len(one.tokens))
        one.kv_len = len(one.tokens)
        self.group.seal(one.lease, one.kv_len)
        self.note("computed", one.lease.number, one.kv_len)

    def extend(self, one: Live) -> None:
        """Tokens that were sampled, and room for some more."""
        more = [self.shared.randrange(5) for _ in range(self.shared.randint(0, 3))]
        room = self.shared.randrange(4)
        try:
            self.group.extend(one.lease, more, room)
        except OutOfPages as refusal:
            self.note("no more", one.lease.number, str(refusal))
            return
        one.tokens.extend(more)
        self.note("extended", one.lease.number, one.lease.length, one.lease.page_count, self.ids(one.lease))

    def finish(self, one: Live) -> None:
        """A request ends; it stays in the cache."""
        wrong = self.rank.wrong(one.lease, one.tokens, one.kv_len)
        assert not wrong, f"{one.lease}: positions {wrong} of {one.kv_len} changed while it had them"
        self.group.finish(one.lease, one.kv_len)
        del self.live[one.lease.number]
        self.note("finished", one.lease.number)

    def abort(self) -> None:
        """A request ends, ready or not."""
        one = self.shared.choice(list(self.live.values()))
        self.group.abort(one.lease)
        del self.live[one.lease.number]
        self.note("aborted", one.lease.number, one.lease.revoked)

    def reset(self) -> None:
        """Every cache forgets."""
        if self.rank.cache is not None:
            self.rank.cache.reset()
        self.note("reset")

    # ------------------------------------------------------------------ what one rank does alone

    def alone(self) -> None:
        """Others of this rank take pages and let go of them; it stores what the others have not, or forgets."""
        rank, cache, choice = self.rank, self.rank.cache, self.rank.random.random()
        if cache is None or rank.random.random() > self.alone_share:
            return
        if choice < 0.45:
            try:
                tokens = [1] * self.rank.random.randint(1, 4 * PAGE_SIZE)
                rank.others.append(cache.admit(tokens, reuse=False, store=False))
            except OutOfPages:
                self.seen.counts["others refused"] += 1
        elif choice < 0.95 and rank.others:
            cache.abort(rank.others.pop(rank.random.randrange(len(rank.others))))
        elif choice > 0.98 and self.mechanism == "minimum":
            cache.reset()

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """Nobody waits for ever, everything that can end has ended, and every page is somebody's or nobody's."""
        for turn in range(10 * ROUNDS):
            if not self.live:
                break
            assert turn < 10 * ROUNDS - 1, f"{self.group.waiting} wait for ever"
            self.rank.step_copies(20)
            self.poll()
            for one in [one for one in self.live.values() if one.lease.ready]:
                self.finish(one)
        for lease in self.rank.others:
            assert self.rank.cache is not None
            self.rank.cache.abort(lease)
        self.rank.backend._fail_rate = self.rank.backend._stuck_rate = 0.0  # pages are copied down until it succeeds
        for _ in range(ROUNDS):
            for job in self.rank.backend.jobs:
                self.rank.backend.free(job)
            self.rank.step_copies(60)
            self.group.poll()
        assert not self.rank.backend.jobs, "copies that never end"
        self.rank.check_invariants()
        if self.rank.cache is not None:
            stats = self.rank.cache.stats()
            assert (0, 0) == (stats.pages_live, stats.leases), stats
            self.seen.counts["loaded"] += stats.matched_host_tokens
            self.seen.counts["lost"] += stats.lost_tokens
        self.note("end", self.group.stats)
        if self.mechanism == "minimum":
            self.seen.counts["yielded"] += self.rank.minimum.yielded_pages
            self.seen.counts["shortened"] += self.rank.minimum.shortened

    def ids(self, lease: GroupLease) -> list[int] | None:
        """Page ids, where all ranks must have the same."""
        return list(lease.pages) if self.mechanism == "leader" else None

    def note(self, what: str, *values: Any) -> None:
        """Something that every rank must see."""
        self.seen.log.append((what, *values))
        self.seen.counts[what] += 1


def compare(seen: list[Seen], mechanism: str, seed: int) -> None:
    """Every rank saw the same."""
    for rank, other in enumerate(seen):
        for at, (mine, theirs) in enumerate(zip(other.log, seen[0].log, strict=False)):
            if mine != theirs:
                pytest.fail(f"{mechanism}, seed {seed}: event {at} is {mine} on rank {rank} and {theirs} on rank 0")
        assert len(seen[0].log) == len(other.log), (mechanism, seed, rank)
