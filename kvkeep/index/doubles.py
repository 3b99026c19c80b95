"""Host copies of pages that are on the GPU as well: places to be had below without losing anything.

Must not know tokens or names.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.index.run import NOWHERE, Run

if TYPE_CHECKING:
    from kvkeep.index.runs import RunTree

#: How many runs that may give up no copy a search for some that may looks at: 32 take about 30 us.
LOOK_MAX = 32


class Doubles:
    """Runs with entries that may have both copies: first those that were loaded, the latest first, which are hot."""

    def __init__(self) -> None:
        self._promoted: dict[Run, None] = {}
        self._others: dict[Run, None] = {}  # in the order in which to look at them

    def __len__(self) -> int:
        return len(self._promoted) + len(self._others)

    def add(self, runs: Iterable[Run], *, promoted: bool = False) -> None:
        """These have entries with both copies now."""
        for run in runs:
            if promoted:
                self.discard(run)
                self._promoted[run] = None
            elif run not in self._promoted:
                self._others[run] = None

    def split(self, run: Run, head: Run) -> None:
        """The first entries of `run` are in `head` now."""
        for runs in (self._promoted, self._others):
            if run in runs:
                runs[head] = None

    def discard(self, run: Run) -> None:
        """`run` has no entries any more."""
        self._promoted.pop(run, None)
        self._others.pop(run, None)

    def clear(self) -> None:
        """Forgets them."""
        self._promoted.clear()
        self._others.clear()

    def evict(self, tree: "RunTree", count: int, colder_than: int) -> int:
        """Frees up to `count` host pages whose GPU copy is in use, or leaves later than pages used at `colder_than`.

        Looks at as many runs as it takes, and `LOOK_MAX` more; those that keep some copies are looked at last.
        """
        tier = tree.host
        assert tier is not None
        bound, gone, vain = tier.order.rank(colder_than), array("i"), 0
        want = tier.ledger.free + count
        for _ in range(len(self)):
            short = want - tier.ledger.free - len(gone)
            if short <= 0 or vain == LOOK_MAX:
                break
            run = next(reversed(self._promoted)) if self._promoted else next(iter(self._others))
            self.discard(run)
            if run.whole:
                found = _whole_to_go(tree, run, bound)
                left = not found and bool(run.pages) and run.host is not None
                if found and run.host is not None:
                    tree.lose_host(run.host[0])
            else:
                pages, left = _to_go(tree, run, short, bound)
                found = bool(pages)
                gone.extend(pages)
            if left:
                self._others[run] = None
            vain += not found
        tier.remove(gone)
        tier.ledger.drop(gone)
        return count - max(0, want - tier.ledger.free)


def _whole_to_go(tree: "RunTree", run: Run, bound: float) -> bool:
    """Whether the host copy of an output may go, and the one on the GPU stays."""
    tier = tree.host
    if tier is None or not run.pages or run.host is None:
        return False
    if tier.ledger.idle_tail(run.host, len(run.host)) < len(run.host):
        return False
    return not tree.gpu.ledger.is_idle(run.pages[0]) or tier.order.rank(run.stamps[0]) < bound


def _to_go(tree: "RunTree", run: Run, count: int, bound: float) -> tuple["array[int]", bool]:
    """Takes up to `count` host copies that may go from `run`, the deepest first.

    Returns them, and whether the run may have more entries with both copies.
    """
    tier, gpu = tree.host, tree.gpu.ledger
    gone, on_gpu = array("i"), len(run.pages)
    if tier is None or not on_gpu or run.host is None:
        return gone, False
    rank = tier.order.rank
    hot = [rank(stamp) < bound for stamp in run.stamps]
    if not any(hot) and gpu.is_idle(run.pages[0]):  # who uses a page uses those before it
        return gone, True
    both = np.array(run.host[:on_gpu])
    both = (both != NOWHERE).nonzero()[0]
    hot_until = max((end for end, h in zip(run.ends, hot, strict=True) if h), default=run.start) - run.start
    for at in reversed(both.tolist()):
        if at >= hot_until and gpu.is_idle(run.pages[at]):  # else it is in use: hot, whatever its stamp
            continue
        page = run.host[at]
        if tier.ledger.is_idle(page):
            run.host[at] = NOWHERE
            gone.append(page)
            if len(gone) == count:
                break
    return gone, len(gone) < len(both)
