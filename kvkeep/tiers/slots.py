"""Slots: parts of pages, for what does not fill one.

Must not know owners or states: to the ledger a slot is one more page id, behind those of the pages.

    page of the pool   |  slot  |   slot   |..free..|  slot  |     granules: 128 of one size, or fewer in small pages

A slot is a stretch of granules of one page.  There are no size classes: with classes (a page cut into equal slots) 7 to
25 % of such pages stayed empty under churn, with granules 2 to 13 % (outputs of 20 KB to 20 MB, or to 1 MB, in pages of
2.8 MiB, from no KV pages to mostly KV pages).
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvkeep.errors import InvariantViolation

GRANULES_MAX = 128
#: Granules are multiples of this many bytes, so every slot is aligned for every dtype.
ALIGN_NBYTES = 64


class SlotPlace(NamedTuple):
    """Where a slot is: `nbytes` bytes from `offset` on, in the order of a page's bytes."""

    page: int
    offset: int
    nbytes: int


class SlottedPage:
    """A page that holds slots.   free: a bit a granule.   live, idle: slots, and those that only the index owns."""

    __slots__ = ("free", "idle", "live")

    def __init__(self, granules: int) -> None:
        self.free = (1 << granules) - 1
        self.live = self.idle = 0


class Slots:
    """The slots of one pool.

    page_nbytes: bytes of a page.   first: the least slot id: how many pages there are.   align_nbytes: of a granule.
    """

    def __init__(self, page_nbytes: int, first: int, *, align_nbytes: int = ALIGN_NBYTES) -> None:
        step = GRANULES_MAX * align_nbytes
        self.page_nbytes = page_nbytes
        self.granule_nbytes = -(-page_nbytes // step) * align_nbytes
        self.granules = page_nbytes // self.granule_nbytes
        self.pages: dict[int, SlottedPage] = {}
        self._first = first
        # By slot id, from `first` on; of a free one nothing holds.
        self._page_of = array("i")
        self._at = array("h")
        self._nbytes = array("q")
        self._is_idle = bytearray()
        self._spare: list[int] = []  # ids that name no slot now
        self._by_longest: list[dict[int, None]] = [{} for _ in range(self.granules + 1)]

    def cut(self, nbytes: int) -> tuple[int, int]:
        """How `nbytes` bytes are kept: in so many whole pages, and a slot for so many bytes (0: none)."""
        pages, rest = divmod(nbytes, self.page_nbytes)
        if rest and self._size(rest) >= self.granules:
            return pages + 1, 0
        return pages, rest

    def has_room(self, nbytes: int) -> int | None:
        """The page with slots whose longest stretch of free granules is the shortest that holds `nbytes`, if any is."""
        for pages in self._by_longest[self._size(nbytes) :]:
            if pages:
                return next(iter(pages))
        return None

    def pages_for(self, nbytes: int, *, idle: bool = False) -> int:
        """How many free pages it takes to open a slot of `nbytes` bytes (0: none is needed): 0 or 1.

        idle: how many free or idle pages are fewer then: a page with idle slots only that has room is one.
        """
        page = self.has_room(nbytes) if nbytes else None
        return int(bool(nbytes) and (page is None or (idle and self.all_idle(page))))

    def add_page(self, page: int) -> None:
        """`page` is for slots from now on."""
        self.pages[page] = SlottedPage(self.granules)
        self._by_longest[self.granules][page] = None

    def open(self, page: int, nbytes: int) -> int:
        """A new slot in `page`, which has room for it: the shortest stretch of free granules that holds it."""
        size = self._size(nbytes)
        slotted = self.pages[page]
        at = min((length, at) for at, length in _stretches(slotted.free) if length >= size)[1]
        self._set(page, slotted, slotted.free & ~(((1 << size) - 1) << at))
        slotted.live += 1
        slot = self._spare.pop() if self._spare else self._new_id()
        i = slot - self._first
        self._page_of[i], self._at[i], self._nbytes[i], self._is_idle[i] = page, at, nbytes, False
        return slot

    def close(self, slot: int) -> tuple[int, int | None]:
        """The slot is no more.  Returns what `note` does, and its page if that was the last slot there."""
        more_idle, i = self.note(slot, False), slot - self._first
        page = self._page_of[i]
        slotted = self.pages[page]
        slotted.live -= 1
        self._set(page, slotted, slotted.free | ((1 << self._size(self._nbytes[i])) - 1) << self._at[i])
        self._spare.append(slot)
        self._page_of[i] = -1
        if slotted.live:
            return more_idle + (slotted.idle == slotted.live), None
        del self.pages[page], self._by_longest[self.granules][page]
        return more_idle, page

    def note(self, slot: int, idle: bool) -> int:
        """Notes whether the index alone owns the slot.  How many idle pages there are more, less idle slots more."""
        i = slot - self._first
        if self._is_idle[i] == idle:
            return 0
        slotted = self.pages[self._page_of[i]]
        was = slotted.idle == slotted.live
        self._is_idle[i] = idle
        slotted.idle += 1 if idle else -1
        return (slotted.idle == slotted.live) - was - (1 if idle else -1)

    def idle_pages_of(self, slots: Iterable[int]) -> int:
        """How many pages with these slots, one at most in each, have idle slots only."""
        return sum(self.all_idle(self.page_of(slot)) for slot in slots)

    def all_idle(self, page: int) -> bool:
        """Whether the index alone owns every slot of a page."""
        slotted = self.pages[page]
        return slotted.idle == slotted.live

    def page_of(self, slot: int) -> int:
        """The page that a slot is in."""
        return self._page_of[slot - self._first]

    def place(self, slot: int) -> SlotPlace:
        """Where a slot is."""
        i = slot - self._first
        return SlotPlace(self._page_of[i], self._at[i] * self.granule_nbytes, self._nbytes[i])

    @property
    def ids(self) -> int:
        """How many slot ids there are, in use or not."""
        return len(self._page_of)

    def check_invariants(self) -> int:
        """How many pages have idle slots only.

        Raises `InvariantViolation` when slots overlap, or the counts of a page are not those of its slots.
        """
        taken, live, idle = dict.fromkeys(self.pages, 0), dict.fromkeys(self.pages, 0), dict.fromkeys(self.pages, 0)
        for slot in self._live():
            page, i = self.page_of(slot), slot - self._first
            bits = ((1 << self._size(self._nbytes[i])) - 1) << self._at[i]
            if page not in taken or taken[page] & bits or bits >> self.granules:
                raise InvariantViolation(f"slot {slot} overlaps another, or leaves its page: {self.place(slot)}")
            taken[page] |= bits
            live[page] += 1
            idle[page] += self._is_idle[i]
        for page, slotted in self.pages.items():
            there = (slotted.free, slotted.live, slotted.idle)
            if there != ((1 << self.granules) - 1 - taken[page], live[page], idle[page]) or not live[page]:
                raise InvariantViolation(f"page {page} has {live[page]} slots, {idle[page]} idle, and notes {there}")
            if page not in self._by_longest[_longest(slotted.free)]:
                raise InvariantViolation(f"page {page} is not where its longest free stretch belongs")
        return sum(map(self.all_idle, self.pages))

    # ------------------------------------------------------------------ inside

    def _size(self, nbytes: int) -> int:
        return -(-nbytes // self.granule_nbytes)

    def _live(self) -> Iterator[int]:
        return (self._first + i for i, page in enumerate(self._page_of) if page >= 0)

    def _new_id(self) -> int:
        self._page_of.append(-1)
        self._at.append(0)
        self._nbytes.append(0)
        self._is_idle.append(False)
        return self._first + len(self._page_of) - 1

    def _set(self, page: int, slotted: SlottedPage, free: int) -> None:
        del self._by_longest[_longest(slotted.free)][page]
        slotted.free = free
        self._by_longest[_longest(free)][page] = None


def _longest(free: int) -> int:
    """The length of the longest stretch of ones."""
    return max(map(len, f"{free:b}".split("0")))


def _stretches(free: int) -> Iterator[tuple[int, int]]:
    """Where each stretch of ones begins, from bit 0 on, and its length."""
    at = 0
    for ones in f"{free:b}"[::-1].split("0"):
        if ones:
            yield at, len(ones)
        at += len(ones) + 1
