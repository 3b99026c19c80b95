"""Engine accounting: a `TieredCache` without bytes, driven as an engine drives it, in simulated time.

Must not know the index: all it sees is what admissions matched.

    waits --admit--> (loads) --> prefilled, one at a time --> decodes, a page after the other --> finished
      ^                                                          |
      +--------------------- preempted: no page for it ----------+

A request is admitted when the one before it has been prefilled: so late, and so with as much to match, as an engine
can.  A session's turn waits for the turn before it.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import InvariantViolation, OutOfPages
from kvkeep.lease import Lease
from kvkeep.misses import MissLedger
from kvkeep.replay.link import IDLE, Link
from kvkeep.replay.pages import FINGERPRINT, Pages
from kvkeep.replay.result import PROGRESS_EVERY, Counts, Progress, Settings
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Arrivals, Request
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager

#: Copies never fail here, so none is ever overdue.
DEADLINE_S = 1e18
QUEUE_MAX = 1 << 60


class Job:
    """A request on its way.

    length: tokens so far.   lease: while it is live.   stalled: it had to wait for pages.   served: it was admitted
    once, and counted.   since_s: when it was admitted.
    """

    __slots__ = ("lease", "length", "request", "served", "since_s", "stalled")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.length = request.prompt_len
        self.lease: Lease | None = None
        self.stalled = self.served = False
        self.since_s = 0.0


class Engine:
    """Replays requests over one cache."""

    def __init__(self, pages: Pages, settings: Settings) -> None:
        page_size = pages.page_size
        self.counts = Counts()
        self.clock = TraceClock()
        order = make_order(settings.eviction, settings.gpu_tokens // page_size, self.clock)
        self._pages = pages
        self._settings = settings
        self._link = Link(self.clock, page_size, settings.link_tokens_per_s)
        host_pages = settings.cpu_tokens // page_size
        self.manager = TransferManager(
            self._link,
            bytes_in_flight_max=QUEUE_MAX,
            queue_pages_max=QUEUE_MAX,
            deadline_s=DEADLINE_S,
            clock=self.clock,
        )
        misses = MissLedger(pages.width, order=settings.eviction, clock=self.clock) if settings.explain else None
        self.cache = TieredCache(
            CacheConfig(
                page_size=pages.width,
                index_at=settings.index_at,
                eviction=settings.eviction,  # type: ignore[arg-type]
                ghosts=False,
            ),
            GpuPool.bookkeeping(settings.gpu_tokens // page_size),
            FINGERPRINT,
            host=CpuPool.bookkeeping(host_pages) if host_pages else None,
            transfers=self.manager if host_pages else None,
            order=order,
            misses=misses,
        )
        self._two_tiers = bool(host_pages)
        self._waiting: deque[Job] = deque()
        self._live: dict[Job, None] = {}  # in the order of their admission
        self._loading: list[Job] = []
        self._lane: deque[Job] = deque()  # the first one is being prefilled
        self._turns: dict[int, tuple[tuple[int, int], int]] = {}  # session -> its live turn, and how many copies of it
        self._events: list[tuple[float, int, Job, Lease, Callable[[Job], None]]] = []
        self._tick = count()
        self._ended = 0
        self._refused = False  # an admission was, and nothing that holds pages has ended since

    # ------------------------------------------------------------------ time

    def replay(self, arrivals: Arrivals, progress: Progress | None = None) -> Counts:
        """Serves all requests."""
        concurrency = self._settings.concurrency
        if concurrency is None:
            concurrency = len(arrivals.requests) if arrivals.timed else 1
        coming = deque(arrivals.requests)
        told = 0
        while True:
            self._settle()
            self._arrive(coming, arrivals.timed)
            self._admit(concurrency)
            if progress is not None and self._ended >= told + PROGRESS_EVERY:
                told = self._ended
                progress(told)
            if not self._step(coming[0].time_s if coming else IDLE):
                break
        if self._waiting or self._live:
            raise InvariantViolation(f"{len(self._waiting)} requests wait and {len(self._live)} live for ever")
        stats = self.cache.stats()
        self.counts.pages_evicted, self.counts.evict_ns = stats.pages_evicted, stats.evict_ns
        return self.counts

    def _step(self, next_arrival_s: float) -> bool:
        """Goes on to what happens next; False when nothing will."""
        events = self._events
        event_s = events[0][0] if events else IDLE
        next_s = min(event_s, next_arrival_s, self._link.next_end_s if self._two_tiers else IDLE)
        if next_s == IDLE:
            return False
        self.clock.now_s = max(self.clock.now_s, next_s)
        if event_s <= next_s:
            _, _, job, lease, what = heapq.heappop(events)
            if job.lease is lease:
                what(job)
        return True

    def _after(self, wait_s: float, job: Job, what: Callable[[Job], None]) -> None:
        assert job.lease is not None
        heapq.heappush(self._events, (self.clock.now_s + wait_s, next(self._tick), job, job.lease, what))

    def _settle(self) -> None:
        """Copies that are over by now, and what follows from them."""
        if not self._two_tiers:
            return
        done = self.cache.poll()
        while self.manager.busy and self._link.next_end_s <= self.clock.now_s:
            done += self.cache.poll()
        if done:
            self._refused = False
        for job in [job for job in self._loading if job.lease is not None and not job.lease.read_in_progress]:
            self._loading.remove(job)
            self._loaded(job)

    # ------------------------------------------------------------------ admission

    def _arrive(self, coming: deque[Request], timed: bool) -> None:
        """Requests whose time has come; all of them where there are no times."""
        while coming and (not timed or coming[0].time_s <= self.clock.now_s):
            request = coming.popleft()
            self.counts.requests += 1
            self.counts.prompt_tokens += request.prompt_len
            need = -(-request.final_len // self._pages.page_size)
            if not request.prompt_len or need > self.cache.pool.pages:
                self.counts.unserved += 1
                self._ended += 1
            else:
                self._waiting.append(Job(request))

    def _admit(self, concurrency: int) -> None:
        while self._waiting and len(self._live) < concurrency and not self._lane and not self._refused:
            at = next((i for i, job in enumerate(self._waiting) if self._may_begin(job)), None)
            if at is None:
                return
            job = self._waiting[at]
            ids = self._pages.ids[job.request.chain]
            try:
                lease = self.cache.admit(ids[: self._pages.length(job.length)])
            except OutOfPages:
                self._stall(job)
                self._refused = True
                return
            del self._waiting[at]
            self._begin(job, lease)

    def _may_begin(self, job: Job) -> bool:
        """Copies of one request may be live together; another turn of the session may not."""
        live = self._turns.get(job.request.session)
        return live is None or live[0] == job.request[1:3]

    def _begin(self, job: Job, lease: Lease) -> None:
        session, turn = job.request.session, job.request[1:3]
        self._turns[session] = (turn, self._turns.get(session, (turn, 0))[1] + 1)
        self._live[job] = None
        job.lease, job.since_s = lease, self.clock.now_s
        if not job.served:
            job.served = True
            width = self._pages.width
            self.counts.matched_pages_cpu += lease.loaded_len // width
            self.counts.matched_pages_gpu += (lease.matched_len - lease.loaded_len) // width
        if lease.read_in_progress:
            self._loading.append(job)
        else:
            self._loaded(job)

    def _stall(self, job: Job) -> None:
        if not job.stalled:
            job.stalled = True
            self.counts.stalls += 1

    # ------------------------------------------------------------------ prefill and decode

    def _loaded(self, job: Job) -> None:
        """Its matched pages are there."""
        if job.request.service_s is not None:
            self._after(self._prefill_s(job), job, self._prefilled)
            return
        self._lane.append(job)
        if len(self._lane) == 1:
            self._after(self._prefill_s(job), job, self._leave_lane)

    def _prefill_s(self, job: Job) -> float:
        """How long its prefill takes."""
        assert job.lease is not None
        matched = job.lease.matched_len // self._pages.width * self._pages.page_size
        computed = max(1, job.length - matched)
        takes_s = computed / self._settings.prefill_tokens_per_s
        request = job.request
        if request.service_s is not None:
            return min(takes_s if request.first_token_s is None else request.first_token_s, request.service_s)
        if self._settings.link_tokens_per_s is not None and computed >= self._pages.page_size:
            self.cache.prefilled(self._pages.length(computed), takes_s)
        return takes_s

    def _leave_lane(self, job: Job) -> None:
        self._lane.popleft()
        if self._lane:
            self._after(self._prefill_s(self._lane[0]), self._lane[0], self._leave_lane)
        self._prefilled(job)

    def _prefilled(self, job: Job) -> None:
        assert job.lease is not None
        self.cache.seal(job.lease, job.lease.length)
        if job.length == job.request.final_len:
            self._finish(job)
        else:
            self._decode_on(job)

    def _decode_on(self, job: Job) -> None:
        """Until the next token that needs a page, or the last one."""
        page_size, request = self._pages.page_size, job.request
        length = min(((job.length - 1) // page_size + 1) * page_size + 1, request.final_len)
        rate = self._settings.decode_tokens_per_s
        takes_s = (length - job.length) / rate
        if request.service_s is not None and request.final_len > request.prompt_len:
            left_s = request.service_s - (self.clock.now_s - job.since_s)
            takes_s = max(0.0, left_s) * (length - job.length) / (request.final_len - job.length)
        self._after(takes_s, job, lambda job: self._decoded(job, length))

    def _decoded(self, job: Job, length: int) -> None:
        """It has `length` tokens now: the last one was sampled, and has no KV yet."""
        if not self._extend(job, length):
            return
        assert job.lease is not None
        job.length = length
        if length == job.request.final_len:
            self._finish(job)
            return
        if length <= job.request.known_len:
            self.cache.seal(job.lease, length - 1)
        self._decode_on(job)

    def _extend(self, job: Job, length: int) -> bool:
        """Pages for `length` tokens, at the cost of the youngest requests if need be; False: it was the youngest."""
        pages, known_len = self._pages, job.request.known_len
        tokens = pages.ids[job.request.chain][: pages.length(min(length, known_len))]
        while job.lease is not None:
            new = tokens[job.lease.length :]
            room = 0
            if length > known_len:
                room = -(-length // pages.page_size) * pages.width - job.lease.length - len(new)
            try:
                self.cache.extend(job.lease, new, room=room)
                return True
            except OutOfPages:
                self._preempt()
        return False

    def _preempt(self) -> None:
        """The youngest request gives its pages back, and comes again before all who wait: the oldest always goes on."""
        job = next(reversed(self._live))
        self.counts.preemptions += 1
        self._stall(job)
        assert job.lease is not None
        job.length = min(job.length, job.request.known_len)
        if self._stop_prefill(job):
            self._leave(job, job.lease.kv_len)
        else:
            kv_len = min(max(job.length - 1, job.request.prompt_len), job.request.known_len)
            self._leave(job, max(self._pages.length(kv_len), job.lease.kv_len))
        self._waiting.appendleft(job)

    def _stop_prefill(self, job: Job) -> bool:
        """Takes a request that has not been prefilled out of its queue; False when it has been."""
        if job in self._loading:
            self._loading.remove(job)
            return True
        if job not in self._lane:
            return False
        first = self._lane[0] is job
        self._lane.remove(job)
        if first and self._lane:
            self._after(self._prefill_s(self._lane[0]), self._lane[0], self._leave_lane)
        return True

    def _finish(self, job: Job) -> None:
        request = job.request
        kv_len = min(max(request.final_len - 1, request.prompt_len), request.known_len)
        self._leave(job, self._pages.length(kv_len))
        self._ended += 1

    def _leave(self, job: Job, kv_len: int) -> None:
        assert job.lease is not None
        if job.lease.read_in_progress:
            self.cache.abort(job.lease)
        else:
            self.cache.finish(job.lease, kv_len)
        self._refused = False
        job.lease = None
        del self._live[job]
        session = job.request.session
        turn, live = self._turns[session]
        if live == 1:
            del self._turns[session]
        else:
            self._turns[session] = (turn, live - 1)
