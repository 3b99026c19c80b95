"""The simulated world: a whole cache, its device and its copies, and what operations do to them.

Must not choose operations (`chooser` does) nor know what must hold after each (`watch` does).

An operation is a tuple: its name, which is a method of `World`, and plain values.  It is one public call of the cache,
made as an engine would make it, or one event of the copies.  An operation that makes no sense where it stands, such
as one on a request that has ended, does nothing: so a list of operations stays a list when some are left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, EvictionName, IndexAt
from kvkeep.errors import BadInput, CannotSuspend, NotReady, OutOfPages
from kvkeep.index.eviction import LruOrder
from kvkeep.index.hints import Discard, Expect, Hint, Pin
from kvkeep.index.names import Identity, hash64, make_identity
from kvkeep.index.rhythm import RhythmOrder
from kvkeep.index.uses import Uses
from kvkeep.lease import Lease
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger, State
from kvkeep.tiers.tracing import TracingLedger
from kvkeep.transfer.backend import Job
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import STEP_NS, SimulatedBackend, When
from tests.core.naive import narrow_hash
from tests.sim.device import LAYOUT, NBYTES, PAGE_SIZE, Cell, Device
from tests.sim.outputs import OutputWorld
from tests.sim.request import Item, Request
from tests.sim.watch import Watch

SALTS = (b"", b"s")
WEIGHTS = (b"f", b"fp", b"salt")  # one is the beginning of another, one occurs in every root
FORK = b"of another"  # the label of forks
JUNK_KV = 0x7EADBEEF
#: What callers say of a request's future, by its handle.
HINTS: tuple[Hint | None, ...] = (None, None, Discard(), Pin(20.0), Expect(3.0), None, Pin(1000.0))

Operation = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world is like.

    tier_pages: None for a cache of one tier.   asynchronous: forwards write late, in a stream.
    when: at which of the legal moments copies move bytes; None for the seed's choice.
    deadline_steps: steps of the backend after which a copy is overdue.
    listening: somebody is told which names enter and leave the tiers.
    traced: the ledgers know every owner by name.
    eviction: the order in which pages leave; one that learns takes each operation for a second, and is given hints.
    outputs: how many different encoder outputs share the tiers.
    """

    pages: int = 8
    tier_pages: int | None = None
    suspend_pages: int = 0
    asynchronous: bool = False
    index_at: IndexAt = "seal"
    narrow_names: bool = False
    seed: int = 0
    fail_rate: float = 0.0
    stuck_rate: float = 0.0
    when: Literal["early", "split", "late"] | None = None
    deadline_steps: int = 1000
    in_flight_pages: int = 1000
    queue_pages: int = 1000
    listening: bool = False
    traced: bool = False
    eviction: EvictionName = "lru"
    outputs: int = 0


