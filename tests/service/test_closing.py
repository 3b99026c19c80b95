"""The end of a service, as wished or not: who waits is told, copies are over, nothing is left.

Must not step copies: they run in threads.
"""

import asyncio

import pytest

from kvkeep.errors import InvariantViolation, ServiceClosed
from kvkeep.lease import Lease
from kvkeep.service import KVCacheService
from kvkeep.telemetry.snapshot import CacheKey
from tests.service.rigs import KEY, PATIENCE_S, Client, Node, assert_clean, prompt, until_waiting
from tests.transfer.pools import Flag


@pytest.mark.asyncio
async def test_closing_drains(node: Node) -> None:
    """A drain waits for live requests and their copies; those who wait for room are told, and nobody is admitted."""
    async with asyncio.timeout(PATIENCE_S):
        async with KVCacheService() as service:
            service.add(KEY, node.cache)
            client, tokens = Client(node, KEY, b"", 0), prompt(0, 20)
            lease = await service.admit(KEY, tokens)
            waiting = asyncio.create_task(service.admit(KEY, prompt(1, 20)))
            await until_waiting(service, 1)
            closing = asyncio.create_task(service.aclose(drain=True))
            with pytest.raises(ServiceClosed):
                await waiting
            with pytest.raises(ServiceClosed):
                await service.admit(KEY, prompt(2, 1))
            with pytest.raises(ServiceClosed):
                service.add(CacheKey("late"), node.cache)
            client.prefill(lease, tokens)
            assert not closing.done()
            lease.finish(len(tokens) - 1)
            await closing
            await service.aclose(drain=False)  # again: nothing happens
    assert_clean(node)
    assert 20 == node.cache.stats().pages_cached


@pytest.mark.asyncio
async def test_closing_cancels(node: Node) -> None:
    """Without a drain leases end at once, wherever their tasks are, and copies are over when the service is."""
    async with asyncio.timeout(PATIENCE_S), KVCacheService() as service:
        service.add(KEY, node.cache)
        for i in range(6):
            await Client(node, KEY, b"", i).run(service, prompt(i, 6), 2)
        node.cache.fence(Flag())  # copies that begin from now on wait for it
        loading = await service.admit(KEY, prompt(0, 6))
        ready = asyncio.create_task(loading.ready())
        holder = await service.admit(KEY, prompt(9, 16))
        waiting = asyncio.create_task(service.admit(KEY, prompt(8, 20)))
        await until_waiting(service, 1)
        await service.aclose(drain=False)
        for task in (ready, waiting):
            with pytest.raises(ServiceClosed):
                await task
        with pytest.raises(ServiceClosed, match="before the lease had ended"):
            holder.extend([1])
    assert_clean(node)


@pytest.mark.asyncio
async def test_a_drain_has_an_end(node: Node) -> None:
    """Leases that do not end in time are aborted."""
    async with asyncio.timeout(PATIENCE_S):
        service = await KVCacheService().__aenter__()
        service.add(KEY, node.cache)
        lease = await service.admit(KEY, prompt(0, 3))
        await service.aclose(drain=True, timeout_s=0.02)
    assert isinstance(lease.ended, ServiceClosed)
    assert_clean(node)


@pytest.mark.asyncio
async def test_closing_goes_on_when_its_caller_is_cancelled(node: Node) -> None:
    """A cancelled `aclose` leaves the service closing; the next one waits for the same end."""
    async with asyncio.timeout(PATIENCE_S):
        service = await KVCacheService().__aenter__()
        service.add(KEY, node.cache)
        lease = await service.admit(KEY, prompt(0, 3))
        first = asyncio.create_task(service.aclose(drain=True))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(service.aclose(drain=False))
        await asyncio.sleep(0.01)
        assert not second.done()
        lease.abort()
        await second
    assert_clean(node)


def test_a_loop_that_ends_takes_the_service_along() -> None:
    """`asyncio.run` that is left while clients wait: nothing hangs, the copies are over, nothing is held."""
    node = Node()

    async def client(service: KVCacheService, number: int) -> None:
        async with await service.admit(KEY, prompt(number, 20)) as lease:
            await lease.ready()
            await asyncio.sleep(3600)

    async def serve() -> None:
        async with KVCacheService() as service:
            service.add(KEY, node.cache)
            await asyncio.gather(*(client(service, i) for i in range(3)))

    async def main() -> None:
        asyncio.create_task(serve())  # noqa: RUF006 (left to itself on purpose)
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert_clean(node)


