"""Copies moved by hand: who may read, write or have a page while one runs.  By the numbers in the list of invariants.

Must not leave anything to a seed.
"""

from array import array

import pytest

from kvkeep.errors import InvariantViolation, NotReady
from kvkeep.tiers.ledger import State
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages
B = [4, 4, 5, 5, 6, 6]


def state(rig: Rig, page: int) -> State:
    return rig.cache._ledger.state(page)


def test_row_18_a_store_waits_for_the_last_write_of_its_source() -> None:
    """A page is copied down only when the forward that writes it is over, and the copy was told which one that is."""
    rig = Rig(pages=4, asynchronous=True)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("finish", request)
    rig.poll()
    (store,) = rig.jobs("clean")
    assert store.after is rig.world.device.event
    assert not rig.backend.movable
    rig.world.do(("written",))
    assert [store] == rig.backend.movable
    rig.push_out()
    assert 6 == rig.serve([*A, 9])


def test_row_19_a_page_is_nobody_elses_while_it_is_copied_out() -> None:
    """Neither an admission nor a running request gets the source of a store before its bytes are read."""
    rig = Rig(pages=2)
    rig.serve([1, 1, 9])
    rig.poll()
    assert 1 == len(rig.jobs("clean"))
    runner = rig.admitted([8])
    before = rig.cache.stats()
    assert None is rig.admit([7])
    rig.do("extend", runner, [8, 8], 0)
    assert (1, 2) == (len(rig.lease(runner).pages), rig.cache.stats().refusals - before.refusals)
    rig.finish(rig.jobs("clean")[0])
    rig.poll()
    rig.do("extend", runner, [8, 8], 0)
    assert 2 == len(rig.lease(runner).pages)


def test_row_19_a_page_promised_to_a_request_is_written_only_when_it_has_been_copied_out() -> None:
    """An admission that can wait is promised pages that are on their way down; it may not touch them until they are."""
    rig = Rig(pages=4)
    rig.serve([*A, 9])
    request = rig.admitted([7] * 8)
    (store,) = rig.jobs("demote")
    assert rig.lease(request).read_in_progress
    assert [State.OPEN, State.DRAINING, State.DRAINING, State.DRAINING] == sorted(
        state(rig, page) for page in rig.lease(request).pages
    )
    rig.finish(store)
    assert rig.lease(request).read_in_progress
    rig.poll()
    assert not rig.lease(request).read_in_progress
    rig.compute(request)
    rig.do("finish", request)
    assert 6 == rig.serve([*A, 9])


def test_row_19_a_stream_may_go_on_behind_the_copies_out_of_its_pages() -> None:
    """Once the engine's stream comes after a store, forwards are launched at once and write when it has read."""
    rig = Rig(pages=4, asynchronous=True)
    first = rig.admitted([*A, 9])
    rig.compute(first)
    rig.do("finish", first)
    rig.world.do(("written",))
    request = rig.admitted([7] * 8)
    (store,) = rig.jobs("demote")
    assert not rig.lease(request).gate.open
    rig.do("follow", request)
    assert rig.lease(request).gate.open and not rig.lease(request).read_in_progress
    assert [State.OPEN] * 4 == [state(rig, page) for page in rig.lease(request).pages]
    assert 1 == rig.cache.stats().room_wait.count
    rig.compute(request)
    assert [State.READY] * 4 == [state(rig, page) for page in rig.lease(request).pages]
    assert not rig.world.device.finish_one(), "the write comes after the store"
    rig.do("abort", request)
    assert 0 == rig.free, "the store still reads them, and the index has the rest"
    rig.finish(store)
    assert rig.world.device.finish_one()
    rig.settle()
    assert 3 == rig.matched([*A, 9]) // 2


def test_row_19_a_stream_does_not_go_on_before_loads() -> None:
    """Loads, and stores that have not started, keep the gate closed whatever the stream."""
    rig = Rig(pages=4, asynchronous=True, in_flight_pages=3)
    first = rig.admitted([*A, 9])
    rig.compute(first)
    rig.do("finish", first)
    rig.world.do(("written",))
    rig.push_out()
    loading = rig.admitted([*A, 9])
    (load,) = rig.jobs("promote")
    rig.do("follow", loading)
    assert rig.lease(loading).read_in_progress
    rig.finish(load)
    rig.poll()
    assert rig.lease(loading).gate.open


