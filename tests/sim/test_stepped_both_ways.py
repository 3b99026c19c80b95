"""A page goes up into the place of one that goes down: the load waits for the store, and nothing is lost for it.

Must not leave anything to a seed.
"""

import pytest

from kvkeep.tiers.ledger import State
from tests.sim.request import Request
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages
B = [4, 4, 5, 5, 6, 6, 7, 7]  # four


def b_of(rig: Rig) -> list[int]:
    """As many pages as there are."""
    return [4, 5] * rig.world.setup.pages


def exchange(**setup: object) -> tuple[Rig, Request]:
    """A is in host memory, B fills the GPU and has no other copy; A is asked for."""
    rig = Rig(**{"pages": 4, **setup})
    rig.serve([*A, 9])
    rig.push_out()
    rig.serve_alone(b_of(rig))
    request = rig.admitted([*A, 9])
    assert (1, 0, 0) == (len(rig.jobs("demote")), len(rig.jobs("promote")), rig.waiting)
    return rig, request


@pytest.mark.parametrize("when", ["early", "split", "late"])
def test_a_load_into_pages_on_their_way_down_starts_when_they_are(when: str) -> None:
    """Both chains are whole afterwards, each in its tier, and nobody has read or written too early."""
    rig, request = exchange(when=when)
    lease = rig.lease(request)
    assert [State.LOADING] * 3 == [rig.cache._ledger.state(page) for page in lease.pages[:3]]
    assert (6, 0, 4) == (lease.matched_len, rig.cache.stats().pages_lost, rig.cache.stats().pages_demoted)
    rig.poll()
    assert not rig.jobs("promote")
    rig.finish(rig.jobs("demote")[0])
    assert not rig.jobs("promote")
    rig.poll()
    (load,) = rig.jobs("promote")
    assert lease.read_in_progress
    rig.finish(load)
    rig.poll()
    assert request.readable
    rig.compute(request)
    rig.do("finish", request)
    assert 6 == rig.serve(b_of(rig))


def test_others_join_a_load_that_has_not_started() -> None:
    """Who matches the pages meanwhile waits for the same load, not for what it waits for."""
    rig, request = exchange(pages=6)
    second = rig.admitted([*A[:2], 8])
    assert 2 == rig.lease(second).matched_len and rig.lease(second).read_in_progress
    rig.settle()
    for one in (request, second):
        rig.compute(one)
        rig.do("finish", one)


def test_a_load_that_nobody_waits_for_is_not_made() -> None:
    """The request is aborted before the pages are down: they stay the store's until they are, and are free then."""
    rig, request = exchange()
    draining = rig.lease(request).pages[:3]
    rig.do("abort", request)
    assert [State.DRAINING] * 3 == [rig.cache._ledger.state(page) for page in draining]
    assert 0 == rig.free
    rig.settle()
    assert (4, 0) == (rig.free, rig.transfers.stats().by["h2d", "promote"].copies)
    assert 6 == rig.matched([*A, 9])
    rig.settle()
    assert 6 == rig.serve(b_of(rig))


def test_a_store_that_never_ends_releases_who_waits_for_the_load_behind_it() -> None:
    """At the store's deadline all who wait for either end; the pages stay the store's."""
    rig, request = exchange(pages=6, deadline_steps=10)
    second = rig.admitted([*A[:2], 8])
    leases = rig.lease(request), rig.lease(second)
    store, another = rig.jobs("demote")
    rig.backend.stick(store)
    rig.finish(another)
    rig.world.do(("late", 10))
    rig.poll()
    assert all(lease.revoked for lease in leases)
    cleaned = sum(len(job.plan) for job in rig.jobs("clean"))  # the link counts as idle beside it
    assert len(store.plan) == rig.cache.stats().pages_live - cleaned
    for job in rig.jobs("clean"):
        rig.finish(job)
    rig.poll()
    assert 2 == rig.matched([*A[:2], 8]), "the load was not made, so its pages are still to be had below"
    rig.settle()
    rig.finish(store)
    rig.poll()
    assert 0 == rig.cache.stats().pages_live


@pytest.mark.parametrize("happens", ["store fails", "device dies"])
def test_a_load_behind_a_store_that_fails(happens: str) -> None:
    """The load does not care what became of the store; when no copy is made any more the request computes its pages."""
    rig, request = exchange()
    (store,) = rig.jobs("demote")
    if happens == "store fails":
        rig.backend.fail(store)
        rig.settle()
        assert 6 == rig.lease(request).matched_len
    else:
        lease = rig.lease(request)
        rig.world.do(("die",))
        rig.poll()
        assert 0 == lease.matched_len and not lease.revoked and not lease.read_in_progress
    rig.compute(request)
    rig.do("finish", request)
    rig.settle()
    assert 6 == rig.matched([*A, 9])
    rig.settle()
    assert 0 == rig.matched(b_of(rig))


def resumed() -> tuple[Rig, Request]:
    """A preempted request that is coming back into a pool that another chain fills."""
    rig = Rig(pages=4, suspend_pages=4)
    request = rig.admitted([*A, 9], store=False)
    rig.compute(request)
    rig.do("suspend", request, False)
    rig.settle()
    rig.serve_alone(B)
    rig.do("resume", request)
    return rig, request


def test_a_preempted_request_comes_back_into_pages_on_their_way_down() -> None:
    """Resuming waits as an admission does, and nothing that is cached is lost for it."""
    rig, request = resumed()
    assert (1, 0) == (len(rig.jobs("demote")), len(rig.jobs("resume")))
    rig.settle()
    assert request.readable and not request.holes
    rig.do("extend", request, [8], 0)
    rig.compute(request)
    rig.do("abort", request)
    assert 6 == rig.serve(B)
    assert 4 == rig.traffic.parking.ledger.free


def test_a_preempted_request_that_ends_while_it_comes_back() -> None:
    """Its pages are not copied up any more, and are nobody's when they are down."""
    rig, request = resumed()
    rig.do("abort", request)
    assert 4 == rig.traffic.parking.ledger.free
    rig.settle()
    assert (4, 0) == (rig.free, rig.transfers.stats().by["h2d", "resume"].copies)
