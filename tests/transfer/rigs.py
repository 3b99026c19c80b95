"""Backends as the conformance suite sees them: two pools of known content, and how time passes.

A rig is all that the suite knows of a backend: what differs between backends is here, what they promise is there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from kvkeep.tiers.layout import DTYPE_NBYTES
from kvkeep.tiers.memory import LayerMajorMemory, PageMajorMemory, PageMemory
from kvkeep.transfer.backend import NO_WAIT, After, Backend, BackendDied, Job, JobNumber, Outcome
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.plan import Plan
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.transfer.pools import LAYOUT, PAGES, fill_all, host_memory

PATIENCE_S = 20.0


@dataclass
class Rig:
    """A backend between two pools of `PAGES` pages each, whose contents were `device_bytes` and `host_bytes`.

    tick: lets a little time pass, in which copies may go on.
    kill: makes the backend die.   fail_next: makes jobs that are launched from now on fail.
    """

    backend: Backend
    device: PageMemory
    host: PageMemory
    tick: Callable[[], None]
    kill: Callable[[], None]
    fail_next: Callable[[], None]

    def __post_init__(self) -> None:
        self.device_bytes = fill_all(self.device, PAGES, 0)
        self.host_bytes = fill_all(self.host, PAGES, 1000)
        self._jobs = 0

    def launch(self, plan: Plan, after: After = NO_WAIT) -> Job:
        """Launches a plan as a manager would."""
        job = Job(JobNumber(self._jobs), plan, after, len(plan) * self.backend.page_nbytes, 0.0)
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


def page_major() -> PageMemory:
    """One tensor of all layers, in a dtype that numpy lacks."""
    import torch

    shape = (PAGES, *LAYOUT.shape)
    assert 2 == DTYPE_NBYTES["bfloat16"] == DTYPE_NBYTES[LAYOUT.dtype]
    return PageMajorMemory(torch.zeros(shape, dtype=torch.bfloat16))


def layer_major() -> PageMemory:
    """One tensor a layer, pages first: K and V of a page side by side."""
    import torch

    return LayerMajorMemory(
        [torch.zeros((PAGES, *LAYOUT.shape[1:]), dtype=torch.float16) for _ in range(LAYOUT.layers)]
    )


def split_layer_major() -> PageMemory:
    """One tensor a layer, all K pages before all V pages."""
    import torch

    shape = (2, PAGES, *LAYOUT.shape[2:])
    return LayerMajorMemory([torch.zeros(shape, dtype=torch.float16).transpose(0, 1) for _ in range(LAYOUT.layers)])


MEMORIES: dict[str, Callable[[], PageMemory]] = {
    "numpy": host_memory,
    "page-major": page_major,
    "layer-major": layer_major,
    "layer-major-split": split_layer_major,
}

# ---------------------------------------------------------------------- backends


@contextmanager
def host_rig(device: PageMemory) -> Iterator[Rig]:
    """Threads; a copy fails because the target may not be written."""
    host = host_memory()
    backend = HostBackend(device, host, threads=2)
    rows = [rows for route in backend._routes.values() for rows in route]

    def fail_next() -> None:
        for source, target in rows:
            for view in (source, target):
                view.flags.writeable = False

    def kill() -> None:
        end_thread(backend)

    rig = Rig(backend, device, host, lambda: backend.wait(0.01), kill, fail_next)
    try:
        yield rig
    finally:
        with suppress(BackendDied):
            backend.close(PATIENCE_S)


def end_thread(backend: HostBackend) -> None:
    """One of the copying threads meets an exception that nobody foresaw, in the middle of nowhere."""
    import ctypes

    ident = backend._threads[0].ident
    assert ident is not None
    assert 1 == ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    with backend._changed:
        backend._changed.notify_all()


@contextmanager
def simulated_rig(device: PageMemory, when: When | None = None) -> Iterator[Rig]:
    """Steps of the seed's choice."""
    host = host_memory()
    backend = SimulatedBackend(device, host, seed=len(MEMORIES), when=when)

    def fail_next() -> None:
        backend._fail_rate = 1.0

    yield Rig(backend, device, host, lambda: backend.wait(0.01), backend.die, fail_next)


RIGS: dict[str, Callable[[PageMemory], AbstractContextManager[Rig]]] = {
    "host": host_rig,
    "simulated": simulated_rig,
    "simulated-early": partial(simulated_rig, when=When.EARLY),
    "simulated-split": partial(simulated_rig, when=When.SPLIT),
    "simulated-late": partial(simulated_rig, when=When.LATE),
}
