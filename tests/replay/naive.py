"""Page caches written as plainly as can be, which replays are compared with.

Must not know the product.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

NEVER = 1 << 40


class Use(NamedTuple):
    """A request: all of its pages, as prefixes, and how many its prompt has."""

    pages: Sequence[object]
    prompt: int


def lru(uses: Sequence[Use], capacity: int) -> int:
    """Matched pages of a pool that evicts the least recently used page, of a request's the deepest."""
    resident: OrderedDict[object, None] = OrderedDict()
    matched = 0
    for use in uses:
        matched += leading(use, resident)
        for page in reversed(use.pages):
            resident[page] = None
            resident.move_to_end(page)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return matched


def best(uses: Sequence[Use], capacity: int) -> int:
    """Matched pages of a pool that evicts the page whose next use by a prompt is farthest, the deepest of equals."""
    resident: dict[object, tuple[int, int]] = {}
    matched = 0
    for number, use in enumerate(uses):
        matched += leading(use, resident)
        for depth, page in enumerate(use.pages):
            resident[page] = (following(uses, number, page), depth)
        while len(resident) > capacity:
            del resident[max(resident, key=lambda page: resident[page])]
    return matched


def following(uses: Sequence[Use], number: int, page: object) -> int:
    """Which request after `number` has `page` in its prompt first."""
    later = (k for k in range(number + 1, len(uses)) if page in uses[k].pages[: uses[k].prompt])
    return next(later, NEVER)


def leading(use: Use, resident: "dict[object, tuple[int, int]] | OrderedDict[object, None]") -> int:
    """How many pages of the prompt are there without a hole."""
    k = 0
    while k < use.prompt and use.pages[k] in resident:
        k += 1
    return k
