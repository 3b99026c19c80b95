"""Cases of the cache that a person can follow: pages of two tokens, a pool of a few pages.

Must not know a model; where bytes matter a test writes them itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.tracing import TracingLedger

PICTURE = b"digest of a picture."
OTHER_PICTURE = b"digest of another one"


def make_cache(pages: int, **config: Any) -> TieredCache:
    settings = CacheConfig(**{"page_size": 2, "eviction": "lru", **config})
    return TieredCache(settings, GpuPool.bookkeeping(pages), b"fp", ledger=TracingLedger(pages))


def matched(cache: TieredCache, tokens: Sequence[int], **how: Any) -> int:
    """How many tokens of a prompt the cache has; leaves everything as it was."""
    lease = cache.admit(tokens, **how)
    cache.abort(lease)
    cache.check_invariants()
    return lease.matched_len


def run_through(cache: TieredCache, tokens: Sequence[int], **how: Any) -> Lease:
    """A whole request whose last token was sampled and has no KV."""
    lease = cache.admit(tokens, **how)
    cache.finish(lease, len(tokens) - 1)
    cache.check_invariants()
    return lease


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize(("length", "stored"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (6, 4)])
def test_a_session_that_ends_on_a_page_boundary_does_not_store_its_last_page(length: int, stored: int) -> None:
    """The last token of a sequence was sampled and has no KV, so the page that it would fill is not stored."""
    cache = make_cache(16)
    run_through(cache, range(1, length + 1))
    assert stored == matched(cache, range(1, 12))


def test_one_token_of_a_prompt_is_left_to_compute() -> None:
    """A prompt that is cached to its end matches up to the page before the one that holds its last token."""
    cache = make_cache(8)
    run_through(cache, [1, 2, 3, 4, 5])
    assert [0, 0, 2, 2, 4] == [matched(cache, [1, 2, 3, 4, 5][:n]) for n in range(1, 6)]


def test_pages_are_visible_when_they_fill_or_when_their_request_ends() -> None:
    """index_at="seal" lets requests in flight share; index_at="finish" makes them wait for the end."""
    for index_at, while_running in (("seal", 2), ("finish", 0)):
        cache = make_cache(8, index_at=index_at)
        lease = cache.admit([1, 2, 3, 4])
        cache.seal(lease, 3)
        assert while_running == matched(cache, [1, 2, 3])
        cache.finish(lease, 3)
        assert 2 == matched(cache, [1, 2, 3])


def test_generated_pages_are_stored_like_prompt_pages() -> None:
    """The next turn of a session takes what the last one generated."""
    cache = make_cache(8)
    lease = cache.admit([1, 2, 3])
    cache.extend(lease, [4, 5])
    cache.extend(lease, [6])
    cache.finish(lease, 5)
    assert 4 == matched(cache, [1, 2, 3, 4, 5, 6, 7])


def test_reuse_and_store_can_be_declined() -> None:
    """reuse=False takes nothing, store=False leaves nothing; the latter still keeps what it took warm."""
    cache = make_cache(6)
    run_through(cache, [1, 1, 2, 2, 3], store=False)
    assert (0, 6) == (matched(cache, [1, 1, 2, 2, 3]), cache.stats().pages_free)
    run_through(cache, [1, 1, 2, 2, 3])
    assert 0 == matched(cache, [1, 1, 2, 2, 3], reuse=False)
    run_through(cache, [9, 9, 8, 8, 7])
    run_through(cache, [1, 1, 2, 2, 3], store=False)
    cache.abort(cache.admit([5] * 8))  # two pages were free: the two coldest leave
    assert (4, 0) == (matched(cache, [1, 1, 2, 2, 3]), matched(cache, [9, 9, 8, 8, 7]))


def test_an_aborted_request_stores_nothing_more() -> None:
    """Abort leaves in the index what was there, and adds nothing."""
    cache = make_cache(8)
    lease = cache.admit([1, 2, 3, 4, 5])
    cache.seal(lease, 2)
    cache.abort(lease)
    assert 2 == matched(cache, [1, 2, 3, 4, 5])


def test_a_page_that_is_not_full_is_never_shared() -> None:
    """Two prompts that part in the middle of a page share the pages before it only."""
    cache = make_cache(8)
    run_through(cache, [1, 2, 3, 4, 5])
    assert (2, 0) == (matched(cache, [1, 2, 3, 9, 9]), matched(cache, [1, 9, 3, 4, 5]))


# ---------------------------------------------------------------------- twins


def test_first_writer_wins_and_the_losers_page_is_private() -> None:
    """Of two requests that computed one prompt at once the first to seal is stored; both keep their own pages."""
    cache = make_cache(8)
    winner, loser = cache.admit([1, 1, 2, 2, 3]), cache.admit([1, 1, 2, 2, 3])
    cache.seal(winner, 4)
    cache.seal(loser, 4)
    cache.check_invariants()
    third = cache.admit([1, 1, 2, 2, 3])
    assert list(winner.pages[:2]) == list(third.pages[:2]) != list(loser.pages[:2])
    assert 2 == cache.stats().pages_stored


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_loser_goes_on_until_the_pool_is_full(ahead: int) -> None:
    """The winner's pages, stuck before the loser's once the winner ends, give way to the loser's equal ones."""
    cache = make_cache(9)
    winner, loser = cache.admit([1] * 5), cache.admit([1] * 5)
    cache.seal(winner, 4)
    cache.seal(loser, 4)
    cache.extend(loser, [1, 1])
    cache.seal(loser, 6)
    cache.finish(winner, 4)
    others = [cache.admit([7 + i]) for i in range(ahead)]
    while len(loser.pages) + len(others) < 9:
        cache.extend(loser, room=2 * len(loser.pages) + 2 - loser.length)
        cache.check_invariants()
    with pytest.raises(OutOfPages):
        cache.extend(loser, room=2 * len(loser.pages) + 2 - loser.length)
    cache.finish(loser, 7)
    assert (6, 0) == (matched(cache, [1] * 9), cache.stats().pages_evicted)


