"""Faults that other caches had, by the number of their row in the list of invariants: each kind as a small input.

Must not know a model.  Rows on copies, on the CPU tier and on encoder outputs are tested where those are.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.check import check_tree
from kvkeep.index.eviction import LruOrder
from kvkeep.index.media import MediaItem
from kvkeep.index.names import Hash64, Identity, chain_names, frame, hash64, make_identity, self_test
from kvkeep.index.runs import RunTree
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.tracing import TracingLedger
from tests.core.naive import constant_hash, narrow_hash

PAGE_SIZE = 4
PROMPT = list(range(100, 117))  # four full pages and one token


def make_cache(pages: int = 32, page_size: int = PAGE_SIZE, hash_fn: Hash64 = hash64) -> TieredCache:
    config = CacheConfig(page_size=page_size, eviction="lru")
    return TieredCache(config, GpuPool.bookkeeping(pages), b"fp", ledger=TracingLedger(pages), hash_fn=hash_fn)


def store(cache: TieredCache, tokens: Sequence[int], **how: Any) -> Lease:
    """A whole request: everything but the last token has KV."""
    lease = cache.admit(tokens, **how)
    cache.finish(lease, len(tokens) - 1)
    cache.check_invariants()
    return lease


def matched(cache: TieredCache, tokens: Sequence[int], **how: Any) -> int:
    """How many tokens of a prompt would be taken from the cache."""
    lease = cache.admit(tokens, **how)
    cache.abort(lease)
    cache.check_invariants()
    return lease.matched_len


# ---------------------------------------------------------------------- names and wrong hits


def test_row_1_pages_of_equal_name_are_told_apart() -> None:
    """Two pages that XXH3 really does name alike, under one parent, are two entries and never each other's hit."""
    seed = 0x2468B3BC26A44073
    pages = [bytes(16) + bytes.fromhex(tail) for tail in
             ("51151210404400000000008204000105", "aeeaedefbfbbffffffffff7dfbfffefa")]  # fmt: skip
    assert [0xDD686B61E2F6DC69] * 2 == [hash64(page, seed) for page in pages]
    root = Identity(b"root", seed)
    tree = RunTree(TracingLedger(4), LruOrder(), 32)
    stored = []
    for page in pages:
        assert [] == list(tree.match(root, memoryview(page), 1).pages)
        opened = tree.gpu.ledger.open(1, "a")
        tree.gpu.ledger.seal(opened, "a")
        names = chain_names(root.name, memoryview(page), 32)
        assert 0 == tree.insert(tree.root(root), names, memoryview(page), opened).twins
        stored.append(list(opened))
    check_tree(tree)
    assert stored == [list(tree.match(root, memoryview(page), 1).pages) for page in pages]


@pytest.mark.parametrize("hash_fn", [narrow_hash, constant_hash])
def test_row_2_the_same_page_behind_another_one_is_no_hit(hash_fn: Hash64) -> None:
    """A page is verified together with all before it: an equal page after other ones does not count."""
    cache = make_cache(pages=500, page_size=2, hash_fn=hash_fn)
    store(cache, [1, 1, 7, 7, 0])
    assert 0 == matched(cache, [2, 2, 7, 7, 0])
    rng = random.Random(1)
    stored = {(1, 1), (1, 1, 7, 7)}
    for _ in range(120):
        prompt = [rng.randrange(3) for _ in range(9)]
        known = max(n for n in (0, 2, 4, 6, 8) if n == 0 or tuple(prompt[:n]) in stored)
        assert known == store(cache, prompt).matched_len
        stored |= {tuple(prompt[:n]) for n in (2, 4, 6, 8)}


def picture(digest: bytes | None, offset: int = 2, length: int = 8, causal: bool = True) -> tuple[MediaItem, ...]:
    return (MediaItem(offset, length, digest, causal),)


@pytest.mark.parametrize("hash_fn", [hash64, constant_hash])
def test_row_3_digests_are_compared_in_full(hash_fn: Hash64) -> None:
    """Pictures whose digests differ in one bit only, first or last, are two pictures."""
    cache = make_cache(hash_fn=hash_fn)
    digest = hashlib.sha256(b"a picture").digest()
    store(cache, PROMPT, media=picture(digest))
    for other in (bytes([digest[0] ^ 1]) + digest[1:], digest[:-1] + bytes([digest[-1] ^ 1]), digest + b"\0"):
        assert 0 == matched(cache, PROMPT, media=picture(other))
    assert 16 == matched(cache, PROMPT, media=picture(digest))


