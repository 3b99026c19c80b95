"""Many threads on one cache: decisions are taken under one lock, so nothing is lost, shared wrongly or counted twice.

Must not know a model: a page's content is a number that stands for its prefix, in a table that stands for the pool.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import OutOfPages
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger
from kvkeep.tiers.tracing import TracingLedger

PAGE_SIZE = 4
PAGES_TOTAL = 64
THREADS = 4


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads change places every 10 us, and not every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Client:
    """One thread's requests; `content` says for each page which prefix it holds."""

    def __init__(self, cache: TieredCache, content: "array[int]", seed: int) -> None:
        self.cache = cache
        self.content = content
        self.random = random.Random(seed)
        self.ended = self.refused = self.hits = 0

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self.one_request()
            except OutOfPages:
                self.refused += 1

    def prompt(self) -> list[int]:
        """One of a few long beginnings, then something of its own."""
        shared = [self.random.randrange(3)] * self.random.randrange(1, 24)
        return shared + [self.random.randrange(4) for _ in range(self.random.randrange(8))]

    def one_request(self) -> None:
        tokens = self.prompt()
        lease = self.cache.admit(np.array(tokens, dtype=np.int32))
        try:
            matched = lease.matched_len // PAGE_SIZE
            for page in range(matched):
                assert hash(tuple(tokens[: (page + 1) * PAGE_SIZE])) == self.content[lease.pages[page]], "a wrong hit"
            self.hits += matched > 0
            computed = matched
            for _ in range(self.random.randrange(4)):
                more = [self.random.randrange(2) for _ in range(self.random.randrange(1, 6))]
                self.cache.extend(lease, more)
                tokens += more
                computed = self.compute(lease, tokens, computed)
                self.cache.seal(lease, len(tokens) - 1)
            computed = self.compute(lease, tokens, computed)
        except BaseException:
            self.cache.abort(lease)
            raise
        if self.random.randrange(4):
            self.cache.finish(lease, len(tokens) - 1)
        else:
            self.cache.abort(lease)
        self.ended += 1

    def compute(self, lease: Lease, tokens: list[int], computed: int) -> int:
        full = (len(tokens) - 1) // PAGE_SIZE
        for page in range(computed, full):
            self.content[lease.pages[page]] = hash(tuple(tokens[: (page + 1) * PAGE_SIZE]))
        return full


@pytest.mark.parametrize("kind", [Ledger, TracingLedger])
def test_threads_share_one_cache(kind: type[Ledger]) -> None:
    """Four threads admit, extend, seal and end requests on a small pool: no page is lost or wrongly shared."""
    cache = TieredCache(
        CacheConfig(page_size=PAGE_SIZE, eviction="lru"),
        GpuPool.bookkeeping(PAGES_TOTAL),
        b"fp",
        ledger=kind(PAGES_TOTAL),
    )
    content = array("q", bytes(8 * PAGES_TOTAL))
    clients = [Client(cache, content, seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(client.run, 1.0) for client in clients]
        while not all(future.done() for future in running):
            cache.check_invariants()
            stats = cache.stats()
            assert PAGES_TOTAL == stats.pages_free + stats.pages_cached + stats.pages_live
            time.sleep(0.02)
        for future in running:
            future.result()
    cache.check_invariants()
    stats = cache.stats()
    assert all(client.ended and client.hits for client in clients)
    assert (0, 0) == (stats.leases, stats.pages_live)
    assert stats.admissions >= sum(client.ended for client in clients)
    assert stats.refusals == sum(client.refused for client in clients)
    cache.reset()
    assert PAGES_TOTAL == cache.stats().pages_free
