"""A device whose streams a test moves: what `CudaApi` promises, over host memory, as late and disordered as legal.

Nothing queued happens before `tick`; each tick lets one stream, of the seed's choice, do its next piece of work.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvkeep.tiers.pinning import PinFailed
from kvkeep.transfer.cuda_api import CudaFault, Int64s
from tests.transfer.twin import kernel_twin

Work = Callable[[], bool]
"""One piece of a stream's work: False while it has to wait."""


class EmulatedStream:
    def __init__(self) -> None:
        self.work: deque[Work] = deque()


class EmulatedEvent:
    """`recorded` and `done` count the times: an event that is recorded again is not done until that record is."""

    def __init__(self) -> None:
        self.recorded = 0
        self.done = 0
        self.at_ns = 0


class ComputeEvent:
    """As `torch.cuda.Event`: recorded on a compute stream whose work ends when the test sets `done`."""

    def __init__(self, device: "EmulatedDevice", done: bool = False) -> None:
        self.cuda_event = EmulatedEvent()
        self.done = done
        stream = EmulatedStream()
        device.streams.append(stream)
        stream.work.append(lambda: self.done)
        device.record(self.cuda_event, stream)
        if done:
            device.run_dry(stream)

    def query(self) -> bool:
        """Whether the work before it is over."""
        return self.done


class EmulatedDevice:
    """An `Api`, and a `Registrar`."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.streams: list[EmulatedStream] = []
        self.memory: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.events = 0
        self.now_ns = 0
        self.fails = False
        self.dead = False
        self.moves_itself = False  # whenever it is asked whether something is done

    def tick(self) -> None:
        """One stream does its next piece of work, if it can."""
        self.now_ns += 1000
        busy = [stream for stream in self.streams if stream.work]
        if busy and not self.dead:
            stream = self._random.choice(busy)
            if stream.work[0]():
                stream.work.popleft()

    def run_dry(self, stream: EmulatedStream) -> None:
        """A stream does all it can."""
        while stream.work and stream.work[0]():
            stream.work.popleft()

    # ------------------------------------------------------------------ Api

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def new_stream(self) -> EmulatedStream:
        self._check()
        self.streams.append(EmulatedStream())
        return self.streams[-1]

    def new_event(self) -> EmulatedEvent:
        self._check()
        self.events += 1
        return EmulatedEvent()

    def destroy(self, streams: Sequence[EmulatedStream], events: Sequence[EmulatedEvent]) -> None:
        for stream in streams:
            assert not stream.work, "a stream is destroyed with work in it"
            self.streams.remove(stream)
        self.events -= len(events)

    def record(self, event: EmulatedEvent, stream: EmulatedStream) -> None:
        self._check()
        event.recorded += 1
        number = event.recorded

        def happen() -> bool:
            event.done, event.at_ns = number, self.now_ns
            return True

        stream.work.append(happen)

    def done(self, event: EmulatedEvent) -> bool:
        self._check()
        if self.moves_itself:
            self.tick()
        return event.done == event.recorded

    def idle(self, stream: EmulatedStream) -> bool:
        self._check()
        return not stream.work

    def elapsed_ns(self, start: EmulatedEvent, end: EmulatedEvent) -> int:
        assert self.done(start) and self.done(end)
        return end.at_ns - start.at_ns

    def stream_wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        self._check()
        number = event.recorded
        stream.work.append(lambda: event.done >= number)

    def copy(self, target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        self._check(self.fails)
        stream.work.append(lambda: bool(ctypes.memmove(target, source, nbytes)) or True)

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: EmulatedStream) -> None:
        assert all(one.flags.c_contiguous and one.dtype == "int64" for one in (targets, sources, sizes))
        parts = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._random.shuffle(parts)  # no order is promised among them
        for part in parts:
            self.copy(*part, stream)

    def kernel(self) -> Any:
        if kernel_twin() is None:
            raise CudaFault("there is no C compiler")
        return kernel_twin()

    def run(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[int], stream: EmulatedStream) -> None:
        self._check(self.fails)
        stream.work.append(lambda: kernel(blocks, threads, *arguments) is None)

    def new_host_memory(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes + 16)
        address = -(-ctypes.addressof(buffer) // 16) * 16
        self.memory[address] = buffer
        return address

    new_device_memory = new_host_memory

    def free(self, host: Sequence[int], device: Sequence[int]) -> None:
        for address in [*host, *device]:
            del self.memory[address]

    # ------------------------------------------------------------------ Registrar

    def register(self, address: int, nbytes: int) -> None:
        if self.dead:
            raise PinFailed("the device is lost")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def _check(self, fails: bool = False) -> None:
        if self.dead:
            raise CudaFault("the device is lost")
        if fails:
            raise CudaFault("invalid argument")
