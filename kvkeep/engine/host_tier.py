"""The engine's host memory: a pool, and copies between it and the pool that the model reads.

Must not know requests, or what the cache keeps there.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.backend import NO_WAIT, After, Backend
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager

#: Makes the backend to use of a backend, the memory of the GPU pool and that of the host pool.
WrapBackend = Callable[[Backend, PageMemory, PageMemory], Backend]
#: Copies that run at the same time: enough to keep a link busy, few enough that a new load does not wait long.
IN_FLIGHT_NBYTES_MAX = 256 * 2**20
#: After this a copy is taken to be lost: thousands of times what the largest one takes.
DEADLINE_S = 30.0


class Sizes(Protocol):
    """The settings that this needs of an engine's."""

    @property
    def host_pages(self) -> int: ...
    @property
    def suspend_pages(self) -> int: ...
    @property
    def copy_threads(self) -> int: ...


class HostTier:
    """`pool` of host pages, the `backend` that copies, and the `transfers` over it.

    stream: the one that forwards are launched on; None where the host computes them.
    """

    def __init__(self, gpu: GpuPool, sizes: Sizes, wrap: WrapBackend | None = None) -> None:
        assert gpu.layout is not None and gpu.memory is not None
        plane = gpu.memory.planes()[0]
        device = plane.device if isinstance(plane, torch.Tensor) else torch.device("cpu")
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.backend: Backend
        if self.stream is not None:
            from kvkeep.transfer.cuda import CudaBackend
            from kvkeep.transfer.cuda_api import CudaApi

            api = CudaApi(device.index or 0)
            self.pool = CpuPool(gpu.layout, sizes.host_pages, sizes.suspend_pages, registrar=api)
            self.backend = CudaBackend.on(gpu.memory, self.pool)
        else:
            self.pool = CpuPool(gpu.layout, sizes.host_pages, sizes.suspend_pages)
            assert self.pool.memory is not None
            self.backend = HostBackend(gpu.memory, self.pool.memory, threads=sizes.copy_threads)
        if wrap is not None:
            assert self.pool.memory is not None
            self.backend = wrap(self.backend, gpu.memory, self.pool.memory)
        self.transfers = TransferManager(
            self.backend,
            bytes_in_flight_max=max(IN_FLIGHT_NBYTES_MAX, 4 * gpu.layout.page_nbytes),
            queue_pages_max=self.pool.pages,
            deadline_s=DEADLINE_S,
        )

    def written(self) -> After:
        """An event that is done when what has been queued on the device so far is."""
        return NO_WAIT if self.stream is None else self.stream.record_event()
