"""Media items in prompts: which page of which prompt they let match, and what ends inside none of them.

Must not compute a digest: see `tests/media`.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput
from kvkeep.index.compare import Compare
from kvkeep.index.media import MediaItem, chunk_end, place_media, whole_holes
from kvkeep.index.names import Hash64, hash64
from kvkeep.index.run import Run
from kvkeep.observe import Observer
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.tracing import TracingLedger
from tests.core.naive import constant_hash, narrow_hash

SIZE = 4
A, B = b"A" * 32, b"B" * 32
#: Six pages of one placeholder id, and a token that is left to compute.
PROMPT = [7] * 25

Spans = Sequence[tuple[int, int, bytes | None]]


def make_cache(hash_fn: Hash64 = hash64, **config: Any) -> TieredCache:
    made = CacheConfig(page_size=SIZE, **config)
    return TieredCache(made, GpuPool.bookkeeping(64), b"fp", ledger=TracingLedger(64), hash_fn=hash_fn)


def items(spans: Spans, causal: bool = True) -> list[MediaItem]:
    return [MediaItem(*span, causal) for span in spans]


def store(cache: TieredCache, spans: Spans, causal: bool = True) -> None:
    lease = cache.admit(PROMPT, media=items(spans, causal))
    cache.finish(lease, len(PROMPT) - 1)
    cache.check_invariants()


def matched(cache: TieredCache, spans: Spans, causal: bool = True) -> int:
    lease = cache.admit(PROMPT, media=items(spans, causal))
    cache.abort(lease)
    return lease.matched_len


THREE_PAGES = [(6, 10, A)]  # pages 1, 2 and 3, and it ends with page 3
TWO_ON_A_PAGE = [(4, 1, A), (6, 1, B)]
TWICE = [(4, 4, A), (12, 4, A)]

CASES: dict[str, tuple[Spans, Spans, int]] = {
    "other digest": (THREE_PAGES, [(6, 10, B)], 4),
    "moved by one token": (THREE_PAGES, [(7, 10, A)], 4),
    "moved by one token, ends where it did": (THREE_PAGES, [(7, 9, A)], 4),
    "shorter": (THREE_PAGES, [(6, 9, A)], 4),
    "longer": (THREE_PAGES, [(6, 11, A)], 4),
    "cut in two": (THREE_PAGES, [(6, 6, A), (12, 4, A)], 4),
    "not there": (THREE_PAGES, [], 4),
    "nameless": (THREE_PAGES, [(6, 10, None)], 4),
    "behind its last page": (THREE_PAGES, [(6, 10, A), (16, 2, B)], 16),
    "on its last page": ([(6, 9, A)], [(6, 9, A), (15, 1, B)], 12),
    "swapped": (TWO_ON_A_PAGE, [(4, 1, B), (6, 1, A)], 4),
    "only the first": (TWO_ON_A_PAGE, TWO_ON_A_PAGE[:1], 4),
    "only the second": (TWO_ON_A_PAGE, TWO_ON_A_PAGE[1:], 4),
    "second of two differs": (TWO_ON_A_PAGE, [(4, 1, A), (6, 1, A)], 4),
    "twice, then another": (TWICE, [(4, 4, A), (12, 4, B)], 12),
    "twice, then not": (TWICE, TWICE[:1], 12),
    "once, then again": (TWICE[:1], TWICE, 12),
}


@pytest.mark.parametrize("hash_fn", [hash64, narrow_hash, constant_hash])
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_matches_up_to_the_first_page_whose_media_differ(case: str, hash_fn: Hash64) -> None:
    """Both ways round, whatever pages are called; and with both stored, each is found in full."""
    one, other, expected = CASES[case]
    for first, second in ((one, other), (other, one)):
        cache = make_cache(hash_fn)
        store(cache, first)
        assert expected == matched(cache, second)
        store(cache, second)
        whole = [4 if None in [digest for _, _, digest in spans] else 24 for spans in (first, second)]
        assert whole == [matched(cache, first), matched(cache, second)]


@pytest.mark.parametrize("differs", [1, 2, 3])
@pytest.mark.parametrize("other", [MediaItem(5, 10, B), MediaItem(5, 11, A), MediaItem(4, 11, A)])
def test_media_are_compared_on_every_page(differs: int, other: MediaItem) -> None:
    """A run whose item is another on its second or third page only is not taken beyond the page before."""
    run = Run(None, 0, 0, 1)
    raw = np.full(6 * SIZE, 7, dtype=np.int32).tobytes()
    run.extend(raw, list(range(6)), array("i", range(6)))
    run.media = dict.fromkeys((1, 2, 3), (MediaItem(5, 10, A),))
    compare = Compare(SIZE * 4, hash64)
    assert 6 == compare.common(run, 0, raw, 0, 6, {page: (MediaItem(5, 10, A),) for page in (1, 2, 3)})
    assert differs == compare.common(run, 0, raw, 0, 6, {**run.media, differs: (other,)})


def test_spans_are_plain_integers() -> None:
    """Numpy's would overflow where they are added: an item would end before it begins."""
    item = MediaItem(np.uint8(250), np.uint8(10), A)  # type: ignore[arg-type]
    assert (int, int, MediaItem(250, 10, A)) == (type(item.offset), type(item.length), item)
    placed = place_media([item], SIZE, 300)
    assert [62, 63, 64] == list(placed.by_page or ())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ((0, 1, b"a" * 65), "media digest of 65 bytes: it must be 16 bytes or more.*and at most 64"),
        ((0, 1, bytearray(16)), "media digest is bytearray: it must be bytes, or None"),
        ((0, 1, A, "no"), "causal is 'no': it must be True or False"),
        (("0", 1, A), "media item at '0' of length 1: offset must be an integer"),
    ],
)
def test_an_item_that_cannot_be_is_refused(how: Any, says: str) -> None:
    """In one line."""
    with pytest.raises(BadInput, match=says):
        MediaItem(*how)


