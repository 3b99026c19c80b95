"""The load guard: how long a replica's queue may be before a request goes elsewhere.

Must not know prompts or keys: it is given an order of preference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.errors import BadInput

#: Why a replica was taken: it ranks first; those before it were over the limit; all that were asked were.
Reason = Literal["target", "next", "least"]


@dataclass(frozen=True, slots=True)
class Guard:
    """A queue is over the limit when it is longer than `slack + factor * the shortest queue`.

    slack: requests; what may always wait, since a miss costs more than some hits that go first.
    factor: so that the limit rises with the load of all.  Relative to the shortest queue, not to the mean: where many
        prefixes are hot, the mean rises with the very queues that are too long.
    ranks: how many replicas are asked in order before the least loaded one is taken.  Each further rank is another
        replica that may come to hold the same pages.
    """

    slack: float = 12.0
    factor: float = 1.5
    ranks: int = 2

    def choose(self, order: Sequence[str], loads: Mapping[str, float], worth: float = 1.0) -> tuple[str, Reason]:
        """A replica of `order`, and why.

        order: from the most preferred one.   loads: by replica, the requests that wait there; 0 where it has none.
        worth: how likely it is that the target has, or will have, what others lack.  What nobody has, or everybody, is
            not waited for: at 0 the least loaded replica is taken.
        """
        check_alive(order)
        lengths = [loads.get(replica, 0.0) for replica in order]
        limit = min(lengths) * (1.0 + (self.factor - 1.0) * worth) + self.slack * worth
        for rank in range(min(self.ranks, len(order))):
            if lengths[rank] <= limit:
                return order[rank], "next" if rank else "target"
        return least_loaded(order, loads)


def least_loaded(order: Sequence[str], loads: Mapping[str, float]) -> tuple[str, Reason]:
    """The replica of `order` where the fewest wait; of equal ones the most preferred."""
    check_alive(order)
    replica = min(order, key=lambda replica: loads.get(replica, 0.0))
    return replica, "target" if replica == order[0] else "least"


def check_alive(order: Sequence[str]) -> None:
    """`BadInput` when there is no replica."""
    if not order:
        raise BadInput("no replica is alive: there is nowhere to route to")
