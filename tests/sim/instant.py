"""Two tiers whose copies take no time, over a trace: how many pages each tier answers.

Must not count by itself: every hit is an admission's.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.names import TokenIds
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend, When

PAGE_NBYTES = 16


class Turn(NamedTuple):
    """A request: its prompt, and all of its tokens when it ends."""

    prompt: TokenIds
    final: TokenIds


class Hits(NamedTuple):
    """Pages matched in each tier."""

    gpu: int
    host: int


class Instant:
    """A cache without bytes, of `pages` GPU pages and `host_pages` below (None: one tier); copies are over at once."""

    def __init__(self, pages: int, host_pages: int | None, page_size: int) -> None:
        self.page_size = page_size
        self.backend = SimulatedBackend(page_nbytes=PAGE_NBYTES, when=When.EARLY)
        self.manager = TransferManager(
            self.backend, bytes_in_flight_max=1 << 40, queue_pages_max=1 << 30, deadline_s=1e9, clock=self.backend.clock
        )
        self.cache = TieredCache(
            CacheConfig(page_size=page_size, eviction="lru"),
            GpuPool.bookkeeping(pages),
            b"instant",
            host=CpuPool.bookkeeping(host_pages) if host_pages is not None else None,
            transfers=self.manager if host_pages is not None else None,
        )

    def serve(self, turn: Turn) -> None:
        """A whole request."""
        lease = self.cache.admit(turn.prompt)
        self.settle()
        self.cache.extend(lease, turn.final[len(turn.prompt) :])
        self.settle()
        self.cache.finish(lease, max(len(turn.final) - 1, len(turn.prompt)))
        self.settle()

    def settle(self) -> None:
        """Copies end, and those that follow from them, until there are none."""
        self.cache.poll()
        while self.manager.busy:
            while self.backend.step():
                pass
            self.cache.poll()

    @property
    def hits(self) -> Hits:
        """So far."""
        stats = self.cache.stats()
        host = stats.matched_host_tokens // self.page_size
        return Hits(stats.matched_tokens // self.page_size - host, host)


def hits_of(pages: int, host_pages: int | None, turns: Iterable[Turn], page_size: int) -> Hits:
    """What a trace hits in each tier."""
    world = Instant(pages, host_pages, page_size)
    for turn in turns:
        world.serve(turn)
    world.cache.check_invariants()
    return world.hits
