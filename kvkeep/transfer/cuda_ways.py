"""The three ways in which a device copies pages, and which of them is fastest here.

Must not know jobs or events of others.

    dma      a call a piece            batch    a call for all pieces            kernel   one launch for all pieces

Parts of slots are copied as pieces are; beside a kernel, which takes only vectors of whole pages, a call a part.
"""

import ctypes
import logging
import time
from array import array
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from kvkeep.transfer.addresses import Addresses, scratch
from kvkeep.transfer.cuda_api import Api, CudaFault, Int64s, Kernel, Stream
from kvkeep.transfer.kernel import VECTOR_NBYTES
from kvkeep.transfer.plan import Direction, SlotCopy

log = logging.getLogger(__name__)

Way = Literal["dma", "batch", "kernel"]
WAYS: tuple[Way, ...] = get_args(Way)

#: Bytes copied in each round of the calibration: long against a launch, short against a start; and pieces, for those
#: of a few bytes would take minutes one by one.
CALIBRATION_NBYTES = 64 * 2**20
CALIBRATION_PIECES_MAX = 4096
CALIBRATION_ROUNDS = 3

#: Enough threads to keep a PCIe link full (16 bytes each, about 2 us away), few enough to leave the model its device.
KERNEL_BLOCKS = 32
KERNEL_THREADS = 512

#: Page ids that the jobs in flight of one copier may have in pinned memory: 4 MiB, taken once.
DESCRIPTOR_IDS_MAX = 1 << 20

POLL_PERIOD_S = 0.0002


class Descriptors:
    """Pinned memory for page ids, cut into blocks of powers of two; a block belongs to one job at a time."""

    def __init__(self, address: int, ids: int) -> None:
        self.address = address
        self._next = address
        self._end = address + 4 * ids
        self._free: dict[int, list[int]] = {}
        self._nbytes: dict[int, int] = {}

    def take(self, ids: "array[int]") -> int:
        """The address of a block that holds these ids; 0 when there is no room."""
        nbytes = 4 << (len(ids) - 1).bit_length()
        free = self._free.setdefault(nbytes, [])
        if not free:
            if self._next + nbytes > self._end:
                return 0
            free.append(self._next)
            self._nbytes[self._next] = nbytes
            self._next += nbytes
        address = free.pop()
        ctypes.memmove(address, ids.buffer_info()[0], 4 * len(ids))
        return address

    def give_back(self, address: int) -> None:
        """The job whose block it was is over."""
        self._free[self._nbytes[address]].append(address)


