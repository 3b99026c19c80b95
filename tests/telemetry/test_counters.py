"""What is counted: by tier, by cause, once; and its exposition.

Must not compare the counters with themselves: every expected number is worked out by hand or by another door.
"""

import threading

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.counting import WAIT_BOUNDS_S, Counting, Waits
from kvkeep.errors import OutOfPages
from kvkeep.lease import Lease
from kvkeep.stats import Histogram
from kvkeep.telemetry.prometheus import KvkeepCollector, exposition
from kvkeep.telemetry.snapshot import CacheKey, CacheSnapshot, WaitingStats
from tests.telemetry.rigs import PAGE_NBYTES, PAGE_SIZE, TwoTiers, prompt


def snapshot(tiers: TwoTiers) -> CacheSnapshot:
    waits = Histogram(WAIT_BOUNDS_S, (2, *[0] * (len(WAIT_BOUNDS_S) - 1), 1), 12.5)
    waiting = WaitingStats(leases=7, waiting=4, loading=1, wait=waits, given_up=5, readmitted=3, revoked=2)
    return CacheSnapshot(CacheKey("n 1", "llm", 3), tiers.cache.stats(), tiers.manager.stats(), waiting)


def tell_time(tiers: TwoTiers) -> None:
    """The cache's waits are told by steps of the copies, not by the clock on the wall."""
    tiers.cache._counting = tiers.cache._admission._counting = Counting(tiers.backend.clock)


def in_host_memory_only(tokens: list[int], pages: int = 8) -> TwoTiers:
    """A cache whose GPU pool is full of other pages, clean ones."""
    tiers = TwoTiers(pages, 32, suspend_pages=4)
    for one in (tokens, prompt(99, pages - 1)):
        tiers.store(one)
        tiers.settle()
    return tiers


def wait_for(tiers: TwoTiers, *leases: Lease) -> None:
    for _ in range(1000):
        if not any(lease.read_in_progress for lease in leases):
            return
        tiers.backend.step()
        tiers.cache.poll()
    raise AssertionError("copies without end")


def test_row_56_tokens_of_the_tiers_add_up() -> None:
    """Tokens by where they came from add up to the prompts, however often a lookup was refused or retried before."""
    tiers = in_host_memory_only(prompt(1, 4))
    tell_time(tiers)
    holder = tiers.cache.admit(prompt(50, 6))
    for _ in range(3):
        with pytest.raises(OutOfPages):
            tiers.cache.admit(prompt(1, 4))
    wait_for(tiers, holder)
    tiers.cache.abort(holder)
    tiers.settle()
    first = tiers.cache.admit(prompt(1, 4))  # all of it in host memory
    second = tiers.cache.admit([*prompt(1, 2)[:-1], 7, 7, 7])  # two pages that are on their way already
    wait_for(tiers, first, second)
    tiers.cache.finish(first, 16)
    tiers.cache.finish(second, 8)
    stats = tiers.cache.stats()
    assert (3, 3, 25 + 17 + 11) == (stats.admissions, stats.refusals, stats.prompt_tokens)
    assert (8, 16, 53 - 24) == (stats.matched_gpu_tokens, stats.matched_host_tokens, stats.computed_tokens)
    assert (0, 0, 0) == (stats.lost_tokens, stats.revocations, stats.revoked_tokens)
    assert 3 == stats.gate_wait.count


def test_a_resumed_request_is_no_admission() -> None:
    """Suspending and resuming moves pages, and counts neither prompts nor hits."""
    tiers = TwoTiers(8, 8, suspend_pages=4)
    lease = tiers.cache.admit(prompt(1, 2))
    tiers.cache.seal(lease, 8)
    ticket = tiers.cache.suspend(lease, 8)
    tiers.settle()
    lease = tiers.cache.resume(ticket, prompt(1, 2))
    wait_for(tiers, lease)
    tiers.cache.finish(lease, 8)
    stats, by = tiers.cache.stats(), tiers.manager.stats().by
    assert (1, 9, 0, 0) == (stats.admissions, stats.prompt_tokens, stats.matched_tokens, stats.matched_host_tokens)
    assert (2 * PAGE_NBYTES, 1) == (by["d2h", "suspend"].nbytes, by["d2h", "suspend"].copies)


