"""Reference accounting: the index and an eviction order over a trace, and nothing else.

Must not count by itself: every hit is a match of `RunTree`, every loss an eviction of its order.

Capacity counts cached full pages only; a request takes no time and no page but those it leaves behind; they enter at
its end and may trim their own tail.  This is the accounting of reuse counts that are computed from a trace alone.
"""

import time
from collections.abc import Iterable

from kvkeep.errors import InvariantViolation
from kvkeep.index.eviction import EvictionOrder
from kvkeep.index.runs import RunTree
from kvkeep.index.uses import Began, PathUse, Use
from kvkeep.replay.pages import Pages
from kvkeep.replay.result import PROGRESS_EVERY, Counts, Progress
from kvkeep.replay.seat import TraceClock
from kvkeep.replay.trace import Request
from kvkeep.tiers.ledger import Ledger


class Reference:
    """One pool of `capacity_pages` cached full pages, and room beside it for the pages of one request.

    clock: is set to each request's time.
    unwritten: 1 to count lengths as an engine must: of a prompt one token stays to be computed, and the last sampled
        token has no KV.
    last_use: what an order that learns knows of the request served last.
    """

    def __init__(
        self,
        pages: Pages,
        capacity_pages: int,
        order: EvictionOrder,
        clock: TraceClock,
        *,
        unwritten: int = 0,
    ) -> None:
        longest = max(map(len, pages.page_ids), default=0)
        self.pages = pages
        self.capacity_pages = capacity_pages
        self.ledger = Ledger(capacity_pages + longest)
        self.tree = RunTree(self.ledger, order, pages.page_nbytes)
        self.counts = Counts()
        self.last_use: Use | None = None
        self._clock = clock
        self._unwritten = unwritten

    def replay(self, requests: Iterable[Request], progress: Progress | None = None) -> Counts:
        """Serves requests one after the other."""
        for number, request in enumerate(requests):
            if progress is not None and not number % PROGRESS_EVERY:
                progress(number)
            self._clock.now_s = request.time_s
            self.serve(request)
        return self.counts

    def serve(self, request: Request) -> None:
        """Looks one request up, then lets its pages in, then trims the coldest to the capacity."""
        pages, tree, ledger, counts = self.pages, self.tree, self.ledger, self.counts
        unwritten, page_size, page_nbytes = self._unwritten, pages.page_size, pages.page_nbytes
        raw = pages.raws[request.chain]
        final = max(min(request.final_len - unwritten, request.known_len), request.prompt_len) // page_size
        found, _, found_name = tree.match(pages.identity, raw, (request.prompt_len - unwritten) // page_size)
        matched = len(found)
        counts.requests += 1
        counts.prompt_tokens += request.prompt_len
        counts.matched_pages_gpu += matched
        place = tree.place(found[-1]) if matched else tree.root(pages.identity)
        if place is None:
            raise InvariantViolation("a page that has just matched is not in the tree")
        uses = tree.gpu.order.uses
        began = None if uses is None else Began(self._clock.now_s, tree.stamp(place), request.prompt_len)
        own: list[int] = []
        if final > matched:
            opened = ledger.open(final - matched, request)
            ledger.seal(opened, request)
            own = pages.names(request.chain, matched, final)
            place = tree.place(tree.insert(place, own, raw[matched * page_nbytes : final * page_nbytes], opened).last)
            ledger.release(opened, request)
            self.tree.offer(opened)
        elif matched:
            tree.touch(place)
        if uses is not None and began is not None and place is not None and place.depth:
            out = request.final_len - request.prompt_len
            path = PathUse(tree.stamp(place), *place, matched, found_name, own, began, out)
            self.last_use = uses.used(path)
        over = ledger.idle - self.capacity_pages
        if over > 0:
            begun = time.perf_counter_ns()
            gone = tree.evict(over)
            ledger.drop(gone)
            counts.evict_ns += time.perf_counter_ns() - begun
            counts.pages_evicted += len(gone)
            if ledger.idle > self.capacity_pages or ledger.held:
                raise InvariantViolation(f"{ledger.idle} pages are left where {self.capacity_pages} have a place")
