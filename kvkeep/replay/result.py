"""What a replay is asked for, and what it found.

Must not know how either way of counting works.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.config import IndexAt, check_choice, check_int
from kvkeep.errors import BadInput
from kvkeep.stats import Histogram

Accounting = Literal["engine", "reference"]

#: Called now and then with how many requests are done.
Progress = Callable[[int], None]

#: How many requests pass between two calls of it.
PROGRESS_EVERY = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What to replay over.

    gpu_tokens, cpu_tokens: the two tiers, in token positions; whole pages of them are used.
    accounting: "reference" counts cached full pages only, and requests take no time.  "engine" is a cache as an engine
        drives it: reservation, tail pages, pins, requests that last.
    eviction: the order in which cached pages leave.

    The rest is of the engine's accounting only.
    index_at: when pages become visible, see `CacheConfig`.
    concurrency: how many requests may be live at once; None: one in a rotation, any number where the trace has times.
    explain: also why pages were not found, by cause.
    prefill_tokens_per_s: one request is prefilled at a time, this fast.   decode_tokens_per_s: each live request
        decodes this fast.  A request whose service time was recorded takes that instead.
    link_tokens_per_s: how fast copies between the tiers are, in each direction; None: they take no time.
    """

    gpu_tokens: int
    cpu_tokens: int = 0
    accounting: Accounting = "engine"
    eviction: str = "rhythm"
    index_at: IndexAt = "seal"
    concurrency: int | None = None
    explain: bool = False
    prefill_tokens_per_s: float = 50_000.0
    decode_tokens_per_s: float = 50.0
    link_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        check_int("gpu_tokens", self.gpu_tokens, at_least=1)
        check_int("cpu_tokens", self.cpu_tokens, at_least=0)
        check_choice("accounting", self.accounting, get_args(Accounting))
        check_choice("index_at", self.index_at, get_args(IndexAt))
        if self.explain and self.accounting != "engine":
            raise BadInput("--explain: it is of a cache, so of --accounting engine only")
        if self.concurrency is not None:
            check_int("concurrency", self.concurrency, at_least=1)
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "link_tokens_per_s"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < float("inf"):
                raise BadInput(f"{name} is {rate!r}: it must be a number above 0")


@dataclass(slots=True)
class Counts:
    """What is counted while a replay goes on.

    requests, prompt_tokens: all of them, those not served as well.
    matched_pages_gpu, matched_pages_cpu: at the first admission of each request.
    stalls: requests that had to wait for pages.   preemptions: times that a running one had to give its pages back.
    unserved: requests that are larger than the pool, or have no prompt.
    pages_evicted: that left the GPU tier to make room.   evict_ns: time spent on finding room by eviction.
    """

    requests: int = 0
    prompt_tokens: int = 0
    matched_pages_gpu: int = 0
    matched_pages_cpu: int = 0
    stalls: int = 0
    preemptions: int = 0
    unserved: int = 0
    pages_evicted: int = 0
    evict_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found.   seconds: what it took, without reading and naming.   simulated_s: by the trace's clock.

    misses: pages that were not found, by cause, and how long ago those had been evicted at which matches stopped, where
        that was asked for.  A request that was preempted has looked again.
    """

    settings: Settings
    page_size: int
    counts: Counts
    seconds: float
    simulated_s: float
    misses: Mapping[str, int] | None = None
    evicted_age: Histogram | None = None

    def share(self, pages: int) -> float:
        """Tokens of `pages` matched pages as a share of all prompt tokens."""
        return pages * self.page_size / self.counts.prompt_tokens if self.counts.prompt_tokens else 0.0

    @property
    def matched_pages(self) -> int:
        """In both tiers."""
        return self.counts.matched_pages_gpu + self.counts.matched_pages_cpu

    @property
    def hit_share(self) -> float:
        """Of the prompt tokens, in both tiers."""
        return self.share(self.matched_pages)

    @property
    def evict_us_per_page(self) -> float | None:
        """Microseconds for each page that left the GPU tier; None when none did."""
        return self.counts.evict_ns / 1e3 / self.counts.pages_evicted if self.counts.pages_evicted else None
