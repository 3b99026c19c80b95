"""Ranks in processes of their own, each timing the same steps: a bare all-reduce, an agreement, a poll.

Must not know which figure is held against what.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench._measure import quiet_gc
from kvkeep.agreement.channel import Channel
from kvkeep.agreement.distributed import Distributed
from kvkeep.agreement.follower import Follower
from kvkeep.agreement.group import Group
from kvkeep.agreement.leader import Leader
from kvkeep.agreement.minimum import Minimum
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.gpu_pool import GpuPool

PAGE_SIZE = 128
FINGERPRINT = b"bench"
WARM_UP = 20
LIMIT_S = 170.0

#: By what is timed, microseconds of each round, of the slowest rank.
Rounds = dict[str, list[float]]


def timed(mechanism: str, size: int, pages: int, rounds: int) -> Rounds:
    """`size` ranks agree `rounds` times on a prompt of whose pages all have `pages`.

    "all_reduce": a bare one, of 8 numbers, over gloo.   "admit": until every rank has its lease.   "run": and until
    every rank may run it.   "extend": one page more.   Every step begins when all ranks are there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "bench._ranks"])
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as scratch:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            args = (rank, size, f"file://{Path(scratch) / 'store'}", mechanism, pages, rounds, there)
            process = context.Process(target=_rank, args=args)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        until = time.monotonic() + LIMIT_S
        try:
            said = [pipe.recv() if pipe.poll(max(0.0, until - time.monotonic())) else None for pipe in pipes]
        except EOFError:
            said = [None]
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
    found: list[Rounds] = [one for one in said if one is not None]
    if len(found) < size:
        raise RuntimeError(f"bench agreement: of {size} ranks {size - len(found)} have not come to their end")
    return {name: np.max([one[name] for one in found], axis=0).tolist() for name in found[0]}


def _rank(rank: int, size: int, meet_at: str, mechanism: str, pages: int, rounds: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet_at, rank=rank, world_size=size)
    channel = Channel(Distributed(None, deadline_s=20.0, backend="gloo"))
    numbers = torch.zeros(8, dtype=torch.int64)

    def all_reduce() -> None:
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN)

    prompt = np.arange(pages * PAGE_SIZE + 1, dtype=np.int32)
    group = _group(channel, mechanism, pages, prompt)
    samples: Rounds = {"all_reduce": [], "admit": [], "run": [], "extend": []}
    with quiet_gc():
        for at in range(rounds + WARM_UP):
            if at == WARM_UP:
                for found in samples.values():
                    found.clear()
            all_reduce()
            samples["all_reduce"].append(_us(all_reduce))
            all_reduce()
            began = time.perf_counter_ns()
            lease = group.admit(prompt)
            admitted = time.perf_counter_ns()
            group.poll()
            ready = time.perf_counter_ns()
            if lease.matched_len != pages * PAGE_SIZE:
                raise RuntimeError(f"{lease.matched_len} positions matched, {pages * PAGE_SIZE} are there")
            samples["admit"].append((admitted - began) / 1000)
            samples["run"].append((ready - began) / 1000)
            all_reduce()
            samples["extend"].append(_us(lambda lease=lease: group.extend(lease, room=PAGE_SIZE)))  # type: ignore[misc]
            group.abort(lease)
    out.send(samples)
    out.close()
    all_reduce()
    group.close()
    dist.destroy_process_group()


def _group(channel: Channel, mechanism: str, pages: int, prompt: "np.ndarray[Any, np.dtype[np.int32]]") -> Group:
    """One whose caches have the prompt."""
    pool = 2 * pages + 16
    if mechanism == "leader" and channel.rank:
        return Group(channel, Follower(PAGE_SIZE, pool), FINGERPRINT)
    cache = TieredCache(CacheConfig(page_size=PAGE_SIZE), GpuPool.bookkeeping(pool), FINGERPRINT)
    cache.finish(cache.admit(prompt), pages * PAGE_SIZE)
    how = Minimum(cache) if mechanism == "minimum" else Leader(cache)
    return Group(channel, how, FINGERPRINT)


def _us(call: Callable[[], Any]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000
