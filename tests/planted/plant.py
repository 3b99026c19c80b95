"""Puts one planted bug into a copy of the tree, and runs the tests that must catch it.

Must not know which bugs there are, nor print anything: see `__main__`.
"""

import difflib
import enum
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.planted.bugs import Bug
from tests.planted.nursery import arguments

RunTests = Callable[[Path, Sequence[str], float], tuple[int | None, str]]

TESTS_FAILED = 1
"""pytest's exit status when tests ran and some failed; with any other but 0 they did not get that far."""

COPIED = ("kvkeep", "tests", "tools", "bench", "examples", "Makefile", "pyproject.toml", "constraints.txt")
"""What a copy of the tree holds: what is tested, the tests, and what project-level tests read."""


class Outcome(enum.Enum):
    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """The bug no longer applies, or the tests did not get as far as to fail."""


@dataclass(frozen=True, slots=True)
class Verdict:
    bug: Bug
    outcome: Outcome
    took_s: float
    detail: str = ""


class DoesNotApply(Exception):
    """The entry does not fit the source any more; the message says why."""


def mutate(bug: Bug, source: str) -> str:
    """`source` with the bug in it; raises `DoesNotApply` unless that is a change of one line in one place."""
    times = source.count(bug.old)
    if times != 1:
        raise DoesNotApply(f"planted bug {bug.id} no longer applies: its old text occurs {times} times in {bug.file}")
    mutated = source.replace(bug.old, bug.new)
    changes = list(difflib.ndiff(source.splitlines(), mutated.splitlines()))
    removed = sum(line.startswith("- ") for line in changes)
    added = sum(line.startswith("+ ") for line in changes)
    if removed != 1 or added > 1:
        raise DoesNotApply(f"planted bug {bug.id} changes {removed} lines into {added}: it must change one line")
    if bug.file.endswith(".py"):
        try:
            compile(mutated, bug.file, "exec")
        except SyntaxError as error:
            raise DoesNotApply(f"planted bug {bug.id} leaves {bug.file} no valid Python: {error}") from error
    return mutated


def check_applies(bug: Bug, root: Path) -> None:
    """Raises `DoesNotApply` unless the bug and the tests that catch it are where the entry says."""
    path = root / bug.file
    if not path.is_file():
        raise DoesNotApply(f"planted bug {bug.id} no longer applies: there is no {bug.file}")
    mutate(bug, path.read_text())
    if not bug.caught_by:
        raise DoesNotApply(f"planted bug {bug.id} names no test that catches it")
    for node in bug.caught_by:
        file, *names = node.split("::")
        if not (root / file).is_file():
            raise DoesNotApply(f"planted bug {bug.id}: there is no {file}")
        text = (root / file).read_text()
        for name in (name.partition("[")[0] for name in names):
            # A hypothesis state machine's test class is an assignment, `TestPool = PoolMachine.TestCase`.
            if not any(form in text for form in (f"def {name}(", f"class {name}", f"{name} = ")) and name != "runTest":
                raise DoesNotApply(f"planted bug {bug.id}: there is no {name} in {file}")


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the tree in a directory of its own, with the reference material beside it if there is any."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-planted-") as scratch:
        copy = Path(scratch) / "tree"
        copy.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name)
            elif (root / name).exists():
                shutil.copy2(root / name, copy / name)
        shared = root.parent / "shared"
        if shared.is_dir():
            (Path(scratch) / "shared").symlink_to(shared.resolve())
        yield copy


def run_tests(copy: Path, nodes: Sequence[str], limit_s: float, processes: int = 1) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of the tests, run on the copy in processes of their own."""
    command = [sys.executable, "-m", "pytest", *arguments(nodes, processes)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, f"out of time after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def plant(bug: Bug, root: Path, limit_s: float, run: RunTests = run_tests) -> Verdict:
    """Plants the bug in a copy of `root`, and tells whether its tests fail there."""
    began = time.monotonic()

    def verdict(outcome: Outcome, detail: str = "") -> Verdict:
        return Verdict(bug, outcome, time.monotonic() - began, detail)

    try:
        check_applies(bug, root)
        mutated = mutate(bug, (root / bug.file).read_text())
    except DoesNotApply as reason:
        return verdict(Outcome.BROKEN, str(reason))
    with copy_of(root) as copy:
        target = copy / bug.file
        target.write_text(mutated)
        # Same size and same second would make Python trust the old bytecode.
        for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            stale.unlink()
        status, output = run(copy, bug.caught_by, limit_s)
    if status == TESTS_FAILED:
        return verdict(Outcome.CAUGHT)
    if status == 0:
        return verdict(Outcome.SURVIVED, "its tests pass with the bug in place")
    if status is None and bug.may_hang:
        return verdict(Outcome.CAUGHT, "out of time")
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return verdict(Outcome.BROKEN, f"pytest ended with status {status}: {last}")
