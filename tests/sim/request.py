"""A request as the simulator's engine runs it: its tokens, and what the KV of each of its positions must be.

Must not know the cache beyond the lease that it is given.

The KV of a position is a number that depends on everything before it: the weights and the salt, all tokens, the media
items, and nothing else.  Inside an item that looks ahead it depends on the whole item; where an item has no digest, or
was cut, on the request as well, so that nobody else can have the same.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvkeep.index.media import MediaItem
from kvkeep.lease import Lease
from kvkeep.traffic import Suspended
from tests.sim.device import PAGE_SIZE, Cell, page_of


class Item(NamedTuple):
    """A media item.   digest: a small number; None for an item without identity."""

    offset: int
    length: int
    digest: int | None
    causal: bool

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.offset + self.length

    def media(self) -> MediaItem:
        """As the cache takes it."""
        digest = None if self.digest is None else bytes([self.digest]) * 16
        return MediaItem(self.offset, self.length, digest, self.causal)


def root_kv(weights: int, salt: int) -> int:
    """What stands before the first position."""
    return hash((weights, salt, 17)) & 0x7FFFFFFF


def next_kv(before: int, token: int, weights: int, inside: tuple[int, ...] = ()) -> int:
    """The KV of a position behind one of KV `before`.  No KV looks like poison."""
    return hash((before, token, weights, inside)) & 0x7FFFFFFF


class Request:
    """`handle` names it in operations; after a suspension it goes on under the same one.

    kvs: KV of the positions that have some, in the cache or written by now.   pages: the full pages of it, as bytes.
    holes: ranges of positions whose KV is gone after a resume.
    A window that has slid is a part of the KV of what is computed behind it.
    """

    def __init__(self, handle: int, weights: int, salt: int, tokens: Sequence[int], items: Iterable[Item]) -> None:
        self.handle = handle
        self.salt = salt
        self.root = root_kv(weights, salt)
        self.tokens = list(tokens)
        self.items = list(items)
        self.kvs: list[int] = []
        self.pages: list[bytes] = []
        self.holes: list[tuple[int, int]] = []
        self.lease: Lease | None = None
        self.ticket: Suspended | None = None

    @property
    def readable(self) -> bool:
        """Whether a forward may be launched over it."""
        return self.lease is not None and self.lease.live and not self.lease.read_in_progress

    def know(self, length: int, weights: int) -> list[int]:
        """The KV of the first `length` positions, those that it has not got computed with `weights`."""
        while len(self.kvs) < length:
            self.kvs.append(self._kv(len(self.kvs), weights))
            if not len(self.kvs) % PAGE_SIZE:
                self.pages.append(page_of(self.kvs[-PAGE_SIZE:]))
        return self.kvs

    def forget(self, length: int) -> None:
        """The KV from `length` on is not known any more."""
        del self.kvs[length:]
        del self.pages[length // PAGE_SIZE :]

    def cut(self, length: int) -> None:
        """Tokens and all from `length` on are gone; what is left of an item is this request's only."""
        del self.tokens[length:]
        self.forget(length)
        left = [item for item in self.items if item.offset < length]
        self.items = [
            item if item.end <= length else Item(item.offset, length - item.offset, None, True) for item in left
        ]

    def compute(self, first: int, last: int, weights: int) -> list[Cell]:
        """What a forward over positions `first` to `last` writes; the KV it had of them is computed again."""
        assert self.lease is not None
        if first < len(self.kvs):
            for position in range(first, last):
                self.kvs[position] = self._kv(position, weights)
            for number in range(first // PAGE_SIZE, min(-(-last // PAGE_SIZE), len(self.pages))):
                self.pages[number] = page_of(self.kvs[number * PAGE_SIZE : (number + 1) * PAGE_SIZE])
        else:
            self.know(last, weights)
        pages = self.lease.pages
        at = self.lease.index_of
        return [Cell(pages[at(p // PAGE_SIZE)], p % PAGE_SIZE, self.kvs[p]) for p in range(first, last)]

    def inside_unit(self, position: int) -> bool:
        """Whether an item that looks ahead would be split there."""
        return any(not item.causal and item.offset < position < item.end for item in self.items)

    def in_hole(self, position: int) -> bool:
        """Whether the position's KV is gone."""
        return any(first <= position < last for first, last in self.holes)

    def _kv(self, position: int, weights: int) -> int:
        before = self.kvs[position - 1] if position else self.root
        inside = self._inside(position) if self.items else ()
        if self.lease is not None and self.lease.prefix_epoch:
            inside = (-1, self.lease.prefix_epoch, *inside)
        return next_kv(before, self.tokens[position], weights, inside)

    def forked(self, handle: int, lease: Lease) -> "Request":
        """A request with the same content, which goes on by itself."""
        fork = Request(handle, 0, self.salt, self.tokens, self.items)
        fork.root, fork.kvs, fork.pages, fork.lease = self.root, self.kvs[:], self.pages[:], lease
        return fork

    def _inside(self, position: int) -> tuple[int, ...]:
        for item in self.items:
            if item.offset <= position < item.end:
                which = item.digest if item.digest is not None else 1000 + self.handle
                ahead = () if item.causal else self.tokens[item.offset : item.end]
                return (which, position - item.offset, *ahead)
        return ()
