"""The service over real memory: waiting for room and for copies, many clients, many caches, the end.

Must not step copies: they run in threads.
"""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, LeaseEnded, NoRoomInTime, NotReady, OutOfPages
from kvkeep.index.hints import Discard, Hint
from kvkeep.index.media import MediaItem
from kvkeep.index.names import make_identity
from kvkeep.service import KVCacheService
from kvkeep.telemetry.snapshot import CacheKey
from kvkeep.tiers.gpu_pool import GpuPool
from tests.service.rigs import KEY, PAGE_SIZE, PATIENCE_S, Client, Node, assert_clean, prompt, the, until_waiting

pytestmark = pytest.mark.asyncio


async def test_a_request_finds_what_another_left(service: KVCacheService, node: Node) -> None:
    """Prompt and answer of one request are hits of the next, under the same label only."""
    first = Client(node, KEY, b"a", 1)
    tokens = await first.run(service, prompt(1, 3), 2 * PAGE_SIZE)
    again, other = Client(node, KEY, b"a", 2), Client(node, KEY, b"b", 3)
    await again.run(service, [*tokens, 7], 1)
    await other.run(service, [*tokens, 7], 1)
    assert (0, 5 * PAGE_SIZE, 0) == (first.hits, again.hits, other.hits)
    assert [] == first.wrong + again.wrong + other.wrong


async def test_pages_come_back_from_host_memory(service: KVCacheService, node: Node) -> None:
    """What was pushed out of the pool is loaded, is what it was, and is counted as a hit of the host tier."""
    sessions = [await Client(node, KEY, b"", i).run(service, prompt(i, 6), PAGE_SIZE) for i in range(6)]
    client = Client(node, KEY, b"", 9)
    for tokens in sessions:
        await client.run(service, [*tokens, 1], 1)
    stats = the(service).cache
    assert [] == client.wrong
    assert stats.matched_host_tokens > 0
    assert stats.prompt_tokens == stats.matched_gpu_tokens + stats.matched_host_tokens + stats.computed_tokens
    assert stats.admissions == stats.gate_wait.count


async def test_who_waits_for_room_is_served_in_order(service: KVCacheService, node: Node) -> None:
    """Strictly first come first served: a small request does not overtake a large one."""
    order: list[int] = []

    async def wait(number: int, pages: int) -> None:
        async with await service.admit(KEY, prompt(number, pages - 1)):
            order.append(number)
            await asyncio.sleep(0)

    holder = await service.admit(KEY, prompt(0, 11))
    small = await service.admit(KEY, prompt(9, 5))
    tasks = []
    for number, pages in enumerate([24, 2, 3, 2], 1):
        tasks.append(asyncio.create_task(wait(number, pages)))
        await until_waiting(service, number)
    small.abort()
    await asyncio.sleep(0.01)
    assert [] == order
    holder.abort()
    await asyncio.gather(*tasks)
    assert [1, 2, 3, 4] == order
    stats = the(service).service
    assert stats is not None and (6, 0) == (stats.wait.count, stats.waiting)


async def test_who_gives_up_lets_the_next_one_in(service: KVCacheService) -> None:
    """When the first of the queue is cancelled, or out of time, the next one is tried at once."""
    holder = await service.admit(KEY, prompt(0, 11))
    large = asyncio.create_task(service.admit(KEY, prompt(1, 23)))
    await until_waiting(service, 1)
    late = asyncio.create_task(service.admit(KEY, prompt(2, 22), timeout_s=0.02))
    small = asyncio.create_task(service.admit(KEY, prompt(3, 2)))
    await until_waiting(service, 3)
    large.cancel()
    with pytest.raises(NoRoomInTime, match=r"no room within 0\.02 s: 23 pages asked for") as refused:
        await late
    assert isinstance(refused.value.__cause__, OutOfPages)
    (await small).abort()
    holder.abort()
    stats = the(service).service
    assert stats is not None and 2 == stats.given_up


async def test_bad_input_is_said_at_once(service: KVCacheService, node: Node) -> None:
    """What could never be admitted does not wait; an unknown cache is named with those that there are."""
    with pytest.raises(BadInput, match="needs 25 pages, the pool has 24"):
        await service.admit(KEY, prompt(0, 24))
    with pytest.raises(BadInput, match="0 tokens"):
        await service.admit(KEY, [])
    with pytest.raises(BadInput, match="no cache for CacheKey"):
        await service.admit(CacheKey("elsewhere"), [1])
    with pytest.raises(BadInput, match="already"):
        service.add(KEY, node.cache)
    with pytest.raises(BadInput, match="poll_s"):
        KVCacheService(poll_s=-1)
    with pytest.raises(InvariantViolation, match="async with"):
        await KVCacheService().admit(KEY, [1])


