"""The leases of one cache as asyncio tasks hold them, and the desk where those without pages wait.

Must not know other caches, or when copies are looked at: the service says so.  One thread, that of the event loop.

    LeaseHandle    waiting for room --pages--> waiting for copies --they are over--> readable --> ended
                         ^                          |
                         +---- revoked, once -------+      a second time it ends with `LeaseRevoked`
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvkeep.cache import TieredCache
from kvkeep.copies import Suspended
from kvkeep.counting import Waits
from kvkeep.errors import InvariantViolation, KvkeepError, LeaseEnded, LeaseRevoked, NotReady, OutOfPages, ServiceClosed
from kvkeep.index.hints import Hint
from kvkeep.index.names import TokenIds
from kvkeep.lease import Lease
from kvkeep.telemetry.snapshot import WaitingStats


class LeaseHandle:
    """What `KVCacheService.admit` gives: a lease that may have to be waited for.

    Before `ready` has returned there is nothing to do with it but `abort`: other calls raise `NotReady`.  A load that
    fails may revoke a lease.  The handle then asks again by itself, before all that wait for room, once; the second
    time it has ended, and says `LeaseRevoked`.  So `pages` and `matched_len` are settled when `ready` returns, not
    before.  `async with` aborts it unless it has ended.

    ended: why it has ended; None while it has not.   refusal: why it waits for room, if it has asked.
    since: when it began to wait.   again: how often it may still be admitted again.
    """

    def __init__(self, desk: "Desk", ask: Callable[[], Lease], again: int) -> None:
        self.ended: KvkeepError | None = None
        self.refusal: KvkeepError | None = None
        self.again = again
        self.since = time.perf_counter()
        self._desk = desk
        self._ask = ask
        self._lease: Lease | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def ready(self, stream: object = None) -> None:
        """Returns when every page may be read and written.

        stream: where the caller launches its forwards (a `torch.cuda.Stream`): copies that only read the pages are
            not waited for, since the stream comes after them.
        Raises `LeaseRevoked`, or another `LeaseEnded`.  A task that is cancelled here leaves the lease as it is.
        """
        await self._until(lambda: self._readable_on(stream))

    async def wait_for_pages(self) -> None:
        """Returns when it is `admitted`."""
        await self._until(lambda: self.admitted)

    # ------------------------------------------------------------------ questions

    @property
    def admitted(self) -> bool:
        """Whether it has pages, which copies may still be writing."""
        return self._lease is not None

    @property
    def waits_for_copies(self) -> bool:
        """Whether it has pages and must not use them yet."""
        return self._lease is not None and self._lease.read_in_progress

    @property
    def readable(self) -> bool:
        """Whether `ready` would return at once."""
        lease = self._lease
        return lease is not None and not lease.read_in_progress and not lease.revoked

    @property
    def lease(self) -> Lease:
        """The lease itself; raises `NotReady` before it is readable, and what it ended with afterwards."""
        self._desk.check()
        if self.ended is not None:
            raise self.ended.with_traceback(None)
        if self._lease is None or not self.readable:
            raise NotReady(f"{self}: await ready() first")
        return self._lease

    @property
    def pages(self) -> "array[int]":
        """Page ids; position p lies in `pages[p // page_size]`."""
        return self.lease.pages

    @property
    def matched_len(self) -> int:
        """Positions taken from the cache: the prefill begins there."""
        return self.lease.matched_len

    @property
    def length(self) -> int:
        """Token ids known."""
        return self.lease.length

    # ------------------------------------------------------------------ quick calls; see TieredCache

    def extend(self, tokens: TokenIds = (), room: int = 0) -> None:
        """Appends sampled ids and makes sure of pages; raises `OutOfPages`: suspend or finish a request then."""
        lease = self.lease
        before = len(lease.pages)
        self._desk.cache.extend(lease, tokens, room)
        if len(lease.pages) > before:
            self._desk.wake()  # fewer pages are free: time to copy cold ones down

    def seal(self, kv_len: int) -> None:
        """The first `kv_len` positions hold committed KV."""
        self._desk.cache.seal(self.lease, kv_len)

    def truncate(self, length: int) -> None:
        """Rolls back to the first `length` tokens."""
        self._desk.cache.truncate(self.lease, length)
        self._desk.room_was_made()

    def protect_prefix(self, length: int) -> None:
        """The first `length` tokens stay, and only they are stored; what is behind them may be released."""
        self._desk.cache.protect_prefix(self.lease, length)

    def release_oldest(self, pages: int) -> None:
        """Lets go of the oldest `pages` sealed pages behind the protected prefix; `lease.prefix_epoch` rises."""
        self._desk.cache.release_oldest(self.lease, pages)
        self._desk.room_was_made()

    def finish(self, kv_len: int, hint: Hint | None = None) -> None:
        """Ends the request and stores what it computed.   hint: what is known of the chain's future."""
        self._desk.cache.finish(self.lease, kv_len, hint)
        self.end(LeaseEnded(f"{self} was finished"))

    def suspend(self, kv_len: int, *, complete: bool = False) -> Suspended:
        """Ends the lease for now: `KVCacheService.resume` takes the ticket.  Raises `CannotSuspend`."""
        ticket = self._desk.cache.suspend(self.lease, kv_len, complete=complete)
        self.end(LeaseEnded(f"{self} was suspended"))
        return ticket

    def abort(self) -> None:
        """Ends the request, whatever it waits for, and stores nothing more; does nothing when it has ended."""
        self.end(LeaseEnded(f"{self} was aborted"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    # ------------------------------------------------------------------ the desk's side

    def ask(self) -> bool:
        """Asks for pages; False when there is no room now."""
        try:
            lease = self._ask()
        except (OutOfPages, NotReady) as refusal:
            self.refusal = refusal
            return False
        self._lease = lease
        self.refusal = None
        self.moved()
        return True

    def let_go(self) -> None:
        """Its lease has ended without it; it waits for another one from now on."""
        self._lease = None
        self.since = time.perf_counter()

    def end(self, why: KvkeepError) -> None:
        """It has ended, and holds nothing any more."""
        if self.ended is not None:
            return
        self.ended = why
        lease, self._lease = self._lease, None
        try:
            if lease is not None and lease.live:
                self._desk.cache.abort(lease)
        finally:
            self.moved()
            self._desk.leave(self)

    def moved(self) -> None:
        """Those who wait look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _readable_on(self, stream: object) -> bool:
        if self._lease is not None:
            self._lease.gate.wait_on(stream)
        return self.readable

    async def _until(self, reached: Callable[[], bool]) -> None:
        while True:
            self._desk.check()
            if self.ended is not None:
                raise self.ended.with_traceback(None)
            if reached():
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                self._waiting.remove(future)

    def __repr__(self) -> str:
        return f"LeaseHandle({self._lease})" if self._lease is not None else "LeaseHandle(without pages)"


class Desk:
    """One cache: the handles it has, and the queue of those without pages, served strictly in order.

    wake: copies may have begun.   left: a handle has ended.   broken: something of ours has failed.
    given_up: handles that were cancelled, or out of time, before they had pages.
    """

    def __init__(
        self,
        cache: TieredCache,
        wake: Callable[[], None],
        left: Callable[[], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.cache = cache
        self.wake = wake
        self.handles: set[LeaseHandle] = set()
        self.given_up = 0
        self.failure: BaseException | None = None
        self._left = left
        self._broken = broken
        self._queue: OrderedDict[LeaseHandle, None] = OrderedDict()
        self._loading: set[LeaseHandle] = set()
        self._serving = False
        self._closed: KvkeepError | None = None
        self._wait = Waits()
        self._readmitted = self._revoked = 0

    def check(self) -> None:
        """Raises when something of ours has failed: nothing can be relied on then."""
        if self.failure is not None:
            raise stopped(self.failure) from self.failure

    @property
    def busy(self) -> bool:
        """Whether `poll` may soon have something to say."""
        transfers = self.cache.transfers
        return bool(self._loading) or (transfers is not None and transfers.busy)

    def stats(self) -> WaitingStats:
        """Who waits, and has waited."""
        return WaitingStats(
            leases=len(self.handles),
            waiting=len(self._queue),
            loading=len(self._loading),
            wait=self._wait.histogram(),
            given_up=self.given_up,
            readmitted=self._readmitted,
            revoked=self._revoked,
        )

    # ------------------------------------------------------------------ coming and going

    def enter(self, handle: LeaseHandle) -> None:
        """Gives `handle` pages, or a place at the end of the queue.  Raises what its cache raises for bad input."""
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if self._queue or not handle.ask():
            self._queue[handle] = None
        else:
            self._wait.none()
            self._watch(handle)
        self.handles.add(handle)

    def leave(self, handle: LeaseHandle) -> None:
        """`handle` has ended."""
        self.handles.discard(handle)
        self._loading.discard(handle)
        self._queue.pop(handle, None)
        self._left()
        self.room_was_made()

    def room_was_made(self) -> None:
        """There may be room for the first of the queue."""
        self.wake()
        self._serve()

    def poll(self) -> int:
        """Applies copies that are over, and what follows for those who wait; returns how many."""
        done = self.cache.poll()
        revoked = []
        for handle in [handle for handle in self._loading if not handle.waits_for_copies]:
            self._loading.discard(handle)
            if handle.readable:
                handle.moved()
            else:
                revoked.append(handle)
        for handle in sorted(revoked, key=lambda handle: handle.since, reverse=True):
            self._again(handle)
        if done or revoked:
            self._serve()
        return done

    # ------------------------------------------------------------------ the end

    def turn_away(self, why: KvkeepError) -> None:
        """Nobody waits for room from now on."""
        self._closed = why
        for handle in list(self._queue):
            handle.end(why)

    def end_all(self, why: KvkeepError) -> None:
        """Every lease ends."""
        self._closed = why
        for handle in list(self.handles):
            handle.end(why)

    def fail(self, failure: BaseException) -> None:
        """Everybody who waits is told, and so is everybody who asks from now on."""
        self.failure = failure
        for handle in list(self.handles):
            handle.moved()

    # ------------------------------------------------------------------ inside

    def _serve(self) -> None:
        """Gives pages to the first of the queue, and so on, until one finds no room."""
        if self._serving or self._closed is not None or self.failure is not None:
            return
        self._serving = True
        try:
            while self._queue:
                handle = next(iter(self._queue))
                try:
                    if not handle.ask():
                        return
                except KvkeepError as error:
                    handle.end(error)
                    continue
                del self._queue[handle]
                self._wait.add(time.perf_counter() - handle.since)
                self._watch(handle)
        except Exception as error:
            self._broken(error)
            raise
        finally:
            self._serving = False

    def _watch(self, handle: LeaseHandle) -> None:
        """It has pages; copies may have begun for it."""
        if not handle.readable:
            self._loading.add(handle)
        self.wake()

    def _again(self, handle: LeaseHandle) -> None:
        """It has lost its pages, since a copy failed: it goes before all that wait, if it may ask once more."""
        if self._closed is not None:
            handle.end(self._closed)
        elif not handle.again:
            self._revoked += 1
            handle.end(LeaseRevoked(f"{handle}: its pages did not arrive"))
        else:
            handle.again -= 1
            self._readmitted += 1
            handle.let_go()
            self._queue[handle] = None
            self._queue.move_to_end(handle, last=False)


def stopped(failure: BaseException) -> Exception:
    """What to raise from everything that a service is asked after `failure`."""
    if isinstance(failure, ServiceClosed):
        return ServiceClosed(str(failure))
    return InvariantViolation(f"the service has stopped: {type(failure).__name__}: {failure}")
