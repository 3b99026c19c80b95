"""What the forecast learns from, of every chain that may still be gone on with: a row of 48 bytes each.

Must not know pages or runs, nor which chains have pages.
"""

from array import array
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

#: Rows that are looked at together.
LOOK = 1024

_ROW = np.dtype(
    [
        ("name", "<u8"), ("ended_s", "<f8"), ("scale", "<f4"), ("typical", "<f4"), ("last", "<f4"), ("log_out", "<f4"),
        ("start", "<i4"), ("tail", "<i4"), ("turns", "<i4"), ("group", "<i2"), ("counted", "i1"), ("paused", "i1"),
    ]
)  # fmt: skip
_PACK = Struct("<Qd4f3ih2b")


class Record(NamedTuple):
    """One use of a chain, from its end on.

    name: of its last page.   ended_s: when that was.   scale, group, counted, paused: see `Waiting`.
    typical, last, log_out: see `Forecast`.   turns: how often the chain went on before.
    start, tail: where the chain's own pages begin, and the depth behind its last page.
    """

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


class Records:
    """Rows, as many as are needed; where the scale is 0 is none."""

    def __init__(self) -> None:
        self._free = array("i")
        self._looked = 0
        self._bytes = bytearray()
        self._rows: Any = np.frombuffer(self._bytes, dtype=_ROW)

    def add(self, record: Record) -> int:
        """A new row; returns its number."""
        if not self._free:
            self._grow()
        at = self._free.pop()
        _PACK.pack_into(self._bytes, at * _PACK.size, *record)
        return at

    def __getitem__(self, at: int) -> Record:
        return Record._make(_PACK.unpack_from(self._bytes, at * _PACK.size))

    def __setitem__(self, at: int, record: Record) -> None:
        _PACK.pack_into(self._bytes, at * _PACK.size, *record)

    def drop(self, at: int) -> None:
        """The row is free again."""
        self._rows["scale"][at] = 0.0
        self._free.append(at)

    def some(self) -> Any:
        """The next rows in turn, as an array to read and write."""
        at = self._looked
        self._looked = at + LOOK if at + LOOK < len(self._rows) else 0
        return self._rows[at : at + LOOK]

    def rows(self, numbers: list[int]) -> Any:
        """A copy of those rows, as an array."""
        return self._rows[numbers]

    def clear(self) -> None:
        """Drops all."""
        self.__init__()  # type: ignore[misc]

    def _grow(self) -> None:
        count = len(self._rows)
        more = max(count // 4, 64)
        self._bytes = self._bytes + bytes(more * _PACK.size)
        self._rows = np.frombuffer(self._bytes, dtype=_ROW)
        self._free.extend(range(count + more - 1, count - 1, -1))
