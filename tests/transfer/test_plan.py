"""A plan is a value of its own; a gate follows its jobs."""

from array import array

import pytest

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.layout import PageLayout
from kvkeep.transfer.pieces import pieces
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Direction, Plan
from tests.transfer.pools import host_memory


def test_plan_keeps_its_own_page_ids():
    """What a caller does to its arrays afterwards does not show in the plan."""
    ids = [array("i", [1, 2]), array("i", [3, 4]), array("q", [5, 6]), array("q", [7, 8])]
    made = Plan("h2d", "promote", ids[0], ids[1], ids[2], ids[3])
    for one in ids:
        one[0] = 99
        one.append(100)
    assert [[1, 2], [3, 4], [5, 6], [7, 8]] == [
        list(made.sources),
        list(made.targets),
        list(made.source_generations),
        list(made.target_generations),
    ]
    assert 2 == len(made)


@pytest.mark.parametrize("lengths", [(2, 1, 2, 2), (1, 1, 2, 1), (1, 1, 1, 0), (0, 0, 0, 1)])
def test_plan_of_uneven_pages_is_a_bug(lengths: tuple[int, int, int, int]):
    """Sources, targets and generations are co-indexed."""
    a, b, c, d = (range(n) for n in lengths)
    with pytest.raises(InvariantViolation, match="one length"):
        Plan("h2d", "promote", array("i", a), array("i", b), array("q", c), array("q", d))


@pytest.mark.parametrize("cause", DIRECTION_OF)
def test_plan_of_the_wrong_direction_is_a_bug(cause: Cause):
    """A cause has one direction."""
    wrong: Direction = "d2h" if DIRECTION_OF[cause] == "h2d" else "h2d"
    one, generation = array("i", [0]), array("q", [0])
    with pytest.raises(InvariantViolation, match=cause):
        Plan(wrong, cause, one, one, generation, generation)


def test_pools_of_different_pages_are_refused():
    """Copies between pools whose pages differ in size would move the wrong bytes."""
    other = host_memory(layout=PageLayout(layers=1, kv_heads=1, head_dim=4, page_size=2))
    with pytest.raises(BadInput, match="bytes"):
        pieces(host_memory(), other)
