"""EncoderCache: an output is computed once, however many ask for it at the same time.

Must not know how outputs are kept.
"""

import asyncio
import threading
import time

import pytest
import torch

from kvkeep.cache import TieredCache
from kvkeep.encoder import EncoderCache, EncoderFingerprint
from tests.encoder.test_encoder import PAGES, Encoder, digest, make_cache


@pytest.fixture
def cache() -> TieredCache:
    return make_cache()


@pytest.fixture
def encoder(cache: TieredCache) -> EncoderCache:
    return EncoderCache(cache, EncoderFingerprint("tower", revision="1", dtype="float32"))


def test_fifty_threads_compute_once(encoder: EncoderCache, cache: TieredCache) -> None:
    slow = Encoder((1500,))
    begin = threading.Barrier(50)
    outputs = []

    def compute() -> list[torch.Tensor]:
        time.sleep(0.02)
        return slow()

    def ask() -> None:
        begin.wait()
        outputs.append(encoder.get_or_compute(digest(1), compute))

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert slow.calls == 1
    assert all(slow.same(o.tensors) for o in outputs)
    assert cache.outputs().stats().held == 50
    for o in outputs:
        o.release()
    cache.check_invariants()


def test_an_exception_reaches_all_who_wait(encoder: EncoderCache) -> None:
    begin, calls, errors = threading.Barrier(10), [], []

    def broken() -> torch.Tensor:
        calls.append(1)
        time.sleep(0.05)
        raise RuntimeError("no picture")

    def ask() -> None:
        begin.wait()
        try:
            encoder.get_or_compute(digest(1), broken)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(errors) == 10
    assert len(calls) == 1


@pytest.mark.asyncio
async def test_fifty_tasks_compute_once(encoder: EncoderCache, cache: TieredCache) -> None:
    slow = Encoder((300,))

    async def compute() -> list[torch.Tensor]:
        await asyncio.sleep(0.01)
        return slow()

    outputs = await asyncio.gather(*(encoder.get_or_compute_async(digest(1), compute) for _ in range(50)))
    assert slow.calls == 1
    assert all(slow.same(o.tensors) for o in outputs)
    for o in outputs:
        o.release()
    again = await encoder.get_or_compute_async(digest(1), slow)  # not a coroutine function
    assert again.source == "gpu"
    again.release()
    cache.check_invariants()


@pytest.mark.asyncio
async def test_who_waits_goes_on_when_the_one_that_computes_is_cancelled(encoder: EncoderCache) -> None:
    slow, begun = Encoder((300,)), asyncio.Event()

    async def hangs() -> list[torch.Tensor]:
        begun.set()
        await asyncio.sleep(60)
        return []

    first = asyncio.create_task(encoder.get_or_compute_async(digest(1), hangs))
    await begun.wait()
    second = asyncio.create_task(encoder.get_or_compute_async(digest(1), slow))
    await asyncio.sleep(0)
    first.cancel()
    output = await second
    assert slow.same(output.tensors)
    output.release()
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.asyncio
async def test_who_waits_and_is_cancelled_stops_nobody(encoder: EncoderCache) -> None:
    slow, begun, go_on = Encoder((300,)), asyncio.Event(), asyncio.Event()

    async def compute() -> list[torch.Tensor]:
        begun.set()
        await go_on.wait()
        return slow()

    first = asyncio.create_task(encoder.get_or_compute_async(digest(1), compute))
    await begun.wait()
    second = asyncio.create_task(encoder.get_or_compute_async(digest(1), compute))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go_on.set()
    (await first).release()
    assert slow.calls == 1


def test_a_reset_while_it_is_computed(encoder: EncoderCache, cache: TieredCache) -> None:
    """Weights may have changed: what began before is for those who asked before, and is not kept."""
    old, new = Encoder((100,), seed=1), Encoder((100,), seed=2)

    def slow() -> list[torch.Tensor]:
        cache.reset()
        with encoder.get_or_compute(digest(1), new) as output:  # asks after the reset, and does not wait
            assert output.source == "computed"
            assert new.same(output.tensors)
        cache.reset()
        return old()

    with encoder.get_or_compute(digest(1), slow) as output:
        assert old.same(output.tensors)
    assert encoder.get(digest(1)) is None
    assert cache.stats().pages_free == PAGES
