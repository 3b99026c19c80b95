"""Which child of a run goes on with given pages: names nominate, comparison decides.

Must not know tiers or who owns a page.
"""

from typing import Any

from kvkeep.index.media import ByPage, MediaItem, PageMedia
from kvkeep.index.names import Hash64, page_name
from kvkeep.index.run import Run


class Compare:
    """Compares runs with token bytes and media items.   hash_fn: what names are made with."""

    def __init__(self, page_nbytes: int, hash_fn: Hash64) -> None:
        self._page_nbytes = page_nbytes
        self._hash = hash_fn

    def child(
        self, run: Run, name: int, raw: Any, offset: int, depth: int, count: int, media: PageMedia
    ) -> tuple[Run, int] | None:
        """`child_named` behind a page called `name`; the first page is called by its content."""
        page = raw[offset : offset + self._page_nbytes]
        if media:
            first = page_name(name, page, media.get(depth, ()), self._hash)
        else:
            first = self._hash(page, name)
        return self.child_named(run, first, raw, offset, depth, count, media)

    def child_named(
        self, run: Run, first: int, raw: Any, offset: int, depth: int, count: int, media: PageMedia
    ) -> tuple[Run, int] | None:
        """The child of `run` that begins with page `raw[offset:]`, called `first`, and how many pages are equal.

        raw, offset: token bytes of `count` pages.   depth: the index of the first in its chain.
        """
        assert run.children is not None
        child = run.children.get(first)
        while child is not None:
            same = self.common(child, depth, raw, offset, count, media)
            if same:
                return child, same
            child = child.sibling
        return None

    def common(self, run: Run, depth: int, raw: Any, offset: int, count: int, media: PageMedia) -> int:
        """How many of `count` pages `raw[offset:]`, the first at `depth`, equal `run`'s in tokens and media items."""
        same = run.common(depth - run.start, raw, offset, count, self._page_nbytes)
        if media or run.media:
            return self._common_media(media or {}, run.media or {}, depth, same)
        return same

    @staticmethod
    def _common_media(theirs: ByPage, ours: ByPage, depth: int, count: int) -> int:
        """How many of `count` pages from `depth` on have equal items."""
        # The last that were compared, and are equal: all pages inside a long item have the same tuple.
        one: tuple[MediaItem, ...] | None = None
        other: tuple[MediaItem, ...] | None = None
        for d in sorted({*theirs, *ours}):
            if depth <= d < depth + count:
                one_before, other_before = one, other
                one, other = theirs.get(d, ()), ours.get(d, ())
                if (one is not one_before or other is not other_before) and one != other:
                    return d - depth
        return count
