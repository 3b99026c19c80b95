"""Copies through the transfer manager and the backend that is checked: how fast they are, and whether all bytes arrive.

Must not know limits or reports.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from bench._gpu_machine import LAYOUTS, Machine, new_memory, write_page
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import PageMemory
from kvkeep.tiers.pinning import Registrar
from kvkeep.transfer.backend import NO_WAIT, Backend
from kvkeep.transfer.cuda_api import CudaFault
from kvkeep.transfer.cuda_ways import WAYS, Way
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan

DEADLINE_S = 30.0
HALT_S = 10.0
SEED = 17


@dataclass
class Pools:
    """Memory that a model reads, host pages, and what copies between them."""

    memory: PageMemory
    pool: CpuPool
    backend: Backend
    manager: TransferManager

    def close(self) -> None:
        self.manager.close(drain=True, timeout_s=DEADLINE_S)
        self.pool.close()


def open_pools(machine: Machine, layout: PageLayout, pages: int, kind: str, way: Way | None, pool: CpuPool) -> Pools:
    """Pools of `pages` pages each."""
    memory = new_memory(machine, layout, pages, kind)
    machine.settle()
    backend = machine.backend(memory, pool, way)
    nbytes = pages * layout.page_nbytes
    manager = TransferManager(backend, bytes_in_flight_max=2 * nbytes, queue_pages_max=2 * pages, deadline_s=DEADLINE_S)
    return Pools(memory, pool, backend, manager)


def pinned_pool(machine: Machine, layout: PageLayout, pages: int) -> CpuPool:
    """Host pages that are pinned, or `BadInput`."""
    return CpuPool(layout, pages, pin=True, registrar=machine.api)


def move(manager: TransferManager, plans: Sequence[Plan]) -> list[Completion]:
    """Submits plans and polls, without a pause, until all are over."""
    for plan in plans:
        if manager.submit(plan, after=NO_WAIT) is None:
            raise CudaFault(f"a copy of {len(plan)} pages was not taken: {manager.dead or 'the queue is full'}")
    done: list[Completion] = []
    while len(done) < len(plans):
        done += manager.poll()
    for completion in done:
        if not (completion.ok and completion.final):
            raise CudaFault(f"{completion.job}: {completion.error}")
    return done


def plan_of(cause: Cause, sources: Sequence[int], targets: Sequence[int]) -> Plan:
    """A plan whose generations are all 0."""
    zeros = array("q", bytes(8 * len(sources)))
    return Plan(DIRECTION_OF[cause], cause, array("i", sources), array("i", targets), zeros, zeros)


def rate(pools: Pools, causes: Sequence[Cause], times: int) -> Callable[[], list[float]]:
    """GB/s of whole pools, in another order than they lie; two causes share the pages, and run at once."""
    pages = pools.pool.pages
    order = np.random.default_rng(SEED).permutation(pages).tolist()
    share = pages // len(causes)
    plans = []
    for number, cause in enumerate(causes):
        mine = order[number * share : (number + 1) * share]
        plans.append(plan_of(cause, mine, mine[::-1]))

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = time.perf_counter_ns()
            done = move(pools.manager, plans)
            out.append(sum(one.nbytes for one in done) / (time.perf_counter_ns() - start))
        return out

    return sample


# ---------------------------------------------------------------------- all bytes arrive


@dataclass(frozen=True)
class RoundTrip:
    """Pages that went to host memory and came back.

    different: pages that were not the same bytes afterwards, or not in host memory.   error: why it could not be done.
    """

    kind: str
    way: Way
    pin: str
    pages: int
    different: int
    error: str | None


def round_trips(machine: Machine, layout: PageLayout, pages: int) -> Iterator[RoundTrip]:
    """Random pages through host memory and back, each way, over each layout, pinned or not, or not yet."""
    for kind in LAYOUTS:
        for way in WAYS:
            for pin, result in _over_pins(machine, layout, pages, kind, way):
                yield RoundTrip(kind, way, pin, pages, *result)


def _over_pins(
    machine: Machine, layout: PageLayout, pages: int, kind: str, way: Way
) -> Iterator[tuple[str, tuple[int, str | None]]]:
    yield "pinned", _tried(machine, layout, pages, kind, way, lambda: pinned_pool(machine, layout, pages))
    yield "unpinned", _tried(machine, layout, pages, kind, way, lambda: CpuPool(layout, pages, pin=False))
    with halting_registrar(machine.api, chunks=pages // 2) as registrar:

        def half() -> CpuPool:
            pool = CpuPool(
                layout, pages, pin=True, registrar=registrar, background=True, chunk_nbytes_max=layout.page_nbytes
            )
            registrar.wait_halted()
            return pool

        def rest(pool: CpuPool) -> None:
            registrar.go_on()
            pool.wait_pinned(DEADLINE_S)

        result = _tried(machine, layout, pages, kind, way, half, rest)
    yield "half pinned, then all", result


def _tried(
    machine: Machine,
    layout: PageLayout,
    pages: int,
    kind: str,
    way: Way,
    new_pool: Callable[[], CpuPool],
    then: Callable[[CpuPool], None] | None = None,
) -> tuple[int, str | None]:
    try:
        pools = open_pools(machine, layout, pages, kind, way, new_pool())
    except CudaFault as fault:
        return pages, str(fault)
    try:
        different = _there_and_back(machine, pools, layout)
        if then is not None:
            then(pools.pool)
            different += _there_and_back(machine, pools, layout)
        return different, None
    except CudaFault as fault:
        return pages, str(fault)
    finally:
        with suppress(CudaFault):
            pools.close()


def _there_and_back(machine: Machine, pools: Pools, layout: PageLayout) -> int:
    """How many pages differ afterwards, from what was written or from what lay in host memory meanwhile."""
    pages = list(range(pools.pool.pages))
    random = np.random.default_rng(SEED)
    order = random.permutation(len(pages)).tolist()
    written = [random.bytes(layout.page_nbytes) for _ in pages]
    for page in pages:
        write_page(pools.memory, page, written[page])
    machine.settle()
    move(pools.manager, [plan_of("demote", pages, order)])
    assert pools.pool.memory is not None
    in_host = [pools.pool.memory.page_bytes(order[page]) for page in pages]
    pools.memory.poison(pages)
    machine.settle()
    move(pools.manager, [plan_of("promote", order, pages)])
    return sum(not (written[i] == in_host[i] == pools.memory.page_bytes(i)) for i in pages)


class HaltingRegistrar:
    """Registers so many chunks, then waits until it may go on: a pool whose pinning takes its time."""

    def __init__(self, real: Registrar, chunks: int) -> None:
        self._real = real
        self._left = chunks
        self._halted = threading.Event()
        self._may_go_on = threading.Event()

    def register(self, address: int, nbytes: int) -> None:
        if not self._left:
            self._halted.set()
            if not self._may_go_on.wait(HALT_S):
                raise CudaFault("the registration was never told to go on")
            self._left = -1
        self._left -= self._left > 0
        self._real.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._real.unregister(address)

    def wait_halted(self) -> None:
        """Blocks until it waits."""
        if not self._halted.wait(HALT_S):
            raise CudaFault("the registration has not come this far")

    def go_on(self) -> None:
        """The rest may be registered."""
        self._may_go_on.set()


@contextmanager
def halting_registrar(real: Registrar, chunks: int) -> Iterator[HaltingRegistrar]:
    """One that never keeps its thread waiting for ever."""
    made = HaltingRegistrar(real, chunks)
    try:
        yield made
    finally:
        made.go_on()


# ---------------------------------------------------------------------- pinning


def pinning(machine: Machine, layout: PageLayout, pages: int) -> Callable[[], list[float]]:
    """Seconds a GiB: memory taken from the system and registered, as an engine's start does it."""

    def sample() -> list[float]:
        start = time.perf_counter()
        pool = pinned_pool(machine, layout, pages)
        seconds = time.perf_counter() - start
        nbytes = pool.nbytes
        pool.close()
        return [seconds / (nbytes / 2**30)]

    return sample
