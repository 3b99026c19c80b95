"""Machines for the GPU check where there is no GPU: an emulated device, and the host backend.

Must not judge anything.
"""

from collections.abc import Sequence
from typing import Any

from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.backend import Backend, Event
from kvkeep.transfer.cuda import CudaBackend
from kvkeep.transfer.cuda_ways import Way
from kvkeep.transfer.host import HostBackend
from tests.transfer.emulated import ComputeEvent, EmulatedDevice, EmulatedEvent, EmulatedStream


class NotingDevice(EmulatedDevice):
    """An emulated device that moves whenever it is asked, and notes what it is told by the driver's names."""

    def __init__(self) -> None:
        super().__init__()
        self.moves_itself = True
        self.calls: list[str] | None = None

    def note(self, name: str) -> None:
        if self.calls is not None:
            self.calls.append(name)

    def copy(self, target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        self.note("cuMemcpyAsync")
        super().copy(target, source, nbytes, stream)

    def record(self, event: EmulatedEvent, stream: EmulatedStream) -> None:
        self.note("cuEventRecord")
        super().record(event, stream)

    def new_device_memory(self, nbytes: int) -> int:
        self.note("cuMemAlloc_v2")
        return super().new_device_memory(nbytes)

    def free(self, host: Sequence[int], device: Sequence[int]) -> None:
        self.note("cuMemFree_v2")
        super().free(host, device)


class LossyDevice(NotingDevice):
    """The last byte of a copy does not arrive."""

    def copy(self, target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        super().copy(target, source, nbytes - 1, stream)


class CpuMachine:
    """A machine whose device memory is in the host's, copied by the CUDA backend or by the host's."""

    torch_device = "cpu"
    nvml_device = 0

    def __init__(self, api: NotingDevice | None = None, *, host_backend: bool = False) -> None:
        self.api: Any = api or NotingDevice()
        self._host_backend = host_backend
        self.events: list[ComputeEvent] = []

    @property
    def calls(self) -> list[str] | None:
        calls: list[str] | None = self.api.calls
        return calls

    @calls.setter
    def calls(self, value: list[str] | None) -> None:
        self.api.calls = value

    def backend(self, device: PageMemory, host: CpuPool, way: Way | None) -> Backend:
        if self._host_backend:
            assert host.memory is not None
            return HostBackend(device, host.memory, threads=1)
        return CudaBackend(self.api, device, host, way=way)

    def describe(self) -> dict[str, str]:
        return {"device": "none"}

    def settle(self) -> None:
        pass

    def busy(self) -> Event:
        self.events.append(ComputeEvent(self.api))
        return self.events[-1]

    def end_busy(self, event: Event) -> None:
        assert isinstance(event, ComputeEvent)
        event.done = True

    def block(self) -> None:
        from torch.profiler import record_function

        with record_function("cudaDeviceSynchronize"):
            pass


class WaitingDevice(NotingDevice):
    """Its copies wait for all that was queued, as those of pageable memory may."""

    machine: CpuMachine | None = None

    def copy(self, target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        super().copy(target, source, nbytes, stream)
        self.note("cuMemcpy_v2")
        if self.machine is not None:
            for event in self.machine.events:
                event.done = True
