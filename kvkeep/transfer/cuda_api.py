"""The calls to CUDA that copies need, each with its error translated.

Must not know pages or jobs.  The one seam between kvkeep and the CUDA runtime, driver and compiler; nothing of it is
loaded before a `CudaApi` is made.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kvkeep.errors import BadInput, KvkeepError
from kvkeep.tiers.pinning import PinFailed
from kvkeep.transfer.kernel import NAME, CompilerMissing, compile_kernel

#: The driver that has cudaMemcpyBatchAsync.
BATCH_DRIVER_VERSION = 12080

REGISTER_PORTABLE = 1
STREAM_NON_BLOCKING = 1

#: Opaque handles; `Any` because they are the bindings' own types.
Stream = Any
DeviceEvent = Any
Kernel = Any


class CudaFault(KvkeepError):
    """A CUDA call that failed: its name and the runtime's word for the error."""


class Api(Protocol):
    """What the backend asks of a device.  All addresses are integers; every call may raise `CudaFault`."""

    def on_device(self) -> Any:
        """A context in which the device is the thread's current one; the one before comes back."""

    def new_stream(self) -> Stream:
        """A stream that waits for no other."""

    def new_event(self) -> DeviceEvent:
        """An event that measures time."""

    def destroy(self, streams: Sequence[Stream], events: Sequence[DeviceEvent]) -> None:
        """Gives handles back."""

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        """The event is done when everything queued on the stream so far is."""

    def done(self, event: DeviceEvent) -> bool:
        """Whether the event is done.  Never blocks."""

    def idle(self, stream: Stream) -> bool:
        """Whether everything queued on the stream is over.  Never blocks."""

    def elapsed_ns(self, start: DeviceEvent, end: DeviceEvent) -> int:
        """Nanoseconds between two events that are done."""

    def stream_wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Work queued on the stream from now on waits for the event."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queues one copy."""

    def copy_batch(self, targets: list[int], sources: list[int], sizes: list[int], stream: Stream) -> None:
        """Queues many copies in one call.  Sources are read in stream order, not before."""

    def kernel(self) -> Kernel:
        """The kernel of `kernel.py`, ready to run."""

    def run(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[int], stream: Stream) -> None:
        """Queues a run of the kernel."""

    def new_host_memory(self, nbytes: int) -> int:
        """Pinned host memory that the device reads too."""

    def new_device_memory(self, nbytes: int) -> int:
        """Memory on the device."""

    def free(self, host: Sequence[int], device: Sequence[int]) -> None:
        """Gives memory back."""


class CudaApi:
    """The CUDA device of number `index`."""

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise BadInput(f"CUDA copies need cuda-bindings ({error}): pip install 'kvkeep[cuda]'") from None
        self._runtime: Any = runtime
        self._driver: Any = driver
        self.index = index

    @contextmanager
    def on_device(self) -> Iterator[None]:
        before = self._call("cudaGetDevice")
        if before == self.index:
            yield
            return
        self._call("cudaSetDevice", self.index)
        try:
            yield
        finally:
            self._call("cudaSetDevice", before)

    # ------------------------------------------------------------------ order

    def new_stream(self) -> Stream:
        return self._call("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)

    def new_event(self) -> DeviceEvent:
        return self._call("cudaEventCreateWithFlags", 0)

    def destroy(self, streams: Sequence[Stream], events: Sequence[DeviceEvent]) -> None:
        for stream in streams:
            self._call("cudaStreamDestroy", stream)
        for event in events:
            self._call("cudaEventDestroy", event)

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        self._call("cudaEventRecord", event, stream)

    def done(self, event: DeviceEvent) -> bool:
        return self._ready("cudaEventQuery", event)

    def idle(self, stream: Stream) -> bool:
        return self._ready("cudaStreamQuery", stream)

    def elapsed_ns(self, start: DeviceEvent, end: DeviceEvent) -> int:
        return int(self._call("cudaEventElapsedTime", start, end) * 1e6)

    def stream_wait(self, stream: Stream, event: DeviceEvent) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    # ------------------------------------------------------------------ bytes

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def copy_batch(self, targets: list[int], sources: list[int], sizes: list[int], stream: Stream) -> None:
        if self._call("cudaDriverGetVersion") < BATCH_DRIVER_VERSION:
            raise CudaFault("cudaMemcpyBatchAsync: the driver is older than CUDA 12.8")
        attributes = self._runtime.cudaMemcpyAttributes()
        # Not "any": that may read a source before the event that the stream waits for.
        attributes.srcAccessOrder = self._runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._call("cudaMemcpyBatchAsync", targets, sources, sizes, len(sizes), [attributes], [0], 1, stream)

    def kernel(self) -> Kernel:
        major, minor = (
            self._call("cudaDeviceGetAttribute", getattr(self._runtime.cudaDeviceAttr, name), self.index)
            for name in ("cudaDevAttrComputeCapabilityMajor", "cudaDevAttrComputeCapabilityMinor")
        )
        try:
            code = compile_kernel(f"sm_{major}{minor}")
        except CompilerMissing as missing:
            raise CudaFault(str(missing)) from None
        self._call("cudaFree", 0)  # makes the context that the module is loaded into
        return self._drive("cuModuleGetFunction", self._drive("cuModuleLoadData", code), NAME.encode())

    def run(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[int], stream: Stream) -> None:
        types = tuple(ctypes.c_int if i in INT_ARGUMENTS else ctypes.c_void_p for i in range(len(arguments)))
        parameters = (tuple(arguments), types)
        self._drive("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)

    def new_host_memory(self, nbytes: int) -> int:
        return int(self._call("cudaHostAlloc", nbytes, REGISTER_PORTABLE))

    def new_device_memory(self, nbytes: int) -> int:
        return int(self._call("cudaMalloc", nbytes))

    def free(self, host: Sequence[int], device: Sequence[int]) -> None:
        for address in host:
            self._call("cudaFreeHost", address)
        for address in device:
            self._call("cudaFree", address)

    # ------------------------------------------------------------------ pinning: a `Registrar`

    def register(self, address: int, nbytes: int) -> None:
        """Pins the bytes for every device; raises `PinFailed`, and leaves no error behind for other code to find."""
        with self.on_device():
            try:
                self._call("cudaHostRegister", address, nbytes, REGISTER_PORTABLE)
            except CudaFault as fault:
                raise PinFailed(str(fault)) from None

    def unregister(self, address: int) -> None:
        """Unpins what `register` has pinned."""
        with self.on_device():
            self._call("cudaHostUnregister", address)

    # ------------------------------------------------------------------ inside

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *result = getattr(self._runtime, name)(*arguments)
        self._check(name, error)
        return result[0] if result else None

    def _ready(self, name: str, handle: Any) -> bool:
        (error,) = getattr(self._runtime, name)(handle)
        if error == self._runtime.cudaError_t.cudaErrorNotReady:
            self._runtime.cudaGetLastError()  # it is no error: leave none behind
            return False
        self._check(name, error)
        return True

    def _check(self, name: str, error: Any) -> None:
        if error != self._runtime.cudaError_t.cudaSuccess:
            self._runtime.cudaGetLastError()
            raise CudaFault(f"{name}: {error.name}")

    def _drive(self, name: str, *arguments: Any) -> Any:
        error, *result = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaFault(f"{name}: {error.name}")
        return result[0] if result else None


#: Which arguments of the kernel are `int`; the others are addresses and sizes of 64 bits.
INT_ARGUMENTS = frozenset({6, 7, 9})
