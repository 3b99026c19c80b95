"""Outputs and KV in an order that learns: what saves more seconds a byte stays.

Must not know how the order learns.
"""

import itertools

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.orders import make_order
from kvkeep.index.output import Tensor, encoder_identity
from kvkeep.tiers.gpu_pool import GpuPool
from tests.encoder.test_encoder import LAYOUT, digest


@pytest.mark.parametrize("slow", [0, 1])
def test_what_took_longer_to_compute_stays_longer(slow: int) -> None:
    """Of two outputs of one size and rhythm, an order that learns lets go of the one whose bytes save less."""
    pool = GpuPool.allocate(LAYOUT, 4)
    order = make_order("rhythm", 4, iter(range(1000)).__next__)
    cache = TieredCache(CacheConfig(page_size=16, eviction="lru"), pool, b"model", order=order)
    outputs, identity = cache.outputs(), encoder_identity(b"fp", b"")
    cache.prefilled(100, 0.1)
    for number in (0, 1):
        hold = outputs.reserve(identity, 2 * LAYOUT.page_nbytes)
        seconds = 2.0 if number == slow else 0.001
        outputs.store(
            hold, digest(number), (Tensor((2 * LAYOUT.page_nbytes,), "uint8", 0, 2 * LAYOUT.page_nbytes),), seconds
        )
        outputs.release(hold)
    cache.abort(cache.admit(range(16)))
    assert outputs.find(identity, digest(1 - slow)) is None
    assert outputs.find(identity, digest(slow)) is not None


def test_few_cold_pages_among_many_outputs_are_found() -> None:
    """300 small outputs that come back often, and 20 chains that do not: nearly all that leaves is of the chains."""
    now = itertools.count()
    order = make_order("rhythm", 60, lambda: float(next(now)))
    cache = TieredCache(CacheConfig(page_size=16, eviction="lru"), GpuPool.allocate(LAYOUT, 60), b"model", order=order)
    outputs, identity = cache.outputs(), encoder_identity(b"fp", b"")
    cache.prefilled(100, 0.001)
    for chain in range(20):
        cache.finish(cache.admit(range(100 * chain, 100 * chain + 33)), 32)
    for _ in range(4):
        for number in range(300):
            hold = outputs.find(identity, digest(number))
            if hold is None:
                hold = outputs.reserve(identity, 192)
                outputs.store(hold, digest(number), (Tensor((192,), "uint8", 0, 192),), 1.0)
            outputs.release(hold)
    before = outputs.stats().outputs
    for chain in range(100, 110):
        cache.abort(cache.admit(range(100 * chain, 100 * chain + 16 * (2 * (chain - 99)))))
    assert cache.stats().pages_evicted >= 15
    assert outputs.stats().outputs >= before - 5