def test_row_4_equal_placeholders_do_not_make_pictures_equal() -> None:
    """Same tokens with picture A, then B, then one without a digest, then none: no hit on a page that it touches."""
    cache = make_cache()
    placeholders = [7] * 17
    store(cache, placeholders, media=picture(b"A" * 16, offset=4))
    assert 16 == matched(cache, placeholders, media=picture(b"A" * 16, offset=4))
    for media in (picture(b"B" * 16, offset=4), picture(None, offset=4), picture(b"A" * 16, offset=5), ()):
        assert 4 == matched(cache, placeholders, media=media)


def test_row_4_what_has_no_digest_is_not_cached_nor_what_follows() -> None:
    """A picture without a digest ends what is stored, at the page where it begins; that page is not stored either."""
    cache = make_cache()
    store(cache, PROMPT, media=picture(None, offset=6, length=2))
    assert 4 == matched(cache, PROMPT, media=picture(None, offset=6, length=2))
    assert (4, 1) == (matched(cache, PROMPT), cache.stats().pages_cached)
    store(cache, PROMPT)
    assert 4 == matched(cache, PROMPT, media=picture(None, offset=6, length=2))


def test_row_5_preprocessing_is_part_of_the_digest() -> None:
    """A digest over framed bytes and parameters tells two ways of reading one picture apart."""
    cache = make_cache()

    def digest(**parameters: str) -> bytes:
        fields = [("bytes", b"png"), *((name, value.encode()) for name, value in sorted(parameters.items()))]
        return hashlib.sha256(frame(fields)).digest()

    store(cache, PROMPT, media=picture(digest(mode="RGB")))
    assert 0 == matched(cache, PROMPT, media=picture(digest(background="black")))
    assert 16 == matched(cache, PROMPT, media=picture(digest(mode="RGB")))


def test_row_6_a_field_cannot_imitate_another() -> None:
    """A salt that contains what looks like the next field is not that field."""
    cache = make_cache()
    store(cache, PROMPT, salt=b"x", adapter=b"y")
    imitation = make_identity(b"fp", b"x", b"y").record[len(frame([("fingerprint", b"fp")])) + 16 :]
    for how in ({"salt": b"xy"}, {"salt": b"x", "label": b"y"}, {"salt": imitation}, {"adapter": b"xy"}):
        assert 0 == matched(cache, PROMPT, **how)
    assert 16 == matched(cache, PROMPT, salt=b"x", adapter=b"y")


def test_row_7_every_byte_counts() -> None:
    """Prompts of two kilobytes that are equal in their first thousand bytes share the pages before the difference."""
    cache = make_cache(pages=64, page_size=128)
    store(cache, range(513))
    for at in (250, 400, 511):
        other = [*range(at), 999, *range(at + 1, 513)]
        assert at // 128 * 128 == matched(cache, other)


def test_row_9_an_adapter_is_a_version_not_a_name() -> None:
    """KV of one version of an adapter is not served for the next, nor without an adapter."""
    cache = make_cache()
    store(cache, PROMPT, adapter=b"t v1")
    assert [16, 0, 0] == [matched(cache, PROMPT, adapter=a) for a in (b"t v1", b"t v2", b"")]


def test_row_11_a_salt_keeps_tenants_apart() -> None:
    """What one tenant stored no other finds, though it stores the same."""
    cache = make_cache()
    store(cache, PROMPT, salt=b"A")
    store(cache, PROMPT, salt=b"B")
    assert [16, 16, 0, 0] == [matched(cache, PROMPT, salt=s) for s in (b"A", b"B", b"", b"C")]
    assert 8 == cache.stats().pages_cached


def test_row_12_label_and_fingerprint_separate_as_well() -> None:
    """One KV resource with two labels, or two sets of weights, shares nothing between them."""
    cache = make_cache()
    store(cache, PROMPT, label=b"image path")
    assert [0, 16] == [matched(cache, PROMPT, label=label) for label in (b"", b"image path")]
    cache.set_fingerprint(b"fp of the tower with another adapter")
    assert 0 == matched(cache, PROMPT, label=b"image path")