def test_twins_of_two_requests_give_way_when_one_does_not_suffice() -> None:
    """Pages stuck before several requests are all had when so many are short, free pages besides."""
    cache = make_cache(10)
    for letter in (1, 2):
        winner, loser = cache.admit([letter] * 3), cache.admit([letter] * 5)
        cache.seal(winner, 2)
        cache.seal(loser, 4)
        cache.finish(winner, 2)
    assert (2, 2) == (cache.stats().pages_free, cache.stats().pages_cached)
    lease = cache.admit([9] * 8)
    cache.check_invariants()
    assert (4, 0) == (len(lease.pages), cache.stats().pages_free)


def test_a_twin_gives_way_though_the_path_behind_it_has_left() -> None:
    """A page stuck before a request's own is had, also when another's page behind that one leaves at once with it."""
    cache = make_cache(12)
    first, middle, last = cache.admit([1] * 3), cache.admit([1] * 9), cache.admit([1] * 9)
    cache.seal(first, 2)
    cache.seal(middle, 4)
    cache.seal(last, 6)
    cache.seal(middle, 6)
    cache.finish(first, 2)
    cache.abort(last)
    assert (5, 2) == (cache.stats().pages_free, cache.stats().pages_cached)
    cache.admit([2] * 14)
    cache.check_invariants()
    cache.finish(middle, 6)
    assert 6 == matched(cache, [1] * 7)


def test_a_loser_stores_its_pages_when_the_winners_have_left() -> None:
    """A request that ends leaves its pages in the cache, also those that were another's when it sealed them."""
    cache = make_cache(6)
    winner, loser = cache.admit([1] * 5), cache.admit([1] * 5)
    cache.seal(winner, 4)
    cache.seal(loser, 4)
    cache.abort(winner)
    cache.abort(cache.admit([2] * 6))
    assert 0 == matched(cache, [1] * 5)
    cache.finish(loser, 4)
    assert 4 == matched(cache, [1] * 5)


