"""The case of an admission whose prefix lies in host memory, over a real cache without bytes.

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


def admissions(pages: int, times: int) -> Sample:
    """Admits a prompt whose `pages` pages are in host memory only, into a pool with room: microseconds under the lock.

    From the prompt's token ids to the load that is handed to the transfer manager.
    """
    backend = SimulatedBackend(page_nbytes=1, when=When.EARLY)
    transfers = TransferManager(backend, bytes_in_flight_max=4 * pages, queue_pages_max=4 * pages, deadline_s=1e9)
    cache = TieredCache(
        CacheConfig(page_size=PAGE),
        GpuPool.bookkeeping(pages + 8),
        b"bench",
        host=CpuPool.bookkeeping(4 * pages),
        transfers=transfers,
    )
    lock = cache._lock = TimedLock()  # type: ignore[assignment]
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 50_000, pages * PAGE + 1, dtype=np.int32)
    filler = rng.integers(0, 50_000, (pages + 8) * PAGE, dtype=np.int32)

    def settle() -> None:
        while transfers.busy:
            backend.step()
            cache.poll()

    def push_out() -> None:
        """A request that fills the pool and stores nothing: what was cached there goes down, or has a copy there."""
        lease = cache.admit(filler, store=False)
        settle()
        cache.abort(lease)

    first = cache.admit(prompt)
    cache.finish(first, pages * PAGE)
    push_out()

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            lock.held_ns = 0
            lease = cache.admit(prompt)
            out.append(lock.held_ns / 1e3)
            assert lease.loaded_len == pages * PAGE, lease.loaded_len
            settle()
            cache.finish(lease, pages * PAGE)
            push_out()
        return out

    return sample
