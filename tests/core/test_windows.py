"""Windowed leases: what is stored of them, who keeps a page that is released, and what they refuse.

Pages of two tokens, a pool of a few pages.
"""

from collections.abc import Sequence

import pytest

from kvkeep.cache import TieredCache
from kvkeep.errors import BadInput, CannotSuspend, NotReady, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import State
from tests.core.test_cache_cases import make_cache, matched, run_through
from tests.sim.rig import Rig

LONG = list(range(1, 14))  # six full pages, and the token that was sampled


def windowed(cache: TieredCache, tokens: Sequence[int], protected: int) -> Lease:
    """A request whose first `protected` tokens stay, all of it computed but its last token."""
    lease = cache.admit(tokens)
    cache.protect_prefix(lease, protected)
    cache.seal(lease, len(tokens) - 1)
    return lease


# ---------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("index_at", ["seal", "finish"])
@pytest.mark.parametrize(("protected", "stored"), [(0, 0), (1, 0), (2, 2), (5, 4), (12, 12), (13, 12)])
def test_only_what_the_protected_tokens_fill_is_stored(protected: int, stored: int, index_at: str) -> None:
    """And at the end, whatever `index_at` says; whether pages were released or not."""
    for released in (0, 1):
        cache = make_cache(16, index_at=index_at)
        lease = windowed(cache, LONG, protected)
        if released and protected <= 10:
            cache.release_oldest(lease, 1)
        assert 0 == matched(cache, [*LONG, 99])
        cache.finish(lease, 12)
        assert (stored, stored // 2) == (matched(cache, [*LONG, 99]), cache.stats().pages_stored)
        assert 16 - stored // 2 == cache.stats().pages_free


def test_what_is_computed_behind_a_released_page_is_never_stored() -> None:
    """Its positions have not seen all that stands before them: no chain of tokens could name it."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 2)
    cache.release_oldest(lease, 2)
    cache.extend(lease, range(14, 30))
    cache.seal(lease, 28)
    cache.release_oldest(lease, 5)
    cache.finish(lease, 29)
    assert (2, 1) == (matched(cache, range(1, 31)), cache.stats().pages_stored)
    assert 15 == cache.stats().pages_free


def test_a_prefix_may_be_protected_again_before_a_page_is_released() -> None:
    """The last word counts."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 4)
    cache.protect_prefix(lease, 8)
    cache.finish(lease, 12)
    assert 8 == matched(cache, [*LONG, 99])


def test_what_was_stored_before_the_lease_became_a_windowed_one_stays() -> None:
    """It was computed with all that stands before it."""
    cache = make_cache(16)
    lease = cache.admit(LONG)
    cache.seal(lease, 6)
    cache.protect_prefix(lease, 2)
    cache.seal(lease, 12)
    cache.release_oldest(lease, 4)
    assert 6 == matched(cache, [*LONG, 99])
    cache.finish(lease, 12)
    assert 6 == matched(cache, [*LONG, 99])


def test_nothing_of_an_aborted_one_is_stored() -> None:
    """As of every other request."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 8)
    cache.release_oldest(lease, 1)
    cache.abort(lease)
    assert (0, 16) == (matched(cache, LONG), cache.stats().pages_free)


# ---------------------------------------------------------------------- who keeps a released page


def test_pages_that_nobody_else_has_are_free_at_once() -> None:
    """The lease's list closes the gap, and its epoch says that it did."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 3)
    pages = list(lease.pages)
    assert 0 == lease.prefix_epoch
    cache.release_oldest(lease, 3)
    assert (pages[:2] + pages[5:], 3, 1) == (list(lease.pages), lease.released, lease.prefix_epoch)
    assert [0, 1, 2, 3] == [lease.index_of(number) for number in (0, 1, 5, 6)]
    assert 16 - 4 == cache.stats().pages_free
    cache.release_oldest(lease, 1)
    assert (pages[:2] + pages[6:], 4, 2) == (list(lease.pages), lease.released, lease.prefix_epoch)
    with pytest.raises(BadInput, match=r"page 5 of Lease 0: pages 2 to 5 were released"):
        lease.index_of(5)


def test_a_released_page_of_the_index_stays_in_it() -> None:
    """A seeded prefix is not pulled from under the index: the next request finds all of it."""
    cache = make_cache(16)
    run_through(cache, LONG)
    lease = windowed(cache, [*LONG, 14, 15], 2)
    assert 12 == lease.matched_len
    cache.release_oldest(lease, 4)
    assert 12 == matched(cache, [*LONG, 99])
    cache.finish(lease, 14)
    assert 12 == matched(cache, [*LONG, 99])


def test_a_released_page_of_another_request_stays_its() -> None:
    """It is counted down, not freed."""
    cache = make_cache(16)
    run_through(cache, LONG)
    other = cache.admit([*LONG, 50])
    lease = windowed(cache, [*LONG, 14, 15], 2)
    cache.release_oldest(lease, 5)
    assert [1, 1, 1] == [cache._ledger.holders(page) for page in other.pages[1:4]]
    cache.reset()
    cache.check_invariants()
    assert list(other.pages[:6]) == [p for p in other.pages[:6] if cache._ledger.holders(p)]
    for left in (lease, other):
        cache.abort(left)
    assert 16 == cache.stats().pages_free


def test_idle_pages_that_a_window_has_slid_past_can_be_had() -> None:
    """The index gives up what hangs behind them, which the request keeps, rather than refuse or break."""
    cache = make_cache(8)
    run_through(cache, LONG)  # six pages
    lease = windowed(cache, [*LONG, 14, 15], 2)  # and two more of its own
    cache.release_oldest(lease, 3)
    assert (0, 3) == (cache.stats().pages_free, cache.stats().pages_cached)
    held = list(lease.pages)
    other = cache.admit([90, 91, 92, 93, 94])
    assert (0, 0) == (cache.stats().pages_free, cache.stats().pages_cached)
    assert held == list(lease.pages) and not set(held) & set(other.pages)
    cache.check_invariants()
    with pytest.raises(OutOfPages):
        cache.admit([1])
    cache.abort(other)
    cache.finish(lease, 14)
    assert (2, 7) == (matched(cache, [*LONG, 99]), cache.stats().pages_free)


def test_pages_behind_those_of_two_windows_can_be_had() -> None:
    """Also where one of them has slid further than the other, and chains part behind them."""
    cache = make_cache(12)
    run_through(cache, LONG)
    run_through(cache, [*LONG[:8], 30, 31, 32, 33, 34])
    far = windowed(cache, [*LONG, 14], 2)
    near = windowed(cache, [*LONG[:8], 30, 31, 32, 33, 34, 35], 2)
    cache.release_oldest(far, 3)
    cache.release_oldest(near, 1)
    assert 1 == cache.stats().pages_cached
    room = cache.stats().pages_free + 1
    other = cache.admit([77] * (2 * room))
    assert room == len(other.pages)
    cache.check_invariants()
    for lease in (far, near):
        cache.finish(lease, lease.length - 1)
    cache.abort(other)
    assert 2 == matched(cache, [*LONG, 99])


def test_room_is_found_behind_any_of_several_windows() -> None:
    """The first one has nothing that others could have."""
    cache = make_cache(16)
    alone = windowed(cache, list(range(50, 63)), 2)
    cache.release_oldest(alone, 4)
    run_through(cache, LONG)
    lease = windowed(cache, [*LONG, 14], 2)
    cache.release_oldest(lease, 2)
    assert 2 == cache.stats().pages_cached
    other = cache.admit([9] * 2 * (cache.stats().pages_free + 2))
    cache.check_invariants()
    assert 0 == cache.stats().pages_cached
    for live in (alone, lease, other):
        cache.abort(live)


def test_two_tiers_find_room_behind_a_window_too() -> None:
    """And what has a copy in host memory is found there afterwards."""
    rig = Rig(pages=8, tier_pages=16)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    rig.serve([*tokens, 9])
    rig.push_out()
    rig.serve([*tokens, 9])  # copies in both
    request = rig.admitted([*tokens, 7])
    rig.settle()
    rig.do("protect", request, 2)
    rig.compute(request)
    rig.do("release", request, 3)
    rig.settle()
    other = rig.admitted([8] * 8)
    rig.settle()
    assert 4 == len(rig.lease(other).pages)
    rig.do("abort", other)
    rig.do("finish", request)
    rig.settle()
    assert 2 <= rig.matched([*tokens, 9])


def test_idle_pages_before_one_that_a_copy_reads_can_be_had() -> None:
    """The window has slid past pages that are being copied down, and those before them are wanted."""
    rig = Rig(pages=8, tier_pages=16)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    rig.serve_alone([*tokens, 9])
    rig.poll()
    (clean,) = rig.jobs("clean")
    assert rig.backend.step(clean)
    request = rig.admitted([*tokens, 7])
    rig.do("protect", request, 2)
    rig.compute(request)
    rig.do("release", request, 4)
    stats = rig.cache.stats()
    copied = len(clean.plan) - 1  # one of them is still in the window
    assert (1, 4 - copied) == (stats.pages_free, stats.pages_cached) and copied
    other = rig.admitted([8] * 2 * (5 - copied))
    assert 5 - copied == len(rig.lease(other).pages)
    rig.settle()
    rig.do("abort", other)
    rig.do("finish", request)
    rig.settle()
    assert 2 == rig.matched([*tokens, 9])


def test_large_batches_are_counted_like_small_ones() -> None:
    """More pages than a batch that is looked at one by one."""
    cache = make_cache(256)
    tokens = list(range(1, 402))
    run_through(cache, tokens)
    lease = windowed(cache, [*tokens, 500], 10)
    cache.release_oldest(lease, 150)
    assert 400 == matched(cache, [*tokens, 500, 501])
    cache.reset()
    cache.check_invariants()
    assert 201 - 150 == cache.stats().pages_live


# ---------------------------------------------------------------------- going on behind a released page


def test_a_closed_chain_grows_seals_and_rolls_back_what_is_not_sealed() -> None:
    """As engines use it that draft tokens."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 2)
    cache.release_oldest(lease, 4)
    assert 3 == len(lease.pages)
    cache.extend(lease, [14, 15, 16, 17], room=2)
    assert (17, 6) == (lease.length, len(lease.pages))
    cache.truncate(lease, 13)
    assert (13, 3) == (lease.length, len(lease.pages))
    cache.extend(lease, [24, 25])
    cache.seal(lease, 14)
    assert (7, State.READY) == (lease.sealed, cache._ledger.state(lease.pages[2]))
    with pytest.raises(BadInput, match="truncate to 13 tokens: the first 14 of Lease 0 stay as they are"):
        cache.truncate(lease, 13)
    cache.truncate(lease, 14)
    cache.check_invariants()
    cache.finish(lease, 14)
    assert 2 == matched(cache, [*LONG, 24, 25])


def test_what_is_protected_is_not_rolled_back() -> None:
    """Before a page is released, everything behind it may be."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 5)
    cache.truncate(lease, 5)
    with pytest.raises(BadInput, match="truncate to 3 tokens: the first 4 of Lease 0 stay"):
        cache.truncate(lease, 3)
    cache.finish(lease, 5)
    assert 4 == matched(cache, LONG)


def test_an_item_behind_a_released_page_is_still_not_split() -> None:
    """What is known of media items does not end with the chain."""
    cache = make_cache(16)
    picture = MediaItem(9, 3, b"a digest of sixteen", causal=False)
    lease = cache.admit(LONG, media=[picture])
    cache.protect_prefix(lease, 2)
    cache.seal(lease, 8)
    cache.release_oldest(lease, 2)
    assert 9 == lease.chunk_end(8, 10)
    with pytest.raises(BadInput):
        cache.seal(lease, 10)
    cache.seal(lease, 12)
    cache.abort(lease)


# ---------------------------------------------------------------------- bad input


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    """One line says what was wrong, and what would be right."""
    cache = make_cache(16)
    lease = cache.admit(LONG)
    with pytest.raises(BadInput, match="release_oldest: Lease 0 has no protected prefix: call protect_prefix first"):
        cache.release_oldest(lease, 1)
    for length in (-1, 14):
        with pytest.raises(BadInput, match=f"protect_prefix of {length} tokens of 13: it must be 0 to 13"):
            cache.protect_prefix(lease, length)
    cache.protect_prefix(lease, 3)
    cache.seal(lease, 9)
    for count in (0, -1, 1.0):
        with pytest.raises(BadInput, match=rf"release_oldest is {count}: it must be an integer of 1 or more"):
            cache.release_oldest(lease, count)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"release_oldest 3: it must be 1 to 2, the sealed pages behind the 2 that stay"):
        cache.release_oldest(lease, 3)
    assert (7, 0) == (len(lease.pages), lease.prefix_epoch)
    cache.release_oldest(lease, 2)
    with pytest.raises(BadInput, match="protect_prefix: Lease 0 has released 2 pages"):
        cache.protect_prefix(lease, 3)
    cache.abort(lease)
    cache.check_invariants()


