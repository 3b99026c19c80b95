"""What must hold of encoder outputs after each operation on a simulated world.

Must not change anything but the bytes of free parts of pages, which it poisons.
"""

from array import array
from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING

from kvkeep.index.family import children_of
from kvkeep.index.output import Output
from kvkeep.index.run import NOWHERE
from kvkeep.tiers.ledger import Ledger, State
from kvkeep.tiers.memory import POISON_BYTE
from kvkeep.transfer.pieces import Rows
from tests.sim.device import NBYTES
from tests.sim.outputs import FORMS, GRANULE_NBYTES, OutputWorld, bytes_of, record_of, tensors_of

if TYPE_CHECKING:
    from tests.sim.world import World

READY = int(State.READY)
POISON = bytes([POISON_BYTE]) * GRANULE_NBYTES


class FreeGranules:
    """Free parts of pages with slots: poisoned when they become free, and nobody may have written them since."""

    def __init__(self, what: str, ledger: Ledger, rows: Rows) -> None:
        self._what = what
        self._ledger = ledger
        self._rows = rows
        self._poisoned: dict[int, int] = {}  # page: a bit a granule

    def look(self, busy: Container[int]) -> None:
        """Checks those that were free before, poisons the others.   busy: pages that are written."""
        assert self._ledger.slots is not None
        poisoned = {}
        for page, slotted in self._ledger.slots.pages.items():
            if page in busy:
                continue
            before, free = self._poisoned.get(page, 0), slotted.free
            for granule in range(NBYTES // GRANULE_NBYTES):
                if not free >> granule & 1:
                    continue
                part = self._rows[page, granule * GRANULE_NBYTES : (granule + 1) * GRANULE_NBYTES]
                if before >> granule & 1:
                    assert part.tobytes() == POISON, f"{self._what} page {page} was written where no slot is"
                else:
                    part[:] = POISON_BYTE
            poisoned[page] = free
        self._poisoned = poisoned


class OutputWatch:
    """Looks at the outputs of a world."""

    def __init__(self, world: "World", outputs: OutputWorld) -> None:
        self._world = world
        self._outputs = outputs
        cache = world.cache
        self._free = [(FreeGranules("GPU", cache._ledger, world.device.rows), world.device.busy)]
        self._host: Rows | None = None
        if cache._host is not None and world.host is not None and world.host.memory is not None:
            self._host = world.host.memory.rows
            self._free.append((FreeGranules("host", cache._host.ledger, self._host), Counter()))
        self._of_root = {outputs.identity(encoder).record: encoder for encoder in range(2)}
        self._which = {record_of(which): which for which in range(world.setup.outputs)}

    def look(self) -> None:
        """Everything that must hold of them now."""
        for free, busy in self._free:
            free.look(busy)
        for occurrence in self._outputs.live.values():
            hold = occurrence.hold
            assert len(set(hold.pages)) == len(hold.pages), f"{hold} has a page twice"
            if occurrence.written and not hold.read_in_progress:
                self._on_gpu(hold.pages, occurrence.expected, f"{hold} of output {occurrence.which}")
        held = Counter(occurrence.hold.output for occurrence in self._outputs.live.values())
        for root in self._world.cache._tree.roots:
            if root.record in self._of_root:
                for run in children_of(root):
                    assert isinstance(run, Output)
                    assert run.holds == held[run], f"{run.holds} holds are counted of output {run.record!r}"
                    self._cached(run, self._of_root[root.record])

    def _cached(self, run: Output, encoder: int) -> None:
        """An output in the index is there as a whole on the tiers that have it, with the right bytes."""
        cache, which = self._world.cache, self._which[run.record]
        (form,) = (f for f in range(FORMS) if tensors_of(which, f) == run.tensors)
        expected = bytes_of(encoder, which, form)
        if run.pages and all(cache._ledger._states[page] == READY for page in run.pages):
            self._on_gpu(run.pages, expected, f"output {which} in the index")
        assert run.pages or run.host, "an output without bytes is in the index"
        if run.host is None or cache._host is None or self._host is None:
            return
        assert NOWHERE not in run.host, "part of an output is in host memory"
        if all(cache._host.ledger._states[page] == READY for page in run.host):
            parts = self._outputs.parts(run.host, len(expected), host=True)
            there = b"".join(self._host[page, at : at + nbytes].tobytes() for page, at, nbytes in parts)
            assert there == expected, f"output {which} in host memory holds wrong bytes"

    def _on_gpu(self, pages: "array[int]", expected: bytes, what: str) -> None:
        device, at = self._world.device, 0
        for page, offset, nbytes in self._outputs.parts(pages, len(expected)):
            if device.rows[page, offset : offset + nbytes].tobytes() != expected[at : at + nbytes]:
                assert page in device.busy, f"{what}: page {page} holds wrong bytes at {offset}"
            at += nbytes
