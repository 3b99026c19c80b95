"""What the engine's tests share: two real models, and one intra-op thread.

Must not know how a forward is computed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvkeep.engine.loader import LoadedModel, load_model

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of one operation that wait for each other on busy cores take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def stories() -> LoadedModel:
    return load_model(str(DATA / "stories260K.bin"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m")
