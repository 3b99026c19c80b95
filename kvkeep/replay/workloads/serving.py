"""Serves a workload over a cache without bytes, in simulated time, and counts what it saved.

Must not know modalities, files or printing.

    arrives --> encoder outputs found, or computed and kept --> prefilled (one at a time) --> decodes --> finished
                  held until the prompt is prefilled                                           pages held until here

One budget: KV pages and encoder outputs in the same tiers.  A split gives each a cache of its own instead.
"""

import heapq
import time
from dataclasses import dataclass, field
from itertools import count

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, OutOfPages
from kvkeep.index.output import Tensor, encoder_identity
from kvkeep.lease import Lease
from kvkeep.observe import Observer
from kvkeep.outputs import Hold, Outputs
from kvkeep.replay.link import IDLE, Link
from kvkeep.replay.result import Settings
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.workloads.workload import Encoded, MediaRequest, Workload
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.transfer.manager import TransferManager

FINGERPRINT = b"kvkeep workload"
#: Copies never fail here, so none is ever overdue.
DEADLINE_S = 1e18
QUEUE_MAX = 1 << 60


@dataclass(slots=True)
class Saved:
    """What a replay counted.

    requests, unserved, stalls: all; larger than the pool; those that had to wait for pages, `waited_s` together.
    prompt_tokens, matched_tokens_gpu, matched_tokens_cpu: of all prompts.
    asked: encoder outputs that requests name.   unneeded: their placeholders' KV matched.   gpu_hits, host_hits,
    computed: the others.   refused: of those computed, not kept since there was no room.   asked_again: of `asked`,
    those asked for before: what a cache without limits would have.
    kv_s, encoder_s: seconds of prefill, and of encoding, that hits saved.   encoder_all_s, prefill_all_s: without any.
    media_items, duplicate_media_rate: occurrences of media, and the share seen before, as `Observer` counts.
    """

    requests: int = 0
    unserved: int = 0
    stalls: int = 0
    waited_s: float = 0.0
    prompt_tokens: int = 0
    matched_tokens_gpu: int = 0
    matched_tokens_cpu: int = 0
    asked: int = 0
    asked_again: int = 0
    unneeded: int = 0
    gpu_hits: int = 0
    host_hits: int = 0
    computed: int = 0
    refused: int = 0
    kv_s: float = 0.0
    encoder_s: float = 0.0
    prefill_all_s: float = 0.0
    encoder_all_s: float = 0.0
    media_items: int = 0
    duplicate_media_rate: float = 0.0
    seconds: float = 0.0
    simulated_s: float = 0.0

    @property
    def saved_s(self) -> float:
        """Seconds of computing that hits of both kinds saved."""
        return self.kv_s + self.encoder_s


@dataclass(order=True, slots=True)
class _Live:
    end_s: float
    number: int
    lease: Lease = field(compare=False)
    request: MediaRequest = field(compare=False)


