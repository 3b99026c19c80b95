"""Group: a request on every rank of a model: admitted by all with one length, or by none.

Must not know how ranks come to agree (`minimum`, `leader`, `follower`), nor what carries what they say.

Every rank makes the same calls in the same order with the same arguments, as ranks that run one model in step do:

    admit     one exchange: all have the lease, or all raise `OutOfPages`; nobody has begun to load before it
    poll      one exchange: which requests may run, on all ranks or on none; one that failed somewhere is revoked on all
    extend    one exchange where pages are needed, about every `page_size` tokens: all have them, or all raise
    seal, truncate, finish, abort, fence    no exchange
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkeep import __version__
from kvkeep.agreement.channel import Channel
from kvkeep.agreement.settings import Setting, agree_rules
from kvkeep.cache import TieredCache
from kvkeep.errors import BadInput, InvariantViolation, LeaseRevoked, NotReady, OutOfPages
from kvkeep.index.hints import Hint
from kvkeep.index.media import MediaItem, check_ends, chunk_end, place_media
from kvkeep.index.names import Fingerprint, Int32s, TokenIds, as_int32, as_token_ids, frame, hash64, make_identity
from kvkeep.lease import Lease
from kvkeep.transfer.backend import NO_WAIT, After


@dataclass(frozen=True, slots=True)
class Request:
    """What `TieredCache.admit` is asked: see there."""

    tokens: Int32s
    salt: bytes
    adapter: bytes
    label: bytes
    media: tuple[MediaItem, ...]
    reuse: bool
    store: bool

    @property
    def digest(self) -> int:
        """64 bits of all of it: ranks must have been asked the same.  `BadInput` for a salt that is no bytes."""
        fields = [("root", make_identity(b"", self.salt, self.adapter, self.label).record)]
        fields += [("media", repr(item).encode()) for item in self.media]
        fields += [("flags", bytes((self.reuse, self.store)))]
        return hash64(self.tokens.data, hash64(frame(fields), 0))


class GroupLease:
    """A request of the group, on this rank.

    number: equal on all ranks.   length: token ids known.   page_count: its pages; both are equal on all ranks.
    ready: every rank has said that its pages are there, and how many matched: forwards may be launched.
    revoked: a rank could not have it after all; it has ended on every rank, and is to be admitted again.
    live: False once it has ended.   local: the lease in this rank's cache, if this rank has one.
    sealed: leading pages that are immutable.
    """

    __slots__ = (
        "length", "live", "local", "matched", "number", "page_count", "ready", "request", "revoked", "sealed", "table",
        "units",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, page_size: int) -> None:
        self.number = number
        self.length = len(request.tokens)
        self.page_count = -(-self.length // page_size)
        self.ready = False
        self.revoked = False
        self.live = True
        self.local: Lease | None = None
        self.table = array("i")
        self.matched = 0
        self.sealed = 0
        self.request: Request | None = request  # while it is admitted
        self.units = place_media(request.media, page_size, self.length).units if request.media else ()

    @property
    def pages(self) -> "array[int]":
        """Page ids, as `Lease.pages`; `NotReady` before all ranks agree."""
        self.check_ready()
        return self.table if self.local is None else self.local.pages

    @property
    def matched_len(self) -> int:
        """Positions that every rank took from its pages: the prefill begins there; `NotReady` before all agree."""
        self.check_ready()
        return self.matched

    def chunk_end(self, kv_len: int, want: int) -> int:
        """Where a prefill chunk ends that begins at `kv_len` and would end at `want`; see `Lease.chunk_end`."""
        return chunk_end(self.units, kv_len, want)

    def check_ready(self) -> None:
        """Raises unless forwards may be launched over it."""
        if self.revoked:
            raise LeaseRevoked(f"{self} was revoked: a rank could not have its pages; admit it again")
        if not self.live:
            raise InvariantViolation(f"{self} has ended")
        if not self.ready:
            raise NotReady(f"{self}: the ranks have not agreed yet; poll until it is ready")

    def __repr__(self) -> str:
        return f"GroupLease {self.number}"


class Mechanism(Protocol):
    """How this rank comes to the same decision as the others.

    page_size: token positions a page holds.   cache: this rank's own, which its leases are of; None: it has none.
    always_polls: whether a poll exchanges something while no request waits.
    Of each pair, the first gives what this rank says, the second hears what all said, by rank.
    """

    page_size: int
    always_polls: bool

    @property
    def cache(self) -> TieredCache | None:
        """See above."""

    def settings(self, rank: int, size: int) -> Mapping[str, Setting]:
        """What must be equal on all ranks, by name; this one is `rank` of `size`."""

    def offer(self, lease: GroupLease) -> bytes:
        """Before an admission."""

    def open(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """Raises `OutOfPages`, or another `KvkeepError`, on every rank alike; or each has the lease.

        The request is the caller's memory: it is not looked at afterwards.
        """

    def report(self, waiting: Sequence[GroupLease], stream: object) -> bytes:
        """What has become of those who wait."""

    def settle(self, waiting: Sequence[GroupLease], said: Sequence[bytes]) -> None:
        """Sets `ready` and `matched`, or `revoked`, of those of which that is decided."""

    def grow(self, lease: GroupLease, tokens: Int32s, room: int) -> bytes:
        """Before pages are added."""

    def grown(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """Raises `OutOfPages` on every rank alike, without the tokens and any room; or each has them."""

    def fence(self, event: After) -> None:
        """See `TieredCache.fence`."""

    def close(self, timeout_s: float) -> None:
        """Ends the copies of this rank."""


@dataclass(slots=True)
class GroupStats:
    """Since the start; equal on all ranks.

    refusals: admissions and extensions that raised `OutOfPages`.   revocations: admissions that ended since a rank
    could not have its pages.   matched_tokens: of requests that became ready.
    """

    admissions: int = 0
    refusals: int = 0
    revocations: int = 0
    matched_tokens: int = 0


class Group:
    """The requests of one group of ranks, on this rank.  One thread uses it, as its ranks' steps are in one order.

    how: this rank's mechanism.   fingerprint, settings: what must be equal besides the mechanism's own; fields of a
    `Fingerprint` are compared one by one, without `tensor_parallel`, which differs.
    Raises `BadInput` on every rank when ranks differ in a setting.

    After `RankLost` nothing is decided any more: `close` lets go of what is left.
    """

    def __init__(
        self,
        channel: Channel,
        how: Mechanism,
        fingerprint: Fingerprint | bytes,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        own = {"page_size": how.page_size, "fingerprint": fingerprint, "release": __version__}
        parts = (how.settings(channel.rank, channel.size), own, settings or {})
        self.agreed = agree_rules(channel, [("same", part) for part in parts])
        self.stats = GroupStats()
        self._channel = channel
        self._how = how
        self._page_size = how.page_size
        self._leases: dict[int, GroupLease] = {}
        self._waiting: dict[int, GroupLease] = {}
        self._numbers = 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._channel.rank

    @property
    def waiting(self) -> list[GroupLease]:
        """Requests that are not ready."""
        return list(self._waiting.values())

    # ------------------------------------------------------------------ the life of a request

    def admit(
        self,
        tokens: TokenIds,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        label: bytes = b"",
        media: Sequence[MediaItem] = (),
        reuse: bool = True,
        store: bool = True,
    ) -> GroupLease:
        """Admits a prompt on every rank; arguments as for `TieredCache.admit`.

        Raises `OutOfPages` on all ranks when one has no room, with nothing held or evicted anywhere; `BadInput`;
        `RankLost`; `InvariantViolation` when other ranks were asked something else.
        """
        request = Request(as_int32(tokens), salt, adapter, label, tuple(media), reuse, store)
        digest = request.digest
        lease = GroupLease(self._numbers, request, self._page_size)
        offer = self._how.offer(lease)
        try:
            said = self._channel.exchange("admit", digest, offer)
            self._how.open(lease, said)
        except BaseException as error:
            self.stats.refusals += isinstance(error, OutOfPages)
            self._end(lease)
            raise
        finally:
            lease.request = None
        self._numbers += 1
        self.stats.admissions += 1
        self._leases[lease.number] = self._waiting[lease.number] = lease
        return lease

    def poll(self, stream: object = None) -> list[GroupLease]:
        """Applies copies that have ended, and decides which requests may run; returns those that wait no more.

        stream: where forwards are launched; see `Gate.wait_on`.
        Engines call it once a step.  Of what it returns, `revoked` ones are to be admitted again.
        """
        waiting = self.waiting
        report = self._how.report(waiting, stream)
        if not waiting and not self._how.always_polls:
            return []
        said = self._channel.exchange("poll", _digest(lease.number for lease in waiting), report)
        self._how.settle(waiting, said)
        over = [lease for lease in waiting if lease.ready or lease.revoked]
        for lease in over:
            del self._waiting[lease.number]
            if lease.revoked:
                self.stats.revocations += 1
                self._end(lease)
            else:
                lease.sealed = lease.matched // self._page_size
                self.stats.matched_tokens += lease.matched
        return over

    def extend(self, lease: GroupLease, tokens: TokenIds = (), room: int = 0) -> None:
        """Appends token ids, and makes sure that every rank has pages for them and `room` positions more.

        Raises `OutOfPages` on all ranks when one has none, with no token appended; room that was reserved before is
        given back then.
        """
        lease.check_ready()
        ids = as_token_ids(tokens)
        if room < 0:
            raise BadInput(f"room {room}: it must be 0 or more")
        length = lease.length + len(ids)
        pages = -(-(length + room) // self._page_size)
        if pages <= lease.page_count:
            if lease.local is not None and self._how.cache is not None:
                self._how.cache.extend(lease.local, ids)
        else:
            grow = self._how.grow(lease, ids, room)
            said = self._channel.exchange("extend", _digest((lease.number, length, pages)), grow)
            try:
                self._how.grown(lease, said)
            except OutOfPages:
                self.stats.refusals += 1
                lease.page_count = -(-lease.length // self._page_size)
                raise
            lease.page_count = pages
        lease.length = length

    def seal(self, lease: GroupLease, kv_len: int) -> None:
        """Says that the first `kv_len` positions hold committed KV on every rank; see `TieredCache.seal`."""
        self._check_position(lease, "kv_len", kv_len)
        if lease.local is not None and self._how.cache is not None:
            self._how.cache.seal(lease.local, kv_len)
        lease.sealed = kv_len // self._page_size

    def truncate(self, lease: GroupLease, length: int) -> None:
        """Rolls the lease back to its first `length` tokens, on every rank; no sealed page of it is given back.

        See `TieredCache.truncate`.   Raises `BadInput` below what is sealed, and inside an item that is not causal.
        """
        self._check_position(lease, "truncate to", length)
        pages = -(-length // self._page_size)
        if lease.local is not None and self._how.cache is not None:
            self._how.cache.truncate(lease.local, length)
        del lease.table[pages:]
        lease.length, lease.page_count = length, pages
        lease.units = tuple(unit for unit in lease.units if unit[1] <= length)

    def finish(self, lease: GroupLease, kv_len: int, hint: Hint | None = None) -> None:
        """Ends a request; its full pages stay.  See `TieredCache.finish`."""
        self._check_position(lease, "kv_len", kv_len)
        if lease.local is not None and self._how.cache is not None:
            self._how.cache.finish(lease.local, kv_len, hint)
        self._forget(lease)

    def abort(self, lease: GroupLease) -> None:
        """Ends a request, and stores nothing more of it.  Nothing is done for one that was revoked."""
        if not lease.revoked:
            if not lease.live:
                raise InvariantViolation(f"{lease} has ended")
            self._end(lease)

    def fence(self, event: After = NO_WAIT) -> None:
        """Copies made from now on begin when `event` is done; see `TieredCache.fence`.  Each rank has its own event."""
        self._how.fence(event)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Ends every request and cuts copies short, on this rank; says nothing to others."""
        try:
            for lease in list(self._leases.values()):
                self._end(lease)
            self._how.close(timeout_s)
        finally:
            self._channel.close()

    # ------------------------------------------------------------------ inside

    def _check_position(self, lease: GroupLease, what: str, position: int) -> None:
        """As the cache does, on ranks without one as well: what is refused is refused on all of them."""
        lease.check_ready()
        sealed_len = lease.sealed * self._page_size
        if not sealed_len <= position <= lease.length:
            raise BadInput(f"{what} {position}: it must be {sealed_len} to {lease.length}, sealed to known")
        check_ends(lease.units, what, position)

    def _end(self, lease: GroupLease) -> None:
        if lease.local is not None and self._how.cache is not None:
            self._how.cache.abort(lease.local)
        self._forget(lease)

    def _forget(self, lease: GroupLease) -> None:
        lease.live = False
        lease.local = None
        self._leases.pop(lease.number, None)
        self._waiting.pop(lease.number, None)


def _digest(numbers: Iterable[int]) -> int:
    return hash64(array("q", numbers).tobytes(), 0)
