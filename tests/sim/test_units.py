"""Media items whose attention is not causal, in a cache of two tiers with copies moved by hand.

Must not leave anything to a seed.
"""

import pytest

from tests.sim.request import Item
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]  # three pages of two
UNIT = (Item(1, 4, 1, False),)  # positions 1 to 4, on all three


@pytest.mark.parametrize(("items", "expected"), [(UNIT, [(0, 6)]), ((), [(0, 2), (2, 4), (4, 6)])])
def test_a_unit_of_which_a_part_is_gone_is_computed_as_one(items: tuple[Item, ...], expected: object) -> None:
    """Shared pages were not copied and are gone by now: what is to be computed again ends inside no unit."""
    rig = Rig(pages=6, tier_pages=0, suspend_pages=4)
    rig.serve([*A, 9], items=items)
    reader = rig.admitted([*A, 9], items)
    request = rig.admitted([*A, 8], items)
    rig.compute(request)
    rig.do("suspend", request, False)
    rig.do("abort", reader)
    rig.settle()
    rig.push_out()
    rig.do("resume", request)
    rig.settle()
    assert expected == request.holes
    rig.compute(request)
    rig.do("extend", request, [8], 0)
    rig.compute(request)
    rig.do("finish", request)
    assert 8 == rig.matched([*A, 8, 8, 9], items=items)


@pytest.mark.parametrize(("causal", "goes_on"), [(False, False), (True, True)])
def test_a_load_that_fails_inside_a_unit_lets_nobody_go_on_there(causal: bool, goes_on: bool) -> None:
    """The pages before the load stay, and with them a part of the unit: who waited is admitted again, from before it.

    Where attention is causal the lease goes on behind the part that is there.
    """
    rig = Rig(pages=8, tier_pages=8)
    items = (Item(1, 4, 1, causal),)
    rig.serve([*A, 9], items=items)
    rig.settle()
    blocker = rig.admitted([7] * 11)  # all but the two first pages go down
    rig.settle()
    rig.do("abort", blocker)
    assert 1 <= rig.host_only <= 2, rig.host_only
    request = rig.admitted([*A, 9], items)
    lease = rig.lease(request)
    assert 6 == lease.matched_len
    (load,) = rig.jobs("promote")
    rig.backend.fail(load)
    rig.finish(load)
    rig.poll()
    assert goes_on is not lease.revoked
    again = rig.lease(request) if goes_on else rig.lease(rig.admitted([*A, 9], items))
    assert (again.matched_len > 0) is causal
