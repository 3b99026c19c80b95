"""A node, and a service over it at whose end nothing may be left."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvkeep.service import KVCacheService
from tests.service.rigs import KEY, Node, assert_clean, the


@pytest.fixture
def node() -> Node:
    return Node()


@pytest_asyncio.fixture
async def service(node: Node) -> AsyncIterator[KVCacheService]:
    """A service with one cache, at whose end nothing may be left."""
    async with KVCacheService() as service:
        service.add(KEY, node.cache)
        yield service
        assert 0 == the(service).cache.leases, "a lease was left behind"
    assert_clean(node)
