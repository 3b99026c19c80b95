"""What tiers of other sizes would hit: an estimate that a running cache keeps of its own requests.

Must not change what is kept.  Its callers hold the cache's lock.

It is the curve of `kvkeep size`, of LRU, over some of the pages: the first of each chain, and of the others one in
`every`, chosen by their names.  A request that ends costs some microseconds, however long its path.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.index.runs import Place
from kvkeep.stack import UNUSED, Stack, stands_for

#: Pages in the stack, at most, and what part of them goes at once, the longest unused, when there is no place.
IDS_MAX, PARTS = 16_384, 32


@dataclass(frozen=True, slots=True)
class GhostStats:
    """Prompt tokens since the start, and how many LRU would have found in tiers of other sizes.

    found_tokens: by what is changed, such as "gpu x2" or "host x0.5"; "now" is both tiers as they are.
    """

    prompt_tokens: int
    found_tokens: Mapping[str, int]


def sizes(gpu_pages: int, host_pages: int) -> dict[str, int]:
    """Half, twice and four times each tier: pages of both together."""
    out = {"now": gpu_pages + host_pages}
    for times in (0.5, 2, 4):
        out[f"gpu x{times:g}"] = int(times * gpu_pages) + host_pages
        if host_pages:
            out[f"host x{times:g}"] = gpu_pages + int(times * host_pages)
    return out


class Ghosts:
    """page_size: tokens a page.   gpu_pages, host_pages: of the tiers as they are."""

    def __init__(self, page_size: int, gpu_pages: int, host_pages: int = 0) -> None:
        self._page_size = page_size
        self._sizes = sizes(gpu_pages, host_pages)
        self._largest = max(self._sizes.values())
        self._every = 1 << max(0, 2 * self._largest // IDS_MAX - 1).bit_length()  # half of the places stay for growth
        self._weight = np.ones(IDS_MAX, dtype=np.int64)
        self._stack = Stack(IDS_MAX, self._weight)
        self._ids: dict[int, int] = {}  # by name
        self._names = array("Q", bytes(8 * IDS_MAX))  # by id
        self._free = array("i", range(IDS_MAX))
        self._prompt_tokens = 0

    def used(self, place: Place, prompt_len: int) -> None:
        """A request of a prompt of `prompt_len` tokens has ended, and its path ends at `place`."""
        self._prompt_tokens += prompt_len
        names = path_names(place)[: self._largest]
        if not len(names):
            return
        mask = np.uint64(self._every - 1)
        chosen = np.flatnonzero((names & mask) == 0)
        if not len(chosen) or chosen[0]:
            chosen = np.concatenate([[0], chosen])
        ids = self._ids_of(names[chosen].tolist())
        known = self._stack.last_use[ids] != UNUSED
        count = len(ids) if known.all() else int(np.argmin(known))
        pages = min(max(0, prompt_len - 1) // self._page_size, len(names))
        if count < len(chosen):  # up to half-way to the first page that was never used
            pages = min(pages, (int(chosen[count - 1]) + int(chosen[count]) + 1) // 2 if count else 0)
        here = chosen[: np.searchsorted(chosen[:count], pages)]
        self._stack.use(ids, stands_for(here, pages))

    def stats(self) -> GhostStats:
        """What there is so far."""
        hits = self._stack.hits()
        found = {what: int(hits[min(pages, len(hits) - 1)]) * self._page_size for what, pages in self._sizes.items()}
        return GhostStats(self._prompt_tokens, found)

    def _ids_of(self, names: list[int]) -> npt.NDArray[np.int32]:
        known, free = self._ids, self._free
        if len(free) < len(names) or self._stack.pages > self._largest + self._largest // 4:
            self._forget(len(names))
        out = array("i")
        for at, name in enumerate(names):
            found = known.get(name)
            if found is None:
                found = known[name] = free.pop()
                self._names[found] = name
                self._weight[found] = self._every if at or not name & (self._every - 1) else 1
            out.append(found)
        return np.frombuffer(out, dtype=np.int32)

    def _forget(self, count: int) -> None:
        used = np.flatnonzero(self._stack.last_use != UNUSED)
        count = min(max(count, len(used) // PARTS), len(used))
        oldest = used[np.argpartition(self._stack.last_use[used], count - 1)[:count]].astype(np.int32)
        self._stack.forget(oldest)
        for number in oldest.tolist():
            del self._ids[self._names[number]]
            self._free.append(number)


def path_names(place: Place) -> npt.NDArray[np.uint64]:
    """The names of a path, from page 0 on."""
    run, depth = place
    parts = []
    while depth:
        parts.append(np.frombuffer(run.names[: depth - run.start], dtype=np.uint64))
        depth = run.start
        if run.parent is not None:
            run = run.parent
    return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0] if parts else np.empty(0, dtype=np.uint64)
