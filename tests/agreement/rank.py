"""One rank of a group as tests see it: pools with bytes, a cache (or none), copies that a seed makes late, and a
group over them.

Must not decide anything: what a rank knows of other ranks it has from its group.

Every page that the "model" writes has content that is a function of the rank and of all tokens up to its end, so that
a page which is not the prefix's is seen.
"""

import random
from array import array
from typing import Any

import numpy as np

from kvkeep.agreement.channel import Channel
from kvkeep.agreement.follower import Follower
from kvkeep.agreement.group import Group, GroupLease
from kvkeep.agreement.leader import GroupBackend, Leader
from kvkeep.agreement.minimum import Minimum
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.names import hash64
from kvkeep.index.orders import make_order
from kvkeep.lease import Lease
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import HostMemory
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend

PAGE_SIZE = 2
LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=2, page_size=PAGE_SIZE, dtype="float16")
FINGERPRINT = b"a model"


class Rank:
    """This rank of a group of `channel`; `mechanism` is "minimum" or "leader".

    pages, host_pages: of its pools; 0 host pages: one tier.
    seed: of what its copies do; other ranks have other ones.   fail_rate, stuck_rate: of its copies.
    deadline_s: of its copies, in the backend's time.
    settings: what it says at the start besides.
    """

    def __init__(
        self,
        channel: Channel,
        mechanism: str,
        *,
        pages: int = 12,
        host_pages: int = 0,
        seed: int = 0,
        fail_rate: float = 0.0,
        stuck_rate: float = 0.0,
        deadline_s: float = 1e9,
        eviction: str = "lru",
        **settings: Any,
    ) -> None:
        self.channel = channel
        self.number = channel.rank
        self.random = random.Random(f"{seed} {channel.rank}")
        self.memory = HostMemory(np.zeros((pages, LAYOUT.page_nbytes), dtype=np.uint8), LAYOUT)
        self.below = HostMemory(np.zeros((max(host_pages, 1), LAYOUT.page_nbytes), dtype=np.uint8), LAYOUT)
        self.backend = SimulatedBackend(
            self.memory, self.below, seed=self.random.randrange(1 << 30), fail_rate=fail_rate, stuck_rate=stuck_rate
        )
        self.now = 0.0  # seconds, for an order that learns: who wants some to pass says so
        self.cache: TieredCache | None = None
        self.others: list[Lease] = []  # of this rank alone, which the group knows nothing of
        leads = mechanism == "leader" and not channel.rank
        shared = GroupBackend(self.backend, channel.size) if leads else None
        if mechanism == "minimum" or leads:
            transfers = TransferManager(
                shared or self.backend, bytes_in_flight_max=1 << 20, queue_pages_max=1 << 10, deadline_s=deadline_s,
                clock=self.backend.clock,
            )  # fmt: skip
            config = CacheConfig(page_size=PAGE_SIZE, eviction=eviction, ghosts=False)  # type: ignore[arg-type]
            host = CpuPool.bookkeeping(host_pages) if host_pages else None
            order = make_order(config.eviction, pages, now=lambda: self.now, seed=self.random.randrange(1 << 30))
            self.cache = TieredCache(
                config, GpuPool.bookkeeping(pages), FINGERPRINT, host=host, transfers=transfers if host else None,
                order=order,
            )  # fmt: skip
        how: Minimum | Leader | Follower
        if mechanism == "minimum":
            assert self.cache is not None
            how = self.minimum = Minimum(self.cache)
        elif leads:
            assert self.cache is not None
            how = Leader(self.cache, shared if host_pages else None, host_pages)
        else:
            how = Follower(PAGE_SIZE, pages, self.backend if host_pages else None, host_pages)
        self.group = Group(channel, how, FINGERPRINT, settings)

    # ------------------------------------------------------------------ what a model does

    def write(self, lease: GroupLease, tokens: "array[int]", first: int, last: int) -> None:
        """Computes positions `first` to `last`: their bytes are those of this rank and of all tokens up to them."""
        for at in range(first, last):
            page, offset = lease.pages[at // PAGE_SIZE], at % PAGE_SIZE
            self.memory.rows[page].view(np.uint64)[offset] = self.expected(tokens, at)

    def wrong(self, lease: GroupLease, tokens: "array[int]", last: int) -> list[int]:
        """Positions below `last` whose bytes are not those of their prefix."""
        rows = self.memory.rows
        return [
            at
            for at in range(last)
            if self.expected(tokens, at) != int(rows[lease.pages[at // PAGE_SIZE]].view(np.uint64)[at % PAGE_SIZE])
        ]

    def expected(self, tokens: "array[int]", at: int) -> int:
        """What stands at a position."""
        return hash64(tokens[: at + 1].tobytes(), self.number)

    def step_copies(self, count: int) -> None:
        """Lets copies of this rank go on by `count` moves."""
        for _ in range(count):
            self.backend.step()

    def check_invariants(self) -> None:
        """Of its cache, if it has one."""
        if self.cache is not None:
            self.cache.check_invariants()