class _Tiers:
    """One cache of so many pages, without bytes, and its link."""

    def __init__(self, workload: Workload, settings: Settings, page_size: int, share: float, clock: TraceClock) -> None:
        pages, host_pages = (int(tokens * share) // page_size for tokens in (settings.gpu_tokens, settings.cpu_tokens))
        layout = page_layout(workload, page_size)
        rate = settings.link_tokens_per_s
        self.link = Link(clock, layout.page_nbytes, rate and rate * workload.kv_nbytes_per_token)
        self.manager = TransferManager(
            self.link, bytes_in_flight_max=QUEUE_MAX, queue_pages_max=QUEUE_MAX, deadline_s=DEADLINE_S, clock=clock
        )
        self.cache = TieredCache(
            CacheConfig(page_size=page_size, index_at=settings.index_at),
            GpuPool(max(1, pages), layout, None),
            FINGERPRINT,
            host=CpuPool.bookkeeping(host_pages) if host_pages else None,
            transfers=self.manager if host_pages else None,
            order=make_order(settings.eviction, max(1, pages), clock),
        )

    def settle(self, clock: TraceClock) -> None:
        """Copies that are over by now."""
        if self.cache.transfers is None:
            return
        self.cache.poll()
        while self.manager.busy and self.link.next_end_s <= clock.now_s:
            self.cache.poll()


def page_layout(workload: Workload, page_size: int) -> PageLayout:
    """A page of so many bytes a token as the workload's model has."""
    return PageLayout(1, 1, workload.kv_nbytes_per_token // 4, page_size, "float16")


class Serving:
    """Replays one workload.

    settings: of them the sizes of the tiers (tokens stand for the bytes of their KV), eviction, index_at and the rates.
    kv_share: None: one budget.  Otherwise KV pages have this share of both tiers for themselves, encoder outputs the
        rest.   Raises `BadInput` for a tier that holds no page.
    """

    def __init__(
        self, workload: Workload, settings: Settings, page_size: int = 128, kv_share: float | None = None
    ) -> None:
        if settings.gpu_tokens < page_size:
            raise BadInput(f"--gpu-tokens {settings.gpu_tokens}: it must be a page of {page_size} tokens or more")
        self.saved = Saved()
        self.clock = TraceClock()
        self._workload = workload
        self._settings = settings
        shares = (1.0,) if kv_share is None else (kv_share, 1.0 - kv_share)
        self._tiers = [_Tiers(workload, settings, page_size, share, self.clock) for share in shares]
        self.cache = self._tiers[0].cache
        self._outputs: Outputs = self._tiers[-1].cache.outputs()
        self._observer = Observer(self.cache.pool.pages, FINGERPRINT, page_size=page_size)
        self._identities = {
            encoded.encoder: encoder_identity(encoded.encoder.encode(), b"")
            for request in workload.requests
            for encoded in request.encoded
        }
        self._asked: set[tuple[str, bytes]] = set()
        self._live: list[_Live] = []
        self._numbers = count()

    def run(self) -> Saved:
        """Serves every request."""
        begun, saved = time.perf_counter(), self.saved
        for request in self._workload.requests:
            self._go_on(max(self.clock.now_s, request.time_s))
            self._serve(request)
        while self._live:
            self._go_on(self._live[0].end_s)
        for tiers in self._tiers:
            tiers.cache.check_invariants()
        seen = self._observer.observation()
        saved.media_items, saved.duplicate_media_rate = seen.media_items, seen.duplicate_media_rate
        saved.seconds, saved.simulated_s = time.perf_counter() - begun, self.clock.now_s
        return saved

    # ------------------------------------------------------------------ time

    def _go_on(self, now_s: float) -> None:
        """Time passes; requests end that have decoded by then."""
        while self._live and self._live[0].end_s <= now_s:
            live = heapq.heappop(self._live)
            self._pass(live.end_s)
            self._finish(live)
        self._pass(now_s)

    def _pass(self, now_s: float) -> None:
        self.clock.now_s = max(self.clock.now_s, now_s)
        for tiers in self._tiers:
            tiers.settle(self.clock)

    def _wait_for(self, lease: Lease) -> None:
        """Until the copies into what a request or an output holds are over."""
        while lease.read_in_progress:
            next_s = min(tiers.link.next_end_s for tiers in self._tiers)
            self._pass(next_s if next_s != IDLE else self.clock.now_s)

    # ------------------------------------------------------------------ one request

    def _serve(self, request: MediaRequest) -> None:
        saved, length = self.saved, len(request.prompt)
        saved.requests += 1
        saved.prompt_tokens += length
        saved.prefill_all_s += length / self._settings.prefill_tokens_per_s
        self._observe(request)
        lease = self._admit(request) if length else None
        if length and lease is None:
            saved.unserved += 1
            return
        matched = 0
        if lease is not None:
            self._wait_for(lease)
            matched = lease.matched_len
            saved.matched_tokens_cpu += lease.loaded_len
            saved.matched_tokens_gpu += matched - lease.loaded_len
            saved.kv_s += matched / self._settings.prefill_tokens_per_s
        holds = [self._encode(encoded, matched) for encoded in request.encoded]
        if lease is not None:
            self._prefill(lease, length - matched)
        for hold in holds:
            if hold is not None:
                self._outputs.release(hold)
        if lease is not None:
            answer_s = request.answer_s
            if answer_s is None:
                answer_s = len(request.answer) / self._settings.decode_tokens_per_s
            end_s = self.clock.now_s + answer_s
            heapq.heappush(self._live, _Live(end_s, next(self._numbers), lease, request))

    def _admit(self, request: MediaRequest) -> Lease | None:
        """A lease, as soon as there are pages; None for a prompt that is larger than the pool."""
        since_s = self.clock.now_s
        while True:
            try:
                lease = self.cache.admit(request.prompt, media=request.media)
                self.saved.stalls += self.clock.now_s > since_s
                self.saved.waited_s += self.clock.now_s - since_s
                return lease
            except BadInput:
                return None
            except OutOfPages:
                if not self._live:
                    return None
                self._go_on(self._live[0].end_s)

    def _encode(self, encoded: Encoded, matched: int) -> Hold | None:
        """Holds the output, found or computed; None where its placeholders' KV is there, or it cannot be kept."""
        saved, name = self.saved, (encoded.encoder, encoded.key)
        saved.asked += 1
        saved.asked_again += name in self._asked
        self._asked.add(name)
        saved.encoder_all_s += encoded.seconds
        if encoded.end is not None and encoded.end <= matched:
            saved.unneeded += 1
            saved.encoder_s += encoded.seconds
            return None
        identity = self._identities[encoded.encoder]
        hold = self._outputs.find(identity, encoded.key)
        if hold is not None:
            self._wait_for(hold)
            saved.host_hits += hold.from_host
            saved.gpu_hits += not hold.from_host
            saved.encoder_s += encoded.seconds
            return hold
        saved.computed += 1
        self._go_on(self.clock.now_s + encoded.seconds)
        try:
            hold = self._outputs.reserve(identity, encoded.nbytes)
        except (OutOfPages, BadInput):
            saved.refused += 1
            return None
        self._outputs.store(
            hold, encoded.key, (Tensor((encoded.nbytes,), "uint8", 0, encoded.nbytes),), encoded.seconds
        )
        return hold

    def _prefill(self, lease: Lease, tokens: int) -> None:
        seconds = tokens / self._settings.prefill_tokens_per_s
        self._go_on(self.clock.now_s + seconds)
        if tokens:
            self.cache.prefilled(tokens, seconds)
        self.cache.seal(lease, lease.length)

    def _finish(self, live: _Live) -> None:
        """The answer is there: its pages stay too, if there is room for them."""
        try:
            self.cache.extend(live.lease, live.request.answer)
        except OutOfPages:
            self.cache.finish(live.lease, live.lease.length)
        else:
            self.cache.finish(live.lease, max(live.lease.length - 1, len(live.request.prompt)))

    def _observe(self, request: MediaRequest) -> None:
        if len(request.prompt):
            seen = self._observer.begin(request.prompt, media=request.media)
            self._observer.end(seen, request.prompt, len(request.prompt))
