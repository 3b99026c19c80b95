"""Which bytes of a page lie where in the two pools: the pieces in which a page is copied.

Must not know how they are copied.
"""

from typing import NamedTuple

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.memory import PageMemory, Plane
from kvkeep.transfer.plan import Plan


class Piece(NamedTuple):
    """One piece of every page: row p of `device` is the same part of a page as row q of `host`, wherever they lie."""

    device: Plane
    host: Plane


def pieces(device: PageMemory, host: PageMemory) -> list[Piece]:
    """The fewest pieces that are contiguous on both sides, in the order of a page's bytes.

    Raises `BadInput` when the pages of the two pools differ in size.
    """
    device_planes, host_planes = device.planes(), host.planes()
    device_ends, host_ends = _ends(device_planes), _ends(host_planes)
    if device_ends[-1] != host_ends[-1]:
        raise BadInput(f"pages of {device_ends[-1]} bytes on the device and of {host_ends[-1]} in host memory")
    out = []
    start = 0
    for end in sorted({*device_ends, *host_ends}):
        out.append(Piece(_cut(device_planes, device_ends, start, end), _cut(host_planes, host_ends, start, end)))
        start = end
    return out


def check_page_ids(plan: Plan, piece: Piece) -> None:
    """`InvariantViolation` when a page of the plan is not in its pool: a negative id would be another page."""
    source, target = (piece.host, piece.device) if plan.direction == "h2d" else (piece.device, piece.host)
    for what, ids, pool in (("source", plan.sources, source), ("target", plan.targets, target)):
        low, high = min(ids), max(ids)
        if low < 0 or high >= len(pool):
            raise InvariantViolation(f"{plan.cause}: {what} pages {low} to {high} in a pool of {len(pool)}")


def _ends(planes: list[Plane]) -> list[int]:
    ends: list[int] = []
    for plane in planes:
        ends.append((ends[-1] if ends else 0) + int(plane.shape[1]))
    return ends


def _cut(planes: list[Plane], ends: list[int], start: int, end: int) -> Plane:
    """Bytes `start` to `end` of every page, which lie in one plane."""
    number = next(i for i, plane_end in enumerate(ends) if start < plane_end)
    offset = ends[number] - int(planes[number].shape[1])
    return planes[number][:, start - offset : end - offset]
