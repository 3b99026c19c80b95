"""EncoderCache over two tiers: outputs go down and come back up bit for bit, beside KV pages.

Must not know how copies are made: the threads of the host backend make them.
"""

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.encoder import EncoderCache
from kvkeep.errors import OutOfPages
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.tracing import TracingLedger
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager
from tests.encoder import test_encoder
from tests.encoder.test_encoder import digest, put

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=8, page_size=16)  # 4,096 bytes a page
PAGES, HOST_PAGES = 8, 24


class Encoder(test_encoder.Encoder):
    """One that takes long enough for loading to be faster."""

    def __call__(self) -> list[torch.Tensor]:
        time.sleep(0.03)
        return super().__call__()


@pytest.fixture
def cache() -> Iterator[TieredCache]:
    pool, host = GpuPool.allocate(LAYOUT, PAGES), CpuPool(LAYOUT, HOST_PAGES, 4)
    assert pool.memory is not None
    assert host.memory is not None
    manager = TransferManager(
        HostBackend(pool.memory, host.memory), bytes_in_flight_max=1 << 30, queue_pages_max=1000, deadline_s=30.0
    )
    cache = TieredCache(
        CacheConfig(page_size=16, eviction="lru"), pool, b"model", host=host, transfers=manager,
        ledger=TracingLedger(PAGES), host_ledger=TracingLedger(HOST_PAGES), parking_ledger=TracingLedger(4),
    )  # fmt: skip
    yield cache
    cache.check_invariants()
    cache.close(drain=True, timeout_s=10)
    cache.check_invariants()


@pytest.fixture
def encoder(cache: TieredCache) -> EncoderCache:
    return EncoderCache(cache, b"fp")


def settle(cache: TieredCache) -> None:
    """Copies that run, or that cleaning ahead wants, are over."""
    assert cache.transfers is not None
    cache.poll()
    while cache.transfers.busy:
        cache.poll()
        time.sleep(1e-4)
        cache.check_invariants()


def push_out(cache: TieredCache) -> None:
    """Prompts of two pages each come and go until nothing else is on the GPU."""
    for i in range(PAGES):
        lease = cache.admit(range(1000 * i, 1000 * i + 31))
        settle(cache)
        assert not lease.revoked
        cache.finish(lease, 31)
        settle(cache)


SIZES = [(10,), (500,), (1024,), (1500,), (2048,), (2500,), (3 * 1024 + 1000,)]


@pytest.mark.parametrize("shape", SIZES)
def test_down_and_up_again(cache: TieredCache, encoder: EncoderCache, shape: tuple[int, ...]) -> None:
    compute = Encoder(shape)
    put(encoder, 1, compute)
    for i in range(2, 5):
        put(encoder, i, Encoder((1200,), seed=i))  # neighbours in slotted pages
        settle(cache)
    push_out(cache)
    stats = cache.outputs().stats()
    assert (stats.outputs, stats.host_outputs) == (0, 4)
    assert cache.pool.memory is not None
    cache.pool.memory.poison(range(PAGES))
    with encoder.get_or_compute(digest(1), compute) as output:
        assert output.source == "cpu"
        assert compute.same(output.tensors)
    for i in range(2, 5):
        expected = Encoder((1200,), seed=i)
        with encoder.get_or_compute(digest(i), expected) as output:
            assert output.source == "cpu"
            assert expected.same(output.tensors)
    assert compute.calls == 1


def test_outputs_and_pages_make_room_for_each_other(cache: TieredCache, encoder: EncoderCache) -> None:
    outputs = [Encoder((shape[0],), seed=i) for i, shape in enumerate(SIZES)]
    for turn in range(40):
        key = turn % len(outputs)
        with encoder.get_or_compute(digest(key), outputs[key]) as output:
            assert outputs[key].same(output.tensors)
        base = 1000 * (turn % 3)
        lease = cache.admit(range(base, base + 16 * (2 + turn % 4)))
        while lease.read_in_progress:
            cache.poll()
        assert not lease.revoked
        cache.finish(lease, lease.length)
        settle(cache)
    assert sum(compute.calls for compute in outputs) < 40


def test_prefetch_brings_it_up(cache: TieredCache, encoder: EncoderCache) -> None:
    compute = Encoder((2500,))
    put(encoder, 1, compute)
    push_out(cache)
    assert cache.outputs().stats().outputs == 0
    assert encoder.prefetch(digest(1))
    settle(cache)
    with encoder.get_or_compute(digest(1), compute) as output:
        assert output.source == "gpu"
        assert compute.same(output.tensors)
    assert not encoder.prefetch(digest(2))


def test_an_output_of_torch_dtypes(encoder: EncoderCache) -> None:
    for i, dtype in enumerate((torch.bool, torch.int64, torch.float64, torch.complex64)):
        values = torch.ones(5, dtype=dtype)
        put(encoder, i, partial(torch.clone, values))
        found = encoder.get(digest(i))
        assert found is not None
        assert torch.equal(found.tensor, values)
        found.release()


def test_what_is_computed_faster_is_not_loaded(cache: TieredCache, encoder: EncoderCache) -> None:
    quick = test_encoder.Encoder((2048,))
    put(encoder, 1, quick)
    push_out(cache)
    cache.abort(cache.admit(range(31)))
    settle(cache)
    cache._costs.loaded(1, 60.0)  # a link so slow that no pause of this machine makes computing slower
    with encoder.get_or_compute(digest(1), quick) as output:
        assert output.source == "computed"
    assert quick.calls == 2


def test_a_page_whose_slot_is_being_copied_counts_as_in_flight(cache: TieredCache, encoder: EncoderCache):
    """Who finds no page is told that one will be free when a copy of the output in it is over, and waits for that."""
    put(encoder, 1, lambda: torch.ones(100))
    lease = cache.admit(range((PAGES - 1) * 16))
    cache.poll()  # few pages are free: the output is copied down ahead of need
    with pytest.raises(OutOfPages) as refused:
        cache.extend(lease, room=16)
    assert 1 == refused.value.in_flight
    settle(cache)
    cache.extend(lease, room=16)
    cache.abort(lease)
