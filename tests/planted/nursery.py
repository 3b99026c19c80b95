"""A process in which large packages are imported already, and forks of it that run tests: seconds a bug are saved.

Must not import what is tested: each fork imports its own copy of that.  Run by its path, so that nothing else is.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

#: What tests import that takes long; those that are not installed are left out.
LARGE = (
    "pytest",
    "hypothesis",
    "numpy",
    "torch",
    "torch.distributed",
    "aiohttp",
    "transformers.models.llama.modeling_llama",
)
VLLM = ("vllm.engine.arg_utils", "vllm.v1.core.sched.async_scheduler", "vllm.v1.worker.kv_connector_model_runner_mixin")


class Nursery:
    """Runs tests in forks, one after another; `run` takes and gives what `plant.run_tests` does."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, copy: Path, nodes: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Exit status (None: out of time) and output of the tests, run on the copy in a fork."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(copy), list(nodes), limit_s]) + "\n")
        self._process.stdin.flush()
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def arguments(nodes: Sequence[str], processes: int = 1) -> list[str]:
    """pytest's, for tests of a copy with a bug."""
    options = ["-x", "-q", "-m", "", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    options += ["-n", str(processes), "--dist", "worksteal"] if processes > 1 else ["-p", "no:xdist"]
    return [*options, "-p", "tests.planted.guard", *nodes]


def serve(modules: Sequence[str]) -> None:
    """Answers requests on standard input until that ends."""
    sys.path.pop(0)  # the folder of this file
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is no answer
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for line in sys.stdin:
        copy, nodes, limit_s = json.loads(line)
        answers.write(json.dumps(_fork(copy, nodes, limit_s)) + "\n")
        answers.flush()


def _fork(copy: str, nodes: list[str], limit_s: float) -> tuple[int | None, str]:
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = os.fork()
        if not child:
            _run(copy, nodes, said.fileno())
        until, status = time.monotonic() + limit_s, None
        while time.monotonic() < until:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
            return None, f"out of time after {limit_s:.0f} s"
        said.seek(0)
        return status, said.read()


def _run(copy: str, nodes: list[str], said: int) -> None:
    """What a fork does: it never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(copy)
        sys.path.insert(0, copy)
        os.environ["PYTHONPATH"] = copy
        import pytest

        code = int(pytest.main(arguments(nodes)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
