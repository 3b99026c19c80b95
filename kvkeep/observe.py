"""Observe mode: names without pages.  What would have been matched, told without keeping or changing anything.

Must not own memory or hand out pages: whoever serves requests calls `begin` and `end` and goes on as before.  Kept are
names and the token ids that verify them, 4 bytes a token, as many as a pool of `pages` would.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvkeep.config import EvictionName, check_int
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index.media import NO_MEDIA, MediaItem, PageMedia, Placed, cut_before_split_item, place_media
from kvkeep.index.names import (
    TOKEN_NBYTES,
    Fingerprint,
    Identities,
    Identity,
    Int32s,
    TokenIds,
    as_token_ids,
    chain_names,
    fingerprint_bytes,
    hash64,
)
from kvkeep.index.orders import make_order
from kvkeep.index.runs import Match, RunTree
from kvkeep.index.uses import NO_STAMP, Began, PathUse
from kvkeep.index.watch import watch_tree
from kvkeep.misses import Cause, Looked, MissLedger
from kvkeep.tiers.ledger import Ledger, as_index

REPLICAS_MAX = 63

#: How many media digests are remembered.
DIGESTS_MAX = 1 << 16


class Observed:
    """A request between `begin` and `end`.   would_match: pages that a cache would have had of its prompt."""

    __slots__ = ("began", "identity", "live", "media", "number", "prompt_len", "replica", "would_match")

    def __init__(self, number: int, identity: Identity, prompt_len: int, media: Placed, replica: int) -> None:
        self.number = number
        self.identity = identity
        self.prompt_len = prompt_len
        self.media = media
        self.replica = replica
        self.would_match = 0
        self.began = Began(0.0, NO_STAMP, prompt_len)
        self.live = True


@dataclass(frozen=True, slots=True)
class Observation:
    """What has been seen so far.

    prompt_pages: full pages of all prompts.   would_match_pages: those that one cache for all replicas would have had.
    would_match_here_pages: those that a cache of the replica that served the request would have had.
    missed_tokens: prompt tokens that would not have been found, by cause; `Cause.IN_FLIGHT` are those that a request in
        flight had or was computing: what storing pages as they fill would win over storing them when requests end.
    replica_spread: replicas that have computed a matched page, on average over matched pages; 1 is no spread.
    media_items: occurrences of media with a digest.   duplicate_media_items: of a digest seen before.
    """

    requests: int
    prompt_tokens: int
    prompt_pages: int
    would_match_pages: int
    would_match_here_pages: int
    missed_tokens: Mapping[Cause, int]
    replica_spread: float
    media_items: int
    duplicate_media_items: int

    @property
    def duplicate_media_rate(self) -> float:
        """Share of media occurrences whose encoder output could have been kept."""
        return self.duplicate_media_items / self.media_items if self.media_items else 0.0


class Observer:
    """Watches requests as if a cache of `pages` pages stood behind them; requests store when they end.

    eviction: the order in which names leave.   fingerprint: see `TieredCache`.   May be called from any thread.
    """

    def __init__(
        self, pages: int, fingerprint: Fingerprint | bytes, *, page_size: int = 128, eviction: EvictionName = "lru"
    ) -> None:
        check_int("pages", pages, at_least=1)
        check_int("page_size", page_size, at_least=1)
        self._page_size = page_size
        self._page_nbytes = page_size * TOKEN_NBYTES
        self._fingerprint = fingerprint_bytes(fingerprint)
        self._identities = Identities(hash64)
        self._capacity = pages
        self._ledger = Ledger(2 * pages)  # a chain as long as the pool enters before others leave
        self._tree = RunTree(self._ledger, make_order(eviction, pages), self._page_nbytes)
        self._uses = self._tree.gpu.order.uses
        self._misses = MissLedger(page_size, order=eviction)
        watch_tree(self._tree, None, self._misses)
        self._computed_by = np.zeros(2 * pages, dtype=np.uint64)  # by page, a bit for each replica
        self._digests: dict[bytes, None] = {}
        self._lock = Lock()
        self._requests = self._prompt_tokens = self._prompt_pages = 0
        self._matched = self._matched_here = self._spread = 0
        self._media = self._duplicates = 0

    def begin(
        self,
        tokens: TokenIds,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        label: bytes = b"",
        media: Sequence[MediaItem] = (),
        replica: int = 0,
    ) -> Observed:
        """A prompt arrived at a replica (0 to 62).  Raises `BadInput` for what a cache would refuse."""
        ids = as_token_ids(tokens)
        if not len(ids):
            raise BadInput("a prompt of 0 tokens: at least 1 is needed")
        if not 0 <= replica < REPLICAS_MAX:
            raise BadInput(f"replica {replica}: it must be 0 to {REPLICAS_MAX - 1}")
        placed = place_media(media, self._page_size, len(ids)) if media else NO_MEDIA
        limit = (len(ids) - 1) // self._page_size
        if placed.storable is not None:
            limit = min(limit, placed.storable)
        with self._lock:
            identity = self._identities.get(self._fingerprint, salt, adapter, label)
            seen = Observed(self._requests, identity, len(ids), placed, replica)
            raw = ids.data.cast("B")
            pages, _, name = self._match(identity, raw, limit, placed.by_page)
            seen.would_match = len(pages)
            place = self._tree.place(pages[-1]) if len(pages) else None
            if place is not None and self._uses is not None:
                seen.began = Began(self._uses.now(), self._tree.stamp(place), len(ids))
            self._misses.admitted(seen.number, identity, raw, placed.by_page, Looked(len(pages), limit, name))
            self._count(ids, pages, media, replica)
        return seen

    def end(self, seen: Observed, tokens: TokenIds, kv_len: int) -> None:
        """A request is over.   tokens: its prompt and what was generated, of which `kv_len` positions had KV."""
        ids = as_token_ids(tokens)
        if not 0 <= kv_len <= len(ids):
            raise BadInput(f"kv_len {kv_len}: it must be 0 to {len(ids)}")
        full = kv_len // self._page_size
        if seen.media.storable is not None:
            full = min(full, seen.media.storable)
        with self._lock:
            self._over(seen)
            if full:
                self._store(seen, ids, full)

    def abandon(self, seen: Observed) -> None:
        """A request ended and would have left nothing."""
        with self._lock:
            self._over(seen)

    def observation(self) -> Observation:
        """What there is so far."""
        with self._lock:
            return Observation(
                requests=self._requests,
                prompt_tokens=self._prompt_tokens,
                prompt_pages=self._prompt_pages,
                would_match_pages=self._matched,
                would_match_here_pages=self._matched_here,
                missed_tokens=self._misses.stats().tokens,
                replica_spread=self._spread / self._matched if self._matched else 1.0,
                media_items=self._media,
                duplicate_media_items=self._duplicates,
            )

    # ------------------------------------------------------------------ inside; the lock is held

    def _match(self, identity: Identity, raw: memoryview, limit: int, media: PageMedia) -> Match:
        """What a cache would match: never ending inside a whole item."""
        found = self._tree.match(identity, raw, limit, media)
        whole = cut_before_split_item(len(found.pages), self._page_size, media)
        return found if whole == len(found.pages) else self._tree.match(identity, raw, whole, media)

    def _count(self, ids: Int32s, pages: "array[int]", media: Sequence[MediaItem], replica: int) -> None:
        self._requests += 1
        self._prompt_tokens += len(ids)
        self._prompt_pages += len(ids) // self._page_size
        self._matched += len(pages)
        if len(pages):
            computed_by = self._computed_by[as_index(pages)]
            here = (computed_by >> np.uint64(replica)) & np.uint64(1)
            self._matched_here += int(np.argmin(here)) if not here.all() else len(pages)
            self._spread += int(np.unpackbits(computed_by.view(np.uint8)).sum())
        for item in media:
            if item.digest is not None:
                self._media += 1
                self._duplicates += item.digest in self._digests
                self._digests.pop(item.digest, None)
                self._digests[item.digest] = None
        while len(self._digests) > DIGESTS_MAX:
            del self._digests[next(iter(self._digests))]

    def _over(self, seen: Observed) -> None:
        if not seen.live:
            raise InvariantViolation(f"observed request {seen.number} has ended")
        seen.live = False
        self._misses.ended(seen.number)

    def _store(self, seen: Observed, ids: Int32s, full: int) -> None:
        """The full pages of a chain enter; the coldest leave."""
        tree, ledger = self._tree, self._ledger
        full = min(full, self._capacity)
        raw = ids.data.cast("B")[: full * self._page_nbytes]
        media = seen.media.by_page
        found, _, name = tree.match(seen.identity, raw, full, media)
        place = tree.place(found[-1]) if found else tree.root(seen.identity)
        assert place is not None
        bit = np.uint64(1 << seen.replica)
        new = full - len(found)
        if new:
            names = chain_names(name, raw[len(found) * self._page_nbytes :], self._page_nbytes, len(found), media)
            opened = ledger.open(new, seen.number)
            ledger.seal(opened, seen.number)
            self._computed_by[as_index(opened)] = bit
            inserted = tree.insert(place, names, raw[len(found) * self._page_nbytes :], opened, media)
            place = tree.place(inserted.last)
            ledger.release(opened, seen.number)
            tree.offer(opened)
        else:
            names = []
            tree.touch(place)
        if len(found):
            self._computed_by[as_index(found)] |= bit
        if self._uses is not None and place is not None:
            out = max(0, len(ids) - seen.prompt_len)
            self._uses.used(PathUse(tree.stamp(place), *place, len(found), name, names, seen.began, out))
        if ledger.idle > self._capacity:
            ledger.drop(tree.evict(ledger.idle - self._capacity))
