"""Numbers that a cache reports.

Must not know how they are counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often something took how long.

    bounds: upper bounds of the buckets in seconds, rising; one bucket more, without a bound, holds the rest.
    counts: how often, by bucket.   sum_s: seconds of all together.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """How often."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; pages are counts of now, the rest counts since the start.

    pages_cached are owned by the index only, pages_live by at least one request or copy; host_pages are those of the
    host tier.
    prompt_tokens, matched_tokens and (of those) matched_host_tokens, the ones that a load of its own brings from the
    host tier, are recorded once an admission that succeeded; refusals are admissions and extensions that raised
    `OutOfPages`.  lost_tokens were matched and did not arrive: their request computes them.  revocations are admissions
    that ended since a load failed, with revoked_tokens in their prompts: they are admitted again, and counted so.
    gate_wait: from an admission to the end of the copies that it waits for; of all that were not revoked or aborted.
    room_wait: the part of it until its pages had been copied down for those that had them before; of those that had to
        wait for that.  Nobody has, while cold pages are copied down ahead of need.
    pages_evicted have left the GPU pool to make room: pages_demoted of them were copied down on the way, pages_lost had
    no copy left.  evict_ns: nanoseconds spent on choosing them and taking them out of the index.
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
    lost_tokens: int
    revocations: int
    revoked_tokens: int
    gate_wait: Histogram
    room_wait: Histogram
    pages_stored: int
    pages_evicted: int
    pages_demoted: int
    pages_lost: int
    evict_ns: int
    host_pages_total: int
    host_pages_free: int
    host_pages_cached: int

    @property
    def matched_gpu_tokens(self) -> int:
        """Prompt tokens whose pages were on the GPU, or on their way there for another request."""
        return self.matched_tokens - self.matched_host_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that nothing was found for: with those of the two tiers they are all prompt tokens."""
        return self.prompt_tokens - self.matched_tokens


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset has freed, and what it could not free yet.

    pages_freed, host_pages_freed: free now.
    pages_held: free when live requests and copies let go; pages_copying of them only copies hold.
    host_pages_copying: host pages that copies still read or write, free when those are over.
    leases: live requests, and outputs_held encoder outputs in them: they go on, and nothing of them is stored.
    suspended: requests that wait in host memory, with suspended_pages there until they are resumed or discarded.
    """

    pages_freed: int
    pages_held: int
    pages_copying: int
    host_pages_freed: int
    host_pages_copying: int
    leases: int
    outputs_held: int
    suspended: int
    suspended_pages: int

    @property
    def complete(self) -> bool:
        """Whether nothing of before is anywhere any more."""
        return not (self.pages_held or self.host_pages_copying or self.suspended)