def test_a_page_that_changed_hands_ends_no_path() -> None:
    """A request whose path ended at another's page does not go on behind that page when it holds another content."""
    cache = make_cache(7)
    winner, loser = cache.admit([1] * 3), cache.admit([1] * 5)
    cache.seal(winner, 2)
    cache.seal(loser, 2)
    page = winner.pages[0]
    cache.finish(winner, 2)
    other = cache.admit([2] * 8)
    assert page == other.pages[0]
    cache.seal(other, 2)
    cache.seal(loser, 4)
    cache.check_invariants()
    cache.abort(other)
    cache.finish(loser, 4)
    assert (2, 4) == (matched(cache, [2, 2, 1, 1, 1]), matched(cache, [1] * 5))


# ---------------------------------------------------------------------- room


def test_a_refusal_changes_nothing_and_carries_its_numbers() -> None:
    """A prompt that does not fit drops no cached page and keeps none of those it would have reused."""
    cache = make_cache(8)
    run_through(cache, [1, 1, 2, 2, 3])
    holder = cache.admit([9] * 8)
    before = cache.stats()
    with pytest.raises(
        OutOfPages, match="5 pages asked for, 3 short: of 8 pages 4 are held by live requests"
    ) as caught:
        cache.admit([1, 1, 2, 2, *[5] * 10])
    error = caught.value
    assert (5, 3, 4, 0, 8) == (error.asked, error.short, error.held, error.in_flight, error.total)
    after = cache.stats()
    assert (before.pages_free, before.pages_cached, before.admissions) == (
        after.pages_free,
        after.pages_cached,
        after.admissions,
    )
    with pytest.raises(OutOfPages):
        cache.extend(holder, [9] * 10)
    assert (8, 4) == (holder.length, len(holder.pages))
    assert 4 == matched(cache, [1, 1, 2, 2, 3])
    assert 2 == cache.stats().refusals


def test_only_the_coldest_tails_leave_and_only_as_many_as_are_short() -> None:
    """Room for one page costs the deepest page of the chain used longest ago."""
    cache = make_cache(6)
    run_through(cache, [1, 1, 2, 2, 3])
    run_through(cache, [4, 4, 5, 5, 6])
    run_through(cache, [1, 1, 2, 2, 3])
    lease = cache.admit([9] * 6)
    assert 1 == cache.stats().pages_evicted
    cache.abort(lease)
    assert [4, 2] == [matched(cache, [1, 1, 2, 2, 3]), matched(cache, [4, 4, 5, 5, 6])]


def test_matched_pages_are_pinned_before_room_is_made() -> None:
    """Admission never drops what it has just matched, though that be the coldest."""
    cache = make_cache(6)
    run_through(cache, [1, 1, 2, 2, 3])
    run_through(cache, [4, 4, 5, 5, 6])
    lease = cache.admit([1, 1, 2, 2, *[3] * 6])
    cache.check_invariants()
    assert 4 == lease.matched_len
    cache.abort(lease)
    assert [4, 2] == [matched(cache, [1, 1, 2, 2, 3]), matched(cache, [4, 4, 5, 5, 6])]


# ---------------------------------------------------------------------- rolling back