def test_row_19_the_stream_may_not_write_what_a_copy_reads() -> None:
    """A forward over a lease whose gate is closed is seen by the backend, which stops the program."""
    rig = Rig(pages=4, when="split")
    rig.serve([*A, 9])
    request = rig.admitted([7] * 8)
    draining = next(p for p in rig.lease(request).pages if state(rig, p) is State.DRAINING)
    with pytest.raises(InvariantViolation, match="while"):
        rig.backend.writing([draining])


def test_row_20_what_a_copy_was_told_does_not_change() -> None:
    """Two loads are submitted before any moves, and their requests change meanwhile: each copies what it was given."""
    rig = Rig(pages=12)
    rig.serve([*A, 9])
    rig.serve([*B, 9])
    rig.push_out()
    first, second = rig.admitted([*A, 9]), rig.admitted([*B, 9])
    pages = rig.lease(first).pages[:3], rig.lease(second).pages[:3]
    told = [copy.job.plan for copy in rig.traffic.copies if copy.job is not None]
    rig.do("extend", first, [9, 9, 9], 0)
    assert list(pages) == [plan.targets for plan in told]
    rig.settle()
    for request in (first, second):
        rig.compute(request)
        rig.do("finish", request)


def test_row_21_the_target_of_a_store_is_not_taken_for_another() -> None:
    """One place in host memory, on which a store is in flight: the next one is not made, and the first is whole."""
    rig = Rig(pages=4, tier_pages=1)
    rig.serve([1, 1, 9])
    rig.serve([2, 2, 9])
    request = rig.admitted([7] * 8)  # both have to leave
    (store,) = rig.jobs()
    assert (1, 1, 1) == (len(store.plan), rig.cache.stats().pages_demoted, rig.cache.stats().pages_lost)
    rig.finish(store)
    rig.poll()
    rig.do("abort", request)
    assert [0, 2] == [rig.matched([2, 2, 9]), rig.serve([1, 1, 9])]


def test_row_23_a_load_keeps_its_sources_while_room_is_made_for_it() -> None:
    """Host memory is full of what is to be loaded, and the GPU of hotter pages: those do not push out the sources."""
    rig = Rig(pages=4, tier_pages=3)
    rig.serve([*A, 9])
    rig.push_out()
    hot = rig.admitted([*B, 9])
    rig.compute(hot)
    rig.do("finish", hot)
    request = rig.admitted([*A, 9])
    assert 6 == rig.lease(request).matched_len
    rig.settle()
    rig.compute(request)
    assert 0 == rig.cache.stats().lost_tokens


def test_row_23_what_was_seen_may_be_gone_at_admission() -> None:
    """A chain in host memory is seen, then pushed out, then asked for: the hit is shorter, and all it has is right."""
    rig = Rig(pages=4, tier_pages=3)
    rig.serve([*A, 9])
    rig.push_out()
    assert 6 == rig.matched([*A, 9])
    rig.settle()
    rig.serve([*B, 9])
    rig.push_out()
    assert 6 > rig.serve([*A, 9])


def test_row_25_a_load_comes_after_what_was_written_before() -> None:
    """Pages that a stream still writes for a request that is gone are loaded into only when it has."""
    rig = Rig(pages=4, asynchronous=True)
    rig.serve([*A, 9])
    rig.world.do(("written",))
    rig.push_out()
    gone = rig.admitted([7] * 8, store=False)
    rig.compute(gone)
    rig.do("abort", gone)
    request = rig.admitted([*A, 9])
    (load,) = rig.jobs("promote")
    assert load.after is rig.world.device.event and not rig.backend.movable
    rig.world.do(("written",))
    rig.finish(load)
    rig.poll()
    assert rig.world.device.page_bytes(rig.lease(request).pages[0]) == request.pages[0]


