"""What a cache counts: once an admission, and when the copies that an admission waits for are over.

Must not change anything else.  Its callers hold the cache's lock.
"""

import time
from bisect import bisect_left
from collections.abc import Callable

from kvkeep.index.runs import Cleared
from kvkeep.index.tiermap import TierMap
from kvkeep.lease import Lease
from kvkeep.room import Room
from kvkeep.stats import CacheStats, Histogram, ResetReport
from kvkeep.storing import Storing
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Traffic

#: Upper bounds of a wait's histogram, in seconds.  Nothing waited for is its own bucket.
WAIT_BOUNDS_S = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class Waits:
    """How long something was waited for, each time."""

    def __init__(self) -> None:
        self._counts = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def none(self) -> None:
        """Nothing was waited for."""
        self._counts[0] += 1

    def add(self, wait_s: float) -> None:
        """It took `wait_s`."""
        self._counts[bisect_left(WAIT_BOUNDS_S, wait_s)] += 1
        self._sum_s += wait_s

    def histogram(self) -> Histogram:
        """What there is so far."""
        return Histogram(WAIT_BOUNDS_S, tuple(self._counts), self._sum_s)


class _Gated:
    """An admission that waits for copies.   for_room: one of them is a demotion out of pages it was promised."""

    __slots__ = ("for_room", "lease", "length", "matched_len", "since")

    def __init__(self, lease: Lease, since: float) -> None:
        self.lease = lease
        self.length = lease.prompt_len
        self.matched_len = lease.taken_len
        self.since = since
        self.for_room = waits_for_room(lease)


class Counting:
    """The counters of one cache.   clock: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.refusals = 0
        self._admissions = self._prompt_tokens = self._matched_tokens = self._matched_host_tokens = 0
        self._revocations = self._revoked_tokens = self._lost_tokens = 0
        self._gate, self._room = Waits(), Waits()
        self._gated: list[_Gated] = []
        self._clock = clock

    def admitted(self, lease: Lease) -> None:
        """A prompt was admitted."""
        self._admissions += 1
        self._prompt_tokens += lease.prompt_len
        self._matched_tokens += lease.taken_len
        self._matched_host_tokens += lease.loaded_len
        if lease.copies:
            self._gated.append(_Gated(lease, self._clock()))
        else:
            self._gate.none()

    def shortened(self, lease: Lease, taken_len: int, loaded_len: int) -> None:
        """A lease has given back some of what was counted when it was admitted; it may wait again.

        taken_len, loaded_len: what it had before.
        """
        self._matched_tokens -= taken_len - lease.taken_len
        self._matched_host_tokens -= loaded_len - lease.loaded_len
        if lease.copies:
            self._gated.append(_Gated(lease, self._clock()))

    def copies_ended(self) -> None:
        """Copies are over: those who waited for nothing else have waited until now."""
        if self._gated:
            now = self._clock()
            self._gated = [gated for gated in self._gated if not self._over(gated, now)]

    def _over(self, gated: _Gated, now: float) -> bool:
        lease, wait_s = gated.lease, now - gated.since
        if gated.for_room and not waits_for_room(lease):
            gated.for_room = False
            self._room.add(wait_s)
        if lease.revoked:
            self._revocations += 1
            self._revoked_tokens += gated.length
        elif lease.live:
            if lease.copies:
                return False
            self._gate.add(wait_s)
            self._lost_tokens += gated.matched_len - lease.taken_len
        return True

    def reset(
        self, freed: Cleared, held: int, leases: int, outputs: int, host: TierMap | None, traffic: Traffic | None
    ) -> ResetReport:
        """What a reset has freed, and what it had to leave.   held: pages of the GPU pool that somebody held."""
        return ResetReport(
            pages_freed=freed.gpu,
            pages_held=held,
            pages_copying=len(traffic.copies.pages_held_alone()) if traffic is not None else 0,
            host_pages_freed=freed.host,
            host_pages_copying=host.ledger.held if host is not None else 0,
            leases=leases,
            outputs_held=outputs,
            suspended=len(traffic.parking.suspended) if traffic is not None else 0,
            suspended_pages=traffic.parking.ledger.held if traffic is not None else 0,
        )

    def stats(self, leases: int, ledger: Ledger, host: TierMap | None, room: Room, storing: Storing) -> CacheStats:
        """The counters as a value, with the counts of now."""
        return CacheStats(
            pages_total=ledger.total,
            pages_free=ledger.free,
            pages_cached=ledger.idle,
            pages_live=ledger.held,
            leases=leases,
            admissions=self._admissions,
            refusals=self.refusals,
            prompt_tokens=self._prompt_tokens,
            matched_tokens=self._matched_tokens,
            matched_host_tokens=self._matched_host_tokens,
            lost_tokens=self._lost_tokens,
            revocations=self._revocations,
            revoked_tokens=self._revoked_tokens,
            gate_wait=self._gate.histogram(),
            room_wait=self._room.histogram(),
            pages_stored=storing.pages_stored,
            pages_evicted=room.pages_evicted,
            pages_demoted=room.pages_demoted,
            pages_lost=room.pages_lost,
            evict_ns=room.evict_ns,
            host_pages_total=host.ledger.total if host is not None else 0,
            host_pages_free=host.ledger.free if host is not None else 0,
            host_pages_cached=host.ledger.idle if host is not None else 0,
        )


def waits_for_room(lease: Lease) -> bool:
    """Whether pages of the lease are still copied down for whoever had them before."""
    return any(copy.cause == "demote" for copy in lease.copies)