class Written:
    """A cache with bytes: every position of a page holds one number."""

    def __init__(self, pages: int) -> None:
        layout = PageLayout(layers=1, kv_heads=1, head_dim=1, page_size=2)
        self.pool = GpuPool.allocate(layout, pages)
        self.cache = TieredCache(CacheConfig(page_size=2), self.pool, b"fp", ledger=TracingLedger(pages))

    def write(self, lease: Lease, first: int, *numbers: float) -> None:
        for position, number in enumerate(numbers, first):
            self.pool.kv[lease.pages[position // 2], :, :, position % 2] = number

    def read(self, lease: Lease, positions: int) -> list[float]:
        return [float(self.pool.kv[lease.pages[p // 2], 0, 0, p % 2, 0, 0]) for p in range(positions)]


def test_a_draft_that_is_rolled_back_never_reached_a_shared_page() -> None:
    """Drafts are written into open pages; kv_len counts what was accepted, so no draft is ever matched."""
    written = Written(8)
    cache = written.cache
    lease = cache.admit([1, 2, 3])
    written.write(lease, 0, 1.0, 2.0, 3.0)
    cache.seal(lease, 3)
    cache.extend(lease, [40, 50, 60])
    written.write(lease, 3, 40.0, 50.0, 60.0)
    cache.seal(lease, 3)
    assert 2 == matched(cache, [1, 2, 3, 40, 50, 60, 7])
    cache.truncate(lease, 4)
    cache.extend(lease, [5, 6])
    written.write(lease, 4, 5.0, 6.0)
    cache.finish(lease, 5)
    assert (2, 4) == (matched(cache, [1, 2, 3, 4, 5, 6, 7]), matched(cache, [1, 2, 3, 40, 5, 6, 7]))


def test_truncate_never_rewrites_a_sealed_page() -> None:
    """Rolling back into a shared page gives the request a fresh copy of its first positions, and that one only."""
    written = Written(8)
    cache = written.cache
    first = cache.admit([1, 2, 3, 4, 5])
    written.write(first, 0, 1.0, 2.0, 3.0, 4.0)
    cache.seal(first, 4)
    second = cache.admit([1, 2, 3, 4, 5])
    shared = second.pages[1]
    cache.truncate(second, 3)
    cache.check_invariants()
    assert (2, True) == (len(second.pages), second.pages[1] != shared)
    cache.extend(second, [40])
    assert [1.0, 2.0, 3.0] == written.read(second, 3)
    written.write(second, 3, 40.0)
    cache.finish(second, 4)
    third = cache.admit([1, 2, 3, 4, 5])
    assert [1.0, 2.0, 3.0, 4.0] == written.read(third, third.matched_len)
    other = cache.admit([1, 2, 3, 40, 5])
    assert [1.0, 2.0, 3.0, 40.0] == written.read(other, other.matched_len)


def test_what_follows_a_roll_back_is_stored_where_it_was_cut() -> None:
    """After other tokens came in place of those rolled back, both continuations are in the cache, and no mixture."""
    cache = make_cache(16)
    lease = cache.admit([1, 1, 2, 2, 3, 3, 4])
    cache.seal(lease, 6)
    cache.truncate(lease, 2)
    cache.extend(lease, [5, 5, 6, 6, 7])
    cache.finish(lease, 6)
    hits = [
        matched(cache, p) for p in ([1, 1, 2, 2, 3, 3, 0], [1, 1, 5, 5, 6, 6, 0], [1, 1, 2, 2, 3, 3, 5, 5, 6, 6, 0])
    ]
    assert [6, 6, 6] == hits


def test_truncate_without_a_page_for_the_copy_changes_nothing() -> None:
    """When every page is held, rolling back into a sealed one is refused whole."""
    cache = make_cache(2)
    lease = cache.admit([1, 2, 3, 4])
    cache.seal(lease, 4)
    with pytest.raises(OutOfPages, match="1 pages asked for, 1 short"):
        cache.truncate(lease, 3)
    cache.check_invariants()
    assert (4, 2, 4, 1) == (lease.length, lease.sealed, lease.kv_len, cache.stats().refusals)
    cache.truncate(lease, 1)
    cache.check_invariants()
    assert (1, 0, 1, 1) == (lease.length, lease.sealed, lease.kv_len, len(lease.pages))


def test_media_that_was_rolled_back_names_nothing() -> None:
    """Plain tokens computed after a picture was rolled back are not taken for the picture."""
    cache = make_cache(16)
    picture = (MediaItem(offset=2, length=4, digest=PICTURE),)
    lease = cache.admit([7] * 6, media=picture)
    cache.truncate(lease, 2)
    cache.extend(lease, [7] * 4)
    cache.finish(lease, 6)
    assert (2, 6) == (matched(cache, [7] * 7, media=picture), matched(cache, [7] * 7))


def test_a_picture_that_was_cut_is_not_stored() -> None:
    """What is left of a picture, and what follows it, has no identity."""
    cache = make_cache(16)
    picture = (MediaItem(offset=2, length=4, digest=PICTURE),)
    lease = cache.admit([7] * 6, media=picture)
    cache.truncate(lease, 5)
    cache.extend(lease, [7] * 4)
    cache.finish(lease, 8)
    assert (2, 2) == (matched(cache, [7] * 9, media=picture), matched(cache, [7] * 9))


# ---------------------------------------------------------------------- the whole cache


def test_reset_forgets_everything_and_says_what_is_still_held() -> None:
    """After a reset nothing matches; a request that began before it goes on, and stores nothing."""
    cache = make_cache(8)
    run_through(cache, [4, 4, 5, 5, 6])
    live = cache.admit([1, 1, 2, 2, 3])
    cache.seal(live, 4)
    report = cache.reset()
    assert (2, 3) == (report.pages_freed, report.pages_held)
    assert (0, 0) == (matched(cache, [4, 4, 5, 5, 6]), matched(cache, [1, 1, 2, 2, 3]))
    cache.extend(live, [3, 3, 3])
    cache.finish(live, 7)
    assert (0, 8) == (matched(cache, [1, 1, 2, 2, 3]), cache.stats().pages_free)


def test_numbers_are_counted_once_an_admission() -> None:
    """Prompt and matched tokens add up over admissions that succeeded; pages add up to the pool."""
    cache = make_cache(8)
    run_through(cache, [1, 1, 2, 2, 3])
    run_through(cache, [1, 1, 2, 2, 3, 3])
    stats = cache.stats()
    assert (2, 11, 4, 0) == (stats.admissions, stats.prompt_tokens, stats.matched_tokens, stats.refusals)
    assert (2, 6, 0, 8) == (stats.pages_cached, stats.pages_free, stats.pages_live, stats.pages_total)
    assert (2, 0) == (stats.pages_stored, stats.pages_evicted)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"tokens": []}, "a prompt of 0 tokens"),
        ({"tokens": [1] * 9}, "9 tokens needs 5 pages, the pool has 4"),
        ({"tokens": [1, 1, 2, 2, -3]}, "token id -3 at position 4"),
        ({"tokens": [1.5]}, "token id 1.5 at position 0 is float"),
        ({"salt": "text"}, "salt is str: it must be bytes"),
        ({"salt": bytearray(b"s")}, "salt is bytearray: it must be bytes"),
        ({"adapter": None}, "adapter is NoneType: it must be bytes"),
        ({"label": ["l"]}, "label is list: it must be bytes"),
        ({"media": (MediaItem(4, 2, PICTURE),)}, "media item at 4 of length 2.*within the 5 tokens"),
        ({"media": (MediaItem(0, 2, PICTURE), MediaItem(1, 2, PICTURE))}, "in order, apart"),
        ({"media": (MediaItem(0, 2, None), MediaItem(1, 2, PICTURE))}, "in order, apart"),
    ],
)
def test_what_cannot_be_admitted_is_refused_in_one_line(how: dict[str, Any], says: str) -> None:
    """Bad input says what was wrong and where, and leaves the cache as it was."""
    cache = make_cache(4)
    run_through(cache, [1, 1, 2, 2, 3])
    before = cache.stats()
    with pytest.raises(BadInput, match=says) as caught:
        cache.admit(**{"tokens": [1, 1, 2, 2, 3], **how})
    assert 1 == len(str(caught.value).splitlines())
    assert before == cache.stats()
    cache.check_invariants()


def test_bad_input_to_a_live_request_changes_nothing() -> None:
    """Token ids and lengths that cannot be are refused, and the request goes on as it was."""
    cache = make_cache(4)
    lease = cache.admit([1, 2, 3])
    cache.seal(lease, 3)
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: cache.extend(lease, [1, -2]), "token id -2 at position 1"),
        (lambda: cache.extend(lease, [1, 2, 3], room=-3), "room -3: it must be 0 or more"),
        (lambda: cache.seal(lease, 4), "kv_len 4: it must be 2 to 3"),
        (lambda: cache.finish(lease, 1), "kv_len 1: it must be 2 to 3"),
        (lambda: cache.truncate(lease, 4), "truncate to 4 tokens of 3"),
    ]
    for act, says in wrong:
        with pytest.raises(BadInput, match=says):
            act()
    assert (3, 2, 3) == (lease.length, len(lease.pages), lease.kv_len)
    cache.finish(lease, 3)


