"""CudaBackend: copies between device memory and pinned host memory, in the order of streams.

Must not know who waits for a copy.  One stream a direction; a job is its copies between two events.  A page that is one
piece is one DMA; for others a calibration at the start picks the fastest way of each direction.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.addresses import addresses_of
from kvkeep.transfer.backend import NO_WAIT, BackendDied, Job, Outcome, StillCopying
from kvkeep.transfer.cuda_api import Api, CudaApi, CudaFault, DeviceEvent, Kernel, Stream
from kvkeep.transfer.cuda_ways import POLL_PERIOD_S, Copier, Way, calibrate, load_kernel
from kvkeep.transfer.pieces import check_fits, pieces
from kvkeep.transfer.plan import Direction

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A launched job, over when `end` is done.  `descriptor` is its own until then."""

    job: Job
    start: DeviceEvent
    end: DeviceEvent
    error: str | None = None
    descriptor: int = 0


class CudaBackend:
    """Copies between an engine's device memory and a `CpuPool`.

    api: the device.   device: the pool that the model reads.
    host: pinned for that device (`CpuPool(..., registrar=api)`); copies of pages that are not pinned hold up their
        caller.
    way: how pages of several pieces are copied; calibrated when None.

    `after` of a job is a `torch.cuda.Event` that has been recorded.  The stream waits for it, and so do the jobs of
    that direction behind it.
    """

    def __init__(self, api: Api, device: PageMemory, host: CpuPool, *, way: Way | None = None) -> None:
        if host.memory is None:
            raise BadInput("a CPU pool without memory has nothing to copy to")
        self._api = api
        self._host = host
        self._first_piece = pieces(device, host.memory)[0]  # holds on to the memory of both
        addresses = addresses_of(device, host.memory)
        self._page_nbytes = addresses.page_nbytes
        self._running: dict[Direction, deque[_Running]] = {"h2d": deque(), "d2h": deque()}
        self._by_job: dict[Job, _Running] = {}
        self._free_events: list[DeviceEvent] = []
        self._fault: str | None = None
        self._ended: list[Outcome] = []  # what `close` has found, until it can say so
        with api.on_device():
            self._streams: dict[Direction, Stream] = {"h2d": api.new_stream(), "d2h": api.new_stream()}
            kernel: Kernel = None
            if addresses.pieces > 1 and way in (None, "kernel"):
                try:
                    kernel = load_kernel(api, addresses)
                except CudaFault as fault:
                    if way == "kernel":
                        raise
                    log.info("copies by kernel do not work here: %s", fault)
            if addresses.pieces == 1:
                way = "dma"
            self._ways: dict[Direction, Way] = (
                calibrate(api, addresses, kernel, self._streams) if way is None else {"h2d": way, "d2h": way}
            )
            self._copier = Copier(api, addresses, kernel if "kernel" in self._ways.values() else None)

    @classmethod
    def on(cls, device: PageMemory, host: CpuPool) -> "CudaBackend":
        """A backend for memory on a CUDA device; `BadInput` for memory elsewhere."""
        plane = device.planes()[0]
        if isinstance(plane, np.ndarray) or plane.device.type != "cuda":
            raise BadInput("the pool that the model reads is not on a CUDA device: use HostBackend")
        return cls(CudaApi(plane.device.index or 0), device, host)

    # ------------------------------------------------------------------ the manager's side

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self._page_nbytes

    @property
    def ways(self) -> dict[Direction, Way]:
        """How pages are copied in each direction."""
        return dict(self._ways)

    def launch(self, job: Job) -> None:
        """Queues the copies behind the event that they come after."""
        check_fits(job.plan, self._first_piece, self._page_nbytes)
        if not self._usable():
            return  # it stays in flight until `completions` says that the backend is dead
        stream = self._streams[job.plan.direction]
        with self._translated():
            running = _Running(job, self._event(), self._event())
            if job.after is not NO_WAIT:
                self._api.stream_wait(stream, _handle(job.after))
            self._api.record(running.start, stream)
            try:
                self._queue(running, stream)
            except CudaFault as fault:  # what was queued before it may run: over when `end` is done
                running.error = str(fault)
            self._api.record(running.end, stream)
            self._running[job.plan.direction].append(running)
            self._by_job[job] = running

    def completions(self) -> list[Outcome]:
        """Jobs whose last event is done; each direction in order."""
        out: list[Outcome] = []
        if self._usable():
            with self._translated():
                for queue in self._running.values():
                    while queue and self._api.done(queue[0].end):
                        out.append(self._end(queue.popleft()))
        return out

    def order_after(self, job: Job, stream: object) -> bool:
        """Makes the stream (a `torch.cuda.Stream`, or its handle) wait for the job's last event."""
        ordered = False
        running = self._by_job.get(job)
        if running is not None and self._fault is None:
            with suppress(BackendDied), self._translated():
                self._api.stream_wait(getattr(stream, "cuda_stream", stream), running.end)
                ordered = True
        return ordered

    def wait(self, timeout_s: float) -> None:
        """Asks again and again: a device tells nobody."""
        until = time.monotonic() + timeout_s
        with suppress(BackendDied):  # `completions` says so
            while time.monotonic() < until and not self._any_done():
                time.sleep(POLL_PERIOD_S)

    def close(self, timeout_s: float) -> list[Outcome]:
        """Waits for what is queued: a device's copies cannot be called back."""
        until = time.monotonic() + timeout_s
        self._ended += self.completions()
        while self._by_job or self._fault is not None:
            if time.monotonic() >= until:
                raise StillCopying(f"{len(self._by_job)} copies were not over after {timeout_s:g} s")
            self.wait(until - time.monotonic())
            self._ended += self.completions()
        out, self._ended = self._ended, []
        streams, events = list(self._streams.values()), self._free_events
        self._streams, self._free_events = {}, []  # a handle is given back once
        with suppress(CudaFault), self._api.on_device():
            self._api.destroy(streams, events)
            self._copier.free()
        return out

    # ------------------------------------------------------------------ inside

    def _queue(self, running: _Running, stream: Stream) -> None:
        plan = running.job.plan
        to_host = plan.direction == "d2h"
        device_pages, host_pages = (plan.sources, plan.targets) if to_host else (plan.targets, plan.sources)
        last = max(host_pages, default=0)
        for slot in plan.slots:
            last = max(last, slot.target if to_host else slot.source)
        way = self._ways[plan.direction]
        if way != "dma" and last >= self._host.pinned_pages:
            way = "dma"  # memory that is not pinned, or not yet: the driver's own copy takes it
        running.descriptor = self._copier.queue(way, device_pages, host_pages, to_host, stream, plan.slots)

    def _event(self) -> DeviceEvent:
        return self._free_events.pop() if self._free_events else self._api.new_event()

    def _end(self, running: _Running) -> Outcome:
        copy_ns = self._api.elapsed_ns(running.start, running.end)
        del self._by_job[running.job]
        self._free_events += [running.start, running.end]
        self._copier.release(running.descriptor)
        return Outcome(running.job, running.error, copy_ns)

    def _any_done(self) -> bool:
        any_done = False
        if self._usable():
            with self._translated():
                any_done = any(queue and self._api.done(queue[0].end) for queue in self._running.values())
        return any_done

    def _usable(self) -> bool:
        """False after a fault; then raises `BackendDied` once nothing that was queued can move a byte any more."""
        if self._fault is None:
            return True
        try:
            with self._api.on_device():
                quiet = all(self._api.idle(stream) for stream in self._streams.values())
        except CudaFault:  # the device itself has given up
            quiet = True
        if quiet:
            raise BackendDied(self._fault)
        return False

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """On the device; a fault in here ends the backend, since nothing of the device is certain after it."""
        try:
            with self._api.on_device():
                yield
        except CudaFault as fault:
            self._fault = self._fault or str(fault)
            self._usable()


def _handle(event: object) -> DeviceEvent:
    """The handle of a recorded `torch.cuda.Event`: waiting for one that was never recorded would wait for nothing."""
    handle = getattr(event, "cuda_event", None)
    if not handle:
        raise InvariantViolation(f"{event!r} is no recorded CUDA event: record it before the copy is submitted")
    return handle
