"""The counters of a cache, of its copies and of those who wait for it, as one value.

Must not count anything itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.ghosts import GhostStats
from kvkeep.misses import MissStats
from kvkeep.outputs import OutputStats
from kvkeep.stats import CacheStats, Histogram
from kvkeep.transfer.tally import TransferStats


class CacheKey(NamedTuple):
    """Which cache of a node: one KV resource (an engine may have several), one rank of it."""

    node: str
    resource: str = "kv"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WaitingStats:
    """Who uses a cache through a service.

    leases: handles that have not ended; waiting: of those, the ones that wait for room now; loading: that wait for
        copies now.
    wait: from the call of `admit` to its pages, of every request that got them.
    given_up: requests that were cancelled, or out of time, before they got pages.
    readmitted: leases that were revoked and had again.   revoked: leases that were revoked for good.
    """

    leases: int
    waiting: int
    loading: int
    wait: Histogram
    given_up: int
    readmitted: int
    revoked: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """One cache.   transfers: None when it has no host tier.   service: None when no service has it.

    misses: why tokens were not found; None without a miss ledger.
    ghosts: what tiers of other sizes would have hit; None where that is not asked for.
    outputs: encoder outputs; None while there were none.
    """

    key: CacheKey
    cache: CacheStats
    transfers: TransferStats | None = None
    service: WaitingStats | None = None
    misses: MissStats | None = None
    ghosts: GhostStats | None = None
    outputs: OutputStats | None = None
