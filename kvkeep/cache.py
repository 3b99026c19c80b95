"""TieredCache: one pool of pages, one index over it, one ledger, one lock.

Must not know models, devices or event loops.  Reads as the life of a request: admit, extend, seal, truncate,
finish or abort; then how room is made; then what concerns the whole cache.

Who owns a page at any moment: the leases and copies that list it, and the index if it is in the run tree.  Decisions
are taken under the lock; token ids are converted and hashed outside it.
"""

from array import array
from collections.abc import Mapping, Sequence
from threading import Lock

from kvkeep.admission import Admission, Look
from kvkeep.audit import check_owners
from kvkeep.config import CacheConfig
from kvkeep.costs import Costs
from kvkeep.counting import Counting
from kvkeep.errors import BadInput, CannotSuspend, InvariantViolation, LeaseRevoked, NotReady, OutOfPages
from kvkeep.ghosts import Ghosts, GhostStats
from kvkeep.index.check import check_tree
from kvkeep.index.eviction import EvictionOrder, Tier
from kvkeep.index.hints import Hint
from kvkeep.index.media import MediaItem
from kvkeep.index.names import (
    TOKEN_NBYTES,
    Fingerprint,
    Hash64,
    Identities,
    TokenIds,
    as_token_ids,
    fingerprint_bytes,
    hash64,
    self_test,
)
from kvkeep.index.orders import make_order
from kvkeep.index.runs import RunTree
from kvkeep.index.tiermap import TierMap
from kvkeep.index.watch import Listener, Names, names_in, watch_tree
from kvkeep.lease import Lease
from kvkeep.misses import MissLedger, MissStats
from kvkeep.outputs import Hold, Outputs, OutputStats
from kvkeep.reshaping import Reshaping
from kvkeep.room import Room
from kvkeep.stats import CacheStats, ResetReport
from kvkeep.storing import Storing
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Suspended, Traffic
from kvkeep.transfer.backend import After
from kvkeep.transfer.manager import Completion, TransferManager


