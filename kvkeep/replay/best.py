"""The best possible: what a pool could match if it knew which request comes next.

Must not know names, tokens or caches.  A bound, not a policy: it evicts the page whose next use is farthest away.

A page is used again by the next prompt that contains it.  Whoever uses a page uses all pages before it, so along a
chain the next uses never fall: the farthest page is a leaf, and the pages that wait for one request lie on one path,
without a hole.  So it is enough to count, for each request to come, the pages that wait for it (Belady's rule by
groups, not by pages): a request is a few additions and at most a few heap operations, however long its prompt.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

#: The next use of a page that is never used again: later than any request.
NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NextUses:
    """Which pages wait for which request, for all pools alike.

    prompts: how many leading pages of each request its prompt has.
    groups: for each request, next use and end depth of each stretch of its pages that is used next together, in pairs.
    """

    prompts: list[int]
    groups: "list[array[int]]"


def next_uses(requests: Iterable[tuple[npt.NDArray[np.int32], int]], distinct: int) -> NextUses:
    """requests: the page ids that each leaves behind, from page 0 on, and how many of them its prompt has.

    distinct: above every page id.
    """
    requests = list(requests)
    following = np.full(distinct, NEVER, dtype=np.int32)
    groups: list[array[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        pages, prompt = requests[number]
        uses = following[pages]
        ends = np.flatnonzero(uses[1:] != uses[:-1]) + 1
        pairs = array("i")
        for end in (*ends.tolist(), len(pages)):
            if end:
                pairs.append(int(uses[end - 1]))
                pairs.append(end)
        groups.append(pairs)
        following[pages[:prompt]] = number
    groups.reverse()
    return NextUses([prompt for _, prompt in requests], groups)


def best_matches(uses: NextUses, capacity_pages: int) -> int:
    """Pages that the requests match together in a pool of `capacity_pages` full pages."""
    waiting: dict[int, int] = {}  # next use -> resident pages that wait for it
    top: dict[int, int] = {}  # next use -> depth on its path behind the last of them
    heap: list[int] = []  # next uses, negated: the farthest first
    resident = matched = 0
    for number, (prompt, pairs) in enumerate(zip(uses.prompts, uses.groups, strict=True)):
        hits = waiting.pop(number, 0)
        top.pop(number, None)
        matched += hits
        resident -= hits
        first = 0
        for i in range(0, len(pairs), 2):
            use, end = pairs[i], pairs[i + 1]
            # Pages behind the prompt may be there already, from a request that generated the same.  (Of those that are
            # never used again it does not matter: they leave first.)
            seen = min(end, max(prompt, first, top.get(use, 0)))
            new = end - seen + max(0, min(prompt, end) - first)
            first = end
            if use in waiting:
                waiting[use] += new
            else:
                waiting[use] = new
                heappush(heap, -use)
            if use != NEVER:
                top[use] = max(end, top.get(use, 0))
            resident += new
        while resident > capacity_pages:
            use = -heap[0]
            have = waiting.get(use, 0)
            if use <= number or not have:
                heappop(heap)
                waiting.pop(use, None)
                continue
            gone = min(have, resident - capacity_pages)
            waiting[use] = have - gone
            if use != NEVER:
                top[use] -= gone
            resident -= gone
        if len(heap) > 2 * len(waiting) + 64:
            heap = [-use for use in waiting]
            heapify(heap)
    return matched
