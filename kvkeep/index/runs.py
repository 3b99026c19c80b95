"""The run tree: which chains are cached, and on which pages.

Must not know page bytes or requests.  Callers hold the cache's lock.

Names nominate; a nominated page counts only when its parent is the very page verified before it (the tree's structure
gives that), its token ids are equal, and its media items are equal.  Entries of equal name stand side by side.

The entries with a GPU copy are prefix-closed, and so are the entries with a copy in either tier: an entry leaves with
its last copy, and everything behind it leaves too.
"""

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvkeep.index.compare import Compare
from kvkeep.index.doubles import Doubles
from kvkeep.index.eviction import EvictionOrder
from kvkeep.index.family import add_child, below, parent_of, replace_child
from kvkeep.index.media import PageMedia
from kvkeep.index.names import Hash64, Identity, hash64
from kvkeep.index.run import NOWHERE, Root, Run
from kvkeep.index.tiermap import TierMap
from kvkeep.index.uses import NO_STAMP
from kvkeep.index.watch import Reason
from kvkeep.tiers.ledger import Ledger, as_index


class Match(NamedTuple):
    """What of a chain is cached, from page 0 on: GPU pages, called `name` at their end, then host pages."""

    pages: "array[int]"
    host: "array[int]"
    name: int


class Place(NamedTuple):
    """A point in the tree: behind the page at depth `depth - 1`, which lies in `run` (a root for depth 0)."""

    run: Run
    depth: int


class Cleared(NamedTuple):
    """How many pages of each tier became free."""

    gpu: int
    host: int


class Inserted(NamedTuple):
    """What `insert` did: the first `twins` pages were there already, on other page ids; `last` ends the chain."""

    twins: int
    last: int


