"""Replays a trace over the product's index and eviction code and counts what matched.

Must not count by itself: every hit is a match of `RunTree`, every loss an eviction of its order.

Two ways.  `ReferenceAccounting` is the one that expected_reuse.json was computed in: capacity counts cached full pages
only, a request's pages enter at its end and may trim their own tail.  `engine_accounting` is a `TieredCache`, as an
engine drives it.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.eviction import LruOrder
from kvkeep.index.names import TOKEN_NBYTES, Identity, chain_names, make_identity
from kvkeep.index.runs import RunTree
from kvkeep.stats import CacheStats
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger
from tests.traces.reader import Request, Session


@dataclass
class ReferenceAccounting:
    """A pool of `capacity_pages` cached full pages, and room beside it for the pages of one request.

    names: all names of each session's full pages; they do not depend on the pool, so replays share them.
    unwritten: 1 to count lengths as an engine must: of a prompt one token stays to be computed, and the last sampled
        token has no KV.  0 is the reference.
    """

    sessions: Sequence[Session]
    names: Sequence[list[int]]
    identity: Identity
    page_size: int
    capacity_pages: int
    unwritten: int = 0

    def __post_init__(self) -> None:
        longest = max(len(names) for names in self.names)
        self.ledger = Ledger(self.capacity_pages + longest)
        self.tree = RunTree(self.ledger, LruOrder(), self.page_size * TOKEN_NBYTES)
        self.matched_pages = 0

    def replay(self, requests: Iterable[Request]) -> int:
        """Matched pages of all requests together."""
        for request in requests:
            self.serve(request)
        return self.matched_pages

    def serve(self, request: Request) -> None:
        """Looks one request up, then lets its pages in, then trims the coldest to the capacity."""
        tree, ledger = self.tree, self.ledger
        raw = self.sessions[request.session].ids.data.cast("B")
        found, *_ = tree.match(self.identity, raw, (request.prompt_len - self.unwritten) // self.page_size)
        matched, final = len(found), (request.final_len - self.unwritten) // self.page_size
        self.matched_pages += matched
        place = tree.place(found[-1]) if matched else tree.root(self.identity)
        assert place is not None
        if final > matched:
            page_nbytes = self.page_size * TOKEN_NBYTES
            opened = ledger.open(final - matched, request)
            ledger.seal(opened, request)
            own = self.names[request.session][matched:final]
            tree.insert(place, own, raw[matched * page_nbytes : final * page_nbytes], opened)
            ledger.release(opened, request)
            self._offer_deepest(opened)
        elif matched:
            tree.touch(place)
        if ledger.idle > self.capacity_pages:
            gone = tree.evict(ledger.idle - self.capacity_pages)
            ledger.drop(gone)
        assert ledger.idle <= self.capacity_pages and not ledger.held

    def _offer_deepest(self, pages: "array[int]") -> None:
        for page in reversed(pages):
            if page in self.tree:
                self.tree.offer(page)
                return


def reference_accounting(
    sessions: Sequence[Session],
    requests: Iterable[Request],
    capacities: Iterable[int],
    page_size: int,
    unwritten: int = 0,
) -> dict[int, ReferenceAccounting]:
    """A replay for each capacity in tokens."""
    requests = list(requests)
    identity = make_identity(b"reference accounting")
    page_nbytes = page_size * TOKEN_NBYTES
    names = [
        chain_names(identity.name, s.ids[: len(s.ids) // page_size * page_size].data.cast("B"), page_nbytes)
        for s in sessions
    ]
    done = {}
    for capacity in capacities:
        done[capacity] = ReferenceAccounting(sessions, names, identity, page_size, capacity // page_size, unwritten)
        done[capacity].replay(requests)
    return done


def engine_accounting(
    sessions: Sequence[Session], requests: Iterable[Request], capacity: int, page_size: int
) -> CacheStats:
    """Replays with one live request at a time through `TieredCache` over a pool of `capacity` tokens."""
    cache = TieredCache(
        CacheConfig(page_size=page_size), GpuPool.bookkeeping(capacity // page_size), b"engine accounting"
    )
    for request in requests:
        ids = sessions[request.session].ids
        lease = cache.admit(ids[: request.prompt_len])
        cache.extend(lease, ids[request.prompt_len : request.final_len])
        cache.finish(lease, max(request.final_len - 1, request.prompt_len))
    cache.check_invariants()
    return cache.stats()
