"""The cache against a naive one, with real page memory: who is refused, what is matched, what leaves, byte by byte.

Must not know a model: the bytes of a position are a digest of the identity and the tokens up to it.
"""

import hashlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.media import MediaItem, PageMedia
from kvkeep.index.names import Hash64, hash64
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.ledger import State
from kvkeep.tiers.memory import POISON_BYTE
from kvkeep.tiers.tracing import TracingLedger
from tests.core.naive import Prefix, constant_hash, narrow_hash
from tests.core.naive_cache import NaiveCache, NaiveLease, Page, Refused
from tests.examples import examples

PAGE_SIZE = 2
PAGES_TOTAL = 10
PROMPT_TOKENS_MAX = 2 * PAGES_TOTAL + 2
POSITION_NBYTES = 16
POISON = bytes([POISON_BYTE])

#: (fingerprint number, salt, adapter, label); most requests share one.
Root = tuple[int, bytes, bytes, bytes]
OTHERS = [(b"s", b"", b""), (b"", b"s", b""), (b"", b"", b"s")]
NO_SALT = (b"", b"", b"")
roots = st.one_of(st.just(NO_SALT), st.just(NO_SALT), st.sampled_from(OTHERS))

letters = st.sampled_from([1, 1, 1, 1, 2])
prompts = st.one_of(
    st.integers(1, 9).map(lambda n: [1] * n),
    st.integers(1, 9).map(lambda n: ([1, 1, 1, 1] + [2] * n)[:n]),
    st.lists(letters, min_size=1, max_size=9),
    st.integers(9, PROMPT_TOKENS_MAX).map(lambda n: [1] * n),
)
shares = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0, 1.0, 1.0, 1.0])
DIGESTS = [b"A" * 20, b"B" + b"A" * 19, None]


@st.composite
def items_of(draw: st.DrawFn, length: int) -> tuple[MediaItem, ...]:
    """Media items of a prompt of `length` tokens: seldom any, at most two."""
    items: list[MediaItem] = []
    if draw(st.integers(0, 3)) == 0:
        for _ in range(draw(st.integers(1, 2))):
            begin = items[-1].offset + items[-1].length if items else 0
            if begin < length:
                offset = draw(st.integers(begin, length - 1))
                span = draw(st.integers(1, length - offset))
                items.append(MediaItem(offset, span, draw(st.sampled_from(DIGESTS)), draw(st.booleans())))
    return tuple(items)


@lru_cache(maxsize=200_000)
def kv_at(root: Hashable, tokens: tuple[int, ...], media: tuple[Hashable, ...]) -> bytes:
    """What a model would compute for the last of `tokens`: a function of everything before it, and nothing else."""
    return hashlib.blake2b(repr((root, tokens, media)).encode(), digest_size=POSITION_NBYTES).digest()


def kv_of(
    root: Hashable,
    tokens: Sequence[int],
    media: Sequence[MediaItem],
    position: int,
    no_identity: Sequence[Hashable] = (),
) -> bytes:
    """The bytes of one position.  Inside an item that looks ahead they depend on all of it; `no_identity` is what they
    depend on besides."""
    seen = [m for m in media if m.offset <= position]
    end = max([position + 1, *(m.offset + m.length for m in seen if not m.causal)])
    return kv_at(root, (*tokens[:end], -position), (*seen, *no_identity))


class Writer:
    """One live request as an engine sees it: its lease, its naive twin, the bytes it has written."""

    def __init__(self, lease: Lease, naive: NaiveLease) -> None:
        self.lease = lease
        self.naive = naive
        self.written: list[bytes] = []  #: by position
        self.cut: set[MediaItem] = set()  #: items of which only a part is left

    def kv(self, position: int) -> bytes:
        """What a model computes at a position: content without a digest, and cut items, are this request's only."""
        naive = self.naive
        unknown = [m for m in naive.media if m.offset <= position and (m.digest is None or m in self.cut)]
        own = [("only here", naive.number)] if unknown else []
        return kv_of(naive.root, naive.tokens, naive.media, position, own)


