"""Tiers of no pages, copies that never end, backends that die, shutdown with copies in flight.

Must not leave anything to a seed.
"""

import logging

import pytest

from kvkeep.errors import NotReady
from kvkeep.tiers.ledger import State
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages
B = [4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize("suspend_pages", [0, 4])
def test_a_host_tier_of_no_pages(suspend_pages: int) -> None:
    """The cache works as with one tier: what has to leave the GPU is dropped, and nothing is ever loaded."""
    rig = Rig(pages=6, tier_pages=0, suspend_pages=suspend_pages)
    assert [0, 6] == [rig.serve_alone([*A, 9]), rig.serve_alone([*A, 9])]
    rig.do("abort", rig.admitted([7] * 12))
    assert 0 == rig.serve_alone([*A, 9])
    stats = rig.cache.stats()
    assert (0, 0, 0) == (stats.host_pages_total, stats.matched_host_tokens, stats.pages_demoted)


def test_a_host_tier_smaller_than_a_run() -> None:
    """Of a run of five pages the last two fit: they come back, with what the GPU kept before them."""
    rig = Rig(pages=8, tier_pages=2)
    rig.serve([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 9])
    rig.settle()
    rig.do("abort", rig.admitted([7] * 10, reuse=False))
    rig.settle()
    assert 2 == rig.host_only
    assert 10 == rig.serve([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 9])
    assert 4 == rig.cache.stats().matched_host_tokens
    rig.push_out()
    assert 0 == rig.matched([*A, 9]), "the first pages left: nothing is reached behind them"


def test_a_load_that_never_ends_releases_who_waits_and_keeps_its_pages() -> None:
    """At the deadline the load is counted and taken for a miss; its targets are nobody's until it is over."""
    rig = Rig(pages=6, deadline_steps=10)
    rig.serve([*A, 9])
    rig.push_out()
    request = rig.admitted([*A, 9])
    lease = rig.lease(request)
    (load,) = rig.jobs("promote")
    rig.backend.stick(load)
    rig.world.do(("late", 10))
    assert lease.read_in_progress
    rig.poll()
    assert lease.revoked
    assert (1, 0) == (rig.transfers.stats().overdue, rig.matched([*A, 9][:3]))
    assert all(rig.cache._ledger.state(page) is State.LOADING for page in load.plan.targets)
    again = rig.admitted([*A[:4], 8])
    assert 0 == rig.lease(again).matched_len and not set(rig.lease(again).pages) & set(load.plan.targets)
    rig.compute(again)
    rig.finish(load)
    rig.poll()
    rig.do("finish", again)
    assert (1, 6) == (rig.transfers.stats().late, rig.free + rig.cache.stats().pages_cached)


def test_kv_that_a_failed_load_did_not_bring_is_not_taken_for_granted() -> None:
    """Whoever goes by the length matched at admission is stopped; once it is read again, what it says holds."""
    rig = Rig(pages=6)
    rig.serve([*A, 9])
    rig.push_out()
    lease = rig.cache.admit([*A, 9])
    assert 6 == lease.matched_len
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    rig.finish(load)
    rig.cache.poll()
    assert not lease.read_in_progress and not lease.revoked and 0 == lease.kv_len
    for use in (rig.cache.seal, rig.cache.finish, rig.cache.suspend):
        with pytest.raises(NotReady, match="matched_len"):
            use(lease, 6)
    assert 0 == lease.matched_len
    rig.cache.seal(lease, 6)
    rig.cache.abort(lease)


def test_cleaning_goes_on_beside_a_copy_that_never_ends() -> None:
    """Once a stuck copy is overdue the link counts as idle: other pages are copied down ahead of need."""
    rig = Rig(pages=4, deadline_steps=8)
    rig.serve([1, 1, 9])
    rig.poll()
    (stuck,) = rig.jobs("clean")
    rig.backend.stick(stuck)
    rig.serve_alone([2, 2, 9])
    rig.poll()
    assert [stuck] == rig.jobs()
    rig.world.do(("late", 8))
    rig.poll()
    assert 2 == len(rig.jobs("clean")) and stuck in rig.jobs()


def test_a_store_that_never_ends_releases_who_waits_and_keeps_its_pages() -> None:
    """The request that was promised the pages ends and comes again; both ends of the copy stay the copy's."""
    rig = Rig(pages=4, deadline_steps=10)
    rig.serve([1, 1, 9])
    request = rig.admitted([7] * 8)
    lease = rig.lease(request)
    (store,) = rig.jobs("demote")
    rig.backend.stick(store)
    rig.world.do(("late", 10))
    rig.poll()
    assert lease.revoked
    assert (3, 15) == (rig.free, rig.cache.stats().host_pages_free)
    again = rig.admitted([7] * 6)
    rig.compute(again)
    rig.finish(store)
    rig.poll()
    assert 16 == rig.cache.stats().host_pages_free, "nobody finds what came too late"
    rig.do("abort", again)
    assert 4 == rig.free + rig.cache.stats().pages_cached


def test_a_suspension_that_never_ends_loses_the_pages_not_the_request() -> None:
    """At the deadline the request may be resumed: it computes again what the index does not have."""
    rig = Rig(pages=8, suspend_pages=4, deadline_steps=10)
    request = rig.admitted([*A, 9], store=False)
    rig.compute(request)
    rig.do("suspend", request, False)
    rig.backend.stick(rig.jobs("suspend")[0])
    rig.world.do(("late", 10))
    rig.poll()
    rig.do("resume", request)
    assert [(0, 2), (2, 4), (4, 6), (6, 7)] == request.holes
    rig.compute(request)
    rig.finish(rig.jobs("suspend")[0])
    rig.poll()
    assert 4 == rig.traffic.parking.ledger.free


def test_holes_behind_a_load_that_failed_are_holes_no_more() -> None:
    """A resumed lease that inherits what it did not get begins there; what it lacked further on is computed anyway."""
    rig = Rig(pages=8, suspend_pages=4)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("suspend", request, False)
    (store,) = rig.jobs("suspend")
    rig.backend.fail(store)
    rig.finish(store)
    rig.push_out()
    rig.do("resume", request)
    lease = rig.lease(request)
    assert ([(6, 7)], 7) == (lease.holes, lease.kv_len)
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    rig.finish(load)
    rig.poll()
    assert ([], 0) == (lease.holes, lease.kv_len)


def test_a_backend_that_dies_takes_its_tier_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Copies in flight fail, those who wait go on or come again, no copy is made any more; it is said once."""
    rig = Rig(pages=8, suspend_pages=4)
    parked = rig.admitted([*B, 9])
    rig.compute(parked)
    rig.do("suspend", parked, False)
    rig.settle()
    rig.serve([*A, 9])
    rig.push_out()
    first, second = rig.admitted([*A, 9]), rig.admitted([*A, 8])
    gone = rig.lease(second)
    with caplog.at_level(logging.WARNING, logger="kvkeep"):
        rig.world.do(("die",))
        rig.poll()
        assert first.readable and gone.revoked
        rig.compute(first)
        rig.do("finish", first)
        assert 6 == rig.serve_alone([*A, 9])
        rig.do("abort", rig.admitted([7] * 16))
        assert 0 == rig.serve_alone([*A, 9])
        rig.do("resume", parked)
        assert [(0, 2), (2, 4), (4, 6), (6, 7)] == parked.holes, "its pages cannot come back"
        rig.compute(parked)
        rig.do("finish", parked)
        for _ in range(3):
            rig.poll()
    assert 1 == len(caplog.records), [record.message for record in caplog.records]
    stats = rig.cache.stats()
    assert (8, 0) == (stats.pages_free + stats.pages_cached, stats.pages_live)


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_shutdown_with_copies_in_flight(drain: bool, begun: bool) -> None:
    """After `close` nothing moves and every page is somebody's that lives, or free; whoever waited knows."""
    rig = Rig(pages=16, asynchronous=not begun, suspend_pages=4)
    rig.serve([*A, 9])
    rig.world.do(("written",))
    rig.push_out()
    rig.serve_alone([*B, 9, 9])
    parked = rig.admitted([5] * 4)
    rig.compute(parked)
    rig.do("suspend", parked, False)
    loading = rig.admitted([*A, 9])
    lease = rig.lease(loading)
    assert 2 == len(rig.jobs())
    if drain:
        while rig.world.device.finish_one():
            pass
    rig.cache.close(drain=drain, timeout_s=5.0)
    assert not rig.transfers.busy
    while rig.world.device.finish_one():
        pass
    assert not lease.read_in_progress and not lease.revoked
    assert (6 if drain or begun else 0) == lease.matched_len
    rig.poll()
    rig.compute(loading)
    rig.do("finish", loading)
    rig.do("discard", parked)
    assert 16 == rig.free + rig.cache.stats().pages_cached
    rig.do("abort", rig.admitted([7] * 32))
    assert 0 == rig.serve_alone([*A, 9]), "no tier, no copy"
