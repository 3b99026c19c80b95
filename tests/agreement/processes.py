"""Ranks as real processes over gloo, and what became of each.

Must not know what a rank does: scenarios are functions of a channel (`scenarios.py`).

A server that has loaded torch forks the ranks: a group begins in a fraction of a second.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kvkeep.agreement.channel import Channel
from kvkeep.agreement.distributed import BackendName, Distributed
from kvkeep.errors import RankLost

DEADLINE_S = 2.0
#: Beyond the deadline: ten processes on two cores that others use as well.
SLACK_S = 3.0
LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """value: what the scenario returned.   error: the exception it raised, as (type, text).   code: of its exit."""

    value: Any
    error: tuple[str, str] | None
    code: int | None


def run(
    size: int,
    scenario: Callable[..., Any],
    *args: Any,
    scratch: Path,
    stopped: tuple[int, ...] = (),
    absent: tuple[int, ...] = (),
    tcp: bool = False,
    backend: BackendName = "gloo",
) -> list[Outcome]:
    """What becomes of `size` ranks that each run `scenario(channel, *args)`.   scratch: an empty folder.

    stopped: ranks that will stop themselves (SIGSTOP): they are killed once the others have ended.
    absent: ranks that die, or stop, before they join the group.
    tcp: rank 0 is where the others meet at first, and that ends with it; otherwise that is a file.
    backend: what carries blocks; "nccl" needs a CUDA device for each rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.agreement.scenarios"])
    meet_at = f"tcp://127.0.0.1:{_free_port()}" if tcp else f"file://{scratch / 'store'}"
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank,
            args=(rank, size, scratch, meet_at, rank not in absent, rank in stopped, backend, there, scenario, args),
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    said = _listen(pipes, {pipes[rank] for rank in range(size) if rank not in stopped})
    out = []
    for rank, process in enumerate(processes):
        if rank in stopped or rank not in said:
            process.join(1.0 if rank not in stopped else 0.0)
            if process.is_alive():
                process.kill()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"rank {rank} said {said.get(rank)} and did not exit")
        value, error = said.get(rank, (None, None))
        out.append(Outcome(value, error, process.exitcode))
    return out


def _listen(pipes: "list[Connection[Any, Any]]", needed: "set[Connection[Any, Any]]") -> dict[int, Any]:
    """What each rank says before it ends."""
    until, said, open_pipes = time.monotonic() + LIMIT_S, {}, set(pipes)
    while needed & open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            with contextlib.suppress(EOFError):
                said[pipes.index(pipe)] = pipe.recv()
            open_pipes.discard(pipe)
    return said


def _rank(
    rank: int,
    size: int,
    scratch: Path,
    meet_at: str,
    joins: bool,
    stops: bool,
    backend: BackendName,
    out: "Connection[Any, Any]",
    scenario: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """What one process does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=size)
    _await(scratch, "begun", rank, size)
    if not joins:
        (hang if stops else die)()  # between the world and the group
    began = time.monotonic()
    try:
        try:
            transport = Distributed(None, deadline_s=DEADLINE_S, backend=backend)
        except RankLost:
            out.send((time.monotonic() - began, None))
            return
        _await(scratch, "joined", rank, size)  # or a rank that dies at once is one that never joined
        out.send((scenario(Channel(transport), *args), None))
    except Exception as error:
        out.send((None, (type(error).__name__, str(error))))
    finally:
        out.close()


def _await(scratch: Path, what: str, rank: int, size: int) -> None:
    """Every rank gets here before one goes on."""
    (scratch / f"{what} {rank}").touch()
    until = time.monotonic() + LIMIT_S
    while len(list(scratch.glob(f"{what} *"))) < size and time.monotonic() < until:
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def die() -> None:
    """This process is gone, between two instructions."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """This process does nothing any more, and keeps its connections."""
    os.kill(os.getpid(), signal.SIGSTOP)
