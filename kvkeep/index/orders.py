"""The eviction orders by name.

Must not know who asks for room.
"""

import time
from collections.abc import Callable
from typing import get_args

from kvkeep.config import EvictionName
from kvkeep.index.eviction import EvictionOrder, LruOrder
from kvkeep.index.rhythm import RhythmOrder
from kvkeep.index.uses import Uses

NAMES: tuple[EvictionName, ...] = get_args(EvictionName)


def make_order(
    name: EvictionName, pages: int, now: Callable[[], float] = time.monotonic, seed: int = 0
) -> EvictionOrder:
    """The order called `name` for a GPU tier of `pages` pages; `for_tier` gives those of other tiers.

    now: a clock in seconds, and seed: of the draws; for orders that have them.
    """
    return LruOrder() if name == "lru" else RhythmOrder(Uses(pages, now), seed=seed)
