"""The scheduler's side of the vLLM connector: which blocks are loaded from the tier, which are stored in it.

Must not import vLLM, nor touch a byte.  vLLM owns its blocks and finds prefixes in them first; this finds what the tier
has behind them, with the index, ledger and eviction order of `TieredCache` over the pages of the tier.

    get_num_new_matched_tokens  look       nothing is pinned: vLLM may ask again
    update_state_after_alloc    admit      what matched is pinned, and a load is planned
    build_connector_meta        extend     pages that this step fills are stored after it
    update_connector_output     seal       what has arrived on every rank is visible; blocks are let go
    request_finished            finish     once its copies are over

A block that is being stored is held by a count of vLLM's own, so that nothing writes it meanwhile; a page of the tier
is held by the lease of its request until all copies from and to it are over.  So no two copies of one page overlap.
"""

import logging
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import OutOfPages
from kvkeep.index.media import cut_before_split_item
from kvkeep.integrations.vllm_events import EventLog
from kvkeep.integrations.vllm_identity import UNNAMED, RequestIdentity, identify
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool

log = logging.getLogger(__name__)

#: Seconds between two reports of the counters, but for the one when everything has ended.
REPORT_S = 0.5


class Blocks(Protocol):
    """vLLM's `BlockPool`, as far as it is used."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


class Chain:
    """A request of vLLM and its pages in the tier.

    lease: None until there is something to load or to store.   pages: of the tier, stored or on their way there.
    stores: its stores whose pages are not sealed yet, (job, pages that are there when it is over), in order.
    running: jobs that copy from or to its pages.
    computed: positions that hold KV after the last step.   over: vLLM has finished it.   full: it stores nothing more.
    """

    __slots__ = (
        "blocks", "computed", "full", "identity", "lease", "local", "over", "pages", "request", "running",
        "sealed", "stores", "tokens",
    )  # fmt: skip

    def __init__(self, request: Any, identity: RequestIdentity) -> None:
        self.request = request
        self.identity = identity
        self.tokens = array("i")
        self.lease: Lease | None = None
        self.pages = self.sealed = self.computed = self.local = 0
        self.stores: deque[tuple[int, int]] = deque()
        self.running: set[int] = set()
        self.over = self.full = False
        self.blocks: list[int] = []  # held from its end until they can be stored

    def known(self) -> "array[int]":
        """Its token ids so far."""
        request = self.request
        if len(self.tokens) < request.num_tokens:
            self.tokens.extend(request.all_token_ids[len(self.tokens) :])
        return self.tokens


class Job:
    """Copies that run.   chains: whose.   blocks: vLLM's blocks that a store reads.   left: ranks that still copy."""

    __slots__ = ("blocks", "chains", "failed", "left", "load", "tokens")

    def __init__(self, chains: list[Chain], blocks: list[int], left: int, load: bool, tokens: int) -> None:
        self.chains, self.blocks, self.left, self.load, self.tokens = chains, blocks, left, load, tokens
        self.failed = False


