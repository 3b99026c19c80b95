"""Encoder outputs moved by hand, and a few operations on them in every order.

Must not leave anything to a seed.
"""

from itertools import product

import pytest

from kvkeep.tiers.ledger import State
from tests.sim.ending import end
from tests.sim.output_rig import OutputRig

# Outputs by number, in pages of 16 bytes:
SMALL, SMALL_TOO, LESS, WHOLE, LARGE, MIXED = 0, 4, 2, 7, 3, 1  # 7, 5, 1, 16, 51 and 22 bytes


def two_of_a_page(rig: OutputRig) -> None:
    """Two outputs in slots of one page."""
    assert rig.put(SMALL) and rig.put(SMALL_TOO)
    slots = rig.cache._ledger.slots
    assert slots is not None and 1 == len(slots.pages)


def fill(rig: OutputRig) -> None:
    """Prompts come and go: one leaves a page, where slots are while they are copied down, and one takes all."""
    for left in (1, 0):
        rig.settle()
        request = rig.admitted([9] * (2 * (rig.world.setup.pages - left)), reuse=False, store=False)
        rig.settle()
        rig.do("abort", request)


# ---------------------------------------------------------------------- in every order

STEPS = ("put 0", "put 4", "put 1", "hold 0", "hold 1", "let go", "admit", "poll", "move", "forget 0")


def play(rig: OutputRig, steps: tuple[str, ...]) -> None:
    """Steps that make no sense do nothing."""
    for step in steps:
        what, _, which = step.partition(" ")
        if what == "put" and not rig.on_gpu(int(which)):
            occurrence = rig.reserve(int(which))
            if occurrence is not None:
                rig.write(occurrence)
                rig.let_go(occurrence)
        elif what == "hold":
            rig.find(int(which))
        elif what == "let" and rig.out.live:
            rig.let_go(next(iter(rig.out.live.values())))
        elif what == "admit":
            request = rig.admit([9] * 4, reuse=False, store=False)
            if request is not None:
                rig.do("abort", request)
        elif what == "poll":
            rig.poll()
        elif what == "move" and rig.backend.movable:
            rig.finish(rig.backend.movable[0])
            rig.poll()
        elif what == "forget":
            rig.world.do(("output", "forget", 0, int(which)))


@pytest.mark.parametrize("first", STEPS)
def test_a_few_steps_in_every_order(first: str) -> None:
    """Two outputs that share a page, one beside it, in a pool of two pages over one of two: four steps and the end."""
    for rest in product(STEPS, repeat=2):
        for before in (("put 0", "put 4"), ("put 0", "put 1", "admit", "move")):
            rig = OutputRig(pages=2, tier_pages=2)
            play(rig, (*before, first, *rest))
            end(rig.world)


@pytest.mark.slow
@pytest.mark.parametrize("first", STEPS)
def test_more_steps_in_every_order(first: str) -> None:
    """The same with one step more, and in a pool of three pages."""
    for rest in product(STEPS, repeat=3):
        for before in (("put 0", "put 4"), ("put 0", "put 1", "admit", "move")):
            rig = OutputRig(pages=3, tier_pages=2, when="split")
            play(rig, (*before, first, *rest))
            end(rig.world)


# ---------------------------------------------------------------------- found, or easily done wrong


def test_outputs_in_slots_leave_between_pages() -> None:
    """In one tier an admission takes pages, a slot and pages again: each is counted as what it is."""
    rig = OutputRig(pages=4, tier_pages=None)
    assert rig.put(SMALL)
    rig.serve_alone([1, 1, 9])
    assert rig.put(WHOLE)
    assert 3 == rig.cache.stats().pages_cached
    request = rig.admitted([8] * 8)
    assert 4 == len(rig.lease(request).pages)


def test_an_output_in_slots_leaves_before_a_page() -> None:
    """The slot comes first in what leaves."""
    rig = OutputRig(pages=2, tier_pages=None)
    assert rig.put(SMALL)
    rig.serve_alone([1, 1, 9])
    rig.do("abort", rig.admitted([8] * 4))
    assert 2 == rig.free


