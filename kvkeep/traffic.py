"""Traffic: the copies between the two tiers of a cache, what they own, and what follows when they end.

Must not know prompts or how room is made: `cache.py` decides what is copied.  Its callers hold the cache's lock, and
nothing here waits: plans go to the transfer manager, completions are applied when `cache.poll` brings them.

    load   host page --copy--> GPU page     LOADING until it lands; leases that match it meanwhile join
    store  GPU page --copy--> host page     ahead of need ("clean"), or to make room ("demote": it drains to an heir)

A copy owns its sources and its targets until the backend says that it is over.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.copies import Copies, Copy, Suspended
from kvkeep.costs import Costs
from kvkeep.index.media import cut_before_split_item
from kvkeep.index.names import TOKEN_NBYTES
from kvkeep.index.run import Run
from kvkeep.index.runs import RunTree
from kvkeep.index.tiermap import TierMap
from kvkeep.lease import Lease
from kvkeep.parking import Parking
from kvkeep.tiers.ledger import Ledger, as_index
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import Cause

__all__ = ["Copy", "Suspended", "Traffic"]


class Traffic:
    """The copies of one cache.

    tree: the run tree, with a host tier (of 0 pages, maybe).   manager: makes the copies.
    parking: the ledger of the pages for suspended requests; their ids in the host pool begin at `parking_first`.
    costs: what loading and computing take.   end: ends a lease and releases its pages; given by the cache.
    """

    def __init__(
        self,
        tree: RunTree,
        manager: TransferManager,
        parking: Ledger,
        parking_first: int,
        costs: Costs,
        end: Callable[[Lease], None],
    ) -> None:
        assert tree.host is not None
        self._tree = tree
        self._gpu: Ledger = tree.gpu.ledger
        self._tier: TierMap = tree.host
        self._host: Ledger = tree.host.ledger
        self._manager = manager
        self.copies = Copies(self._gpu, manager, end)
        self.parking = Parking(parking, parking_first, self._gpu, self.copies)
        self._load_of: npt.NDArray[Any] = np.empty(0, dtype=object)  # the load that brings a page
        self._fit()
        self._loads = 0
        self.costs = costs
        self.loads_declined = 0  # admissions that computed pages which host memory had

    # ------------------------------------------------------------------ loads

    def loadable(self, host: "array[int]") -> tuple["array[int]", bool]:
        """The leading pages of `host` whose bytes are there, if loading them is faster than computing them again.

        And whether it is not.
        """
        host = host[: self._host.ready_head(host)]
        if self.costs.worth_loading(len(host), self._queued):
            return host, False
        return host[:0], True

    def takes_load(self, pages: int) -> bool:
        """Whether a load of so many pages would be made now."""
        return self._manager.takes_load(pages)

    def worth_loading(self, host: "array[int]", seconds: float) -> bool:
        """Whether the bytes of an output are there, and loading them is faster than the `seconds` of computing it.

        Not where the load would be refused: no room is to be made for it then.
        """
        pages = len(self._host.split(host)[0])
        if self._host.ready_head(host) < len(host) or not self._manager.takes_load(pages or 1):
            return False
        return self.costs.worth_loading(len(host), self._queued, seconds)

    @property
    def _queued(self) -> int:
        """Pages of the loads that wait."""
        return self._manager.stats().queues.load_pages if self._loads else 0

    def begin_load(self, host: "array[int]") -> Copy:
        """Pins the sources of a load, so that making room for its targets cannot take them."""
        copy = Copy("promote", array("i"), host, self._host)
        self._host.retain(host, copy)
        return copy

    def load(self, copy: Copy, gpu: "array[int]", drains: list[Copy], late: int) -> bool:
        """Starts to bring a load's pages into `gpu`; False, and it is forgotten, when it is refused.

        Of the targets, which are OPEN, the last `late` are the first of `drains`, DRAINING: for them it starts when
        those are over.
        """
        count = len(gpu) - late
        rest = self._split(copy, gpu, count) if late else None
        copy.gpu = gpu[:count]
        if count and not self.copies.submit(copy):
            self.cancel_load(copy)
            if rest is not None:
                self.cancel_load(rest)
            return False
        if count:
            self._take_up(copy)
        if rest is not None:
            covered, readers = 0, list[Copy]()
            while covered < late:
                readers.append(drains[len(readers)])
                covered += len(readers[-1].promised)
            self.copies.defer(rest, readers)
            self._take_up(rest)
        return True

    def _split(self, copy: Copy, gpu: "array[int]", count: int) -> Copy:
        """What is left of a load behind its first `count` pages, as a load of its own."""
        rest = Copy("promote", gpu[count:], copy.host[count:], self._host)
        self._host.retain(rest.host, rest)
        self._host.release(rest.host, copy)
        copy.host = copy.host[:count]
        return rest

    def _take_up(self, copy: Copy) -> None:
        """The targets of a load can be matched from now on, and waited for."""
        self._gpu.load(copy.gpu)
        self._gpu.retain(copy.gpu, copy)
        self._tree.take_up(copy.host, copy.gpu)
        self._fit()
        self._load_of[as_index(copy.gpu)] = copy
        self._loads += 1

    def cancel_load(self, copy: Copy) -> None:
        """Forgets a load that was begun and not submitted."""
        self._host.release(copy.host, copy)
        self._offer(self._tier, copy.host)

    def _fit(self) -> None:
        """Has a place for every page and slot."""
        more = self._gpu.ids - len(self._load_of)
        if more:
            self._load_of = np.concatenate([self._load_of, np.empty(more, dtype=object)])

    def join(self, pages: "array[int]", lease: Lease) -> None:
        """`lease` waits for the loads that bring any of its matched `pages`."""
        if self._loads and len(pages):
            self._fit()
            for copy in set(self._load_of[as_index(pages)].tolist()) - {None}:
                self.copies.wait(lease, copy)

    def leave(self, lease: Lease) -> None:
        """`lease` ends and waits no more.  Its copies go on, but for copies up of its own that have not started."""
        for copy in self.copies.leave(lease):
            if copy.cause == "promote":
                self._take_back_load(copy)
            elif copy.cause == "resume" and self.copies.take_back(copy):
                self.parking.over(copy, False)

    def _take_back_load(self, copy: Copy) -> None:
        """A load that has not started is not made, unless pages that were computed since hang behind its own."""
        inside = array("i", (page for page in copy.gpu if page in self._tree))  # the first ones, or all
        if inside and not self._tree.ends_with(inside[-1]):
            return
        if not self.copies.take_back(copy):
            return
        self._forget_load(copy)
        self._leave_gpu(inside)
        self.copies.give_back(copy)
        self._host.release(copy.host, copy)
        self._offer(self._tier, copy.host)

    def _forget_load(self, copy: Copy) -> None:
        """Nobody can join it any more."""
        self._loads -= 1
        self._load_of[as_index(copy.gpu)] = None

    def _leave_gpu(self, pages: "array[int]") -> None:
        """The GPU pages at the end of a chain leave the index, deepest last; their host copies stay."""
        left = len(pages)
        while left:
            run = self._tree.gpu.run_of[pages[left - 1]]
            count = min(left, len(run.pages))
            self._tree.leave(run, count)
            self._tree.offer_run(run)
            left -= count
        self._gpu.drop(pages)

    # ------------------------------------------------------------------ stores

    def demote(self, copy: Copy, run: Run, count: int, fit: int) -> int:
        """Adds the last `count` or fewer GPU pages of `run`, which have no host copy, to a copy down: off the GPU.

        fit: how many still fit on the link.
        Returns how many are added; 0 when there is no place for even one: then they can only be dropped.
        """
        count = self._room(min(count, fit), run.stretch(run.gpu_end - 1)[0])
        if count:
            self._add(copy, run, run.gpu_end - count, count)
            self._tree.leave(run, count)
        return count

    def hand_down(self, copy: Copy, heir: int) -> bool:
        """Starts a copy down of pages that have left the GPU's index; they are `heir`'s, DRAINING.

        False when no copies are made any more: the pages are the index's alone, and their entries are lost.
        """
        if not self._send(copy):
            return False
        self._gpu.drain(copy.gpu, heir)
        copy.promised = copy.gpu
        return True

    def demote_whole(self, run: Run, count: int, heir: int) -> Copy | None:
        """Copies an output down: it leaves the GPU, and `count` or fewer of its pages are `heir`'s, DRAINING.

        None when there is no place for it, or no copies are made: it can only be dropped.
        """
        copy = self._copy_whole("demote", run, make_room=True)
        if copy is None:
            return None
        pages, slots = self._gpu.split(self._tree.leave(run, len(run.pages)))
        copy.promised = pages[:count]
        self._gpu.drain(copy.promised, heir)
        self._gpu.drop(pages[count:] + slots)
        return copy

    def _copy_whole(self, cause: Cause, run: Run, *, make_room: bool) -> Copy | None:
        """Starts a copy down of an output; it has a host copy from now on.  None when there is no place, or no copy."""
        pages, slots = self._gpu.split(run.pages)
        rest = self._gpu.place(slots[0]).nbytes if slots else 0
        room = self._host.slots
        assert room is not None  # since there is an output
        if make_room and len(run.pages) <= self._host.total:
            self._room(len(pages) + room.pages_for(rest), run.stamps[-1])
        if self._host.free < len(pages) + room.pages_for(rest):
            return None  # maybe since what made room took the page that had some for the slot with it
        copy = self.copy_down(cause)
        host = self._host.open(len(pages), copy)
        if rest:
            slot = self._host.open_slot(rest, copy)
            assert slot is not None
            host.append(slot)
        self._host.load(host)
        self._tree.put_down(run, 0, host)
        copy.host.extend(host)
        copy.gpu.extend(run.pages)
        return copy if self._send(copy) else None

    @property
    def idle(self) -> bool:
        """Whether no copy waits or runs, but for such as may never end."""
        return self._manager.idle

    def clean(self, window: int, ahead: int) -> bool:
        """Copies down what of the coldest pages has no host copy; False when another call could copy more.

        Those of the `window` coldest may take places of other copies; those up to `ahead` only free ones, and only when
        there was nothing to copy in the window: what is being copied no request can have meanwhile.
        """
        all_of_it, sent = self._clean(window, make_room=True)
        if sent:
            return False
        if all_of_it and ahead > window and self._host.free:
            all_of_it, sent = self._clean(ahead, make_room=False)
        return all_of_it or not sent

    def _clean(self, window: int, *, make_room: bool) -> tuple[bool, bool]:
        """Copies down what of the `window` coldest pages has no host copy.  Whether that is all, and any of it."""
        order, seen, looked_at, all_of_it = self._tree.gpu.order, [], 0, True
        outputs: list[Run] = []
        copy, fit = self.copy_down("clean"), self.fit
        while all_of_it and looked_at < window and (run := order.coldest()) is not None:
            order.shelve(run)
            seen.append(run)
            count = self._tree.leavable(run, window - looked_at)
            looked_at += count
            if not run.whole:
                # What a colder page did not get a hotter one must not take: the colder would take it over.
                all_of_it = self._clean_tail(copy, run, count, fit, make_room=make_room)
            elif count and run.host is None:
                outputs.append(run)
        for run in seen:
            order.offer(run)
        sent = bool(copy.gpu) and self._send(copy)
        for run in outputs if all_of_it else ():
            all_of_it = len(run.pages) <= self.fit and self._copy_whole("clean", run, make_room=make_room) is not None
            if not all_of_it:
                break
            sent = True
        return all_of_it, sent

    def _clean_tail(self, copy: Copy, run: Run, count: int, fit: int, *, make_room: bool) -> bool:
        """Adds what of the last `count` pages of `run` has no host copy to a copy of `fit` pages at most.

        That is the deepest such stretch of them.  False when not all of it is added.
        """
        clean = run.clean_tail(count)
        last = len(run.pages) - clean
        dirty = run.dirty_tail(last, count - clean)
        count = min(dirty, fit - len(copy.gpu))
        if count:
            stamp = run.stretch(run.start + last - 1)[0]
            count = self._room(count, stamp) if make_room else min(count, self._host.free)
        if count:
            self._add(copy, run, run.start + last - count, count)
        return count == dirty

    @property
    def fit(self) -> int:
        """How many pages of a copy down fit on the link now."""
        return self._manager.store_pages

    def copy_down(self, cause: Cause) -> Copy:
        """One to which pages of many runs are to be added."""
        return Copy(cause, array("i"), array("i"), self._host)

    def _add(self, copy: Copy, run: Run, depth: int, count: int) -> None:
        """Adds `count` pages of `run` from `depth` on to a copy down; their entries have a host copy from now on."""
        host = self._host.open(count, copy)
        self._host.load(host)
        self._tree.put_down(run, depth, host)
        copy.host.extend(host)
        copy.gpu.extend(run.pages[depth - run.start : depth - run.start + count])

    def _send(self, copy: Copy) -> bool:
        """Starts a copy down; False when it is refused, and those entries lose their host copies again."""
        if self.copies.submit(copy):
            self._gpu.retain(copy.gpu, copy)
            return True
        self._lose(copy)
        return False

    def _lose(self, copy: Copy) -> None:
        """A copy down has not arrived."""
        for page in copy.host:
            if self._host.kept(page):
                self._tree.lose_host(page, "failed")
        self._host.hand_over(copy.host, copy)

    def _room(self, count: int, stamp: int) -> int:
        """Makes up to `count` host pages free for pages last used at `stamp`; how many are.

        Places come from copies whose GPU page is hotter than that, then from pages that are colder.
        """
        if self._host.free < count:
            self._tree.doubles.evict(self._tree, count - self._host.free, stamp)
        if self._host.free < count:
            self._tree.evict_host(count - self._host.free, stamp)
        return min(count, self._host.free)

    # ------------------------------------------------------------------ ends

    def apply(self, done: Completion) -> None:
        """What a completion changes."""
        copy = self.copies.of(done.job)
        if not done.final:
            self._overdue(copy)
            return
        self.copies.over(copy)
        if copy.ticket is not None:
            self.parking.over(copy, done.ok)
            self._offer(self._tree.gpu, copy.gpu)
        elif copy.cause == "promote":
            self._forget_load(copy)
            if done.ok:
                if not done.plan.slots:
                    self.costs.loaded(len(copy.gpu), done.copy_ns / 1e9)
                self._landed(copy)
            else:
                self._failed_load(copy)
        else:
            self._stored(copy, done.ok)

    def start_deferred(self) -> None:
        """Copies up whose targets are not read any more start now."""
        for copy in self.copies.start_deferred():
            if copy.ticket is not None:
                self.parking.over(copy, False)
            else:
                self._forget_load(copy)
                self._failed_load(copy)

    def _landed(self, copy: Copy) -> None:
        self._gpu.land(copy.gpu, copy)
        self._host.release(copy.host, copy)
        self.copies.let_go(copy)
        self._tree.doubles.add(self._runs(self._tier, copy.host), promoted=True)
        self._offer(self._tree.gpu, copy.gpu)
        self._offer(self._tier, copy.host)

    def _failed_load(self, copy: Copy) -> None:
        """The chain ends before the first page that did not come.  One lease inherits the targets, the others end."""
        place = self._tree.place(copy.gpu[0])
        depth = place.depth - 1 if place else 0
        heir = next((lease for lease in copy.leases if self._may_inherit(lease, copy, depth)), None) if place else None
        if heir is not None:
            self._shorten(heir, copy, depth)
        for lease in [lease for lease in copy.leases if lease is not heir]:
            self.copies.revoke(lease)
        place = self._tree.place(copy.gpu[0])
        if place is not None:
            self._tree.cut(place.run, place.depth - 1, "failed")
        self.copies.let_go(copy)
        self._gpu.hand_over(copy.gpu, copy)
        self._host.release(copy.host, copy)
        self._offer(self._tier, copy.host)

    def _may_inherit(self, lease: Lease, copy: Copy, depth: int) -> bool:
        """Whether the lease waits for nothing else, and matched nothing behind the copy: it could not write there.

        Nor where the copy begins inside an item whose attention is not causal: the lease would compute a part of it.
        """
        if not lease.base or lease.copies != {copy} or lease.pages[lease.base - 1] not in copy.gpu:
            return False
        page_size = self._tree.page_nbytes // TOKEN_NBYTES
        return depth == cut_before_split_item(depth, page_size, lease.media.by_page)

    def _shorten(self, heir: Lease, copy: Copy, depth: int) -> None:
        """`heir` computes the pages from `depth` on itself; their token ids come from the tree while it has them."""
        own = set(copy.gpu).intersection(heir.pages)
        content = [self._tree.page_content(page) for page in copy.gpu if page in own]
        before = self._tree.page_content(heir.pages[depth - 1])[1] if depth else heir.identity.name
        heir.shorten(depth, before, b"".join(raw for raw, _, _ in content), self._tree.page_nbytes)
        heir.path = None if not depth else (heir.pages[depth - 1], self._gpu.generation(heir.pages[depth - 1]))

    def _stored(self, copy: Copy, ok: bool) -> None:
        if ok:
            self._host.land(copy.host, copy)
            self._tree.doubles.add(self._runs(self._tier, copy.host))
        else:
            self._lose(copy)
        draining, resting = self._gpu.draining(copy.gpu)
        self._gpu.hand_over(draining, copy)
        self._gpu.release(resting, copy)
        self.copies.let_go(copy)
        self._offer(self._tree.gpu, resting)
        self._offer(self._tier, copy.host)

    def _overdue(self, copy: Copy) -> None:
        """Releases those who wait.  The copy may still move bytes, so it keeps its pages until it is over."""
        for waiting in [copy, *(other for other in self.copies if copy in other.after)]:
            for lease in list(waiting.leases):
                self.copies.revoke(lease)
        if copy.ticket is not None:
            copy.ticket.ready = copy.ticket.lost = True
        elif copy.cause == "promote":
            place = self._tree.place(copy.gpu[0])
            if place is not None:
                self._tree.cut(place.run, place.depth - 1, "failed")
        else:
            for page in copy.host:
                if self._host.kept(page):
                    self._tree.lose_host(page, "failed")

    # ------------------------------------------------------------------ small things

    def shed(self) -> bool:
        """Takes out of the index the GPU pages at the ends of chains that only copies hold; False when there are none.

        They are free once their copies are over; the idle pages before them can leave now.
        """
        held = self.copies.pages_held_alone()
        shed = array("i")
        runs = {self._tree.gpu.run_of[page] for page in held} - {None}
        for run in sorted(runs, key=lambda run: (-run.start, run.serial)):  # a run's children before it
            count = 0 if run.gpu_children or run.whole else len(run.pages)  # before an output there is nothing
            k = 0
            while k < count and run.pages[count - 1 - k] in held:
                k += 1
            if k:
                shed.extend(self._tree.leave(run, k))
                self._tree.offer_run(run)
        self._gpu.drop(shed)
        return bool(shed)

    def _offer(self, tier: TierMap, pages: "array[int]") -> None:
        for run in self._runs(tier, pages):
            self._tree.offer_run(run)

    @staticmethod
    def _runs(tier: TierMap, pages: "array[int]") -> Iterable[Run]:
        """The runs of those of these pages that are in the tree."""
        found = dict.fromkeys(tier.run_of[as_index(pages)].tolist())
        found.pop(None, None)
        return found
