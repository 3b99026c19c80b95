"""The ledger: the one place where a page's state and owners change.

Must not know names, tokens, bytes or streams.  Callers hold the cache's lock.

    FREE --open--> OPEN --seal--> READY --release/drop--> FREE (last owner left)
    READY whose only owner is the index --recycle--> OPEN (of the request that needs room)
    OPEN --load--> LOADING --land--> READY              a copy writes it; if that fails --hand_over--> OPEN, or FREE
    READY --drain--> DRAINING --hand_over--> OPEN, or FREE   a copy still reads it, and one heir waits for it
    DRAINING --load--> LOADING                               and another will write it then; --unload--> it will not
    DRAINING --follow--> OPEN    the heir writes it in the order of a stream that comes after the copy, which goes on

Owners are counted in one word a page, `2 * holders + kept`: `holders` are requests (and copies), `kept` is 1 while
the index owns the page.  So 0 is nobody, 1 is "cached and droppable", and a count below zero cannot hide.

A slot (`slots.py`) is a page of its own to all of this, with an id behind those of the pages; among one owner's pages
slots stand at the end.  The page that slots are in is OPEN and owned by `SLOTS` until the last of them is FREE.
"""

from array import array

import numpy as np

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.pages import INDEX, SCALAR_PAGES_MAX, SLOTS, State, as_index, page_ids
from kvkeep.tiers.slots import SlotPlace, Slots

__all__ = ["INDEX", "SCALAR_PAGES_MAX", "SLOTS", "Ledger", "State", "as_index", "page_ids"]

SLOT_IDS_MIN = 256  # that there is room for once there is a slot

# The states as plain ints: reading an enum member costs 50 ns, in loops over pages.
_FREE, _OPEN, _READY, _LOADING, _DRAINING = (int(s) for s in State)

# The word of an idle page, in bytes: comparing bytes costs a fifth of comparing small numpy arrays.
_IDLE_BYTES = array("i", (1,)).tobytes()


