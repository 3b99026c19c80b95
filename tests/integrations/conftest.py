"""What the tests of integrations share: one engine of vLLM for the whole run, since it takes seconds to start.

Must not import vLLM where no test asks for it.
"""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator[Any]:
    from tests.integrations.vllm_engine import started

    with started() as engine:
        yield engine


@pytest.fixture
def engine(vllm_engine: Any) -> Iterator[Any]:
    """It has an empty tier, and is left with nothing running."""
    vllm_engine.renew()
    yield vllm_engine
    vllm_engine.check_idle()