def test_a_failed_load_is_charged_to_who_lost_it() -> None:
    """Of two requests that wait for a load that fails one computes what was lost; the other is revoked."""
    tiers = in_host_memory_only(prompt(1, 4), 16)
    tell_time(tiers)
    first, second = tiers.cache.admit(prompt(1, 4)), tiers.cache.admit(prompt(1, 4))
    [load] = [job for job in tiers.backend.jobs if job.plan.cause == "promote"]
    tiers.backend.fail(load)
    wait_for(tiers, first, second)
    assert [False, True] == [first.revoked, second.revoked]
    stats = tiers.cache.stats()
    assert (16, 1, 17) == (stats.lost_tokens, stats.revocations, stats.revoked_tokens)
    assert 1 == stats.gate_wait.count
    assert 1 == tiers.manager.stats().by["h2d", "promote"].failures
    tiers.cache.abort(first)


def test_gate_wait_is_the_time_of_the_copies() -> None:
    """From the admission to the poll that saw its copies end; who is aborted before is not counted."""
    tiers = in_host_memory_only(prompt(1, 4))
    tell_time(tiers)
    began = tiers.backend.clock()
    lease = tiers.cache.admit(prompt(1, 4))
    wait_for(tiers, lease)
    waited = tiers.backend.clock() - began
    assert waited > 0
    stats = tiers.cache.stats()
    assert 1 == stats.gate_wait.count
    assert waited == pytest.approx(stats.gate_wait.sum_s)
    assert (0, 0.0) == (stats.room_wait.count, stats.room_wait.sum_s)
    tiers.cache.finish(lease, 16)
    tiers.settle()
    tiers.store(prompt(3, 7))
    tiers.settle()
    before = tiers.cache.stats().gate_wait.count
    tiers.cache.abort(tiers.cache.admit(prompt(1, 4)))
    tiers.settle()
    assert before == tiers.cache.stats().gate_wait.count


def test_nobody_waits_for_room_while_cold_pages_are_copied_ahead() -> None:
    """On the clean path the wait for room is zero, not small; where nothing was copied ahead it is the copy's time."""
    clean = TwoTiers(16, 64)
    for first in range(40):
        clean.store(prompt(first, 3))
        clean.settle()
    stats = clean.cache.stats()
    assert stats.pages_evicted > 100
    assert (0, 0.0, 0) == (stats.room_wait.count, stats.room_wait.sum_s, stats.pages_lost)

    dirty = TwoTiers(8, 64)
    tell_time(dirty)
    dirty.store(prompt(1, 4))
    dirty.store(prompt(2, 2))
    began = dirty.backend.clock()
    lease = dirty.cache.admit(prompt(3, 6))
    wait_for(dirty, lease)
    stats = dirty.cache.stats()
    assert 1 == stats.room_wait.count
    assert 0 < stats.room_wait.sum_s <= dirty.backend.clock() - began
    assert stats.pages_demoted > 0


def test_copies_are_counted_by_direction_and_cause() -> None:
    """Every page that left or came is a page of a copy of its cause."""
    tiers = TwoTiers(8, 64)
    for first in range(8):
        tiers.store(prompt(first % 3, 4))
        tiers.settle()
    by, stats = tiers.manager.stats().by, tiers.cache.stats()
    assert stats.matched_host_tokens == by["h2d", "promote"].pages * PAGE_SIZE > 0
    assert 0 < by["d2h", "clean"].pages + by["d2h", "demote"].pages == stats.host_pages_cached
    for copied in by.values():
        assert copied.nbytes == copied.pages * PAGE_NBYTES


