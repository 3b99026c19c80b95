"""The eviction orders by name.

Must not know who asks for room.
"""

from kvkeep.config import EvictionName
from kvkeep.index.eviction import EvictionOrder, LruOrder
from kvkeep.index.rhythm import RhythmOrder
from kvkeep.index.uses import Uses


def make_order(name: EvictionName, pages: int) -> EvictionOrder:
    """The order called `name` for a cache of `pages` pages, in all tiers together; ask it for those of lower tiers."""
    return LruOrder() if name == "lru" else RhythmOrder(Uses(pages))
