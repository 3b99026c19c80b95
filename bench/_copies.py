"""The cases of `bench transfer`: plain memcpy, copies through the host backend, and the manager without bytes.

Must not know rounds, limits or reports.  Copies are checked outside the timed part, so that a fast wrong copy is not a
figure.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bench._measure import now_ns
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import LayerMajorMemory, PageMajorMemory, PageMemory
from kvkeep.transfer.backend import NO_WAIT, Job, Outcome
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan

#: 16 MiB a page: 32 layers of K and V, 256 KiB each.
LAYOUT = PageLayout(layers=32, kv_heads=8, head_dim=128, page_size=128, dtype="float16")
DEADLINE_S = 60.0
SEED = 11

Rows = npt.NDArray[np.uint8]
Sample = Callable[[], list[float]]


class Pools:
    """A pool that a model would read and a pool in host memory, of `pages` pages of 16 MiB each, all written to."""

    def __init__(self, pages: int, *, layer_major: bool) -> None:
        import torch

        self.pages = pages
        self.device: PageMemory
        if layer_major:  # all K pages of a layer, then all its V pages: 64 pieces a page
            shape = (2, pages, *LAYOUT.shape[2:])
            layers = [torch.zeros(shape, dtype=torch.float16) for _ in range(LAYOUT.layers)]
            self.device = LayerMajorMemory([layer.transpose(0, 1) for layer in layers])
        else:
            self.device = PageMajorMemory(torch.zeros((pages, *LAYOUT.shape), dtype=torch.float16))
        self.pool = CpuPool(LAYOUT, pages)
        assert self.pool.memory is not None
        self.host = self.pool.memory
        random = np.random.default_rng(SEED)
        for number, plane in enumerate([*self.device.planes(), *self.host.planes()]):
            assert isinstance(plane, np.ndarray)
            plane[:] = number
            plane[:, :64] = random.integers(0, 255, (pages, 64), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of either pool."""
        return self.pages * LAYOUT.page_nbytes


def plain_memcpy(pools: Pools, chunk_nbytes: int, threads: int, times: int) -> Sample:
    """GB/s of libc memmove from one pool to the other, in chunks that `threads` threads take in turn."""
    memmove = ctypes.CDLL(None).memmove
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    (plane,) = pools.device.planes()
    assert isinstance(plane, np.ndarray)
    source, target, nbytes = pools.host.rows.ctypes.data, plane.ctypes.data, pools.nbytes

    def copy(number: int) -> None:
        for at in range(number * chunk_nbytes, nbytes, threads * chunk_nbytes):
            memmove(target + at, source + at, min(chunk_nbytes, nbytes - at))

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            workers = [threading.Thread(target=copy, args=(number,)) for number in range(threads)]
            start = now_ns()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            out.append(nbytes / (now_ns() - start))
        return out

    return sample


def beside_python(sample: Sample) -> Sample:
    """The same while another thread runs Python that never waits, and so holds the interpreter whenever it can."""

    def run() -> list[float]:
        stop = threading.Event()

        def spin() -> None:
            number = 0
            while not stop.is_set():
                number += 1

        spinner = threading.Thread(target=spin)
        spinner.start()
        try:
            return sample()
        finally:
            stop.set()
            spinner.join()

    return run


def copies(pools: Pools, causes: Sequence[Cause], threads: int, times: int) -> Sample:
    """GB/s of whole pools through manager and host backend, to pages in another order; both directions at once when
    there are two causes: each then moves its own half of the pages."""
    order = np.random.default_rng(SEED).permutation(pools.pages).tolist()
    share = pools.pages // len(causes)
    plans = []
    for number, cause in enumerate(causes):
        pages = range(number * share, (number + 1) * share)
        # With two directions a page is source of one plan or target of the other, never both.
        targets = order if len(causes) == 1 else list(pages)[::-1]
        plans.append(_plan(cause, pages, targets))

    def sample() -> list[float]:
        backend = HostBackend(pools.device, pools.host, threads=threads)
        manager = TransferManager(
            backend, bytes_in_flight_max=2 * pools.nbytes, queue_pages_max=2 * pools.pages, deadline_s=DEADLINE_S
        )
        out = []
        for _ in range(times):
            start = now_ns()
            for one in plans:
                manager.submit(one, after=NO_WAIT)
            done: list[Completion] = []
            while len(done) < len(plans):
                done += manager.poll()
                if len(done) < len(plans):
                    backend.wait(1.0)
            out.append(sum(one.nbytes for one in done) / (now_ns() - start))
            assert all(one.ok for one in done)
        manager.close(drain=True, timeout_s=DEADLINE_S)
        for one in plans:
            _check(pools, one)
        return out

    return sample


class NoBytes:
    """A backend whose copies are over at once."""

    page_nbytes = 1

    def __init__(self) -> None:
        self._outcomes: list[Outcome] = []

    def launch(self, job: Job) -> None:
        self._outcomes.append(Outcome(job, None, 1))

    def completions(self) -> list[Outcome]:
        out, self._outcomes = self._outcomes, []
        return out

    def order_after(self, job: Job, stream: object) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self, timeout_s: float) -> list[Outcome]:
        return self.completions()


def manager(pages: int, times: int, parts: dict[str, list[float]] | None = None) -> Sample:
    """Microseconds of a load of `pages` pages, no bytes moved: plan, submit, the poll that starts, the poll that ends.

    parts: gets the samples of plan and submit, what happens under a cache's lock.
    """
    made = TransferManager(NoBytes(), bytes_in_flight_max=10 * pages, queue_pages_max=10 * pages, deadline_s=DEADLINE_S)
    random = np.random.default_rng(pages)
    sources, targets = (array("i", random.permutation(pages).astype(np.int32).tobytes()) for _ in range(2))
    generations = array("q", range(pages))

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = now_ns()
            one = Plan("h2d", "promote", sources, targets, generations, generations)
            made.submit(one, after=NO_WAIT)
            submitted = now_ns()
            started = made.poll()
            done = made.poll()
            end = now_ns()
            out.append((end - start) / 1e3)
            if parts is not None:
                parts.setdefault("submit", []).append((submitted - start) / 1e3)
            assert not started and len(done) == 1 and done[0].ok and done[0].nbytes == pages
        return out

    return sample


def _plan(cause: Cause, sources: Sequence[int], targets: Sequence[int]) -> Plan:
    zeros = array("q", bytes(8 * len(sources)))
    return Plan(DIRECTION_OF[cause], cause, array("i", sources), array("i", targets), zeros, zeros)


def _check(pools: Pools, plan: Plan) -> None:
    """The first and the last page have arrived."""
    source, target = (pools.host, pools.device) if plan.direction == "h2d" else (pools.device, pools.host)
    for i in (0, len(plan) - 1):
        assert source.page_bytes(plan.sources[i]) == target.page_bytes(plan.targets[i])
