"""Device memory as the simulator's engine sees it: KV as numbers, written in the order of one stream.

Must not know the cache, nor what a request is.

A position's KV is one 32-bit number; K holds it and V another that follows from it.  An asynchronous device writes
when `finish_one` says so, in order, whatever has become of the page since: that is what an engine's stream does.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import POISON_BYTE, Data, PageBytes, Plane
from kvkeep.transfer.backend import NO_WAIT, After, Job
from kvkeep.transfer.simulated import PagePart, PendingWrite, SimulatedBackend

PAGE_SIZE = 2
LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_SIZE, dtype="float32")
NBYTES = LAYOUT.page_nbytes
NUMBERS = 2 * PAGE_SIZE  # of a page: K of its positions, then V
V_OF_K = 0x2545F491
POISON = bytes([POISON_BYTE]) * NBYTES


def page_of(kvs: Sequence[int]) -> bytes:
    """The bytes of a full page whose positions have these KV numbers."""
    return np.array([*kvs, *(kv ^ V_OF_K for kv in kvs)], dtype=np.uint32).tobytes()


class Cell(NamedTuple):
    """One position to write: slot `slot` of page `page` gets KV number `kv`."""

    page: int
    slot: int
    kv: int


class Copied(NamedTuple):
    """The first positions of one page go to another, `positions` of them."""

    source: int
    target: int
    positions: int


class Written(NamedTuple):
    """Bytes for a part of a page."""

    page: int
    offset: int
    data: bytes


Effect: TypeAlias = Cell | Copied | Written


class Device:
    """`pages` pages of memory (a `PageMemory`) and the stream that writes them.

    backend: told of each write, so that it sees who touches a page too early; set once it exists.
    busy: pages that writes in the stream still touch, read ones too.
    """

    def __init__(self, pages: int, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.backend: SimulatedBackend | None = None
        self.event: After = NO_WAIT
        self.busy: Counter[int] = Counter()
        self._bytes = bytearray(pages * NBYTES)
        self._numbers = memoryview(self._bytes).cast("I")
        self.rows = np.frombuffer(self._bytes, dtype=np.uint8).reshape(pages, NBYTES)
        self._stream: deque[tuple[PendingWrite | None, list[Effect]]] = deque()
        self._behind: set[Job] = set()  # what later writes in the stream come after

    # ------------------------------------------------------------------ the engine's side

    def forward(self, cells: Sequence[Cell]) -> None:
        """Queues the writes of a forward; `event` is done when they are."""
        if cells:
            self._launch({cell.page for cell in cells}, list(cells))

    def finish_one(self) -> bool:
        """The oldest write in the stream is over; False when there is none, or a copy that it comes after runs."""
        if not self._stream:
            return False
        write, effects = self._stream[0]
        if write is not None and self.backend is not None and not write.behind.isdisjoint(self.backend.jobs):
            return False
        self._stream.popleft()
        self._apply(effects)
        if write is not None:
            write.finish()
        return True

    def follow(self, job: Job) -> None:
        """A `Stream` of the backend's."""
        assert self.asynchronous and self.backend is not None
        self._behind = {job, *self._behind.intersection(self.backend.jobs)}

    @property
    def writing(self) -> int:
        """Writes in the stream."""
        return len(self._stream)

    def shows(self, page: int, kvs: Sequence[int]) -> bool:
        """Whether the first positions of a page hold these KV numbers."""
        at, numbers = page * NUMBERS, self._numbers
        return all(numbers[at + i] == kv and numbers[at + PAGE_SIZE + i] == kv ^ V_OF_K for i, kv in enumerate(kvs))

    # ------------------------------------------------------------------ what `PageMemory` asks for

    def copy_positions(self, source: int, target: int, count: int) -> None:
        """In the stream, as on a device."""
        self._launch({target}, [Copied(source, target, count)])

    def read(self, page: int, offset: int, nbytes: int) -> PageBytes:
        """A view: of the bytes as they are now, and later."""
        return self.rows[page, offset : offset + nbytes]

    def write(self, page: int, offset: int, data: Data) -> None:
        """In the stream, and only of those bytes."""
        written = Written(page, offset, bytes(data))
        self._launch((), [written], [(page, offset, len(written.data))])

    def page_bytes(self, page: int) -> bytes:
        """A page as it is now."""
        return bytes(self._bytes[page * NBYTES : (page + 1) * NBYTES])

    def poison(self, pages: Iterable[int]) -> None:
        """At once: not for pages that are `busy`."""
        for page in pages:
            self._bytes[page * NBYTES : (page + 1) * NBYTES] = POISON

    def planes(self) -> list[Plane]:
        """One plane."""
        return [self.rows]

    # ------------------------------------------------------------------ inside

    def _launch(self, targets: Iterable[int], effects: list[Effect], parts: Iterable[PagePart] = ()) -> None:
        write = None
        if self.backend is not None:
            write = self.backend.writing(sorted(targets), self._behind, parts=parts)
        for effect in effects:
            self.busy.update(_touched(effect))
        self._stream.append((write, effects))
        if not self.asynchronous:
            self.finish_one()
        elif write is not None:
            self.event = write

    def _apply(self, effects: list[Effect]) -> None:
        numbers = self._numbers
        for effect in effects:
            if isinstance(effect, Cell):
                at = effect.page * NUMBERS + effect.slot
                numbers[at], numbers[at + PAGE_SIZE] = effect.kv, effect.kv ^ V_OF_K
            elif isinstance(effect, Written):
                at = effect.page * NBYTES + effect.offset
                self._bytes[at : at + len(effect.data)] = effect.data
            else:
                for at in (0, PAGE_SIZE):
                    for i in range(at, at + effect.positions):
                        numbers[effect.target * NUMBERS + i] = numbers[effect.source * NUMBERS + i]
            for page in _touched(effect):
                self.busy[page] -= 1
                if not self.busy[page]:
                    del self.busy[page]


def _touched(effect: Effect) -> tuple[int, ...]:
    return (effect.source, effect.target) if isinstance(effect, Copied) else (effect.page,)
