"""The one frozen configuration of a cache.

Must not read the environment; must not know what uses it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.errors import BadInput

IndexAt = Literal["seal", "finish"]
EvictionName = Literal["lru", "rhythm"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of a `TieredCache`.

    page_size: token positions a page holds.  128 is the default of the engines kvkeep serves; smaller pages waste
        less of a prefix and cost more bookkeeping.
    index_at: "seal" makes a page visible when it fills, so that requests in flight share it too; "finish" when its
        request ends, which forfeits sharing between concurrent requests.
    eviction: the order in which cached pages leave.  "rhythm" learns when chains come back, and lets go first of what
        costs most to keep for each hit; "lru" is exact least-recently-used, tail first.
    forks: let an engine fork a live request under another label (`TieredCache.fork`).
    ghosts: estimate what tiers of other sizes would hit; some 25 microseconds for each request that finishes.
    """

    page_size: int = 128
    index_at: IndexAt = "seal"
    eviction: EvictionName = "rhythm"
    ghosts: bool = True
    forks: bool = False

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, at_least=1)
        check_choice("index_at", self.index_at, get_args(IndexAt))
        check_choice("eviction", self.eviction, get_args(EvictionName))


def check_int(name: str, value: object, at_least: int) -> int:
    """`value` if it is an int of `at_least` or more; `BadInput` that names the setting otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise BadInput(f"{name} is {value!r}: it must be an integer of {at_least} or more")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """`BadInput` that lists the choices when `value` is none of them."""
    if value not in choices:
        raise BadInput(f"{name} is {value!r}: it must be one of {', '.join(choices)}")
