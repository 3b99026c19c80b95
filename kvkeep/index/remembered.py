"""What is remembered of chains whose pages have all left: some bytes a chain, and the oldest ones make room.

Must not know pages, runs or what a chain's numbers mean to the forecast.
"""

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np

from kvkeep.index.forecast import Forecast

#: So many chains are looked at together.
LOOK = 1024

_ROW = np.dtype(
    [
        ("name", "<u8"), ("ended_s", "<f8"), ("scale", "<f4"), ("typical", "<f4"), ("last", "<f4"), ("log_out", "<f4"),
        ("start", "<i4"), ("tail", "<i4"), ("turns", "<i4"), ("group", "<i2"), ("counted", "i1"), ("paused", "i1"),
    ]
)  # fmt: skip
_PACK = Struct("<Qd4f3ih2b")


class Chain(NamedTuple):
    """See `Use`, which has more of the same."""

    name: int
    ended_s: float
    scale: float
    typical: float
    last: float
    log_out: float
    start: int
    tail: int
    turns: int
    group: int
    counted: int
    paused: int


class Remembered:
    """At most `size` chains by name.  Where one was taken is room for the next; without any, each in turn makes room."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = bytearray(size * _PACK.size)
        self._rows = np.frombuffer(self._bytes, dtype=_ROW)
        self._at: dict[int, int] = {}
        self._free = array("i", range(size - 1, -1, -1))
        self._next = self._looked = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, name: int) -> bool:
        return name in self._at

    def any_of(self, names: Sequence[int]) -> bool:
        """Whether one of the names is a remembered chain's."""
        return not self._at.keys().isdisjoint(names)

    def clear(self) -> None:
        """Forgets all."""
        for name in list(self._at):
            self.take(name)

    def put(self, chain: Chain) -> Chain | None:
        """Remembers a chain, and returns the one that had to make room for it."""
        self.take(chain.name)
        forgotten = None
        if self._free:
            at = self._free.pop()
        else:
            at = self._next
            self._next = (at + 1) % self.size
            forgotten = self._chain(at)
            del self._at[forgotten.name]
        self._at[chain.name] = at
        _PACK.pack_into(self._bytes, at * _PACK.size, *chain)
        return forgotten

    def get(self, name: int) -> Chain | None:
        """The chain of that name."""
        at = self._at.get(name)
        return None if at is None else self._chain(at)

    def take(self, name: int) -> None:
        """Forgets the chain of that name, if it is here."""
        at = self._at.pop(name, None)
        if at is not None:
            self._rows["scale"][at] = 0.0
            self._free.append(at)

    def look(self, forecast: Forecast, now_s: float) -> None:
        """Tells the forecast how long some of the chains have waited by now."""
        at = self._looked
        self._looked = at + LOOK if at + LOOK < self.size else 0
        forecast.waited_all(self._rows[at : at + LOOK], now_s)

    def _chain(self, at: int) -> Chain:
        return Chain._make(_PACK.unpack_from(self._bytes, at * _PACK.size))
