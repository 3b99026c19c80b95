"""The cache over a device: whether a call on the admit path blocks its caller, and what a hit in host memory takes.

Must not know limits or reports.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench._gpu_copies import DEADLINE_S, Pools, open_pools, pinned_pool
from bench._gpu_machine import Machine, write_page
from bench._host_hits import TimedLock
from bench._measure import now_ns
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.transfer.backend import NO_WAIT

SEED = 5
SHORT_PAGES = 4
STRETCH = "kvkeep admit path"

#: Calls that hold up whoever makes them, or every stream of the device.
BLOCKING = frozenset(
    {
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpy3D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol"),
        *("cudaMalloc", "cudaMallocHost", "cudaMallocManaged", "cudaFree", "cudaFreeHost", "cudaHostAlloc"),
        *("cudaHostRegister", "cudaHostUnregister"),
        *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
        *("cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD"),
        *("cuMemAlloc", "cuMemFree", "cuMemAllocHost", "cuMemHostAlloc", "cuMemFreeHost"),
        *("cuMemHostRegister", "cuMemHostUnregister", "cuModuleLoadData"),
    }
)


def blocking(names: Iterable[str]) -> list[str]:
    """Those of the names that are calls which block; a driver's have suffixes such as _v2."""
    return sorted(name for name in set(names) if name.partition("_")[0] in BLOCKING)


class Observed:
    """What a stretch of code calls, by name and how often: torch's calls by its profiler, ours by the api itself.

    with observed(machine) as seen:
        ...                     nothing of this counts: the profiler itself waits for the device when it ends
        with seen.stretch():
            ...                 this does
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.names: Counter[str] = Counter()

    @property
    def cuda(self) -> dict[str, int]:
        """Only calls of CUDA."""
        return {name: count for name, count in sorted(self.names.items()) if name.startswith("cu")}

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """Everything in here is seen."""
        from torch.profiler import record_function

        calls = self._machine.calls = []
        try:
            with record_function(STRETCH):
                yield
        finally:
            self._machine.calls = None
            self.names.update(calls)


@contextmanager
def observed(machine: Machine) -> Iterator[Observed]:
    """`names` are there afterwards."""
    from torch.profiler import ProfilerActivity, profile

    seen = Observed(machine)
    activities = [ProfilerActivity.CPU]
    if machine.torch_device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield seen
    seen.names.update(names_within(profiler.events() or [], STRETCH))


def names_within(events: Iterable[Any], stretch: str) -> list[str]:
    """Names of a profiler's events that began while the one called `stretch` ran, on whatever thread."""
    all_of_them = list(events)
    ranges = [event.time_range for event in all_of_them if event.name == stretch]
    return [
        event.name
        for event in all_of_them
        if event.name != stretch and any(one.start <= event.time_range.start <= one.end for one in ranges)
    ]


def control(machine: Machine) -> tuple[list[str], list[str]]:
    """Blocking calls made on purpose, by torch and by the api: what the observer sees of either."""
    with observed(machine) as torchs, torchs.stretch():
        machine.block()
    with observed(machine) as ours, ours.stretch(), machine.api.on_device():
        machine.api.free([], [machine.api.new_device_memory(4096)])
    return blocking(torchs.names), blocking(ours.names)


# ---------------------------------------------------------------------- the admit path


@dataclass(frozen=True)
class Sizes:
    """Pages of the GPU pool, of the host tier, for suspended requests, and of a prompt."""

    pool: int
    host: int
    suspend: int
    prompt: int


class Path:
    """A cache over a device, with a chain that is in host memory only."""

    def __init__(self, machine: Machine, layout: PageLayout, sizes: Sizes) -> None:
        self._machine = machine
        self._layout, self._sizes = layout, sizes
        host = CpuPool(layout, sizes.host, sizes.suspend, pin=True, registrar=machine.api)
        self.pools = open_pools(machine, layout, sizes.pool, "page-major", None, host)
        self.cache = cache_over(self.pools, layout, sizes.pool)
        self._random = np.random.default_rng(SEED)
        self.below = self.prompt(sizes.prompt)

    def prompt(self, pages: int) -> npt.NDArray[np.int32]:
        """Token ids that fill `pages` pages, and one more."""
        return self._random.integers(0, 50_000, pages * self._layout.page_size + 1, dtype=np.int32)

    def settle(self) -> None:
        """Every copy ends."""
        until = time.monotonic() + DEADLINE_S
        while self.pools.manager.busy:
            self.cache.poll()
            if time.monotonic() > until:
                raise TimeoutError(f"copies were not over after {DEADLINE_S:g} s")

    def close(self) -> None:
        self.cache.close(drain=True, timeout_s=DEADLINE_S)
        self.pools.pool.close()

    def push_down(self) -> None:
        """The chain is in host memory only."""
        lease = self.cache.admit(self.below)
        self.settle()
        self.cache.finish(lease, len(self.below) - 1)
        filler = self.cache.admit(self.prompt(self._sizes.pool - 1), store=False)
        self.settle()
        self.cache.abort(filler)

    def walk(self, blocked: Callable[[str, Callable[[], Any]], Any]) -> None:
        """The life of requests while the model's stream is busy; `blocked(name, call)` makes each call."""
        cache = self.cache
        hit = blocked("admit a hit in host memory", lambda: cache.admit(self.below))
        assert hit.loaded_len and hit.read_in_progress, "the prompt was not in host memory"
        blocked("poll", cache.poll)
        ids = self.prompt(self._sizes.prompt)
        first = blocked("admit", lambda: cache.admit(ids[:-1]))
        blocked("extend", lambda: cache.extend(first, ids[-1:]))
        blocked("seal", lambda: cache.seal(first, len(ids) - 1))
        ticket = blocked("suspend", lambda: cache.suspend(first, len(ids) - 1))
        blocked("poll", cache.poll)
        ids = self.prompt(SHORT_PAGES)
        second = blocked("admit", lambda: cache.admit(ids))
        blocked("finish", lambda: cache.finish(second, len(ids) - 1))
        blocked("poll", cache.poll)
        rest = self._sizes.pool - 2 * (self._sizes.prompt + 1) - SHORT_PAGES // 2
        third = blocked("admit into pages that go down", lambda: cache.admit(self.prompt(rest)[:-1]))
        blocked("poll", cache.poll)
        blocked("start", self.pools.manager.start)
        blocked("abort", lambda: cache.abort(third))
        blocked("abort", lambda: cache.abort(hit))
        blocked("poll", cache.poll)
        cache.discard(ticket)