class RunTree:
    """Runs by root, over one or two tiers of pages; the index's ownership of a page changes here only."""

    def __init__(
        self,
        ledger: Ledger,
        order: EvictionOrder,
        page_nbytes: int,
        hash_fn: Hash64 = hash64,
        host: TierMap | None = None,
    ) -> None:
        self.gpu = TierMap(ledger, order)
        self.host = host
        self.page_nbytes = page_nbytes
        self.hash_fn = hash_fn
        self._compare = Compare(page_nbytes, hash_fn)
        self.doubles = Doubles()
        self._roots: dict[bytes, Root] = {}
        self._clock = 0
        self._serial = 0

    # ------------------------------------------------------------------ questions

    def match(self, identity: Identity, raw: Any, limit: int, media: PageMedia = None) -> Match:
        """The longest cached prefix of a chain, at most `limit` pages.

        raw: the chain's token ids as bytes from page 0 on, at least `limit` pages of them.
        """
        pages, host = array("i"), array("i")
        name = last_name = identity.name
        run: Run | None = self._roots.get(identity.record)
        depth = 0
        page_nbytes = self.page_nbytes
        while depth < limit and run is not None and run.children:
            found = self._compare.child(run, last_name, raw, depth * page_nbytes, depth, limit - depth, media)
            if found is None:
                break
            run, count = found
            depth += count
            on_gpu = len(run.pages)
            if count < on_gpu:
                pages.extend(run.pages[:count])
                name = run.names[count - 1]
                break
            pages.extend(run.pages)
            last_name = run.names[count - 1]
            if on_gpu:
                name = run.names[on_gpu - 1]
            if count > on_gpu:
                assert run.host is not None
                host.extend(run.host[on_gpu:count])
            if count < len(run.names):
                break
        return Match(pages, host, name)

    def root(self, identity: Identity) -> Place:
        """The place where the chains of an identity start."""
        root = self._roots.get(identity.record)
        if root is None:
            root = Root(identity.record, identity.name, self.next_serial())  # joins the tree with its first child
        return Place(root, 0)

    def child(self, identity: Identity, name: int) -> Run | None:
        """The first run of that name at the root of an identity."""
        root = self._roots.get(identity.record)
        return None if root is None or root.children is None else root.children.get(name)

    def place(self, page: int) -> Place | None:
        """The place behind a GPU page, or None when the page is not in the tree."""
        run = self.gpu.run_of[page]
        return None if run is None else Place(run, self.gpu.depth_of[page] + 1)

    def stamp(self, place: Place) -> int:
        """When the page before `place` was last used, or NO_STAMP at a root."""
        run, depth = place
        return run.stretch(depth - 1)[0] if depth else NO_STAMP

    def page_at(self, place: Place, depth: int) -> int:
        """The GPU page at `depth` on the path that ends at `place`."""
        run = place.run
        while depth < run.start:
            run = parent_of(run)
        return run.pages[depth - run.start]

    def host_name(self, page: int) -> int:
        """The name of a host page in the tree."""
        assert self.host is not None
        run = self.host.run_of[page]
        name: int = run.names[self.host.depth_of[page] - run.start]
        return name

    def ends_with(self, page: int) -> bool:
        """Whether no GPU copy hangs behind that GPU page of the tree."""
        run: Run = self.gpu.run_of[page]
        return run.pages[-1] == page and not run.gpu_children

    def page_content(self, page: int) -> tuple[bytes, int, PageMedia]:
        """Token bytes, name and media of a GPU page in the tree."""
        run, depth = self.gpu.run_of[page], self.gpu.depth_of[page]
        at = (depth - run.start) * self.page_nbytes
        return bytes(run.tokens[at : at + self.page_nbytes]), run.names[depth - run.start], run.media

    def __contains__(self, page: int) -> bool:
        return self.gpu.run_of[page] is not None

    # ------------------------------------------------------------------ growing

    def insert(
        self, place: Place, names: list[int], raw: Any, pages: "array[int]", media: PageMedia = None
    ) -> Inserted:
        """Adds READY pages behind `place`; first writer wins, so pages whose content is on the GPU already stay out.

        names, raw, pages: names, token bytes and ids of one or more consecutive pages.
        """
        run, depth = place
        page_nbytes = self.page_nbytes
        count = len(pages)
        done = 0
        twins = count
        last = -1
        while done < count:
            if depth < run.start + len(run.names):
                same = self._compare.common(run, depth, raw, done * page_nbytes, count - done, media)
                if same:
                    on_gpu = min(same, run.start + len(run.pages) - depth)
                    if on_gpu < same:  # entries with a host copy only: ours becomes the GPU copy
                        twins = min(twins, done + on_gpu)
                        self.attach(run, pages[done + on_gpu : done + same])
                        self.doubles.add((run,))
                    depth += same
                    done += same
                    last = run.pages[depth - run.start - 1]
                    continue
                run = self._split(run, depth)
            if run.children:
                found = self._compare.child_named(run, names[done], raw, done * page_nbytes, depth, count - done, media)
                if found is not None:
                    run = found[0]
                    continue
            run = self._append(run, depth, names[done:], raw[done * page_nbytes :], pages[done:], media)
            twins, depth, last = min(twins, done), depth + count - done, pages[-1]
            break
        self.touch(Place(run, depth))
        return Inserted(twins, last)

    def attach(self, run: Run, pages: "array[int]", reason: Reason | None = None) -> None:
        """`pages` become the GPU copies of the first entries of `run` that have none."""
        self.gpu.ledger.keep(pages)
        if not run.pages:
            parent_of(run).gpu_children += 1
        self.gpu.put(pages, run, run.gpu_end, reason)
        run.pages.extend(pages)

    def touch(self, place: Place) -> None:
        """Stamps the path that ends at `place` as used now: of equal stamps, the deeper page is the colder one."""
        self._clock += 1
        run: Run | None = place.run
        end = place.depth
        while run is not None and run.names:
            run.touch(end, self._clock)
            end = run.start
            run = run.parent

    def replace(self, old: int, new: int) -> None:
        """The index moves from GPU page `old` to `new`, a READY page of equal content."""
        run, depth = self.gpu.run_of[old], self.gpu.depth_of[old]
        run.pages[depth - run.start] = new
        self.gpu.put(array("i", (new,)), run, depth)
        self.gpu.remove(array("i", (old,)))
        self.gpu.ledger.keep(array("i", (new,)))
        self.gpu.ledger.drop(array("i", (old,)))

    # ------------------------------------------------------------------ shrinking

    def offer(self, pages: "array[int]") -> None:
        """The holders of consecutive pages have left: the tail of the deepest one's run, if one is here, may leave."""
        run = self.gpu.deepest(pages)
        if run is not None:
            self.gpu.order.offer(run)

    def evict(self, count: int) -> "array[int]":
        """Takes up to `count` idle pages out of the tree, coldest first, tail first; the index still owns them.

        Fewer come back only when nothing else is idle, idle pages have pages of live requests behind them, or a whole
        run has left: more than that may be free then, and its slot stands at the end.
        """
        order, idle_tail = self.gpu.order, self.gpu.ledger.idle_tail
        if count == 1 and self.gpu.watch is None:
            one = self._evict_one()
            if one is not None:
                return one
        out = array("i")
        while count > 0:
            run = order.coldest()
            if run is None:
                break
            k = self.coldest_stretch(run)
            k = self.leavable(run, k) if run.whole else idle_tail(run.pages, k if k < count else count)
            if not k:
                order.shelve(run)
                continue
            pages = self.leave(run, k)
            if out:
                out.extend(pages)
            else:
                out = pages
            if run.whole:
                break
            count -= k
        return out

    def _evict_one(self) -> "array[int] | None":
        """`evict(1)` where it is simple and most often asked: a decode goes on to its next page."""
        run = self.gpu.order.coldest()
        if run is None or run.host is not None or run.children or len(run.pages) == 1 or run.whole:
            return None
        if not self.gpu.ledger.is_idle(run.pages[-1]):
            return None
        page = run.pop(self.page_nbytes)
        self.gpu.run_of[page] = None
        return array("i", (page,))

    def leavable(self, run: Run, count: int) -> int:
        """How many GPU copies at the tail of `run` may leave now, of `count` that should: a whole run goes whole."""
        k = self.coldest_stretch(run)
        if not run.whole:
            return self.gpu.ledger.idle_tail(run.pages, min(k, count))
        return k if self.gpu.ledger.idle_tail(run.pages, k) == k else 0

    def coldest_stretch(self, run: Run) -> int:
        """How many GPU copies at the tail of `run` were last used together with the last one."""
        pages, ends = run.pages, run.ends
        if len(pages) == len(run.names):
            return run.start + len(pages) - ends[1] if len(ends) > 1 else len(pages)
        return run.gpu_end - run.stretch(run.gpu_end - 1)[1]

    def leave(self, run: Run, count: int) -> "array[int]":
        """The last `count` GPU copies of `run` leave, and entries without another; the index still owns the pages."""
        at = len(run.pages) - count
        pages = run.pages[at:]
        self.gpu.remove(pages)
        if run.host is None and at + count == len(run.names) and not run.children:
            if at:
                run.trim(at, self.page_nbytes)
            else:
                run.pages, run.names = array("i"), array("Q")
                self._unlink(run, had_gpu=True)
            return pages
        del run.pages[at:]
        if not at:
            self._left_gpu(run)
        host = run.host[at : at + count] if run.host is not None else ()
        bare = next((i for i, h in enumerate(host) if h == NOWHERE), 0 if run.host is None else count)
        if bare < count:
            self.cut(run, run.start + at + bare)
        elif self.host is not None:
            self.host.order.offer(run)
        return pages

    # ------------------------------------------------------------------ the host tier

    def put_down(self, run: Run, depth: int, host: "array[int]") -> None:
        """LOADING host pages become the host copies of consecutive entries of `run` from `depth` on."""
        assert self.host is not None
        if run.host is None:
            run.host = array("i", [NOWHERE]) * len(run.names)
        at = depth - run.start
        run.host[at : at + len(host)] = host
        self.host.ledger.keep(host)
        self.host.put(host, run, depth, "demoted")

    def take_up(self, host: "array[int]", pages: "array[int]") -> None:
        """LOADING GPU pages become GPU copies of the entries, consecutive on a path, that have the copies `host`."""
        assert self.host is not None
        done = 0
        while done < len(host):
            run = self.host.run_of[host[done]]
            count = min(run.end - self.host.depth_of[host[done]], len(host) - done)
            self.attach(run, pages[done : done + count], "promoted")
            done += count

    def lose_host(self, page: int, reason: Reason = "evicted") -> None:
        """The host copy `page` leaves the tree; the entry with it, and all behind it, when that was its last copy."""
        assert self.host is not None
        run, depth = self.host.run_of[page], self.host.depth_of[page]
        if depth >= run.gpu_end:
            self.cut(run, run.start if run.whole else depth, reason)
            return
        if run.whole:
            pages, run.host = run.host, None
            self.host.remove(pages, reason)
            self.host.ledger.drop(pages)
            return
        self.host.remove(array("i", (page,)), reason)
        run.host[depth - run.start] = NOWHERE
        self.host.ledger.drop(array("i", (page,)))

    def evict_host(self, count: int, colder_than: int) -> int:
        """Frees up to `count` host pages: last copies at ends of chains that leave before pages of that stamp."""
        assert self.host is not None
        ledger, order = self.host.ledger, self.host.order
        done, bound = 0, order.rank(colder_than)
        while done < count:
            run = order.coldest()
            if run is None or order.rank(run.stamps[0]) < bound:  # of equal ranks, the end of the chain is colder
                break
            assert run.host is not None
            least = max(run.gpu_end, run.stretch(run.end - 1)[1])
            k = run.end - least if run.whole else min(run.end - least, count - done)
            idle = ledger.idle_tail(run.host, k)
            k = 0 if run.whole and idle < k else idle
            if not k:
                order.shelve(run)
                continue
            free = ledger.free
            self.cut(run, run.end - k)
            done += ledger.free - free  # of a slot's page there may be more that is used
        return done

    def cut(self, run: Run, depth: int, reason: Reason = "evicted") -> None:
        """The entries of `run` from `depth` on leave, with every copy, and so does everything behind them."""
        gpu, host = array("i"), array("i")
        at = depth - run.start
        gone = list(below(run))
        for part, first in [(run, at), *((r, 0) for r in gone)]:
            gpu.extend(part.pages[first:])
            if part.host is not None:
                host.extend(h for h in part.host[first:] if h != NOWHERE)
        self.gpu.remove(gpu, reason)
        if self.host is not None:
            self.host.remove(host, reason)
        for r in gone:
            r.pages, r.names, r.host, r.children = array("i"), array("Q"), None, None
            self.doubles.discard(r)
        run.children, run.gpu_children = None, 0
        had_gpu = bool(run.pages)
        if at:
            run.trim(at, self.page_nbytes)
        else:
            run.pages, run.names, run.host = array("i"), array("Q"), None
            self._unlink(run, had_gpu)
        self.gpu.ledger.drop(gpu)
        if self.host is not None:
            self.host.ledger.drop(host)
        self.offer_run(run)

    def clear(self) -> Cleared:
        """Forgets everything."""
        for run in list(self.runs()):
            run.pages, run.names, run.host, run.children = array("i"), array("Q"), None, None
        self._roots.clear()
        self.doubles.clear()
        return Cleared(self.gpu.clear(), self.host.clear() if self.host is not None else 0)

    def _left_gpu(self, run: Run) -> None:
        """`run` has lost its last GPU copy."""
        parent = parent_of(run)
        parent.gpu_children -= 1
        if not parent.gpu_children:
            self.gpu.order.offer(parent)

    def offer_run(self, run: Run) -> None:
        """`run` may have lost what kept its tail from leaving a tier."""
        if run.names:
            self.gpu.order.offer(run)
            if self.host is not None:
                self.host.order.offer(run)

    # ------------------------------------------------------------------ inside

    def _append(self, run: Run, depth: int, names: list[int], raw: Any, pages: "array[int]", media: PageMedia) -> Run:
        """Puts new pages behind the end of `run`: into it when it is a leaf, as a child otherwise."""
        self.gpu.ledger.keep(pages)
        if run.children or not run.names:
            child = Run(run, depth, names[0], self.next_serial())
            self.hang(run, child)
            run = child
        run.extend(raw, names, pages)
        if media:
            mine = {d: media[d] for d in media if depth <= d < depth + len(pages)}
            if mine:
                run.media = {**(run.media or {}), **mine}
        self.gpu.put(pages, run, depth)
        return run

    def hang(self, parent: Run, child: Run) -> None:
        """A new run, which has GPU copies, goes on behind `parent`, maybe the first one behind a root."""
        if isinstance(parent, Root):
            self._roots[parent.record] = parent
        add_child(parent, child)

    def next_serial(self) -> int:
        """A number for a new run."""
        self._serial += 1
        return self._serial

    def _split(self, run: Run, depth: int) -> Run:
        """Cuts `run` at `depth`, if that lies inside it; returns the run that ends there."""
        if depth == run.start:
            return parent_of(run)
        head = Run(parent_of(run), run.start, run.key, self.next_serial())
        replace_child(run, head)
        run.split_head(depth, head, self.page_nbytes)
        head.children = {run.key: run}
        head.gpu_children = int(bool(run.pages))
        run.parent = head
        run.sibling = None
        self.gpu.run_of[as_index(head.pages)] = head
        if self.host is not None and head.host is not None:
            host = np.array(head.host)
            self.host.run_of[host[host != NOWHERE]] = head
            self.doubles.split(run, head)
        self.gpu.order.offer(head)
        return head

    def _unlink(self, run: Run, had_gpu: bool) -> None:
        """Takes a leaf run, all of whose copies leave, out of the tree."""
        parent = parent_of(run)
        replace_child(run, None)
        self.doubles.discard(run)
        parent.gpu_children -= had_gpu
        if parent.children:
            if not parent.gpu_children and parent.names:
                self.gpu.order.offer(parent)
            return
        parent.children = None
        if isinstance(parent, Root):
            del self._roots[parent.record]
        else:
            self.offer_run(parent)

    def runs(self) -> Iterator[Run]:
        """Every run of the tree, parents first; roots are not runs."""
        for root in self._roots.values():
            yield from below(root)

    @property
    def roots(self) -> list[Root]:
        """Every root that has chains."""
        return list(self._roots.values())