def test_a_wait_goes_into_the_first_bucket_that_holds_it() -> None:
    """Bounds belong to their bucket, what is beyond the last one has a bucket of its own."""
    waits = Waits()
    waits.none()
    for wait_s in (0.0, 1e-4, 2e-4, 10.0, 11.0):
        waits.add(wait_s)
    found = waits.histogram()
    assert 6 == found.count
    assert 21.0003 == pytest.approx(found.sum_s)
    assert [2, 1, 1] == list(found.counts[:3])
    assert [1, 1] == list(found.counts[-2:])


# ---------------------------------------------------------------------- Prometheus


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Values by name and labels (in the order of their names), those of the cache checked and left out."""
    out = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert ("n 1", "llm", "3") == (labels.pop("node"), labels.pop("resource"), labels.pop("rank"))
            out[sample.name, ",".join(value for _, value in sorted(labels.items()))] = sample.value
    return out


def test_the_exposition_says_what_the_snapshot_says() -> None:
    """What Prometheus parses is what was counted, under names with units."""
    tiers = in_host_memory_only(prompt(1, 4))
    lease = tiers.cache.admit(prompt(1, 4))
    wait_for(tiers, lease)
    held = snapshot(tiers)
    found = samples(exposition([held]))
    cache, transfers = held.cache, held.transfers
    assert transfers is not None
    assert 16 == found["kvkeep_prompt_tokens_total", "host"]
    assert cache.prompt_tokens == sum(found["kvkeep_prompt_tokens_total", s] for s in ("gpu", "host", "computed"))
    assert cache.pages_evicted == sum(found["kvkeep_evicted_pages_total", s] for s in ("demoted", "clean", "lost"))
    assert 8 == sum(found["kvkeep_pages", f"{s},gpu"] for s in ("free", "cached", "live"))
    assert 32 == sum(found["kvkeep_pages", f"{s},host"] for s in ("free", "cached", "live"))
    assert 4 * PAGE_NBYTES == found["kvkeep_copied_bytes_total", "promote,h2d"]
    assert cache.gate_wait.count == found["kvkeep_gate_wait_seconds_count", ""] == cache.admissions
    assert cache.gate_wait.sum_s == found["kvkeep_gate_wait_seconds_sum", ""]
    assert 1 == found["kvkeep_backend_up", ""]
    assert (2, 2, 3, 12.5) == (
        found["kvkeep_admission_wait_seconds_bucket", "0.0"],
        found["kvkeep_admission_wait_seconds_bucket", "10.0"],
        found["kvkeep_admission_wait_seconds_bucket", "+Inf"],
        found["kvkeep_admission_wait_seconds_sum", ""],
    )
    assert [4, 1, 2] == [found["kvkeep_leases", s] for s in ("room", "copies", "nothing")]


def test_it_is_read_when_it_is_scraped() -> None:
    """A registered collector takes no snapshot before the first scrape, and a new one at each."""
    tiers, taken = TwoTiers(), []

    def take() -> list[CacheSnapshot]:
        taken.append(snapshot(tiers))
        return [taken[-1]]

    registry = CollectorRegistry(auto_describe=True)
    registry.register(KvkeepCollector(take))
    assert [] == taken
    key = {"node": "n 1", "resource": "llm", "rank": "3"}
    assert 0 == registry.get_sample_value("kvkeep_admissions_total", key)
    tiers.store(prompt(1, 2))
    assert 1 == registry.get_sample_value("kvkeep_admissions_total", key)
    assert 2 == len(taken)


def test_scraping_beside_a_busy_cache() -> None:
    """A scraper in another thread sees tokens that add up, whenever it looks."""
    tiers = TwoTiers(32, 0)
    failures: list[BaseException] = []
    stop = threading.Event()

    def scrape() -> None:
        try:
            while not stop.is_set():
                stats = tiers.cache.stats()
                assert stats.admissions == stats.gate_wait.count
                assert stats.pages_total == stats.pages_free + stats.pages_cached + stats.pages_live
                samples(exposition([snapshot(tiers)]))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for first in range(300):
        tiers.store(prompt(first % 17, 3))
    stop.set()
    thread.join()
    assert [] == failures