@pytest.mark.asyncio
async def test_an_error_in_the_poller_reaches_everybody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits, whoever asks from then on, and whoever closes, is told what went wrong."""
    service = await KVCacheService().__aenter__()
    service.add(KEY, node.cache)
    for i in range(6):
        await Client(node, KEY, b"", i).run(service, prompt(i, 6), 2)
    node.cache.fence(Flag())  # copies that begin from now on wait for it
    loading = await service.admit(KEY, prompt(0, 6))
    ready = asyncio.create_task(loading.ready())
    holder = await service.admit(KEY, prompt(9, 16))
    waiting = asyncio.create_task(service.admit(KEY, prompt(8, 20)))
    await asyncio.sleep(0)

    def broken() -> int:
        raise InvariantViolation("page 7 freed twice")

    monkeypatch.setattr(node.cache, "poll", broken)
    for task in (ready, waiting):
        with pytest.raises(InvariantViolation, match="page 7 freed twice"):
            await asyncio.wait_for(task, PATIENCE_S)
    with pytest.raises(InvariantViolation, match="page 7"):
        holder.extend([1])
    with pytest.raises(InvariantViolation, match="page 7"):
        await service.admit(KEY, prompt(5, 1))
    holder.abort()
    with pytest.raises(InvariantViolation, match="page 7"):
        await asyncio.wait_for(service.aclose(drain=True), PATIENCE_S)
    assert_clean(node)


@pytest.mark.asyncio
async def test_an_error_met_for_somebody_else_reaches_both(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ends lets the next one in; when that breaks, who ended and who waited are both told."""
    service = await KVCacheService().__aenter__()
    service.add(KEY, node.cache)
    holder = await service.admit(KEY, prompt(9, 16))
    waiting = asyncio.create_task(service.admit(KEY, prompt(8, 20)))
    await until_waiting(service, 1)

    def broken(*_: object, **__: object) -> Lease:
        raise InvariantViolation("page 7 freed twice")

    desk = service._desks[KEY]
    monkeypatch.setattr(next(iter(desk._queue)), "_ask", broken)
    with pytest.raises(InvariantViolation, match="page 7"):
        holder.abort()
    with pytest.raises(InvariantViolation, match="page 7"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    with pytest.raises(InvariantViolation, match="page 7"):
        await asyncio.wait_for(service.aclose(drain=True), PATIENCE_S)
    assert_clean(node)


@pytest.mark.asyncio
async def test_a_poller_that_somebody_cancels_is_no_silence(node: Node) -> None:
    """When the poller is cancelled, as an event loop does at its end, those who wait are told."""
    service = await KVCacheService().__aenter__()
    service.add(KEY, node.cache)
    holder = await service.admit(KEY, prompt(9, 16))
    waiting = asyncio.create_task(service.admit(KEY, prompt(8, 20)))
    await until_waiting(service, 1)
    [poller] = [task for task in asyncio.all_tasks() if task.get_name() == "kvkeep poller"]
    poller.cancel()
    with pytest.raises(ServiceClosed, match="event loop"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    holder.abort()
    with pytest.raises(ServiceClosed, match="event loop"):
        await asyncio.wait_for(service.aclose(drain=True), PATIENCE_S)
    assert_clean(node)


@pytest.mark.asyncio
async def test_a_cache_that_does_not_close_keeps_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache is closed, and the first failure is told."""
    nodes = [Node(), Node()]
    service = await KVCacheService().__aenter__()
    for i, node in enumerate(nodes):
        service.add(CacheKey("n", rank=i), node.cache)

    def broken(*, drain: bool, timeout_s: float) -> None:
        raise InvariantViolation("it does not close")

    monkeypatch.setattr(nodes[0].cache, "close", broken)
    with pytest.raises(InvariantViolation, match="does not close"):
        await asyncio.wait_for(service.aclose(drain=False), PATIENCE_S)
    assert not any(thread.is_alive() for thread in nodes[1].backend._threads)
    monkeypatch.undo()
    nodes[0].cache.close(drain=False, timeout_s=PATIENCE_S)