class SchedulerSide:
    """Decides for one engine.

    block_tokens: positions of a block.   ranks: workers that copy each its own bytes of a block.
    fingerprint: what KV bytes depend on besides tokens.   whole_media: see `identify`.
    looks_ahead: a draft model's KV of a position depends on the next token too, so that the last page of a match may be
        another prefix's: it is not used, as vLLM does not use its own last block then.
    events: whether somebody follows what the tier holds.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        blocks_per_page: int,
        eviction: Any,
        ranks: int,
        fingerprint: bytes,
        whole_media: bool,
        looks_ahead: bool,
        events: bool,
    ) -> None:
        self._block_tokens = block_tokens
        self._per_page = blocks_per_page
        self._page_size = block_tokens * blocks_per_page
        self._eviction = eviction
        self._ranks = ranks
        self._fingerprint = fingerprint
        self._whole_media = whole_media
        self._looks_ahead = looks_ahead
        self.events = EventLog(self._block_tokens, blocks_per_page) if events else None
        self.cache: TieredCache | None = None
        self._pool: Blocks | None = None
        self._chains: dict[str, Chain] = {}
        self._late: list[Chain] = []  # over, and something of them is to be stored yet
        self._jobs: dict[int, Job] = {}
        self._numbered = 0
        self._storing: set[int] = set()  # blocks that are being stored
        self._loads: list[tuple[int, str, array[int], array[int]]] = []  # of the next step
        self.counters: dict[str, float] = dict.fromkeys(
            ("loaded_tokens", "lost_tokens", "saved_tokens", "unsaved_tokens", "scheduler_seconds"), 0.0
        )
        self.unnamed: dict[str, int] = dict.fromkeys(UNNAMED, 0)
        self._reported: dict[str, Any] = {}
        self._report_at = 0.0

    def begin(self, slots: int) -> None:
        """The workers are ready: the tier holds `slots` blocks, from 0 on."""
        config = CacheConfig(page_size=self._page_size, eviction=self._eviction, ghosts=False)
        self.cache = TieredCache(config, GpuPool.bookkeeping(slots // self._per_page), self._fingerprint)
        if self.events is not None:
            self.cache.watch(self.events)

    def bind(self, pool: Blocks) -> None:
        """vLLM's blocks, to hold those that are being read."""
        self._pool = pool

    # ------------------------------------------------------------------ a request begins

    def arrived(self, request: Any) -> None:
        """A request of vLLM waits; one that cannot be named safely is counted, and not cached."""
        identity = identify(request, self._page_size, self._whole_media)
        if isinstance(identity, str):
            self.unnamed[identity] += 1
        else:
            self._chains[request.request_id] = Chain(request, identity)

    def matched(self, request: Any, computed: int) -> int:
        """Positions of the tier behind the `computed` that vLLM has."""
        if self.cache is None:
            return 0
        chain = self._chains.get(request.request_id)
        if chain is None or request.skip_reading_prefix_cache:
            return 0
        chain.local = computed
        salt, adapter, media, _ = chain.identity
        found = self.cache.look(chain.known(), salt, adapter, b"", media, True)
        return max(0, (found.pages - self._looks_ahead) * self._page_size - computed)

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """vLLM has given the request `blocks`; `external` positions of them are to be loaded."""
        chain = self._chains.get(request.request_id)
        if not external or chain is None or self.cache is None:
            return
        if chain.lease is not None:  # it was preempted: what it has stored is in the tier, and found there
            left, chain = chain, Chain(request, chain.identity)
            chain.tokens, chain.local = left.tokens, left.local
            left.over = True
            self._settle(left)
            self._chains[request.request_id] = chain
        lease = self._open(chain)
        first, last = chain.local // self._block_tokens, (chain.local + external) // self._block_tokens
        at = np.arange(first, last)
        pages = np.frombuffer(lease.pages, dtype=np.int32)[at // self._per_page]
        slots = array("i", (pages * self._per_page + at % self._per_page).astype(np.int32).tobytes())
        targets = array("i", blocks[first:last])
        job = self._start([chain], [], load=True, tokens=external)
        self._loads.append((job, request.request_id, slots, targets))

    def _open(self, chain: Chain) -> Lease:
        """Pins what the tier has of the chain."""
        assert self.cache is not None
        salt, adapter, media, _ = chain.identity
        lease = self.cache.admit(chain.known(), salt=salt, adapter=adapter, media=media, reserve=False)
        chain.lease = lease
        chain.pages = chain.sealed = lease.matched_len // self._page_size
        return lease

    # ------------------------------------------------------------------ a step

    def plan(self, output: Any) -> tuple[list[tuple[int, str, "array[int]", "array[int]"]], int, Any, Any]:
        """What this step copies: its loads, the number of its store or -1, and that one's blocks and slots."""
        loads, self._loads = self._loads, []
        blocks, slots, chains = array("i"), array("i"), list[Chain]()
        size = self._page_size
        state = output.kv_connector_block_state
        for request_id, count in output.num_scheduled_tokens.items() if self.cache is not None else ():
            chain = self._chains.get(request_id)
            if chain is None:
                continue
            request = chain.request
            chain.computed = computed = request.num_computed_tokens + count
            pages = min(computed, request.num_tokens) // size
            if pages > chain.pages and not chain.full:
                found = state.get_block_ids(request_id)
                if found is not None and self._store(chain, found[0], pages, blocks, slots):
                    chains.append(chain)
        for chain in self._late:
            if self._store(chain, chain.blocks, len(chain.blocks) // self._per_page, blocks, slots):
                chains.append(chain)
        job = -1
        if chains:
            job = self._start(chains, blocks.tolist(), load=False, tokens=len(blocks) * self._block_tokens)
            for chain in chains:
                chain.stores.append((job, chain.pages))
            self._hold(blocks)
            self._storing.update(blocks)
        if self._late:
            self._end_late()
        return loads, job, blocks, slots

    def _store(
        self, chain: Chain, of_chain: Sequence[int], pages: int, blocks: "array[int]", slots: "array[int]"
    ) -> bool:
        """Adds what the chain's first `pages` pages need to be stored; whether that is anything."""
        assert self.cache is not None
        per_page = self._per_page
        if chain.lease is None:
            if self._storing and not self._storing.isdisjoint(of_chain[: pages * per_page]):
                return False  # another request is storing them: they will be found in the tier
            self._open(chain)
        lease = chain.lease
        assert lease is not None
        pages = cut_before_split_item(pages, self._page_size, chain.identity.placed.by_page)
        if pages <= chain.pages:
            return False
        first, size = chain.pages, self._page_size
        try:
            self.cache.extend(lease, chain.known()[first * size : pages * size])
        except OutOfPages:  # live requests hold the whole tier: this one is not kept
            chain.full = True
            self.counters["unsaved_tokens"] += (pages - first) * size
            return False
        blocks.extend(of_chain[first * per_page : pages * per_page])
        fresh = np.frombuffer(lease.pages, dtype=np.int32)[first:pages, None]
        slots.frombytes((fresh * per_page + np.arange(per_page, dtype=np.int32)).astype(np.int32).tobytes())
        chain.pages = pages
        return True

    def _start(self, chains: list[Chain], blocks: list[int], *, load: bool, tokens: int) -> int:
        job = self._numbered
        self._numbered += 1
        self._jobs[job] = Job(chains, blocks, self._ranks, load, tokens)
        for chain in chains:
            chain.running.add(job)
        return job

    def _hold(self, blocks: Sequence[int]) -> None:
        assert self._pool is not None
        of = self._pool.blocks
        self._pool.touch([of[i] for i in blocks])

    def _let_go(self, blocks: Sequence[int]) -> None:
        assert self._pool is not None
        of = self._pool.blocks
        self._pool.free_blocks([of[i] for i in reversed(blocks)])

    # ------------------------------------------------------------------ copies are over

    def done(self, ranks: "dict[int, int]", failed: set[int], dead: bool) -> None:
        """So many ranks more are through with each job; `failed` ones did not arrive.

        dead: some rank copies nothing any more: the tier is given up.
        """
        for number, count in ranks.items():
            job = self._jobs[number]
            job.left -= count
            job.failed = job.failed or number in failed
            if not job.left:
                del self._jobs[number]
                for chain in job.chains:
                    chain.running.discard(number)
                if job.load:
                    self._loaded(job)
                else:
                    self._stored(job)
                for chain in job.chains:
                    self._settle(chain)
        if dead and self.cache is not None:
            log.error("kvkeep: a worker copies nothing any more: nothing is kept from now on")
            self.cache.reset()  # so that whoever follows the events hears that nothing is there
            self.cache = None
            for chain in self._late:
                self._let_go(chain.blocks)
            self._late = []

    def _loaded(self, job: Job) -> None:
        chain = job.chains[0]
        self.counters["lost_tokens" if job.failed else "loaded_tokens"] += job.tokens
        if job.failed and self.cache is not None:
            log.warning("kvkeep: a load of %d tokens failed: the tier is emptied, they are computed", job.tokens)
            chain.full = True
            self.reset()

    def _stored(self, job: Job) -> None:
        self._storing.difference_update(job.blocks)
        self._let_go(job.blocks)
        self.counters["unsaved_tokens" if job.failed else "saved_tokens"] += job.tokens
        for chain in job.chains:
            if job.failed:  # what is behind it has no parent; what is before it may be on its way yet
                chain.full = True
                chain.stores.clear()
            self._seal(chain)

    def _seal(self, chain: Chain) -> None:
        """What has arrived is there for others."""
        before = chain.sealed
        while chain.stores and chain.stores[0][0] not in chain.running:
            _, chain.sealed = chain.stores.popleft()
        lease = chain.lease
        if chain.sealed > before and lease is not None and self.cache is not None:
            self.cache.seal(lease, chain.sealed * self._page_size)
            if self.events is not None:
                self.events.named(lease.names, chain, lease.base)

    def _settle(self, chain: Chain) -> None:
        """A chain that is over, with all its copies, ends."""
        lease = chain.lease
        if not chain.over or chain.running or lease is None:
            return
        chain.lease = None
        if self.cache is not None:
            self.cache.finish(lease, chain.sealed * self._page_size)
            if self.events is not None:  # its pages may take the place of another's that have left
                self.events.named(lease.names, chain, lease.base)

    # ------------------------------------------------------------------ a request ends

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """vLLM is about to free the request's blocks."""
        chain = self._chains.pop(request.request_id, None)
        if chain is None or self.cache is None:
            return
        chain.over = True
        chain.full = chain.full or request.status.name == "FINISHED_ERROR"
        pages = min(chain.computed, request.num_tokens) // self._page_size
        blocks = list(block_ids[: pages * self._per_page])
        if pages > chain.pages and not chain.full and len(blocks) == pages * self._per_page:
            chain.blocks = blocks
            self._hold(blocks)
            self._late.append(chain)
        else:
            self._settle(chain)

    def _end_late(self) -> None:
        """Chains that are over and have begun to store what they had to."""
        rest = []
        for chain in self._late:
            if chain.lease is None and not chain.full:
                rest.append(chain)
                continue
            self._let_go(chain.blocks)  # a store holds those that it reads
            self._settle(chain)
        self._late = rest

    # ------------------------------------------------------------------ the whole tier

    @property
    def busy(self) -> bool:
        """Whether steps are needed although no request is left: copies run, or are to be planned."""
        return bool(self._jobs or self._late)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks come free when copies are over."""
        return bool(self._storing or self._late)

    def give_up_stores(self) -> None:
        """Lets go of every block at once: what is being copied from them is not kept."""
        for job in self._jobs.values():
            if not job.load:
                job.failed = True
                self._let_go(job.blocks)
                job.blocks = []
        self._storing.clear()
        for chain in self._late:
            chain.full = True
        self._end_late()

    def reset(self) -> bool:
        """Forgets what the tier holds; of requests that have computed or loaded anything, nothing is stored.

        What was still being stored has been given up: vLLM's own cache is emptied first.
        """
        if self.cache is not None:
            self.cache.reset()
            for chain in self._chains.values():
                chain.full = chain.full or chain.lease is not None or chain.computed > 0
        return True

    def report(self, clock: float | None = None) -> dict[str, Any] | None:
        """The counters since the last report and the gauges of now; None while there is nothing to tell yet."""
        now = time.monotonic() if clock is None else clock
        began = self.cache is not None or self._reported
        if not began or (now < self._report_at and (self._chains or self.busy)):
            return None
        totals = dict(self.counters)
        totals |= {f"unnamed_{reason}": count for reason, count in self.unnamed.items()}
        gauges = dict.fromkeys(("pages_total", "pages_free", "pages_cached", "pages_live"), 0)
        if self.cache is not None:
            stats = self.cache.stats()
            totals |= {"evicted_pages": stats.pages_evicted, "stored_pages": stats.pages_stored}
            gauges = {name: getattr(stats, name) for name in gauges}
        if self._reported == {**self._reported, **totals, **gauges}:
            return None
        since = {name: value - self._reported.get(name, 0) for name, value in totals.items()}
        self._reported |= {**totals, **gauges}
        self._report_at = now + REPORT_S
        return {"counters": since, "gauges": gauges}