class TieredCache:
    """Keeps the KV pages of ended requests and hands them to requests that begin with the same tokens.

    config, pool: what and where.   host, transfers: the tier in host memory and what makes its copies, or neither.
    fingerprint: what KV bytes depend on besides tokens (`Fingerprint`, or bytes that stand for one).
    misses: told of every admission, so that it can say why tokens were not there.
    ledger, hash_fn: for tests: a tracing twin of the ledger, a hash that collides.
    All methods may be called from any thread, each lease from one at a time.
    """

    def __init__(
        self,
        config: CacheConfig,
        pool: GpuPool,
        fingerprint: Fingerprint | bytes,
        *,
        host: CpuPool | None = None,
        transfers: TransferManager | None = None,
        ledger: Ledger | None = None,
        host_ledger: Ledger | None = None,
        parking_ledger: Ledger | None = None,
        order: EvictionOrder | None = None,
        misses: MissLedger | None = None,
        hash_fn: Hash64 = hash64,
    ) -> None:
        self_test()
        pool.check_page_size(config.page_size)
        self.config = config
        self.pool = pool
        self._page_size = config.page_size
        self._store_at_seal = config.index_at == "seal"
        self._hash = hash_fn
        self._fingerprint = fingerprint_bytes(fingerprint)
        self._identities = Identities(hash_fn)
        self._lock = Lock()
        self._ledger = ledger if ledger is not None else Ledger(pool.pages)
        if self._ledger.total != pool.pages:
            raise BadInput(f"a ledger of {self._ledger.total} pages for a pool of {pool.pages}")
        self._order = order if order is not None else make_order(config.eviction, pool.pages)
        self._host: TierMap | None = None
        self._traffic: Traffic | None = None
        self._costs = Costs(config.page_size)
        self.transfers = transfers
        if host is not None and host.pages and transfers is not None:
            self._host = TierMap(host_ledger or Ledger(host.tier_pages), self._order.for_tier(Tier.HOST))
        self._tree = RunTree(self._ledger, self._order, config.page_size * TOKEN_NBYTES, hash_fn, self._host)
        if host is not None and host.pages and transfers is not None:
            parking = parking_ledger or Ledger(host.suspend_pages)
            self._traffic = Traffic(self._tree, transfers, parking, host.tier_pages, self._costs, self._end)
        self._leases: dict[int, Lease] = {}
        sizes = (pool.pages, self._host.ledger.total if self._host is not None else 0)
        self._ghosts = Ghosts(config.page_size, *sizes) if config.ghosts else None
        self._misses = misses
        if misses is not None:
            watch_tree(self._tree, None, misses)
        self._room = Room(self._ledger, self._tree, self._leases, self._traffic)
        self._storing = Storing(self._tree, self._ledger, config.page_size, hash_fn)
        self._counting = Counting()
        self._admission = Admission(
            self._tree, self._ledger, self._room, self._storing, self._traffic, self._leases, config.page_size,
            self._counting, misses, self._order_behind, self._end, self._release,
        )  # fmt: skip
        parts = (self._ledger, pool, self._room, self._storing, self._leases)
        self._reshaping = Reshaping(*parts, config.page_size, self._counting, self._release)
        self._outputs: Outputs | None = None

    # ------------------------------------------------------------------ the life of a request

    def admit(
        self,
        tokens: TokenIds,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        label: bytes = b"",
        media: Sequence[MediaItem] = (),
        reuse: bool = True,
        store: bool = True,
        reserve: bool = True,
        pages_max: int | None = None,
    ) -> Lease:
        """Matches a prompt, pins what matched and reserves pages to the end of the prompt: all, or nothing.

        tokens: the prompt's token ids, one or more (see `TokenIds`).   media: their spans that are placeholders.
        salt, adapter, label: requests that differ in one of them share nothing.
        reuse, store: opt out of taking pages from the cache, or of leaving pages in it.
        reserve: False: the lease is what matched; `extend` appends the rest, and takes its pages, as it comes.
        pages_max: so many pages match at most; never more than `(len(tokens) - 1) // page_size`: one token is computed.

        Raises `OutOfPages`, or `BadInput` for input that could never be admitted.
        """
        ids, placed, limit = self._admission.prompt(tokens, media, pages_max if reuse else 0)
        with self._lock:
            identity = self._identities.get(self._fingerprint, salt, adapter, label)
            lease = self._admission.open(identity, ids, limit, placed, reuse, reserve=reserve)
            lease.store = store
            self._counting.admitted(lease)
        if self.transfers is not None and lease.copies:
            self.transfers.start()
        return lease

    def look(
        self, tokens: TokenIds, salt: bytes, adapter: bytes, label: bytes, media: Sequence[MediaItem], reuse: bool
    ) -> Look:
        """What `admit` would take from the cache now, and whether it would find room; nothing is held or changed."""
        ids, placed, limit = self._admission.prompt(tokens, media, None if reuse else 0)
        with self._lock:
            identity = self._identities.get(self._fingerprint, salt, adapter, label)
            return self._admission.look(identity, ids, limit, placed)

    def shorten(self, lease: Lease, pages: int) -> None:
        """Gives back what matched behind the first `pages` pages: the lease computes it itself, on other pages.

        For a lease that waits for nothing and has no KV of its own.  It may have to wait for room; or `OutOfPages`.
        """
        with self._lock:
            self._check_live(lease)
            self._admission.shorten(lease, pages)
        if self.transfers is not None:
            self.transfers.start()

    def extend(self, lease: Lease, tokens: TokenIds = (), room: int = 0) -> None:
        """Appends token ids that were sampled, and makes sure that pages exist for them and `room` positions more.

        Raises `OutOfPages` and changes nothing when they cannot.
        """
        self._check_live(lease)
        ids = as_token_ids(tokens)
        if room < 0:
            raise BadInput(f"room {room}: it must be 0 or more")
        length = lease.length + len(ids)
        need = -(-(length + room) // self._page_size) - lease.released - len(lease.pages)
        if need > 0:
            with self._lock:
                self._check_live(lease)
                try:
                    lease.pages.extend(self._room.take(need, lease.number))
                except OutOfPages:
                    self._counting.refusals += 1
                    raise
        lease.tokens += ids.data if not lease.closed else b""
        lease.length = length

    def seal(self, lease: Lease, kv_len: int) -> None:
        """Says that the first `kv_len` positions hold committed KV: the pages they fill become immutable.

        After sampling, `kv_len` is one less than `lease.length`: the last token has no KV yet.  With index_at="seal"
        the pages become visible to other requests now.
        """
        names = self._name_full_pages(lease, kv_len)
        if not names and not lease.closed:
            return
        with self._lock:
            self._check_live(lease)
            self._storing.seal_pages(lease, names)
            if self._store_at_seal and lease.window is None:
                self._storing.store(lease)

    def truncate(self, lease: Lease, length: int) -> None:
        """Rolls the lease back to its first `length` tokens.

        A sealed page is never rewritten: where `length` ends inside one, a fresh page gets its committed positions and
        takes its place.  Raises `OutOfPages` and changes nothing when there is no page for that, `NotReady` while
        copies into or out of the lease's pages run, `BadInput` inside a media item whose attention is not causal.
        Engines whose forwards run asynchronously call `fence` after it.
        """
        with self._lock:
            self._check_live(lease)
            self._reshaping.truncate(lease, length)

    def finish(self, lease: Lease, kv_len: int, hint: Hint | None = None) -> None:
        """Ends a request whose first `kv_len` positions hold committed KV: its full pages stay, the rest is free."""
        names = self._name_full_pages(lease, kv_len)
        lease.hint = hint or lease.hint
        with self._lock:
            self._check_live(lease)
            self._storing.seal_pages(lease, names)
            if not self._storing.store(lease):
                self._storing.touch(lease)
            if self._ghosts is not None and lease.store and (place := self._storing.place(lease)) is not None:
                self._ghosts.used(place, lease.prompt_len)
            self._end(lease)

    def hint(self, lease: Lease, hint: Hint) -> None:
        """Tells what is known of the future of the lease's chain, live or ended; for orders that learn, not for LRU."""
        with self._lock:
            self._storing.hint(lease, hint)

    def abort(self, lease: Lease) -> None:
        """Ends a request and stores nothing more of it; pages already in the index stay there.

        Nothing is done for a lease that was revoked: it has ended by itself, maybe in another thread at this moment.
        """
        with self._lock:
            if not lease.revoked:
                self._check_live(lease)
                self._end(lease)

    # ------------------------------------------------------------------ windows and forks

    def protect_prefix(self, lease: Lease, length: int) -> None:
        """Makes the lease a windowed one: its first `length` tokens stay, what is behind them may be released.

        It is stored when it finishes, whatever `index_at` says, and only the pages that the protected tokens fill.
        A request that was suspended comes back without a window.
        """
        with self._lock:
            self._check_live(lease)
            self._reshaping.protect(lease, length)

    def release_oldest(self, lease: Lease, pages: int) -> None:
        """Lets go of the oldest `pages` sealed pages behind the protected prefix: the window has slid past them.

        They are counted like all others: one that another request or the index has stays theirs.  `lease.pages` closes
        the gap (`lease.index_of`), positions keep their numbers, and `lease.prefix_epoch` rises.  With the first one
        the chain is closed: from then on `seal` only makes pages immutable, `truncate` reaches back to the sealed ones,
        and the lease cannot be suspended.  Raises `NotReady` while copies of the lease's pages run.
        """
        with self._lock:
            self._check_live(lease)
            self._reshaping.release_oldest(lease, pages)

    def fork(self, lease: Lease, kv_len: int, *, label: bytes) -> Lease:
        """A second lease with the same first `kv_len` positions, under another label: needs `CacheConfig(forks=True)`.

        It shares the full pages, by counts, and has copies of the rest, up to the length of `lease`.  It may be
        extended, rolled back to the shared pages and windowed; nothing of it is stored, since its pages are another
        label's.  Raises `OutOfPages` or `NotReady`, and needs a `fence`, as `truncate` does.
        """
        if not self.config.forks:
            raise BadInput("fork: forks are off: CacheConfig(forks=True) allows them")
        self.seal(lease, kv_len)
        with self._lock:
            self._check_live(lease)
            identity = self._identities.get(self._fingerprint, lease.identity.salt, lease.identity.adapter, label)
            return self._reshaping.fork(lease, next(self._admission.numbers), identity)

    # ------------------------------------------------------------------ preemption

    def exclusive_pages(self, lease: Lease) -> int:
        """Pages that others could have if the lease ended: no other live request holds them."""
        with self._lock:
            return self._room.exclusive(lease.pages)

    def suspend(self, lease: Lease, kv_len: int, *, complete: bool = False) -> Suspended:
        """Ends a live request for now: its pages go to host memory and are free when the copy is over.

        Copied are the pages that no other live request holds, into pages set aside for that; the others are only let
        go of, and matched again at `resume`.   complete: copies every page, for engines that cannot recompute a hole.
        Raises `CannotSuspend`, with nothing changed, when there are no pages set aside for all of them.
        """
        self._check_live(lease)
        if self._traffic is None or lease.read_in_progress:
            why = "copies of its pages are running" if lease.read_in_progress else "the cache has no host memory"
            raise CannotSuspend(f"{lease} cannot be suspended: {why}")
        names = self._name_full_pages(lease, kv_len)
        with self._lock:
            self._check_live(lease)
            ticket = self._admission.suspend(lease, kv_len, names, self._traffic, complete)
        if self.transfers is not None:
            self.transfers.start()
        return ticket

    def resume(self, ticket: Suspended, tokens: TokenIds) -> Lease:
        """Admits a suspended request again.   tokens: all its ids, of which the first `ticket.kv_len` held KV.

        `lease.kv_len` positions hold KV once the lease may be read, but for `lease.holes`.  Raises `NotReady` while its
        pages are still on their way down, and `OutOfPages`; the ticket stays good then.
        """
        if not ticket.live:
            raise BadInput(f"{ticket} was resumed or discarded before: admit its request anew")
        if not ticket.ready:
            raise NotReady(f"{ticket}: its copy to host memory is still running")
        ids = as_token_ids(tokens)
        if len(ids) < max(ticket.kv_len, 1):
            raise BadInput(f"{len(ids)} tokens to resume {ticket}: it has KV for more")
        with self._lock:
            if self._traffic is None:
                raise BadInput(f"{ticket} is of another cache: this one has no host memory")
            lease = self._admission.resume(ticket, ids, self._traffic.parking)
        if self.transfers is not None:
            self.transfers.start()
        return lease

    def discard(self, ticket: Suspended) -> None:
        """A suspended request will not be resumed."""
        with self._lock:
            if self._traffic is not None and ticket.live:
                self._traffic.parking.check(ticket)
                self._traffic.parking.forget(ticket)

    # ------------------------------------------------------------------ copies

    def poll(self) -> int:
        """Applies the copies that have completed since the last call and returns how many; never blocks.

        Engines call it once a step: it lets leases go on (`Lease.read_in_progress`), and copies cold pages down ahead
        of need while the link is idle.  A cache of one tier makes no copies: it returns 0.
        """
        if self.transfers is None or self._traffic is None:
            return 0
        done = self.transfers.poll()
        with self._lock:
            self._apply(done)
            self._room.clean()
        self.transfers.start()
        return len(done)

    def close(self, *, drain: bool, timeout_s: float) -> None:
        """Ends the copies, and applies what became of them; the cache goes on without its host tier.  Blocks.

        drain: they are finished if `timeout_s` seconds suffice for it; otherwise cut short.
        """
        if self.transfers is not None:
            done = self.transfers.close(drain=drain, timeout_s=timeout_s)
            with self._lock:
                self._apply(done)

    def _apply(self, done: Sequence[Completion]) -> None:
        if self._traffic is not None:
            for completion in done:
                self._traffic.apply(completion)
            self._traffic.start_deferred()
            if done:
                self._counting.copies_ended()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tells what computing `tokens` positions took: what is loaded, and what is kept, is weighed against it."""
        self._costs.prefilled(tokens, seconds)

    def _order_behind(self, lease: Lease, stream: object) -> None:
        if self._traffic is not None:  # see `Gate.wait_on`
            with self._lock:
                self._traffic.copies.order(lease, stream)
                self._counting.copies_ended()

    def fence(self, event: After) -> None:
        """Copies made from now on begin when `event` is done: it was recorded after the last write to any page so far.

        Engines whose forwards run asynchronously (CUDA) call it after each; on host memory nothing needs it.
        """
        if self._traffic is not None:
            with self._lock:
                self._traffic.copies.fence = event

    def outputs(self) -> Outputs:
        """The encoder outputs that share the tiers of this cache (`EncoderCache` gives and takes tensors)."""
        with self._lock:
            of = (self._lock, self._tree, self._room, self._traffic, self._leases, self._admission.numbers, self._end)
            self._outputs = self._outputs or Outputs(*of, self._storing, self._costs, self.pool.page_nbytes)
            return self._outputs

    # ------------------------------------------------------------------ ends and rolling back

    def _end(self, lease: Lease) -> None:
        self._storing.ended(lease)
        if self._traffic is not None:
            self._traffic.leave(lease)
        if self._misses is not None:
            self._misses.ended(lease.number)
        lease.live = False
        del self._leases[lease.number]
        self._release(lease, lease.pages)

    def _release(self, lease: Lease, pages: "array[int]") -> None:
        """The lease lets go of consecutive pages; the deepest one in the tree may end a run that is droppable now."""
        self._ledger.release(pages, lease.number)
        self._tree.offer(pages)

    # ------------------------------------------------------------------ the whole cache

    def reset(self) -> ResetReport:
        """Forgets every cached page at once; live requests go on, and store nothing that began before."""
        with self._lock:
            return self._reset()

    def set_fingerprint(self, fingerprint: Fingerprint | bytes) -> ResetReport:
        """New weights, dtype or layout: every old name is unmatchable from now on, as after `reset`."""
        with self._lock:
            self._fingerprint = fingerprint_bytes(fingerprint)
            self._identities.clear()
            return self._reset()

    def _reset(self) -> ResetReport:
        held, traffic = self._ledger.held, self._traffic
        if self._misses is not None:
            self._misses.forgotten(names_in(self._tree).values())
        self._storing.epoch += 1
        freed = self._tree.clear()
        held_outputs = sum(isinstance(lease, Hold) for lease in self._leases.values())
        return self._counting.reset(freed, held, len(self._leases) - held_outputs, held_outputs, self._host, traffic)

    def output_stats(self) -> OutputStats | None:
        """Counts of encoder outputs; None while nobody keeps any."""
        return self._outputs.stats() if self._outputs is not None else None

    def stats(self) -> CacheStats:
        """Counts of now and since the start."""
        with self._lock:
            return self._counting.stats(len(self._leases), self._ledger, self._host, self._room, self._storing)

    def ghosts(self) -> GhostStats | None:
        """What tiers of other sizes would have hit; None unless the configuration asks for it."""
        with self._lock:
            return self._ghosts.stats() if self._ghosts is not None else None

    def misses(self) -> MissStats | None:
        """Why tokens of prompts were not found; None without a miss ledger."""
        with self._lock:
            return self._misses.stats() if self._misses is not None else None

    def watch(self, listener: Listener | None) -> Mapping[Tier, Names]:
        """Tells `listener` (None: nobody) of every name that enters or leaves a tier; returns those that are there.

        It is called with the cache's lock held: it must be quick, and must not call the cache.
        """
        with self._lock:
            return watch_tree(self._tree, listener, self._misses)

    def check_invariants(self) -> None:
        """Raises `InvariantViolation` when counts differ from the owners recomputed.  O(pages), for tests and idle."""
        with self._lock:
            check_tree(self._tree)
            check_owners(self._ledger, self._host, self._leases.values(), self._traffic)

    # ------------------------------------------------------------------ checks and small things

    def _name_full_pages(self, lease: Lease, kv_len: int) -> list[int]:
        """Notes `kv_len`; names the pages that it fills and that are not sealed yet, outside the lock.

        What the lease knows of itself changes in other threads only while it waits for copies; then none is named.
        """
        with self._lock:
            self._check_live(lease)
            lease.check_kv_len(kv_len, self._page_size)
            lease.kv_len = kv_len
            if lease.read_in_progress:
                return []
        return self._storing.name_full_pages(lease)

    def _check_live(self, lease: Lease) -> None:
        """The lease has not ended.  Holds until the lock is let go: a failed load may revoke it in another thread."""
        if lease.revoked:
            raise LeaseRevoked(f"{lease} was revoked: a load that it waited for did not arrive; admit it again")
        if not lease.live:
            raise InvariantViolation(f"{lease} has ended")