@pytest.mark.parametrize(
    "bad", [[(6, 20, A)], [(25, 1, A)], [(6, 4, A), (9, 2, B)], [(9, 2, A), (6, 2, B)], [(6, 4, None), (6, 4, A)]]
)
def test_bad_media_concern_one_request_only(bad: Spans) -> None:
    """The request is refused, and the cache is as it was."""
    cache = make_cache()
    store(cache, THREE_PAGES)
    before = cache.stats()
    with pytest.raises(BadInput, match=r"media item at .*in order, apart, and within the 25 tokens"):
        cache.admit(PROMPT, media=items(bad))
    assert before == cache.stats()
    assert 24 == matched(cache, THREE_PAGES)


# ---------------------------------------------------------------------- items that are one unit

UNIT = [(5, 9, A)]  # positions 5 to 13


@pytest.mark.parametrize("hash_fn", [hash64, constant_hash])
def test_only_a_whole_unit_matches(hash_fn: Hash64) -> None:
    """A unit of which the last page has left is not matched in part; one that looks back only is."""
    for causal, expected in ((False, 4), (True, 12)):
        cache = make_cache(hash_fn)
        lease = cache.admit(PROMPT[:13] + [1], media=items([(5, 8, A)], causal))
        cache.finish(lease, 13)  # pages 0 to 2: the item's last position is on page 3
        assert expected == matched(cache, [(5, 8, A)], causal)


@pytest.mark.parametrize(("index_at", "stored"), [("seal", 24), ("finish", 4)])
def test_kv_never_ends_inside_a_unit(index_at: Any, stored: int) -> None:
    """An engine that has split one is told, and nothing has changed: the request goes on as it should have."""
    cache = make_cache(index_at=index_at)
    lease = cache.admit(PROMPT, media=items(UNIT, causal=False))
    for kv_len in (6, 8, 13):
        with pytest.raises(BadInput, match=f"kv_len {kv_len} ends inside the media item at 5 of length 9, .*5 or less"):
            cache.seal(lease, kv_len)
        with pytest.raises(BadInput, match="ends inside the media item"):
            cache.finish(lease, kv_len)
    assert (0, 0, True) == (lease.kv_len, lease.sealed, lease.live)
    for kv_len in (5, 14, 24):
        cache.seal(lease, kv_len)
    for length in (6, 13):
        with pytest.raises(BadInput, match=f"truncate to {length} ends inside the media item at 5"):
            cache.truncate(lease, length)
    cache.truncate(lease, 5)
    assert lease.chunk_end(5, 9) == 9, "the item is gone"
    cache.extend(lease, PROMPT[5:])
    cache.finish(lease, 24)
    cache.check_invariants()
    assert (stored, 24) == (matched(cache, UNIT, causal=False), matched(cache, []))