class CacheMachine(RuleBasedStateMachine):
    """Several live requests over a pool of ten pages, most with the same prompts."""

    hash_fn: Hash64 = staticmethod(hash64)
    index_at: Literal["seal", "finish"] = "seal"

    @initialize()
    def begin(self) -> None:
        layout = PageLayout(layers=1, kv_heads=1, head_dim=2, page_size=PAGE_SIZE)
        self.pool = GpuPool.allocate(layout, PAGES_TOTAL)
        self.kv: npt.NDArray[np.uint8] = self.pool.kv.numpy().view(np.uint8)
        self.ledger = TracingLedger(PAGES_TOTAL)
        config = CacheConfig(page_size=PAGE_SIZE, index_at=self.index_at, eviction="lru")
        self.cache = TieredCache(config, self.pool, b"fp 0", ledger=self.ledger, hash_fn=self.hash_fn)
        self.naive = NaiveCache(PAGES_TOTAL, PAGE_SIZE, self.index_at == "seal")
        self.fingerprint = 0
        self.writers: list[Writer] = []
        self.poison_the_free()

    # ------------------------------------------------------------------ bytes

    def poison_the_free(self) -> None:
        self.kv[[p for p in range(PAGES_TOTAL) if self.ledger.state(p) is State.FREE]] = POISON_BYTE

    def bytes_of(self, page: int) -> list[bytes]:
        """The bytes of a page by position."""
        return [self.kv[page, 0, :, slot].tobytes() for slot in range(PAGE_SIZE)]

    def poison_new(self, writer: Writer, before: Sequence[int], positions: int = 0) -> None:
        """Poisons what the lease got since `before`, but the first `positions` of the first such page."""
        for at, page in enumerate(p for p in writer.lease.pages if p not in before):
            self.kv[page, :, :, 0 if at else positions :] = POISON_BYTE

    def compute(self, writer: Writer, end: int) -> None:
        """Writes positions up to `end` as a forward pass would: in OPEN pages of the request only."""
        lease = writer.lease
        for position in range(len(writer.written), end):
            page = lease.pages[position // PAGE_SIZE]
            assert self.ledger.state(page) is State.OPEN
            assert dict(self.ledger.owners[page]) == {lease.number: 1}
            new = writer.kv(position)
            self.kv[page, 0, :, position % PAGE_SIZE] = np.frombuffer(new, dtype=np.uint8).reshape(2, 1, -1)
            writer.written.append(new)

    # ------------------------------------------------------------------ requests

    @rule(root=roots, prompt=prompts, reuse=st.integers(0, 4), store=st.integers(0, 4), data=st.data())
    def admit(
        self, root: tuple[bytes, bytes, bytes], prompt: list[int], reuse: int, store: int, data: st.DataObject
    ) -> None:
        media = data.draw(items_of(len(prompt)), label="media")
        self.admit_one(root, prompt, media, bool(reuse), bool(store))

    @rule(root=roots, prompt=prompts, data=st.data())
    def a_whole_request(self, root: tuple[bytes, bytes, bytes], prompt: list[int], data: st.DataObject) -> None:
        media = data.draw(items_of(len(prompt)), label="media")
        if self.admit_one(root, prompt, media, reuse=True, store=True):
            self.finish_one(self.writers[-1], 1.0)

    @rule(prompt=prompts, grown=st.lists(st.tuples(st.integers(0, 3), shares), min_size=2, max_size=4))
    def twins(self, prompt: list[int], grown: list[tuple[int, float]]) -> None:
        """Requests with one prompt are admitted before any of them has sealed a page; then they go on."""
        admitted = []
        for more, share in grown:
            if self.admit_one(NO_SALT, prompt, (), reuse=True, store=True):
                admitted.append((self.writers[-1], more, share))
        for writer, more, share in admitted:
            self.extend_one(writer, [1] * more, 0)
            self.seal_one(writer, share)

    def admit_one(
        self,
        root: tuple[bytes, bytes, bytes],
        prompt: list[int],
        media: tuple[MediaItem, ...],
        reuse: bool,
        store: bool,
    ) -> bool:
        """Admits, sees that every byte taken from the cache is right, and returns whether there was room."""
        salt, adapter, label = root

        def act() -> Lease:
            return self.cache.admit(
                prompt, salt=salt, adapter=adapter, label=label, media=media, reuse=reuse, store=store
            )

        if len(prompt) > PAGES_TOTAL * PAGE_SIZE:
            with pytest.raises(BadInput, match="the pool has 10"):
                act()
            return False
        try:
            naive = self.naive.admit((self.fingerprint, *root), prompt, media, reuse, store)
        except Refused as refused:
            self.refused(refused, act)
            return False
        lease = act()
        writer = Writer(lease, naive)
        assert naive.base * PAGE_SIZE == lease.matched_len
        assert lease.matched_len <= (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        self.poison_new(writer, lease.pages[: naive.base])
        for position in range(lease.matched_len):
            got = self.bytes_of(lease.pages[position // PAGE_SIZE])[position % PAGE_SIZE]
            assert writer.kv(position) == got, f"a wrong hit at {position}"
            writer.written.append(got)
        self.writers.append(writer)
        return True

    def refused(self, refused: Refused, act: Any) -> None:
        """The cache refuses as well, with the same numbers; that nothing changed is what the invariants then see."""
        with pytest.raises(OutOfPages) as caught:
            act()
        assert (refused.asked, refused.short) == (caught.value.asked, caught.value.short)
        assert (PAGES_TOTAL, 0) == (caught.value.total, caught.value.in_flight)

    def pick(self, which: int) -> Writer:
        return self.writers[which % len(self.writers)]

    live = precondition(lambda self: self.writers)
    pick_one = st.integers(0, 11)

    def extend_one(self, writer: Writer, tokens: list[int], room: int) -> None:
        def act() -> None:
            self.cache.extend(writer.lease, tokens, room)

        before = list(writer.lease.pages)
        try:
            self.naive.extend(writer.naive, tokens, room)
        except Refused as refused:
            self.refused(refused, act)
            return
        act()
        self.poison_new(writer, before)

    @live
    @rule(which=pick_one, tokens=st.lists(letters, max_size=5), room=st.sampled_from([0, 0, 1, 3]))
    def extend(self, which: int, tokens: list[int], room: int) -> None:
        self.extend_one(self.pick(which), tokens, room)

    @live
    @rule(which=pick_one, beyond=st.booleans())
    def extend_to_the_limit(self, which: int, beyond: bool) -> None:
        """Every page that is free, or cached and held by nobody, can be had; and not one more."""
        writer = self.pick(which)
        pages = len(writer.naive.pages) + self.naive.free + self.naive.idle + beyond
        self.extend_one(writer, [], pages * PAGE_SIZE - len(writer.naive.tokens))

    @live
    @rule(which=pick_one, share=shares)
    def compute_some(self, which: int, share: float) -> None:
        """A forward pass, maybe over drafts: nothing is committed."""
        writer = self.pick(which)
        self.compute(writer, int(share * writer.lease.length))

    def kv_len(self, writer: Writer, share: float) -> int:
        low = writer.naive.sealed * PAGE_SIZE
        kv_len = writer.lease.chunk_end(low, low + round(share * (writer.lease.length - low)))
        assert not any(self.naive.cuts(item, kv_len) for item in writer.naive.media)
        self.compute(writer, kv_len)
        return kv_len

    @live
    @rule(which=pick_one, share=shares)
    def seal(self, which: int, share: float) -> None:
        self.seal_one(self.pick(which), share)

    def seal_one(self, writer: Writer, share: float) -> None:
        kv_len = self.kv_len(writer, share)
        self.cache.seal(writer.lease, kv_len)
        self.naive.seal(writer.naive, kv_len)

    @live
    @rule(which=pick_one, back=st.integers(0, 9))
    def truncate(self, which: int, back: int) -> None:
        writer = self.pick(which)
        length = max(0, writer.lease.length - back)
        before = list(writer.lease.pages)

        def act() -> None:
            self.cache.truncate(writer.lease, length)

        if any(self.naive.cuts(item, length) for item in writer.naive.media):
            with pytest.raises(BadInput, match=f"truncate to {length} ends inside the media item"):
                act()
            return
        try:
            self.naive.truncate(writer.naive, length)
        except Refused as refused:
            self.refused(refused, act)
            return
        act()
        del writer.written[length:]
        writer.cut |= {m for m in writer.naive.media if m.offset < length < m.offset + m.length}
        self.poison_new(writer, before, length % PAGE_SIZE)

    @live
    @rule(which=pick_one, share=shares)
    def finish(self, which: int, share: float) -> None:
        self.finish_one(self.pick(which), share)

    def finish_one(self, writer: Writer, share: float) -> None:
        kv_len = self.kv_len(writer, share)
        self.cache.finish(writer.lease, kv_len)
        self.naive.finish(writer.naive, kv_len)
        self.ended(writer)

    @live
    @rule(which=pick_one)
    def abort(self, which: int) -> None:
        writer = self.pick(which)
        self.cache.abort(writer.lease)
        self.naive.abort(writer.naive)
        self.ended(writer)

    def ended(self, writer: Writer) -> None:
        self.writers.remove(writer)
        with pytest.raises(InvariantViolation, match="has ended"):
            self.cache.abort(writer.lease)

    @live
    @rule(which=pick_one, beyond=st.integers(1, 3))
    def misuse(self, which: int, beyond: int) -> None:
        """Lengths that cannot be are refused and change nothing."""
        lease = self.pick(which).lease
        for kv_len in (lease.sealed * PAGE_SIZE - beyond, lease.length + beyond):
            for act in (self.cache.seal, self.cache.finish):
                with pytest.raises(BadInput, match="kv_len"):
                    act(lease, kv_len)
        for length in (-beyond, lease.length + beyond):
            with pytest.raises(BadInput, match="truncate to"):
                self.cache.truncate(lease, length)

    # ------------------------------------------------------------------ the whole cache

    @rule(sure=st.integers(0, 7), new_weights=st.booleans())
    def forget(self, sure: int, new_weights: bool) -> None:
        if sure:
            return
        freed, held = self.naive.reset()
        if new_weights:
            self.fingerprint = 1 - self.fingerprint
            report = self.cache.set_fingerprint(b"fp %d" % self.fingerprint)
        else:
            report = self.cache.reset()
        assert (freed, held) == (report.pages_freed, report.pages_held)

    # ------------------------------------------------------------------ always

    @invariant()
    def equals_the_naive_one(self) -> None:
        """Pages of requests and of the index correspond one to one to those of the naive cache; so do the counts."""
        self.cache.check_invariants()
        numbers: dict[Page, int] = {}
        for writer in self.writers:
            lease, naive = writer.lease, writer.naive
            assert (len(naive.tokens), naive.sealed) == (lease.length, lease.sealed)
            for page, number in zip(naive.pages, lease.pages, strict=True):
                assert number == numbers.setdefault(page, number)
        cached = {prefix: self.cached_at(prefix) for prefix in self.naive.index}
        for prefix, found in cached.items():
            page = self.naive.index.entries[prefix].page
            assert found is not None
            assert found == numbers.setdefault(page, found)
        assert len(numbers) == len(set(numbers.values()))
        assert len(cached) == sum(len(run.pages) for run in self.cache._tree.runs())
        self.counts_are_equal()
        self.poison_the_free()

    def cached_at(self, prefix: Prefix) -> int | None:
        """The number of the cached page that ends a prefix."""
        root, chain = prefix
        assert isinstance(root, tuple)
        if root[0] != self.fingerprint:
            return None
        raw = np.array([t for tokens, _ in chain for t in tokens], dtype=np.int32).data.cast("B")
        media: PageMedia = {d: m for d, (_, m) in enumerate(chain) if m}
        found = self.cache._tree.match(
            self.cache._identities.get(self.cache._fingerprint, *root[1:]), raw, len(chain), media
        )
        return found.pages[-1] if len(found.pages) == len(chain) else None

    def counts_are_equal(self) -> None:
        naive, stats = self.naive, self.cache.stats()
        assert (naive.free, naive.idle) == (stats.pages_free, stats.pages_cached)
        assert PAGES_TOTAL == stats.pages_free + stats.pages_cached + stats.pages_live == stats.pages_total
        assert (len(self.writers), naive.admissions, naive.refusals) == (
            stats.leases,
            stats.admissions,
            stats.refusals,
        )
        assert (naive.prompt_tokens, naive.matched_tokens) == (stats.prompt_tokens, stats.matched_tokens)
        assert (naive.stored, naive.evicted) == (stats.pages_stored, stats.pages_evicted)

    @invariant()
    def every_byte_is_what_its_prefix_says(self) -> None:
        for root, chain in self.naive.index:
            number = self.cached_at((root, chain))
            assert number is not None
            tokens = [t for page, _ in chain for t in page]
            media = sorted({m for _, items in chain for m in items}, key=lambda m: m.offset)
            size = len(tokens)
            got = self.bytes_of(number)
            for slot, position in enumerate(range(size - PAGE_SIZE, size)):
                if any(not m.causal and m.offset <= position and m.offset + m.length > size for m in media):
                    continue  # the page ends inside an item: no request may stop there, and this one cannot say more
                assert kv_of(root, tokens, media, position) == got[slot]
        for writer in self.writers:
            pages = [self.bytes_of(page) for page in writer.lease.pages]
            for position, expected in enumerate(writer.written):
                assert expected == pages[position // PAGE_SIZE][position % PAGE_SIZE]

    def teardown(self) -> None:
        """When all requests have ended and the cache has forgotten everything, the whole pool is free."""
        if not hasattr(self, "cache"):
            return
        for writer in self.writers:
            self.cache.abort(writer.lease)
        self.cache.reset()
        self.cache.check_invariants()
        assert PAGES_TOTAL == self.cache.stats().pages_free


class FinishMachine(CacheMachine):
    """Pages become visible when their request ends."""

    index_at = "finish"


class NarrowCacheMachine(CacheMachine):
    """With names of 8 bits."""

    hash_fn = staticmethod(narrow_hash)


class ConstantCacheMachine(CacheMachine):
    """With one name for everything."""

    hash_fn = staticmethod(constant_hash)


MACHINES = pytest.mark.parametrize("machine", [CacheMachine, FinishMachine, NarrowCacheMachine, ConstantCacheMachine])


@MACHINES
def test_a_cache_equals_the_naive_one(machine: type[CacheMachine]) -> None:
    """Hits, refusals, evictions and counts are exactly those of the naive cache, and no byte read is another's."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(100), stateful_step_count=50, report_multiple_bugs=False)
    )


@pytest.mark.slow
@MACHINES
def test_a_cache_equals_the_naive_one_at_length(machine: type[CacheMachine]) -> None:
    """The same, for minutes."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=1000, stateful_step_count=80, report_multiple_bugs=False)
    )
