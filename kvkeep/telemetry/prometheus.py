"""A Prometheus exposition of snapshots, made when it is scraped.  Needs the extra `metrics`.

Must not keep any number: what is scraped is read from the snapshots and forgotten.

    REGISTRY.register(KvkeepCollector(service.snapshot))        beside an application's own metrics
    exposition(service.snapshot())                              the text alone
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from kvkeep.ghosts import GhostStats
from kvkeep.misses import MissStats
from kvkeep.outputs import OutputStats
from kvkeep.stats import CacheStats, Histogram
from kvkeep.telemetry.snapshot import CacheKey, CacheSnapshot, WaitingStats
from kvkeep.transfer.tally import TransferStats


class KvkeepCollector(Collector):
    """Exposes what `snapshots` returns at the time of each scrape; it is called in the scraper's thread."""

    def __init__(self, snapshots: Callable[[], Iterable[CacheSnapshot]]) -> None:
        self._snapshots = snapshots

    def describe(self) -> list[Metric]:
        """Nothing: to register it takes no snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric, with samples of each cache."""
        metrics = Metrics()
        for one in self._snapshots():
            metrics.of(one.key)
            add_cache(metrics, one.cache)
            if one.transfers is not None:
                add_transfers(metrics, one.transfers)
            if one.misses is not None:
                add_misses(metrics, one.misses)
            if one.ghosts is not None:
                add_ghosts(metrics, one.ghosts)
            if one.outputs is not None:
                add_outputs(metrics, one.outputs)
            if one.service is not None:
                add_service(metrics, one.service)
        return iter(metrics)


def exposition(snapshots: Iterable[CacheSnapshot]) -> bytes:
    """The snapshots in the text format that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(KvkeepCollector(lambda: snapshots))
    return generate_latest(registry)


class Metrics:
    """Metrics by name, filled cache by cache."""

    def __init__(self) -> None:
        self._key: dict[str, str] = {}
        self._by_name: dict[str, Metric] = {}

    def of(self, key: CacheKey) -> None:
        """What is added from now on is this cache's."""
        self._key = {name: str(value) for name, value in key._asdict().items()}

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """A count since the start; its samples are called `{name}_total`."""
        metric = self._metric(name, text, "counter")
        metric.add_sample(f"{metric.name}_total", self._key | labels, value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """A number of now."""
        metric = self._metric(name, text, "gauge")
        metric.add_sample(metric.name, self._key | labels, value)

    def histogram(self, name: str, text: str, waits: Histogram) -> None:
        """How long something took, in seconds."""
        metric, below = self._metric(name, text, "histogram"), 0
        for bound, count in zip([*map(str, waits.bounds), "+Inf"], waits.counts, strict=True):
            below += count
            metric.add_sample(f"{metric.name}_bucket", self._key | {"le": bound}, below)
        metric.add_sample(f"{metric.name}_count", self._key, below)
        metric.add_sample(f"{metric.name}_sum", self._key, waits.sum_s)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._by_name.values())

    def _metric(self, name: str, text: str, kind: str) -> Metric:
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Metric(f"kvkeep_{name}", text, kind)
        return found


def add_cache(to: Metrics, stats: CacheStats) -> None:
    """Tokens by where they came from, waits, pages."""
    text = "Tokens of admitted prompts, by where their KV came from."
    to.counter("prompt_tokens", text, stats.matched_gpu_tokens, source="gpu")
    to.counter("prompt_tokens", text, stats.matched_host_tokens, source="host")
    to.counter("prompt_tokens", text, stats.computed_tokens, source="computed")
    to.counter(
        "lost_tokens", "Tokens that were found and did not arrive, so that they were computed.", stats.lost_tokens
    )
    to.counter("admissions", "Requests that were given pages.", stats.admissions)
    to.counter("revoked_admissions", "Admissions that ended since a load failed.", stats.revocations)
    to.counter("revoked_tokens", "Prompt tokens of admissions that were revoked.", stats.revoked_tokens)
    to.counter("refusals", "Admissions and extensions for which there were no pages.", stats.refusals)
    to.histogram("gate_wait_seconds", "From an admission to the end of the copies it waits for.", stats.gate_wait)
    to.histogram("room_wait_seconds", "Part of the gate wait until the pages had been copied down.", stats.room_wait)

    text = "Pages by tier and by who owns them: nobody, the index only, or a request or copy."
    busy = stats.host_pages_total - stats.host_pages_free - stats.host_pages_cached
    to.gauge("pages", text, stats.pages_free, tier="gpu", state="free")
    to.gauge("pages", text, stats.pages_cached, tier="gpu", state="cached")
    to.gauge("pages", text, stats.pages_live, tier="gpu", state="live")
    to.gauge("pages", text, stats.host_pages_free, tier="host", state="free")
    to.gauge("pages", text, stats.host_pages_cached, tier="host", state="cached")
    to.gauge("pages", text, busy, tier="host", state="live")
    to.counter("stored_pages", "Pages that have entered the index.", stats.pages_stored)

    text = "Pages that left the GPU to make room: copied down for it, copied down before, or the last copy."
    had_copy = stats.pages_evicted - stats.pages_demoted - stats.pages_lost
    to.counter("evicted_pages", text, stats.pages_demoted, how="demoted")
    to.counter("evicted_pages", text, had_copy, how="clean")
    to.counter("evicted_pages", text, stats.pages_lost, how="lost")


