"""KVCacheService: the asyncio face over many caches.

Must not know models, or what a page holds.  Everything here runs in the thread of one event loop.

    async with KVCacheService() as service:
        service.add(CacheKey("node-1"), cache)
        async with await service.admit(CacheKey("node-1"), tokens) as lease:    waits for room, first come first served
            await lease.ready()                                                 waits for its copies
            ... prefill from lease.matched_len on, lease.extend(...), lease.seal(...)
            lease.finish(kv_len)

One task polls every cache while a copy is under way, and sleeps otherwise.  A cache that was added is used through the
service only: room that somebody else makes in it is not noticed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from kvkeep.cache import TieredCache
from kvkeep.copies import Suspended
from kvkeep.errors import BadInput, InvariantViolation, NoRoomInTime, ServiceClosed
from kvkeep.handles import Desk, LeaseHandle, stopped
from kvkeep.index.media import MediaItem
from kvkeep.index.names import TokenIds, as_int32
from kvkeep.lease import Lease
from kvkeep.telemetry.snapshot import CacheKey, CacheSnapshot

log = logging.getLogger(__name__)

#: How long the poller lets copies run before it asks again: this part of the time since something last ended, so that
#: nobody waits longer by more than it, and a copy that hangs costs little.  At most so many seconds.
POLL_SHARE, POLL_S_MAX = 0.05, 0.05


class KVCacheService:
    """Many caches, and those who wait for them.

    poll_s: seconds between two looks at copies that are under way, at least.
    """

    def __init__(self, *, poll_s: float = 0.001) -> None:
        if not poll_s >= 0:
            raise BadInput(f"poll_s is {poll_s!r}: it must be a number of seconds, 0 or more")
        self._poll_s = poll_s
        self._desks: dict[CacheKey, Desk] = {}
        self._work = asyncio.Event()  # copies may have begun
        self._left = asyncio.Event()  # a lease has ended
        self._poller: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._poller is not None:
            raise InvariantViolation("the service was entered before: make another one")
        self._poller = asyncio.create_task(self._poll_forever(), name="kvkeep poller")
        self._poller.add_done_callback(self._poller_ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)

    # ------------------------------------------------------------------ caches

    def add(self, key: CacheKey, cache: TieredCache) -> None:
        """Takes a cache into service.  It is closed with the service."""
        self._check_open()
        if key in self._desks:
            raise BadInput(f"there is a cache for {key} already")
        self._desks[key] = Desk(cache, self._work.set, self._left.set, self._fail)
        self._work.set()

    def snapshot(self) -> list[CacheSnapshot]:
        """The counters of every cache.  May be called from any thread."""
        out = []
        for key, desk in list(self._desks.items()):
            transfers = desk.cache.transfers
            copies = transfers.stats() if transfers is not None else None
            misses, ghosts = desk.cache.misses(), desk.cache.ghosts()
            outputs = desk.cache.output_stats()
            out.append(CacheSnapshot(key, desk.cache.stats(), copies, desk.stats(), misses, ghosts, outputs))
        return out

    # ------------------------------------------------------------------ requests

    async def admit(
        self,
        key: CacheKey,
        tokens: TokenIds,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        label: bytes = b"",
        media: Sequence[MediaItem] = (),
        reuse: bool = True,
        store: bool = True,
        timeout_s: float | None = None,
    ) -> LeaseHandle:
        """Admits a prompt, see `TieredCache.admit`; waits while there is no room, first come first served.

        Raises `NoRoomInTime` after `timeout_s`, `ServiceClosed`, and `BadInput` for what could never be admitted.
        A task that is cancelled here leaves nothing behind.  `tokens` and `media` may be used again afterwards.
        """
        desk = self._desk(key)
        ask = partial(
            desk.cache.admit, as_int32(tokens).copy(), salt=salt, adapter=adapter, label=label, media=tuple(media),
            reuse=reuse, store=store,
        )  # fmt: skip
        return await self._enter(desk, ask, timeout_s)

    async def resume(
        self, key: CacheKey, ticket: Suspended, tokens: TokenIds, *, timeout_s: float | None = None
    ) -> LeaseHandle:
        """Admits a suspended request again, see `TieredCache.resume`; waits as `admit` does, and for its copy down.

        The ticket stays good when this raises.
        """
        desk = self._desk(key)
        return await self._enter(desk, partial(desk.cache.resume, ticket, as_int32(tokens).copy()), timeout_s, again=0)

    def discard(self, key: CacheKey, ticket: Suspended) -> None:
        """A suspended request will not be resumed.  May be said to the last, also while the service is closing."""
        desk = self._known_desk(key)
        desk.cache.discard(ticket)
        desk.room_was_made()

    async def _enter(
        self, desk: Desk, ask: Callable[[], Lease], timeout_s: float | None, again: int = 1
    ) -> LeaseHandle:
        handle = LeaseHandle(desk, ask, again)
        desk.enter(handle)
        if handle.admitted:
            return handle
        try:
            async with asyncio.timeout(timeout_s):
                await handle.wait_for_pages()
        except BaseException as error:
            desk.given_up += handle.ended is None
            handle.abort()
            if isinstance(error, TimeoutError):
                why = handle.refusal or "others wait before it"
                raise NoRoomInTime(f"no room within {timeout_s:g} s: {why}") from handle.refusal
            raise
        return handle

    def _desk(self, key: CacheKey) -> Desk:
        self._check_open()
        if self._poller is None:
            raise InvariantViolation("the service is not running: use `async with`")
        return self._known_desk(key)

    def _known_desk(self, key: CacheKey) -> Desk:
        try:
            return self._desks[key]
        except KeyError:
            raise BadInput(f"there is no cache for {key}: there are {', '.join(map(str, self._desks))}") from None

    def _check_open(self) -> None:
        if self._failure is not None:
            raise stopped(self._failure) from self._failure
        if self._closing is not None:
            raise ServiceClosed("the service is closed, or closing")

    # ------------------------------------------------------------------ the end

    async def aclose(self, *, drain: bool, timeout_s: float = 30.0) -> None:
        """Ends the service and closes its caches; what the first call says is done, others wait for it.

        From now on nobody is admitted, and who waits for room is told so (`ServiceClosed`).
        drain: leases go on until they end, and copies until they are over, for `timeout_s` seconds at most.
        Then, or at once, what is left of the leases is aborted and what is left of the copies is cut short.
        Raises what has stopped the service before, if something has.  A caller that is cancelled leaves it closing.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain, timeout_s), name="kvkeep closing")
        await asyncio.shield(self._closing)

    async def _close(self, drain: bool, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        try:
            for desk in self._desks.values():
                desk.turn_away(ServiceClosed("the service is closing: nobody is admitted any more"))
            if drain:
                await self._leases_end(timeout_s)
        finally:
            for desk in self._desks.values():
                desk.end_all(ServiceClosed("the service was closed before the lease had ended"))
            if self._poller is not None:
                self._poller.cancel()
            caches = [desk.cache for desk in self._desks.values()]
            finish = drain and self._failure is None
            closing = asyncio.get_running_loop().run_in_executor(None, close_all, caches, finish, until)
            await asyncio.shield(closing)  # it goes on when this task is cancelled
        if self._failure is not None:
            raise stopped(self._failure) from self._failure

    async def _leases_end(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._failure is None and any(desk.handles for desk in self._desks.values()):
                    self._left.clear()
                    await self._left.wait()

    # ------------------------------------------------------------------ the poller

    async def _poll_forever(self) -> None:
        ended = time.monotonic()
        while True:
            self._work.clear()
            desks = list(self._desks.values())
            done = sum([desk.poll() for desk in desks])
            now = time.monotonic()
            if done:
                ended = now
            if not any(desk.busy for desk in desks):
                await self._work.wait()
                ended = time.monotonic()
                continue
            await asyncio.sleep(self._poll_s)
            rest = min(POLL_SHARE * (now - ended), POLL_S_MAX) - self._poll_s
            if rest > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await self._work.wait()
            if self._work.is_set():
                ended = time.monotonic()

    def _poller_ended(self, poller: "asyncio.Task[None]") -> None:
        """Nothing stops the poller but an error of ours, the end of the service, or the end of its event loop."""
        if not poller.cancelled():
            self._fail(poller.exception() or InvariantViolation("the poller returned"))
        elif self._closing is None:
            self._fail(ServiceClosed("its event loop has cancelled the poller"))

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            log.error("the service has stopped", exc_info=failure)
            if self._poller is not None:
                self._poller.cancel()
            for desk in self._desks.values():
                desk.fail(failure)
            self._left.set()


def close_all(caches: Sequence[TieredCache], drain: bool, until: float) -> None:
    """Closes every cache, also when one of them fails; raises the first failure then."""
    failures = []
    for cache in caches:
        try:
            cache.close(drain=drain, timeout_s=max(0.0, until - time.monotonic()))
        except Exception as error:
            log.error("a cache could not be closed", exc_info=error)
            failures.append(error)
    if failures:
        raise failures[0]