@pytest.mark.parametrize("tier_pages", [None, 4])
def test_a_refused_output_has_dropped_nothing(tier_pages: int | None) -> None:
    """A page could be had and the slot could not: nothing leaves."""
    rig = OutputRig(pages=2, tier_pages=tier_pages)
    rig.serve_alone([1, 1, 9])
    blocker = rig.admitted([8, 8])
    assert None is rig.reserve(MIXED)
    assert 1 == rig.cache.stats().pages_cached
    rig.do("abort", blocker)


@pytest.mark.parametrize("tier_pages", [None, 4])
def test_slots_leave_one_by_one_until_there_is_room(tier_pages: int | None) -> None:
    """A page full of small outputs, none free: the coldest one leaves, not the page."""
    rig = OutputRig(pages=1, tier_pages=tier_pages)
    for which in (0, 4, 2):  # 4, 3 and 1 of 8 granules
        assert rig.put(which)
    assert rig.put(6)  # one granule
    assert [False, True, True, True] == [rig.on_gpu(which) for which in (0, 4, 2, 6)]


def test_no_room_is_made_for_a_load_that_is_refused() -> None:
    """The device that copies is gone: what is cached on the GPU stays there."""
    rig = OutputRig(pages=4)
    assert rig.put(LARGE)
    fill(rig)
    assert rig.in_host(LARGE) and not rig.on_gpu(LARGE)
    rig.serve_alone([1, 1, 2, 2, 3, 3, 9])
    rig.world.do(("die",))
    rig.poll()
    rig.poll()  # what the first one started has failed
    assert (1, 3) == (rig.free, rig.cache.stats().pages_cached)
    assert None is rig.find(LARGE)
    assert 3 == rig.matched([1, 1, 2, 2, 3, 3, 9]) // 2


def test_an_output_on_its_way_down_is_counted_while_pages_are_promised() -> None:
    """KV pages and an output leave for one admission: what the output's copy holds besides cannot be had."""
    rig = OutputRig(pages=4, tier_pages=16)
    rig.serve_alone([1, 1, 9])
    assert rig.put(MIXED)  # a page and a slot
    request = rig.admitted([8] * 6)
    assert 3 == len(rig.lease(request).pages)
    rig.settle()
    rig.compute(request)
    rig.do("finish", request)


def test_an_output_that_is_loaded_is_joined_and_whole() -> None:
    """Two occurrences wait for one load; a third that comes when it has failed computes."""
    rig = OutputRig(pages=4)
    assert rig.put(LARGE)
    fill(rig)
    first, second = rig.find(LARGE), rig.find(LARGE)
    assert first is not None and second is not None
    assert first.hold.from_host and not second.hold.from_host
    assert first.hold.read_in_progress and second.hold.read_in_progress
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    rig.settle()
    assert first.hold.revoked and second.hold.revoked
    assert None is rig.find(LARGE)
    assert 4 == rig.free


def test_an_output_is_stored_while_its_copy_down_runs() -> None:
    """It has left the GPU, is computed again and found there; when the copy fails it is on the GPU only."""
    rig = OutputRig(pages=6)
    assert rig.put(MIXED)
    rig.serve_alone([1] * 8)
    blocker = rig.admitted([7] * 4)
    store = next(job for job in rig.jobs("demote") if job.plan.slots)
    assert not rig.on_gpu(MIXED) and rig.in_host(MIXED)
    rig.do("abort", blocker)
    assert None is rig.find(MIXED), "its bytes are not there yet"
    assert rig.put(MIXED)
    assert rig.on_gpu(MIXED) and rig.in_host(MIXED)
    rig.backend.fail(store)
    rig.finish(store)
    rig.poll()
    assert rig.on_gpu(MIXED) and not rig.in_host(MIXED)


def both(rig: OutputRig, which: int) -> None:
    """An output with copies on both tiers."""
    if not rig.on_gpu(which):
        assert rig.put(which)
    rig.settle()
    if not rig.in_host(which):
        fill(rig)
        occurrence = rig.find(which)
        assert occurrence is not None
        rig.settle()
        rig.let_go(occurrence)
    assert rig.on_gpu(which) and rig.in_host(which)