def add_misses(to: Metrics, stats: MissStats) -> None:
    """Why tokens were not found."""
    for cause, tokens in stats.tokens.items():
        to.counter("missed_tokens", "Prompt tokens that were not taken from the cache, by cause.", tokens, cause=cause)
    for cause, stops in stats.stops.items():
        to.counter("match_stops", "Matches that stopped short of their prompt, by cause.", stops, cause=cause)
    text = "How long ago the page had been evicted at which a match stopped."
    to.histogram("evicted_age_seconds", text, stats.evicted_age)


def add_ghosts(to: Metrics, stats: GhostStats) -> None:
    """What tiers of other sizes would have hit."""
    text = "Tokens of finished prompts, and those that LRU would have found in tiers of these sizes (an estimate)."
    to.counter("ghost_tokens", text, stats.prompt_tokens, size="prompts")
    for size, tokens in stats.found_tokens.items():
        to.counter("ghost_tokens", text, tokens, size=size)


def add_outputs(to: Metrics, stats: OutputStats) -> None:
    """What was asked for of encoder outputs, and what is kept."""
    text = "Encoder outputs asked for: found in a tier, of another shape than expected, or not there."
    to.counter("output_lookups", text, stats.gpu_hits, result="gpu")
    to.counter("output_lookups", text, stats.host_hits, result="host")
    to.counter("output_lookups", text, stats.mismatches, result="mismatch")
    to.counter("output_lookups", text, stats.misses, result="miss")
    to.counter("stored_outputs", "Encoder outputs that have entered the cache.", stats.stored)
    to.counter("refused_outputs", "Encoder outputs for which there was no room.", stats.refused)
    text = "Encoder outputs by tier; one may be in both."
    to.gauge("outputs", text, stats.outputs, tier="gpu")
    to.gauge("outputs", text, stats.host_outputs, tier="host")
    to.gauge("output_bytes", "Bytes of encoder outputs on the GPU.", stats.nbytes)
    to.gauge("held_outputs", "Occurrences of encoder outputs in live requests.", stats.held)
    to.gauge("slotted_pages", "Pages of the GPU pool that hold parts of encoder outputs.", stats.slotted_pages)


def add_transfers(to: Metrics, stats: TransferStats) -> None:
    """Copies by direction and cause, their failures, their queues."""
    for (direction, cause), copied in stats.by.items():
        labels = {"direction": direction, "cause": cause}
        to.counter("copies", "Copies that arrived.", copied.copies, **labels)
        to.counter("copied_pages", "Pages of copies that arrived.", copied.pages, **labels)
        to.counter("copied_bytes", "Bytes of copies that arrived.", copied.nbytes, **labels)
        to.counter("copy_seconds", "Time that copies took, added up.", copied.copy_s, **labels)
        to.counter("copy_failures", "Copies that did not arrive.", copied.failures, **labels)
    text = "Copies that were not made: a bound, a dead backend, or the end."
    to.counter("copies_refused", text, stats.refused_loads, direction="h2d")
    to.counter("copies_refused", text, stats.refused_stores, direction="d2h")
    to.counter("copies_taken_back", "Copies that were taken back before they began.", stats.revoked)
    to.counter("copies_overdue", "Copies that were not over by their deadline.", stats.overdue)
    text = "Copies that wait, and that run."
    to.gauge("copy_queue", text, stats.queues.loads, queue="loads")
    to.gauge("copy_queue", text, stats.queues.stores, queue="stores")
    to.gauge("copy_queue", text, stats.queues.in_flight, queue="in_flight")
    to.gauge("copy_queue_pages", "Pages of the loads that wait.", stats.queues.load_pages)
    to.gauge("in_flight_bytes", "Bytes of the copies that run.", stats.queues.in_flight_nbytes)
    to.gauge("backend_up", "0 when what makes the copies has died.", stats.dead is None)


def add_service(to: Metrics, stats: WaitingStats) -> None:
    """Who waits, and has waited."""
    text = "Leases by what they wait for: room, copies, or nothing."
    to.gauge("leases", text, stats.waiting, waits_for="room")
    to.gauge("leases", text, stats.loading, waits_for="copies")
    to.gauge("leases", text, stats.leases - stats.waiting - stats.loading, waits_for="nothing")
    to.histogram("admission_wait_seconds", "From asking to be admitted to having pages.", stats.wait)
    to.counter("given_up_admissions", "Requests that were cancelled or out of time before.", stats.given_up)
    to.counter("readmissions", "Leases that were revoked and had again.", stats.readmitted)
    to.counter("lost_leases", "Leases that were revoked for good.", stats.revoked)
