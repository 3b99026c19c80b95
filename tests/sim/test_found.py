"""Faults that reading and the simulator found in the two-tier cache, each as the smallest input that shows it."""

import pytest

from kvkeep.errors import NotReady
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages
B = [4, 4, 5, 5, 6, 6]


def test_weights_are_the_same_only_when_all_of_their_fingerprint_is() -> None:
    """What is suspended under one fingerprint and resumed under another, a part of it, is not stored any more."""
    rig = Rig(suspend_pages=4)
    rig.world.do(("set_fingerprint", 1))
    request = rig.admitted([*A, 4])
    rig.compute(request, 2)
    rig.do("suspend", request, False)
    rig.settle()
    rig.world.do(("set_fingerprint", 0))
    rig.do("resume", request)
    rig.settle()
    rig.compute(request)
    rig.do("finish", request)
    assert 0 == rig.cache.stats().pages_cached


def test_room_is_found_behind_two_runs_that_only_copies_hold() -> None:
    """A run and the one behind it both end in pages that only a copy holds: what is idle before them can be had."""
    rig = Rig(pages=7)
    rig.serve([*A, 1, 1, 7])
    rig.serve([*A, 2, 2, 7])  # the chain splits behind A
    rig.push_out()
    rig.serve([1, 1, 2, 2, 9])  # two pages of A are back on the GPU
    blocker = rig.admitted([7, 7, 7, 7])
    rig.do("abort", rig.admitted([*A, 1, 1, 7]))
    assert [2] == [len(job.plan) for job in rig.jobs("promote")]
    stats = rig.cache.stats()
    assert (1, 2) == (stats.pages_free, stats.pages_cached)
    rig.do("extend", blocker, [7] * 6, 0)
    assert 5 == len(rig.lease(blocker).pages)


def test_a_load_is_inherited_only_by_a_lease_that_ends_with_it() -> None:
    """A load fails; the one who waits has matched pages behind it too, which it cannot write: it is admitted again."""
    rig = Rig(pages=12)
    rig.serve([*A, 9])
    rig.push_out()
    first = rig.admitted([*A, 9])
    writer = rig.admitted([*A, 4, 4, 5, 5, 9], reuse=False)
    rig.compute(writer)
    reader = rig.admitted([*A, 4, 4, 5, 5, 9])
    assert 10 == rig.lease(reader).matched_len
    rig.do("abort", first)
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    lease = rig.lease(reader)
    rig.settle()
    assert lease.revoked
    assert 0 == rig.matched([*A, 9])
    rig.do("finish", writer)
    assert 10 == rig.matched([*A, 4, 4, 5, 5, 9])


def test_nothing_is_rolled_back_or_sealed_while_copies_run() -> None:
    """Pages that are on their way can be neither copied nor sealed: the caller is told, and nothing changes."""
    rig = Rig()
    rig.serve([*A, 9])
    rig.push_out()
    request = rig.admitted([*A, 8, 8, 9])
    lease = rig.lease(request)
    for call, length in ((rig.cache.truncate, 3), (rig.cache.seal, 8), (rig.cache.finish, 8)):
        with pytest.raises(NotReady, match="Lease"):
            call(lease, length)
    assert (9, 6, 6) == (lease.length, lease.kv_len, lease.matched_len)
    rig.settle()
    rig.do("truncate", request, 3)
    assert (3, 2) == (lease.length, len(lease.pages))


def test_a_host_copy_of_a_page_that_became_hot_gives_way() -> None:
    """Pages were copied down ahead of need and are used ever since: their places are had by pages that leave."""
    rig = Rig(pages=16, tier_pages=16)
    for tokens in (A, [4] * 6, [5] * 6, [6] * 6, [7] * 2):
        rig.serve([*tokens, 9])
    rig.settle()
    assert (4, 0) == (rig.host_cached, rig.host_only)
    for other in range(10, 20):
        assert 6 == rig.serve([*A, 9])
        rig.serve([other] * 7)
        rig.settle()
    assert 16 == rig.host_cached
    assert 12 == rig.host_only, "sixteen places, four of them for the copies made ahead of need"


def test_copies_ahead_of_need_leave_a_small_tier_its_places() -> None:
    """Host memory of four pages holds at most one that the GPU has as well."""
    rig = Rig(pages=16, tier_pages=4)
    for n in range(10, 20):
        rig.serve([n] * 7)
        rig.settle()
    assert (4, 3) == (rig.host_cached, rig.host_only)


def test_as_many_pages_are_copied_down_ahead_as_an_admission_may_ask_for() -> None:
    """Where requests are as large as the pool, the next one finds that the last one's pages have host copies."""
    rig = Rig(pages=32, tier_pages=128)
    rig.serve([1] * 62)
    rig.settle()
    assert 31 == rig.host_cached
    assert rig.admitted([7] * 62).readable
    assert not rig.jobs("demote")


def test_what_is_copied_far_ahead_takes_no_place_of_another_copy() -> None:
    """Beyond the window, pages are copied into free places only: no hit is given away for a copy of a page."""
    rig = Rig(pages=32, tier_pages=40)
    rig.serve([1] * 62)
    rig.push_out()
    rig.serve([2] * 62)
    rig.settle()
    before = rig.host_only
    assert 31 == before
    rig.poll()
    rig.settle()
    assert before == rig.host_only
    assert 60 == rig.matched([1] * 62)


def test_cleaning_does_not_push_out_pages_that_are_hotter() -> None:
    """The coldest page finds no place in host memory; a hotter one that does would lose it to it, again and again."""
    rig = Rig(pages=13, tier_pages=8)
    rig.serve([5, 5, 9])
    reader = rig.admitted([5, 5, 8])
    long = [1, 2] * 9
    rig.serve([*long, 9])
    rig.do("abort", rig.admitted([7] * 20, reuse=False))  # all but the first page of the long chain goes down
    rig.settle()
    rig.do("abort", reader)
    assert 8 == rig.host_only
    blocker = rig.admitted([7] * 20, reuse=False)
    rig.settle()
    rig.do("abort", blocker)
    assert 18 == rig.matched([*long, 9])


def test_promotions_are_not_remembered_for_ever() -> None:
    """However often pages go up and down, what is remembered of it is bounded by the pages there are."""
    rig = Rig(pages=4, tier_pages=16)
    rig.serve([*A, 9])
    for _ in range(20):
        rig.push_out()
        assert 6 == rig.serve([*A, 9])
    assert len(rig.cache._tree.doubles) <= 16


def test_what_a_live_request_uses_needs_no_copy_below() -> None:
    """Pages that were loaded keep their old stamp until their request stores; still they are the hottest of all."""
    rig = Rig(pages=8, tier_pages=3)
    rig.serve([*A, 9])
    rig.push_out()
    reader = rig.admitted([*A, 9])
    rig.settle()
    assert rig.lease(reader).loaded_len == 6
    rig.serve_alone([*B, 9])
    rig.do("abort", rig.admitted([7] * 8, reuse=False))  # B has to leave, and the only places are those of A's copies
    rig.settle()
    assert 6 == rig.matched([*B, 9])