def test_hot_outputs_give_up_no_more_places_than_are_needed() -> None:
    """Three held outputs have host copies: for one place one of them loses its own."""
    rig = OutputRig(pages=16, tier_pages=4)
    for which in (WHOLE, LESS):
        both(rig, which)
    tree, host = rig.cache._tree, rig.host
    held = [rig.find(which) for which in (WHOLE, LESS)]
    assert all(held)
    rig.settle()
    assert 2 == host.free
    assert 1 == tree.doubles.evict(tree, 1, 0)
    assert 3 == host.free
    assert 1 == sum(rig.in_host(which) for which in (WHOLE, LESS))


def test_a_host_copy_that_could_not_be_given_up_is_looked_at_again() -> None:
    """While the output is cold its copy below stays; once somebody holds it the place is to be had."""
    rig = OutputRig(pages=16, tier_pages=4)
    both(rig, WHOLE)
    tree = rig.cache._tree
    run = rig.run(WHOLE)
    assert run is not None
    assert 0 == tree.doubles.evict(tree, 1, run.stamps[0] + 1)
    occurrence = rig.find(WHOLE)
    assert occurrence is not None
    assert 1 == tree.doubles.evict(tree, 1, run.stamps[0] + 1)


def test_an_output_computed_again_gives_up_its_host_copy() -> None:
    """It is on both tiers then, like one that was loaded."""
    rig = OutputRig(pages=4, tier_pages=8)
    assert rig.put(WHOLE)
    fill(rig)
    assert not rig.on_gpu(WHOLE) and rig.in_host(WHOLE)
    tree = rig.cache._tree
    assert 0 == tree.doubles.evict(tree, 1, 0), "it is its last copy, and noted as that"
    occurrence = rig.reserve(WHOLE)
    assert occurrence is not None
    rig.write(occurrence)
    assert 1 == tree.doubles.evict(tree, 1, 0)
    assert rig.on_gpu(WHOLE) and not rig.in_host(WHOLE)


def test_host_memory_frees_as_many_pages_as_are_asked_for() -> None:
    """Slots of one page are no pages each: more leave until a page is free."""
    rig = OutputRig(pages=4)
    for which in (SMALL, SMALL_TOO, LESS):
        assert rig.put(which)
    blocker = rig.admitted([8] * 6)
    rig.settle()  # none is free: they are copied down ahead of need
    rig.do("abort", blocker)
    rig.push_out()
    assert all(rig.in_host(which) and not rig.on_gpu(which) for which in (SMALL, SMALL_TOO, LESS))
    assert 15 == rig.host.free
    tree = rig.cache._tree
    assert 1 == tree.evict_host(1, 1 << 40)
    assert 16 == rig.host.free


def test_an_output_larger_than_host_memory_takes_nobodys_place() -> None:
    """It cannot be copied down, so nothing leaves for it."""
    rig = OutputRig(pages=6, tier_pages=2)
    rig.serve([1, 1, 2, 2, 9])
    fill(rig)
    below = rig.host_only
    assert below
    assert rig.put(LARGE)
    fill(rig)
    assert rig.host_only >= below and None is rig.run(LARGE)


def test_a_reset_forgets_outputs_and_those_on_their_way() -> None:
    """What is held can be read on; what is being computed is not stored."""
    rig = OutputRig(pages=8)
    assert rig.put(SMALL)
    held, coming = rig.find(SMALL), rig.reserve(MIXED)
    assert held is not None and coming is not None
    rig.world.do(("reset",))
    rig.write(coming)
    assert None is rig.find(MIXED) and None is rig.find(SMALL)
    rig.let_go(coming)
    rig.let_go(held)
    assert 8 == rig.free
    assert rig.put(MIXED)
    assert rig.on_gpu(MIXED)


def test_copies_of_an_output_take_nothing_from_the_index() -> None:
    """An admission that is short of idle pages behind copies takes KV pages out of the index, not outputs."""
    rig = OutputRig(pages=8, tier_pages=16)
    rig.serve_alone([1, 1, 2, 2, 9])
    assert rig.put(WHOLE)
    rig.poll()
    run = rig.run(WHOLE)
    assert run is not None
    if rig.cache._ledger.state(run.pages[0]) is State.READY and rig.jobs("clean"):
        assert rig.cache._traffic is not None
        rig.cache._traffic.shed()
        rig.cache.check_invariants()
        assert rig.on_gpu(WHOLE)


