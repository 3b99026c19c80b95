"""Leader: rank 0 has the one cache; it decides, and ships what it has decided.

Must not know what carries it, nor how followers apply it.

    admit     the block table, and the copies that make room or bring pages, with the ids that they have on rank 0
    poll      more copies (cleaning ahead, loads that had to wait); which requests may run
    extend    the pages that are added

A copy is over when every rank has made it, and has failed when one rank has failed: `GroupBackend` says so to the
cache of rank 0, which does the rest as it does for any copy.  So a load that fails on a follower shortens all, and
a page is not handed on while a follower still reads it.  A page that leaves without a copy moves no bytes: followers,
who have no index, have nothing to forget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from kvkeep.agreement.group import GroupLease
from kvkeep.agreement.settings import Setting
from kvkeep.agreement.wire import (
    GONE,
    PENDING,
    Reader,
    Report,
    ids,
    plans,
    read_refusal,
    read_reports,
    refusal,
    text,
)
from kvkeep.cache import TieredCache
from kvkeep.errors import BadInput, KvkeepError, OutOfPages
from kvkeep.index.names import Int32s
from kvkeep.lease import Lease
from kvkeep.transfer.backend import After, Backend, BackendDied, Job, Outcome, StillCopying


@dataclass(slots=True)
class _Everywhere:
    """A job that runs on the ranks in `missing`."""

    job: Job
    missing: set[int]
    error: str | None = None
    copy_ns: int = 0


class GroupBackend:
    """A `Backend` whose copies are made on every rank: by `inner` on rank 0, and by whom they are shipped to.

    size: ranks of the group.
    A rank whose copies have ended for good ends those of all, once nothing moves any more anywhere.
    """

    def __init__(self, inner: Backend, size: int) -> None:
        self._inner = inner
        self.size = size
        self._lock = Lock()  # the manager may be driven by another thread than the group
        self._outbox: list[Job] = []
        self._running: dict[int, _Everywhere] = {}
        self._death: str | None = None
        self._closed = False  # this rank's own
        self._left = False

    # ------------------------------------------------------------------ the manager's side

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self._inner.page_nbytes

    def launch(self, job: Job) -> None:
        """Begins to copy on this rank; the others are told with the next exchange."""
        with self._lock:
            if self._death is not None:
                return  # it stays in flight until `completions` says that nothing is copied any more
            self._running[job.number] = _Everywhere(job, set(range(self.size)))
            self._outbox.append(job)
        try:
            self._inner.launch(job)
        except BackendDied as death:  # here nothing moves any more; on other ranks copies may
            self.died(0, str(death))

    def completions(self) -> list[Outcome]:
        """Copies that have ended on every rank."""
        try:
            for outcome in self._inner.completions():
                self._ended(0, Report(outcome.job.number, outcome.error, outcome.copy_ns))
        except BackendDied as death:
            self.died(0, str(death))
        with self._lock:
            over = [entry for entry in self._running.values() if not entry.missing]
            for entry in over:
                del self._running[entry.job.number]
            if self._death is not None and not self._running and not over:
                raise BackendDied(self._death)
            return [Outcome(entry.job, entry.error, entry.copy_ns) for entry in over]

    def order_after(self, job: Job, stream: object) -> bool:
        """False: a stream of this rank cannot come after copies of others; the host waits until all are over."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Blocks until this rank's copies have something to say."""
        self._inner.wait(timeout_s)

    def close(self, timeout_s: float) -> list[Outcome]:
        """Ends the copies of this rank; those of others go on, and have their pages until they are over, or `leave`."""
        try:
            for outcome in self._inner.close(timeout_s) if not self._closed else ():
                self._ended(0, Report(outcome.job.number, outcome.error, outcome.copy_ns))
            self._closed = True
        except BackendDied as death:
            self.died(0, str(death))
        with self._lock:
            late = {rank for entry in self._running.values() for rank in entry.missing}
            if late and not self._left:
                raise StillCopying(f"rank {min(late)} has not said that its copies are over")
            over, self._running = list(self._running.values()), {}
            if self._death is not None:
                raise BackendDied(self._death)
        why = "the group was closed before every rank had made the copy"
        return [Outcome(e.job, e.error or (why if e.missing else None), e.copy_ns) for e in over]

    # ------------------------------------------------------------------ the group's side

    def take(self) -> list[Job]:
        """Jobs that were launched since the last call, in order."""
        with self._lock:
            out, self._outbox = self._outbox, []
            return out

    def leave(self) -> None:
        """The group is over: nothing is heard of other ranks any more, and nobody uses what they copy."""
        self._left = True

    def hear(self, rank: int, ended: Sequence[Report], death: str | None) -> None:
        """What a follower says of its copies."""
        for report in ended:
            self._ended(rank, report)
        if death is not None:
            self.died(rank, death)

    def died(self, rank: int, reason: str) -> None:
        """No copy is made on that rank any more, and none moves a byte there."""
        with self._lock:
            self._death = self._death or f"rank {rank}: {reason}"
            for entry in self._running.values():
                if rank in entry.missing:
                    entry.missing.discard(rank)
                    entry.error = entry.error or f"rank {rank}: {reason}"

    def _ended(self, rank: int, report: Report) -> None:
        with self._lock:
            entry = self._running.get(report.number)
            if entry is None or rank not in entry.missing:
                return  # it was closed meanwhile
            entry.missing.discard(rank)
            entry.copy_ns = max(entry.copy_ns, report.copy_ns)
            if report.error is not None and entry.error is None:
                entry.error = f"rank {rank}: {report.error}"


