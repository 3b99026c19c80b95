"""Encoder outputs in the simulated world: what operations on them do.

Must not choose operations (`chooser` does) nor know what must hold after each (`watch` and `output_watch` do).

The bytes of an output follow from its encoder, its record and its form, so whatever is read wrong is seen.  Forms have
other tensors: an encoder that does not give the same again.
"""

from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kvkeep.errors import OutOfPages
from kvkeep.index.hints import Discard, Expect, Hint, Pin
from kvkeep.index.names import Identity
from kvkeep.index.output import Shapes, Tensor, encoder_identity, find_output
from kvkeep.outputs import Hold
from kvkeep.tiers.ledger import State
from kvkeep.tiers.slots import Slots
from tests.core.naive import narrow_hash
from tests.sim.device import NBYTES

if TYPE_CHECKING:
    from kvkeep.tiers.ledger import Ledger
    from tests.sim.world import World

#: Slots are multiples of so many bytes here: pages are small.
GRANULE_NBYTES = 2
#: Sizes of outputs, by number: less than a granule, slots, whole pages, and pages with a rest.
SIZES = (7, NBYTES + 6, 1, 3 * NBYTES + 3, 5, 2 * NBYTES, 2, NBYTES, 9, 2 * NBYTES + 1, NBYTES - 1, 12)
FORMS = 2
HINTS: tuple[Hint, ...] = (Discard(), Pin(20.0), Expect(3.0), Pin(0.0))


