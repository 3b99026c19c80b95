"""What tiers of other sizes would hit: an estimate that a running cache keeps of its own requests.

Must not change what is kept.  Its callers hold the cache's lock.

It is the curve of `kvkeep size`, of LRU, over some of the pages: the first of each chain, and of the others one in
`every`, chosen by their names.  Which of a run's pages those are is remembered, so that a request that ends costs some
microseconds, however long its path: only the names that are new are looked at.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvkeep.index.run import Run
from kvkeep.index.runs import Place
from kvkeep.stack import UNUSED, Stack

#: Pages in the stack, at most, and what part of them goes at once, the longest unused, when there is no place.
IDS_MAX, PARTS = 2048, 32
#: Runs of which it is remembered which pages are looked at, and how many new names a loop is faster for than numpy.
RUNS_MAX, LOOP_NAMES_MAX = 4096, 64


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


class _Looked:
    """The pages of a run that are looked at.

    depths, names: of these, and all entries from `start` to `until` have been considered, the last one called `last`.
    """

    __slots__ = ("depths", "last", "names", "start", "until")

    def __init__(self, start: int) -> None:
        self.start = self.until = start
        self.last = 0
        self.depths: list[int] = []
        self.names: list[int] = []

    def holds_for(self, run: Run) -> bool:
        """Whether the run still has the entries that were considered: a name stands for all before it."""
        at = self.until - 1 - run.start
        return self.start == run.start and at < len(run.names) and run.names[at] == self.last


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
        self._looked: dict[int, _Looked] = {}  # by serial of a run, the longest unused first
        self._prompt_tokens = 0

    def used(self, place: Place, prompt_len: int) -> None:
        """A request of a prompt of `prompt_len` tokens has ended, and its path ends at `place`."""
        self._prompt_tokens += prompt_len
        depths, names = self._path(place)
        if not depths:
            return
        ids = self._ids_of(names)
        last_use, known = self._stack.last_use_of, 0
        while known < len(ids) and last_use[ids[known]] != UNUSED:
            known += 1
        pages = min(max(0, prompt_len - 1) // self._page_size, place.depth, self._largest)
        if known < len(ids):  # up to half-way to the first page that was never used
            pages = min(pages, (depths[known - 1] + depths[known] + 1) // 2 if known else 0)
        found, start = list[int](), 0
        here = bisect_left(depths, pages, 0, known)
        for i in range(1, here):
            end = (depths[i - 1] + depths[i] + 1) // 2  # half-way to the next one
            found.append(end - start)
            start = end
        if here:
            found.append(pages - start)
        self._stack.use_few(ids, found)

    def stats(self) -> GhostStats:
        """What there is so far."""
        hits = self._stack.hits()
        found = {what: int(hits[min(pages, len(hits) - 1)]) * self._page_size for what, pages in self._sizes.items()}
        return GhostStats(self._prompt_tokens, found)

    def _path(self, place: Place) -> tuple[list[int], list[int]]:
        """Depths and names of the pages of a path that are looked at, from page 0 on."""
        run, end = place.run, min(place.depth, self._largest)
        depths, names = list[int](), list[int]()
        while end:
            if end > run.start:
                looked = self._look(run)
                count = bisect_left(looked.depths, end)
                depths[:0], names[:0] = looked.depths[:count], looked.names[:count]
                end = run.start
            if run.parent is not None:
                run = run.parent
        return depths, names

    def _look(self, run: Run) -> _Looked:
        all_looked, serial = self._looked, run.serial
        looked = all_looked.pop(serial, None)
        if looked is None or not looked.holds_for(run):
            looked = _Looked(run.start)
        all_looked[serial] = looked
        if len(all_looked) > RUNS_MAX:
            del all_looked[next(iter(all_looked))]
        first = looked.until
        if first < run.start + len(run.names):
            mask = self._every - 1
            new = run.names[first - run.start :]
            if len(new) <= LOOP_NAMES_MAX:
                at = [i for i, name in enumerate(new) if not name & mask]
            else:
                at = np.flatnonzero((np.frombuffer(new, dtype=np.uint64) & np.uint64(mask)) == 0).tolist()
            if not first and (not at or at[0]):
                at.insert(0, 0)
            looked.depths += [first + i for i in at]
            looked.names += [new[i] for i in at]
            looked.until, looked.last = run.end, new[-1]
        return looked

    def _ids_of(self, names: list[int]) -> list[int]:
        known, free = self._ids, self._free
        if len(free) < len(names) or self._stack.pages > self._largest + self._largest // 4:
            self._forget(len(names))
        out = []
        for at, name in enumerate(names):
            found = known.get(name)
            if found is None:
                found = known[name] = free.pop()
                self._names[found] = name
                self._weight[found] = self._every if at or not name & (self._every - 1) else 1
            out.append(found)
        return out

    def _forget(self, count: int) -> None:
        used = np.flatnonzero(self._stack.last_use != UNUSED)
        count = min(max(count, len(used) // PARTS), len(used))
        oldest = used[np.argpartition(self._stack.last_use[used], count - 1)[:count]].astype(np.int32)
        self._stack.forget(oldest)
        for number in oldest.tolist():
            del self._ids[self._names[number]]
            self._free.append(number)
