"""A naive index: what is cached, as a dict by exact prefix, with exact least-recently-used order.

Must not use the index that it is compared with: no hashes, no runs, no page ids of its own.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

#: One page of a chain: its token ids, and the media items that touch it.
PageContent = tuple[tuple[int, ...], tuple[Any, ...]]

#: Where a chain starts (the root's record), and its pages from the first one on.
Prefix = tuple[Hashable, tuple[PageContent, ...]]


def narrow_hash(data: Any, seed: int) -> int:
    """A name of 8 bits: one in 256 pairs collides."""
    return xxhash.xxh3_64_intdigest(data, seed) & 0xFF


def constant_hash(data: Any, seed: int) -> int:
    """The worst hash there is."""
    return 7


@dataclass
class Entry:
    """A cached page: whatever stands for the page, and when it was last used."""

    page: Any
    stamp: int = 0


class NaiveIndex:
    """Cached pages by the exact prefix that they end."""

    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.clock = 0

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self.entries)

    def prefixes(self, root: Hashable, chain: tuple[PageContent, ...]) -> list[Prefix]:
        """The prefixes of a chain, shortest first."""
        return [(root, chain[: depth + 1]) for depth in range(len(chain))]

    def match(self, root: Hashable, chain: tuple[PageContent, ...], limit: int) -> list[Any]:
        """The pages of the longest cached prefix, at most `limit` of them."""
        pages: list[Any] = []
        for prefix in self.prefixes(root, chain)[:limit]:
            if prefix not in self.entries:
                break
            pages.append(self.entries[prefix].page)
        return pages

    def insert(self, root: Hashable, chain: tuple[PageContent, ...], pages: list[Any]) -> list[int]:
        """Adds what is missing of a chain and uses all of it; returns the depths that were added."""
        added = []
        for depth, prefix in enumerate(self.prefixes(root, chain)):
            if prefix not in self.entries:
                self.entries[prefix] = Entry(pages[depth])
                added.append(depth)
        self.touch(root, chain)
        return added

    def touch(self, root: Hashable, chain: tuple[PageContent, ...]) -> None:
        """Every page of a cached chain is used now."""
        self.clock += 1
        for prefix in self.prefixes(root, chain):
            self.entries[prefix].stamp = self.clock

    def let_leave(self, pages: list[Any], idle: Callable[[Any], bool]) -> None:
        """Removes `pages`, chosen by an order of its own: each must be idle, and nothing cached go on from it."""
        where = {entry.page: prefix for prefix, entry in self.entries.items()}
        for root, chain in sorted((where[page] for page in pages), key=lambda prefix: -len(prefix[1])):
            assert idle(self.entries.pop((root, chain)).page), f"a page in use left: {chain}"
            assert (root, chain) not in {(other, longer[:-1]) for other, longer in self.entries}, "a hole was left"

    def evict(self, count: int, idle: Callable[[Any], bool]) -> list[Any]:
        """Removes up to `count` idle pages that nothing cached goes on from: coldest first, deeper first."""
        gone: list[Any] = []
        while len(gone) < count:
            parents = {(root, chain[:-1]) for root, chain in self.entries}
            fit = [p for p in self.entries if p not in parents and idle(self.entries[p].page)]
            if not fit:
                break
            coldest = min(fit, key=lambda p: (self.entries[p].stamp, -len(p[1])))
            gone.append(self.entries.pop(coldest).page)
        return gone
