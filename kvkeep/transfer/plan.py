"""Plan: what is to be copied, as a value.

Must not know how or when it is copied, nor what the pages hold.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Pages to copy: `sources[i]` to `targets[i]`, all in one direction.

    The arrays are the plan's own copies: a caller may reuse what it handed in.  A generation names the page's content
    for good, so that whoever applies the completion sees whether the page is still the one that was meant.
    Raises `InvariantViolation` for arrays of different lengths, none at all, or a cause of the other direction.
    """

    direction: Direction
    cause: Cause
    sources: "array[int]"
    targets: "array[int]"
    source_generations: "array[int]"
    target_generations: "array[int]"

    def __post_init__(self) -> None:
        _own(self, "sources", "i", self.sources)
        _own(self, "targets", "i", self.targets)
        _own(self, "source_generations", "q", self.source_generations)
        _own(self, "target_generations", "q", self.target_generations)
        n = len(self.sources)
        if not n or not n == len(self.targets) == len(self.source_generations) == len(self.target_generations):
            raise InvariantViolation(
                f"a plan of {n} sources, {len(self.targets)} targets, {len(self.source_generations)} and "
                f"{len(self.target_generations)} generations: all four must be of one length, 1 or more"
            )
        if DIRECTION_OF.get(self.cause) != self.direction:
            raise InvariantViolation(f"a plan to {self.cause!r} {self.direction!r}: known are {DIRECTION_OF}")

    def __len__(self) -> int:
        return len(self.sources)


def _own(plan: Plan, name: str, typecode: Literal["i", "q"], values: Iterable[int]) -> None:
    object.__setattr__(plan, name, array(typecode, values))
