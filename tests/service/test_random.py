"""Random clients over copies that fail, hang and come late: nobody hangs, nothing is left, from one seed.

Must not use threads: a seed that fails can be run again.
"""

import asyncio
import random

import pytest

from kvkeep.copies import Suspended
from kvkeep.errors import CannotSuspend, LeaseEnded, NoRoomInTime, OutOfPages
from kvkeep.service import KVCacheService
from tests.service.rigs import KEY, the
from tests.telemetry.rigs import PAGE_SIZE, TwoTiers

TICKS_MAX = 20_000


class RandomClient:
    """Makes requests, ends them in every way there is, and may be cancelled anywhere."""

    def __init__(self, seed: str, service: KVCacheService) -> None:
        self.random = random.Random(seed)
        self.service = service

    async def run(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            try:
                await self.request()
            except (NoRoomInTime, LeaseEnded, CannotSuspend):
                continue

    async def request(self) -> None:
        tokens = [page for _ in range(self.random.randrange(4)) for page in [self.random.randrange(2)] * PAGE_SIZE] + [
            9
        ]
        timeout_s = self.random.choice([None, None, 0.0])
        async with await self.service.admit(KEY, tokens, timeout_s=timeout_s) as lease:
            await lease.ready()
            lease.seal(lease.length - 1)
            for _ in range(self.random.randrange(6)):
                token = self.random.randrange(2)
                try:
                    lease.extend([token])
                except OutOfPages:
                    break
                tokens.append(token)
                lease.seal(lease.length - 1)
                await asyncio.sleep(0)
            how = self.random.randrange(4)
            if how == 0:
                return
            if how == 1:
                lease.truncate(self.random.randrange(1, lease.length + 1))
            if how == 2:
                await self.suspend(lease.suspend(lease.lease.kv_len), tokens)
                return
            lease.finish(lease.lease.kv_len)

    async def suspend(self, ticket: Suspended, tokens: list[int]) -> None:
        try:
            async with await self.service.resume(KEY, ticket, tokens) as lease:
                await lease.ready()
                lease.finish(lease.lease.kv_len)
        finally:
            self.service.discard(KEY, ticket)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(40))
async def test_random_clients(seed: int) -> None:
    """Whatever copies do and whoever is cancelled: every client ends, and no lease, page or copy is left."""
    random_ = random.Random(f"service {seed}")
    fail_rate, stuck_rate = random_.choice([(0.0, 0.0), (0.3, 0.0), (0.1, 0.1)])
    tiers = TwoTiers(
        random_.choice([6, 8, 12]), random_.choice([0, 6, 24]), seed=seed, fail_rate=fail_rate, stuck_rate=stuck_rate,
        suspend_pages=4, deadline_s=random_.choice([10e-5, 100e-5]),
    )  # fmt: skip
    async with KVCacheService(poll_s=0) as service:
        service.add(KEY, tiers.cache)
        clients = [asyncio.create_task(RandomClient(f"{seed} {i}", service).run()) for i in range(12)]
        die_at = random_.choice([None, None, 40])
        for tick in range(TICKS_MAX):
            if all(client.done() for client in clients):
                break
            if tick == die_at:
                tiers.backend.die()
            if random_.random() < 0.02:
                random_.choice(clients).cancel()
            if random_.random() < 0.01:
                tiers.cache.reset()
            for _ in range(random_.randrange(3)):
                tiers.backend.step()
            await asyncio.sleep(0)
            if tick % 8 == 0:
                tiers.check()
        else:
            raise AssertionError(f"seed {seed}: somebody waits for ever: {the(service)}")
        errors = [client.exception() for client in clients if not client.cancelled()]
        assert [] == [error for error in errors if error is not None]
        waiting = the(service).service
        assert waiting is not None and (0, 0, 0) == (waiting.leases, waiting.waiting, waiting.loading)
        await service.aclose(drain=random_.random() < 0.5, timeout_s=5)
    tiers.check()
    assert 0 == tiers.cache.stats().pages_live
