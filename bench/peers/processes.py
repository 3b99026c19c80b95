"""The parent's side: who can be asked here, in which environment, and the asking.

Must not know cases or figures.

A peer is absent for a reason, in one line: its environment is not there, its package does not load, it died, it gives
no answer.  Nothing of that ends the run.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds that one answer may take.
ANSWER_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer runs.

    environment: its folder in the checkout; None: the one that we run in.   variants: what it can be asked for.
    settings: environment variables that its package reads.
    """

    name: str
    module: str
    environment: str | None
    variants: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()

    def python(self, root: Path) -> Path:
        """Its interpreter."""
        return Path(sys.executable) if self.environment is None else root / self.environment / "bin" / "python"


QUIET_VLLM = (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1"))
QUIET_LMCACHE = (*QUIET_VLLM, ("LMCACHE_LOG_LEVEL", "ERROR"), ("LMCACHE_TRACK_USAGE", "false"))

PLACES = (
    Place("vllm", "bench.peers.vllm_manager", ".venv-vllm", ("vllm", "vllm_arc", "vllm_xxhash"), QUIET_VLLM),
    Place("sglang", "bench.peers.sglang_peer", ".venv-sglang", ("sglang_rust", "sglang_radix")),
    Place("lmcache", "bench.peers.lmcache_engine", ".venv-lmcache", ("lmcache",), QUIET_LMCACHE),
)
OURS = Place("kvkeep", "bench.peers.ours", None, ("kvkeep", "kvkeep_lru"))


class Absent(Exception):
    """Why a peer is not there, or not any more."""


class Peer:
    """A process that answers.  Raises `Absent` where it does not."""

    def __init__(self, place: Place, root: Path = ROOT, answer_s_max: float = ANSWER_S_MAX) -> None:
        python = place.python(root)
        if place.environment is not None and not (root / place.environment / "ready").is_file():
            raise Absent(
                f"no {place.environment} is ready here: make bench-peers makes it, where {place.name} installs"
            )
        self.place = place
        self._answer_s_max = answer_s_max
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        # A seed for whoever names pages by Python's own hash; and nothing of an environment that is active here.
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"} | dict(place.settings)
        self._process = subprocess.Popen(
            [str(python), "-m", place.module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        self._unread = b""

    def hello(self) -> str:
        """Its version, when it is ready."""
        return str(self.ask({"do": "hello"})["version"])

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        except (OSError, ValueError) as error:
            raise Absent(self._last_words()) from error
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(self._answer_s_max):
                    raise Absent(f"it did not answer within {self._answer_s_max:.0f} s")
                more = os.read(self._process.stdout.fileno(), 1 << 20)
                if not more:
                    raise OSError("it ended")
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """The last line of its standard error."""
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it goes on, but what it answers is no answer
            self._process.kill()
            self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return f"it ended, exit code {self._process.returncode}: {lines[-1] if lines else 'it said nothing'}"[:300]

    def end(self) -> None:
        """The process ends; at once, if it must."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it has ended already
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def chosen(only: Sequence[str] | None) -> list[Place]:
    """The peers that --only names; all of them without it."""
    return [place for place in PLACES if only is None or place.name in only]
