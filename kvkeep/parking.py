"""Parking: the host pages set aside for preempted requests, and the copies into and out of them.

Must not know cached pages: neither takes the other's place.  Its callers hold the cache's lock.
"""

from array import array

from kvkeep.copies import Copies, Copy, Suspended
from kvkeep.errors import BadInput
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger


class Parking:
    """ledger: who owns the pages set aside; in the host pool their ids begin at `first`.

    gpu: the ledger of the GPU pool.   copies: those of the cache.   suspended: the requests that wait here.
    """

    def __init__(self, ledger: Ledger, first: int, gpu: Ledger, copies: Copies) -> None:
        self.ledger = ledger
        self.suspended: set[Suspended] = set()
        self._first = first
        self._gpu = gpu
        self._copies = copies

    def suspend(self, ticket: Suspended, gpu: "array[int]") -> bool:
        """Starts to copy pages, in the order of `ticket.slots`, into suspension pages; False when that is refused.

        The caller seals those that are OPEN, and then lets the copy hold them (`hold_sources`).
        """
        if len(gpu) > self.ledger.free:
            return False
        copy = Copy("suspend", gpu, array("i"), self.ledger, self._first, ticket)
        copy.host = self.ledger.open(len(gpu), copy)
        if not self._copies.submit(copy):
            self.ledger.release(copy.host, copy)
            return False
        self.ledger.load(copy.host)
        self.ledger.retain(copy.host, ticket)
        ticket.slots = dict(zip(ticket.slots, copy.host, strict=True))
        self.suspended.add(ticket)
        return True

    def refusal(self, pages: int) -> str:
        """Why so many pages cannot be suspended now."""
        if pages > self.ledger.free:
            return f"needs {pages} pages for preempted requests, {self.ledger.free} are free"
        return f"needs a copy of {pages} pages, and beside those that run {self._copies.manager.store_pages} fit"

    def hold_sources(self, ticket: Suspended) -> None:
        """The copy that suspends a request becomes an owner of its sources, before the lease lets go of them."""
        for copy in self._copies:
            if copy.ticket is ticket:
                self._gpu.retain(copy.gpu, copy)

    def resume(self, ticket: Suspended, slots: "array[int]", gpu: "array[int]", lease: Lease) -> bool:
        """Brings suspension pages back into pages of `lease`, OPEN or DRAINING to it; False when that is refused."""
        copy = Copy("resume", gpu, slots, self.ledger, self._first, ticket)
        targets = set(gpu)
        readers = [other for other in lease.copies if other.cause == "demote" and not targets.isdisjoint(other.gpu)]
        if readers:
            self._copies.defer(copy, readers)
        elif not self._copies.submit(copy):
            return False
        self._gpu.load(gpu)
        self._gpu.retain(gpu, copy)
        self.ledger.retain(slots, copy)
        self._copies.wait(lease, copy)
        return True

    def check(self, ticket: Suspended) -> None:
        """Raises `BadInput` for a live ticket whose pages are not here: their ids mean other pages in its own cache."""
        if ticket.live and ticket.slots and ticket not in self.suspended:
            raise BadInput(f"{ticket} is of another cache: it must be resumed, or discarded, where it was suspended")

    def forget(self, ticket: Suspended) -> None:
        """The ticket lets go of its pages: it was resumed, or will never be."""
        ticket.live = False
        if ticket in self.suspended:
            self.suspended.remove(ticket)
            self.ledger.release(array("i", ticket.slots.values()), ticket)

    def over(self, copy: Copy, ok: bool) -> None:
        """A copy of a suspended request is over, or will not be made."""
        assert copy.ticket is not None
        if copy.cause == "suspend":
            copy.ticket.ready, copy.ticket.lost = True, not ok
            self.ledger.land(copy.host, copy)  # a lost ticket's pages are never read
            self._gpu.release(copy.gpu, copy)
            return
        for lease in list(copy.leases) if not ok else ():
            self._copies.revoke(lease)
        self._copies.let_go(copy)
        self._copies.give_back(copy)
        self.ledger.release(copy.host, copy)