def test_an_ended_request_cannot_be_used() -> None:
    """Every call on a lease that has ended raises, so that nothing is let go twice."""
    cache = make_cache(4)
    lease = cache.admit([1, 2, 3])
    cache.finish(lease, 2)
    late: list[Callable[[], None]] = [
        lambda: cache.extend(lease, [1]),
        lambda: cache.seal(lease, 3),
        lambda: cache.truncate(lease, 1),
        lambda: cache.finish(lease, 3),
        lambda: cache.abort(lease),
    ]
    for act in late:
        with pytest.raises(InvariantViolation, match="has ended"):
            act()
    cache.check_invariants()


@pytest.mark.parametrize("bad", ["fp", None, 7, bytearray(b"fp")])
def test_a_fingerprint_that_is_not_bytes_is_refused_at_once(bad: Any) -> None:
    """Neither a new cache nor one that is running takes a fingerprint that could not name anything."""
    with pytest.raises(BadInput, match=r"fingerprint is .*: it must be"):
        TieredCache(CacheConfig(page_size=2), GpuPool.bookkeeping(4), bad)
    cache = make_cache(4)
    run_through(cache, [1, 2, 3])
    with pytest.raises(BadInput, match=r"fingerprint is .*: it must be"):
        cache.set_fingerprint(bad)
    assert 2 == matched(cache, [1, 2, 3])


