"""What every test shares: the repository, the reference material beside it, how hard hypothesis tries.

Must not import torch or a model library: most tests run without them.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPO_ROOT = Path(__file__).resolve().parent.parent

# No test may reach a model hub: what a test runs on is installed or made by the test.
os.environ["HF_HUB_OFFLINE"] = "1"

# Threads of one operation that spin while they wait for each other, on cores that other work wants too, take ten
# times as long. Read once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# "ci" tries the same examples on every run, so that a change which did not touch the code cannot turn it red.
# "full" tries other and more ones each time. A failure of either prints the line that replays it.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what reads the reference material, before `-m` chooses."""
    for item in items:
        if "shared_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO_ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The reference material that may stand beside the repository; no part of the product reads it."""
    path = REPO_ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("the reference material (../shared) is not beside this checkout")
    return path
