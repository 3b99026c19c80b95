"""What the forecast learns from, of every chain that may still be gone on with: a row of 48 bytes each.

Must not know pages or runs, nor which chains have pages.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

#: Looks after which a row is looked at only in its turn, and how many rows those are at a time.
OLDEST, SOME = 64, 256

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
    """Rows, as many as are needed; where the scale is 0 is none.

    columns: by name, to read and write.
    """

    def __init__(self) -> None:
        self._free = array("i")
        self._new = array("i")
        self._batches: deque[Any] = deque(maxlen=OLDEST)
        self._looked = 0
        self._bytes = bytearray()
        self._grow()

    def add(self, *record: float) -> int:
        """A new row, with the fields of a `Record`; returns its number."""
        if not self._free:
            self._grow()
        at = self._free.pop()
        self._new.append(at)
        _PACK.pack_into(self._bytes, at * _PACK.size, *record)
        return at

    def __getitem__(self, at: int) -> Record:
        return Record._make(_PACK.unpack_from(self._bytes, at * _PACK.size))

    def __setitem__(self, at: int, record: Record) -> None:
        _PACK.pack_into(self._bytes, at * _PACK.size, *record)

    def drop(self, at: int) -> None:
        """The row is free again."""
        self._scale[at] = 0.0
        self._free.append(at)

    def look(self, others: Sequence[int]) -> Any:
        """Which rows to look at: added before this look, 1, 3, 7, ... looks earlier; some in turn; and `others`."""
        self._batches.appendleft(np.array(self._new))
        del self._new[:]
        wanted = self._scale > 0.0
        looked = np.zeros(len(wanted), dtype=bool)
        looked[self._looked : self._looked + SOME] = True
        self._looked = self._looked + SOME if self._looked + SOME < len(wanted) else 0
        for i in range(len(self._batches).bit_length()):
            looked[self._batches[(1 << i) - 1]] = True
        looked[others] = True
        return np.flatnonzero(wanted & looked)

    def clear(self) -> None:
        """Drops all."""
        for at in np.flatnonzero(self._scale).tolist():
            self.drop(at)

    def _grow(self) -> None:
        count = len(self._bytes) // _PACK.size
        more = max(count // 4, 64)
        self._bytes = self._bytes + bytes(more * _PACK.size)
        rows: Any = np.frombuffer(self._bytes, dtype=_ROW)
        self.columns = {name: rows[name] for name in ("ended_s", "scale", "group", "counted", "paused")}
        self._scale = self.columns["scale"]
        self._free.extend(range(count + more - 1, count - 1, -1))