def test_row_14_new_weights_make_every_old_page_unmatchable_at_once() -> None:
    """Old pages are free when nobody reads them; what a request began with the old weights is not stored."""
    cache = make_cache()
    store(cache, PROMPT)
    reader = cache.admit(PROMPT)
    writer = cache.admit([5] * 9)
    report = cache.set_fingerprint(b"fp 2")
    assert (0, 8) == (report.pages_freed, report.pages_held)
    after = cache.admit([1])
    assert make_identity(b"fp 2") == after.identity != reader.identity
    cache.abort(after)
    assert (0, 0) == (matched(cache, PROMPT), matched(cache, [5] * 9))
    cache.extend(reader, [1] * 8)
    cache.finish(reader, 24)
    cache.seal(writer, 8)
    cache.finish(writer, 8)
    cache.check_invariants()
    assert (32, 0) == (cache.stats().pages_free, matched(cache, [5] * 9))
    cache.set_fingerprint(b"fp")
    assert 0 == matched(cache, PROMPT)


def test_row_15_a_reset_is_over_when_it_returns() -> None:
    """After a reset nothing of any identity matches, and the numbers say what is free and what is still held."""
    cache = make_cache()
    for salt in (b"A", b"B"):
        store(cache, PROMPT, salt=salt)
    held = cache.admit(PROMPT, salt=b"A")
    report = cache.reset()
    assert (4, 5) == (report.pages_freed, report.pages_held)
    assert [0, 0] == [matched(cache, PROMPT, salt=salt) for salt in (b"A", b"B")]
    cache.abort(held)
    assert 32 == cache.stats().pages_free


def test_row_16_names_are_known_before_the_first_request() -> None:
    """A process whose hash gives other names than the fixed vector does not start (golden vectors: test_names)."""
    self_test()
    assert make_identity(b"fp") == make_identity(b"fp", b"", b"", b"")


def test_row_17_a_page_that_was_computed_in_part_is_never_exposed() -> None:
    """A prompt that shares half of a page hits nothing of it; hits are whole pages."""
    cache = make_cache()
    store(cache, [1, 2, 3, 4, 5])
    assert [0, 0, 4] == [matched(cache, p) for p in ([1, 2, 9, 9, 9], [1, 2, 3, 9, 5], [1, 2, 3, 4, 9])]
    lease = cache.admit([6, 6, 6, 6, 7, 7, 7, 7, 8])
    cache.seal(lease, 7)
    assert 4 == matched(cache, [6, 6, 6, 6, 7, 7, 7, 7, 8])
    cache.seal(lease, 8)
    assert 8 == matched(cache, [6, 6, 6, 6, 7, 7, 7, 7, 8])


def test_a_match_does_not_end_inside_an_item_that_looks_ahead() -> None:
    """Where attention inside a picture is not causal, a match that would end in it is cut back to before its page."""
    cache = make_cache()
    whole = picture(b"A" * 16, offset=5, length=9, causal=False)
    store(cache, PROMPT, media=whole)
    assert 16 == matched(cache, PROMPT, media=whole)
    assert 4 == matched(cache, [*PROMPT[:14], 9, 9, 9], media=whole)
    assert 4 == matched(cache, PROMPT[:14], media=whole)
    assert 0 == matched(cache, PROMPT, media=picture(b"A" * 16, offset=0, length=9, causal=False))


# ---------------------------------------------------------------------- life cycle


def test_row_23_match_and_pin_are_one_step() -> None:
    """What was there at a first look may be gone at admission: the hit is shorter, and what it has is pinned."""
    cache = make_cache(pages=8)
    store(cache, PROMPT)
    assert 16 == matched(cache, PROMPT)
    cache.abort(cache.admit([9] * 24))
    lease = cache.admit(PROMPT)
    assert 8 == lease.matched_len
    with pytest.raises(OutOfPages):
        cache.admit([9] * 24)
    cache.check_invariants()
    assert all(cache._ledger.holders(page) == 1 for page in lease.pages)


def test_row_35_a_hit_that_is_dropped_leaves_no_pin() -> None:
    """Admitting and aborting a thousand times leaves every page as it was."""
    cache = make_cache(pages=8)
    store(cache, PROMPT)
    before = cache.stats()
    for _ in range(1000):
        cache.abort(cache.admit(PROMPT))
    after = cache.stats()
    assert (before.pages_free, before.pages_cached, 0, 0) == (
        after.pages_free,
        after.pages_cached,
        after.pages_live,
        after.leases,
    )
    cache.check_invariants()


def test_row_38_two_requests_that_do_not_fit_together_do_not_wait_for_each_other() -> None:
    """Reservation is all or nothing: the second holds nothing while it waits, and finds room when the first ends."""
    cache = make_cache(pages=8)
    prompts = [[letter] * 13 for letter in (1, 2)]
    for prompt in prompts:
        store(cache, prompt)
    first = cache.admit([*prompts[0], *[3] * 11])
    assert (12, 6) == (first.matched_len, len(first.pages))
    with pytest.raises(OutOfPages):
        cache.admit([*prompts[1], *[4] * 11])
    assert 6 == cache.stats().pages_live
    cache.finish(first, 23)
    second = cache.admit([*prompts[1], *[4] * 11])
    assert 6 == len(second.pages)
    cache.check_invariants()


