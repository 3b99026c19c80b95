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

from kvkeep.costs import Costs
from kvkeep.index.run import NOWHERE, Run
from kvkeep.index.runs import RunTree
from kvkeep.index.tiermap import TierMap
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import SCALAR_PAGES_MAX, Ledger, State, as_index
from kvkeep.transfer.backend import NO_WAIT, After, Job
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan


class Copy:
    """Pages on their way: `gpu[i]` and `host[i]` hold, or will hold, the same bytes.   leases: who waits for it.

    ticket: the suspended request whose pages they are; `host` are then pages of the suspension's own.
    """

    __slots__ = ("cause", "gpu", "host", "job", "leases", "ticket")

    def __init__(self, cause: Cause, gpu: "array[int]", host: "array[int]", ticket: "Suspended | None" = None) -> None:
        self.cause = cause
        self.gpu = gpu
        self.host = host
        self.ticket = ticket
        self.job: Job | None = None
        self.leases: list[Lease] = []

    def __repr__(self) -> str:
        return f"Copy({self.cause}, {len(self.gpu)} pages)"


class Suspended:
    """A preempted request: which of its pages wait in host memory.  Made by `TieredCache.suspend`.

    kv_len: positions that held committed KV.   slots: page index to suspension page, for the pages that were copied.
    ready: the copies are over, and it can be resumed.   lost: they failed: resume finds the index's pages only.
    """

    def __init__(self, lease: Lease, kv_len: int, slots: dict[int, int]) -> None:
        self.kv_len = kv_len
        self.slots = slots
        self.identity = lease.identity
        self.media = lease.media
        self.storable = lease.storable
        self.store = lease.store
        self.epoch = lease.epoch
        self.ready = not slots
        self.lost = False
        self.live = True

    def __repr__(self) -> str:
        return f"Suspended({self.kv_len} positions, {len(self.slots)} pages)"


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
        self.fence: After = NO_WAIT
        self.parking = parking
        self.suspended: set[Suspended] = set()
        self._parking_first = parking_first
        self._tree = tree
        self._gpu: Ledger = tree.gpu.ledger
        self._tier: TierMap = tree.host
        self._host: Ledger = tree.host.ledger
        self._manager = manager
        self._end = end
        self._copies: dict[Job, Copy] = {}
        self._load_of: npt.NDArray[Any] = np.empty(self._gpu.total, dtype=object)  # the load that brings a page
        self._loads = 0
        self.costs = costs
        self.loads_declined = 0  # admissions that computed pages which host memory had

    # ------------------------------------------------------------------ loads

    def loadable(self, host: "array[int]") -> "array[int]":
        """The leading pages of `host` whose bytes are there, if loading them is faster than computing them again."""
        host = host[: self._host.ready_head(host)]
        if self.costs.worth_loading(len(host), self._manager.stats().queues.load_pages if self._loads else 0):
            return host
        self.loads_declined += 1
        return host[:0]

    def begin_load(self, host: "array[int]") -> Copy:
        """Pins the sources of a load, so that making room for its targets cannot take them."""
        copy = Copy("promote", array("i"), host)
        self._host.retain(host, copy)
        return copy

    def load(self, copy: Copy, gpu: "array[int]") -> bool:
        """Starts to bring a load's pages into OPEN pages; False, and it is forgotten, when it is refused."""
        copy.gpu = gpu
        if not self._submit(copy):
            self.cancel_load(copy)
            return False
        self._gpu.load(gpu)
        self._gpu.retain(gpu, copy)
        self._tree.take_up(copy.host, gpu)
        self._load_of[as_index(gpu)] = copy
        self._loads += 1
        return True

    def cancel_load(self, copy: Copy) -> None:
        """Forgets a load that was begun and not submitted."""
        self._host.release(copy.host, copy)
        self._offer(self._tier, copy.host)

    def join(self, pages: "array[int]", lease: Lease) -> None:
        """`lease` waits for the loads that bring any of its matched `pages`."""
        if self._loads and len(pages):
            for copy in set(self._load_of[as_index(pages)].tolist()) - {None}:
                self.wait(lease, copy)

    def wait(self, lease: Lease, copy: Copy) -> None:
        """`lease` must not touch its pages before `copy` is over."""
        copy.leases.append(lease)
        lease.copies.add(copy)

    def leave(self, lease: Lease) -> None:
        """`lease` ends and waits no more.  Its copies go on, but for loads of its own that have not started."""
        copies, lease.copies = lease.copies, set()
        for copy in copies:
            copy.leases.remove(lease)
        for copy in copies:
            if copy.cause == "promote" and not copy.leases:
                self._revoke_load(copy)

    def _revoke_load(self, copy: Copy) -> None:
        """Takes back a load that has not started, unless pages that were computed since hang behind its own."""
        inside = array("i", (page for page in copy.gpu if page in self._tree))  # the first ones, or all
        if inside and not self._tree.ends_with(inside[-1]):
            return
        if copy.job is None or not self._manager.revoke(copy.job):
            return
        del self._copies[copy.job]
        self._forget_load(copy)
        self._leave_gpu(inside)
        self._gpu.hand_over(copy.gpu, copy)
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

    def demote(self, run: Run, count: int, heir: int) -> Copy | None:
        """Hands the last `count` or fewer GPU pages of `run`, which have no host copy, to `heir` while they are copied.

        None when there is no place for even one, or the copy is refused: then the pages can only be dropped.
        """
        stamp = run.stretch(run.gpu_end - 1)[0]
        count = self._room(count, stamp)
        if not count:
            return None
        copy = self._store("demote", run, run.gpu_end - count, count)
        if copy is None:
            return None
        self._gpu.drain(self._tree.leave(run, count), heir)
        return copy

    def clean(self, window: int) -> int:
        """Copies down what of the `window` coldest pages has no host copy, if the link is idle; how many pages."""
        if self._manager.busy:
            return 0
        order, seen, total = self._tree.gpu.order, [], 0
        while window > 0 and (run := order.coldest()) is not None:
            order.shelve(run)
            seen.append(run)
            count = self._gpu.idle_tail(run.pages, min(self._tree.coldest_stretch(run), window))
            window -= count
            dirty, copied = self._clean_tail(run, count)
            total += copied
            if copied < dirty:
                break  # what a colder page did not get a hotter one must not take: the colder would take it over
        for run in seen:
            order.offer(run)
        return total

    def _clean_tail(self, run: Run, count: int) -> tuple[int, int]:
        """Copies down the pages of the last `count` of `run` that have no host copy, the deepest such stretch of them.

        Returns how many those are, and how many of them are copied.
        """
        clean = clean_tail(run, count)
        last = len(run.pages) - clean
        dirty = dirty_tail(run, last, count - clean)
        count = self._room(dirty, run.stretch(run.start + last - 1)[0]) if dirty else 0
        if not count or self._store("clean", run, run.start + last - count, count) is None:
            return dirty, 0
        return dirty, count

    def _store(self, cause: Cause, run: Run, depth: int, count: int) -> Copy | None:
        """Starts to copy `count` pages of `run` from `depth` on into free host pages; None when that is refused."""
        at = depth - run.start
        copy = Copy(cause, run.pages[at : at + count], array("i"))
        copy.host = self._host.open(count, copy)
        if not self._submit(copy):
            self._host.release(copy.host, copy)
            return None
        self._host.load(copy.host)
        self._tree.put_down(run, depth, copy.host)
        self._gpu.retain(copy.gpu, copy)
        return copy

    def _room(self, count: int, stamp: int) -> int:
        """Makes up to `count` host pages free for pages last used at `stamp`; how many are.

        Places come from copies whose GPU page is hotter than that, then from pages that are colder.
        """
        if self._host.free < count:
            self._tree.evict_doubles(count - self._host.free, stamp)
        if self._host.free < count:
            self._tree.evict_host(count - self._host.free, stamp)
        return min(count, self._host.free)

    # ------------------------------------------------------------------ suspended requests

    def suspend(self, ticket: Suspended, gpu: "array[int]") -> bool:
        """Starts to copy pages, in the order of `ticket.slots`, into suspension pages; False when that is refused.

        The caller seals those that are OPEN, and then lets the copy hold them (`hold_sources`).
        """
        if len(gpu) > self.parking.free:
            return False
        copy = Copy("suspend", gpu, array("i"), ticket)
        copy.host = self.parking.open(len(gpu), copy)
        if not self._submit(copy):
            self.parking.release(copy.host, copy)
            return False
        self.parking.load(copy.host)
        self.parking.retain(copy.host, ticket)
        ticket.slots = dict(zip(ticket.slots, copy.host, strict=True))
        self.suspended.add(ticket)
        return True

    def hold_sources(self, ticket: Suspended) -> None:
        """The copy that suspends a request becomes an owner of its sources, before the lease lets go of them."""
        for copy in self._copies.values():
            if copy.ticket is ticket:
                self._gpu.retain(copy.gpu, copy)

    def resume(self, ticket: Suspended, slots: "array[int]", gpu: "array[int]", lease: Lease) -> bool:
        """Starts to bring suspension pages back into OPEN pages of `lease`; False when that is refused."""
        copy = Copy("resume", gpu, slots, ticket)
        if not self._submit(copy):
            return False
        self._gpu.load(gpu)
        self._gpu.retain(gpu, copy)
        self.parking.retain(slots, copy)
        self.wait(lease, copy)
        return True

    def forget_suspended(self, ticket: Suspended) -> None:
        """The ticket lets go of its pages: it was resumed, or will never be."""
        ticket.live = False
        if ticket in self.suspended:
            self.suspended.remove(ticket)
            self.parking.release(array("i", ticket.slots.values()), ticket)

    def _suspended(self, copy: Copy, ok: bool) -> None:
        assert copy.ticket is not None
        copy.ticket.ready, copy.ticket.lost = True, not ok
        self.parking.land(copy.host, copy)  # a lost ticket's pages are never read
        self._gpu.release(copy.gpu, copy)
        self._offer(self._tree.gpu, copy.gpu)

    def _resumed(self, copy: Copy, ok: bool) -> None:
        for lease in list(copy.leases) if not ok else ():
            self._revoke(lease)
        self._let_go(copy)
        self._gpu.hand_over(copy.gpu, copy)
        self.parking.release(copy.host, copy)

    # ------------------------------------------------------------------ ends

    def apply(self, done: Completion) -> None:
        """What a completion changes."""
        copy = self._copies[done.job]
        if not done.final:
            self._overdue(copy)
            return
        del self._copies[done.job]
        if copy.cause == "suspend":
            self._suspended(copy, done.ok)
        elif copy.cause == "resume":
            self._resumed(copy, done.ok)
        elif copy.cause == "promote":
            self._forget_load(copy)
            if done.ok:
                self.costs.loaded(len(copy.gpu), done.copy_ns / 1e9)
                self._landed(copy)
            else:
                self._failed_load(copy)
        else:
            self._stored(copy, done.ok)

    def _landed(self, copy: Copy) -> None:
        self._gpu.land(copy.gpu, copy)
        self._host.release(copy.host, copy)
        self._let_go(copy)
        self._tree.double(copy.host)
        self._offer(self._tree.gpu, copy.gpu)
        self._offer(self._tier, copy.host)

    def _failed_load(self, copy: Copy) -> None:
        """The chain ends before the first page that did not come.  One lease inherits the targets, the others end."""
        place = self._tree.place(copy.gpu[0])
        heir = next((lease for lease in copy.leases if self._may_inherit(lease, copy)), None) if place else None
        if heir is not None and place is not None:
            self._shorten(heir, copy, place.depth - 1)
        for lease in [lease for lease in copy.leases if lease is not heir]:
            self._revoke(lease)
        place = self._tree.place(copy.gpu[0])
        if place is not None:
            self._tree.cut(place.run, place.depth - 1, "failed")
        self._let_go(copy)
        self._gpu.hand_over(copy.gpu, copy)
        self._host.release(copy.host, copy)
        self._offer(self._tier, copy.host)

    @staticmethod
    def _may_inherit(lease: Lease, copy: Copy) -> bool:
        """Whether the lease waits for nothing else, and matched nothing behind the copy: it could not write there."""
        return lease.copies == {copy} and lease.pages[lease.base - 1] in copy.gpu

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
            self._tree.double(copy.host)
        else:
            for page in copy.host:
                if self._host.kept(page):
                    self._tree.lose_host(page, "failed")
            self._host.hand_over(copy.host, copy)
        draining = array("i", (p for p in copy.gpu if self._gpu.state(p) is State.DRAINING))
        resting = array("i", (p for p in copy.gpu if self._gpu.state(p) is not State.DRAINING))
        self._gpu.hand_over(draining, copy)
        self._gpu.release(resting, copy)
        self._let_go(copy)
        self._offer(self._tree.gpu, resting)
        self._offer(self._tier, copy.host)

    def _overdue(self, copy: Copy) -> None:
        """Releases those who wait.  The copy may still move bytes, so it keeps its pages until it is over."""
        for lease in list(copy.leases):
            self._revoke(lease)
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

    def _revoke(self, lease: Lease) -> None:
        lease.revoked = True
        self._end(lease)

    # ------------------------------------------------------------------ small things

    def pages_held_alone(self) -> int:
        """GPU pages that copies hold and no request does."""
        return sum(self._gpu.holders(page) == 1 for copy in self._copies.values() for page in copy.gpu)

    def requests_holding(self, page: int) -> int:
        """How many live requests hold a GPU page: its holders, but for copies."""
        holders = self._gpu.holders(page)
        return holders if holders < 2 else holders - sum(page in copy.gpu for copy in self._copies.values())

    def shed(self) -> bool:
        """Takes out of the index the GPU pages at the ends of chains that only copies hold; False when there are none.

        They are free once their copies are over; the idle pages before them can leave now.
        """
        held = {page for copy in self._copies.values() for page in copy.gpu if self._gpu.holders(page) == 1}
        shed = array("i")
        runs = {self._tree.gpu.run_of[page] for page in held} - {None}
        for run in sorted(runs, key=lambda run: (-run.start, run.serial)):  # a run's children before it
            count = 0 if run.gpu_children else len(run.pages)
            k = 0
            while k < count and run.pages[count - 1 - k] in held:
                k += 1
            if k:
                shed.extend(self._tree.leave(run, k))
                self._tree.offer_run(run)
        self._gpu.drop(shed)
        return bool(shed)

    @property
    def ended(self) -> bool:
        """Whether no copy is made any more: what is in host memory stays there."""
        return self._manager.ended

    def copies(self) -> Iterable[Copy]:
        """Every copy that is queued or in flight."""
        return self._copies.values()

    def _submit(self, copy: Copy) -> bool:
        load = DIRECTION_OF[copy.cause] == "h2d"
        parked = copy.ticket is not None
        host = array("i", (p + self._parking_first for p in copy.host)) if parked else copy.host
        generations = (self.parking if parked else self._host).generations(copy.host)
        ours = self._gpu.generations(copy.gpu)
        plan = Plan(
            direction=DIRECTION_OF[copy.cause],
            cause=copy.cause,
            sources=host if load else copy.gpu,
            targets=copy.gpu if load else host,
            source_generations=generations if load else ours,
            target_generations=ours if load else generations,
        )
        copy.job = self._manager.submit(plan, after=self.fence)
        if copy.job is None:
            return False
        self._copies[copy.job] = copy
        return True

    def _let_go(self, copy: Copy) -> None:
        for lease in copy.leases:
            lease.copies.discard(copy)
        copy.leases.clear()

    def _offer(self, tier: TierMap, pages: "array[int]") -> None:
        if len(pages):
            for run in set(tier.run_of[as_index(pages)].tolist()) - {None}:
                self._tree.offer_run(run)


def clean_tail(run: Run, count: int) -> int:
    """How many of the last `count` GPU copies of `run`, from the end, have a host copy."""
    return 0 if run.host is None else _tail_of(run.host, len(run.pages), count, clean=True)


def dirty_tail(run: Run, last: int, count: int) -> int:
    """How many of the `count` GPU copies of `run` before position `last`, from the end, have no host copy."""
    return count if run.host is None else _tail_of(run.host, last, count, clean=False)


def _tail_of(host: "array[int]", last: int, count: int, *, clean: bool) -> int:
    """How many of the `count` entries of `host` before `last`, from the end, are alike: a copy, or none."""
    if count <= SCALAR_PAGES_MAX:
        k = 0
        while k < count and (host[last - 1 - k] != NOWHERE) is clean:
            k += 1
        return k
    has_copy = np.frombuffer(host, dtype=np.int32)[last - count : last] != NOWHERE
    other = (has_copy != clean).nonzero()[0]
    return count if not len(other) else count - 1 - int(other[-1])
