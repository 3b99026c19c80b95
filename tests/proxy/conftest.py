"""Three replicas, and a proxy before them."""

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from kvkeep.proxy.app import Proxy
from tests.proxy.rigs import Stub, served


@pytest_asyncio.fixture
async def stubs() -> AsyncIterator[list[Stub]]:
    stubs = [Stub(), Stub(), Stub()]
    for stub in stubs:
        await stub.start()
    yield stubs
    for stub in stubs:
        stub.gate.set()
        await stub.stop()


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest_asyncio.fixture
async def proxy(stubs: list[Stub]) -> Proxy:
    return Proxy([stub.url for stub in stubs])


@pytest_asyncio.fixture
async def url(proxy: Proxy) -> AsyncIterator[str]:
    async with served(proxy) as url:
        yield url
    assert {0} == set(proxy.router.loads.values()) | {0}, "a request is still counted"
