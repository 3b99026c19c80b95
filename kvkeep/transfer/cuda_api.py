"""The calls to CUDA that copies need, each with its error translated.

Must not know pages or jobs.  The one seam between kvkeep and the CUDA driver; nothing of it is loaded before a `CudaApi`
is made.

Of the driver, not of the runtime: a runtime refuses a driver that is older than itself and makes a context on whatever
device its thread happens to be at.  The driver's streams, events and memory are the very ones of torch's runtime, which
uses the same primary context.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvkeep.errors import BadInput, KvkeepError
from kvkeep.tiers.pinning import PinFailed
from kvkeep.transfer.kernel import NAME, CompilerMissing, compile_kernel

#: Pinned for every context, and at the same address on the device: the kernel reads and writes host memory.
#: cuMemHostRegister and cuMemHostAlloc have the same bits.
PORTABLE, MAPPED = 1, 2
STREAM_NON_BLOCKING = 1
EVENT_DEFAULT = 0

#: cuMemcpyBatchAsync as CUDA 12.8 has brought it.  A driver that is asked for this version has this signature for good;
#: the one of CUDA 13 has no `failed`.
BATCH_VERSION = 12080

#: Opaque handles; `Any` because they are the bindings' own types.
Stream = Any
DeviceEvent = Any
Kernel = Any

Int64s = npt.NDArray[np.int64]
"""Addresses or sizes: one dimension, contiguous."""


class CudaFault(KvkeepError):
    """A CUDA call that failed: its name and the driver's word for the error."""


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


#: Not "any" (3): that may read a source before the event that the stream waits for.
SOURCE_ACCESS_IN_STREAM_ORDER = 1


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

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: Stream) -> None:
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
    """The CUDA device of number `index`.  `BadInput` where there is none, or no driver, or no bindings."""

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BadInput(f"CUDA copies need cuda-bindings ({error}): pip install 'kvkeep[cuda]'") from None
        self._driver: Any = driver
        self.index = index
        try:
            self._call("cuInit", 0)
            self._device = self._call("cuDeviceGet", index)
            # Torch's context too.  It is never given back: others may be using it when this is gone.
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        except CudaFault as fault:
            raise BadInput(f"CUDA device {index} cannot be used: {fault}") from None
        self._batch: Any = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    # ------------------------------------------------------------------ order

    def new_stream(self) -> Stream:
        return self._call("cuStreamCreate", STREAM_NON_BLOCKING)

    def new_event(self) -> DeviceEvent:
        return self._call("cuEventCreate", EVENT_DEFAULT)

    def destroy(self, streams: Sequence[Stream], events: Sequence[DeviceEvent]) -> None:
        for stream in streams:
            self._call("cuStreamDestroy", stream)
        for event in events:
            self._call("cuEventDestroy", event)

    def record(self, event: DeviceEvent, stream: Stream) -> None:
        self._call("cuEventRecord", event, stream)

    def done(self, event: DeviceEvent) -> bool:
        return self._ready("cuEventQuery", event)

    def idle(self, stream: Stream) -> bool:
        return self._ready("cuStreamQuery", stream)

    def elapsed_ns(self, start: DeviceEvent, end: DeviceEvent) -> int:
        return int(self._call("cuEventElapsedTime", start, end) * 1e6)

    def stream_wait(self, stream: Stream, event: DeviceEvent) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    # ------------------------------------------------------------------ bytes

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: Stream) -> None:
        batch = self._batch or self._find_batch()
        attributes = _CopyAttributes(source_access_order=SOURCE_ACCESS_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)  # the attributes hold from copy 0 on
        error = batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed), int(stream),
        )  # fmt: skip
        self._check("cuMemcpyBatchAsync", self._driver.CUresult(error))

    def kernel(self) -> Kernel:
        if not self._attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"):
            raise CudaFault("the device sees pinned host memory at other addresses than the host does")
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        try:
            code = compile_kernel(f"sm_{major}{minor}")
        except CompilerMissing as missing:
            raise CudaFault(str(missing)) from None
        return self._call("cuModuleGetFunction", self._call("cuModuleLoadData", code), NAME.encode())

    def run(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[int], stream: Stream) -> None:
        types = tuple(ctypes.c_int if i in INT_ARGUMENTS else ctypes.c_void_p for i in range(len(arguments)))
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (tuple(arguments), types), 0)

    def new_host_memory(self, nbytes: int) -> int:
        return int(self._call("cuMemHostAlloc", nbytes, PORTABLE | MAPPED))

    def new_device_memory(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, host: Sequence[int], device: Sequence[int]) -> None:
        for address in host:
            self._call("cuMemFreeHost", address)
        for address in device:
            self._call("cuMemFree", address)

    # ------------------------------------------------------------------ pinning: a `Registrar`

    def register(self, address: int, nbytes: int) -> None:
        """Pins the bytes for every device; raises `PinFailed`."""
        try:
            with self.on_device():
                self._call("cuMemHostRegister", address, nbytes, PORTABLE | MAPPED)
        except CudaFault as fault:
            raise PinFailed(str(fault)) from None

    def unregister(self, address: int) -> None:
        """Unpins what `register` has pinned."""
        with self.on_device():
            self._call("cuMemHostUnregister", address)

    # ------------------------------------------------------------------ inside

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *result = self._asked(name, *arguments)
        self._check(name, error)
        return result[0] if result else None

    def _ready(self, name: str, handle: Any) -> bool:
        (error,) = self._asked(name, handle)
        if error == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check(name, error)
        return True

    def _asked(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._driver, name)(*arguments)
        except RuntimeError as missing:  # the driver, or this call of it, is not there
            raise CudaFault(f"{name}: {missing}") from None

    def _check(self, name: str, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaFault(f"{name}: {error.name}")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _find_batch(self) -> Any:
        """The driver's own function: it takes arrays as they are, where the bindings want an object an address."""
        name, size, pointer = "cuMemcpyBatchAsync", ctypes.c_size_t, ctypes.c_void_p
        flags = self._driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        address = self._call("cuGetProcAddress", name.encode(), BATCH_VERSION, flags)
        if not address:
            raise CudaFault(f"{name}: the driver is older than CUDA 12.8")
        signature = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, *signature)(int(address))
        return self._batch


#: Which arguments of the kernel are `int`; the others are addresses and sizes of 64 bits.
INT_ARGUMENTS = frozenset({6, 7, 9})
