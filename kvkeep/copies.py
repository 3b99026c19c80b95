"""Copies on their way: what each moves, who waits for it, and when it may start.

Must not know prompts, what a page is called, or what follows when a copy ends.  Its callers hold the cache's lock.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger, page_ids
from kvkeep.transfer.backend import NO_WAIT, After, Job
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan, SlotCopy


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
        self.store = lease.store
        self.epoch = lease.epoch
        self.ready = not slots
        self.lost = False
        self.live = True

    def __repr__(self) -> str:
        return f"Suspended({self.kv_len} positions, {len(self.slots)} pages)"


class Copy:
    """Pages on their way: `gpu[i]` and `host[i]` hold, or will hold, the same bytes.

    owners: the ledger of the `host` pages; in the host pool their ids begin at `first`.
    promised: those of its pages that drain to an heir.
    ticket: the suspended request whose pages they are, if they are one's.
    leases: who waits for it.   after: copies that still read its targets: it starts when they are over.
    """

    __slots__ = ("after", "cause", "first", "gpu", "host", "job", "leases", "owners", "promised", "ticket")

    def __init__(
        self,
        cause: Cause,
        gpu: "array[int]",
        host: "array[int]",
        owners: Ledger,
        first: int = 0,
        ticket: Suspended | None = None,
    ) -> None:
        self.cause = cause
        self.gpu = gpu
        self.host = host
        self.owners = owners
        self.first = first
        self.ticket = ticket
        self.promised = array("i")
        self.job: Job | None = None
        self.leases: list[Lease] = []
        self.after: set[Copy] = set()

    def __repr__(self) -> str:
        return f"Copy({self.cause}, {len(self.gpu)} pages)"


class Copies:
    """The copies of one cache that wait or run.

    gpu: the ledger of the GPU pool.   manager: makes the copies.   end: ends a lease; given by the cache.
    fence: what copies made from now on come after.
    """

    def __init__(self, gpu: Ledger, manager: TransferManager, end: Callable[[Lease], None]) -> None:
        self.fence: After = NO_WAIT
        self.manager = manager
        self._gpu = gpu
        self._end = end
        self._of: dict[Job, Copy] = {}
        self._deferred: dict[Copy, None] = {}
        self._behind: dict[Copy, list[Copy]] = {}  # deferred copies, by each that they come after

    def __iter__(self) -> Iterator[Copy]:
        yield from self._of.values()
        yield from self._deferred

    # ------------------------------------------------------------------ beginning and end

    def submit(self, copy: Copy) -> bool:
        """Hands a copy to the manager; False when that refuses it."""
        up = DIRECTION_OF[copy.cause] == "h2d"
        gpu, host = copy.gpu, copy.host
        slots: tuple[SlotCopy, ...] = ()
        if self._gpu.slots is not None and copy.owners.slots is not None:
            gpu, gpu_slots = self._gpu.split(gpu)
            host, host_slots = copy.owners.split(host)
            slots = tuple(self._slot_copy(copy, up, *pair) for pair in zip(gpu_slots, host_slots, strict=True))
        elif copy.first:
            host = array("i", (p + copy.first for p in host))
        above, below = self._gpu.generations(gpu), copy.owners.generations(copy.host[: len(host)])
        plan = Plan(
            direction=DIRECTION_OF[copy.cause],
            cause=copy.cause,
            sources=host if up else gpu,
            targets=gpu if up else host,
            source_generations=below if up else above,
            target_generations=above if up else below,
            slots=slots,
        )
        copy.job = self.manager.submit(plan, after=self.fence)
        if copy.job is None:
            return False
        self._of[copy.job] = copy
        return True

    def _slot_copy(self, copy: Copy, up: bool, gpu: int, host: int) -> SlotCopy:
        above, below = self._gpu.place(gpu), copy.owners.place(host)
        source, target = (below, above) if up else (above, below)
        return SlotCopy(source.page, source.offset, target.page, target.offset, source.nbytes)

    def defer(self, copy: Copy, after: Iterable[Copy]) -> None:
        """The copy is to be submitted when those in `after`, which read its targets, are over."""
        copy.after = set(after)
        self._deferred[copy] = None
        for other in copy.after:
            self._behind.setdefault(other, []).append(copy)

    def start_deferred(self) -> list[Copy]:
        """Submits copies whose targets nobody reads any more; returns those that will never be made.

        One that finds the queue full is tried again.
        """
        lost = []
        for copy in [copy for copy in self._deferred if not copy.after]:
            if self.submit(copy):
                del self._deferred[copy]
            elif self.manager.ended:
                del self._deferred[copy]
                lost.append(copy)
        return lost

    def of(self, job: Job) -> Copy:
        """What a job copies."""
        return self._of[job]

    def over(self, copy: Copy) -> None:
        """No byte of it moves any more."""
        assert copy.job is not None
        del self._of[copy.job]
        for other in self._behind.pop(copy, ()):
            other.after.discard(copy)

    def take_back(self, copy: Copy) -> bool:
        """A copy that has not started is not made; False when it has."""
        if copy in self._deferred:
            del self._deferred[copy]
            return True
        if copy.job is None or not self.manager.revoke(copy.job):
            return False
        del self._of[copy.job]
        return True

    def give_back(self, copy: Copy) -> None:
        """The targets of a copy up that was not made, or failed: their request's, or still those of who reads them."""
        read = {page for other in copy.after for page in other.gpu}
        self._gpu.unload(array("i", (page for page in copy.gpu if page in read)), copy)
        self._gpu.hand_over(array("i", (page for page in copy.gpu if page not in read)), copy)

    # ------------------------------------------------------------------ who waits

    def wait(self, lease: Lease, copy: Copy) -> None:
        """`lease` must not touch its pages before `copy` is over."""
        copy.leases.append(lease)
        lease.copies.add(copy)

    def leave(self, lease: Lease) -> list[Copy]:
        """`lease` waits no more; returns the copies that nobody waits for now."""
        copies, lease.copies = lease.copies, set()
        for copy in copies:
            copy.leases.remove(lease)
        return [copy for copy in copies if not copy.leases]

    def order(self, lease: Lease, stream: object) -> None:
        """What is queued on `stream` from now on comes after the copies out of the lease's pages: it waits for none."""
        for copy in [copy for copy in lease.copies if copy.cause == "demote"]:
            if self.manager.order_after(copy.job, stream):
                self._gpu.follow(self._gpu.draining(copy.gpu)[0])
                self.let_go(copy)

    def let_go(self, copy: Copy) -> None:
        """Nobody waits for `copy` any more."""
        for lease in copy.leases:
            lease.copies.discard(copy)
        copy.leases.clear()

    def revoke(self, lease: Lease) -> None:
        """What `lease` waited for does not come: it ends, and is to be admitted again."""
        lease.revoked = True
        self._end(lease)

    # ------------------------------------------------------------------ what copies hold

    def pages_held_alone(self) -> set[int]:
        """GPU pages that copies hold and no request does, those with slots too of which that is so."""
        held = Counter(chain.from_iterable(copy.gpu for copy in self))
        alone = page_ids(page for page, count in held.items() if self._gpu.holders(page) == count)
        pages, slots = self._gpu.split(alone)
        return {*pages, *(self._gpu.slots.pages_busy_with(slots) if self._gpu.slots is not None else ())}

    def requests_holding(self, pages: "array[int]") -> list[int]:
        """How many live requests hold each of these GPU pages: its holders, but for copies."""
        holders = [self._gpu.holders(page) for page in pages]
        if max(holders, default=0) < 2:
            return holders
        copying = Counter(chain.from_iterable(copy.gpu for copy in self))
        return [count - copying[page] for page, count in zip(pages, holders, strict=True)]
