"""Plan: what is to be copied, as a value.

Must not know how or when it is copied, nor what the pages hold.
"""

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from kvkeep.errors import InvariantViolation

#: "h2d" is a load: from the CPU pool to the GPU pool.  "d2h" is a store.
Direction = Literal["h2d", "d2h"]

#: Why a copy is made.
#:   promote  a hit in the CPU pool            resume   a preempted request goes on
#:   demote   a page leaves the GPU pool       clean    a copy ahead of the need       suspend   a request is preempted
Cause = Literal["promote", "resume", "demote", "clean", "suspend"]

DIRECTION_OF: dict[Cause, Direction] = {
    "promote": "h2d",
    "resume": "h2d",
    "demote": "d2h",
    "clean": "d2h",
    "suspend": "d2h",
}


class SlotCopy(NamedTuple):
    """A contiguous part of page `source` to copy into a part of page `target`.

    source_offset, target_offset: bytes from the start of the page, in the order of its bytes (`PageMemory.page_bytes`)
        however they lie in memory.   nbytes: 1 or more; neither part goes past the end of its page.
    """

    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to copy, all in one direction: pages, `sources[i]` to `targets[i]`; slots, parts of pages; or both.

    The arrays are the plan's own copies: a caller may reuse what it handed in.  A generation names the page's content
    for good, so that whoever applies the completion sees whether the page is still the one that was meant.
    `len` counts whole pages: 0 for a plan of slots alone.
    Raises `InvariantViolation` for arrays of different lengths, nothing to copy, a cause of the other direction, or
    slots that are written twice or start before their page.
    """

    direction: Direction
    cause: Cause
    sources: "array[int]"
    targets: "array[int]"
    source_generations: "array[int]"
    target_generations: "array[int]"
    slots: tuple[SlotCopy, ...] = ()

    def __post_init__(self) -> None:
        own = object.__setattr__
        own(self, "sources", array("i", self.sources))
        own(self, "targets", array("i", self.targets))
        own(self, "source_generations", array("q", self.source_generations))
        own(self, "target_generations", array("q", self.target_generations))
        n = len(self.sources)
        if not n == len(self.targets) == len(self.source_generations) == len(self.target_generations):
            raise InvariantViolation(
                f"a plan of {n} sources, {len(self.targets)} targets, {len(self.source_generations)} and "
                f"{len(self.target_generations)} generations: all four must be of one length"
            )
        if self.slots:
            own(self, "slots", tuple(self.slots))
            _check_slots(self)
        elif not n:
            raise InvariantViolation(f"a plan to {self.cause!r} nothing: it must have a page or a slot")
        if DIRECTION_OF.get(self.cause) != self.direction:
            raise InvariantViolation(f"a plan to {self.cause!r} {self.direction!r}: known are {DIRECTION_OF}")

    def __len__(self) -> int:
        return len(self.sources)

    def __str__(self) -> str:
        slots = f", {len(self.slots)} slots" if self.slots else ""
        return f"{self.cause} {len(self)} pages{slots}"

    @property
    def queue_pages(self) -> int:
        """What it counts where pages that wait are bounded: its pages; 1 for slots alone."""
        return len(self.sources) or 1

    def nbytes(self, page_nbytes: int) -> int:
        """Bytes that it copies."""
        pages = len(self.sources) * page_nbytes
        return pages + sum(slot.nbytes for slot in self.slots) if self.slots else pages


def _check_slots(plan: Plan) -> None:
    """What can be said of slots without knowing the pools: `pieces.check_fits` says the rest."""
    whole = set(plan.targets)
    for slot in plan.slots:
        if slot.nbytes < 1 or slot.source_offset < 0 or slot.target_offset < 0:
            raise InvariantViolation(f"{plan.cause}: {slot} must have 1 byte or more, and offsets of 0 or more")
        if slot.target in whole:
            raise InvariantViolation(f"{plan.cause}: {slot} is written into a page that the plan copies whole")
    for one, other in pairwise(sorted(plan.slots, key=lambda slot: (slot.target, slot.target_offset))):
        if one.target == other.target and one.target_offset + one.nbytes > other.target_offset:
            raise InvariantViolation(f"{plan.cause}: {one} and {other} write the same bytes")
