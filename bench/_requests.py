"""Whole requests over W1: admit, extend, finish, through the public interface; and the memory they leave.

Must not know limits or reports.
"""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

from bench._cases import PAGE, FullPool
from bench._measure import now_ns
from bench._workload import Workload, agent_workload
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.gpu_pool import GpuPool


@dataclass
class Requests:
    """W1 over a pool of `capacity` tokens, one request live at a time; a fresh cache each round.

    The prompt and the answer are slices made outside the timed parts, as for the other caches' figures.
    parts: the calls of the last pass, microseconds each.   matched: its `matched_len`s.
    """

    workload: Workload
    capacity: int
    parts: dict[str, list[float]] = field(default_factory=dict)
    matched_share: float = 0.0
    matched: list[int] = field(default_factory=list)

    def sample(self) -> list[float]:
        """One pass: microseconds of each request."""
        cache = TieredCache(
            CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(self.capacity // PAGE), b"bench index"
        )
        self.parts = {"admit": [], "extend": [], "finish": []}
        admit, extend, finish = self.parts.values()
        out = []
        self.matched = []
        for turn in self.workload.turns:
            ids = self.workload.ids[turn.session]
            prompt, answer = ids[: turn.prompt_len], ids[turn.prompt_len : turn.final_len]
            t0 = now_ns()
            lease = cache.admit(prompt)
            t1 = now_ns()
            cache.extend(lease, answer)
            t2 = now_ns()
            cache.finish(lease, turn.kv_len)
            t3 = now_ns()
            self.matched.append(lease.matched_len)
            admit.append((t1 - t0) / 1e3)
            extend.append((t2 - t1) / 1e3)
            finish.append((t3 - t2) / 1e3)
            out.append((t3 - t0) / 1e3)
        cache.check_invariants()
        stats = cache.stats()
        assert stats.pages_live == 0 and stats.matched_tokens == sum(self.matched)
        self.matched_share = stats.matched_tokens / stats.prompt_tokens
        return out


def bytes_per_page_w1(pages: int) -> float:
    """Traced bytes a page of a cache that W1 has filled."""
    workload = _overfilling(pages)
    traced = _Traced()
    filled = _overfilled(pages, workload)
    return traced.nbytes() / filled.stats().pages_cached


def resident_bytes_per_page_w1(pages: int) -> tuple[float, float]:
    """The same as the system sees it, in a process of its own; then without what the allocator holds back."""
    root = Path(__file__).resolve().parent.parent
    code = f"from bench import _requests; print(*_requests.grown_by_w1({pages}))"
    environment = os.environ | {"PYTHONPATH": str(root)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    resident, trimmed = map(float, answer.stdout.split())
    return resident, trimmed


def grown_by_w1(pages: int) -> tuple[float, float]:
    """Bytes a page by which this process grows while W1 fills a cache, before and after malloc_trim."""
    workload = _overfilling(pages)
    gc.collect()
    before = _resident_nbytes()
    filled = _overfilled(pages, workload)
    gc.collect()
    resident = _resident_nbytes() - before
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = _resident_nbytes() - before
    cached = filled.stats().pages_cached
    return resident / cached, trimmed / cached


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _overfilling(pages: int) -> Workload:
    """W1 with as many sessions as it takes to need more than `pages`, so that tails are dropped."""
    return agent_workload(sessions=-(-pages * PAGE // 30_000))


def _overfilled(pages: int, workload: Workload) -> TieredCache:
    cache = TieredCache(CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(pages), b"bench index")
    for turn in workload.turns:
        ids = workload.ids[turn.session]
        lease = cache.admit(ids[: turn.prompt_len])
        cache.extend(lease, ids[turn.prompt_len : turn.final_len])
        cache.finish(lease, turn.kv_len)
    stats = cache.stats()
    assert stats.pages_evicted > 0 and stats.pages_cached > 0.99 * pages
    return cache


def bytes_per_page_runs(pages: int, run_pages: int) -> float:
    """Traced bytes a page of a cache filled by chains of `run_pages`."""
    baseline = _Traced()
    pool = FullPool(pages, run_pages)
    nbytes = baseline.nbytes()
    assert pool.ledger.idle == pages
    return nbytes / pages


class _Traced:
    """Bytes that Python and numpy have allocated since it was made."""

    def __init__(self) -> None:
        gc.collect()
        tracemalloc.start()

    def nbytes(self) -> int:
        gc.collect()
        found = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return found
