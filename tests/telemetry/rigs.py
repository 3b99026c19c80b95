"""Caches of two tiers over a backend that a test steps, without page bytes.

Must not use anything of the telemetry.
"""

import random
from collections.abc import Sequence
from typing import Any

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.names import Hash64, hash64
from kvkeep.lease import Lease
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.tracing import TracingLedger
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend

PAGE_SIZE = 4
PAGE_NBYTES = 64


class TwoTiers:
    """A cache, its manager and its backend."""

    def __init__(
        self,
        pages: int = 16,
        host_pages: int = 16,
        *,
        hash_fn: Hash64 = hash64,
        seed: int = 0,
        fail_rate: float = 0.0,
        stuck_rate: float = 0.0,
        suspend_pages: int = 0,
        deadline_s: float = 1e9,
        in_flight_pages: int = 64,
        queue_pages: int = 256,
    ) -> None:
        self.random = random.Random(seed)
        self.backend = SimulatedBackend(page_nbytes=PAGE_NBYTES, seed=seed, fail_rate=fail_rate, stuck_rate=stuck_rate)
        self.manager = TransferManager(
            self.backend,
            bytes_in_flight_max=PAGE_NBYTES * in_flight_pages,
            queue_pages_max=queue_pages,
            deadline_s=deadline_s,
            clock=self.backend.clock,
        )
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE_SIZE, eviction="lru"),
            GpuPool.bookkeeping(pages),
            b"fp",
            host=CpuPool.bookkeeping(host_pages, suspend_pages),
            transfers=self.manager,
            ledger=TracingLedger(pages),
            hash_fn=hash_fn,
        )

    def settle(self) -> None:
        """Steps until no copy is in flight and none is begun."""
        for _ in range(10_000):
            self.cache.poll()
            if not self.manager.busy:
                return
            self.backend.step()
        raise AssertionError("copies without end")

    def store(self, tokens: Sequence[int], **how: Any) -> Lease:
        """A whole request, when its copies are over: everything but the last token has KV."""
        lease = self.cache.admit(tokens, **how)
        while lease.read_in_progress:
            self.backend.step()
            self.cache.poll()
        self.cache.finish(lease, len(tokens) - 1)
        return lease

    def check(self) -> None:
        """Counts and owners agree."""
        self.cache.check_invariants()


def prompt(first: int, pages: int) -> list[int]:
    """`pages` full pages and one token, unlike those of any other `first`."""
    return list(range(first * 1000, first * 1000 + pages * PAGE_SIZE + 1))
