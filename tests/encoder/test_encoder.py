"""EncoderCache over one tier: outputs come back bit for bit, are computed once, and leave when room is short."""

from collections.abc import Callable

import pytest
import torch

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.encoder import EncoderCache, EncoderFingerprint
from kvkeep.errors import BadInput, OutOfPages
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.tracing import TracingLedger

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=8, page_size=16)  # 4,096 bytes a page
PAGES = 12


def make_cache(pages: int = PAGES) -> TieredCache:
    pool = GpuPool.allocate(LAYOUT, pages)
    return TieredCache(CacheConfig(page_size=16, eviction="lru"), pool, b"model", ledger=TracingLedger(pages))


@pytest.fixture
def cache() -> TieredCache:
    return make_cache()


@pytest.fixture
def encoder(cache: TieredCache) -> EncoderCache:
    return EncoderCache(cache, EncoderFingerprint("tower", revision="1", dtype="float32"))


def digest(n: int) -> bytes:
    return n.to_bytes(16, "big")


class Encoder:
    """Something to compute; counts how often it is asked."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.tensors = [torch.randn(s, generator=made).to(dtype) for s in shapes]
        self.calls = 0

    def __call__(self) -> list[torch.Tensor]:
        self.calls += 1
        return self.tensors

    def same(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return len(tensors) == len(self.tensors) and all(
            a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, self.tensors, strict=True)
        )


def put(encoder: EncoderCache, key: int, compute: Callable[[], object]) -> None:
    encoder.get_or_compute(digest(key), compute).release()


@pytest.mark.parametrize("elements", [1, 10, 900, 1024, 1025, 1500, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_a_hit_gives_the_same_bits(
    encoder: EncoderCache, cache: TieredCache, elements: int, dtype: torch.dtype
) -> None:
    compute = Encoder((elements,), dtype=dtype)
    with encoder.get_or_compute(digest(1), compute) as first:
        assert first.source == "computed"
        assert compute.same(first.tensors)
    with encoder.get_or_compute(digest(1), compute) as again:
        assert again.source == "gpu"
        assert compute.same(again.tensors)
    assert compute.calls == 1
    cache.check_invariants()


def test_many_tensors(encoder: EncoderCache) -> None:
    compute = Encoder((3, 5), (7,), (1, 2, 300), (900,))
    put(encoder, 1, compute)
    with encoder.get_or_compute(digest(1), compute) as output:
        assert compute.same(output.tensors)
    assert compute.calls == 1


def test_an_output_in_one_piece_is_a_view(encoder: EncoderCache, cache: TieredCache) -> None:
    memory = cache.pool.kv
    span = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    for key, elements in ((1, 500), (2, 2048)):  # a slot; two pages
        put(encoder, key, Encoder((elements,)))
        with encoder.get_or_compute(digest(key), Encoder((1,))) as output:
            assert output.tensor.data_ptr() in span


def test_other_keys_fingerprints_and_salts_share_nothing(cache: TieredCache) -> None:
    a, b = Encoder((10,), seed=1), Encoder((10,), seed=2)
    put(EncoderCache(cache, b"fp1"), 1, a)
    for encoder, key in (
        (EncoderCache(cache, b"fp1"), digest(2)),
        (EncoderCache(cache, b"fp2"), digest(1)),
        (EncoderCache(cache, b"fp1", salt=b"tenant"), digest(1)),
        (EncoderCache(cache, EncoderFingerprint("fp1")), digest(1)),
    ):
        assert encoder.get(key) is None
        with encoder.get_or_compute(key, b) as output:
            assert b.same(output.tensors)
    with EncoderCache(cache, b"fp1").get_or_compute(digest(1), b) as output:
        assert a.same(output.tensors)


def test_token_ids_are_keys_of_their_own(encoder: EncoderCache) -> None:
    compute = Encoder((4,))
    encoder.get_or_compute([1, 2, 3, 4], compute).release()
    ids_as_bytes = torch.tensor([1, 2, 3, 4], dtype=torch.int32).numpy().tobytes()
    assert encoder.get(ids_as_bytes) is None
    assert encoder.get([1, 2, 3]) is None
    found = encoder.get([1, 2, 3, 4])
    assert found is not None
    found.release()


def always_7(raw: object, seed: int = 0) -> int:
    return 7


def test_names_that_collide_do_not_mix_outputs() -> None:
    pool = GpuPool.allocate(LAYOUT, PAGES)
    cache = TieredCache(CacheConfig(page_size=16, eviction="lru"), pool, b"model", hash_fn=always_7)
    encoder = EncoderCache(cache, b"fp")
    computed = [Encoder((50,), seed=i) for i in range(5)]
    for i, compute in enumerate(computed):
        put(encoder, i, compute)
    for i, compute in enumerate(computed):
        with encoder.get_or_compute(digest(i), compute) as output:
            assert compute.same(output.tensors)
        assert compute.calls == 1
    cache.check_invariants()


def test_a_chain_of_tokens_is_no_output(cache: TieredCache, encoder: EncoderCache) -> None:
    lease = cache.admit(range(33))
    cache.finish(lease, 33)
    put(encoder, 1, Encoder((3000,)))
    lease = cache.admit(range(33))
    assert lease.matched_len == 32
    cache.finish(lease, 33)
    cache.check_invariants()


# ---------------------------------------------------------------------- expectations


def test_another_shape_than_expected_is_a_miss(encoder: EncoderCache, cache: TieredCache) -> None:
    put(encoder, 1, Encoder((320, 2)))
    right = Encoder((1088, 2))
    with encoder.get_or_compute(digest(1), right, expect=(((1088, 2), "float32"),)) as output:
        assert right.same(output.tensors)
    assert right.calls == 1
    assert cache.outputs().stats().mismatches == 1
    with pytest.raises(BadInput, match="320"):
        encoder.get_or_compute(digest(2), Encoder((320, 2)), expect=(((1088, 2), "float32"),))
    assert encoder.get(digest(2)) is None
    cache.check_invariants()


def test_an_encoder_that_gives_another_shape_than_last_time(encoder: EncoderCache, cache: TieredCache) -> None:
    put(encoder, 1, Encoder((10,)))
    encoder.discard(digest(1))
    with pytest.raises(BadInput, match=r"float32\[11\].*float32\[10\]"):
        encoder.get_or_compute(digest(1), Encoder((11,)))
    assert encoder.get(digest(1)) is None
    assert cache.stats().pages_free == PAGES


def test_what_raises_is_not_kept(encoder: EncoderCache, cache: TieredCache) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("no picture")

    with pytest.raises(RuntimeError, match="no picture"):
        encoder.get_or_compute(digest(1), broken)
    compute = Encoder((4,))
    put(encoder, 1, compute)
    assert compute.calls == 1
    cache.check_invariants()


@pytest.mark.parametrize("given", ["text", [], torch.empty(0), [torch.ones(2), torch.empty(0, 3)], None, {"a": 1}])
def test_what_is_no_tensor(encoder: EncoderCache, cache: TieredCache, given: object) -> None:
    with pytest.raises(BadInput, match="the encoder gave"):
        encoder.get_or_compute(digest(1), lambda: given)
    assert cache.stats().pages_free == PAGES


def test_bad_keys(encoder: EncoderCache) -> None:
    for key in (b"short", [], [-1]):
        with pytest.raises(BadInput):
            encoder.get_or_compute(key, Encoder((4,)))
    with pytest.raises(BadInput, match="fingerprint"):
        EncoderCache(make_cache(), "fp")  # type: ignore[arg-type]
    bare = TieredCache(CacheConfig(page_size=16, eviction="lru"), GpuPool.bookkeeping(4), b"model")
    with pytest.raises(BadInput, match="memory"):
        EncoderCache(bare, b"fp")


def test_larger_than_the_pool(encoder: EncoderCache, cache: TieredCache) -> None:
    with pytest.raises(BadInput, match="the pool has 12"):
        encoder.get_or_compute(digest(1), Encoder((PAGES * 1024 + 1,)))
    put(encoder, 2, Encoder((PAGES * 1024,)))
    assert cache.stats().pages_free == 0
    cache.check_invariants()


# ---------------------------------------------------------------------- holding and leaving


def test_occurrences_are_counted(encoder: EncoderCache, cache: TieredCache) -> None:
    put(encoder, 1, Encoder((1024,)))
    first = encoder.get_or_compute(digest(1), Encoder((1024,)))
    second = encoder.get_or_compute(digest(1), Encoder((1024,)))
    assert cache.outputs().stats().held == 2
    first.release()
    first.release()
    assert cache.outputs().stats().held == 1
    with pytest.raises(OutOfPages):
        cache.admit(range(PAGES * 16))
    second.release()
    cache.abort(cache.admit(range(PAGES * 16)))
    assert encoder.get(digest(1)) is None
    cache.check_invariants()


def test_a_held_output_survives_everything(encoder: EncoderCache, cache: TieredCache) -> None:
    compute = Encoder((1500,))
    put(encoder, 1, compute)
    held = encoder.get_or_compute(digest(1), compute)
    for i in range(2, 40):
        put(encoder, i, Encoder((1024,), seed=i))
    cache.finish(cache.admit(range(16 * 9)), 16 * 9)
    cache.reset()
    assert encoder.get(digest(1)) is None  # forgotten, and still there for who holds it
    for i in range(2, 40):
        put(encoder, i, Encoder((1024,), seed=i))
    assert compute.same(held.tensors)
    held.release()
    cache.check_invariants()
    cache.reset()
    assert cache.stats().pages_free == PAGES


def test_the_least_recent_leaves_first_and_whole(encoder: EncoderCache, cache: TieredCache) -> None:
    for i in range(4):
        put(encoder, i, Encoder((2 * 1024 + 500,), seed=i))  # two pages and a slot of half a page
    with encoder.get_or_compute(digest(0), Encoder((1,))) as output:
        assert output.source == "gpu"
    cache.finish(cache.admit(range(16 * 4)), 16 * 4)
    assert encoder.get(digest(1)) is None
    for i in (0, 2, 3):
        found = encoder.get(digest(i))
        assert found is not None, i
        found.release()
    cache.check_invariants()


def test_room_is_made_both_ways(encoder: EncoderCache, cache: TieredCache) -> None:
    cache.finish(cache.admit(range(16 * PAGES - 1)), 16 * PAGES - 1)
    assert cache.stats().pages_free == 1
    for i in range(3):
        put(encoder, i, Encoder((1024,), seed=i))
    assert cache.stats().pages_cached == PAGES
    lease = cache.admit(range(16 * PAGES - 1))
    assert lease.matched_len == 0 + 9 * 16
    cache.finish(lease, 16 * PAGES - 1)
    assert encoder.get(digest(0)) is None
    cache.check_invariants()


def test_no_room_for_an_output(encoder: EncoderCache, cache: TieredCache) -> None:
    lease = cache.admit(range(16 * PAGES))
    compute = Encoder((10,))
    with encoder.get_or_compute(digest(1), compute) as output:
        assert compute.same(output.tensors)
    assert encoder.get(digest(1)) is None
    assert cache.outputs().stats().refused == 1
    cache.abort(lease)
    cache.check_invariants()


def test_slots_of_a_page_leave_one_by_one(encoder: EncoderCache, cache: TieredCache) -> None:
    for i in range(8 * PAGES):
        put(encoder, i, Encoder((128,), seed=i))  # eight a page
    assert cache.stats().pages_cached == PAGES
    put(encoder, 1000, Encoder((128,)))
    stats = cache.outputs().stats()
    assert stats.outputs == 8 * PAGES
    cache.check_invariants()
    cache.abort(cache.admit(range(16 * PAGES)))
    assert cache.outputs().stats().outputs == 0
    assert cache.stats().pages_free == PAGES


def test_many_outputs_leave_at_once(encoder: EncoderCache, cache: TieredCache) -> None:
    """Pages and slots of several outputs leave in one batch: no slot is handed out as a page."""
    computed = [Encoder((1024 + 100 * i,), seed=i) for i in range(1, 9)]  # a page and a slot each
    for i, compute in enumerate(computed):
        put(encoder, i, compute)
    large = Encoder((8 * 1024,))
    put(encoder, 9, large)
    cache.check_invariants()
    assert cache.outputs().stats().outputs < 6
    for i, compute in [*enumerate(computed), (9, large)]:
        found = encoder.get(digest(i))
        if found is not None:
            with found:
                assert compute.same(found.tensors)


def test_reset_forgets_many_outputs(encoder: EncoderCache, cache: TieredCache) -> None:
    for i in range(5):
        put(encoder, i, Encoder((1024 + 100 * i,)))
    cache.reset()
    cache.check_invariants()
    assert cache.stats().pages_free == PAGES
    for i in range(5):
        put(encoder, i, Encoder((1024 + 100 * i,)))
    cache.check_invariants()


def test_reset_forgets_outputs(encoder: EncoderCache, cache: TieredCache) -> None:
    put(encoder, 1, Encoder((1500,)))
    report = cache.reset()
    assert report.pages_freed == 2
    assert encoder.get(digest(1)) is None
    assert cache.stats().pages_free == PAGES
