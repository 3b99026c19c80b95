"""How room is made for a live request: free pages, then cached pages, coldest first, only as many as are short.

Must not know prompts or names.  Its callers hold the cache's lock.

A page with a host copy just leaves.  One without is demoted when the request can wait for the copy (an admission), and
dropped when it cannot (a running decode), or when its place below would cost a hotter page.
"""

import time
from array import array
from collections import deque
from collections.abc import Mapping

from kvkeep.copies import Copy
from kvkeep.errors import InvariantViolation, OutOfPages
from kvkeep.index.family import parent_of
from kvkeep.index.run import Run
from kvkeep.index.runs import RunTree
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Traffic

#: The coldest pages of the GPU pool that are kept copied down, and may leave in another order: a sixteenth of the pool,
#: so that an admission of that size finds clean pages, within bounds that keep a round of cleaning short.
WINDOW_PAGES_MIN, WINDOW_PAGES_MAX = 4, 256
#: How often an admission that takes as many pages as the window has looks through it for pages with a host copy: for
#: each page it looks at no more runs than that.
LOOKS_A_WINDOW = 2
#: Into how many parts the window is cut: so many pages leave before it is looked through again for pages to copy down.
CLEAN_PARTS = 16
#: Where one of the last admissions asked for more than that, as many are kept copied down: the next may ask for them.
ADMISSIONS_REMEMBERED = 16