async def test_bad_input_of_one_who_waits_is_his_alone(service: KVCacheService) -> None:
    """A request of which only its turn shows that it is bad is told so; those behind it are served."""
    holder = await service.admit(KEY, prompt(0, 23))
    first = asyncio.create_task(service.admit(KEY, prompt(1, 2)))
    await until_waiting(service, 1)
    bad = asyncio.create_task(service.admit(KEY, [-1]))
    last = asyncio.create_task(service.admit(KEY, prompt(2, 2)))
    await until_waiting(service, 3)
    holder.abort()
    with pytest.raises(BadInput):
        await bad
    for task in (first, last):
        (await task).abort()


async def test_a_lease_that_has_ended_says_so(service: KVCacheService) -> None:
    """Every call but `abort` tells how the lease has ended."""
    lease = await service.admit(KEY, prompt(0, 2))
    lease.finish(4)
    lease.abort()
    with pytest.raises(LeaseEnded, match="was finished"):
        lease.extend([1])
    with pytest.raises(LeaseEnded, match="was finished"):
        await lease.ready()


async def test_a_refused_call_leaves_the_lease(service: KVCacheService) -> None:
    """`OutOfPages` and `BadInput` of a quick call change nothing; leaving the block aborts what has not ended."""
    async with await service.admit(KEY, prompt(0, 3)) as lease:
        with pytest.raises(OutOfPages):
            lease.extend(range(200))
        with pytest.raises(BadInput):
            lease.finish(99)
        lease.truncate(6)
        assert (2, 6, None) == (len(lease.pages), lease.length, lease.ended)
    assert isinstance(lease.ended, LeaseEnded)


async def test_a_suspended_request_goes_on(service: KVCacheService, node: Node) -> None:
    """A preempted request leaves its pages in host memory and has them again, bit for bit."""
    client, tokens = Client(node, KEY, b"", 0), prompt(0, 3)
    lease = await service.admit(KEY, tokens)
    client.prefill(lease, tokens)
    before = [node.memory.page_bytes(page) for page in lease.pages]
    ticket = lease.suspend(len(tokens) - 1)
    other = await service.admit(KEY, prompt(1, 22))
    back = asyncio.create_task(service.resume(KEY, ticket, tokens))
    await until_waiting(service, 1)
    await other.ready()
    other.finish(22 * PAGE_SIZE)
    lease = await back
    with pytest.raises(NotReady, match="await ready"):
        lease.lease  # noqa: B018 (its copies have just begun)
    await lease.ready()
    assert before[:3] == [node.memory.page_bytes(page) for page in lease.pages[:3]]
    ticket = lease.suspend(len(tokens) - 1)
    service.discard(KEY, ticket)


async def test_a_ticket_that_is_discarded_while_it_waits_ends_its_own_lease_only(service: KVCacheService) -> None:
    """Whoever waits to resume it is told; the service goes on, and what was parked is free."""
    lease = await service.admit(KEY, prompt(0, 3))
    ticket = lease.suspend(3 * PAGE_SIZE - 1)
    other = await service.admit(KEY, prompt(1, 22))
    back = asyncio.create_task(service.resume(KEY, ticket, prompt(0, 3)))
    await until_waiting(service, 1)
    service.discard(KEY, ticket)
    await other.ready()
    other.abort()
    with pytest.raises(BadInput, match="resumed or discarded"):
        await back
    async with asyncio.timeout(PATIENCE_S), await service.admit(KEY, prompt(2, 22)) as third:
        await third.ready()


async def test_tickets_may_be_discarded_when_the_service_has_closed(node: Node) -> None:
    """The end of a client's task often comes after the end of the service: nothing stays parked for that."""
    async with KVCacheService() as service:
        service.add(KEY, node.cache)
        lease = await service.admit(KEY, prompt(0, 3))
        ticket = lease.suspend(3 * PAGE_SIZE - 1)
    service.discard(KEY, ticket)
    assert not ticket.live
    assert_clean(node)


@pytest.mark.parametrize("labels", [1, 3])
async def test_a_hundred_clients(service: KVCacheService, node: Node, labels: int) -> None:
    """A hundred clients over a pool that holds four requests: all are answered, no page is wrong, nothing is left."""
    random_ = random.Random(labels)
    clients = [Client(node, KEY, b"%d" % (i % labels), i) for i in range(100)]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for client in clients:
            pages = random_.randrange(1, 5)
            group.create_task(client.run(service, prompt(random_.randrange(12), pages), random_.randrange(1, 9)))
    stats = the(service)
    assert [] == [wrong for client in clients for wrong in client.wrong]
    assert stats.cache.matched_tokens == sum(client.hits for client in clients)
    assert stats.cache.admissions == 100 + sum(client.preemptions for client in clients)
    assert stats.service is not None and (0, 0, 0) == (
        stats.service.leases, stats.service.waiting, stats.service.revoked,
    )  # fmt: skip


