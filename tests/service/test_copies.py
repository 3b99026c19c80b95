"""The service over copies that a test steps: loads that fail, hang or die, and cancellation at every await.

Must not use threads: the same steps give the same run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvkeep.errors import CannotSuspend, LeaseRevoked, NotReady, ServiceClosed
from kvkeep.index.eviction import Tier
from kvkeep.index.watch import names_in
from kvkeep.service import KVCacheService
from kvkeep.transfer.backend import Job
from tests.service.rigs import KEY, PATIENCE_S, the
from tests.telemetry.rigs import TwoTiers, prompt

pytestmark = pytest.mark.asyncio

A = prompt(1, 4)


def make_tiers(pages: int = 8, *, deadline_s: float = 1e9, seed: int = 0) -> TwoTiers:
    """The four pages of A are in host memory only, and the pool is full of others that have a copy there too."""
    tiers = TwoTiers(pages, 32, suspend_pages=4, deadline_s=deadline_s, seed=seed)
    for tokens in (A, prompt(2, pages - 1)):
        tiers.store(tokens)
        tiers.settle()
    held = names_in(tiers.cache._tree)
    assert 4 == len(set(held[Tier.HOST].tolist()) - set(held[Tier.GPU].tolist()))
    return tiers


@asynccontextmanager
async def serving(tiers: TwoTiers) -> AsyncIterator[KVCacheService]:
    """A service that looks at its copies all the time, since steps take no time."""
    async with asyncio.timeout(PATIENCE_S), KVCacheService(poll_s=0) as service:
        service.add(KEY, tiers.cache)
        yield service


async def until(tiers: TwoTiers, reached: Callable[[], bool], job: Job | None = None) -> None:
    """Steps copies until something holds."""
    for _ in range(1000):
        if reached():
            return
        tiers.backend.step(job)
        await asyncio.sleep(0)
    raise AssertionError("not reached")


def loads(tiers: TwoTiers) -> list[Job]:
    return [job for job in tiers.backend.jobs if job.plan.cause == "promote"]


async def test_ready_waits_for_the_copies_and_no_longer() -> None:
    """Before the load has landed nothing can be done with the lease; then it is ready, with what it has matched."""
    tiers = make_tiers()
    async with serving(tiers) as service, await service.admit(KEY, A) as lease:
        ready = asyncio.create_task(lease.ready())
        [load] = loads(tiers)
        while load in tiers.backend.jobs:
            assert not ready.done()
            for call in (
                lambda: lease.pages,
                lambda: lease.extend([1]),
                lambda: lease.finish(1),
                lambda: lease.seal(1),
            ):
                with pytest.raises(NotReady, match="await ready"):
                    call()
            tiers.backend.step(load)
            await asyncio.sleep(0)
        await ready
        assert 16 == lease.matched_len
        snapshot = the(service)
        assert (16, 1) == (snapshot.cache.matched_host_tokens, snapshot.cache.gate_wait.count - 2)
        lease.finish(len(A) - 1)
    tiers.check()


async def test_a_cancelled_ready_leaves_the_lease() -> None:
    """A task that stops waiting for copies takes nothing along: the lease can be waited for again."""
    tiers = make_tiers()
    async with serving(tiers) as service, await service.admit(KEY, A) as lease:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lease.ready(), 0.01)
        both = [asyncio.create_task(lease.ready()) for _ in range(2)]
        await until(tiers, lambda: lease.readable)
        await asyncio.gather(*both)
        assert 16 == lease.matched_len


async def test_a_revoked_lease_is_had_again_by_itself() -> None:
    """Of two that wait for a load that fails one goes on in its place; the other is admitted again, unseen."""
    tiers = make_tiers(12)
    async with serving(tiers) as service:
        first, second = await service.admit(KEY, A), await service.admit(KEY, A)
        ready = asyncio.gather(first.ready(), second.ready())
        [load] = loads(tiers)
        tiers.backend.fail(load)
        await until(tiers, ready.done)
        assert (0, 0, 5, 5) == (first.matched_len, second.matched_len, len(first.pages), len(second.pages))
        stats = the(service)
        assert stats.service is not None and (1, 0) == (stats.service.readmitted, stats.service.revoked)
        assert (1, len(A), 16) == (stats.cache.revocations, stats.cache.revoked_tokens, stats.cache.lost_tokens)
        first.finish(len(A) - 1)
        second.finish(len(A) - 1)
    tiers.check()


async def test_a_revoked_lease_goes_before_all_that_wait() -> None:
    """A lease that lost its pages is the first to have some again, though others have waited for longer."""
    tiers = make_tiers(10)
    async with serving(tiers) as service:
        first, second = await service.admit(KEY, A), await service.admit(KEY, A)
        waiting = asyncio.create_task(service.admit(KEY, prompt(7, 4)))
        await asyncio.sleep(0)
        order: list[str] = []
        waiting.add_done_callback(lambda task: order.append("waiting"))
        again = asyncio.create_task(second.ready())
        again.add_done_callback(lambda task: order.append("again"))
        [load] = loads(tiers)
        tiers.backend.fail(load)
        await until(tiers, lambda: first.readable)
        await until(tiers, again.done)
        await asyncio.sleep(0)
        assert ["again"] == order
        first.abort()
        second.abort()
        (await waiting).abort()
    tiers.check()


async def test_pages_that_a_copy_lets_go_of_are_given_out() -> None:
    """Who waits for pages that only a copy holds has them when the copy is over, without anybody asking."""
    tiers = make_tiers()
    async with serving(tiers) as service:
        lease = await service.admit(KEY, A)
        waiting = asyncio.create_task(service.admit(KEY, prompt(7, 7)))
        await asyncio.sleep(0)
        lease.abort()
        await asyncio.sleep(0)
        assert not waiting.done()
        await until(tiers, waiting.done)
        (await waiting).abort()
    tiers.check()


async def test_a_copy_that_hangs_holds_up_nobody_for_longer_than_its_deadline() -> None:
    """A load that is overdue is given up: its lease is admitted again and computes; the pages stay the copy's."""
    tiers = make_tiers(16, deadline_s=20e-5)
    async with serving(tiers) as service, await service.admit(KEY, A) as lease:
        [load] = loads(tiers)
        tiers.backend.stick(load)
        ready = asyncio.create_task(lease.ready())
        await until(tiers, ready.done)
        assert 0 == lease.matched_len
        assert load in tiers.backend.jobs
        lease.finish(len(A) - 1)
        tiers.backend.free(load)
        await until(tiers, lambda: not tiers.manager.busy)
    tiers.check()