class Drains:
    """What a request that can wait has got of pages that copies still read: `count` so far, at most `count_max`."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.count = 0
        self.copies: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """It has got the pages that `copy` reads."""
        self.copies.append(copy)
        self.count += len(copy.promised)


class Room:
    """Supplies pages of one ledger.

    leases: the live ones.   traffic: the copies to a host tier; None without one.
    window: how many of the coldest pages may leave in another order than the eviction order's: those with a host copy
        first.   ahead: how many of the coldest are kept copied down, while there are free places for them.
    pages_evicted: pages that have left the GPU pool.   pages_demoted: of those, the ones copied down on the way.
    pages_lost: of those, the ones whose last copy that was.   evict_ns: what finding them took.
    """

    def __init__(self, ledger: Ledger, tree: RunTree, leases: Mapping[int, Lease], traffic: Traffic | None) -> None:
        self._ledger = ledger
        self._tree = tree
        self._leases = leases
        self._traffic = traffic
        self.window = min(max(ledger.total // 16, WINDOW_PAGES_MIN), WINDOW_PAGES_MAX)
        if tree.host is not None:  # of a small lower tier, copies made ahead of need must not take most places
            self.window = min(self.window, tree.host.ledger.total // 4)
        self.ahead = self.window
        self._asked: deque[int] = deque(maxlen=ADMISSIONS_REMEMBERED)
        self._admissions = 0
        self._clean_at: tuple[int, int, int] | None = None  # what there was when all that may be copied down had been
        self.pages_evicted = 0
        self.pages_demoted = 0
        self.pages_lost = 0
        self.evict_ns = 0

    def take(self, count: int, owner: int, drains: "Drains | None" = None) -> "array[int]":
        """`count` OPEN pages for `owner`, or at their end some that are DRAINING to it, as many as `drains` allows.

        drains: None when the owner cannot wait.
        Raises `OutOfPages`, before anything has been dropped, when free and droppable pages do not suffice.
        """
        ledger = self._ledger
        if drains is not None:
            self._expect(count)
        short = count - ledger.free
        if short <= 0:
            return ledger.open(count, owner)
        if short > ledger.idle:
            raise self.out_of_pages(count, short - ledger.idle)
        begun_ns = time.perf_counter_ns()
        if self._traffic is None and ledger.slots is None:  # one call: a decode asks for one page
            pages = self._tree.evict(short)
            ledger.recycle(pages, owner)
            self.pages_lost += len(pages)
        else:
            pages = array("i")
            while (left := count - ledger.free - len(pages) - (drains.count if drains is not None else 0)) > 0:
                found = self._some(left, owner, drains)
                if found is None:
                    break
                pages.extend(found)
        self.evict_ns += time.perf_counter_ns() - begun_ns
        self.pages_evicted += len(pages)
        rest = count - len(pages)
        if drains is not None and drains.copies:
            self.pages_evicted += drains.count
            rest -= drains.count
        if rest:
            if rest > ledger.free:
                self._swap_twins(rest, owner)
            pages.extend(ledger.open(rest, owner))
        for copy in drains.copies if drains is not None else ():
            pages.extend(copy.promised)
        return pages

    def take_whole(self, count: int, rest: int, owner: int) -> "array[int]":
        """For an encoder output, whose bytes cannot wait: `count` OPEN pages, and a slot of `rest` bytes if any.

        Raises `OutOfPages`, before anything has been dropped, when free and droppable pages do not suffice.
        """
        ledger = self._ledger
        need = count + (ledger.slots.pages_for(rest, idle=True) if ledger.slots is not None else 0)
        if need > ledger.free + ledger.idle:
            raise self.out_of_pages(need, need - ledger.free - ledger.idle)
        self._expect(count)
        slot = array("i", (self._take_slot(rest, owner),) if rest else ())  # first: its page does not leave for others
        return array("i", sorted(self.take(count, owner))) + slot if count else slot

    def _take_slot(self, nbytes: int, owner: int) -> int:
        """An OPEN slot, in a page that has slots already or in one more; others leave one by one until it has room."""
        ledger = self._ledger
        while (slot := ledger.open_slot(nbytes, owner)) is None:
            found = self._some(1, owner, None)
            if found is None:
                self._swap_twins(1, owner)
                continue
            self.pages_evicted += len(found)
            ledger.release(found, owner)
        return slot

    def could_be_had(self, pages: "array[int]") -> bool:
        """Whether there is a page to be had once a request has released `pages`."""
        ledger = self._ledger
        return bool(ledger.free or ledger.idle or any(ledger.holders(page) == 1 for page in pages))

    def exclusive(self, pages: "array[int]") -> int:
        """How many of the pages of a live request no other one holds."""
        if self._traffic is not None:
            return self._traffic.copies.requests_holding(pages).count(1)
        return sum(self._ledger.holders(page) == 1 for page in pages)

    def out_of_pages(self, asked: int, short: int) -> OutOfPages:
        """The error with the numbers of now."""
        copying = 0 if self._traffic is None else len(self._traffic.copies.pages_held_alone())
        held = self._ledger.held - copying
        return OutOfPages(asked=asked, short=short, in_flight=copying, held=held, total=self._ledger.total)

    def _some(self, count: int, owner: int, drains: "Drains | None") -> "array[int] | None":
        """What cached pages leave for `owner`, `count` at most, or an output; None when none can."""
        if self._traffic is None:
            found = self._tree.evict(count)
            self.pages_lost += len(found) if self._ledger.slots is None else len(self._ledger.split(found)[0])
            return self._hand(found, count, owner) if found else None
        if self._tree.gpu.order.coldest() is None and not self._traffic.shed():
            return None
        return self._evict(count, owner, self._traffic, drains)

    def _hand(self, pages: "array[int]", count: int, owner: int) -> "array[int]":
        """Of pages that have left the tree, `count` or fewer become OPEN ones of `owner`; the rest is free."""
        if self._ledger.slots is not None:
            pages, slots = self._ledger.split(pages)
            self._ledger.drop(pages[count:] + slots)
            self.pages_evicted += len(pages[count:])
            del pages[count:]
        self._ledger.recycle(pages, owner)
        return pages

    # ------------------------------------------------------------------ two tiers

    def clean(self) -> None:
        """Has the coldest pages copied down ahead of need, while few are free.

        Requests that begin or end, and pages that leave, change which are the coldest: else there is nothing to do.
        """
        traffic = self._traffic
        if traffic is None or self._ledger.free >= self.ahead or not traffic.idle:
            return
        now = (self._admissions, len(self._leases), self.pages_evicted // max(1, self.window // CLEAN_PARTS))
        if now != self._clean_at and traffic.clean(self.window, self.ahead):
            self._clean_at = now

    def _expect(self, count: int) -> None:
        """An admission asks for `count` pages; others will ask for as many."""
        self._admissions += 1
        if self._tree.host is not None:
            self._asked.append(count)
            largest = min(max(self._asked), WINDOW_PAGES_MAX, self._tree.host.ledger.total // 4)
            self.ahead = max(self.window, largest)

    def _evict(self, count: int, owner: int, traffic: Traffic, drains: "Drains | None") -> "array[int]":
        """Up to `count` pages: OPEN ones, which it returns, and ones added to `drains`."""
        tree, order = self._tree, self._tree.gpu.order
        out = array("i")
        look_at = count  # the window is looked through when no more than so many pages are short
        down = traffic.copy_down("demote")
        fit = min(traffic.fit, drains.count_max - drains.count) if drains is not None else 0
        while count > 0:
            run = order.coldest()
            if run is None:
                break
            k = tree.leavable(run, count)
            if not k:
                order.shelve(run)
                continue
            clean = run.clean_tail(k)
            tails = [(run, clean)] if clean else []
            if not clean and count <= look_at:
                tails = self._clean_in_window(count)
                look_at = count - self.window // LOOKS_A_WINDOW
            for tail, clean in tails:
                pages = self._leave(tail, clean, owner, max(count, 0))
                out.extend(pages)
                count -= len(pages)
            if any(tail.whole for tail, _ in tails):
                break  # it may have freed pages
            if tails:
                continue
            if run.whole:
                if not down.gpu:
                    self._evict_whole(run, owner, traffic, drains, out, count, fit)
                break  # it has a copy of its own, and frees pages
            k = run.dirty_tail(len(run.pages), k)
            demoted = traffic.demote(down, run, k, fit - len(down.gpu)) if fit > len(down.gpu) else 0
            if not demoted:
                self.pages_lost += k
                out.extend(self._leave(run, k, owner, k))
            count -= demoted or k
        if down.gpu:
            self._hand_down(down, owner, traffic, out, drains)
        return out

    def _hand_down(self, down: Copy, owner: int, traffic: Traffic, out: "array[int]", drains: "Drains | None") -> None:
        """The pages that `down` is to copy are the owner's: when they are copied, or now if they will not be."""
        if drains is not None and traffic.hand_down(down, owner):
            drains.add(down)
            self.pages_demoted += len(down.gpu)
        else:
            self._ledger.recycle(down.gpu, owner)
            self.pages_lost += len(down.gpu)
            out.extend(down.gpu)

    def _evict_whole(
        self,
        run: Run,
        owner: int,
        traffic: Traffic,
        drains: "Drains | None",
        out: "array[int]",
        count: int,
        fit: int,
    ) -> None:
        """An output without a host copy leaves, and gives the owner `count` pages at most, now or when they are copied.

        It is copied down if what the copy holds meanwhile, its slot and pages that the owner does not want, can be
        spared.
        """
        if drains is not None and len(run.pages) <= fit:
            pages, slots = self._ledger.split(run.pages)
            given = min(count, drains.count_max - drains.count, len(pages))
            held = self._ledger.slots.idle_pages_of(slots) if self._ledger.slots is not None else 0
            spared = self._ledger.idle - len(pages) - held
            copy = traffic.demote_whole(run, given, owner) if count - given <= spared else None
            if copy is not None:
                drains.add(copy)
                self.pages_demoted += len(pages)
                self.pages_evicted += len(pages) - len(copy.promised)
                return
        self.pages_lost += len(self._ledger.split(run.pages)[0])
        out.extend(self._leave(run, len(run.pages), owner, count))

    def _leave(self, run: Run, count: int, owner: int, wanted: int) -> "array[int]":
        return self._hand(self._tree.leave(run, count), wanted, owner)

    def _clean_in_window(self, count: int) -> list[tuple[Run, int]]:
        """The idle tails with host copies in the window: their runs, and how many pages of each; `count` in all."""
        tree, order = self._tree, self._tree.gpu.order
        left, seen, found = self.window, [], list[tuple[Run, int]]()
        while left > 0 and count > 0 and (run := order.coldest()) is not None:
            order.shelve(run)
            seen.append(run)
            k = tree.leavable(run, left)
            left -= k
            clean = run.clean_tail(k if run.whole else min(k, count))
            if clean:
                found.append((run, clean))
                count -= clean
        for run in seen:
            order.offer(run)
        return found

    # ------------------------------------------------------------------ twins

    def _swap_twins(self, free_min: int, owner: int) -> None:
        """Frees idle pages that cannot leave since a live request's pages hang behind them, until `free_min` are free.

        Such a request has a private page of equal content for each (it lost the race to store it), so the index takes
        that one instead, and loses nothing.
        """
        ledger, tree = self._ledger, self._tree
        for lease in self._leases.values():
            if ledger.free >= free_min:
                return
            inside = next((page for page in reversed(lease.pages) if page in tree), None) if lease.twins else None
            place = None if inside is None else tree.place(inside)
            if place is None:
                continue
            for depth in [d for d in lease.twins if d < place.depth]:
                other, own = tree.page_at(place, depth), lease.pages[depth]
                if ledger.is_idle(other):
                    if lease.path == (other, ledger.generation(other)):
                        lease.path = (own, ledger.generation(own))
                    tree.replace(other, own)
                    lease.twins.remove(depth)
        if ledger.free < free_min:
            self._cut_closed(free_min, owner)
        if ledger.free < free_min:
            raise InvariantViolation(f"{free_min - ledger.free} idle pages can neither leave nor be replaced")

    def _cut_closed(self, free_min: int, owner: int) -> None:
        """Frees idle pages that cannot leave since leases with closed chains hold what hangs behind them.

        A window has slid past them, or a fork has others of equal content.  What hangs behind them leaves the index: it
        stays with its request, and the index would lose it with the ones before.
        """
        ledger = self._ledger
        for lease in [lease for lease in self._leases.values() if lease.closed]:
            while ledger.free < free_min and self._cut_behind_idle(lease):
                while ledger.free < free_min and (found := self._some(free_min - ledger.free, owner, None)):
                    self.pages_evicted += len(found)
                    ledger.release(found, owner)

    def _cut_behind_idle(self, lease: Lease) -> bool:
        """What hangs behind the last idle page before the lease's last one leaves the index; whether there is one.

        Who took that from the index has not got an idle page before it: only leases with closed chains, and such as
        have pages of their own for those that are idle, hold anything there.
        """
        tree = self._tree
        inside = next((page for page in reversed(lease.pages) if page in tree), None)
        place = tree.place(inside) if inside is not None else None
        if place is None:
            return False
        before = range(place.depth - 2, -1, -1)
        last = next((depth for depth in before if self._ledger.is_idle(tree.page_at(place, depth))), None)
        if last is None:
            return False
        run = place.run
        while run.start > last + 1:
            run = parent_of(run)
        tree.cut(run, last + 1)
        return True
