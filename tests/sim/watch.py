"""What must hold after each operation on a simulated world, and what a refusal or an admission must have left.

Must not change anything but the bytes of free pages, which it poisons.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.errors import OutOfPages
from kvkeep.index.eviction import Tier
from kvkeep.index.media import place_media
from kvkeep.index.names import as_int32, make_identity
from kvkeep.index.output import Output
from kvkeep.index.run import NOWHERE, Run
from kvkeep.index.watch import Names, Reason, names_in
from kvkeep.stats import ResetReport
from kvkeep.tiers.ledger import Ledger, State
from kvkeep.tiers.memory import HostMemory
from tests.sim.device import NBYTES, PAGE_SIZE, POISON, Device, page_of
from tests.sim.output_watch import OutputWatch
from tests.sim.request import Item, Request, next_kv, root_kv

if TYPE_CHECKING:
    from tests.sim.world import World

READY, LOADING, OPEN = int(State.READY), int(State.LOADING), int(State.OPEN)


class HostBytes:
    """The bytes of a CPU pool's pages."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._bytes = memoryview(memory.rows.data).cast("B")
        self.busy: frozenset[int] = frozenset()

    def page_bytes(self, page: int) -> bytes:
        """A page as it is now."""
        return bytes(self._bytes[page * NBYTES : (page + 1) * NBYTES])

    def poison(self, pages: Iterable[int]) -> None:
        """Fills pages with poison."""
        self._memory.poison(list(pages))


class FreePages:
    """Free pages of one ledger: poisoned when they become free, and nobody may have written them since.

    first: the id in `memory` of the ledger's page 0.
    """

    def __init__(self, what: str, ledger: Ledger, memory: Device | HostBytes, first: int = 0) -> None:
        self._what = what
        self._ledger = ledger
        self._memory = memory
        self._first = first
        self._poisoned: set[int] = set()
        self.look()

    def look(self) -> None:
        """Checks those that were free before, poisons the others."""
        free, memory, first = set(self._ledger._free), self._memory, self._first
        if memory.busy:
            free -= memory.busy.keys() if isinstance(memory, Device) else memory.busy
        for page in self._poisoned & free:
            assert memory.page_bytes(first + page) == POISON, f"{self._what} page {page} was written while it was free"
        fresh = free - self._poisoned
        if fresh:
            memory.poison([first + page for page in fresh])
        self._poisoned = free


class Mirror:
    """A listener that keeps what it is told: how many copies of each name a tier has."""

    def __init__(self, world: "World") -> None:
        self._cache = world.cache
        there = world.cache.watch(self)
        self.names = {tier: Counter(there[tier].tolist()) if tier in there else Counter[int]() for tier in Tier}

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """Adds copies."""
        self.names[tier].update(names.tolist())

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """Takes copies away."""
        self.names[tier].subtract(names.tolist())

    def cleared(self, tier: Tier) -> None:
        """Takes all away."""
        self.names[tier].clear()

    def look(self) -> None:
        """What was told is what is there."""
        for tier, names in names_in(self._cache._tree).items():
            assert Counter(names.tolist()) == self.names[tier], f"the listener was not told the truth of {tier.name}"


