"""How many pages others could have if a lease ended.

Must not know an engine.
"""

from collections.abc import Callable

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager

LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=2, page_size=2)


def one_tier() -> TieredCache:
    return TieredCache(CacheConfig(page_size=2), GpuPool.allocate(LAYOUT, 8), b"fp")


def two_tiers() -> TieredCache:
    pool, host = GpuPool.allocate(LAYOUT, 8), CpuPool(LAYOUT, 8)
    assert pool.memory is not None and host.memory is not None
    backend = HostBackend(pool.memory, host.memory, threads=1)
    transfers = TransferManager(backend, bytes_in_flight_max=2**20, queue_pages_max=8, deadline_s=5.0)
    return TieredCache(CacheConfig(page_size=2), pool, b"fp", host=host, transfers=transfers)


@pytest.mark.parametrize("make", [one_tier, two_tiers])
def test_exclusive_pages(make: Callable[[], TieredCache]) -> None:
    """Pages that another live request holds do not count; cached ones that only this one holds do."""
    cache = make()
    first = cache.admit([1, 2, 3, 4, 5])
    cache.seal(first, 5)
    assert 3 == cache.exclusive_pages(first)
    second = cache.admit([1, 2, 3, 4, 6])
    assert [1, 1] == [cache.exclusive_pages(lease) for lease in (first, second)]
    cache.finish(first, 5)
    assert 3 == cache.exclusive_pages(second)
    cache.abort(second)
    cache.close(drain=False, timeout_s=1.0)
    cache.check_invariants()
