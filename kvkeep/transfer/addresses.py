"""Addresses: where in memory the pieces of numbered pages and the parts of slots are, on the device and in host memory.

Must not know streams or jobs.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvkeep.errors import BadInput
from kvkeep.tiers.memory import PageMemory, Plane
from kvkeep.transfer.cuda_api import Api, Int64s
from kvkeep.transfer.pieces import pieces, slot_parts
from kvkeep.transfer.plan import SlotCopy


@dataclass(frozen=True, slots=True)
class Addresses:
    """Piece k of page p is `sizes[k]` bytes at

    on the device   device_addresses[k] + p * device_strides[k]
    in host memory  host_address + offsets[k] + p * host_stride         a page is one piece there
    """

    device_addresses: tuple[int, ...]
    device_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    host_address: int
    host_stride: int
    device_pages: int

    @property
    def pieces(self) -> int:
        """Pieces a page."""
        return len(self.sizes)

    @property
    def page_nbytes(self) -> int:
        """Bytes a page."""
        return sum(self.sizes)

    def multiples_of(self, nbytes: int) -> bool:
        """Whether all pieces are of one size, and that and every address are multiples of `nbytes`."""
        numbers = (*self.device_addresses, *self.device_strides, self.host_address, self.host_stride, self.sizes[0])
        return len(set(self.sizes)) == 1 and not any(number % nbytes for number in numbers)

    def table(self) -> "array[int]":
        """Device addresses and strides as the kernel reads them."""
        return array("Q", self.device_addresses + self.device_strides)

    def of_pages(self, device_pages: "array[int]", host_pages: "array[int]") -> tuple[Int64s, Int64s, Int64s]:
        """Where each piece of each pair of pages is, page by page: on the device, in host memory, and its bytes."""
        offsets = np.cumsum((0, *self.sizes[:-1]), dtype=np.int64)
        device_ids = np.array(device_pages, dtype=np.int64)[:, None]
        host_ids = np.array(host_pages, dtype=np.int64)[:, None]
        on_device = np.array(self.device_addresses, dtype=np.int64) + device_ids * np.array(
            self.device_strides, dtype=np.int64
        )
        on_host = self.host_address + offsets + host_ids * self.host_stride
        sizes = np.tile(np.array(self.sizes, dtype=np.int64), len(device_pages))
        return on_device.ravel(), on_host.ravel(), sizes

    def of_slots(self, slots: Sequence[SlotCopy], to_host: bool) -> tuple[Int64s, Int64s, Int64s]:
        """Where each part of each slot is, slot by slot: on the device, in host memory, and its bytes."""
        piece_ends = list(accumulate(self.sizes))
        page_end = [self.page_nbytes]  # a page is one piece in host memory
        ends = (piece_ends, page_end) if to_host else (page_end, piece_ends)
        found = []
        for slot in slots:
            device_page, host_page = (slot.source, slot.target) if to_host else (slot.target, slot.source)
            for part in slot_parts(slot, *ends):
                piece, on_device, on_host = part.target_plane, part.target_offset, part.source_offset
                if to_host:
                    piece, on_device, on_host = part.source_plane, part.source_offset, part.target_offset
                on_device += self.device_addresses[piece] + device_page * self.device_strides[piece]
                on_host += self.host_address + host_page * self.host_stride
                found.append((on_device, on_host, part.nbytes))
        columns = np.array(found, dtype=np.int64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]


def addresses_of(device: PageMemory, host: PageMemory) -> Addresses:
    """Addresses of two pools; `BadInput` unless a page of `host` is one piece."""
    if len(host.planes()) != 1:
        raise BadInput("host memory must be page-major: a page one piece")
    found = [piece.device for piece in pieces(device, host)]
    (plane,) = host.planes()
    address, stride = _place(plane)
    placed = [_place(plane) for plane in found]
    return Addresses(
        tuple(address for address, _ in placed),
        tuple(stride for _, stride in placed),
        tuple(int(plane.shape[1]) for plane in found),
        address,
        stride,
        len(found[0]),
    )


def scratch(api: Api, like: Addresses, nbytes: int, pieces_max: int) -> tuple[Addresses, Callable[[], None]]:
    """About `nbytes` of new device and pinned memory, cut into the same pieces, at most `pieces_max` of them where a
    page has fewer; and what gives it back."""
    pages = max(1, min(nbytes // like.page_nbytes, pieces_max // like.pieces))
    device = api.new_device_memory(pages * like.page_nbytes)
    host = api.new_host_memory(pages * like.page_nbytes)
    starts = np.cumsum((0, *like.sizes[:-1])) * pages + device
    made = Addresses(tuple(starts.tolist()), like.sizes, like.sizes, host, like.page_nbytes, pages)
    return made, lambda: api.free([host], [device])


def _place(plane: Plane) -> tuple[int, int]:
    if isinstance(plane, np.ndarray):
        return plane.ctypes.data, plane.strides[0]
    return plane.data_ptr(), plane.stride(0)
