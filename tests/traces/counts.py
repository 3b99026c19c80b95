"""What the tests of this folder ask of a replay: an order by its name in the reference, matched pages by capacity.

Must not count anything itself.
"""

from collections.abc import Iterable

from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Arrivals


def in_order(pages: Pages, order: str) -> Arrivals:
    """The requests of a trace: order is "round_robin_N" or "recorded_time"."""
    kind, _, number = order.rpartition("_")
    chosen = Order("rotate", int(number)) if kind == "round_robin" else Order("recorded")
    return chosen.arrivals(pages.trace)


def lru_pool(pages: Pages, capacity: int, arrivals: Arrivals, unwritten: int = 0) -> Reference:
    """A pool of `capacity` tokens that has served all requests."""
    clock = TraceClock()
    capacity_pages = capacity // pages.page_size
    order = make_order("lru", capacity_pages, clock)
    pool = Reference(pages, capacity_pages, order, clock, unwritten=unwritten)
    pool.replay(arrivals.requests)
    return pool


def lru_matches(pages: Pages, capacities: Iterable[int], arrivals: Arrivals, unwritten: int = 0) -> dict[int, int]:
    """Matched pages by capacity in tokens."""
    return {c: lru_pool(pages, c, arrivals, unwritten).counts.matched_pages_gpu for c in capacities}