def tensors_of(which: int, form: int) -> tuple[Tensor, ...]:
    """One tensor, or two where there are bytes for them."""
    nbytes = SIZES[(which + 5 * form) % len(SIZES)]
    parts = [nbytes // 2, nbytes - nbytes // 2] if nbytes > 3 else [nbytes]
    return tuple(Tensor((n,), f"uint{8 << form}", sum(parts[:i]), n) for i, n in enumerate(parts))


def shapes_of(which: int, form: int) -> Shapes:
    """As `find` takes them."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(which, form))


@lru_cache(4096)
def bytes_of(encoder: int, which: int, form: int) -> bytes:
    """All bytes of an output."""
    return Random(f"{encoder} {which} {form}").randbytes(sum(tensor.nbytes for tensor in tensors_of(which, form)))


def allow_small_slots(ledger: "Ledger") -> None:
    """Slots of a few bytes, since a page has few."""
    ledger.slots = Slots(NBYTES, ledger.total, align_nbytes=GRANULE_NBYTES)


class Occurrence:
    """`handle` names it in operations.   written: its bytes are there, or on their way in the device's stream."""

    def __init__(self, handle: int, encoder: int, which: int, form: int, hold: Hold, *, written: bool) -> None:
        self.handle = handle
        self.encoder = encoder
        self.which = which
        self.form = form
        self.hold = hold
        self.written = written

    @property
    def nbytes(self) -> int:
        """Of its output."""
        return len(self.expected)

    @property
    def expected(self) -> bytes:
        """What its pages must hold once they may be read."""
        return bytes_of(self.encoder, self.which, self.form)


class OutputWorld:
    """The outputs of two encoders in the tiers of a simulated cache, and who holds them."""

    def __init__(self, world: "World") -> None:
        self.world = world
        cache = world.cache
        allow_small_slots(cache._ledger)
        if cache._host is not None:
            allow_small_slots(cache._host.ledger)
        self.outputs = cache.outputs()
        self.live: dict[int, Occurrence] = {}

    # ------------------------------------------------------------------ operations

    def find(self, handle: int, encoder: int, which: int, form: int | None) -> None:
        """An occurrence of an output, if it is there; with the tensors of a form, if one is given."""
        world, tree = self.world, self.world.cache._tree
        run = find_output(tree, self.identity(encoder), record_of(which))
        expect = shapes_of(which, form) if form is not None else None
        before = world.watch.before() if world.watch is not None else None
        there = run is not None and (form is None or run.tensors == tensors_of(which, form))
        on_gpu = run is not None and bool(run.pages)
        hold = self.outputs.find(self.identity(encoder), record_of(which), expect)
        if hold is None:
            assert not (there and on_gpu), "an output on the GPU was not found"
            world.seen["outputs not loaded"] += there
            if before is not None:
                before.unchanged()
            return
        assert there and run is hold.output
        assert hold.from_host is not on_gpu
        found_form = next(f for f in range(FORMS) if run is not None and run.tensors == tensors_of(which, f))
        self.live[handle] = Occurrence(handle, encoder, which, found_form, hold, written=True)
        world.seen["outputs loaded" if hold.from_host else "outputs found"] += 1
        world.seen["outputs joined"] += on_gpu and hold.read_in_progress
        world.seen["outputs held twice"] += run is not None and run.holds > 1

    def reserve(self, handle: int, encoder: int, which: int, form: int) -> None:
        """Room for one that is computed."""
        nbytes = len(bytes_of(encoder, which, form))
        before = self.world.watch.before() if self.world.watch is not None else None
        need = self.need(nbytes)
        if need > self.world.cache._ledger.total:
            return
        try:
            hold = self.outputs.reserve(self.identity(encoder), nbytes)
        except OutOfPages as refusal:
            self.world.seen["outputs refused"] += 1
            if before is not None:
                before.refused(refusal, need)
            return
        self.live[handle] = Occurrence(handle, encoder, which, form, hold, written=False)
        if self.world.watch is not None:
            self.world.watch.may_be_written_now(hold.pages)

    def write(self, handle: int) -> None:
        """Its bytes, in the device's stream."""
        occurrence = self.live.get(handle)
        if occurrence is None or occurrence.written:
            return
        at, data = 0, occurrence.expected
        for page, offset, nbytes in self.parts(occurrence.hold.pages, occurrence.nbytes):
            self.world.device.write(page, offset, data[at : at + nbytes])
            at += nbytes
        self.world.cache.fence(self.world.device.event)
        occurrence.written = True

    def store(self, handle: int, seconds: float) -> None:
        """What was written is found from now on."""
        occurrence = self.live.get(handle)
        if occurrence is None or not occurrence.written or occurrence.hold.output is not None:
            return
        hold = occurrence.hold
        if self.world.cache._ledger.state(hold.pages[0]) is not State.OPEN:
            return  # it was, and another one stayed
        tensors = tensors_of(occurrence.which, occurrence.form)
        run = find_output(self.world.cache._tree, hold.identity, record_of(occurrence.which))
        fresh = hold.epoch == self.outputs.epoch
        self.world.seen["outputs stored over a host copy"] += fresh and run is not None and not run.pages
        self.outputs.store(hold, record_of(occurrence.which), tensors, seconds)
        self.world.seen["outputs stored"] += hold.output is not None
        assert fresh or hold.output is None, "an output that began before a reset was stored"
        assert not fresh or run is not None or hold.output is not None
        self.world.seen["outputs stored by another"] += fresh and hold.output is None
        self.world.seen["outputs too old to store"] += not fresh

    def release(self, handle: int) -> None:
        """An occurrence ends, whatever state it is in."""
        occurrence = self.live.pop(handle, None)
        if occurrence is not None:
            self.world.seen["outputs released while copying"] += occurrence.hold.read_in_progress
            self.outputs.release(occurrence.hold)
            assert not occurrence.hold.live

    def hint(self, encoder: int, which: int, hint: int) -> None:
        """What is known of the future of an output."""
        self.outputs.hint(self.identity(encoder), record_of(which), HINTS[hint % len(HINTS)])

    def forget(self, encoder: int, which: int) -> None:
        """An output leaves, unless it is held."""
        run = find_output(self.world.cache._tree, self.identity(encoder), record_of(which))
        gone = self.outputs.forget(self.identity(encoder), record_of(which))
        assert gone is (run is not None and not run.holds)
        self.world.seen["outputs forgotten"] += gone

    # ------------------------------------------------------------------ questions

    def drop_revoked(self) -> None:
        """Occurrences whose loads have failed are over."""
        for occurrence in list(self.live.values()):
            if not occurrence.hold.live:
                assert occurrence.hold.revoked, f"{occurrence.hold} ended by itself"
                self.world.seen["outputs revoked"] += 1
                del self.live[occurrence.handle]

    def identity(self, encoder: int) -> Identity:
        """Where the outputs of an encoder hang."""
        return encoder_identity(b"fp", bytes(encoder), self.world.hash_fn)

    def need(self, nbytes: int) -> int:
        """How many pages an output takes of those that are free or only cached."""
        slots = self.world.cache._ledger.slots
        assert slots is not None
        pages, rest = slots.cut(nbytes)
        room = slots.has_room(rest) if rest else None
        return pages + bool(rest and (room is None or slots.all_idle(room)))

    def parts(self, pages: "array[int]", nbytes: int, *, host: bool = False) -> Iterator[tuple[int, int, int]]:
        """Page, offset and bytes of each part of an output on these pages and slots."""
        cache = self.world.cache
        ledger = cache._host.ledger if host and cache._host is not None else cache._ledger
        for page in pages:
            if page >= ledger.total:
                place = ledger.place(page)
                assert place.nbytes == nbytes
                yield place.page, place.offset, place.nbytes
                return
            yield page, 0, min(nbytes, NBYTES)
            nbytes -= NBYTES
        assert nbytes <= 0, "an output's pages are too few for its bytes"


@lru_cache(64)
def record_of(which: int) -> bytes:
    """What an output is found by.  Where names are narrow, two records of the first encoder have one name."""
    seed = encoder_identity(b"fp", b"", narrow_hash).name
    tries = (bytes([which, i >> 8, i & 255]) * 7 for i in count())
    return next(record for record in tries if narrow_hash(record, seed) == which // 2)
