"""What a GPU check runs on: a device, memory of it, and work that keeps it busy.

Must not know cases or limits.  Nothing here needs a GPU but `CudaMachine`; tests bring machines of their own.
"""

import ctypes
import time
from typing import Any, Protocol

import numpy as np

from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import LayerMajorMemory, PageMajorMemory, PageMemory
from kvkeep.transfer.backend import Backend, Event
from kvkeep.transfer.cuda import CudaBackend
from kvkeep.transfer.cuda_api import Api, CudaApi
from kvkeep.transfer.cuda_ways import Way

BUSY_S = 0.3
CALIBRATION_CYCLES = 10_000_000

#: How an engine keeps its pages: one piece a page; one tensor a layer; one tensor a layer, all K before all V.
LAYOUTS = ("page-major", "layer-major", "layer-major-split")


class PinningApi(Api, Protocol):
    """A device that pins host memory too: an `Api` and a `Registrar`."""

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class Machine(Protocol):
    """A device.   api: what copies are made with.   torch_device: where its memory is for torch.
    nvml_device: what NVML calls it, see `kvkeep.telemetry.nvml.open_device`.
    calls: names of the calls that `api` has made, while it is a list."""

    @property
    def api(self) -> PinningApi: ...
    @property
    def torch_device(self) -> str: ...
    @property
    def nvml_device(self) -> int | str: ...

    calls: list[str] | None

    def backend(self, device: PageMemory, host: CpuPool, way: Way | None) -> Backend:
        """The backend that is checked."""

    def describe(self) -> dict[str, str]:
        """What it is, for the report."""

    def settle(self) -> None:
        """Blocks until all that torch has queued is done."""

    def busy(self) -> Event:
        """Keeps the stream that a model would use busy for `BUSY_S`; an event behind that."""

    def end_busy(self, event: Event) -> None:
        """Blocks until the event is done."""

    def block(self) -> None:
        """A call that holds up its caller and that a profiler must see."""


class RecordingApi(CudaApi):
    """A `CudaApi` that notes the name of each call."""

    calls: list[str] | None = None

    def _asked(self, name: str, *arguments: Any) -> Any:
        if self.calls is not None:
            self.calls.append(name)
        return super()._asked(name, *arguments)


class CudaMachine:
    """A CUDA device, by torch and by the driver."""

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch: Any = torch
        torch.cuda.set_device(index)
        torch.zeros(1, device=f"cuda:{index}")  # torch makes its context before anything is measured
        self.api = RecordingApi(index)
        self.torch_device = f"cuda:{index}"
        # NVML and CUDA do not count devices alike.
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        self.nvml_device: int | str = index if uuid is None else f"GPU-{uuid}"
        self._cycles_per_s = self._measure_cycles()

    @property
    def calls(self) -> list[str] | None:
        return self.api.calls

    @calls.setter
    def calls(self, value: list[str] | None) -> None:
        self.api.calls = value

    def backend(self, device: PageMemory, host: CpuPool, way: Way | None) -> Backend:
        return CudaBackend(self.api, device, host, way=way)

    def describe(self) -> dict[str, str]:
        version = int(self.api._call("cuDriverGetVersion"))
        return {
            "device": self._torch.cuda.get_device_name(),
            "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
            "torch": f"{self._torch.__version__}, CUDA {self._torch.version.cuda}",
        }

    def settle(self) -> None:
        self._torch.cuda.synchronize()

    def busy(self) -> Event:
        self._torch.cuda._sleep(int(BUSY_S * self._cycles_per_s))
        event: Event = self._torch.cuda.Event()
        event.record()  # type: ignore[attr-defined]
        return event

    def end_busy(self, event: Event) -> None:
        self.settle()

    def block(self) -> None:
        self._torch.cuda.synchronize()

    def _measure_cycles(self) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one also loads the kernel
            start.record()
            self._torch.cuda._sleep(CALIBRATION_CYCLES)
            end.record()
            self._torch.cuda.synchronize()
        return CALIBRATION_CYCLES / (float(start.elapsed_time(end)) / 1e3)


def new_memory(machine: Machine, layout: PageLayout, pages: int, kind: str) -> PageMemory:
    """Zeroed pages as an engine keeps them, see `LAYOUTS`."""
    import torch

    dtype, device = getattr(torch, layout.dtype), machine.torch_device
    if kind == "page-major":
        return PageMajorMemory(torch.zeros((pages, *layout.shape), dtype=dtype, device=device))
    if kind == "layer-major":
        shape: tuple[int, ...] = (pages, *layout.shape[1:])
        return LayerMajorMemory([torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.layers)])
    shape = (2, pages, *layout.shape[2:])
    layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.layers)]
    return LayerMajorMemory([layer.transpose(0, 1) for layer in layers])


def write_page(memory: PageMemory, page: int, data: bytes) -> None:
    """Puts these bytes into a page; on a device they are there after `Machine.settle`."""
    rows = np.frombuffer(data, dtype=np.uint8)
    start = 0
    for plane in memory.planes():
        end = start + int(plane.shape[1])
        if isinstance(plane, np.ndarray):
            plane[page] = rows[start:end]
        else:
            import torch

            plane[page].copy_(torch.from_numpy(rows[start:end].copy()))
        start = end


class PlainCopies:
    """The floor: `nbytes` of pinned memory, in large blocks, by the driver's plain asynchronous copy.

    One stream a direction, all of them at once.
    """

    def __init__(self, machine: Machine, nbytes: int, block_nbytes: int, directions: tuple[str, ...]) -> None:
        self._api = api = machine.api
        self._nbytes, self._block_nbytes = nbytes, block_nbytes
        self._ways: list[tuple[int, int, Any, Any]] = []
        self._memory: list[tuple[int, int]] = []
        with api.on_device():
            for direction in directions:
                device, host = api.new_device_memory(nbytes), api.new_host_memory(nbytes)
                ctypes.memset(host, 7, nbytes)
                self._memory.append((host, device))
                target, source = (device, host) if direction == "h2d" else (host, device)
                self._ways.append((target, source, api.new_stream(), api.new_event()))

    def sample(self) -> float:
        """GB/s of all directions together, from the first call to the last event."""
        api = self._api
        with api.on_device():
            start = time.perf_counter_ns()
            for at in range(0, self._nbytes, self._block_nbytes):
                nbytes = min(self._block_nbytes, self._nbytes - at)
                for target, source, stream, _ in self._ways:
                    api.copy(target + at, source + at, nbytes, stream)
            for _, _, stream, event in self._ways:
                api.record(event, stream)
            for *_, event in self._ways:
                while not api.done(event):
                    pass
            return len(self._ways) * self._nbytes / (time.perf_counter_ns() - start)

    def close(self) -> None:
        """Gives everything back."""
        with self._api.on_device():
            self._api.destroy([way[2] for way in self._ways], [way[3] for way in self._ways])
            self._api.free([host for host, _ in self._memory], [device for _, device in self._memory])
