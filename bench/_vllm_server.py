"""Real server processes: vLLM's OpenAI server, LMCache's server beside it; their logs, metrics and memory.

Must not know workloads or how anything is judged.  Whatever happens, no process is left behind.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
MODEL_NAME = "model"
START_S_MAX = 300.0
STOP_S_MAX = 30.0
GONE_S_MAX = 5.0
MEMORY_EVERY_S = 1.0
TAIL_LINES = 15

#: The same for all, so that configurations compare: without a binding of threads vLLM keeps no core for a connector.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "LMCACHE_TRACK_USAGE": "false",
}
#: Lines of a log that say that something went wrong.  vLLM's own words after a stop are not looked at.
BAD_LINE = re.compile(r"\b(?:ERROR|CRITICAL|Traceback|Exception|Segmentation fault|Killed)\b")


class ServerFailed(RuntimeError):
    """A server did not start, or ended by itself; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """How vLLM is started.

    blocks: of the KV space, the null block included.   block_size, length_max: tokens.
    connector: the value of --kv-transfer-config; None for vLLM alone.
    python: the interpreter, of an environment that has vLLM.   environment: added to that of all servers.
    """

    model: Path
    blocks: int
    block_size: int = 128
    length_max: int = 8192
    connector: Mapping[str, Any] | None = None
    python: str = sys.executable
    kv_space_gib: int = 2
    more: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        words = [
            os.path.abspath(self.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        words += ["--model", str(self.model.resolve()), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"]
        words += ["--enforce-eager", "--max-model-len", str(self.length_max), "--block-size", str(self.block_size)]
        words += ["--num-gpu-blocks-override", str(self.blocks), "--enable-prefix-caching"]
        words += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        if self.connector is not None:
            words += ["--kv-transfer-config", json.dumps(self.connector)]
        return [*words, *self.more]


@dataclass(slots=True)
class Process:
    """One started command, its log, and the place in the log where it was told to stop.

    started_s: from the start to the first answer.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    _process: "subprocess.Popen[bytes] | None" = None
    _log_end: int | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT))))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(self.command),
                cwd=self.log.parent,  # else a package of the folder the bench runs in would come before PYTHONPATH's
                env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check_alive(self) -> None:
        """Raises `ServerFailed` where it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerFailed(f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def bad_lines(self) -> list[str]:
        """Lines up to the stop that say that something went wrong."""
        text = self.log.read_bytes()[: self._log_end].decode(errors="replace")
        return [line[:300] for line in text.splitlines() if BAD_LINE.search(line)]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to all that is left of its session."""
        process = self._process
        if process is None:
            return
        self._log_end = self.log.stat().st_size
        family = _with_children([process.pid])
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S_MAX)
        with suppress(ProcessLookupError):  # none is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(family, timeout=GONE_S_MAX)  # what is killed gives its memory back a little later


class Memory(threading.Thread):
    """Watches the memory of some processes and all of their children, in a thread, until `stop`.

    peak_nbytes: the most at once; proportional set size, so that what processes share counts once.
    """

    def __init__(self, pids: Sequence[int], every_s: float = MEMORY_EVERY_S) -> None:
        super().__init__(name="memory", daemon=True)
        self._pids, self._every_s, self._stopped = tuple(pids), every_s, threading.Event()
        self.peak_nbytes = 0
        self.samples = 0

    def run(self) -> None:
        while True:
            self.peak_nbytes = max(self.peak_nbytes, pss_nbytes(self._pids))
            self.samples += 1
            if self._stopped.wait(self._every_s):
                return

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def pss_nbytes(pids: Sequence[int]) -> int:
    """Proportional set size of the processes and all of their children, bytes; those that end meanwhile count 0."""
    total = 0
    for process in _with_children(pids):
        with suppress(psutil.NoSuchProcess):
            total += int(process.memory_full_info().pss)
    return total


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that the processes and their children have used so far, seconds."""
    total = 0.0
    for process in _with_children(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _with_children(pids: Sequence[int]) -> list[psutil.Process]:
    seen: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            seen |= {process.pid: process for process in (parent, *parent.children(recursive=True))}
    return list(seen.values())


class Served:
    """A vLLM server, and what it needs beside it, as a context: up inside, gone outside.

    lmcache_gib: size of LMCache's memory, where its server is to run; its connector is then vLLM's.
    """

    def __init__(self, setup: VllmSetup, logs: Path, name: str, lmcache_gib: float | None = None) -> None:
        self._port = free_port()
        self.processes: list[Process] = []
        if lmcache_gib is not None:
            port = free_port()
            setup, server = _with_lmcache(setup, port, lmcache_gib)
            self.processes.append(Process("lmcache", server, logs / f"{name}.lmcache.log"))
        space = {"VLLM_CPU_KVCACHE_SPACE": str(setup.kv_space_gib), **setup.environment}
        self.vllm = Process("vllm", setup.command(self._port), logs / f"{name}.vllm.log", space)
        self.processes.append(self.vllm)
        self.setup = setup
        self.memory = Memory(())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            for process in self.processes:
                process.start()
            self._wait_until_up()
            self.memory = Memory([process.pid for process in self.processes])
            self.memory.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def bad_lines(self) -> list[str]:
        return [line for process in self.processes for line in process.bad_lines()]

    def metrics(self) -> dict[str, float]:
        """What /metrics says now: by name, `name{label=value}` beside for those that have a source or a reason.

        Counters end with _total; the engine's and the model's labels are left out, and equal names are summed.
        """
        return parse_metrics(self.get("/metrics"))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def pss_nbytes(self) -> int:
        """Memory of all processes now."""
        return pss_nbytes([process.pid for process in self.processes])

    def cpu_s(self) -> float:
        """Processor time of all processes so far, seconds."""
        return cpu_s([process.pid for process in self.processes])

    def check_alive(self) -> None:
        for process in self.processes:
            process.check_alive()

    def _wait_until_up(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < START_S_MAX:
            self.check_alive()
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
                continue
            self.vllm.started_s = time.monotonic() - began
            return
        raise ServerFailed(f"vllm does not answer after {START_S_MAX:.0f} s:\n{self.vllm.tail()}")

    def _stop(self) -> None:
        if self.memory.is_alive():
            self.memory.stop()
        for process in reversed(self.processes):
            process.stop()


def _with_lmcache(setup: VllmSetup, port: int, gib: float) -> tuple[VllmSetup, list[str]]:
    """vLLM over LMCache's server, and the server: chunks of vLLM's blocks, so that both match as finely as we do."""
    server = [
        os.path.abspath(setup.python),
        "-m",
        "lmcache.v1.multiprocess.server",
        "--host",
        "localhost",
        "--port",
        str(port),
    ]
    server += ["--chunk-size", str(setup.block_size), "--l1-size-gb", f"{gib:.3f}", "--no-l1-use-lazy"]
    server += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--disable-observability"]
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return replace(setup, connector=connector), server


KEPT_LABELS = frozenset({"source", "reason", "finished_reason", "tier", "state", "kind", "direction", "cause", "how"})


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus exposition; see `Served.metrics`.  Buckets of histograms are left out."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            out[sample.name] = out.get(sample.name, 0.0) + sample.value
            kept = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key in KEPT_LABELS)
            if kept:
                key = f"{sample.name}{{{kept}}}"
                out[key] = out.get(key, 0.0) + sample.value
    return out


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
