"""What a caller may know of a chain's future when its request ends.

Must not know orders: `uses.py` says what a hint changes.  Each raises `BadInput` for seconds that are not a time.
"""

from dataclasses import dataclass

from kvkeep.errors import BadInput


@dataclass(frozen=True, slots=True)
class Discard:
    """The chain will not come back (its session has closed): the pages that are its own leave first."""


@dataclass(frozen=True, slots=True)
class Expect:
    """The chain will come back after about `after_s` seconds."""

    after_s: float

    def __post_init__(self) -> None:
        _check("after_s", self.after_s)


@dataclass(frozen=True, slots=True)
class Pin:
    """The chain leaves last for `for_s` seconds: only when a live request would find no page otherwise."""

    for_s: float

    def __post_init__(self) -> None:
        _check("for_s", self.for_s)


Hint = Discard | Expect | Pin


def _check(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise BadInput(f"{name} is {seconds!r}: it must be a time of 0 or more seconds")