@dataclass(frozen=True)
class Walk:
    """What the admit path has called.   waited: calls that came back only when the busy stream was done.
    outlasted: whether the stream was busy to the end, so that a call that waits would have shown."""

    cuda: dict[str, int]
    blocking: list[str]
    waited: list[str]
    outlasted: bool
    longest_us: float
    longest: str


def walk(machine: Machine, layout: PageLayout, sizes: Sizes) -> Walk:
    """Goes the admit path once to warm up, and once more observed."""
    path = Path(machine, layout, sizes)
    try:
        _one_walk(machine, path)
        return _one_walk(machine, path)
    finally:
        path.close()


def _one_walk(machine: Machine, path: Path) -> Walk:
    path.push_down()
    machine.settle()
    took: dict[str, float] = {}
    waited: list[str] = []

    def blocked(name: str, call: Callable[[], Any]) -> Any:
        before, start = event.query(), now_ns()
        result = call()
        took[name] = max(took.get(name, 0.0), (now_ns() - start) / 1e3)
        if not before and event.query():
            waited.append(name)
        return result

    with observed(machine) as seen:
        event = machine.busy()  # not before: a profiler takes its time to begin
        path.cache.fence(event)
        with seen.stretch():
            path.walk(blocked)
        outlasted = not event.query()
    machine.end_busy(event)
    path.cache.fence(NO_WAIT)
    path.settle()
    path.cache.check_invariants()
    longest = max(took, key=lambda name: took[name])
    return Walk(seen.cuda, blocking(seen.names), waited, outlasted, took[longest], longest)


def cache_over(pools: Pools, layout: PageLayout, pages: int) -> TieredCache:
    """A cache over open pools."""
    return TieredCache(
        CacheConfig(page_size=layout.page_size, eviction="lru"),
        GpuPool(pages, layout, pools.memory),
        b"gpu-check",
        host=pools.pool,
        transfers=pools.manager,
    )


# ---------------------------------------------------------------------- a hit in host memory


@dataclass
class Hits:
    """Of admissions whose prefix is in host memory, microseconds: under the lock; of the whole call, which queues the
    copies; until the lease may be read.   wrong: pages that held other bytes then."""

    lock_us: list[float] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)
    ready_us: list[float] = field(default_factory=list)
    nbytes: int = 0
    wrong: int = 0


def host_hits(machine: Machine, layout: PageLayout, pages: int, times: int) -> Hits:
    """Admits a prompt of `pages` pages that are in host memory only, into a pool with room."""
    host = pinned_pool(machine, layout, 4 * pages)
    pools = open_pools(machine, layout, pages + 8, "page-major", None, host)
    cache = cache_over(pools, layout, pages + 8)
    lock = cache._lock = TimedLock()  # type: ignore[assignment]
    random = np.random.default_rng(SEED)
    size = layout.page_size
    prompt = random.integers(0, 50_000, pages * size + 1, dtype=np.int32)
    filler = random.integers(0, 50_000, (pages + 8) * size, dtype=np.int32)
    looked_at = [0, pages // 2, pages - 1]
    content = [random.bytes(layout.page_nbytes) for _ in looked_at]
    hits = Hits(nbytes=pages * layout.page_nbytes)

    def settle() -> None:
        while pools.manager.busy:
            cache.poll()

    def push_out() -> None:
        lease = cache.admit(filler, store=False)
        settle()
        pools.memory.poison(list(range(pages + 8)))
        machine.settle()
        cache.abort(lease)

    try:
        first = cache.admit(prompt)
        for at, data in zip(looked_at, content, strict=True):
            write_page(pools.memory, first.pages[at], data)
        machine.settle()
        cache.finish(first, pages * size)
        push_out()
        for _ in range(times):
            lock.held_ns = 0
            start = now_ns()
            lease = cache.admit(prompt)
            hits.call_us.append((now_ns() - start) / 1e3)
            hits.lock_us.append(lock.held_ns / 1e3)
            assert lease.loaded_len == pages * size, lease.loaded_len
            while lease.read_in_progress:
                cache.poll()
            hits.ready_us.append((now_ns() - start) / 1e3)
            read = [pools.memory.page_bytes(lease.pages[at]) for at in looked_at]
            hits.wrong += sum(one != data for one, data in zip(read, content, strict=True))
            cache.finish(lease, pages * size)
            push_out()
        cache.check_invariants()
    finally:
        cache.close(drain=True, timeout_s=DEADLINE_S)
        host.close()
    return hits
