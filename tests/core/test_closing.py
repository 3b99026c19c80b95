"""A cache that is closed while a copy moves bytes that nobody can stop."""

import threading

import numpy as np

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.memory import HostMemory
from kvkeep.transfer.host import HostBackend, _Task
from kvkeep.transfer.manager import TransferManager
from tests.service.rigs import LAYOUT, PAGE_SIZE, PATIENCE_S, prompt


class Held(HostBackend):
    """Copies of one thread; one that has begun cannot be stopped, and goes on when it `may`."""

    may = threading.Event()

    def _copy(self, task: _Task) -> str | None:
        self.may.wait(PATIENCE_S)
        plan = task.running.job.plan
        for source, target in self._routes[plan.direction]:
            target[plan.targets[0]] = source[plan.sources[0]]
        return super()._copy(task)


def test_a_copy_that_outlives_the_end_keeps_its_pages_until_it_is_over() -> None:
    """Closing does not wait for it: who waited is told, its pages are nobody else's, and a later poll frees them."""
    memory = HostMemory(np.zeros((8, LAYOUT.page_nbytes), dtype=np.uint8), LAYOUT)
    host = CpuPool(LAYOUT, 16)
    assert host.memory is not None
    backend = Held(memory, host.memory, threads=1)
    manager = TransferManager(
        backend, bytes_in_flight_max=64 * LAYOUT.page_nbytes, queue_pages_max=64, deadline_s=PATIENCE_S
    )
    pool = GpuPool(8, LAYOUT, memory)
    cache = TieredCache(CacheConfig(page_size=PAGE_SIZE, eviction="lru"), pool, b"fp", host=host, transfers=manager)
    cache.finish(cache.admit(prompt(1, 6)), 24)
    lease = cache.admit(prompt(2, 6))  # the old pages drain to it
    draining = [page for page in lease.pages if cache._ledger.holders(page) == 2]
    assert draining
    cache.close(drain=False, timeout_s=0.0)
    assert lease.revoked
    other = cache.admit(prompt(3, 7 - len(draining)))
    assert not set(draining) & set(other.pages)
    cache.abort(other)
    cache.check_invariants()
    backend.may.set()
    for thread in backend._threads:
        thread.join(PATIENCE_S)
    cache.poll()
    cache.check_invariants()
    assert (0, False) == (cache.stats().pages_live, manager.busy)
