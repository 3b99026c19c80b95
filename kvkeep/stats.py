"""Numbers that a cache reports.

Must not know how they are counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; pages are counts of now, the rest counts since the start.

    pages_cached are owned by the index only, pages_live by at least one request or copy; host_pages are those of the
    host tier.  prompt_tokens, matched_tokens and (of those) matched_host_tokens, the ones that came from the host tier,
    are recorded once an admission that succeeded; refusals are admissions and extensions that raised `OutOfPages`.
    pages_evicted have left the GPU pool to make room: pages_demoted of them were copied down on the way, pages_lost had
    no copy left.
    """

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_live: int
    leases: int
    admissions: int
    refusals: int
    prompt_tokens: int
    matched_tokens: int
    matched_host_tokens: int
    pages_stored: int
    pages_evicted: int
    pages_demoted: int
    pages_lost: int
    host_pages_total: int
    host_pages_free: int
    host_pages_cached: int


@dataclass(frozen=True, slots=True)
class ResetReport:
    """pages_freed and host_pages_freed are free now; pages_held are free when live requests and copies let go."""

    pages_freed: int
    pages_held: int
    host_pages_freed: int