class Watch:
    """Looks at a world after each operation."""

    def __init__(self, world: "World") -> None:
        self.world = world
        cache = world.cache
        self._free = [FreePages("GPU", cache._ledger, world.device)]
        self._host: HostBytes | None = None
        if world.host is not None and world.host.memory is not None:
            assert cache._host is not None and cache._traffic is not None
            self._host = HostBytes(world.host.memory)
            self._free.append(FreePages("host", cache._host.ledger, self._host))
            parking = cache._traffic.parking.ledger
            self._free.append(FreePages("suspension", parking, self._host, world.host.tier_pages))
        self._mirror = Mirror(world) if world.setup.listening else None
        from tests.sim.world import FORK, SALTS, WEIGHTS  # below this module, but for these

        self._roots = {
            make_identity(weights, salt).record: (w, root_kv(w, s))
            for w, weights in enumerate(WEIGHTS)
            for s, salt in enumerate(SALTS)
        }
        self._forks = {make_identity(weights, salt, label=FORK).record for weights in WEIGHTS for salt in SALTS}
        self._outputs = OutputWatch(world, world.outputs) if world.outputs is not None else None
        self._known: dict[tuple[int, bytes, int], tuple[bytes, int]] = {}

    def look(self) -> None:
        """Everything that must hold now."""
        self.world.cache.check_invariants()
        for request in self.world.requests.values():
            if request.lease is not None:
                self._lease(request)
        for pages in self._free:
            pages.look()
        if self._outputs is not None:
            self._outputs.look()
        self._cached()
        if self._mirror is not None:
            self._mirror.look()

    def before(self) -> "Before":
        """Remembers the cache as it is."""
        return Before(self.world)

    def may_be_written_now(self, pages: Sequence[int]) -> None:
        """A request that cannot wait got these."""
        states = self.world.cache._ledger._states
        assert all(states[page] == OPEN for page in pages), "a running request was given a page that copies still use"

    # ------------------------------------------------------------------ bytes

    def _lease(self, request: Request) -> None:
        """Every position of a lease that may be read holds what it must."""
        lease = request.lease
        assert lease is not None
        pages = lease.pages
        assert lease.length == len(request.tokens) <= (len(pages) + lease.released) * PAGE_SIZE
        assert len(set(pages)) == len(pages), f"{lease} has a page twice: {pages}"
        if lease.read_in_progress:
            return
        device = self.world.device
        first = lease.window.kept if lease.window is not None else 0
        for number, expected in enumerate(request.pages):
            if first <= number < first + lease.released:
                continue
            page = pages[lease.index_of(number)]
            if device.page_bytes(page) != expected and page not in device.busy:
                assert request.in_hole(number * PAGE_SIZE) or request.in_hole((number + 1) * PAGE_SIZE - 1), (
                    f"request {request.handle}, {lease}: page {number} ({page}) holds wrong bytes"
                )
        rest = len(request.kvs) % PAGE_SIZE
        if rest:
            page, first = pages[lease.index_of(len(request.pages))], len(request.kvs) - rest
            if not device.shows(page, request.kvs[first:]) and page not in device.busy:
                assert request.in_hole(first), f"request {request.handle}, {lease}: the tail page {page} is wrong"

    def _cached(self) -> None:
        """Every page in the index, of either tier, holds what its chain says."""
        tree, ends = self.world.cache._tree, dict[Run, tuple[int, int] | None]()
        for root in tree.roots:
            assert root.record not in self._forks, "the index holds pages of one label under another"
            if root.record not in self._roots:
                continue  # of an encoder
            weights, kv = self._roots[root.record]
            assert weights == self.world.weights, "the index holds chains of old weights"
            ends[root] = weights, kv
        for run in tree.runs():
            assert run.parent is not None
            if run.whole:
                continue
            ends[run] = self._run(run, ends[run.parent])

    def _run(self, run: Run, at: tuple[int, int] | None) -> tuple[int, int] | None:
        """Checks a run's pages from what stands before it; returns that behind it, or None when it is not known."""
        cache, device, width = self.world.cache, self.world.device, len(run.tokens) // len(run.names)
        for i in range(len(run.names)):
            items = [Item(m.offset, m.length, m.digest[0], m.causal) for m in run.media.get(run.start + i, ())
                     if m.digest] if run.media else []  # fmt: skip
            if at is None or not all(item.causal for item in items):
                return None  # what lies ahead in the item is not to be seen here
            weights, kv = at
            raw = bytes(run.tokens[i * width : (i + 1) * width])
            expected, kv = self._page(weights, kv, raw, (run.start + i) * PAGE_SIZE, items)
            at = weights, kv
            if i < len(run.pages):
                page = run.pages[i]
                if cache._ledger._states[page] == READY and device.page_bytes(page) != expected:
                    assert page in device.busy, f"the index's GPU page {page} holds wrong bytes"
            if run.host is not None and run.host[i] != NOWHERE:
                assert self._host is not None and cache._host is not None
                page = run.host[i]
                if cache._host.ledger._states[page] == READY:
                    assert self._host.page_bytes(page) == expected, f"the index's host page {page} holds wrong bytes"
        return at

    def _page(self, weights: int, kv: int, raw: bytes, first: int, items: list[Item]) -> tuple[bytes, int]:
        key = (kv, raw, weights)
        found = self._known.get(key) if not items else None
        if found is None:
            kvs: list[int] = []
            for position, token in enumerate(memoryview(raw).cast("i"), first):
                inside: tuple[int, ...] = ()
                for item in items:
                    if item.offset <= position < item.end:
                        assert item.digest is not None
                        inside = (item.digest, position - item.offset)
                kvs.append(next_kv(kvs[-1] if kvs else kv, token, weights, inside))
            found = page_of(kvs), kvs[-1]
            if not items:
                self._known[key] = found
        return found


