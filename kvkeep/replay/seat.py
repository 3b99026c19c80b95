"""How a replay makes an eviction order and what time it tells it.

Must not know traces or pools.
"""

from kvkeep.cache import ORDERS
from kvkeep.errors import BadInput
from kvkeep.index.eviction import EvictionOrder, Tier


class TraceClock:
    """The time of the trace, in seconds: what stands still between two events of a replay."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_order(name: str, tier: Tier, clock: TraceClock) -> EvictionOrder:
    """The order called `name` for one tier.   clock: for orders that look at the time; `lru` has its own."""
    if name not in ORDERS:
        raise BadInput(f"--eviction {name}: it must be one of {', '.join(sorted(ORDERS))}")
    return ORDERS[name](tier)