class Copier:
    """Queues copies of the pages of one pair of pools.

    kernel: None where it is not to be used.  The pinned memory that it reads is the copier's, until `free`.
    """

    def __init__(self, api: Api, addresses: Addresses, kernel: Kernel = None) -> None:
        self.addresses = addresses
        self._api = api
        self._kernel = kernel
        self._tables = 0
        self._descriptors: Descriptors | None = None
        if kernel is None:
            return
        table = addresses.table()
        self._tables = api.new_host_memory(8 * len(table))
        ctypes.memmove(self._tables, table.buffer_info()[0], 8 * len(table))
        self._descriptors = Descriptors(api.new_host_memory(4 * DESCRIPTOR_IDS_MAX), DESCRIPTOR_IDS_MAX)

    def queue(
        self,
        way: Way,
        device_pages: "array[int]",
        host_pages: "array[int]",
        to_host: bool,
        stream: Stream,
        slots: Sequence[SlotCopy] = (),
    ) -> int:
        """Queues the copy of pairs of pages and of slots.  What it returns is to be released when the copy is over."""
        if way == "kernel" and self._descriptors is not None and device_pages:
            if slots:  # before the kernel: when these fail, no descriptor is in use
                self._copy_parts("dma", self.addresses.of_slots(slots, to_host), to_host, stream)
                slots = ()
            descriptor = self._descriptors.take(device_pages + host_pages)
            if descriptor:
                self._run_kernel(descriptor, len(device_pages), to_host, stream)
                return descriptor
            way = "dma"
        parts = self.addresses.of_pages(device_pages, host_pages)
        if slots:
            device, host, sizes = zip(parts, self.addresses.of_slots(slots, to_host), strict=True)
            parts = np.concatenate(device), np.concatenate(host), np.concatenate(sizes)
        self._copy_parts(way, parts, to_host, stream)
        return 0

    def release(self, descriptor: int) -> None:
        """The copy that `queue` returned this for is over."""
        if descriptor and self._descriptors is not None:
            self._descriptors.give_back(descriptor)

    def free(self) -> None:
        """Gives the pinned memory back; no copy may be queued any more."""
        if self._descriptors is not None:
            self._api.free([self._tables, self._descriptors.address], [])
            self._descriptors = None

    def _copy_parts(self, way: Way, parts: tuple[Int64s, Int64s, Int64s], to_host: bool, stream: Stream) -> None:
        on_device, on_host, sizes = parts
        targets, sources = (on_host, on_device) if to_host else (on_device, on_host)
        if way == "batch":
            self._api.copy_batch(targets, sources, sizes, stream)
        else:
            for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._api.copy(target, source, nbytes, stream)

    def _run_kernel(self, descriptor: int, pages: int, to_host: bool, stream: Stream) -> None:
        where = self.addresses
        arguments = (
            self._tables, self._tables + 8 * where.pieces, where.host_address, where.host_stride,
            descriptor, descriptor + 4 * pages, pages, where.pieces, where.sizes[0], int(to_host),
        )  # fmt: skip
        blocks = min(KERNEL_BLOCKS, pages * where.pieces)
        self._api.run(self._kernel, blocks, KERNEL_THREADS, arguments, stream)


def load_kernel(api: Api, addresses: Addresses) -> Kernel:
    """The kernel; raises `CudaFault` where it cannot copy these pages, or cannot be had."""
    if not addresses.multiples_of(VECTOR_NBYTES):
        raise CudaFault(f"pieces are not of one size and aligned to {VECTOR_NBYTES} bytes")
    return api.kernel()


def calibrate(api: Api, like: Addresses, kernel: Kernel, streams: dict[Direction, Stream]) -> dict[Direction, Way]:
    """Copies scratch memory cut into pieces like these, each way in each direction; logs and returns the fastest."""
    addresses, free_scratch = scratch(api, like, CALIBRATION_NBYTES, CALIBRATION_PIECES_MAX)
    copier = Copier(api, addresses, kernel)
    try:
        fastest: dict[Direction, Way] = {}
        for direction, stream in streams.items():
            rates = {way: _rate(api, copier, way, direction == "d2h", stream) for way in WAYS}
            fastest[direction] = max(WAYS, key=lambda way: rates[way])
            found = ", ".join(f"{way} {rate:.1f} GB/s" if rate else f"{way} not here" for way, rate in rates.items())
            log.info("%s copies of %d pieces a page go by %s: %s", direction, like.pieces, fastest[direction], found)
        return fastest
    finally:
        copier.free()
        free_scratch()


def _rate(api: Api, copier: Copier, way: Way, to_host: bool, stream: Stream) -> float:
    """GB/s of the best round; 0 where this way does not work here."""
    pages = copier.addresses.device_pages
    ids = array("i", range(pages))
    start, end = api.new_event(), api.new_event()
    best = 0.0
    try:
        for _ in range(CALIBRATION_ROUNDS):
            api.record(start, stream)
            descriptor = copier.queue(way, ids, ids, to_host, stream)
            api.record(end, stream)
            while not api.done(end):
                time.sleep(POLL_PERIOD_S)
            copier.release(descriptor)
            if way == "kernel" and not descriptor:
                return 0.0
            best = max(best, pages * copier.addresses.page_nbytes / max(1, api.elapsed_ns(start, end)))
    except CudaFault as fault:
        log.info("copies by %s do not work here: %s", way, fault)
        return 0.0
    finally:
        api.destroy([], [start, end])
    return best
