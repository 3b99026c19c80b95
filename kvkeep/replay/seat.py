"""How a replay makes an eviction order and what time it tells it.

Must not know traces or pools.
"""

from kvkeep.errors import BadInput
from kvkeep.index import orders
from kvkeep.index.eviction import EvictionOrder


class TraceClock:
    """The time of the trace, in seconds: what stands still between two events of a replay."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_order(name: str, pages: int, clock: TraceClock) -> EvictionOrder:
    """The order called `name` for the GPU tier, or the only one.

    pages: of the pool.   clock: for orders that look at the time.  `lru` needs neither.
    """
    check_order(name)
    return orders.make_order(name, pages, clock)  # type: ignore[arg-type]  # one of the names


def check_order(name: str) -> None:
    """`BadInput` when no order is called `name`."""
    if name not in orders.NAMES:
        raise BadInput(f"--eviction {name}: it must be one of {', '.join(sorted(orders.NAMES))}")