def test_a_pool_that_does_not_fit_its_configuration_is_refused() -> None:
    """Page sizes of pool and configuration, and sizes of pool and ledger, must agree."""
    layout = PageLayout(layers=1, kv_heads=1, head_dim=1, page_size=4)
    with pytest.raises(BadInput, match="pages of 4 positions and the configuration says 2"):
        TieredCache(CacheConfig(page_size=2, eviction="lru"), GpuPool.allocate(layout, 2), b"fp")
    with pytest.raises(BadInput, match="a ledger of 3 pages for a pool of 4"):
        TieredCache(CacheConfig(eviction="lru"), GpuPool.bookkeeping(4), b"fp", ledger=TracingLedger(3))
    for page_size in (0, -1, 2.0, True, "128"):
        with pytest.raises(BadInput, match=r"page_size is .*: it must be an integer of 1 or more"):
            CacheConfig(page_size=page_size, eviction="lru")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="index_at is 'never': it must be one of seal, finish"):
        CacheConfig(index_at="never")  # type: ignore[arg-type]


def test_media_of_a_page_that_left_are_no_longer_the_chains() -> None:
    """The last page of a chain, which an item touched, leaves; the same tokens without the item come in its place."""
    cache, tokens = make_cache(4), [1, 1, 2, 2, 3]
    run_through(cache, tokens, media=[MediaItem(2, 2, PICTURE)])
    cache.abort(cache.admit([7] * 6, reuse=False))
    run_through(cache, tokens)
    assert (4, 2) == (matched(cache, tokens), matched(cache, tokens, media=[MediaItem(2, 2, PICTURE)]))
