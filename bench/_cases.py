"""The cases of `bench index`: floors, names, match, seal, allocation.  Each builds what it measures, once.

Must not know rounds, limits or reports.  Every case checks its result outside the timed part, so that a fast wrong
answer is not a figure.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from bench._measure import now_ns
from bench._workload import Ids, distinct_chains
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.index.eviction import LruOrder
from kvkeep.index.names import Identity, as_token_ids, chain_names, make_identity
from kvkeep.index.runs import Place, RunTree
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger

PAGE = 128
PAGE_NBYTES = PAGE * 4
Sample = Callable[[], list[float]]


class Store:
    """A tree over a ledger, without a cache around it."""

    def __init__(self, pages: int) -> None:
        self.ledger = Ledger(pages)
        self.tree = RunTree(self.ledger, LruOrder(), PAGE_NBYTES)
        self.identity: Identity = make_identity(b"bench index")

    def put(self, ids: Ids, place: Place | None = None, parent: int | None = None) -> "array[int]":
        """Stores full pages behind `place` (the root); returns their page ids, owned by the index alone."""
        raw = ids.data.cast("B")
        names = chain_names(self.identity.name if parent is None else parent, raw, PAGE_NBYTES)
        pages = self.ledger.open(len(names), self)
        self.ledger.seal(pages, self)
        self.tree.insert(place or self.tree.root(self.identity), names, raw, pages)
        self.ledger.release(pages, self)
        return pages

    def grow(self, ids: Ids, step: int) -> "array[int]":
        """Stores a chain as a session does: `step` pages a turn, each behind the ones before."""
        first = self.put(ids[: step * PAGE])
        last, name = first[-1], self.tree.page_content(first[-1])[1]
        for at in range(step * PAGE, len(ids), step * PAGE):
            last = self.put(ids[at : at + step * PAGE], self.tree.place(last), name)[-1]
            name = self.tree.page_content(last)[1]
        return self.tree.match(self.identity, ids.data.cast("B"), len(ids) // PAGE).pages


# ---------------------------------------------------------------------- floors


def xxh3_floor(pages: int, times: int) -> Sample:
    """A bare loop of chained XXH3 over the pages of one buffer: the least that names can cost in Python."""
    raw = distinct_chains(1, pages, PAGE, 1)[0].data.cast("B")
    hash_page = xxhash.xxh3_64_intdigest

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = now_ns()
            name = 0
            for i in range(pages):
                name = hash_page(raw[i * PAGE_NBYTES : (i + 1) * PAGE_NBYTES], name)
            out.append((now_ns() - start) / 1e3)
        return out

    return sample


# ---------------------------------------------------------------------- names and match


def names(pages: int, times: int) -> Sample:
    """Names of new pages from an int32 array, the check of its ids included."""
    ids = distinct_chains(1, pages, PAGE, 3)[0]
    parent = make_identity(b"bench index").name

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = now_ns()
            found = chain_names(parent, as_token_ids(ids).data.cast("B"), PAGE_NBYTES)
            out.append((now_ns() - start) / 1e3)
            assert len(found) == pages
        return out

    return sample


class Chains:
    """Cached chains and prompts equal to them, in rotation; each was stored as one run, grown turn by turn.

    branches: chains that share a part of the measured one and then diverge, so that its path is `branches + 1` runs.
    The prompts are arrays of their own.
    """

    def __init__(self, chains: int, pages: int, branches: int = 0) -> None:
        self.store = Store(chains * pages + branches)
        self.pages = pages
        self.prompts: list[Ids] = []
        self.cached: list[array[int]] = []
        self._turn = 0
        tree = self.store.tree
        for number, ids in enumerate(distinct_chains(chains, pages, PAGE, 10 + chains)):
            chain = self.store.grow(ids, 8)
            for branch in range(1, branches + 1):
                before = chain[branch * pages // (branches + 1) - 1]
                other = distinct_chains(1, 1, PAGE, 1000 * number + branch)[0]
                self.store.put(other, tree.place(before), tree.page_content(before)[1])
            self.cached.append(chain)
            self.prompts.append(ids.copy())
        assert sum(1 for _ in tree.runs()) == chains * (2 * branches + 1)

    def match(self, times: int) -> Sample:
        """Match, verify and pin whole chains.  Release is outside the timed part."""
        tree, ledger, identity, pages = self.store.tree, self.store.ledger, self.store.identity, self.pages

        def sample() -> list[float]:
            out = []
            for _ in range(times):
                turn = self._turn
                self._turn = (turn + 1) % len(self.prompts)
                raw = self.prompts[turn].data.cast("B")
                start = now_ns()
                found, *_ = tree.match(identity, raw, pages)
                ledger.retain(found, 0)
                out.append((now_ns() - start) / 1e3)
                assert found == self.cached[turn]
                ledger.release(found, 0)
            return out

        return sample

    def memcmp(self, times: int) -> Sample:
        """The floor of `match`: libc memcmp of the same bytes, those of the first prompt and of its run."""
        prompt, run = self.prompts[0], next(self.store.tree.runs())
        memcmp = ctypes.CDLL(None).memcmp
        memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        stored = np.frombuffer(run.tokens, dtype=np.int32)
        ours, theirs, nbytes = prompt.ctypes.data, stored.ctypes.data, prompt.nbytes
        assert stored.nbytes == nbytes and np.array_equal(stored, prompt)
        del stored

        def sample() -> list[float]:
            out = []
            for _ in range(times):
                start = now_ns()
                differ = memcmp(ours, theirs, nbytes)
                out.append((now_ns() - start) / 1e3)
                assert not differ
            return out

        return sample


def admit(pages: int, times: int) -> Sample:
    """A whole admission whose pages are all cached but the last."""
    cache = TieredCache(CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(2 * pages + 2), b"bench index")
    ids = distinct_chains(1, pages + 1, PAGE, 4)[0]
    cache.finish(cache.admit(ids), len(ids))

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = now_ns()
            lease = cache.admit(ids)
            out.append((now_ns() - start) / 1e3)
            assert lease.matched_len == pages * PAGE
            cache.abort(lease)
        return out

    return sample


# ---------------------------------------------------------------------- windows


def release_oldest(pages: int, times: int, cached: bool) -> Sample:
    """A window slides past `pages` pages at once, which only its request has, or the index too."""
    cache = TieredCache(CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(2 * pages + 8), b"bench index")
    ids = distinct_chains(1, pages + 3, PAGE, 5)[0]
    if cached:
        cache.finish(cache.admit(ids), len(ids))

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            lease = cache.admit(ids)
            cache.protect_prefix(lease, PAGE)
            cache.seal(lease, len(ids))
            before = cache.stats().pages_cached + cache.stats().pages_free
            start = now_ns()
            cache.release_oldest(lease, pages)
            out.append((now_ns() - start) / 1e3)
            assert cache.stats().pages_cached + cache.stats().pages_free == before + pages
            cache.abort(lease)
        return out

    return sample


# ---------------------------------------------------------------------- seal


def seal_chain(pages: int, times: int, fresh_memory: bool = False) -> Sample:
    """Seal and insert a new chain, names given; microseconds a page.

    The pool is full: before each, the coldest chain of equal length has left, and its memory is taken up again.
    fresh_memory: the index is empty instead, and token ids go to memory that the system has yet to hand over.
    """
    store = Store(times * pages)
    ledger, tree = store.ledger, store.tree
    chains = distinct_chains(times, pages, PAGE, 5)
    given = [chain_names(store.identity.name, ids.data.cast("B"), PAGE_NBYTES) for ids in chains]

    def room() -> "array[int]":
        if fresh_memory:
            return ledger.open(pages, 0)
        gone = tree.evict(pages)
        ledger.recycle(gone, 0)
        return gone

    def sample() -> list[float]:
        tree.clear()
        if not fresh_memory:
            for ids in distinct_chains(times, pages, PAGE, 8):
                tree.offer(store.put(ids)[-1:])
        out = []
        for ids, its_names in zip(chains, given, strict=True):
            raw = ids.data.cast("B")
            opened = room()
            start = now_ns()
            ledger.seal(opened, 0)
            done = tree.insert(tree.root(store.identity), its_names, raw, opened)
            out.append((now_ns() - start) / 1e3 / pages)
            assert not done.twins
            ledger.release(opened, 0)
        return out

    return sample


def seal_one_page(runs: int, pages: int, times: int) -> Sample:
    """Seal and insert one page behind a run of `pages`, the runs in rotation, names given."""
    store = Store(runs * (pages + times))
    ledger, tree = store.ledger, store.tree
    chains = distinct_chains(runs, pages + times, PAGE, 6)
    given = [chain_names(store.identity.name, ids.data.cast("B"), PAGE_NBYTES) for ids in chains]

    def sample() -> list[float]:
        tree.clear()
        last = [store.put(ids[: pages * PAGE])[-1] for ids in chains]
        out = []
        for at in range(pages, pages + times):
            for number, ids in enumerate(chains):
                raw = ids[at * PAGE : (at + 1) * PAGE].data.cast("B")
                its_names = given[number][at : at + 1]
                opened = ledger.open(1, 0)
                start = now_ns()
                ledger.seal(opened, 0)
                place = tree.place(last[number])
                assert place is not None
                tree.insert(place, its_names, raw, opened)
                out.append((now_ns() - start) / 1e3)
                ledger.release(opened, 0)
                last[number] = opened[0]
        assert sum(1 for _ in tree.runs()) == runs
        return out

    return sample


# ---------------------------------------------------------------------- allocation


class FullPool:
    """A cache whose pages are all cached, in chains of `run_pages`; each sample takes some and puts others back."""

    def __init__(self, pages: int, run_pages: int) -> None:
        self.run_pages = run_pages
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(pages), b"bench index"
        )
        self.ledger, self.tree = self.cache._ledger, self.cache._tree
        self.identity = make_identity(b"bench index")
        self.random = np.random.Generator(np.random.PCG64(7))
        self.fill(self.ledger.open(pages, 0))

    def fill(self, opened: "array[int]") -> None:
        """Stores OPEN pages as cached chains of random tokens (the last may be shorter)."""
        for at in range(0, len(opened), self.run_pages):
            pages = opened[at : at + self.run_pages]
            ids = self.random.integers(0, 128_000, len(pages) * PAGE, dtype=np.int32)
            its_names = self.random.integers(0, 2**64, len(pages), dtype=np.uint64).tolist()
            self.ledger.seal(pages, 0)
            self.tree.insert(self.tree.root(self.identity), its_names, ids.data.cast("B"), pages)
            self.ledger.release(pages, 0)
            self.tree.offer(pages[-1:])
        assert not self.ledger.free and not self.ledger.held

    def take(self, count: int, times: int) -> Sample:
        """Room for `count` pages, as admission and extension make it; microseconds a page."""
        take = self.cache._room.take

        def sample() -> list[float]:
            out = []
            taken = array("i")
            for _ in range(times):
                start = now_ns()
                pages = take(count, 0)
                out.append((now_ns() - start) / 1e3 / count)
                taken.extend(pages)
            assert len(taken) == times * count
            self.fill(taken)
            return out

        return sample

    def extend(self, count: int, times: int) -> Sample:
        """The same through the public door: `extend` by `count` pages of room; microseconds a page."""
        cache = self.cache

        def sample() -> list[float]:
            lease: Lease = cache.admit(np.zeros(1, dtype=np.int32), reuse=False)
            out = []
            for number in range(1, times + 1):
                room = number * count * PAGE
                start = now_ns()
                cache.extend(lease, room=room)
                out.append((now_ns() - start) / 1e3 / count)
            pages = lease.pages[:]
            cache.abort(lease)
            assert len(pages) == self.ledger.free
            self.fill(self.ledger.open(len(pages), 0))
            return out

        return sample


def checksum(values: Sequence[int]) -> str:
    """A name for what was computed, to compare runs by."""
    return xxhash.xxh3_64_hexdigest(array("q", values).tobytes())
