"""What `kvkeep route` costs: real processes on this machine, stub replicas behind it, requests from this one.

Must not judge.  All of them share the machine's cores: what is measured includes what the client and the stubs take.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvkeep.benching import median
from kvkeep.errors import KvkeepError

ROOT = Path(__file__).resolve().parent.parent
PATH = "/v1/chat/completions"
REPLICAS = 2
#: Requests a second that are offered, and that must be kept.
OFFERED_PER_S = 500
#: Clients at a time, when as many requests as possible are sent.
CLIENTS = 16
SETTLE_S = 20.0


class Stopped(KvkeepError):
    """A process that was to be measured did not start."""


@dataclass(frozen=True, slots=True)
class Proxied:
    """What was measured, in milliseconds where nothing else is said.

    direct, proxied: of a request of a few KB, one at a time, in turn.   large_direct, large_proxied: of 400 KB.
    added: by pairs of neighbours.   offered: latency at the offered rate.   offered_per_s: answers a second of these.
    most_per_s: answers a second when clients send as fast as they can.   cpu: of the proxy's processor, a request.
    pieces: from a stream's piece being sent to its being read.   failures: requests that got no whole answer.
    """

    direct: Sequence[float]
    proxied: Sequence[float]
    large_direct: Sequence[float]
    large_proxied: Sequence[float]
    offered: Sequence[float]
    offered_per_s: float
    most_per_s: float
    cpu: float
    pieces: Sequence[float]
    failures: int

    @property
    def added(self) -> float:
        """Of the medians."""
        return median(self.proxied) - median(self.direct)


def measure_proxy(pairs: int, seconds: float) -> Proxied:
    """Starts everything, measures, ends everything.   seconds: of each load."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(_process("bench._stub_replica")) for _ in range(REPLICAS)]
        words = [word for _, address in replicas for word in ("--replica", address)]
        process, address = stack.enter_context(_process("kvkeep.cli", "route", "--port", "0", *words))
        return asyncio.run(_measure(replicas[0][1], address, process.pid, pairs, seconds))


async def _measure(direct_to: str, proxy: str, pid: int, pairs: int, seconds: float) -> Proxied:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = _Client(session)
        small = [_body(number, 6_000) for number in range(64)]
        large = [_body(number, 400_000) for number in range(8)]
        for number in range(50):
            await client.ask(direct_to, small[number % len(small)])
            await client.ask(proxy, small[number % len(small)])
        before, began = _cpu_s(pid), client.asked
        direct, proxied = await client.in_turn(direct_to, proxy, small, pairs)
        large_direct, large_proxied = await client.in_turn(direct_to, proxy, large, max(10, pairs // 20))
        offered, offered_per_s = await client.offer(proxy, small, seconds)
        most_per_s = await client.as_fast_as_possible(proxy, small, seconds)
        through_proxy = client.asked - began - len(direct) - len(large_direct)
        cpu = (_cpu_s(pid) - before) / through_proxy * 1e3
        pieces = [delay for _ in range(3) for delay in await client.stream(proxy)]
        return Proxied(
            *(direct, proxied, large_direct, large_proxied, offered),
            offered_per_s=offered_per_s,
            most_per_s=most_per_s,
            cpu=cpu,
            pieces=pieces,
            failures=client.failures,
        )


class _Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.asked = self.failures = 0

    async def ask(self, address: str, body: bytes) -> float:
        """Milliseconds that one request takes."""
        self.asked += 1
        began = time.perf_counter_ns()
        try:
            async with self._session.post(address + PATH, data=body, headers=HEADERS) as answer:
                whole = len(await answer.read()) > 800 and answer.status == 200
        except aiohttp.ClientError:
            whole = False
        self.failures += not whole
        return (time.perf_counter_ns() - began) / 1e6

    async def in_turn(
        self, direct_to: str, proxy: str, bodies: Sequence[bytes], pairs: int
    ) -> tuple[list[float], list[float]]:
        """One at a time, to a replica and to the proxy."""
        both: tuple[list[float], list[float]] = ([], [])
        for number in range(pairs):
            body = bodies[number % len(bodies)]
            both[0].append(await self.ask(direct_to, body))
            both[1].append(await self.ask(proxy, body))
        return both

    async def offer(self, proxy: str, bodies: Sequence[bytes], seconds: float) -> tuple[list[float], float]:
        """At a fixed rate, whatever the answers take.  Latency counts from when a request was due."""
        total = int(OFFERED_PER_S * seconds)
        began = time.perf_counter()

        async def one(number: int) -> float:
            due = began + number / OFFERED_PER_S
            late_ms = (time.perf_counter() - due) * 1e3
            return await self.ask(proxy, bodies[number % len(bodies)]) + late_ms

        tasks = []
        for number in range(total):
            wait_s = began + number / OFFERED_PER_S - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(one(number)))
        taken = await asyncio.gather(*tasks)
        return taken, total / (time.perf_counter() - began)

    async def as_fast_as_possible(self, proxy: str, bodies: Sequence[bytes], seconds: float) -> float:
        before, ends = self.asked, time.perf_counter() + seconds

        async def one(number: int) -> None:
            while time.perf_counter() < ends:
                await self.ask(proxy, bodies[number % len(bodies)])

        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(CLIENTS)))
        return (self.asked - before) / (time.perf_counter() - began)

    async def stream(self, proxy: str) -> list[float]:
        """Milliseconds that each piece of a stream was on its way."""
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
        delays = []
        async with self._session.post(proxy + PATH, data=body, headers=HEADERS) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    delays.append((time.monotonic_ns() - int(line[6:])) / 1e6)
        return delays


HEADERS = {"Content-Type": "application/json"}


def _body(number: int, length: int) -> bytes:
    """A chat of a system prompt that all share, a question of its own, and the rest of the conversation."""
    said = [("system", "You are careful. " * 120), ("user", f"Question {number}. " * 20), ("assistant", "w" * length)]
    messages = [{"role": role, "content": content} for role, content in [*said, ("user", "and then?")]]
    return json.dumps({"model": "stub", "messages": messages}).encode()


def _cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _process(module: str, *words: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process that prints its address first, and is ended at the end."""
    command = [sys.executable, "-m", module, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        if not line:
            raise Stopped(f"{module} ended before it served (exit code {process.wait(SETTLE_S)})")
        yield process, line[0]
    finally:
        process.terminate()
        try:
            process.communicate(timeout=SETTLE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
