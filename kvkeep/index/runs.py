"""The run tree: which chains are cached, and on which pages.

Must not know page bytes or requests.  Callers hold the cache's lock.

Names nominate; a nominated page counts only when its parent is the very page verified before it (the tree's structure
gives that), its token ids are equal, and its media items are equal.  Entries of equal name stand side by side.
"""

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.errors import InvariantViolation
from kvkeep.index.eviction import EvictionOrder
from kvkeep.index.names import Hash64, Identity, PageMedia, hash64, page_name
from kvkeep.index.run import Root, Run
from kvkeep.tiers.ledger import SCALAR_PAGES_MAX, Ledger, as_index


class Match(NamedTuple):
    """What of a chain is cached: the pages, from page 0 on, and the name of the last (of the root when none)."""

    pages: "array[int]"
    name: int


class Place(NamedTuple):
    """A point in the tree: behind the page at depth `depth - 1`, which lies in `run` (a root for depth 0)."""

    run: Run
    depth: int


class Inserted(NamedTuple):
    """What `insert` did: the first `twins` pages were there already, on other page ids; `last` ends the chain."""

    twins: int
    last: int


class RunTree:
    """Runs by root, over the pages of one `Ledger`; the index's ownership of a page changes here only."""

    def __init__(self, ledger: Ledger, order: EvictionOrder, page_nbytes: int, hash_fn: Hash64 = hash64) -> None:
        self.ledger = ledger
        self.order = order
        self.page_nbytes = page_nbytes
        self._hash = hash_fn
        self._roots: dict[bytes, Root] = {}
        self._clock = 0
        self._serial = 0
        self._run_of: npt.NDArray[Any] = np.empty(ledger.total, dtype=object)
        self._depth_of = array("i", bytes(4 * ledger.total))
        self._depth_of_np = np.frombuffer(self._depth_of, dtype=np.int32)

    # ------------------------------------------------------------------ questions

    def match(self, identity: Identity, raw: Any, limit: int, media: PageMedia = None) -> Match:
        """The longest cached prefix of a chain, at most `limit` pages.

        raw: the chain's token ids as bytes from page 0 on, at least `limit` pages of them.
        """
        pages = array("i")
        name = identity.name
        run: Run | None = self._roots.get(identity.record)
        depth = 0
        page_nbytes = self.page_nbytes
        while depth < limit and run is not None and run.children:
            found = self._child(run, name, raw, depth * page_nbytes, depth, limit - depth, media)
            if found is None:
                break
            run, count = found
            depth += count
            if count < len(run.pages):
                pages.extend(run.pages[:count])
                name = run.names[count - 1]
                break
            pages.extend(run.pages)
            name = run.names[-1]
        return Match(pages, name)

    def root(self, identity: Identity) -> Place:
        """The place where the chains of an identity start."""
        root = self._roots.get(identity.record)
        if root is None:
            self._serial += 1
            root = Root(identity.record, identity.name, self._serial)  # joins the tree with its first child
        return Place(root, 0)

    def place(self, page: int) -> Place | None:
        """The place behind a page, or None when the page is not in the tree."""
        run = self._run_of[page]
        return None if run is None else Place(run, self._depth_of[page] + 1)

    def page_at(self, place: Place, depth: int) -> int:
        """The page at `depth` on the path that ends at `place`."""
        run = place.run
        while depth < run.start:
            run = parent_of(run)
        return run.pages[depth - run.start]

    def page_content(self, page: int) -> tuple[bytes, int, PageMedia]:
        """Token bytes, name and media of a page in the tree."""
        run, depth = self._run_of[page], self._depth_of[page]
        at = (depth - run.start) * self.page_nbytes
        return bytes(run.tokens[at : at + self.page_nbytes]), run.names[depth - run.start], run.media

    def __contains__(self, page: int) -> bool:
        return self._run_of[page] is not None

    # ------------------------------------------------------------------ changes

    def insert(
        self, place: Place, names: list[int], raw: Any, pages: "array[int]", media: PageMedia = None
    ) -> Inserted:
        """Adds READY pages behind `place`; first writer wins, so pages whose content is there already stay out.

        names, raw, pages: names, token bytes and ids of one or more consecutive pages.
        """
        run, depth = place
        page_nbytes = self.page_nbytes
        count = len(pages)
        done = 0
        last = -1
        while done < count:
            end = run.start + len(run.pages)
            if depth < end:
                same = self._common(run, depth, raw, done * page_nbytes, count - done, media)
                if same:
                    depth += same
                    done += same
                    last = run.pages[depth - run.start - 1]
                    continue
                run = self._split(run, depth)
            if run.children:
                found = self._child_named(run, names[done], raw, done * page_nbytes, depth, count - done, media)
                if found is not None:
                    run = found[0]
                    continue
            self._append(run, depth, names[done:], raw[done * page_nbytes :], pages[done:], media)
            place = Place(self._run_of[pages[-1]], depth + count - done)
            self.touch(place)
            return Inserted(done, pages[-1])
        self.touch(Place(run, depth))
        return Inserted(count, last)

    def touch(self, place: Place) -> None:
        """Stamps the path that ends at `place` as used now: of equal stamps, the deeper page is the colder one."""
        self._clock += 1
        run: Run | None = place.run
        end = place.depth
        while run is not None and run.pages:
            run.touch(end, self._clock)
            end = run.start
            run = run.parent

    def offer(self, page: int) -> None:
        """The holders of `page` have left: if its run is a leaf, its tail may leave."""
        run = self._run_of[page]
        if run is not None and not run.queued:
            self.order.offer(run)

    def evict(self, count: int) -> "array[int]":
        """Takes up to `count` idle pages out of the tree, coldest first, tail first; the index still owns them.

        Fewer come back only when nothing else is idle, or idle pages have pages of live requests behind them.
        """
        order, idle_tail = self.order, self.ledger.idle_tail
        if count == 1:
            one = self._evict_one()
            if one is not None:
                return one
        out = array("i")
        while count > 0:
            run = order.coldest()
            if run is None:
                break
            pages, ends = run.pages, run.ends
            size = len(pages)
            k = run.start + size - ends[1] if len(ends) > 1 else size
            k = idle_tail(pages, k if k < count else count)
            if not k:
                order.shelve(run)
                continue
            if k < size:
                pages = run.trim(k, self.page_nbytes)
                order.trimmed(run)
            else:
                run.pages = array("i")
                order.trimmed(run)  # first: unlinking may put the parent on offer
                self._unlink(run)
            if out:
                out.extend(pages)
            else:
                out = pages
            count -= k
        self._forget(out)
        return out

    def _evict_one(self) -> "array[int] | None":
        """`evict(1)` where it is simple and most often asked: a decode goes on to its next page."""
        run = self.order.coldest()
        if run is None or len(run.pages) == 1 or not self.ledger.is_idle(run.pages[-1]):
            return None
        page = run.pop(self.page_nbytes)
        self._run_of[page] = None
        self.order.trimmed(run)
        return array("i", (page,))

    def replace(self, old: int, new: int) -> None:
        """The index moves from page `old` to `new`, a READY page of equal content."""
        run, depth = self._run_of[old], self._depth_of[old]
        run.pages[depth - run.start] = new
        self._run_of[old] = None
        self._run_of[new] = run
        self._depth_of[new] = depth
        self.ledger.keep(array("i", (new,)))
        self.ledger.drop(array("i", (old,)))

    def clear(self) -> int:
        """Forgets everything; returns how many pages that freed."""
        cached = np.flatnonzero(self._run_of != None).astype(np.int32)  # noqa: E711 (elementwise)
        for run in self.runs():
            run.pages = array("i")
            run.children = None
        self._roots.clear()
        self._run_of[:] = None
        self.order.clear()
        return self.ledger.drop(array("i", cached.tobytes()))

    # ------------------------------------------------------------------ inside

    def _child(
        self, run: Run, name: int, raw: Any, offset: int, depth: int, count: int, media: PageMedia
    ) -> tuple[Run, int] | None:
        page = raw[offset : offset + self.page_nbytes]
        if media:
            first = page_name(name, page, media.get(depth, ()), self._hash)
        else:
            first = self._hash(page, name)
        return self._child_named(run, first, raw, offset, depth, count, media)

    def _child_named(
        self, run: Run, first: int, raw: Any, offset: int, depth: int, count: int, media: PageMedia
    ) -> tuple[Run, int] | None:
        """The child of `run` that begins with page `raw[offset:]`, called `first`, and how many pages are equal."""
        assert run.children is not None
        child = run.children.get(first)
        while child is not None:
            same = self._common(child, depth, raw, offset, count, media)
            if same:
                return child, same
            child = child.sibling
        return None

    def _common(self, run: Run, depth: int, raw: Any, offset: int, count: int, media: PageMedia) -> int:
        same = run.common(depth - run.start, raw, offset, count, self.page_nbytes)
        if media or run.media:
            theirs, ours = media or {}, run.media or {}
            for d in sorted({*theirs, *ours}):
                if depth <= d < depth + same and theirs.get(d, ()) != ours.get(d, ()):
                    return d - depth
        return same

    def _append(
        self,
        run: Run,
        depth: int,
        names: list[int],
        raw: Any,
        pages: "array[int]",
        media: PageMedia,
    ) -> None:
        """Puts new pages behind the end of `run`: into it when it is a leaf, as a child otherwise."""
        self.ledger.keep(pages)
        if run.children or not run.pages:
            if isinstance(run, Root):
                self._roots[run.record] = run
            run = self._add_child(run, depth, names[0])
        run.tokens += raw
        run.names.extend(names)
        run.pages.extend(pages)
        end = depth + len(pages)
        if media:
            mine = {d: media[d] for d in media if depth <= d < end}
            if mine:
                run.media = {**(run.media or {}), **mine}
        run.ends.insert(0, end)
        run.stamps.insert(0, 0)
        if len(pages) <= SCALAR_PAGES_MAX:
            for d, p in enumerate(pages, depth):
                self._run_of[p] = run
                self._depth_of[p] = d
        else:
            ids = as_index(pages)
            self._run_of[ids] = run
            self._depth_of_np[ids] = np.arange(depth, end, dtype=np.int32)

    def _add_child(self, parent: Run, depth: int, key: int) -> Run:
        child = self._new_run(parent, depth, key)
        if parent.children is None:
            parent.children = {}
        child.sibling = parent.children.get(key)
        parent.children[key] = child
        return child

    def _new_run(self, parent: Run, start: int, key: int) -> Run:
        self._serial += 1
        return Run(parent, start, key, self._serial)

    def _split(self, run: Run, depth: int) -> Run:
        """Cuts `run` at `depth`, if that lies inside it; returns the run that ends there."""
        if depth == run.start:
            return parent_of(run)
        head = self._new_run(parent_of(run), run.start, run.key)
        self._replace_child(run, head)
        run.split_head(depth, head, self.page_nbytes)
        head.children = {run.key: run}
        run.parent = head
        run.sibling = None
        self._run_of[as_index(head.pages)] = head
        return head

    def _replace_child(self, run: Run, new: Run | None) -> None:
        """Puts `new`, or the sibling behind it, in `run`'s place among its parent's children."""
        parent = parent_of(run)
        children = parent.children
        assert children is not None
        if new is not None:
            new.sibling = run.sibling
        after = new if new is not None else run.sibling
        at = children[run.key]
        if at is run:
            if after is None:
                del children[run.key]
            else:
                children[run.key] = after
            return
        while at.sibling is not run:
            at = at.sibling  # type: ignore[assignment]  # `run` is in its bucket
        at.sibling = after

    def _unlink(self, run: Run) -> None:
        """Takes an empty leaf run out of the tree."""
        parent = parent_of(run)
        self._replace_child(run, None)
        if parent.children:
            return
        parent.children = None
        if isinstance(parent, Root):
            del self._roots[parent.record]
        else:
            self.order.offer(parent)

    def _forget(self, pages: "array[int]") -> None:
        if len(pages) <= SCALAR_PAGES_MAX:
            for p in pages:
                self._run_of[p] = None
        else:
            self._run_of[as_index(pages)] = None

    def runs(self) -> Iterator[Run]:
        """Every run of the tree, parents first; roots are not runs."""
        todo: list[Run] = list(self._roots.values())
        while todo:
            run = todo.pop()
            if run.pages:
                yield run
            for child in list((run.children or {}).values()):
                at: Run | None = child
                while at is not None:
                    todo.append(at)
                    at = at.sibling

    # ------------------------------------------------------------------ checks

    def check_invariants(self) -> None:
        """Raises `InvariantViolation` when the tree and the ledger do not agree.  O(pages)."""
        seen = 0
        for run in self.runs():
            seen += len(run.pages)
            self._check_run(run)
        kept = sum(self.ledger.kept(p) for p in range(self.ledger.total))
        mapped = sum(r is not None for r in self._run_of)
        if not seen == kept == mapped:
            raise InvariantViolation(f"tree: {seen} pages in runs, {mapped} mapped, {kept} kept by the ledger")
        if any(not r.children for r in self._roots.values()):
            raise InvariantViolation("tree: a root without children was not dropped")

    def _check_run(self, run: Run) -> None:
        n, parent = len(run.pages), parent_of(run)
        if not len(run.names) == n == len(run.tokens) // self.page_nbytes or run.start != parent.end:
            raise InvariantViolation(f"tree: run {run.serial} has arrays of different lengths, or a hole before it")
        if run.key != run.names[0]:
            raise InvariantViolation(f"tree: run {run.serial} hangs under another name than its first page's")
        falling = all(a > b for a, b in zip(run.ends, run.ends[1:], strict=False))
        rising = all(a < b for a, b in zip(run.stamps, run.stamps[1:], strict=False))
        if run.ends[0] != run.end or run.ends[-1] <= run.start or not falling or not rising:
            raise InvariantViolation(f"tree: run {run.serial} has recency {run.ends} {run.stamps}")
        if parent.pages and parent.stamps[0] < run.stamps[-1]:
            raise InvariantViolation(f"tree: run {run.serial} was used after the page before it")
        for i, page in enumerate(run.pages):
            if self._run_of[page] is not run or self._depth_of[page] != run.start + i:
                raise InvariantViolation(f"tree: page {page} is mapped to another place than run {run.serial}")
        if not run.children and not run.queued and self.ledger.is_idle(run.pages[-1]):
            raise InvariantViolation(f"tree: leaf run {run.serial} has an idle tail and is not on offer")


def parent_of(run: Run) -> Run:
    """The run (or root) before a run that is not a root."""
    assert run.parent is not None
    return run.parent
