"""A run: a stretch of consecutive pages of one chain, stored together.

Must not know the tree it hangs in beyond its neighbours, nor who owns its pages.
"""

from array import array
from typing import Any

from kvkeep.index.media import MediaItem

#: In `Run.host`: no copy in host memory.
NOWHERE = -1


class Run:
    """Consecutive pages `start` to `end` of a chain, in contiguous arrays that grow in place.

        entries      start |------------------------------| end      tokens, names (and media)
        GPU copies         |------------------| gpu_end              pages: the first entries, without a hole
        host copies              |--|     |-------------|            host: anywhere, and behind gpu_end everywhere

    tokens: token ids of all entries, int32 bytes.   names: one an entry.
    pages: GPU page ids of the first entries.   host: host page ids of all entries, or NOWHERE; None when all are.
    media: media items by page index in the chain, for the pages that have any; None when none has.
    key: the name of the first page as the parent's children know it; `sibling` is the next run under the same name.
    children: runs that go on behind the last entry, by the name of their first page; None for none.
    gpu_children: how many of them have GPU copies (only where this run has them all).
    ends, stamps: recency.  `stamps[i]` is when pages up to `ends[i]` (and from `ends[i + 1]`, or `start`) were last
        used; tail first, so both fall from left to right in `ends` and rise in `stamps`.
    serial: a number of its own.   queued: bits, which tiers' eviction orders have an entry for it.
    whole: it leaves and arrives as a whole, never a part of it (`output.py`).
    A root is a run without entries at depth 0; a run that lost all its entries is dead and hangs nowhere.
    """

    __slots__ = (
        "children", "ends", "gpu_children", "host", "key", "media", "names", "pages", "parent", "queued", "serial",
        "sibling", "stamps", "start", "tokens",
    )  # fmt: skip

    whole = False

    def __init__(self, parent: "Run | None", start: int, key: int, serial: int) -> None:
        self.parent = parent
        self.start = start
        self.key = key
        self.serial = serial
        self.sibling: Run | None = None
        self.children: dict[int, Run] | None = None
        self.gpu_children = 0
        self.tokens = bytearray()
        self.names = array("Q")
        self.pages = array("i")
        self.host: array[int] | None = None
        self.media: dict[int, tuple[MediaItem, ...]] | None = None
        self.ends: list[int] = []
        self.stamps: list[int] = []
        self.queued = 0

    @property
    def end(self) -> int:
        """The depth behind the last entry."""
        return self.start + len(self.names)

    @property
    def gpu_end(self) -> int:
        """The depth behind the last GPU copy."""
        return self.start + len(self.pages)

    def common(self, at: int, raw: Any, offset: int, count: int, page_nbytes: int) -> int:
        """How many of `count` pages of token bytes `raw[offset:]` equal this run's entries from position `at` on."""
        count = min(count, len(self.names) - at)
        tokens = self.tokens
        at *= page_nbytes
        if tokens.startswith(raw[offset : offset + count * page_nbytes], at):
            return count
        low, high = 0, count  # `low` pages are equal, `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            a, b = low * page_nbytes, middle * page_nbytes
            if tokens.startswith(raw[offset + a : offset + b], at + a):
                low = middle
            else:
                high = middle
        return low

    def touch(self, end: int, stamp: int) -> None:
        """Pages up to depth `end` were used at `stamp`, which is later than every stamp before."""
        ends, stamps = self.ends, self.stamps
        while ends and ends[-1] <= end:
            ends.pop()
            stamps.pop()
        ends.append(end)
        stamps.append(stamp)

    def stretch(self, depth: int) -> tuple[int, int]:
        """When the page at `depth` was last used, and the depth where the pages used together with it begin."""
        ends = self.ends
        i = len(ends) - 1
        if i == 0 or ends[1] <= depth:
            i = 0
        else:
            while ends[i] <= depth:
                i -= 1
        return self.stamps[i], ends[i + 1] if i + 1 < len(ends) else self.start

    def clean_tail(self, count: int) -> int:
        """How many of the last `count` GPU copies, from the end, have a host copy."""
        if self.host is None:
            return 0
        last, k = len(self.pages), 0
        while k < count and self.host[last - 1 - k] != NOWHERE:
            k += 1
        return k

    def dirty_tail(self, last: int, count: int) -> int:
        """How many of the `count` GPU copies before position `last`, from the end, have no host copy."""
        if self.host is None:
            return count
        k = 0
        while k < count and self.host[last - 1 - k] == NOWHERE:
            k += 1
        return k

    def extend(self, raw: Any, names: list[int], pages: "array[int]") -> None:
        """Adds entries with GPU copies behind the last entry; `touch` must follow, to stamp them."""
        self.tokens += raw
        self.names.extend(names)
        self.pages.extend(pages)
        if self.host is not None:
            self.host.extend([NOWHERE] * len(names))
        self.ends.insert(0, self.end)
        self.stamps.insert(0, 0)

    def trim(self, at: int, page_nbytes: int) -> None:
        """Removes the entries from position `at` on, which is above 0."""
        del self.pages[at:]
        del self.names[at:]
        self._shorten(at, page_nbytes)

    def pop(self, page_nbytes: int) -> int:
        """Removes the last of several entries, which has a GPU copy and no other; returns the page."""
        page = self.pages.pop()
        self.names.pop()
        self._shorten(len(self.names), page_nbytes)
        return page

    def _shorten(self, count: int, page_nbytes: int) -> None:
        """Cuts everything but names and GPU copies to the first `count` entries."""
        tokens, size = self.tokens, count * page_nbytes
        del tokens[size:]
        if tokens.__alloc__() > 4096 + (size * 5 >> 2):
            self.tokens = bytearray(tokens)  # gives the slack back
        end = self.start + count
        ends, stamps = self.ends, self.stamps
        while len(ends) > 1 and ends[1] >= end:
            del ends[0], stamps[0]
        ends[0] = end
        if self.host is not None:
            del self.host[count:]
        if self.media:
            self.media = {d: m for d, m in self.media.items() if d < end} or None

    def split_head(self, depth: int, head: "Run", page_nbytes: int) -> None:
        """Moves the entries before `depth` into the empty run `head`; this run keeps the tail."""
        at = depth - self.start
        head.tokens, self.tokens = self.tokens[: at * page_nbytes], self.tokens[at * page_nbytes :]
        head.names, self.names = self.names[:at], self.names[at:]
        head.pages, self.pages = self.pages[:at], self.pages[at:]
        if self.host is not None:
            head.host, self.host = self.host[:at], self.host[at:]
        ends, stamps = self.ends, self.stamps
        j = len(ends) - 1
        while ends[j] < depth:
            j -= 1
        head.ends, head.stamps = [depth, *ends[j + 1 :]], stamps[j:]
        keep = j + (ends[j] > depth)
        self.ends, self.stamps = ends[:keep], stamps[:keep]
        if self.media:
            head.media = {d: m for d, m in self.media.items() if d < depth} or None
            self.media = {d: m for d, m in self.media.items() if d >= depth} or None
        self.start = depth
        self.key = self.names[0]


class Root(Run):
    """Where the chains of one identity start: no entries, depth 0, and the identity's record in full."""

    __slots__ = ("record",)

    def __init__(self, record: bytes, name: int, serial: int) -> None:
        super().__init__(None, 0, name, serial)
        self.record = record