class World:
    """A cache, driven by operations.

    checked: what must hold is looked at after each operation.
    """

    def __init__(self, setup: Setup, *, checked: bool = True) -> None:
        self.setup = setup
        self.device = Device(setup.pages, asynchronous=setup.asynchronous)
        self.host: CpuPool | None = None
        self.backend: SimulatedBackend | None = None
        self.manager: TransferManager | None = None
        if setup.tier_pages is not None:
            self.host = CpuPool(LAYOUT, setup.tier_pages, setup.suspend_pages, limit_nbytes=1 << 30)
            self._connect(self.host)
        ledger = TracingLedger if setup.traced else Ledger
        self.done = 0
        uses = Uses(setup.pages, lambda: float(self.done))
        self.hash_fn = narrow_hash if setup.narrow_names else hash64
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE_SIZE, index_at=setup.index_at, eviction="lru", forks=True),
            GpuPool(setup.pages, LAYOUT, self.device),
            WEIGHTS[0],
            host=self.host,
            transfers=self.manager,
            ledger=ledger(setup.pages),
            host_ledger=ledger(setup.tier_pages or 0),
            parking_ledger=ledger(setup.suspend_pages),
            order=LruOrder() if setup.eviction == "lru" else RhythmOrder(uses, seed=setup.seed),
            hash_fn=self.hash_fn,
        )
        self.weights = 0
        self.requests: dict[int, Request] = {}
        self.ended: list[tuple[int, list[int], list[Item]]] = []  # salt, tokens and items of requests that are over
        self.seen: Counter[str] = Counter()
        self.outputs = OutputWorld(self) if setup.outputs else None
        self.watch = Watch(self) if checked else None

    def _connect(self, host: CpuPool) -> None:
        if host.memory is None:
            return
        setup = self.setup
        self.backend = SimulatedBackend(
            self.device,
            host.memory,
            seed=setup.seed,
            fail_rate=setup.fail_rate,
            stuck_rate=setup.stuck_rate,
            when=When(setup.when) if setup.when is not None else None,
        )
        self.device.backend = self.backend
        self.manager = TransferManager(
            self.backend,
            bytes_in_flight_max=setup.in_flight_pages * NBYTES,
            queue_pages_max=setup.queue_pages,
            deadline_s=setup.deadline_steps * STEP_NS / 1e9,
            clock=self.backend.clock,
        )

    def do(self, operation: Operation) -> None:
        """One operation, and what must hold after it."""
        name, *values = operation
        self.done += 1
        getattr(self, name)(*values)
        if self.outputs is not None:
            self.outputs.drop_revoked()
        for request in [r for r in self.requests.values() if r.lease is not None]:
            assert request.lease is not None
            if not request.lease.live:
                assert request.lease.revoked, f"request {request.handle} ended by itself"
                self.seen["revoked"] += 1
                self._over(request)
            elif request.lease.kv_len < len(request.kvs):  # it inherited the targets of a load that failed
                assert request.lease.matched_len == request.lease.kv_len
                assert not request.inside_unit(request.lease.kv_len)
                self.seen["shortened"] += 1
                request.forget(request.lease.kv_len)
        if self.watch is not None:
            self.watch.look()

    # ------------------------------------------------------------------ the life of a request

    def admit(
        self, handle: int, salt: int, tokens: Sequence[int], items: Sequence[Item], reuse: bool, store: bool
    ) -> None:
        request = Request(handle, self.weights, salt, tokens, [Item(*item) for item in items])
        media = [item.media() for item in request.items]
        before = self.watch.before() if self.watch is not None else None
        try:
            request.lease = self.cache.admit(tokens, salt=SALTS[salt], media=media, reuse=reuse, store=store)
        except OutOfPages as refusal:
            self.seen["admit refused"] += 1
            if before is not None:
                before.refused_admission(refusal, request)
            return
        self.requests[handle] = request
        self._admitted(request)
        if before is not None:
            before.admitted(request)

    def compute(self, handle: int, count: int, drafts: int) -> None:
        """A forward over the next `count` positions, with `drafts` more that are not accepted; then `seal`."""
        request = self._readable(handle)
        if request is None:
            return
        assert request.lease is not None
        if request.holes:
            self._write(request, [cell for hole in request.holes for cell in request.compute(*hole, self.weights)])
            request.holes = []
            return
        first = len(request.kvs)
        last = request.lease.chunk_end(first, min(first + count, len(request.tokens)))
        cells = request.compute(first, last, self.weights)
        pages = request.lease.pages
        at = request.lease.index_of
        ahead = range(last, min(last + drafts, (len(pages) + request.lease.released) * PAGE_SIZE))
        cells += [Cell(pages[at(p // PAGE_SIZE)], p % PAGE_SIZE, JUNK_KV) for p in ahead]
        self._write(request, cells)
        self.cache.seal(request.lease, last)

    def extend(self, handle: int, tokens: Sequence[int], room: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None:
            return
        had = len(request.lease.pages)
        before = self.watch.before() if self.watch is not None else None
        try:
            self.cache.extend(request.lease, tokens, room)
        except OutOfPages as refusal:
            self.seen["extend refused"] += 1
            if before is not None:
                had += request.lease.released
                need = -(-(len(request.tokens) + len(tokens) + room) // PAGE_SIZE) - had
                before.refused(refusal, need)
            return
        request.tokens += tokens
        if self.watch is not None:
            self.watch.may_be_written_now(request.lease.pages[had:])

    def truncate(self, handle: int, length: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None or request.holes or not 1 <= length <= len(request.tokens):
            return
        before = self.watch.before() if self.watch is not None else None
        gone = request.lease.pages[max(0, -(-length // PAGE_SIZE) - request.lease.released) :]
        window = request.lease.window
        stays = 0 if window is None else (request.lease.sealed if request.lease.closed else window.protected)
        try:
            self.cache.truncate(request.lease, length)
        except BadInput:
            assert request.inside_unit(length) or length < stays * PAGE_SIZE
            if before is not None:
                before.unchanged()
            return
        except (OutOfPages, NotReady) as refusal:
            self.seen["truncate refused"] += 1
            if before is not None and isinstance(refusal, OutOfPages):
                before.refused_truncation(refusal, gone)
            elif before is not None:
                before.unchanged()
                assert request.lease.read_in_progress
            return
        assert not request.inside_unit(length)
        request.cut(length)
        self.cache.fence(self.device.event)

    def finish(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None:
            return
        if request.holes or not request.readable:
            self.cache.abort(request.lease)  # its KV is not there
        else:
            stored = self.cache.stats().pages_stored
            self.cache.finish(request.lease, len(request.kvs), HINTS[handle % len(HINTS)])
            if request.lease.window is not None:
                assert self.cache.stats().pages_stored - stored <= request.lease.window.protected
        self._over(request)

    def abort(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None:
            return
        self.seen["aborted while copying"] += request.lease.read_in_progress
        self.cache.abort(request.lease)
        self._over(request)

    # ------------------------------------------------------------------ windows and forks

    def protect(self, handle: int, length: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None or request.lease.released or length > len(request.tokens):
            return
        self.cache.protect_prefix(request.lease, length)
        self.seen["windows"] += 1

    def release(self, handle: int, count: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None or request.lease.window is None or request.holes:
            return
        lease, window = request.lease, request.lease.window
        there = lease.pages[window.kept : max(window.kept, lease.sealed - window.released)]
        before = self.watch.before() if self.watch is not None else None
        shared = [page for page in there[:count] if self.cache._ledger.holders(page) > 1]
        cached = [page for page in there[:count] if page in self.cache._tree]
        try:
            self.cache.release_oldest(lease, count)
        except (BadInput, NotReady):
            assert lease.read_in_progress or count > len(there)
            if before is not None:
                before.unchanged()
            return
        assert count <= len(there)
        assert all(self.cache._ledger.holders(page) for page in shared), "a released page was another request's too"
        assert all(page in self.cache._tree for page in cached), "a released page was the index's too"
        self.seen["released"] += count
        self.seen["released, cached"] += len(cached)

    def fork(self, handle: int, other: int) -> None:
        request = self._readable(handle)
        if request is None or request.holes:
            return
        assert request.lease is not None
        self.cache.seal(request.lease, len(request.kvs))
        before = self.watch.before() if self.watch is not None else None
        try:
            lease = self.cache.fork(request.lease, len(request.kvs), label=FORK)
        except OutOfPages as refusal:
            self.seen["fork refused"] += 1
            if before is not None:
                before.refused(refusal, -(-len(request.tokens) // PAGE_SIZE) - request.lease.sealed)
            return
        self.requests[other] = request.forked(other, lease)
        self.cache.fence(self.device.event)
        self.seen["forked"] += 1

    def _readable(self, handle: int) -> Request | None:
        request = self.requests.get(handle)
        return request if request is not None and request.readable else None

    def _write(self, request: Request, cells: list[Cell]) -> None:
        for page in {cell.page for cell in cells}:
            assert self.cache._ledger.state(page) is State.OPEN, (request.handle, self.cache._ledger.story(page))
        self.device.forward(cells)
        self.cache.fence(self.device.event)

    def _admitted(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None and not request.inside_unit(lease.kv_len)
        request.know(lease.kv_len, self.weights)
        self.seen["joined"] += any(len(copy.leases) > 1 and copy.cause == "promote" for copy in lease.copies)

    def _over(self, request: Request) -> None:
        del self.requests[request.handle]
        self.ended.append((request.salt, request.tokens, request.items))

    def follow(self, handle: int) -> None:
        """The stream of the engine comes after the copies out of the request's pages."""
        request = self.requests.get(handle)
        if request is None or request.lease is None or not self.setup.asynchronous:
            return
        before = request.lease.read_in_progress
        opened = request.lease.gate.wait_on(self.device)
        assert opened is not request.lease.read_in_progress
        self.seen["went on behind copies"] += before and opened

    def output(self, what: str, *values: Any) -> None:
        """An operation of `OutputWorld`."""
        if self.outputs is not None:
            getattr(self.outputs, what)(*values)

    # ------------------------------------------------------------------ preemption

    def suspend(self, handle: int, complete: bool) -> None:
        request = self.requests.get(handle)
        if request is None or request.lease is None or request.holes:
            return
        before = self.watch.before() if self.watch is not None else None
        try:
            request.ticket = self.cache.suspend(request.lease, len(request.kvs), complete=complete)
        except CannotSuspend:
            self.seen["suspend refused"] += 1
            if before is not None:
                before.unchanged()
            return
        request.lease = None
        self.seen["suspended"] += 1

    def resume(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.ticket is None:
            return
        before = self.watch.before() if self.watch is not None else None
        ready = request.ticket.ready
        try:
            lease = self.cache.resume(request.ticket, request.tokens)
        except NotReady:
            self.seen["resume too early"] += 1
            if before is not None and not ready:
                before.unchanged()
            return
        except OutOfPages as refusal:
            self.seen["resume refused"] += 1
            if before is not None:
                before.refused_resumption(refusal, request)
            return
        request.lease, request.ticket = lease, None
        request.holes = list(lease.holes)
        assert not any(request.inside_unit(end) for hole in request.holes for end in hole)
        self.seen["resumed"] += 1
        self.seen["holes"] += bool(lease.holes)
        assert lease.kv_len == len(request.kvs)
        if before is not None:
            before.resumed()

    def discard(self, handle: int) -> None:
        request = self.requests.get(handle)
        if request is None or request.ticket is None:
            return
        self.cache.discard(request.ticket)
        self._over(request)

    # ------------------------------------------------------------------ the whole cache

    def reset(self) -> None:
        before = self.watch.before() if self.watch is not None else None
        report = self.cache.reset()
        if before is not None:
            before.reset(report)

    def set_fingerprint(self, weights: int) -> None:
        before = self.watch.before() if self.watch is not None else None
        self.weights = weights
        report = self.cache.set_fingerprint(WEIGHTS[weights])
        if before is not None:
            before.reset(report)

    def poll(self) -> None:
        self.seen["completions"] += self.cache.poll()

    def close(self, drain: bool) -> None:
        """No copy is made any more: those there are end first, or are cut short."""
        if self.backend is not None and drain:
            for job in self.backend.jobs:
                self.backend.free(job)
            while self.device.writing:
                self.device.finish_one() or self.backend.step()
        self.cache.close(drain=drain, timeout_s=60.0)
        self.seen["closed"] += 1

    def prefilled(self, ns_per_token: int) -> None:
        """Computing is measured to be fast, so that loading may not pay; or slow."""
        self.cache.prefilled(1, ns_per_token / 1e9)

    # ------------------------------------------------------------------ events of the device and of copies

    def written(self) -> None:
        """The oldest write in the device's stream is over."""
        self.device.finish_one()

    def step(self, which: int) -> None:
        """A copy moves."""
        if self.backend is not None:
            self.backend.step(_pick(self.backend.movable, which))

    def stick(self, which: int) -> None:
        """A copy does not go on until it is freed."""
        if self.backend is not None and (job := _pick(self.backend.jobs, which)) is not None:
            self.backend.stick(job)
            self.seen["stuck"] += 1

    def free(self, which: int) -> None:
        """A stuck copy goes on."""
        if self.backend is not None and (job := _pick(self.backend.jobs, which)) is not None:
            self.backend.free(job)

    def fail(self, which: int) -> None:
        """A copy is going to fail."""
        if self.backend is not None and (job := _pick(self.backend.jobs, which)) is not None:
            self.backend.fail(job)

    def late(self, steps: int) -> None:
        """Time passes, and nothing moves."""
        if self.backend is not None:
            self.backend.steps += steps

    def die(self) -> None:
        """The device that copies is gone."""
        if self.backend is not None:
            self.backend.die()
            self.seen["died"] += 1

    # ------------------------------------------------------------------ the end

    def identity(self, salt: int) -> Identity:
        """Where the chains of a salt start, with the weights of now."""
        return make_identity(WEIGHTS[self.weights], SALTS[salt], hash_fn=self.hash_fn)

    def leases(self) -> list[Lease]:
        """Every live one, holds on outputs too."""
        holds = [occurrence.hold for occurrence in self.outputs.live.values()] if self.outputs is not None else []
        return [request.lease for request in self.requests.values() if request.lease is not None] + holds


def _pick(jobs: list[Job], which: int) -> Job | None:
    return jobs[which % len(jobs)] if jobs else None
