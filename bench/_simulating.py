"""The simulator's rate: `python -m tests.sim` in a process of its own, which starts two more.

Must not know rounds or limits.  A seed that fails is no rate: the run ends with the simulator's words.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep.errors import KvkeepError

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
WORDS_MAX = 2000


class SeedFailed(KvkeepError):
    """The simulator found a fault."""


def operations(seeds: int, *, checked: bool, per_cpu_s: list[float] | None = None) -> Callable[[], list[float]]:
    """Operations a second of both processes together, starting them included; each sample runs other seeds.

    per_cpu_s: gets operations a second of processor time, which other programs on the machine change less.
    """
    first = 0

    def sample() -> list[float]:
        nonlocal first
        with TemporaryDirectory() as folder:
            file = Path(folder) / "numbers.json"
            words = ["--first", str(first), "--seeds", str(seeds), "--jobs", str(PROCESSES), "--json", str(file)]
            command = [sys.executable, "-m", "tests.sim", *words, *([] if checked else ["--unchecked"])]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise SeedFailed(f"{' '.join(command[1:])}: {(done.stdout + done.stderr)[-WORDS_MAX:]}")
            numbers = json.loads(file.read_text())
        first += seeds
        if per_cpu_s is not None:
            per_cpu_s.append(float(numbers["ops_per_cpu_s"]))
        return [float(numbers["ops_per_s"])]

    return sample
