"""Backends as the conformance suite sees them: two pools of known content, and how time passes.

A rig is all that the suite knows of a backend: what differs between backends is here, what they promise is there.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import pytest

from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import DTYPE_NBYTES
from kvkeep.tiers.memory import LayerMajorMemory, PageMajorMemory, PageMemory
from kvkeep.transfer.backend import NO_WAIT, After, Backend, BackendDied, Job, JobNumber, Outcome
from kvkeep.transfer.cuda import CudaBackend
from kvkeep.transfer.cuda_api import CudaApi
from kvkeep.transfer.cuda_ways import Way
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.plan import Plan
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.transfer.emulated import ComputeEvent, EmulatedDevice
from tests.transfer.pools import LAYOUT, PAGES, Flag, fill_all, host_memory
from tests.transfer.twin import kernel_twin

PATIENCE_S = 20.0


@dataclass
class Rig:
    """A backend between two pools of `PAGES` pages each, whose contents were `device_bytes` and `host_bytes`.

    tick: lets a little time pass, in which copies may go on.
    kill: makes the backend die.   fail_next: makes jobs that are launched from now on fail.
    new_event: an event that is done when a test sets `done`.
    let_go: from now on time passes without ticks, as it does on a device.
    settle: waits until what the test itself has written is there.
    in_order: a job that waits for its event holds up those of its direction behind it, as on a stream.
    """

    backend: Backend
    device: PageMemory
    host: PageMemory
    tick: Callable[[], None]
    kill: Callable[[], None]
    fail_next: Callable[[], None]
    new_event: "Callable[..., Flag | ComputeEvent | DeviceFlag]" = Flag
    let_go: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None
    in_order: bool = False

    def __post_init__(self) -> None:
        self.device_bytes = fill_all(self.device, PAGES, 0)
        self.host_bytes = fill_all(self.host, PAGES, 1000)
        self._jobs = 0

    def launch(self, plan: Plan, after: After = NO_WAIT) -> Job:
        """Launches a plan as a manager would."""
        self.settle()
        job = Job(JobNumber(self._jobs), plan, after, plan.nbytes(self.backend.page_nbytes), 0.0)
        self._jobs += 1
        self.backend.launch(job)
        return job

    def finish(self, *jobs: Job) -> dict[Job, Outcome]:
        """Lets time pass until the jobs are over; everything that was reported."""
        out: dict[Job, Outcome] = {}
        until = time.monotonic() + PATIENCE_S
        while not set(jobs) <= set(out):
            assert time.monotonic() < until, f"not over after {PATIENCE_S} s: {set(jobs) - set(out)}"
            self.tick()
            for outcome in self.backend.completions():
                assert outcome.job not in out, f"{outcome.job} was reported twice"
                out[outcome.job] = outcome
        return out

    def bytes(self) -> tuple[list[bytes], list[bytes]]:
        """What the pages of the device's pool and of the host's hold now."""
        return (
            [self.device.page_bytes(page) for page in range(PAGES)],
            [self.host.page_bytes(page) for page in range(PAGES)],
        )


# ---------------------------------------------------------------------- memory

MEMORIES = ("numpy", "page-major", "layer-major", "layer-major-split")


def make_memory(kind: str, device: str = "cpu") -> PageMemory:
    """`PAGES` pages as numpy rows, or as an engine may have them: one tensor in a dtype that numpy lacks; one tensor a
    layer, K and V of a page side by side; one tensor a layer, all K pages before all V pages."""
    if kind == "numpy" and device == "cpu":
        return host_memory()
    import torch

    if kind in ("numpy", "page-major"):
        assert DTYPE_NBYTES["bfloat16"] == DTYPE_NBYTES[LAYOUT.dtype]
        return PageMajorMemory(torch.zeros((PAGES, *LAYOUT.shape), dtype=torch.bfloat16, device=device))
    split = kind == "layer-major-split"
    shape = (2, PAGES, *LAYOUT.shape[2:]) if split else (PAGES, *LAYOUT.shape[1:])
    layers = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(LAYOUT.layers)]
    return LayerMajorMemory([layer.transpose(0, 1) for layer in layers] if split else layers)


# ---------------------------------------------------------------------- backends


@contextmanager
def host_rig(kind: str) -> Iterator[Rig]:
    """Threads; a copy fails because the target may not be written."""
    device, host = make_memory(kind), host_memory()
    backend = HostBackend(device, host, threads=2)

    def fail_next() -> None:
        for route in backend._routes.values():
            for source, target in route:
                source.flags.writeable = target.flags.writeable = False
        for slots in backend._slot_routes.values():
            for plane in slots.targets:
                plane.flags.writeable = False

    rig = Rig(backend, device, host, lambda: backend.wait(0.01), lambda: end_thread(backend), fail_next)
    try:
        yield rig
    finally:
        with suppress(BackendDied):
            backend.close(PATIENCE_S)


def end_thread(backend: HostBackend) -> None:
    """One of the copying threads meets an exception that nobody foresaw, in the middle of nowhere."""
    ident = backend._threads[0].ident
    assert ident is not None
    assert 1 == ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    with backend._changed:
        backend._changed.notify_all()


@contextmanager
def simulated_rig(kind: str, when: When | None = None) -> Iterator[Rig]:
    """Steps of the seed's choice."""
    device, host = make_memory(kind), host_memory()
    backend = SimulatedBackend(device, host, seed=1, when=when)

    def fail_next() -> None:
        backend._fail_rate = 1.0

    yield Rig(backend, device, host, lambda: backend.wait(0.01), backend.die, fail_next)