class Before:
    """The cache as it was before a call."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._stats = world.cache.stats()
        self._states = bytes(world.cache._ledger._states)
        self._picture = self._now()

    def unchanged(self) -> None:
        """The call has left everything as it was."""
        assert self._now() == self._picture, "a refusal changed something"

    def refused(self, refusal: OutOfPages, need: int, *, pinned: int = 0) -> None:
        """`need` pages were refused: rightly, with the right numbers, and without a trace.

        pinned: idle pages among those that the call was to match.
        """
        stats = self._stats
        there = stats.pages_free + stats.pages_cached - pinned
        assert need > there, f"{need} pages refused with {there} to be had"
        assert (need, need - there) == (refusal.asked, refusal.short)
        rest = stats.pages_free + stats.pages_cached
        assert stats.pages_total == refusal.total == refusal.held + refusal.in_flight + rest
        self.unchanged()

    def refused_admission(self, refusal: OutOfPages, request: Request) -> None:
        """A prompt was refused: it takes what is on the GPU, as far as it says, and the rest was not to be had."""
        cache, ids = self._world.cache, as_int32(request.tokens)
        limit = (len(ids) - 1) // PAGE_SIZE
        by_page = place_media([item.media() for item in request.items], PAGE_SIZE, len(ids)).by_page
        found = cache._tree.match(self._world.identity(request.salt), ids.data.cast("B"), limit, by_page).pages
        matched = -(-len(ids) // PAGE_SIZE) - refusal.asked
        assert 0 <= matched <= len(found)
        self.refused(refusal, refusal.asked, pinned=sum(cache._ledger.is_idle(page) for page in found[:matched]))

    def refused_resumption(self, refusal: OutOfPages, request: Request) -> None:
        """A suspended request was refused: of what is idle it was to match no more than it did not ask for."""
        stats, matched = self._stats, -(-len(request.tokens) // PAGE_SIZE) - refusal.asked
        pinned = stats.pages_free + stats.pages_cached + refusal.short - refusal.asked
        assert 0 <= pinned <= matched, f"{refusal}: {pinned} idle pages could not be had, and {matched} were matched"
        self.refused(refusal, refusal.asked, pinned=pinned)

    def refused_truncation(self, refusal: OutOfPages, gone: Sequence[int]) -> None:
        """There was no page for a copy of a sealed one."""
        assert all(self._world.cache._ledger.holders(page) > 1 for page in gone)
        self.refused(refusal, 1)

    def admitted(self, request: Request) -> None:
        """An admission is counted once, and its matched tokens by where they came from."""
        was, now, lease = self._stats, self._world.cache.stats(), request.lease
        assert lease is not None
        assert 1 == now.admissions - was.admissions and was.refusals == now.refusals
        assert len(request.tokens) == now.prompt_tokens - was.prompt_tokens
        assert lease.matched_len == now.matched_tokens - was.matched_tokens < len(request.tokens)
        states = self._world.cache._ledger._states
        loads = [p for p in lease.pages if states[p] == LOADING and self._states[p] != LOADING]
        assert len(loads) * PAGE_SIZE == now.matched_host_tokens - was.matched_host_tokens
        assert not lease.matched_len % PAGE_SIZE
        seen = self._world.seen
        seen["matched host pages"] += len(loads)
        seen["matched GPU pages"] += lease.matched_len // PAGE_SIZE - len(loads)

    def resumed(self) -> None:
        """A resumption is no admission."""
        was, now = self._stats, self._world.cache.stats()
        for name in ("admissions", "refusals", "prompt_tokens", "matched_tokens", "matched_host_tokens"):
            assert getattr(was, name) == getattr(now, name), name

    def reset(self, report: ResetReport) -> None:
        """Every tier has been cleared, and the report says by how much."""
        was, cache = self._stats, self._world.cache
        assert (was.pages_cached, was.pages_live) == (report.pages_freed, report.pages_held)
        assert was.host_pages_cached == report.host_pages_freed
        assert not cache._tree.roots and not cache.stats().pages_cached and not cache.stats().host_pages_cached

    def _now(self) -> tuple[Any, ...]:
        """All of the cache that a caller can notice, but for counters."""
        cache = self._world.cache
        ledgers = [cache._ledger]
        if cache._traffic is not None and cache._host is not None:
            ledgers += [cache._host.ledger, cache._traffic.parking.ledger]
        counts = [(bytes(x._words), bytes(x._states), sorted(x._free)) for x in ledgers]
        held = [
            [(p, g) for p, (g, word) in enumerate(zip(x._generations, x._words, strict=True)) if word] for x in ledgers
        ]
        runs = [
            (
                run.serial,
                run.start,
                bytes(run.tokens),
                bytes(run.pages),
                bytes(run.host or b""),
                run.ends[:],
                run.stamps[:],
                run.holds if isinstance(run, Output) else 0,
            )
            for run in cache._tree.runs()
        ]
        leases = [
            (lease.number, bytes(lease.pages), lease.length, lease.base, lease.stored, lease.path, len(lease.copies))
            for lease in self._world.leases()
        ]
        copies = cache._traffic.copies if cache._traffic is not None else ()
        return counts, held, runs, leases, [(copy.job, len(copy.leases)) for copy in copies]