async def test_what_is_revoked_for_good_says_so() -> None:
    """A resumed request whose copy fails cannot be had again without its ticket: it has ended, as `LeaseRevoked`."""
    tiers = make_tiers(16)
    async with serving(tiers) as service:
        lease = await service.admit(KEY, prompt(5, 2))
        ticket = lease.suspend(8)
        resumed = asyncio.create_task(service.resume(KEY, ticket, prompt(5, 2)))
        tiers.cache.reset()  # the index has them no more
        await until(tiers, resumed.done)
        handle = await resumed
        ready = asyncio.create_task(handle.ready())
        [load] = [job for job in tiers.backend.jobs if job.plan.cause == "resume"]
        tiers.backend.fail(load)
        await until(tiers, ready.done)
        with pytest.raises(LeaseRevoked, match="did not arrive"):
            await ready
        with pytest.raises(LeaseRevoked):
            handle.extend([1])
        stats = the(service).service
        assert stats is not None and (1, 0) == (stats.revoked, stats.leases)
    tiers.check()


async def test_a_dead_backend_takes_the_tier_along_and_nothing_else() -> None:
    """When the backend dies those who wait are admitted again and compute; the service goes on without the tier."""
    tiers = make_tiers(16)
    async with serving(tiers) as service:
        first, second = await service.admit(KEY, A), await service.admit(KEY, A)
        ready = asyncio.gather(first.ready(), second.ready())
        tiers.backend.die()
        await until(tiers, ready.done)
        assert (0, 0) == (first.matched_len, second.matched_len)
        with pytest.raises(CannotSuspend):
            second.suspend(4)
        first.finish(len(A) - 1)
        second.finish(len(A) - 1)
        async with await service.admit(KEY, A) as third:
            await third.ready()
            assert 16 == third.matched_len
        transfers = the(service).transfers
        assert transfers is not None and "injected death" == transfers.dead
    tiers.check()


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_in_the_middle_of_copies(drain: bool) -> None:
    """Whoever waits for a copy has it, or is told, and no copy is under way afterwards."""
    tiers = make_tiers()
    async with serving(tiers) as service:
        lease = await service.admit(KEY, A)
        ready = asyncio.create_task(lease.ready())
        ready.add_done_callback(lambda task: lease.abort())
        closing = asyncio.create_task(service.aclose(drain=drain, timeout_s=PATIENCE_S))
        await until(tiers, lambda: ready.done() or not drain)
        await closing
        if drain:
            await ready
        else:
            with pytest.raises(ServiceClosed):
                await ready
    assert (False, 0) == (tiers.manager.busy, tiers.cache.stats().pages_live)
    tiers.check()