async def test_clients_that_are_cancelled_at_random(service: KVCacheService, node: Node) -> None:
    """Half of two hundred clients are cancelled wherever they are: the others are answered, and nothing is left."""
    random_ = random.Random(7)
    clients = [Client(node, KEY, b"", i) for i in range(200)]
    tasks = [
        asyncio.create_task(client.run(service, prompt(random_.randrange(12), random_.randrange(1, 5)), 6))
        for client in clients
    ]
    for task in random_.sample(tasks, 100):
        for _ in range(random_.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [] == [error for error in ended if isinstance(error, Exception)]
    assert [] == [wrong for client in clients for wrong in client.wrong]


async def test_many_caches_keep_to_themselves() -> None:
    """Each (node, resource, rank) has its own pages, its own queue and its own counters."""
    keys = [CacheKey(node, resource, rank) for node in "ab" for resource in ("llm", "vae") for rank in (0, 1)]
    nodes = {key: Node(pages=8, host_pages=8) for key in keys}
    async with asyncio.timeout(PATIENCE_S), KVCacheService() as service:
        for key, node in nodes.items():
            service.add(key, node.cache)
        full = await service.admit(keys[0], prompt(0, 7))
        clients = [Client(nodes[key], key, b"", 0) for key in keys[1:]]
        await asyncio.gather(*(client.run(service, prompt(1, 3), i) for i, client in enumerate(clients, 1)))
        full.abort()
        admissions = {one.key: one.cache.admissions for one in service.snapshot()}
    assert dict.fromkeys(keys, 1) == admissions
    for node in nodes.values():
        assert_clean(node)


async def test_an_idle_service_sleeps(service: KVCacheService, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no copy runs the cache is not polled, with leases live and with requests waiting for room too."""
    polls = 0
    poll = node.cache.poll

    def counted() -> int:
        nonlocal polls
        polls += 1
        return poll()

    monkeypatch.setattr(node.cache, "poll", counted)
    holder = await service.admit(KEY, prompt(0, 20))
    waiting = asyncio.create_task(service.admit(KEY, prompt(1, 20)))
    await until_waiting(service, 1)
    await asyncio.sleep(0.05)
    before = polls
    await asyncio.sleep(0.2)
    assert before == polls
    holder.abort()
    (await waiting).abort()


@pytest.mark.parametrize("bad", [{"media": ["x"]}, {"media": [None]}, {"salt": "x"}])
async def test_bad_input_of_one_who_waits_is_nobody_elses(service: KVCacheService, bad: dict[str, Any]) -> None:
    """It is found when its turn comes, and told to its caller; who waits behind it is served."""
    holder = await service.admit(KEY, prompt(1, 22))
    waiting = [asyncio.create_task(service.admit(KEY, prompt(i, 3), **more)) for i, more in enumerate(({}, bad, {}), 2)]
    await until_waiting(service, 3)
    holder.abort()
    async with asyncio.timeout(PATIENCE_S):
        first, wrong, last = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(wrong, BadInput)
    for handle in (first, last):
        assert not isinstance(handle, BaseException)
        handle.abort()


async def test_what_waits_does_not_change_with_what_was_handed_in(service: KVCacheService, node: Node) -> None:
    """Token ids and media are kept as they were: a buffer may be used again, an iterator is read once."""
    kept = await service.admit(KEY, prompt(2, 3))
    kept.finish(13)
    holder = await service.admit(KEY, prompt(1, 22))
    await holder.ready()  # what had to leave for it is in host memory
    ids = np.array(prompt(2, 3), dtype=np.int32)
    items: Any = iter([MediaItem(0, 2, b"b" * 16)])
    waiting = [asyncio.create_task(service.admit(KEY, ids, media=more)) for more in (items, ())]
    await until_waiting(service, 2)
    ids[:] = 7
    holder.abort()
    other, same = await asyncio.gather(*waiting)
    for handle in (other, same):
        await handle.ready()
    assert (0, 12) == (other.matched_len, same.matched_len)
    for handle in (other, same):
        handle.abort()


async def test_hints_reach_the_order() -> None:
    """A session that says that it has closed leaves first, whatever came after it."""
    cache = TieredCache(CacheConfig(page_size=4, eviction="rhythm"), GpuPool.bookkeeping(12), b"f")
    key = CacheKey("node")
    async with KVCacheService() as service:
        service.add(key, cache)
        hints: dict[int, Hint | None] = {1: None, 2: Discard(), 3: None}
        for kind, hint in hints.items():
            lease = await service.admit(key, [kind] * 16)
            lease.finish(16, hint)
        async with await service.admit(key, [9] * 16):
            left = [len(cache._tree.match(make_identity(b"f"), chain(kind), 4).pages) for kind in hints]
        assert [4, 0, 4] == left


def chain(kind: int) -> memoryview:
    return np.full(16, kind, dtype=np.int32).data.cast("B")