# ---------------------------------------------------------------------- counts and capacity


def test_row_41_and_45_letting_go_twice_is_an_error_and_frees_nothing() -> None:
    """A second release raises, names the page, and the free pages are what they were."""
    cache = make_cache(pages=8)
    lease = cache.admit(PROMPT)
    pages = lease.pages[:]
    cache.abort(lease)
    with pytest.raises(InvariantViolation, match="Lease 0 has ended"):
        cache.abort(lease)
    with pytest.raises(InvariantViolation, match="released"):
        cache._ledger.release(pages, lease.number)
    assert 8 == cache.stats().pages_free
    cache.check_invariants()


@pytest.mark.parametrize("seed", range(3))
def test_row_42_free_cached_and_live_pages_are_the_pool(seed: int) -> None:
    """Whatever is admitted, extended, rolled back and ended: the pages add up, and all are free in the end."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    cache = make_cache(pages=24)
    live: list[Lease] = []
    for _ in range(600):
        act = rng.random()
        try:
            if act < 0.3 or not live:
                live.append(cache.admit([rng.randrange(2) for _ in range(rng.randrange(1, 40))]))
            elif act < 0.6:
                lease = rng.choice(live)
                cache.extend(lease, [rng.randrange(2) for _ in range(rng.randrange(6))], rng.randrange(6))
                cache.seal(lease, max(lease.length - 1, lease.kv_len))
            elif act < 0.75:
                lease = rng.choice(live)
                cache.truncate(lease, rng.randrange(lease.length + 1))
            elif act < 0.9:
                lease = live.pop(rng.randrange(len(live)))
                cache.finish(lease, max(lease.length - 1, lease.kv_len))
            else:
                cache.abort(live.pop(rng.randrange(len(live))))
        except OutOfPages:
            pass
        stats = cache.stats()
        assert 24 == stats.pages_free + stats.pages_cached + stats.pages_live
        cache.check_invariants()
    while live:
        cache.abort(live.pop())
    cache.reset()
    assert 24 == cache.stats().pages_free


def test_row_44_nothing_stays_pinned_on_any_way_out() -> None:
    """After admissions that succeeded, were refused or were no input at all, every cached page can leave."""
    cache = make_cache(pages=8)
    store(cache, PROMPT)
    cache.abort(cache.admit(PROMPT))
    blocker = cache.admit([8] * 12)
    for error, prompt in ((OutOfPages, [*PROMPT, *[7] * 8]), (BadInput, [*PROMPT[:8], -1]), (BadInput, [7] * 100)):
        with pytest.raises(error):
            cache.admit(prompt)
    cache.abort(blocker)
    assert (4, 0) == (cache.stats().pages_cached, cache.stats().pages_live)
    assert 8 == len(cache.admit([9] * 32).pages)
    assert 4 == cache.stats().pages_evicted


def test_row_47_a_pool_full_of_cached_pages_still_has_room() -> None:
    """Allocation drops cached pages, inner ones too once nothing hangs behind them, and never fails for them."""
    cache = make_cache(pages=12)
    for tail in (1, 2, 3, 4):
        store(cache, [*PROMPT[:8], *[tail] * 5])
    assert (6, 6) == (cache.stats().pages_cached, cache.stats().pages_free)
    store(cache, [9] * 25)
    assert (11, 1) == (cache.stats().pages_cached, cache.stats().pages_free)
    assert 12 == len(cache.admit([0] * 48).pages)


def test_row_56_tokens_are_counted_once_an_admission() -> None:
    """Three refusals and one admission are one prompt; matched and computed tokens add up to its length."""
    cache = make_cache(pages=8)
    store(cache, PROMPT)
    blocker = cache.admit([8] * 12)
    before = cache.stats()
    prompt = [*PROMPT, *[7] * 8]
    for _ in range(3):
        with pytest.raises(OutOfPages):
            cache.admit(prompt)
    cache.abort(blocker)
    lease = cache.admit(prompt)
    after = cache.stats()
    assert (1, 3) == (after.admissions - before.admissions, after.refusals - before.refusals)
    assert (25, 16) == (after.prompt_tokens - before.prompt_tokens, after.matched_tokens - before.matched_tokens)
    assert 16 == lease.matched_len
