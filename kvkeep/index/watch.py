"""Tells a listener which names enter and leave the tiers of a run tree, as whole arrays.

Must not know who listens.  It is called with the cache's lock held: nothing here loops over pages in Python, but where
one array holds pages of many runs.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvkeep.index.eviction import Tier
from kvkeep.index.run import NOWHERE, Run

if TYPE_CHECKING:
    from kvkeep.index.runs import RunTree

#: Why a name entered or left a tier.
#:   evicted   it had to make room, and is in no lower tier
#:   demoted   entered host memory: copied down; left the GPU: its copy in host memory stays
#:   promoted  entered the GPU: copied up        failed   left: a copy did not arrive        reset   all is forgotten
Reason = Literal["evicted", "demoted", "promoted", "reset", "failed"]

Names = npt.NDArray[np.uint64]


class Listener(Protocol):
    """Hears of copies of names; a name may have several in a tier.  Must be quick, and must not call the cache.

    The arrays are the listener's own.
    """

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """Copies of consecutive pages of a chain entered; `parent` is the name before the first.

        reason: None for pages that a request computed.
        """

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """Copies left, of any chains."""

    def cleared(self, tier: Tier) -> None:
        """Every copy left (reason: "reset")."""


class Both:
    """Two listeners as one."""

    def __init__(self, first: Listener, second: Listener) -> None:
        self._both = (first, second)

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        for listener in self._both:
            listener.stored(tier, names, parent, reason)

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        for listener in self._both:
            listener.removed(tier, names, reason)

    def cleared(self, tier: Tier) -> None:
        for listener in self._both:
            listener.cleared(tier)


class Watch:
    """What a tier's map tells of its changes."""

    def __init__(self, tier: Tier, listener: Listener) -> None:
        self._tier = tier
        self._listener = listener

    def put(self, run: Run, depth: int, count: int, reason: Reason | None) -> None:
        """`count` entries of `run` from `depth` on have entered."""
        at = depth - run.start
        names = np.array(run.names[at : at + count], dtype=np.uint64)
        self._listener.stored(self._tier, names, name_before(run, at), reason)

    def remove(self, runs: npt.NDArray[Any], depths: npt.NDArray[np.int32], reason: Reason) -> None:
        """The entries at `depths` of `runs`, one for each, are about to leave, in any order."""
        parts: dict[Reason, list[Names]] = {}
        ends = [*(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), len(runs)]
        first = 0
        for last in ends:
            run: Run = runs[first]
            at = depths[first:last].astype(np.intp) - run.start
            names = np.frombuffer(run.names, dtype=np.uint64)[at]  # a copy: the array may be resized afterwards
            if reason == "evicted" and self._tier is Tier.GPU and run.host is not None:
                below = np.frombuffer(run.host, dtype=np.int32)[at] != NOWHERE
                parts.setdefault("demoted", []).append(names[below])
                names = names[~below]
            parts.setdefault(reason, []).append(names)
            first = last
        for why, found in parts.items():
            left = found[0] if len(found) == 1 else np.concatenate(found)
            if len(left):
                self._listener.removed(self._tier, left, why)

    def clear(self) -> None:
        """Every entry has left."""
        self._listener.cleared(self._tier)


def name_before(run: Run, at: int) -> int:
    """The name before position `at` of a run: its parent's last, or the root's, for the first."""
    if at:
        return run.names[at - 1]
    assert run.parent is not None
    return run.parent.names[-1] if run.parent.names else run.parent.key


def watch_tree(tree: "RunTree", listener: Listener | None, always: Listener | None = None) -> Mapping[Tier, Names]:
    """Tells `listener` (None: nobody) of every change from now on, and `always` too.

    Returns the names in each tier as they are now, for a `listener`.
    """
    told = Both(listener, always) if listener is not None and always is not None else listener or always
    tree.gpu.watch = Watch(Tier.GPU, told) if told is not None else None
    if tree.host is not None:
        tree.host.watch = Watch(Tier.HOST, told) if told is not None else None
    return {} if listener is None else names_in(tree)


def names_in(tree: "RunTree") -> Mapping[Tier, Names]:
    """The names in each tier, one for each copy.  O(pages)."""
    runs = [run for run in tree.runs() if not run.whole]
    found = {Tier.GPU: _joined(np.array(run.names[: len(run.pages)], dtype=np.uint64) for run in runs)}
    if tree.host is not None:
        found[Tier.HOST] = _joined(_host_names(run, run.host) for run in runs if run.host is not None)
    return found


def _host_names(run: Run, host: "array[int]") -> Names:
    there: npt.NDArray[np.bool_] = np.array(host) != NOWHERE
    return np.array(run.names, dtype=np.uint64)[there]


def _joined(parts: Iterable[Names]) -> Names:
    return np.concatenate([np.empty(0, dtype=np.uint64), *parts])
