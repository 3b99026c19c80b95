"""Admissions that move pages between the tiers, over a real cache without bytes: the time under its lock.

Must not know how samples become a report.
"""

from threading import Lock

import numpy as np

from bench._copies import Sample
from bench._measure import now_ns
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend, When

PAGE = 128


class TimedLock:
    """A lock that knows for how long it was held, all together."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since_ns = 0
        self.held_ns = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since_ns = now_ns()

    def __exit__(self, *_: object) -> None:
        self.held_ns += now_ns() - self._since_ns
        self._lock.release()


class Tiers:
    """A cache of two tiers whose lock is timed.   gpu_pages, host_pages: of the tiers."""

    def __init__(self, gpu_pages: int, host_pages: int) -> None:
        self._backend = SimulatedBackend(page_nbytes=1, when=When.EARLY)
        self._transfers = TransferManager(
            self._backend, bytes_in_flight_max=host_pages, queue_pages_max=host_pages, deadline_s=1e9
        )
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE, eviction="lru"),
            GpuPool.bookkeeping(gpu_pages),
            b"bench",
            host=CpuPool.bookkeeping(host_pages),
            transfers=self._transfers,
        )
        self.lock = self.cache._lock = TimedLock()  # type: ignore[assignment]

    def settle(self) -> None:
        """Ends all copies, and those that they make possible."""
        while self._transfers.busy:
            self._backend.step()
            self.cache.poll()


def admissions(pages: int, times: int) -> Sample:
    """Admits a prompt whose `pages` pages are in host memory only, into a pool with room: microseconds under the lock.

    From the prompt's token ids to the load that is handed to the transfer manager.
    """
    tiers = Tiers(pages + 8, 4 * pages)
    cache = tiers.cache
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 50_000, pages * PAGE + 1, dtype=np.int32)
    filler = rng.integers(0, 50_000, (pages + 8) * PAGE, dtype=np.int32)

    def push_out() -> None:
        """A request that fills the pool and stores nothing: what was cached there goes down, or has a copy there."""
        lease = cache.admit(filler, store=False)
        tiers.settle()
        cache.abort(lease)

    first = cache.admit(prompt)
    cache.finish(first, pages * PAGE)
    push_out()

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            tiers.lock.held_ns = 0
            lease = cache.admit(prompt)
            out.append(tiers.lock.held_ns / 1e3)
            assert lease.loaded_len == pages * PAGE, lease.loaded_len
            tiers.settle()
            cache.finish(lease, pages * PAGE)
            push_out()
        return out

    return sample


def demotions(runs: int, times: int) -> Sample:
    """Admits a prompt for which `runs` cached chains of a page, without host copies, go down: microseconds."""
    tiers = Tiers(runs, 4 * runs)
    cache = tiers.cache
    rng = np.random.default_rng(4)
    chains = rng.integers(0, 50_000, (runs, PAGE), dtype=np.int32)
    filler = rng.integers(0, 50_000, runs * PAGE, dtype=np.int32)

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            for chain in chains:
                cache.finish(cache.admit(chain), PAGE)
            tiers.lock.held_ns = 0
            lease = cache.admit(filler, store=False)
            out.append(tiers.lock.held_ns / 1e3)
            assert cache.stats().host_pages_total - cache.stats().host_pages_free == runs
            tiers.settle()
            cache.abort(lease)
            cache.reset()
        return out

    return sample
