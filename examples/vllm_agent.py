"""Agents that take turns at one vLLM server, whose KV space is too small for all of them; kvkeep's tier keeps the rest.

    .venv-vllm/bin/python examples/vllm_agent.py        after `make vllm-environment`: SmolLM2-135M, on a CPU
    python examples/vllm_agent.py --model MODEL         anything that vLLM serves
    python examples/vllm_agent.py --base-url URL        a server that is up (.../v1), started as `server` below does it

Each agent reads a file, a piece a turn, as if a tool had printed it, and says a sentence about it.  When its turn comes
again, the others have pushed its prefix out of vLLM's blocks.  `--without` starts the server without kvkeep.
"""

import argparse
import ast
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import openai

ROOT = Path(__file__).resolve().parent.parent
READ: tuple[ModuleType, ...] = (argparse, ast, inspect, json, tempfile, subprocess)
LINES_A_TURN, TURNS_MAX = 40, 6
SYSTEM = (
    "You are a careful programmer who reads code. After each piece you say, in one short sentence, what it is for. "
)
CONNECTOR = {
    "kv_connector": "KvkeepConnector",
    "kv_connector_module_path": "kvkeep.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_tier_gib": 1},
}
#: vLLM's KV space, in blocks of 128 tokens: room for the longest conversation there can be, and little more.
LENGTH_MAX = 3328
BLOCKS = LENGTH_MAX // 128 + 1


class Agent:
    """One conversation.   messages: what every turn's prompt is made of, so that each begins with the one before."""

    def __init__(self, file: ModuleType) -> None:
        self._lines, self._at = Path(str(file.__file__)).read_text().splitlines(), 0
        self.name = file.__name__
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM * 4}]

    def turn(self, client: openai.OpenAI, model: str) -> str:
        """Reads the next piece, asks what it is for, and returns what there is to say of the turn."""
        piece = "\n".join(self._lines[self._at : self._at + LINES_A_TURN])
        self._at += LINES_A_TURN
        self.messages.append({"role": "user", "content": f"read {self.name}.py:\n{piece}\nWhat is this for?"})
        asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
        began, first, words, usage = time.perf_counter(), None, [], None
        for chunk in client.chat.completions.create(model=model, messages=self.messages, max_tokens=40, **asked):
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter() - began
                words.append(chunk.choices[0].delta.content)
            usage = chunk.usage or usage
        said = "".join(words).strip()
        self.messages.append({"role": "assistant", "content": said})
        details = usage and usage.prompt_tokens_details
        at_hand = (details.cached_tokens or 0) if details else "an unknown number"
        tokens = usage.prompt_tokens if usage else 0
        return (
            f"> {self.name}, from line {self._at - LINES_A_TURN + 1}\n{said}\n"
            f"  [{tokens} prompt tokens, {at_hand} at hand; first token after {1e3 * (first or 0):.0f} ms]\n"
        )


@contextmanager
def server(model: str, *, kept: bool) -> Iterator[str]:
    """A vLLM server of our own; its log is a temporary file that is named where it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", model, "--served-model-name", "model", "--dtype", "bfloat16", "--enforce-eager"]
    words += ["--block-size", "128", "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(LENGTH_MAX)]
    words += ["--enable-prompt-tokens-details", *(["--kv-transfer-config", json.dumps(CONNECTOR)] if kept else [])]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the server would outlive us
    with tempfile.NamedTemporaryFile("w", prefix="vllm-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            words,
            env={**settings, **os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        print("starting vLLM, which takes about a minute ...", flush=True)
        while not healthy(port):
            if process.poll() is not None:
                sys.exit(f"vLLM did not start: see {log.name}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
        Path(log.name).unlink()
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def smollm2() -> str:
    """A directory of SmolLM2-135M-Instruct that vLLM can read; it is made the first time."""
    sys.path.insert(0, str(ROOT))
    from bench._vllm_models import smollm2_directory

    return str(smollm2_directory(ROOT / ".cache"))


def chat(url: str, agents: int, turns: int) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    hello: list[Any] = [{"role": "user", "content": "Hello."}]
    client.chat.completions.create(model=model, messages=hello, max_tokens=1)  # what a server does once is not shown
    readers = [Agent(file) for file in READ[:agents]]
    for _ in range(turns):
        for reader in readers:
            print(reader.turn(client, model), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Agents that take turns at one vLLM server.", allow_abbrev=False)
    parser.add_argument("--base-url", metavar="URL", help="of a server that is up, with /v1 at its end")
    parser.add_argument("--model", help="what to serve where none is up (SmolLM2-135M-Instruct)")
    parser.add_argument("--agents", type=int, default=4, metavar="N", help=f"1 to {len(READ)} (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help=f"of each, 1 to {TURNS_MAX} (%(default)s)")
    parser.add_argument("--without", action="store_true", help="start the server without kvkeep")
    options = parser.parse_args()
    if not (1 <= options.agents <= len(READ) and 1 <= options.turns <= TURNS_MAX):
        parser.error(f"--agents must be 1 to {len(READ)}, --turns 1 to {TURNS_MAX}")
    if options.base_url:
        chat(options.base_url, options.agents, options.turns)
        return
    with server(options.model or smollm2(), kept=not options.without) as url:
        chat(url, options.agents, options.turns)


if __name__ == "__main__":
    main()
