"""What a router can be told.

Must not know what uses it.
"""

from dataclasses import dataclass, field

from kvkeep.config import check_int
from kvkeep.errors import BadInput
from kvkeep.index.names import TOKEN_NBYTES
from kvkeep.routing.guard import Guard
from kvkeep.routing.shared import DEPTH_MAX


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Settings of a `Router`; routers with equal ones send equal prompts to the same replica.

    page_size: token positions; that of the replicas' caches, or what divides it.  A page of text is 4 bytes a token.
    depth: the page whose name decides, counted from 1; shorter prompts go by what they have.  None: it is learned
        from what prompts share (`shared.py`).
    guard: when a replica is passed over because of its load.
    """

    page_size: int = 128
    depth: int | None = None
    guard: Guard = field(default_factory=Guard)

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, at_least=1)
        if self.depth is not None:
            check_int("depth", self.depth, at_least=1)
            if self.depth > DEPTH_MAX:
                raise BadInput(f"depth is {self.depth}: it must be {DEPTH_MAX} pages at most")
        guard = self.guard
        check_int("ranks", guard.ranks, at_least=1)
        for name, value in (("slack", guard.slack), ("factor", guard.factor)):
            if not 0 <= value < float("inf"):
                raise BadInput(f"{name} is {value!r}: it must be a number of 0 or more")

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page of token ids, and of text."""
        return self.page_size * TOKEN_NBYTES
