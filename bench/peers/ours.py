"""kvkeep's `TieredCache`, to be asked beside the others: `python -m bench.peers.ours`.

Must not know the others.

As it is by default: pages are verified, eviction learns, ghosts are counted.  `kvkeep_lru` has exact LRU and no ghosts,
as the others have.  The clock of the eviction order is a second a request: pauses between requests are the bench's.
"""

import sys
from typing import Any

from bench._workload import Ids, Turn
from bench.peers.plans import PAGE
from bench.peers.wire import answers_apart, serve
from kvkeep import __version__
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.orders import make_order
from kvkeep.replay.link import Link
from kvkeep.replay.seat import TraceClock
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager

Prepared = tuple[Ids, Ids, int]


class Ours:
    """A `TieredCache` without bytes; copies between its tiers take no time."""

    def __init__(self, variant: str, tokens: int, host_tokens: int) -> None:
        lru = variant == "kvkeep_lru"
        config = CacheConfig(page_size=PAGE, eviction="lru" if lru else "rhythm", ghosts=not lru)
        self._clock = TraceClock()
        self._transfers: TransferManager | None = None
        if host_tokens:
            link = Link(self._clock, PAGE, None)
            self._transfers = TransferManager(
                link, bytes_in_flight_max=1 << 40, queue_pages_max=1 << 30, deadline_s=1e9, clock=self._clock
            )
        self.cache = TieredCache(
            config,
            GpuPool.bookkeeping(tokens // PAGE),
            b"bench peers",
            host=CpuPool.bookkeeping(host_tokens // PAGE) if host_tokens else None,
            transfers=self._transfers,
            order=make_order(config.eviction, tokens // PAGE, self._clock),
        )

    def prepare(self, ids: Ids, turn: Turn) -> Prepared:
        """Slices of the session."""
        self._clock.now_s += 1.0
        return ids[: turn.prompt_len], ids[turn.prompt_len : turn.final_len], turn.kv_len

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """Admission, the answer's tokens, the end; and the copies that follow, where there are two tiers."""
        prompt, answer, kv_len = prepared
        cache = self.cache
        lease = cache.admit(prompt)
        loaded = lease.loaded_len
        if self._transfers is not None:
            self._settle(self._transfers)
        if len(answer):
            cache.extend(lease, answer)
        cache.finish(lease, kv_len)
        if self._transfers is not None:
            self._settle(self._transfers)
        return lease.matched_len - loaded, loaded

    def _settle(self, transfers: TransferManager) -> None:
        while transfers.busy:
            self.cache.poll()

    def close(self) -> None:
        """The invariants, and that nothing is live."""
        self.cache.check_invariants()
        assert self.cache.stats().pages_live == 0


class OursAdapter:
    """`Adapter` of this package."""

    version = __version__
    variants = ("kvkeep", "kvkeep_lru")

    def form(self, ids: Ids) -> Ids:
        """An int32 array."""
        return ids

    def open(self, variant: str, tokens: int, host_tokens: int) -> Any:
        """See `Adapter`."""
        return Ours(variant, tokens, host_tokens)


if __name__ == "__main__":
    answers = answers_apart()
    serve(OursAdapter(), answers)
    sys.exit(0)
