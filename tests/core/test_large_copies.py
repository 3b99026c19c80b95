"""Copies of more pages than may be in flight or queued at once, or of many chains; tickets of another cache."""

from typing import Any

import pytest

from kvkeep.errors import BadInput, CannotSuspend
from kvkeep.index.run import Run
from kvkeep.room import LOOKS_A_WINDOW
from kvkeep.traffic import Traffic
from tests.telemetry.rigs import TwoTiers, prompt

A = prompt(1, 6)


def test_more_cold_pages_than_fit_on_the_link_are_copied_down_part_by_part() -> None:
    """Twelve cold pages and three in flight: round by round, all that `ahead` asks for get a host copy."""
    tiers = TwoTiers(16, 64, in_flight_pages=3)
    tiers.store(prompt(1, 12))
    tiers.cache.abort(tiers.cache.admit(prompt(2, 3)))
    tiers.settle()
    stats = tiers.cache.stats()
    assert (12, 12) == (stats.pages_cached, stats.host_pages_cached)
    assert 0 == tiers.manager.stats().refused_stores


def test_of_more_pages_than_fit_on_the_link_those_that_do_are_demoted() -> None:
    """A whole chain has to leave at once: three of its pages go down, and only the others are lost."""
    tiers = TwoTiers(16, 64, in_flight_pages=3)
    tiers.store(prompt(1, 15))
    lease = tiers.cache.admit(prompt(2, 15))
    stats = tiers.cache.stats()
    assert (15, 3, 12) == (stats.pages_evicted, stats.pages_demoted, stats.pages_lost)
    tiers.cache.abort(lease)
    tiers.settle()
    tiers.check()


def test_a_request_larger_than_link_and_queue_is_suspended_and_resumed() -> None:
    """Six pages, two in flight, two queued: it goes down alone, and comes up alone."""
    tiers = TwoTiers(16, 16, suspend_pages=8, in_flight_pages=2, queue_pages=2)
    lease = tiers.cache.admit(A, store=False)
    ticket = tiers.cache.suspend(lease, 24)
    with pytest.raises(CannotSuspend, match="needs a copy of 1 pages, and beside those that run 0 fit"):
        tiers.cache.suspend(tiers.cache.admit(prompt(2, 1), store=False), 4)
    tiers.settle()
    again = tiers.cache.resume(ticket, A)
    tiers.settle()
    assert (24, [], False) == (again.kv_len, again.holes, again.read_in_progress)
    assert 6 == tiers.manager.stats().by["h2d", "resume"].pages


def test_a_hit_larger_than_the_queue_is_loaded() -> None:
    """Six pages in host memory and a queue of two: they are loaded, not computed again."""
    tiers = TwoTiers(8, 16, queue_pages=2)
    for tokens in (A, prompt(2, 7)):
        tiers.store(tokens)
        tiers.settle()
    lease = tiers.cache.admit(A)
    assert 24 == lease.matched_len
    tiers.settle()
    assert not lease.read_in_progress


def test_room_behind_many_short_chains_is_found_by_looking_at_each_a_few_times() -> None:
    """A thousand cold chains of a page without a host copy: the window is not looked through for each that leaves."""
    tiers = TwoTiers(1040, 1040, in_flight_pages=1000)
    for first in range(1000):
        tiers.store(prompt(first, 1))
    order: Any = tiers.cache._tree.gpu.order
    looks, shelve = [], order.shelve

    def counted(run: Run) -> None:
        looks.append(run)
        shelve(run)

    order.shelve = counted
    lease = tiers.cache.admit(prompt(2000, 500))
    assert tiers.cache.stats().pages_demoted > 450
    assert len(looks) < 500 * (LOOKS_A_WINDOW + 2)
    tiers.cache.abort(lease)
    tiers.settle()
    tiers.check()


def test_cold_chains_leave_in_one_copy() -> None:
    """However many chains have to go down for one admission, the link is asked once."""
    tiers = TwoTiers(16, 64)
    for first in range(5):
        tiers.store(prompt(first, 3))
    lease = tiers.cache.admit(prompt(9, 15))
    tiers.settle()
    copied = tiers.manager.stats().by["d2h", "demote"]
    assert (1, 15, False) == (copied.copies, copied.pages, lease.read_in_progress)
    tiers.cache.abort(lease)
    for first in range(5):
        assert 12 == tiers.store(prompt(first, 3)).matched_len
    tiers.check()


def test_pages_whose_copy_is_refused_are_the_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfers are closed by another thread after it was seen that a copy fits: its pages are dropped."""
    tiers = TwoTiers(16, 64)
    tiers.store(prompt(1, 15))
    tiers.cache.close(drain=True, timeout_s=1.0)
    monkeypatch.setattr(Traffic, "fit", 10)
    lease = tiers.cache.admit(prompt(2, 15))
    stats = tiers.cache.stats()
    assert (16, False, 15, 0) == (len(lease.pages), lease.read_in_progress, stats.pages_lost, stats.pages_demoted)
    assert (0, 64) == (stats.host_pages_cached, stats.host_pages_free)
    tiers.cache.finish(lease, 60)
    tiers.check()


def test_a_decode_finds_pages_that_are_copied_down_already() -> None:
    """Page after page leaves for a long decode: some at a time are copied down ahead, and none is lost."""
    tiers = TwoTiers(512, 1024)
    for first in range(12):
        tiers.store(prompt(first, 40))
    lease = tiers.cache.admit(prompt(90, 30))
    for number in range(150):
        tiers.settle()
        tiers.cache.extend(lease, [number] * 4)
    stats, copied = tiers.cache.stats(), tiers.manager.stats().by["d2h", "clean"]
    assert (0, True) == (stats.pages_lost, stats.pages_evicted >= 140)
    assert copied.pages >= 140 and copied.copies <= 140 / 2 + 10
    tiers.cache.abort(lease)
    tiers.check()


def test_copies_of_a_chain_that_was_split_still_give_way() -> None:
    """Of three pages in both tiers two are another chain's beginning by now: all three places below can be had."""
    tiers = TwoTiers(16, 16)
    tiers.store(prompt(1, 3))
    blocker = tiers.cache.admit(prompt(9, 12))  # few pages are free: all are copied down
    tiers.settle()
    tiers.cache.abort(blocker)
    assert 3 == tiers.cache.stats().host_pages_cached
    tree = tiers.cache._tree
    tiers.store([*prompt(1, 3)[:8], *prompt(2, 1)])
    assert 3 == tree.doubles.evict(tree, 3, colder_than=0)
    tiers.check()


def test_a_ticket_is_good_in_its_own_cache_only() -> None:
    """Its page ids mean another request's pages elsewhere: it is refused there, and stays good."""
    one, other = TwoTiers(suspend_pages=8), TwoTiers(suspend_pages=8)
    tickets = []
    for tiers, tokens in ((one, A), (other, prompt(2, 6))):
        tickets.append(tiers.cache.suspend(tiers.cache.admit(tokens), 24))
        tiers.settle()
    with pytest.raises(BadInput, match="of another cache"):
        other.cache.resume(tickets[0], A)
    with pytest.raises(BadInput, match="of another cache"):
        other.cache.discard(tickets[0])
    lease = one.cache.resume(tickets[0], A)
    assert 24 == lease.kv_len
    for tiers in (one, other):
        tiers.settle()
        tiers.check()