@contextmanager
def emulated_cuda_rig(kind: str, way: Way) -> Iterator[Rig]:
    """The CUDA backend, and streams that the seed moves."""
    if way == "kernel" and kernel_twin() is None:
        pytest.skip("there is no C compiler to compile the kernel for the processor")
    api = EmulatedDevice(seed=2)
    device, pool = make_memory(kind), CpuPool(LAYOUT, PAGES, registrar=api)
    assert pool.memory is not None
    backend = CudaBackend(api, device, pool, way=way)

    def fail_next() -> None:
        api.fails = True

    def kill() -> None:
        api.dead = True

    def let_go() -> None:
        api.moves_itself = True

    new_event = partial(ComputeEvent, api)
    yield Rig(backend, device, pool.memory, api.tick, kill, fail_next, new_event, let_go, in_order=True)


@contextmanager
def cuda_rig(kind: str) -> Iterator[Rig]:
    """A real device: its copies cannot be made to fail, nor can it be killed."""
    try:
        import torch
    except ImportError:
        pytest.skip("torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    api = CudaApi(0)
    device, pool = make_memory(kind, "cuda"), CpuPool(LAYOUT, PAGES, pin=True, registrar=api)
    assert pool.memory is not None
    backend = CudaBackend(api, device, pool)

    def cannot() -> None:
        pytest.skip("a real device cannot be made to fail on demand")

    def tick() -> None:
        time.sleep(0.001)

    def settle() -> None:
        """Of this stream only: others wait for flags."""
        torch.cuda.current_stream().synchronize()

    flags: list[DeviceFlag] = []

    def new_event(done: bool = False) -> DeviceFlag:
        flags.append(DeviceFlag(done))
        return flags[-1]

    try:
        yield Rig(backend, device, pool.memory, tick, cannot, cannot, new_event, settle=settle, in_order=True)
    finally:
        for flag in flags:
            flag.done = True  # or waiting for the device would be for ever
        torch.cuda.synchronize()
        backend.close(PATIENCE_S)
        pool.close()


class DeviceFlag:
    """A `torch.cuda.Event` behind work that ends when `done` is set: its stream waits for a word in memory."""

    def __init__(self, done: bool = False) -> None:
        import torch
        from cuda.bindings import driver

        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._event = torch.cuda.Event()
        stream = torch.cuda.Stream()
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        self.done = done
        (error,) = driver.cuStreamWaitValue32(stream.cuda_stream, self._word.data_ptr(), 1, equal)
        assert error == driver.CUresult.CUDA_SUCCESS
        self._event.record(stream)
        self.cuda_event = self._event.cuda_event

    @property
    def done(self) -> bool:
        """Whether it has been set."""
        return bool(self._word[0])

    @done.setter
    def done(self, value: bool) -> None:
        import torch

        torch.cuda.current_stream().synchronize()  # what the test has written before is there
        self._word[0] = int(value)

    def query(self) -> bool:
        """Whether the work before it is over."""
        return bool(self._event.query())


RIGS: dict[str, Callable[[str], AbstractContextManager[Rig]]] = {
    "host": host_rig,
    "simulated": simulated_rig,
    "simulated-early": partial(simulated_rig, when=When.EARLY),
    "simulated-split": partial(simulated_rig, when=When.SPLIT),
    "simulated-late": partial(simulated_rig, when=When.LATE),
    "cuda-emulated-dma": partial(emulated_cuda_rig, way="dma"),
    "cuda-emulated-batch": partial(emulated_cuda_rig, way="batch"),
    "cuda-emulated-kernel": partial(emulated_cuda_rig, way="kernel"),
    "cuda": cuda_rig,
}