def test_row_28_a_page_that_went_down_and_up_is_known_by_where_it_is_now() -> None:
    """After a round trip a chain lies on other GPU pages; the old ids, which are others' now, lead nowhere."""
    rig = Rig(pages=6)
    rig.serve([*A, 9])
    (before,) = [run.pages[:] for run in rig.cache._tree.runs()]
    rig.push_out()
    rig.cache._ledger._free.reverse()
    other = rig.admitted([7] * 4)
    request = rig.admitted([*A, 9])
    rig.settle()
    after = rig.lease(request).pages[:3]
    assert before != after
    rig.compute(other)
    rig.compute(request)
    assert [after] == [run.pages for run in rig.cache._tree.runs() if len(run.names) == 3]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_row_29_pages_arrive_in_the_order_of_the_chain(order: tuple[int, ...]) -> None:
    """Whatever places the pages of a chain have in host memory, each comes back to its own position."""
    rig = Rig(pages=8)
    rig.host._free[-3:] = array("i", order)
    rig.serve([*A, 9])
    rig.push_out()
    (places,) = [run.host for run in rig.cache._tree.runs()]
    assert list(order) == list(places or ())
    assert 6 == rig.serve([*A, 9])


@pytest.mark.parametrize("when", ["early", "split", "late"])
def test_a_page_is_read_only_when_it_has_landed(when: str) -> None:
    """Whoever matches pages that are on their way up joins the copy, and its gate opens when it is over."""
    rig = Rig(pages=8, when=when)
    rig.serve([*A, 9])
    rig.push_out()
    first, second = rig.admitted([*A, 9]), rig.admitted([*A[:4], 9])
    assert (6, 4) == (rig.lease(first).matched_len, rig.lease(second).matched_len)
    (load,) = rig.jobs("promote")
    rig.finish(load)
    assert rig.lease(first).read_in_progress and rig.lease(second).read_in_progress
    rig.poll()
    assert first.readable and second.readable


@pytest.mark.parametrize("when", ["early", "split", "late"])
def test_a_page_is_loaded_only_when_it_has_landed_below(when: str) -> None:
    """What is on its way down is no hit, on no tier, until it is there."""
    rig = Rig(pages=4, when=when)
    rig.serve([1, 1, 9])
    request = rig.admitted([7] * 7)
    (store,) = rig.jobs("demote")
    rig.do("abort", request)
    assert 0 == rig.matched([1, 1, 9])
    rig.finish(store)
    assert 0 == rig.matched([1, 1, 9])
    rig.poll()
    assert 2 == rig.matched([1, 1, 9])


def test_one_load_serves_everybody() -> None:
    """Requests that need pages on their way join that copy: no byte is copied twice, and each is counted once."""
    rig = Rig(pages=16)
    rig.serve([*A, 9])
    rig.push_out()
    requests = [rig.admitted([*A, 9, n]) for n in range(4)]
    assert 1 == len(rig.jobs("promote"))
    stats = rig.cache.stats()
    assert (6, 18) == (stats.matched_host_tokens, stats.matched_gpu_tokens)
    rig.settle()
    for request in requests:
        rig.compute(request)


def test_a_copy_finds_its_pages_after_their_run_was_split() -> None:
    """A run is split while its pages are copied down and the copy fails: the right entries lose their host copies."""
    rig = Rig(pages=10)
    rig.serve([*A, 9])
    blocker = rig.admitted([7] * 8)
    rig.poll()
    (store,) = rig.jobs("clean")
    assert 3 == len(store.plan)
    rig.serve_alone([*A[:2], 8, 8, 9])
    assert 3 == sum(1 for run in rig.cache._tree.runs() if run.tokens[0] in (1, 2, 8))
    rig.backend.fail(store)
    rig.finish(store)
    rig.poll()
    rig.do("abort", blocker)
    assert 6 == rig.matched([*A, 9])
    rig.push_out()
    assert 6 == rig.serve([*A, 9])


def test_resume_waits_for_its_own_suspension() -> None:
    """Row 32: a request that comes back while its pages are on their way down is told to come again, not lost."""
    rig = Rig(suspend_pages=4)
    request = rig.admitted([*A, 9])
    rig.compute(request)
    rig.do("suspend", request, False)
    assert request.ticket is not None
    with pytest.raises(NotReady, match="still running"):
        rig.cache.resume(request.ticket, request.tokens)
    rig.settle()
    rig.do("resume", request)
    rig.settle()
    assert request.readable and not request.holes