class Leader:
    """The mechanism of rank 0; every other rank has a `Follower`.

    cache: of rank 0.   host_pages: pages of its host pool, those set aside for preempted requests included; 0 without.
    backend: what the cache's transfers copy by; None for a cache of one tier.
    """

    def __init__(self, cache: TieredCache, backend: GroupBackend | None = None, host_pages: int = 0) -> None:
        if cache.transfers is not None and cache.transfers.backend is not backend:
            raise BadInput("the leader's cache makes copies: its transfers must copy by a GroupBackend, given here")
        tier_pages = cache.stats().host_pages_total
        if host_pages < tier_pages:
            raise BadInput(f"host_pages is {host_pages}: it must be those of the host pool, {tier_pages} or more")
        self.page_size = cache.config.page_size
        self.cache: TieredCache = cache
        self.always_polls = backend is not None
        self._backend = backend
        self._host_pages = host_pages
        self._refused: KvkeepError | None = None
        self._states: list[int] = []

    def settings(self, rank: int, size: int) -> Mapping[str, Setting]:
        """See `Mechanism`."""
        copied_on = size if self._backend is None else self._backend.size
        return leader_settings(rank, copied_on, self.cache.pool.pages, self._host_pages, self._backend)

    # ------------------------------------------------------------------ admission

    def offer(self, lease: GroupLease) -> bytes:
        """Admits it here; the block table, or why not."""
        r = lease.request
        assert r is not None
        self._refused = None
        try:
            lease.local = self.cache.admit(
                r.tokens, salt=r.salt, adapter=r.adapter, label=r.label, media=r.media, reuse=r.reuse, store=r.store
            )
        except (OutOfPages, BadInput) as error:
            self._refused = error
        return self._copies() + decision(self._refused) + ids(lease.local.pages if lease.local is not None else ())

    def open(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """It stands already."""
        self._hear(said)
        if self._refused is not None:
            raise self._refused

    # ------------------------------------------------------------------ may it run?

    def report(self, waiting: Sequence[GroupLease], stream: object) -> bytes:
        """For each, its matched pages once its copies are over on every rank."""
        self.cache.poll()
        self._states = [self._state(lease.local) for lease in waiting]
        return self._copies() + ids(self._states)

    def settle(self, waiting: Sequence[GroupLease], said: Sequence[bytes]) -> None:
        """As was said."""
        self._hear(said)
        apply_states(waiting, self._states, self.page_size)

    def _state(self, lease: Lease | None) -> int:
        if lease is None:
            return GONE
        copying = lease.read_in_progress  # first: another thread may revoke it, and then its copies are over
        if lease.revoked:
            return GONE
        return PENDING if copying else lease.matched_len // self.page_size

    # ------------------------------------------------------------------ more pages

    def grow(self, lease: GroupLease, tokens: Int32s, room: int) -> bytes:
        """Takes the pages; their ids, or why not."""
        assert lease.local is not None
        before, self._refused = len(lease.local.pages), None
        try:
            self.cache.extend(lease.local, tokens, room)
        except OutOfPages as error:
            self._refused = error
        return self._copies() + decision(self._refused) + ids(lease.local.pages[before:])

    def grown(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """It has them already, or has none."""
        assert lease.local is not None
        self._hear(said)
        if self._refused is not None:
            self.cache.truncate(lease.local, lease.length)  # of room from before, as on every rank
            raise self._refused

    # ------------------------------------------------------------------ ends

    def fence(self, event: After) -> None:
        """See `Mechanism`."""
        self.cache.fence(event)

    def close(self, timeout_s: float) -> None:
        """See `Mechanism`."""
        if self._backend is not None:
            self._backend.leave()
        self.cache.close(drain=False, timeout_s=timeout_s)

    # ------------------------------------------------------------------ inside

    def _copies(self) -> bytes:
        """The copies that have been launched here and not been shipped."""
        return plans(self._backend.take() if self._backend is not None else ())

    def _hear(self, said: Sequence[bytes]) -> None:
        for rank, message in enumerate(said):
            if rank and self._backend is not None:
                self._backend.hear(rank, *read_reports(Reader(message)))


def leader_settings(
    leader: int | None, copied_on: int, pages: int, host_pages: int, backend: Backend | None
) -> dict[str, Setting]:
    """What must be equal on the leader and its followers.

    leader: which rank leads, as this one has it.   copied_on: on how many ranks copies are made.
    """
    page_nbytes = backend.page_nbytes if backend is not None else 0
    roles: dict[str, Setting] = {"mechanism": "leader", "leader": leader, "copied_on": copied_on}
    return roles | {"pages": pages, "host_pages": host_pages, "page_nbytes": page_nbytes}


def decision(error: KvkeepError | None) -> bytes:
    """Why the leader refuses; None: it does not."""
    if error is None or isinstance(error, OutOfPages):
        return refusal(error) + text(b"")
    return refusal(None) + text(str(error).encode())


def read_decision(reader: Reader) -> None:
    """Raises what the leader has raised, if so."""
    error, why = read_refusal(reader), reader.text()
    if error is not None:
        raise error
    if why:
        raise BadInput(why.decode())


def apply_states(waiting: Sequence[GroupLease], states: Sequence[int], page_size: int) -> None:
    """What the leader says of those who wait."""
    for lease, state in zip(waiting, states, strict=True):
        if state == GONE:
            lease.revoked = True
        elif state != PENDING:
            lease.ready, lease.matched = True, state * page_size