def test_a_closed_lease_is_not_suspended() -> None:
    """Its pages could not be told apart when it comes back."""
    rig = Rig(pages=8, suspend_pages=8)
    request = rig.admitted([1, 1, 2, 2, 3, 3, 4])
    rig.compute(request)
    rig.do("protect", request, 2)
    rig.do("release", request, 1)
    with pytest.raises(CannotSuspend, match="its chain is closed"):
        rig.cache.suspend(rig.lease(request), 7)
    rig.do("finish", request)


def test_a_window_that_has_not_slid_is_suspended_and_comes_back_without() -> None:
    """All its pages are of one chain: as many are stored as without a window."""
    rig = Rig(pages=8, suspend_pages=8)
    request = rig.admitted([1, 1, 2, 2, 3, 3, 4])
    rig.do("protect", request, 2)
    rig.compute(request)
    rig.do("suspend", request, False)
    rig.settle()
    rig.do("resume", request)
    rig.settle()
    assert rig.lease(request).window is None
    rig.compute(request)
    rig.do("finish", request)
    assert 6 == rig.matched([1, 1, 2, 2, 3, 3, 4])


def test_nothing_is_released_while_pages_are_on_their_way() -> None:
    """A copy writes them."""
    rig = Rig(pages=8)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 9]
    rig.serve(tokens)
    rig.push_out()
    request = rig.admitted(tokens)
    assert rig.lease(request).read_in_progress
    rig.do("protect", request, 2)
    with pytest.raises(NotReady, match="cannot be released: copies of its pages are running"):
        rig.cache.release_oldest(rig.lease(request), 1)
    rig.settle()
    rig.do("release", request, 2)
    assert 2 == rig.lease(request).released
    rig.do("finish", request)
    assert 8 == rig.matched(tokens)


def test_a_closed_chain_keeps_no_token_ids() -> None:
    """A stream that slides for hours does not grow."""
    cache = make_cache(16)
    lease = windowed(cache, LONG, 3)
    cache.release_oldest(lease, 2)
    known = len(lease.tokens)
    for token in range(500):
        cache.extend(lease, [token])
        cache.seal(lease, lease.length - 1)
        if lease.sealed - 2 - lease.released > 3:
            cache.release_oldest(lease, 1)
    assert (known, 513) == (len(lease.tokens), lease.length)
    assert len(lease.names) <= 1 and len(lease.pages) <= 7
    cache.finish(lease, 512)
    assert 2 == matched(cache, LONG)
