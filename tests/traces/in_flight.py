"""Replays a trace with several requests in flight through `TieredCache`, as a batching engine would drive it.

Must not know the index: all it sees is `matched_len`.

A step prefills up to `chunk` positions of one request and decodes one token of every other.  A request is admitted
when the one before it has been prefilled (so late, and so with as much to match, as an engine can), at most `live_max`
live at once, a session's turn only after its turn before.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, IndexAt
from kvkeep.errors import OutOfPages
from kvkeep.lease import Lease
from kvkeep.stats import CacheStats
from kvkeep.tiers.gpu_pool import GpuPool
from tests.traces.reader import Request, Session


@dataclass
class Live:
    """An admitted request; `computed` positions have KV."""

    request: Request
    lease: Lease
    computed: int


class Batch:
    """The requests in flight and those that wait, over one cache."""

    def __init__(
        self, cache: TieredCache, sessions: Sequence[Session], requests: Iterable[Request], live_max: int, chunk: int
    ) -> None:
        self.cache = cache
        self.sessions = sessions
        self.waiting = deque(requests)
        self.live_max = live_max
        self.chunk = chunk
        self.prefilling: Live | None = None
        self.decoding: list[Live] = []

    def run(self) -> CacheStats:
        """Steps until every request has ended."""
        while self.waiting or self.prefilling or self.decoding:
            self._admit()
            self._decode()
            self._prefill()
        self.cache.check_invariants()
        return self.cache.stats()

    def _admit(self) -> None:
        if self.prefilling or not self.waiting or len(self.decoding) == self.live_max:
            return
        request = self.waiting[0]
        # Copies of one request may be in flight together; another turn of the session may not.
        others = [e for e in self.decoding if e.request.session == request.session and e.request != request]
        if others:
            return
        try:
            lease = self.cache.admit(self.sessions[request.session].ids[: request.prompt_len])
        except OutOfPages:
            if not self.decoding:
                raise
            return
        self.waiting.popleft()
        self.prefilling = Live(request, lease, lease.matched_len)

    def _prefill(self) -> None:
        entry = self.prefilling
        if entry is None:
            return
        entry.computed = min(entry.computed + self.chunk, entry.request.prompt_len)
        self.cache.seal(entry.lease, entry.computed)
        if entry.computed == entry.request.prompt_len:
            self.prefilling = None
            self.decoding.append(entry)

    def _decode(self) -> None:
        after = []
        for entry in self.decoding:
            request, lease = entry.request, entry.lease
            self.cache.extend(lease, self.sessions[request.session].ids[lease.length : lease.length + 1])
            if lease.length < request.final_len:
                self.cache.seal(lease, lease.length - 1)
                after.append(entry)
            else:
                self.cache.finish(lease, lease.length - 1)
        self.decoding = after


def in_flight(
    sessions: Sequence[Session],
    requests: Iterable[Request],
    *,
    capacity: int,
    page_size: int,
    index_at: IndexAt,
    live_max: int,
    chunk: int = 512,
) -> CacheStats:
    """What a pool of `capacity` tokens matched with up to `live_max` requests in flight."""
    config = CacheConfig(page_size=page_size, index_at=index_at)
    cache = TieredCache(config, GpuPool.bookkeeping(capacity // page_size), b"in flight")
    return Batch(cache, sessions, requests, live_max, chunk).run()


def copies(requests: Iterable[Request], count: int) -> list[Request]:
    """Every request `count` times in a row: the burst of a client that samples several answers to one prompt."""
    return [request for request in requests for _ in range(count)]
