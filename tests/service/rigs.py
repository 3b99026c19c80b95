"""Caches over real memory whose pages tell which prefix they hold, and requests as an engine would make them.

Must not look into the service.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence

import numpy as np

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import OutOfPages
from kvkeep.handles import LeaseHandle
from kvkeep.service import KVCacheService
from kvkeep.telemetry.snapshot import CacheKey, CacheSnapshot
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import POISON_BYTE, HostMemory
from kvkeep.tiers.tracing import TracingLedger
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager

KEY = CacheKey("node")
PAGE_SIZE = 4
LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=4, page_size=PAGE_SIZE, dtype="float16")
PATIENCE_S = 20.0


def kv_of(label: bytes, tokens: Sequence[int]) -> bytes:
    """The bytes of the page that ends a prefix: a function of all of it."""
    digest = hashlib.blake2b(repr((label, list(tokens))).encode(), digest_size=32).digest()
    return (digest * (LAYOUT.page_nbytes // 32 + 1))[: LAYOUT.page_nbytes]


class Node:
    """A cache of two tiers over memory of this process, copied by threads."""

    def __init__(self, pages: int = 24, host_pages: int = 48, suspend_pages: int = 8) -> None:
        self.memory = HostMemory(np.full((pages, LAYOUT.page_nbytes), POISON_BYTE, dtype=np.uint8), LAYOUT)
        self.host = CpuPool(LAYOUT, host_pages, suspend_pages)
        assert self.host.memory is not None
        self.backend = HostBackend(self.memory, self.host.memory)
        self.manager = TransferManager(
            self.backend, bytes_in_flight_max=64 * LAYOUT.page_nbytes, queue_pages_max=256, deadline_s=PATIENCE_S
        )
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE_SIZE, eviction="lru"),
            GpuPool(pages, LAYOUT, self.memory),
            b"fp",
            host=self.host,
            transfers=self.manager,
            ledger=TracingLedger(pages),
        )
        self.preempted = asyncio.Lock()  # who was preempted goes on with it

    def wrong_pages(self, label: bytes, tokens: Sequence[int], pages: Sequence[int], count: int) -> list[int]:
        """Which of the first `count` pages of a sequence do not hold its KV."""
        held = [self.memory.page_bytes(pages[i]) for i in range(count)]
        return [i for i in range(count) if held[i] != kv_of(label, tokens[: (i + 1) * PAGE_SIZE])]

    def compute(self, label: bytes, tokens: Sequence[int], pages: Sequence[int], first: int, last: int) -> None:
        """A forward over the full pages `first` to `last`."""
        for i in range(first, last):
            row = np.frombuffer(kv_of(label, tokens[: (i + 1) * PAGE_SIZE]), dtype=np.uint8)
            self.memory.rows[pages[i]] = row


class Client:
    """A request: prefill, decode, and what it found wrong.   hits: tokens that it took from the cache."""

    def __init__(self, node: Node, key: CacheKey, label: bytes, seed: int) -> None:
        self.node = node
        self.key = key
        self.label = label
        self.random = random.Random(seed)
        self.wrong: list[int] = []
        self.hits = 0
        self.preemptions = 0

    async def run(self, service: KVCacheService, tokens: Sequence[int], more: int) -> list[int]:
        """Answers `tokens` with `more` tokens.

        A request that runs out of pages is preempted, and those that were go on one at a time: otherwise each of them
        may take, for its prompt, the very page that another one needs to go on, for ever.
        """
        tokens = list(tokens)
        until = len(tokens) + more
        if not await self.attempt(service, tokens, until):
            async with self.node.preempted:
                while not await self.attempt(service, tokens, until):
                    pass
        return tokens

    async def attempt(self, service: KVCacheService, tokens: list[int], until: int) -> bool:
        """Adds to `tokens` until there are so many; False when there are no pages for that."""
        async with await service.admit(self.key, tokens, label=self.label) as lease:
            await lease.ready()
            self.hits += lease.matched_len
            self.prefill(lease, tokens)
            await asyncio.sleep(0)
            try:
                while len(tokens) < until:
                    token = self.random.randrange(1000)
                    lease.extend([token])
                    tokens.append(token)
                    self.forward(lease, tokens, (len(tokens) - 2) // PAGE_SIZE)
                    await asyncio.sleep(0)
            except OutOfPages:
                self.preemptions += 1
            lease.finish(len(tokens) - 1)
        return len(tokens) == until

    def prefill(self, lease: LeaseHandle, tokens: Sequence[int]) -> None:
        """Checks the pages that came from the cache and computes the others."""
        matched = lease.matched_len // PAGE_SIZE
        self.wrong += self.node.wrong_pages(self.label, tokens, lease.pages, matched)
        self.forward(lease, tokens, matched)

    def forward(self, lease: LeaseHandle, tokens: Sequence[int], first: int) -> None:
        """Everything but the last token has KV afterwards."""
        self.node.compute(self.label, tokens, lease.pages, first, (len(tokens) - 1) // PAGE_SIZE)
        lease.seal(len(tokens) - 1)


def assert_clean(node: Node) -> None:
    """No copy runs, nobody holds a page."""
    node.cache.check_invariants()
    stats = node.cache.stats()
    assert (0, 0, False) == (stats.leases, stats.pages_live, node.manager.busy)


def the(service: KVCacheService) -> CacheSnapshot:
    [one] = service.snapshot()
    return one


def prompt(first: int, pages: int) -> list[int]:
    """`pages` full pages and one token."""
    return list(range(first * 1000, first * 1000 + pages * PAGE_SIZE + 1))


async def until_waiting(service: KVCacheService, count: int) -> None:
    """Returns when so many wait for room."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            waiting = the(service).service
            assert waiting is not None
            if waiting.waiting == count:
                return
            await asyncio.sleep(0)
