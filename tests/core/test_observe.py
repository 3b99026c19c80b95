"""Observe mode: what would have been matched is exactly what a cache of that size matches, and nothing is kept."""

import random

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index.media import MediaItem
from kvkeep.misses import Cause
from kvkeep.observe import Observer
from kvkeep.tiers.gpu_pool import GpuPool

SIZE = 4


def observer(pages: int = 64, **how: str) -> Observer:
    return Observer(pages, b"f", page_size=SIZE, **how)  # type: ignore[arg-type]


def serve(watching: Observer, tokens: list[int], replica: int = 0) -> int:
    """A whole request; the pages that would have matched."""
    seen = watching.begin(tokens, replica=replica)
    watching.end(seen, tokens, len(tokens))
    return seen.would_match


@pytest.mark.parametrize("eviction", ["lru", "rhythm"])
def test_it_matches_what_a_cache_that_never_evicts_matches(eviction: str) -> None:
    """One request after the other, page for page; tokens found and missed are all prompt tokens."""
    rng = random.Random(3)
    watching = observer(4096, eviction=eviction)
    cache = TieredCache(CacheConfig(page_size=SIZE, index_at="finish", eviction="lru"), GpuPool.bookkeeping(4096), b"f")
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        lease = cache.admit(tokens)
        cache.finish(lease, len(tokens))
        assert lease.matched_len == SIZE * serve(watching, tokens)
    now = watching.observation()
    assert 300 == now.requests and now.would_match_pages == now.would_match_here_pages > 300
    assert now.prompt_tokens == SIZE * now.would_match_pages + sum(now.missed_tokens.values())


def test_it_forgets_what_a_pool_would_have_lost() -> None:
    """No more pages than it was given; a longer chain enters as far as it fits."""
    watching = observer(8)
    assert [0, 0, 5] == [serve(watching, [kind] * 21) for kind in (1, 2, 2)]
    assert 3 == serve(watching, [1] * 21), "eight places, five of them taken"
    assert {Cause.EVICTED: 2 * SIZE} == {
        cause: n
        for cause, n in watching.observation().missed_tokens.items()
        if cause in (Cause.EVICTED, Cause.NOT_STORED)
    }
    serve(watching, [7] * 100)
    assert 8 == serve(watching, [7] * 100)


def test_what_a_request_in_flight_holds_is_told() -> None:
    """Pages are there when requests end; a miss on a page that one in flight is computing is a cause of its own."""
    watching = observer()
    first, second = watching.begin([1] * 13), watching.begin([1] * 13)
    assert (0, 0) == (first.would_match, second.would_match)
    assert 12 == watching.observation().missed_tokens[Cause.IN_FLIGHT]
    watching.abandon(first)
    watching.end(second, [1] * 16, 15)
    assert 3 == serve(watching, [1] * 16)
    with pytest.raises(InvariantViolation, match="has ended"):
        watching.end(second, [1] * 16, 15)


def test_replicas_that_compute_the_same_pages() -> None:
    """Two replicas: what one cache for both would have had, what each alone would, and how far pages are spread."""
    watching = observer()
    serve(watching, [1] * 13, replica=0)
    serve(watching, [1] * 13, replica=1)
    now = watching.observation()
    assert (3, 0, 1.0) == (now.would_match_pages, now.would_match_here_pages, now.replica_spread)
    serve(watching, [1] * 13, replica=1)
    now = watching.observation()
    assert (6, 3, 1.5) == (now.would_match_pages, now.would_match_here_pages, now.replica_spread)


def test_media_that_come_again() -> None:
    """Occurrences are counted, not requests; a span without a digest is none."""
    watching = observer()
    one, two = MediaItem(1, 2, b"1" * 16), MediaItem(5, 2, b"2" * 16)
    for media in ((one, two), (MediaItem(0, 1, b"2" * 16), MediaItem(3, 2, None))):
        watching.abandon(watching.begin([9] * 9, media=media))
    now = watching.observation()
    assert (3, 1) == (now.media_items, now.duplicate_media_items)
    assert 1 / 3 == now.duplicate_media_rate


@pytest.mark.parametrize(("tokens", "how"), [([], {}), ([1], {"replica": 63}), ([-1], {}), ([1], {"salt": "text"})])
def test_bad_input(tokens: list[int], how: dict[str, object]) -> None:
    """Refused as a cache would, and nothing is counted."""
    watching = observer()
    with pytest.raises(BadInput):
        watching.begin(tokens, **how)  # type: ignore[arg-type]
    assert 0 == watching.observation().requests
    with pytest.raises(BadInput, match="kv_len 3"):
        watching.end(watching.begin([1]), [1, 1], 3)