# ---------------------------------------------------------------------- cancellation at every await

Request = Callable[[KVCacheService], Coroutine[Any, Any, None]]


async def one_request(service: KVCacheService) -> None:
    """Waits for room, then for a load; computes, and ends."""
    async with await service.admit(KEY, A) as lease:
        await lease.ready()
        assert lease.matched_len <= len(A)
        lease.seal(len(A) - 1)
        await asyncio.sleep(0)
        lease.extend([5])
        await asyncio.sleep(0)
        lease.finish(len(A))


async def suspended_request(service: KVCacheService) -> None:
    """Is preempted, waits for its own copy down, for room, and for its copy up."""
    lease = await service.admit(KEY, A)
    ticket = None
    try:
        await lease.ready()
        assert lease.matched_len <= len(A)
        lease.seal(len(A) - 1)
        ticket = lease.suspend(len(A) - 1)
        lease = await service.resume(KEY, ticket, [*A, 5])
        await lease.ready()
        assert lease.matched_len <= len(A)
        lease.finish(len(A))
    finally:
        lease.abort()
        if ticket is not None:
            service.discard(KEY, ticket)


@dataclass
class Cut:
    """What a request was when it was cancelled after `ticks`: how many waited for room, and for copies; its task."""

    waiting: int
    loading: int
    done: bool


async def cut_after(ticks: int, request: Request, fails: bool) -> Cut:
    """Cancels a request at its `ticks`-th chance to go on, and sees what is left and whether others go on."""
    tiers = make_tiers(seed=ticks % 3)
    async with serving(tiers) as service:
        holder = await service.admit(KEY, prompt(9, 5))
        others = [asyncio.ensure_future(one_request(service))] if fails else []
        task = asyncio.ensure_future(request(service))
        for tick in range(ticks):
            await asyncio.sleep(0)
            if tick == 3:
                holder.abort()
            for load in loads(tiers) if fails else ():
                tiers.backend.fail(load)
            tiers.backend.step()
        stats = the(service).service
        assert stats is not None
        cut = Cut(stats.waiting, stats.loading, task.done())
        task.cancel()
        await asyncio.wait([task])
        assert cut.done or task.cancelled(), task.exception()
        holder.abort()
        others.append(asyncio.ensure_future(one_request(service)))
        await until(tiers, lambda: all(other.done() for other in others) and not tiers.manager.busy)
        await asyncio.gather(*others, *([task] if cut.done else []))
        assert 0 == tiers.cache.stats().leases
    tiers.check()
    assert 0 == tiers.cache.stats().pages_live
    return cut


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("request_", [one_request, suspended_request])
async def test_cancellation_at_every_await(request_: Request, fails: bool) -> None:
    """Wherever a task is cancelled: no lease, no page, no place in a queue and no copy is left, and others go on."""
    cuts = [await cut_after(0, request_, fails)]
    while not cuts[-1].done and len(cuts) < 500:
        cuts.append(await cut_after(len(cuts), request_, fails))
    assert cuts[-1].done, "it never ended by itself"
    assert {True} == {any(cut.waiting for cut in cuts), any(cut.loading for cut in cuts)}
