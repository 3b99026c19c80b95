"""Planted bugs in media items, in what ends inside none of them, and in digests.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

ITEMS = "kvkeep/index/media.py"
COMPARE = "kvkeep/index/compare.py"
TRAFFIC = "kvkeep/traffic.py"
CACHE = "kvkeep/cache.py"
LEASE = "kvkeep/lease.py"

ITEM_TESTS = "tests/core/test_media_items.py::"
UNIT_TESTS = "tests/sim/test_units.py::"

BUGS: tuple[Bug, ...] = (
    # Items on pages.
    Bug(
        "media-compared-on-their-first-page-only",
        COMPARE,
        "if depth <= d < depth + same and theirs.get(d, ()) != ours.get(d, ()):",
        "if depth <= d < depth + same and d - 1 not in theirs and theirs.get(d, ()) != ours.get(d, ()):",
        (ITEM_TESTS + "test_media_are_compared_on_every_page",),
    ),
    Bug(
        "media-geometry-not-compared",
        COMPARE,
        "if depth <= d < depth + same and theirs.get(d, ()) != ours.get(d, ()):",
        "if depth <= d < depth + same and "
        "[m.digest for m in theirs.get(d, ())] != [m.digest for m in ours.get(d, ())]:",
        (ITEM_TESTS + "test_a_prompt_matches_up_to_the_first_page_whose_media_differ",),
    ),
    Bug(
        "media-numpy-spans-overflow",
        ITEMS,
        "object.__setattr__(self, name, operator.index(getattr(self, name)))",
        "object.__setattr__(self, name, getattr(self, name))",
        (ITEM_TESTS + "test_spans_are_plain_integers",),
    ),
    # Units: items whose attention is not causal.
    Bug(
        "unit-without-a-digest-is-none",
        ITEMS,
        "if not item.causal:",
        "if not item.causal and item.digest is not None:",
        (ITEM_TESTS + "test_a_lease_tells_where_chunks_end",),
    ),
    Bug(
        "unit-split-by-the-chunk-that-begins-with-it",
        ITEMS,
        "return first if kv_len < first else end",
        "return first if kv_len < first else want",
        (
            ITEM_TESTS + "test_a_lease_tells_where_chunks_end",
            ITEM_TESTS + "test_chunks_split_no_unit_and_end_where_they_would_without_a_hit",
        ),
    ),
    Bug(
        "unit-holes-computed-page-by-page",
        CACHE,
        "lease.holes = whole_holes(",
        "lease.holes = (lambda holes, units: holes)(",
        (UNIT_TESTS + "test_a_unit_of_which_a_part_is_gone_is_computed_as_one",),
    ),
    Bug(
        "unit-load-that-failed-in-it-is-inherited",
        TRAFFIC,
        "return depth == cut_before_split_item(depth, page_size, lease.media.by_page)",
        "return True or depth == cut_before_split_item(depth, page_size, lease.media.by_page)",
        (UNIT_TESTS + "test_a_load_that_fails_inside_a_unit_lets_nobody_go_on_there",),
    ),
    Bug(
        "unit-sealed-in-part",
        LEASE,
        'check_ends(self.media.units, "kv_len", kv_len)',
        "pass",
        (ITEM_TESTS + "test_kv_never_ends_inside_a_unit",),
    ),
    Bug(
        "unit-truncated-in-part",
        CACHE,
        'check_ends(lease.media.units, "truncate to", length)',
        "pass",
        (ITEM_TESTS + "test_kv_never_ends_inside_a_unit",),
    ),
    Bug(
        "unit-kept-when-rolled-back",
        ITEMS,
        "units = tuple(unit for unit in media.units if unit[1] <= length)",
        "units = tuple(unit for unit in media.units)",
        (ITEM_TESTS + "test_kv_never_ends_inside_a_unit",),
    ),
    Bug(
        "unit-observed-in-part",
        "kvkeep/observe.py",
        "whole = cut_before_split_item(len(found.pages), self._page_size, media)",
        "whole = len(found.pages)",
        (ITEM_TESTS + "test_observe_mode_tells_what_a_cache_would_match",),
    ),
)
