"""Host copies of pages that are on the GPU as well: places to be had below without losing anything.

Must not know tokens or names.
"""

from array import array
from typing import TYPE_CHECKING

from kvkeep.index.run import NOWHERE

if TYPE_CHECKING:
    from kvkeep.index.runs import RunTree

#: How many host copies that may not go a search for some that may looks at: 64 take about 20 us.
LOOK_MAX = 64


class Doubles:
    """Host pages whose entries may have a GPU copy: first those that were loaded, the latest first, which are hot."""

    def __init__(self) -> None:
        self._promoted: dict[int, None] = {}
        self._others: dict[int, None] = {}  # in the order in which to look at them

    def __len__(self) -> int:
        return len(self._promoted) + len(self._others)

    def add(self, host: "array[int]", *, promoted: bool = False) -> None:
        """The entries of these host pages, those that still are there, have a GPU copy as well."""
        (self._promoted if promoted else self._others).update(dict.fromkeys(host))

    def clear(self) -> None:
        """Forgets them."""
        self._promoted.clear()
        self._others.clear()

    def evict(self, tree: "RunTree", count: int, colder_than: int) -> int:
        """Frees up to `count` host pages whose GPU copy is in use, or leaves later than pages used at `colder_than`.

        Looks at as many as it takes, and `LOOK_MAX` more; those that may not go now are looked at last.
        """
        tier, gpu = tree.host, tree.gpu.ledger
        assert tier is not None
        rank = tier.order.rank
        bound, gone = rank(colder_than), array("i")
        for _ in range(min(len(self), count + LOOK_MAX)):
            if self._promoted:
                page, _ = self._promoted.popitem()
            else:
                page = next(iter(self._others))
                del self._others[page]
            run, depth = tier.run_of[page], tier.depth_of[page]
            if run is None or depth >= run.gpu_end or run.host[depth - run.start] != page:  # gone, or in `gone` already
                continue
            idle = gpu.is_idle(run.pages[depth - run.start])  # else it is in use: hot, whatever its stamp
            if not tier.ledger.is_idle(page) or (idle and rank(run.stretch(depth)[0]) >= bound):
                self._others[page] = None
                continue
            run.host[depth - run.start] = NOWHERE
            gone.append(page)
            if len(gone) == count:
                break
        tier.remove(gone)
        tier.ledger.drop(gone)
        return len(gone)
