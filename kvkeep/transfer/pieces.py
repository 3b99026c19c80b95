"""Which bytes of a page lie where in the two pools: the pieces in which pages are copied, the parts in which slots are.

Must not know how they are copied.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.memory import PageMemory, Plane
from kvkeep.transfer.plan import Plan, SlotCopy

Rows = npt.NDArray[np.uint8]
"""A plane in host memory, or bytes of it."""


class Piece(NamedTuple):
    """One piece of every page: row p of `device` is the same part of a page as row q of `host`, wherever they lie."""

    device: Plane
    host: Plane


def pieces(device: PageMemory, host: PageMemory) -> list[Piece]:
    """The fewest pieces that are contiguous on both sides, in the order of a page's bytes.

    Raises `BadInput` when the pages of the two pools differ in size.
    """
    device_planes, host_planes = device.planes(), host.planes()
    device_ends, host_ends = plane_ends(device_planes), plane_ends(host_planes)
    if device_ends[-1] != host_ends[-1]:
        raise BadInput(f"pages of {device_ends[-1]} bytes on the device and of {host_ends[-1]} in host memory")
    out = []
    start = 0
    for end in sorted({*device_ends, *host_ends}):
        out.append(Piece(_cut(device_planes, device_ends, start, end), _cut(host_planes, host_ends, start, end)))
        start = end
    return out


class SlotPart(NamedTuple):
    """Bytes of a slot that are contiguous on both sides: `nbytes` from `source_offset` on in row `slot.source` of plane
    number `source_plane`; the same of the target."""

    source_plane: int
    source_offset: int
    target_plane: int
    target_offset: int
    nbytes: int


def slot_parts(slot: SlotCopy, source_ends: Sequence[int], target_ends: Sequence[int]) -> Iterator[SlotPart]:
    """The fewest parts, in the order of the slot's bytes.   source_ends, target_ends: see `plane_ends`."""
    at, end = slot.source_offset, slot.source_offset + slot.nbytes
    to = slot.target_offset
    while at < end:
        source, target = bisect_right(source_ends, at), bisect_right(target_ends, to)
        source_start = source_ends[source - 1] if source else 0
        target_start = target_ends[target - 1] if target else 0
        nbytes = min(end - at, source_ends[source] - at, target_ends[target] - to)
        yield SlotPart(source, at - source_start, target, to - target_start, nbytes)
        at, to = at + nbytes, to + nbytes


class SlotRoute:
    """Slots between two pools in host memory: from the planes `sources` to the planes `targets`."""

    def __init__(self, sources: Sequence[Rows], targets: Sequence[Rows]) -> None:
        self.sources = list(sources)
        self.targets = list(targets)
        self._ends = plane_ends(sources), plane_ends(targets)

    def views(self, slot: SlotCopy) -> Iterator[tuple[Rows, Rows]]:
        """Source and target bytes of each part."""
        for part in slot_parts(slot, *self._ends):
            source, target = self.sources[part.source_plane][slot.source], self.targets[part.target_plane][slot.target]
            start, to = part.source_offset, part.target_offset
            yield source[start : start + part.nbytes], target[to : to + part.nbytes]


def plane_ends(planes: Sequence[Plane]) -> list[int]:
    """Where in a page's bytes each plane's part ends; the last is the bytes of a page."""
    return list(accumulate(int(plane.shape[1]) for plane in planes))


def check_fits(plan: Plan, piece: Piece, page_nbytes: int) -> None:
    """`InvariantViolation` when a page of the plan is not in its pool, or a slot not in its page: it would be another.

    piece: any of the pools'.
    """
    source, target = (piece.host, piece.device) if plan.direction == "h2d" else (piece.device, piece.host)
    slots = plan.slots
    sources = [*plan.sources, *(slot.source for slot in slots)] if slots else plan.sources
    targets = [*plan.targets, *(slot.target for slot in slots)] if slots else plan.targets
    for what, ids, pool in (("source", sources, source), ("target", targets, target)):
        low, high = min(ids), max(ids)
        if low < 0 or high >= len(pool):
            raise InvariantViolation(f"{plan.cause}: {what} pages {low} to {high} in a pool of {len(pool)}")
    for slot in slots:
        if max(slot.source_offset, slot.target_offset) + slot.nbytes > page_nbytes:
            raise InvariantViolation(f"{plan.cause}: {slot} goes past the end of a page of {page_nbytes} bytes")


def _cut(planes: list[Plane], ends: list[int], start: int, end: int) -> Plane:
    """Bytes `start` to `end` of every page, which lie in one plane."""
    number = next(i for i, plane_end in enumerate(ends) if start < plane_end)
    offset = ends[number] - int(planes[number].shape[1])
    return planes[number][:, start - offset : end - offset]