class Ledger:
    """States, owner counts and generations of `total` pages, changed in batches of distinct page ids.

    Batches are distinct by construction: a page opens once, the index keeps it once, a lease lists it once.
    What that would break is still caught where it matters: no page can be freed twice.

    Every method checks the whole batch first and raises `InvariantViolation` naming a page, with nothing changed,
    when the batch is not legal.  `idle` is the number of pages whose only owner is the index, or all whose slots are
    such.   slots: the slots in this pool's pages; None until `allow_slots`.   ids: page and slot ids are below it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.idle = 0
        self.slots: Slots | None = None
        self.ids = total
        self._words = array("i", bytes(4 * total))
        self._states = array("b", bytes(total))
        self._generations = array("q", bytes(8 * total))
        self._free = array("i", range(total - 1, -1, -1))
        self._map()

    # ------------------------------------------------------------------ questions

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages owned by at least one request or copy."""
        return self.total - len(self._free) - self.idle

    @property
    def kept_count(self) -> int:
        """Pages that the index owns, alone or with others.  O(total)."""
        return int(np.count_nonzero(self._words_np & 1))

    def state(self, page: int) -> State:
        """The state of one page."""
        return State(self._states[page])

    def holders(self, page: int) -> int:
        """How many requests and copies own the page; the index is not counted."""
        return self._words[page] >> 1

    def kept(self, page: int) -> bool:
        """Whether the index owns the page."""
        return bool(self._words[page] & 1)

    def is_idle(self, page: int) -> bool:
        """Whether the index is the page's only owner."""
        return self._words[page] == 1

    def generation(self, page: int) -> int:
        """How often the page has changed hands; (page, generation) names its present content for good."""
        return self._generations[page]

    def idle_tail(self, pages: "array[int]", count_max: int) -> int:
        """How many of the last `count_max` of `pages` are idle, counted from the end up to the first that is not."""
        words = self._words
        if count_max <= SCALAR_PAGES_MAX:
            k = 0
            while k < count_max and words[pages[~k]] == 1:
                k += 1
            return k
        tail = self._words_np.take(as_index(pages[-count_max:]))
        if tail.tobytes() == _IDLE_BYTES * count_max:
            return count_max
        return count_max - 1 - int((tail != 1).nonzero()[0][-1])

    def ready_head(self, pages: "array[int]") -> int:
        """How many of `pages`, from the start up to the first that is not, are READY."""
        if len(pages) <= SCALAR_PAGES_MAX:
            return next((i for i, p in enumerate(pages) if self._states[p] != _READY), len(pages))
        late = (self._states_np.take(as_index(pages)) != _READY).nonzero()[0]
        return int(late[0]) if len(late) else len(pages)

    def draining(self, pages: "array[int]") -> tuple["array[int]", "array[int]"]:
        """Those of `pages` that are DRAINING, and the others."""
        if len(pages) <= SCALAR_PAGES_MAX:
            states = self._states
            return (
                array("i", [p for p in pages if states[p] == _DRAINING]),
                array("i", [p for p in pages if states[p] != _DRAINING]),
            )
        ids = as_index(pages)
        found = self._states_np.take(ids) == _DRAINING
        draining, others = ids[found], ids[~found]
        return array("i", draining.astype(np.int32).tobytes()), array("i", others.astype(np.int32).tobytes())

    # ------------------------------------------------------------------ changes

    def open(self, count: int, owner: object) -> "array[int]":
        """Takes `count` free pages for `owner`: FREE -> OPEN."""
        free = self._free
        if count > len(free):
            raise InvariantViolation(f"{count} pages opened with {len(free)} free")
        if not count:
            return array("i")
        pages = free[-count:]
        del free[-count:]
        if count <= SCALAR_PAGES_MAX:
            for p in pages:
                self._words[p] = 2
                self._states[p] = _OPEN
        else:
            ids = as_index(pages)
            self._words_np[ids] = 2
            self._states_np[ids] = _OPEN
        return pages

    def seal(self, pages: "array[int]", owner: object) -> None:
        """OPEN -> READY: the bytes are complete and will not change."""
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                if self._states[p] != _OPEN or self._words[p] | 6 != 6:
                    raise self._broken("sealed", p)
            for p in pages:
                self._states[p] = _READY
            return
        ids = as_index(pages)
        bad = (self._states_np.take(ids) != _OPEN) | (self._words_np.take(ids) | 6 != 6)
        if np.count_nonzero(bad):
            raise self._broken("sealed", int(ids[bad.argmax()]))
        self._states_np[ids] = _READY

    def retain(self, pages: "array[int]", owner: object) -> None:
        """Adds `owner` as a holder of READY or LOADING pages."""
        words = self._words
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                if not _READY <= self._states[p] <= _LOADING:
                    raise self._broken("retained", p)
            for p in pages:
                if words[p] == 1:
                    self.idle -= 1
                words[p] += 2
            if self.slots is not None:
                self._count_idle_slots(pages)
            return
        ids = as_index(pages)
        states = self._states_np.take(ids)
        bad = (states < _READY) | (states > _LOADING)
        if np.count_nonzero(bad):
            raise self._broken("retained", int(ids[bad.argmax()]))
        found = self._words_np.take(ids)
        self.idle -= int(np.count_nonzero(found == 1))
        found += 2
        self._words_np[ids] = found
        if self.slots is not None:
            self._count_idle_slots(pages)

    def release(self, pages: "array[int]", owner: object) -> int:
        """Removes `owner` as a holder; pages left without an owner become FREE.  Returns how many did."""
        words = self._words
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                if words[p] < 2:
                    raise self._broken("released", p)
            freed = array("i")
            for p in pages:
                w = words[p] - 2
                if w < 0:
                    raise self._broken("released twice in one batch", p)
                words[p] = w
                if w == 1:
                    self.idle += 1
                elif w == 0:
                    freed.append(p)
        else:
            ids = as_index(pages)
            found = self._words_np.take(ids)
            found -= 2
            if found.min() < 0:
                raise self._broken("released", int(ids[found.argmin()]))
            self._words_np[ids] = found
            self.idle += int(np.count_nonzero(found == 1))
            freed = array("i", ids[found == 0].astype(np.int32).tobytes())
        if self.slots is not None:
            self._count_idle_slots(pages)
        self._set_free(freed)
        return len(freed)

    def keep(self, pages: "array[int]") -> None:
        """The index becomes an owner of READY or LOADING pages that it does not own yet."""
        words = self._words
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                if not _READY <= self._states[p] <= _LOADING or words[p] & 1 or not words[p]:
                    raise self._broken("kept", p)
            for p in pages:
                words[p] |= 1
            return
        ids = as_index(pages)
        found = self._words_np.take(ids)
        states = self._states_np.take(ids)
        bad = (states < _READY) | (states > _LOADING) | (found & 1 != 0) | (found == 0)
        if np.count_nonzero(bad):
            raise self._broken("kept", int(ids[bad.argmax()]))
        self._words_np[ids] = found | 1

    def drop(self, pages: "array[int]") -> int:
        """The index stops owning the pages; those without a holder become FREE.  Returns how many did."""
        if len(pages) <= SCALAR_PAGES_MAX:
            words, freed = self._words, array("i")
            for p in pages:
                if not words[p] & 1:
                    raise self._broken("dropped", p)
            for p in pages:
                if not words[p] & 1:
                    raise self._broken("dropped twice in one batch", p)
                words[p] -= 1
                if not words[p]:
                    freed.append(p)
        else:
            ids = as_index(pages)
            found = self._words_np.take(ids)
            bad = found & 1 == 0
            if np.count_nonzero(bad):
                raise self._broken("dropped", int(ids[bad.argmax()]))
            found -= 1
            self._words_np[ids] = found
            freed = array("i", ids[found == 0].astype(np.int32).tobytes())
        self.idle -= len(freed)
        self._set_free(freed)
        return len(freed)

    def recycle(self, pages: "array[int]", owner: object) -> None:
        """Hands idle pages straight to `owner`: READY -> OPEN with a new generation."""
        words, states, generations = self._words, self._states, self._generations
        count = len(pages)
        if count <= SCALAR_PAGES_MAX:
            for p in pages:
                if words[p] != 1:
                    raise self._broken("recycled", p)
            for p in pages:
                words[p] = 2
                states[p] = _OPEN
                generations[p] += 1
        else:
            ids = as_index(pages)
            found = self._words_np.take(ids)
            if found.tobytes() != _IDLE_BYTES * count:
                raise self._broken("recycled", int(ids[(found != 1).argmax()]))
            self._words_np[ids] = 2
            self._states_np[ids] = _OPEN
            self._generations_np[ids] += 1
        self.idle -= count

    # ------------------------------------------------------------------ copies in flight

    def load(self, pages: "array[int]") -> None:
        """OPEN or DRAINING -> LOADING: a copy will write the bytes, and is or becomes a holder.

        A page that was DRAINING is written when those who read it are over.
        """
        self._expect(pages, (_OPEN, _DRAINING), "loaded")
        self._set_state(pages, _LOADING)

    def unload(self, pages: "array[int]", copy: object) -> None:
        """LOADING -> DRAINING: `copy` will not be made, one copy still reads the pages, and the index has none."""
        self._expect(pages, (_LOADING,), "unloaded")
        for p in pages:
            if self._words[p] not in (4, 6):
                raise self._broken("unloaded", p)
        self._set_state(pages, _DRAINING)
        self.release(pages, copy)

    def generations(self, pages: "array[int]") -> "array[int]":
        """The generations of `pages`, as array('q')."""
        if len(pages) <= SCALAR_PAGES_MAX:
            return array("q", [self._generations[p] for p in pages])
        return array("q", self._generations_np.take(as_index(pages)).tobytes())

    def land(self, pages: "array[int]", copy: object) -> int:
        """LOADING -> READY: the bytes are there and `copy` lets go.  Returns how many nobody wanted any more."""
        self._expect(pages, (_LOADING,), "landed")
        self._set_state(pages, _READY)
        return self.release(pages, copy)

    def hand_over(self, pages: "array[int]", copy: object) -> int:
        """A copy into LOADING, or out of DRAINING, pages is over; the index owns none of them by now.

        A page with one holder left becomes its OPEN page, one without becomes FREE.  Returns how many did.
        """
        self._expect(pages, (_LOADING, _DRAINING), "handed over")
        for p in pages:
            if self._words[p] not in (2, 4):
                raise self._broken("handed over to more than one", p)
        freed = self.release(pages, copy)
        if freed < len(pages):
            self._set_state(array("i", (p for p in pages if self._words[p])), _OPEN)
        return freed

    def drain(self, pages: "array[int]", heir: object) -> None:
        """READY -> DRAINING: the index hands pages that one copy still reads to `heir`, with a new generation."""
        for p in pages:
            if self._states[p] != _READY or self._words[p] != 3:
                raise self._broken("drained", p)
        for p in pages:
            self._words[p] = 4
            self._generations[p] += 1
        self._set_state(pages, _DRAINING)

    def follow(self, pages: "array[int]") -> None:
        """DRAINING -> OPEN: the heir's writes come after the copy that still reads the pages, and holds them."""
        self._expect(pages, (_DRAINING,), "written behind its copy")
        for p in pages:
            if self._words[p] != 4:
                raise self._broken("written behind its copy", p)
        self._set_state(pages, _OPEN)

    def _expect(self, pages: "array[int]", states: tuple[int, ...], what: str) -> None:
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                if self._states[p] not in states:
                    raise self._broken(what, p)
            return
        found = self._states_np.take(as_index(pages))
        bad = np.logical_and.reduce([found != state for state in states])
        if np.count_nonzero(bad):
            raise self._broken(what, pages[int(bad.argmax())])

    def _set_state(self, pages: "array[int]", state: int) -> None:
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                self._states[p] = state
        else:
            self._states_np[as_index(pages)] = state

    # ------------------------------------------------------------------ slots

    def allow_slots(self, page_nbytes: int) -> Slots:
        """Pages of so many bytes may hold slots from now on."""
        if self.slots is None:
            self.slots = Slots(page_nbytes, self.total)
        return self.slots

    def open_slot(self, nbytes: int, owner: object) -> int | None:
        """A slot of `nbytes` bytes for `owner`, OPEN; None when it takes a page more, and none is free."""
        assert self.slots is not None
        page = self.slots.has_room(nbytes)
        if page is None:
            if not self._free:
                return None
            (page,) = self.open(1, SLOTS)
            self.slots.add_page(page)
        elif self.slots.all_idle(page):
            self.idle -= 1
        slot = self.slots.open(page, nbytes)
        if slot >= self.ids:
            self._grow(max(SLOT_IDS_MIN, self.ids - self.total))
        self._words[slot] = 2
        self._states[slot] = _OPEN
        return slot

    def place(self, slot: int) -> SlotPlace:
        """Where a slot is."""
        assert self.slots is not None
        return self.slots.place(slot)

    def split(self, pages: "array[int]") -> tuple["array[int]", "array[int]"]:
        """A batch's pages, and its slots: a batch of several outputs has them anywhere."""
        if not pages or max(pages) < self.total:
            return pages, array("i")
        return page_ids(p for p in pages if p < self.total), page_ids(p for p in pages if p >= self.total)

    def _count_idle_slots(self, pages: "array[int]") -> None:
        """`idle` has counted slots of a batch as if they were pages."""
        slots = self.slots
        assert slots is not None
        for slot in reversed(pages):
            if slot < self.total:
                return
            self.idle += slots.note(slot, self._words[slot] == 1)

    def _free_slots(self, pages: "array[int]", slots: Slots) -> "array[int]":
        """Frees the slots of a batch, and pages that have none any more; returns the pages of the batch."""
        pages, freed = self.split(pages)
        for slot in freed:
            if self._states[slot] == _FREE:
                raise self._broken("freed twice", slot)
            self._states[slot] = _FREE
            self._generations[slot] += 1
            more_idle, empty = slots.close(slot)
            self.idle += more_idle
            if empty is not None:
                self.release(array("i", (empty,)), SLOTS)
        return pages

    def _grow(self, count: int) -> None:
        """Makes room for the counts of `count` more ids."""
        self.ids += count
        self._words = self._words + array("i", bytes(4 * count))
        self._states = self._states + array("b", bytes(count))
        self._generations = self._generations + array("q", bytes(8 * count))
        self._map()

    def _map(self) -> None:  # the same memory for numpy: the arrays are never resized
        self._words_np = np.frombuffer(self._words, dtype=np.int32)
        self._states_np = np.frombuffer(self._states, dtype=np.int8)
        self._generations_np = np.frombuffer(self._generations, dtype=np.int64)

    # ------------------------------------------------------------------ inside

    def _set_free(self, pages: "array[int]") -> None:
        if self.slots is not None:
            pages = self._free_slots(pages, self.slots)
        count = len(pages)
        if not count:
            return
        if count <= SCALAR_PAGES_MAX:
            for p in pages:
                if self._states[p] == _FREE:
                    raise self._broken("freed twice", p)
                self._states[p] = _FREE
                self._generations[p] += 1
        else:
            ids = as_index(pages)
            before = len(self._free)
            order = np.arange(before, before + count)
            self._generations_np[ids] += 1
            self._words_np[ids] = order  # a page that is twice in the batch keeps only its later number
            twice = self._words_np.take(ids) != order
            self._words_np[ids] = 0
            self._states_np[ids] = _FREE
            if np.count_nonzero(twice):
                raise self._broken("freed twice", int(ids[twice.argmax()]))
        self._free.extend(pages)

    def _broken(self, what: str, page: int) -> InvariantViolation:
        return InvariantViolation(f"page {page} {what}: {self.story(page)}")

    def story(self, page: int) -> str:
        """What is known of a page, for an error message."""
        return (
            f"state {self.state(page).name}, {self.holders(page)} holders, "
            f"{'in' if self.kept(page) else 'not in'} the index, generation {self.generation(page)}"
        )

    def check_invariants(self) -> None:
        """`InvariantViolation` when states, counts and the free list do not agree.  O(total)."""
        words, free, pages = self._words_np, self._free, self._states[: self.total]
        seen = set(zip(self._states, self._words, strict=True))  # a few pairs, however many pages
        slotted = 0 if self.slots is None else self.slots.check_invariants()
        checks = {
            "in the free list twice": len(free) != len(set(free)),
            "free list and state differ": pages.count(_FREE) != len(free) or any(pages[page] != _FREE for page in free),
            "a page is owned by nobody and not free, or free and owned": any((s == _FREE) != (w == 0) for s, w in seen),
            "a count below zero": any(word < 0 for _, word in seen),
            "an OPEN page in the index, or with more holders than its request and a copy before it": any(
                state == _OPEN and word not in (2, 4) for state, word in seen
            ),
            "a LOADING page without its copy": any(state == _LOADING and word < 2 for state, word in seen),
            "a DRAINING page in the index, or without its copy": any(
                state == _DRAINING and word not in (2, 4) for state, word in seen
            ),
            "idle is miscounted": self.idle != int((words[: self.total] == 1).sum()) + slotted,
        }
        if any(checks.values()):
            raise InvariantViolation(f"ledger: {next(what for what, broken in checks.items() if broken)}")
