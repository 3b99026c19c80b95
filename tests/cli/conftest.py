"""Running the command line as a user does, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: The smallest real model, sized so that a command takes about a second.
TINY = ("--model", "stories260k", "--page-size", "16")


@pytest.fixture
def kvkeep_environment(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which this tree is the one imported. One thread: several tests may share the cores."""
    own = {"PYTHONPATH": str(repo_root), "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture
def kvkeep(kvkeep_environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs `kvkeep ARGUMENTS` in an empty folder; `before` is Python that runs first."""

    def run(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
        code = f"{before}\nimport sys\nfrom kvkeep.cli import main\nsys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=kvkeep_environment,
            capture_output=True,
            text=True,
            timeout=250,
        )

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread in this process, as it was afterwards."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