def test_what_goes_down_comes_up_whole() -> None:
    """Pages and slot of one output, in one copy each way."""
    rig = OutputRig(pages=6)
    assert rig.put(LARGE)
    fill(rig)
    assert rig.in_host(LARGE) and not rig.on_gpu(LARGE)
    occurrence = rig.find(LARGE)
    assert occurrence is not None
    (load,) = rig.jobs("promote")
    assert (3, 1) == (len(load.plan), len(load.plan.slots))
    rig.settle()
    assert not occurrence.hold.revoked
    rig.let_go(occurrence)


def test_a_slot_goes_down_beside_others() -> None:
    """Where it is in its page below has nothing to do with where it was above."""
    rig = OutputRig(pages=6)
    for which in (SMALL, SMALL_TOO, LESS):
        assert rig.put(which)
    rig.world.do(("output", "forget", 0, SMALL))
    fill(rig)
    assert rig.in_host(SMALL_TOO) and rig.in_host(LESS)
    for which in (LESS, SMALL_TOO):
        occurrence = rig.find(which)
        assert occurrence is not None
        rig.settle()


@pytest.mark.parametrize("tier_pages", [None, 4])
def test_an_output_that_is_held_stays(tier_pages: int | None) -> None:
    """It is the coldest, and something else leaves for an admission; two pages are refused."""
    rig = OutputRig(pages=3, tier_pages=tier_pages)
    assert rig.put(WHOLE)
    rig.serve_alone([1, 1, 9])
    held = rig.find(WHOLE)
    assert held is not None
    rig.do("abort", rig.admitted([8] * 4))
    assert None is rig.admit([8] * 6)
    assert rig.on_gpu(WHOLE)


@pytest.mark.parametrize("tier_pages", [None, 0])
def test_an_output_leaves_as_a_whole(tier_pages: int | None) -> None:
    """One page is short: all of the output is gone, and the rest of its pages is free."""
    rig = OutputRig(pages=4, tier_pages=tier_pages, suspend_pages=1)
    assert rig.put(LARGE)
    rig.do("abort", rig.admitted([9]))
    assert None is rig.run(LARGE)
    assert 4 == rig.free


def test_an_output_leaves_host_memory_as_a_whole() -> None:
    """The same below: nothing of it stays, and it is not found."""
    rig = OutputRig(pages=6, tier_pages=6)
    assert rig.put(LARGE)
    fill(rig)
    assert rig.in_host(LARGE) and not rig.on_gpu(LARGE)
    tree = rig.cache._tree
    assert 4 == tree.evict_host(1, 1 << 40)
    assert None is rig.run(LARGE)
    assert 6 == rig.host.free


def test_pages_promised_already_are_not_spared_for_an_output() -> None:
    """KV pages are on their way down for the request when the output's turn comes: they are idle no more."""
    rig = OutputRig(pages=4, tier_pages=16)
    rig.serve_alone([1, 1, 2, 2, 9])
    assert rig.put(MIXED)
    assert 4 == rig.cache.stats().pages_cached
    request = rig.admitted([8] * 8)
    assert 4 == len(rig.lease(request).pages)
    rig.settle()
    assert request.readable


def test_outputs_of_one_name_are_told_apart() -> None:
    """Two records whose names collide: each gives its own bytes, and one leaves without the other."""
    rig = OutputRig(narrow_names=True)
    one, other = 0, 1
    assert rig.put(one) and rig.put(other)
    first, second = rig.run(one), rig.run(other)
    assert first is not None and second is not None and first is not second
    assert first.key == second.key
    for which in (one, other):
        occurrence = rig.find(which)
        assert occurrence is not None
        rig.let_go(occurrence)
    rig.world.do(("output", "forget", 0, one))
    assert None is rig.run(one) and rig.run(other) is second


def test_another_form_does_not_become_the_one_below() -> None:
    """The encoder gives other tensors than those in host memory: these stay the request's own."""
    rig = OutputRig(pages=6)
    assert rig.put(MIXED)
    fill(rig)
    assert rig.in_host(MIXED) and not rig.on_gpu(MIXED)
    occurrence = rig.reserve(MIXED, form=1)
    assert occurrence is not None
    rig.write(occurrence)
    assert None is occurrence.hold.output
    assert not rig.on_gpu(MIXED)
