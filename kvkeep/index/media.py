"""Media items: spans of placeholder tokens that stand for images, clips and other non-text inputs.

Must not know names, pages' ids or where a digest comes from.

    positions   ......|#########|......|#####|......      # placeholders of an item; causal=False: one unit
    pages       |       |       |       |       |         every page that an item touches has the item, in full
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvkeep.errors import BadInput

DIGEST_NBYTES_MIN = 16
DIGEST_NBYTES_MAX = 64


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer, of Python or numpy."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A span of placeholder tokens that stands for an image, a clip or another non-text input.

    offset, length: token positions, from the start of the sequence.
    digest: cryptographic digest of the raw bytes and the preprocessing parameters (`kvkeep.media.digest`), 16 to 64
        bytes; None when the content has no identity: then its pages, and all that follow, are neither matched nor
        stored.
    causal: False where attention inside the item looks ahead.  Then it is one unit: neither a match nor a prefill chunk
        (`Lease.chunk_end`) ends inside it.
    """

    offset: int
    length: int
    digest: bytes | None
    causal: bool = True

    def __post_init__(self) -> None:
        if not is_integer(self.offset) or not is_integer(self.length) or self.offset < 0 or self.length < 1:
            raise BadInput(
                f"media item at {self.offset!r} of length {self.length!r}: offset must be an integer of 0 or more, "
                "length one of 1 or more"
            )
        if self.digest is not None and not isinstance(self.digest, bytes):
            raise BadInput(f"media digest is {type(self.digest).__name__}: it must be bytes, or None")
        if self.digest is not None and not DIGEST_NBYTES_MIN <= len(self.digest) <= DIGEST_NBYTES_MAX:
            raise BadInput(
                f"media digest of {len(self.digest)} bytes: it must be {DIGEST_NBYTES_MIN} bytes or more, since it is "
                f"not compared against the content, and at most {DIGEST_NBYTES_MAX}"
            )
        if not isinstance(self.causal, bool):
            raise BadInput(f"causal is {self.causal!r}: it must be True or False")
        for name in ("offset", "length"):  # numpy's integers overflow where they are added
            object.__setattr__(self, name, operator.index(getattr(self, name)))


#: Media items by the index of each page they touch.
ByPage = Mapping[int, tuple[MediaItem, ...]]

#: The same; None when there are none.
PageMedia = ByPage | None

#: Items whose attention is not causal, as (first position, position behind the last), in order.
Units = tuple[tuple[int, int], ...]


class Placed(NamedTuple):
    """Media items of a sequence.

    by_page: those with a name, by page.   storable: leading pages that can be named (None: all of them).
    units: the items that nothing may end in, named or not.
    """

    by_page: PageMedia
    storable: int | None
    units: Units


NO_MEDIA = Placed(None, None, ())


def place_media(items: Sequence[MediaItem], page_size: int, length: int) -> Placed:
    """Media items on pages.

    `items` are in order of offset, do not overlap and lie within `length` positions; `BadInput` otherwise.
    """
    by_page: dict[int, tuple[MediaItem, ...]] = {}
    storable: int | None = None
    units: list[tuple[int, int]] = []
    end = 0
    for item in items:
        if not isinstance(item, MediaItem):
            raise BadInput(f"media has {type(item).__name__}: it must be a sequence of `MediaItem`")
        if item.offset < end or item.offset + item.length > length:
            raise BadInput(
                f"media item at {item.offset} of length {item.length}: items must be in order, apart, and within "
                f"the {length} tokens"
            )
        end = item.offset + item.length
        if not item.causal:
            units.append((item.offset, end))
        if item.digest is None and storable is None:
            storable = item.offset // page_size
        if storable is None:
            alone = (item,)
            for page in range(item.offset // page_size, (end - 1) // page_size + 1):
                by_page[page] = (*by_page[page], item) if page in by_page else alone
    return Placed(by_page or None, storable, tuple(units))


def media_before(media: Placed, length: int, page_size: int) -> Placed:
    """Media items of a sequence cut to `length` tokens; what is left of an item has no identity."""
    left = {page: tuple(m for m in items if m.offset < length) for page, items in (media.by_page or {}).items()}
    known = [m.offset // page_size for items in left.values() for m in items if m.offset + m.length > length]
    if media.storable is not None:
        known.append(media.storable)
    units = tuple(unit for unit in media.units if unit[1] <= length)
    return Placed({page: items for page, items in left.items() if items} or None, min(known, default=None), units)


def cut_before_split_item(pages: int, page_size: int, media: PageMedia) -> int:
    """`pages`, less as many as it takes not to end inside an item whose attention is not causal."""
    while media and pages:
        end = pages * page_size
        split = [m for m in media.get(pages - 1, ()) if not m.causal and m.offset < end < m.offset + m.length]
        if not split:
            break
        pages = split[0].offset // page_size
    return pages


def chunk_end(units: Units, kv_len: int, want: int) -> int:
    """Where a prefill chunk that begins at `kv_len` ends: at `want`, or before the unit that this would split.

    Behind that unit where the chunk begins with it.  Chunks that want the same places end at the same places, wherever
    a prefix hit lets them begin.
    """
    for first, end in units:
        if first < want < end:
            return first if kv_len < first else end
    return want


def check_ends(units: Units, what: str, position: int) -> None:
    """`BadInput` when `position` lies inside a unit."""
    for first, end in units:
        if first < position < end:
            raise BadInput(
                f"{what} {position} ends inside the media item at {first} of length {end - first}, whose attention is "
                f"not causal: it must be {first} or less, or {end} or more"
            )


def whole_holes(holes: list[tuple[int, int]], units: Units) -> list[tuple[int, int]]:
    """Ranges of positions to be computed again, in order: a unit of which one is gone is computed as one."""
    out: list[tuple[int, int]] = []
    for first, end in holes:
        touched = [unit for unit in units if unit[0] < end and first < unit[1]]
        first = min([first, *(unit[0] for unit in touched)])
        end = max([end, *(unit[1] for unit in touched)])
        if out and first < out[-1][1]:
            first = min(out[-1][0], first)
            end = max(out.pop()[1], end)
        out.append((first, end))
    return out