@pytest.mark.parametrize("digest", [A, None])
def test_a_lease_tells_where_chunks_end(digest: bytes | None) -> None:
    """Before a unit, or behind it when it comes first, whether or not it has a name; anywhere in another item."""
    cache = make_cache()
    lease = cache.admit(PROMPT, media=items([(5, 9, digest)], causal=False))
    assert [4, 5, 5, 14, 14, 20] == [
        lease.chunk_end(*chunk) for chunk in ((0, 4), (0, 5), (0, 8), (5, 8), (5, 14), (5, 20))
    ]
    plain = cache.admit(PROMPT, media=items([(5, 9, digest)]))
    assert 8 == plain.chunk_end(0, 8)


def test_a_prompt_cut_at_a_unit_that_has_no_name_does_not_split_it_either() -> None:
    """Items behind one without a digest are named by nobody, and are units still."""
    placed = place_media(items([(1, 2, None), (6, 6, A)], causal=False), SIZE, 25)
    assert (None, 0, ((1, 3), (6, 12))) == placed


@st.composite
def units_of(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    units, end = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), max_size=5)):
        units.append((end + gap, end + gap + length))
        end += gap + length
    return tuple(units)


def ends_from(units: tuple[tuple[int, int], ...], start: int, grid: int, length: int) -> list[int]:
    ends = []
    while start < length:
        start = chunk_end(units, start, min((start // grid + 1) * grid, length))
        ends.append(start)
    return ends


@given(units_of(), st.integers(1, 12), st.integers(0, 40))
def test_chunks_split_no_unit_and_end_where_they_would_without_a_hit(
    units: tuple[tuple[int, int], ...], grid: int, hit: int
) -> None:
    """On a grid, from any place where a match may end; every chunk gets on, and only the grid and units move ends."""
    length = 50 + (units[-1][1] if units else 0)

    def inside(position: int) -> bool:
        return any(first < position < end for first, end in units)

    ends = ends_from(units, 0, grid, length)
    assert ends == sorted(set(ends)) and length == ends[-1]
    assert not any(inside(end) for end in ends)
    edges = {edge for unit in units for edge in unit}
    assert all(end % grid == 0 or end in edges or end == length for end in ends)
    if not inside(hit):
        assert [end for end in ends if end > hit] == ends_from(units, hit, grid, length)


@given(units_of(), st.lists(st.booleans(), max_size=20), st.integers(1, 5))
def test_holes_are_whole_units(units: tuple[tuple[int, int], ...], gone: list[bool], size: int) -> None:
    """Every position that is gone is in exactly one hole, with all of its unit, and nothing else is."""
    pages = [(i * size, (i + 1) * size) for i, lost in enumerate(gone) if lost]
    holes = whole_holes(pages, units)
    lost = {p for hole in pages for p in range(*hole)}
    expected = lost.union(*(set(range(*unit)) for unit in units if lost & set(range(*unit))))
    assert sorted(expected) == [p for hole in holes for p in range(*hole)]
    assert not any(first < edge < end for first, end in units for hole in holes for edge in hole)


def test_observe_mode_tells_what_a_cache_would_match() -> None:
    """It does not count pages inside a unit either."""
    watching = Observer(64, b"fp", page_size=SIZE)
    whole = items([(5, 8, A)], causal=False)
    first = watching.begin(PROMPT[:13] + [1], media=whole)
    watching.end(first, PROMPT[:13] + [1], 13)
    assert 1 == watching.begin(PROMPT, media=whole).would_match
