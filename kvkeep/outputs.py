"""Outputs: what encoders computed, in the tiers of a cache: found, made room for, stored, let go of.

Must not know tensors' values or who computes them: `encoder.py` does.  Takes the cache's lock itself.

    find --> Hold (found)                       release: that was a use, the output stays
    find --> None, reserve --> Hold (empty) --write the bytes, store--> Hold (found)

Pages, slots, copies, loads and their failures, eviction and reset are those of KV pages: a hold is a lease without
tokens, an output a run that goes as a whole.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from kvkeep.costs import Costs
from kvkeep.errors import BadInput, OutOfPages
from kvkeep.index.hints import Hint
from kvkeep.index.names import Identity
from kvkeep.index.output import Output, Shapes, Tensor, find_output, insert_output, outputs_in, shapes_of
from kvkeep.index.runs import Place, RunTree
from kvkeep.index.uses import NO_STAMP, Began, PathUse
from kvkeep.lease import Lease
from kvkeep.room import Room
from kvkeep.storing import Storing
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Traffic


class Hold(Lease):
    """One occurrence of an output in a live request; or room for one that is being computed.

    pages: where its bytes are, in order; what does not fill a page is in a slot, which comes last.
    output: which one; None while it is not stored.   from_host: its bytes were in host memory only.
    Not to be read while `read_in_progress`; `revoked` when they did not arrive: ask again.
    """

    __slots__ = ("from_host", "output")

    def __init__(self, number: int, identity: Identity, pages: "array[int]", output: Output | None) -> None:
        super().__init__(number, identity, pages, 0, 0, bytearray(), 0, 0)
        self.output = output
        self.from_host = False

    def __repr__(self) -> str:
        return f"Hold {self.number}"


@dataclass(frozen=True, slots=True)
class OutputStats:
    """Counts since the start, but for the last six, which are of now.

    gpu_hits, host_hits: found on the GPU, or in host memory only.   misses: not found.
    mismatches: found, with other shapes or dtypes than expected: a miss.   stored: entered the cache.
    refused: not stored, or not loaded, since there was no room.
    outputs, nbytes: cached on the GPU.   host_outputs: in host memory.   held: occurrences in live requests.
    slotted_pages: pages of the GPU pool with slots.   whole_pages: those that one output fills.
    """

    gpu_hits: int
    host_hits: int
    misses: int
    mismatches: int
    stored: int
    refused: int
    outputs: int
    nbytes: int
    host_outputs: int
    held: int
    slotted_pages: int
    whole_pages: int


class Outputs:
    """The encoder outputs of one cache.

    lock, tree, room, traffic, leases, storing: the cache's.   numbers: of leases.   end: ends a lease, under the lock.
    costs: what computing KV takes.   page_nbytes: bytes of a page, in both tiers.
    """

    def __init__(
        self,
        lock: Lock,
        tree: RunTree,
        room: Room,
        traffic: Traffic | None,
        leases: dict[int, Lease],
        numbers: Iterator[int],
        end: Callable[[Lease], None],
        storing: Storing,
        costs: Costs,
        page_nbytes: int,
    ) -> None:
        self._lock = lock
        self._tree = tree
        self._ledger: Ledger = tree.gpu.ledger
        self._room = room
        self._traffic = traffic
        self._leases = leases
        self._numbers = numbers
        self._end = end
        self._storing = storing
        self._costs = costs
        self._slots = self._ledger.allow_slots(page_nbytes)
        if tree.host is not None:
            tree.host.ledger.allow_slots(page_nbytes)
        self._uses = tree.gpu.order.uses
        self._gpu_hits = self._host_hits = self._misses = self._mismatches = self._stored = self._refused = 0

    # ------------------------------------------------------------------ the life of an occurrence

    def find(
        self, identity: Identity, record: bytes, expect: Shapes | None = None, counted: bool = True
    ) -> Hold | None:
        """Holds an output once more; None, and it is to be computed, when it is not there as expected.

        counted: whether a miss counts as one: not when somebody looks a second time.
        """
        with self._lock:
            run = find_output(self._tree, identity, record)
            if run is None:
                self._misses += counted
                return None
            if expect is not None and expect != shapes_of(run.tensors):
                self._mismatches += counted
                return None
            number = next(self._numbers)
            hold = Hold(number, identity, run.pages[:], run) if run.pages else self._load(run, identity, number)
            if hold is None:
                self._misses += counted
                return None
            if not hold.from_host:
                self._ledger.retain(hold.pages, number)
            self._held(hold, run)
            self._host_hits += hold.from_host
            self._gpu_hits += not hold.from_host
            if self._traffic is not None:
                self._traffic.join(hold.pages, hold)
        if hold.copies and self._traffic is not None:
            self._traffic.copies.manager.start()
        return hold

    @property
    def epoch(self) -> int:
        """How often the cache was reset."""
        return self._storing.epoch

    def reserve(self, identity: Identity, nbytes: int, epoch: int | None = None) -> Hold:
        """Room for an output of `nbytes` bytes, to be written, and then stored or released.  Raises `OutOfPages`.

        epoch: when its computation began; None: now.  If the cache is reset after that, the output is not stored.
        """
        self.check_size(nbytes)
        with self._lock:
            number = next(self._numbers)
            try:
                pages = self._take(nbytes, number)
            except OutOfPages:
                self._refused += 1
                raise
            hold = Hold(number, identity, pages, None)
            hold.epoch = self.epoch if epoch is None else epoch
            self._leases[number] = hold
        return hold

    def store(self, hold: Hold, record: bytes, tensors: tuple[Tensor, ...], seconds: float) -> None:
        """The bytes of a reserved hold are written: from now on they are found.

        seconds: what computing them took: what keeping them saves.  Where another has stored the same record
        meanwhile, that one stays, and these bytes are this hold's alone; so they are after a reset.
        """
        with self._lock:
            self._ledger.seal(hold.pages, hold.number)
            if hold.epoch != self.epoch:
                return
            run = find_output(self._tree, hold.identity, record)
            if run is not None and (run.pages or run.tensors != tensors):
                return
            if run is None:
                run = insert_output(self._tree, hold.identity, record, tensors, hold.pages)
            else:  # it is in host memory, or on its way there
                self._tree.attach(run, hold.pages)
                self._tree.doubles.add((run,))
                self._tree.touch(Place(run, run.end))
            run.seconds = seconds
            self._stored += 1
            self._held(hold, run)

    def release(self, hold: Hold) -> None:
        """The occurrence ends; when it was the last one, that was a use of the output.  Nothing for a revoked one."""
        with self._lock:
            if hold.live and not hold.revoked:
                self._end(hold)
                if hold.output is not None:
                    hold.output.holds -= 1
                    if not hold.output.holds:
                        self._used(hold.output)

    def hint(self, identity: Identity, record: bytes, hint: Hint) -> None:
        """What the caller knows of the next use of an output; for orders that learn, not for LRU."""
        with self._lock:
            run = find_output(self._tree, identity, record)
            if run is None or self._uses is None:
                return
            if run.use is None:
                run.hint = hint  # it is held: for when it is let go of
            else:
                self._uses.hint(run.use, hint)

    def forget(self, identity: Identity, record: bytes) -> bool:
        """An output leaves both tiers, if nobody holds it; whether it did."""
        with self._lock:
            run = find_output(self._tree, identity, record)
            if run is None or run.holds:
                return False
            self._tree.cut(run, 0)
            return True

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self._slots.page_nbytes

    def parts(self, pages: "array[int]", where: Tensor) -> list[tuple[int, int, int]]:
        """Where a tensor's bytes are, in order: page, offset in it, how many.   pages: of a hold."""
        out, page_nbytes, first = [], self._slots.page_nbytes, where.offset
        while first < where.offset + where.nbytes:
            number, at = divmod(first, page_nbytes)
            count = min(page_nbytes - at, where.offset + where.nbytes - first)
            if pages[number] < self._ledger.total:
                out.append((pages[number], at, count))
            else:
                place = self._slots.place(pages[number])
                out.append((place.page, place.offset + at, count))
            first += count
        return out

    def check_size(self, nbytes: int) -> None:
        """Raises `BadInput` for an output that no pool like this could hold."""
        pages, rest = self._slots.cut(nbytes)
        if pages + bool(rest) > self._ledger.total:
            raise BadInput(
                f"an output of {nbytes} bytes takes {pages + bool(rest)} pages of {self._slots.page_nbytes} bytes, "
                f"the pool has {self._ledger.total}"
            )

    def stats(self) -> OutputStats:
        """The counters.  O(outputs and roots)."""
        with self._lock:
            there = outputs_in(self._tree)
            gpu = [run for run in there if run.pages]
            return OutputStats(
                self._gpu_hits, self._host_hits, self._misses, self._mismatches, self._stored, self._refused,
                outputs=len(gpu), nbytes=sum(run.nbytes for run in gpu),
                host_outputs=sum(run.host is not None for run in there), held=sum(run.holds for run in there),
                slotted_pages=len(self._slots.pages),
                whole_pages=sum(page < self._ledger.total for run in gpu for page in run.pages),
            )  # fmt: skip

    # ------------------------------------------------------------------ inside

    def _held(self, hold: Hold, run: Output) -> None:
        hold.output = run
        self._leases[hold.number] = hold
        run.holds += 1
        if run.holds == 1 and self._uses is not None:
            run.began = Began(self._uses.now(), self._tree.stamp(Place(run, run.end)) if run.use else NO_STAMP, 0)

    def _used(self, run: Output) -> None:
        """Its last holder has left: it is stamped, and an order that learns is told."""
        if not run.names:  # forgotten meanwhile
            return
        place = Place(run, run.end)
        self._tree.touch(place)
        self._tree.offer_run(run)
        if self._uses is None or run.began is None:
            return
        again = run.use is not None
        path = PathUse(
            self._tree.stamp(place), run, run.end, run.end if again else 0, run.key, run.names, run.began, 0,
            self._costs.worth(run.seconds, run.nbytes, self.page_nbytes),
        )  # fmt: skip
        run.use = self._uses.used(path)
        if run.hint is not None:
            self._uses.hint(run.use, run.hint)

    def _take(self, nbytes: int, owner: int) -> "array[int]":
        """OPEN pages and a slot for `nbytes` bytes, all or nothing; consecutive pages where they are free."""
        pages = self._room.take_whole(*self._slots.cut(nbytes), owner)
        self._tree.gpu.fit()
        return pages

    def _load(self, run: Output, identity: Identity, number: int) -> Hold | None:
        """Starts to bring an output up from host memory; None when it is not there whole, or there is no room."""
        traffic, host = self._traffic, run.host
        if traffic is None or host is None or not traffic.worth_loading(host, run.seconds):
            return None
        copy = traffic.begin_load(host[:])
        try:
            pages = self._take(run.nbytes, number)
        except OutOfPages:
            traffic.cancel_load(copy)
            self._refused += 1
            return None
        if not traffic.load(copy, pages, [], 0):
            self._ledger.release(pages, number)
            self._refused += 1
            return None
        hold = Hold(number, identity, pages, run)
        hold.from_host = True
        return hold
