"""Preemption, abort, reset and capacity with copies moved by hand.  By the numbers in the list of invariants.

Must not leave anything to a seed.
"""

from array import array

import pytest

from kvkeep.errors import CannotSuspend, InvariantViolation
from kvkeep.tiers.ledger import State
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages
B = [4, 4, 5, 5, 6, 6]
WHEN = ["early", "split", "late"]


def test_row_11_a_salt_keeps_tenants_apart_in_host_memory_too() -> None:
    """What one tenant stored, and what of it went down, no other finds."""
    rig = Rig()
    rig.serve([*A, 9])
    rig.push_out()
    assert 3 == rig.host_only
    assert [0, 6] == [rig.matched([*A, 9], salt=salt) for salt in (1, 0)]


@pytest.mark.parametrize("forget", [("reset",), ("set_fingerprint", 1)])
def test_rows_14_and_15_a_reset_reaches_every_tier_and_every_copy(forget: tuple[str, ...]) -> None:
    """After it nothing matches on any tier, and copies that land later bring nothing back."""
    rig = Rig(pages=8)
    rig.serve([*A, 9])
    rig.push_out()
    rig.serve_alone([*B, 9, 9, 9, 9, 9])
    rig.poll()
    loading = rig.admitted([*A, 9][:5])
    assert {"promote", "clean"} == {job.plan.cause for job in rig.jobs()}
    rig.world.do(forget)
    assert not rig.cache._tree.roots
    rig.settle()
    assert [0, 0] == [rig.matched(tokens) for tokens in (A[:3], B[:3])]
    rig.compute(loading)
    rig.do("finish", loading)
    assert 0 == rig.matched([*A, 9])
    assert 8 == rig.free


def test_row_31_a_suspended_page_stays_until_it_has_been_copied() -> None:
    """The pages of a preempted request are nobody's before their copy is over, and then free."""
    rig = Rig(pages=4, suspend_pages=4)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("suspend", request, False)
    (store,) = rig.jobs("suspend")
    assert None is rig.admit([7] * 3)
    rig.finish(store)
    assert None is rig.admit([7] * 3)
    rig.settle()
    other = rig.admitted([7] * 8)
    rig.settle()
    rig.compute(other)
    rig.do("abort", other)
    rig.do("resume", request)
    rig.settle()
    assert not request.holes
    rig.do("extend", request, [8], 0)
    rig.compute(request)


def test_row_31_shared_pages_are_only_let_go_of() -> None:
    """A page that another live request holds is not copied; one that only a copy holds besides is."""
    rig = Rig(pages=16, suspend_pages=8)
    rig.serve([*A, 9])
    reader = rig.admitted([*A[:4], 8])
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("suspend", request, False)
    (store,) = rig.jobs("suspend")
    assert 2 == len(store.plan), "the third page of A, and the tail"
    rig.do("abort", reader)
    rig.settle()
    rig.do("resume", request)
    assert 6 == rig.lease(request).matched_len


def test_a_page_being_cleaned_is_suspended_with_its_request() -> None:
    """The index and its copies do not count: a page is exclusive when no other live request holds it."""
    rig = Rig(pages=8, suspend_pages=8)
    rig.serve([*A, 9])
    blocker = rig.admitted([7] * 4)
    rig.poll()
    assert 3 == len(rig.jobs("clean")[0].plan)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("suspend", request, False)
    assert 4 == len(rig.jobs("suspend")[0].plan)
    rig.settle()
    rig.world.do(("reset",))
    rig.do("resume", request)
    rig.settle()
    assert not request.holes
    rig.do("abort", blocker)


def test_a_suspension_that_finds_no_place_changes_nothing() -> None:
    """Places for preempted requests are set aside: cached pages neither take them nor give theirs."""
    rig = Rig(pages=6, tier_pages=16, suspend_pages=2)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    with pytest.raises(CannotSuspend, match="needs 4 pages for preempted requests, 2 are free"):
        rig.cache.suspend(rig.lease(request), 7)
    rig.do("suspend", request, False)
    assert request.readable
    rig.do("finish", request)
    for n in range(10, 20):
        rig.serve([n] * 7)
        rig.settle()
    assert 2 == rig.traffic.parking.ledger.free


def test_resume_fills_the_holes_that_others_left() -> None:
    """Shared pages were not copied and are gone by now: the resumed request knows which positions to compute again."""
    rig = Rig(pages=6, tier_pages=0, suspend_pages=4)
    rig.serve([*A, 9])
    reader = rig.admitted([*A, 9])
    request = rig.admitted([*A, 8])
    rig.compute(request)
    rig.do("suspend", request, False)
    rig.do("abort", reader)
    rig.settle()
    rig.push_out()
    rig.do("resume", request)
    rig.settle()
    assert [(0, 2), (2, 4), (4, 6)] == request.holes
    rig.compute(request)
    rig.do("extend", request, [8], 0)
    rig.compute(request)
    rig.do("finish", request)
    assert 8 == rig.matched([*A, 8, 8, 9])


def test_suspend_complete_leaves_no_hole() -> None:
    """With every page copied, pages of others may go and the request still comes back whole."""
    rig = Rig(pages=6, tier_pages=0, suspend_pages=4)
    rig.serve([*A, 9])
    reader = rig.admitted([*A, 9])
    request = rig.admitted([*A, 8])
    rig.compute(request)
    rig.do("suspend", request, True)
    rig.do("abort", reader)
    rig.settle()
    rig.push_out()
    rig.do("resume", request)
    rig.settle()
    assert request.readable and not request.holes


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("moment", ["running", "reported", "landed"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_row_33_abort_at_every_moment(when: str, moment: str, direction: str) -> None:
    """A request is aborted while its copy runs, or after: pages stay the copy's until it is over, and are free then."""
    rig = Rig(pages=6, when=when)
    rig.serve([*A, 9])
    if direction == "up":
        rig.push_out()
    request = rig.admitted([*A, 9] if direction == "up" else [8] * 12)
    (copy,) = rig.lease(request).copies
    if moment != "running":
        rig.finish(copy.job)
    if moment == "landed":
        rig.poll()
    rig.do("abort", request)
    assert (moment == "landed") == (not rig.cache.stats().pages_live)
    rig.settle()
    stats = rig.cache.stats()
    assert (0, 6) == (stats.pages_live, stats.pages_free + stats.pages_cached)
    assert 16 == stats.host_pages_free + stats.host_pages_cached


def long_load(rig: Rig) -> None:
    """Chains C, ten pages, and A are in host memory, and a load of C is on the link, which has room for twelve."""
    for tokens in ([7] * 21, [*A, 9]):
        rig.serve(tokens)
        rig.push_out()
    rig.admitted([7] * 21)
    assert (1, 0) == (len(rig.jobs("promote")), rig.waiting)


def test_row_33_a_load_that_has_not_started_is_taken_back() -> None:
    """The last request that waits for a queued load is aborted: no byte is copied, and the pages are free at once."""
    rig = Rig(pages=24, in_flight_pages=12)
    long_load(rig)
    before = rig.cache.stats()
    first, second = rig.admitted([*A, 9]), rig.admitted([*A, 8])
    assert 1 == rig.waiting
    rig.do("abort", first)
    assert 1 == rig.waiting
    rig.do("abort", second)
    after = rig.cache.stats()
    assert (0, before.pages_free, before.host_pages_cached) == (rig.waiting, after.pages_free, after.host_pages_cached)
    third = rig.admitted([*A, 9])
    rig.settle()
    rig.compute(third)
    assert 1 == rig.transfers.stats().revoked


def test_a_load_that_others_have_built_on_is_not_taken_back() -> None:
    """Pages were computed and stored behind the targets of a queued load: it is made, though nobody waits for it."""
    rig = Rig(pages=24, in_flight_pages=12)
    long_load(rig)
    request = rig.admitted([*A, 9])
    writer = rig.admitted([*A, 8, 8, 9], reuse=False)
    rig.compute(writer)
    rig.do("abort", request)
    assert 1 == rig.waiting
    rig.do("finish", writer)
    rig.settle()
    assert 8 == rig.matched([*A, 8, 8, 9])


def test_row_34_a_hundred_aborts_leak_nothing() -> None:
    """Completions count whether or not anybody waits for them."""
    rig = Rig(pages=6)
    rig.serve([*A, 9])
    rig.push_out()
    before = rig.cache.stats()
    for _ in range(100):
        rig.do("abort", rig.admitted([*A, 9]))
        rig.settle()
        rig.push_out()
    after = rig.cache.stats()
    assert (6, before.host_pages_cached) == (after.pages_free, after.host_pages_cached)


def test_row_35_a_hit_below_that_is_dropped_leaves_no_pin() -> None:
    """Admitted and aborted, or refused by a bound, a thousand times: every host page can leave."""
    rig = Rig(pages=12, tier_pages=6, queue_pages=2, in_flight_pages=2)
    others = ([8] * 4 + [9], [9] * 5)
    for tokens in (*others, [*A, 9]):
        rig.serve(tokens)
        rig.push_out()
    waiting = [rig.admitted(tokens) for tokens in others]
    assert (1, 1) == (len(rig.jobs("promote")), rig.transfers.stats().queues.loads)
    for _ in range(100):
        request = rig.admitted([*A, 9])
        assert 0 == rig.lease(request).matched_len, "two pages do not fit into a queue of two beside others"
        rig.do("abort", request)
    for request in waiting:
        rig.do("abort", request)
    rig.settle()
    rig.cache.reset()
    assert (6, 12) == (rig.cache.stats().host_pages_free, rig.free)


def test_row_38_two_requests_that_do_not_fit_together_do_not_wait_for_each_other() -> None:
    """Each has three pages below and needs three more: the second is refused whole, and goes when the first is done."""
    rig = Rig(pages=8)
    for tokens in (A, B):
        rig.serve([*tokens, 9])
    rig.push_out()
    first = rig.admitted([*A, *[8] * 5])
    assert None is rig.admit([*B, *[8] * 5])
    assert 6 == rig.cache.stats().pages_live
    rig.settle()
    rig.compute(first)
    rig.do("finish", first)
    second = rig.admitted([*B, *[8] * 5])
    rig.settle()
    rig.compute(second)


@pytest.mark.parametrize("when", WHEN)
def test_row_40_a_load_that_fails_is_known_to_all(when: str) -> None:
    """The first that waits computes the pages itself, the others end and come again; nothing of it is published."""
    rig = Rig(pages=16, when=when)
    rig.serve([*A, 9])
    rig.push_out()
    first, second = rig.admitted([*A, 9]), rig.admitted([*A, 8])
    gone = rig.lease(second)
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    rig.finish(load)
    rig.poll()
    lease = rig.lease(first)
    assert (False, 0, 7) == (lease.revoked, lease.matched_len, lease.length)
    assert all(rig.cache._ledger.state(page) is State.OPEN for page in lease.pages)
    assert gone.revoked and not gone.live
    assert 0 == rig.matched([*A, 9])
    stats = rig.cache.stats()
    assert (6, 1) == (stats.lost_tokens, stats.revocations)
    assert 1 == rig.transfers.stats().failures
    rig.compute(first)
    assert 6 == rig.matched([*A, 8]), "what the first computes the second finds"


@pytest.mark.parametrize("cause", ["clean", "demote"])
def test_row_40_a_store_that_fails_is_no_copy(cause: str) -> None:
    """A page whose copy down failed is not found below; what is on the GPU stays."""
    rig = Rig(pages=4)
    rig.serve([1, 1, 9])
    if cause == "clean":
        rig.poll()
        waiting = None
    else:
        waiting = rig.admitted([7] * 8)
    (store,) = rig.jobs()
    assert cause == store.plan.cause
    rig.backend.fail(store)
    rig.finish(store)
    rig.poll()
    assert 0 == rig.host_cached
    if waiting is not None:
        rig.compute(waiting)
        rig.do("abort", waiting)
    assert (2 if cause == "clean" else 0) == rig.matched([1, 1, 9])


def test_rows_41_and_45_a_host_page_is_let_go_of_once() -> None:
    """A second release of a host page raises, names the page, and frees nothing."""
    rig = Rig()
    rig.serve([*A, 9])
    rig.push_out()
    request = rig.admitted([*A, 9])
    (copy,) = rig.lease(request).copies
    rig.settle()
    with pytest.raises(InvariantViolation, match="released"):
        rig.host.release(array("i", copy.host), copy)
    rig.cache.check_invariants()


def test_row_44_every_host_page_can_leave_after_every_way_out() -> None:
    """After hits, aborts, failures and suspensions nothing in host memory is held by anybody."""
    rig = Rig(pages=8, tier_pages=6, suspend_pages=8)
    for round_ in range(3):
        rig.serve([*A, 9])
        rig.push_out()
        request = rig.admitted([*A, 9])
        if round_ == 1:
            rig.backend.fail(rig.jobs("promote")[0])
        if round_ == 2:
            rig.do("abort", request)
        rig.settle()
        if round_ != 2:
            rig.do("suspend", request, False)
            rig.settle()
            rig.do("discard", request)
    for n in range(10, 14):
        rig.serve([n] * 13)
        rig.push_out()
        assert (6, 6) == (rig.host_cached, rig.host_only)
    assert 12 == rig.matched([13] * 13)


def test_row_47_both_tiers_are_full_and_there_is_room() -> None:
    """The GPU is full of cached pages, host memory of hotter ones or of pinned ones: cached pages are dropped."""
    rig = Rig(pages=6, tier_pages=3)
    rig.serve([*A, 9])
    rig.push_out()
    rig.serve([*B, 9])
    loading = rig.admitted([*A, 9][:3])
    assert rig.lease(loading).read_in_progress
    request = rig.admitted([7] * 8)
    rig.settle()
    rig.compute(request)
    rig.do("extend", loading, [8] * 2, 0)
    rig.compute(loading)


def test_what_hangs_behind_a_dropped_last_copy_goes_with_it() -> None:
    """Pages leave without a copy: what host memory has behind them cannot be reached any more, and goes too."""
    rig = Rig(pages=6, tier_pages=1)
    rig.serve([*A, 9])
    rig.do("abort", rig.admitted([7] * 8))  # the tail goes down
    rig.settle()
    assert (1, 6) == (rig.host_only, rig.matched([*A, 9]))
    rig.settle()
    runner = rig.admitted([7])
    rig.do("extend", runner, [7] * 11, 0)  # cannot wait: all of the chain is dropped
    assert (0, 0) == (rig.host_cached, rig.host_only)
    assert 1 == rig.cache.stats().host_pages_free
    rig.do("abort", runner)
    assert 0 == rig.matched([*A, 9])
