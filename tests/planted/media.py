"""Planted bugs in media items, in what ends inside none of them, and in digests.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

ITEMS = "kvkeep/index/media.py"
COMPARE = "kvkeep/index/compare.py"
TRAFFIC = "kvkeep/traffic.py"
ADMISSION = "kvkeep/admission.py"
CACHE = "kvkeep/cache.py"
ADMISSION = "kvkeep/admission.py"
LEASE = "kvkeep/lease.py"

CANONICAL = "kvkeep/media/canonical.py"
SOURCES = "kvkeep/media/sources.py"
DIGEST = "kvkeep/media/digest.py"

ITEM_TESTS = "tests/core/test_media_items.py::"
UNIT_TESTS = "tests/sim/test_units.py::"
CANONICAL_TESTS = "tests/media/test_canonical.py::"
PROCESSOR_TESTS = "tests/media/test_processors.py::"
DIGEST_TESTS = "tests/media/test_digest.py::"

BUGS: tuple[Bug, ...] = (
    # Items on pages.
    Bug(
        "media-compared-on-their-first-page-only",
        COMPARE,
        "if depth <= d < depth + count:",
        "if depth <= d < depth + count and d - 1 not in theirs:",
        (ITEM_TESTS + "test_media_are_compared_on_every_page",),
    ),
    Bug(
        "media-not-compared-behind-a-page-that-was",
        COMPARE,
        "if (one is not one_before or other is not other_before) and one != other:",
        "if (one is not one_before and other is not other_before) and one != other:",
        (ITEM_TESTS + "test_media_are_compared_on_every_page",),
    ),
    Bug(
        "media-geometry-not-compared",
        COMPARE,
        "if (one is not one_before or other is not other_before) and one != other:",
        "if (one is not one_before or other is not other_before) and "
        "[m.digest for m in one] != [m.digest for m in other]:",
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
        ADMISSION,
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
        "kvkeep/reshaping.py",
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
    # Parameters.
    Bug(
        "canonical-values-are-not-framed",
        CANONICAL,
        'return tag + struct.pack("<Q", len(content)) + content',
        "return tag + content",
        (
            CANONICAL_TESTS + "test_other_values_have_other_encodings",
            CANONICAL_TESTS + "test_encodings_are_equal_exactly_where_parameters_are",
        ),
    ),
    Bug(
        "canonical-mapping-keeps-its-order",
        CANONICAL,
        "pairs = sorted(",
        "pairs = list(",
        (CANONICAL_TESTS + "test_one_value_has_one_encoding",),
    ),
    Bug(
        "canonical-true-is-one",
        CANONICAL,
        'return _tagged(b"b", b"1" if value else b"0")',
        "value = int(value)",
        (CANONICAL_TESTS + "test_other_values_have_other_encodings",),
    ),
    Bug(
        "canonical-long-double-is-rounded",
        CANONICAL,
        "if real != value and value == value:",
        "if real != value and real == value:",
        (CANONICAL_TESTS + "test_what_has_no_encoding_is_refused",),
    ),
    Bug(
        "processor-class-is-left-out",
        CANONICAL,
        '"computed_by": f"{kind.__module__}.{kind.__qualname__}",',
        '"computed_by": "",',
        (PROCESSOR_TESTS + "test_a_class_that_computes_otherwise_has_other_parameters",),
    ),
    Bug(
        "processor-unknown-mapping-is-thinned",
        CANONICAL,
        "key: _without(value) if isinstance(value, Mapping) and not _PARTS.isdisjoint(value) else value",
        "key: _without(value) if isinstance(value, Mapping) else value",
        (PROCESSOR_TESTS + "test_only_what_changes_no_pixel_is_dropped",),
    ),
    # Sources.
    Bug(
        "source-array-without-its-shape",
        SOURCES,
        "return f\"array {dtype} {','.join(map(str, shape))}\".encode()",
        'return f"array {dtype} ".encode()',
        (DIGEST_TESTS + "test_arrays_that_differ_have_other_digests",),
    ),
    Bug(
        "source-image-without-its-palette",
        SOURCES,
        "if image.palette is not None else None",
        "if image.palette is None else None",
        (DIGEST_TESTS + "test_images_that_are_shown_differently_have_other_digests",),
    ),
    Bug(
        "source-image-is-its-first-frame",
        SOURCES,
        "if frames > 1:",
        "if frames < 1:",
        (DIGEST_TESTS + "test_an_image_of_several_frames_is_not_its_first",),
    ),
    Bug(
        "source-file-is-what-is-left-of-it",
        SOURCES,
        "            file.seek(0)",
        "            file.seek(back)",
        (DIGEST_TESTS + "test_equal_bytes_have_one_digest",),
    ),
    Bug(
        "source-file-is-read-at-once",
        SOURCES,
        "space = memoryview(bytearray(BLOCK_NBYTES)) if readinto is not None else None",
        "space = memoryview(bytearray(1 << 30)) if readinto is not None else None",
        (DIGEST_TESTS + "test_a_video_of_a_gigabyte_does_not_enter_memory",),
    ),
    Bug(
        "source-array-is-copied-at-once",
        SOURCES,
        "if nbytes <= BLOCK_NBYTES or as_it_lies(array):",
        "if nbytes > 0 or as_it_lies(array):",
        (DIGEST_TESTS + "test_only_a_block_is_copied",),
    ),
    # The memo.
    Bug(
        "memo-keyed-by-address-alone",
        DIGEST,
        "self._by_id[id(content)] = (content, made)",
        "self._by_id[id(content)] = (bytes(len(content)), made)",
        (DIGEST_TESTS + "test_an_address_that_is_used_again_does_not_fool_the_memo",),
    ),
    Bug(
        "memo-takes-what-can-be-written",
        DIGEST,
        "if frozen is None and type(source) is bytes:",
        "if frozen is None and isinstance(source, bytes | bytearray):",
        (DIGEST_TESTS + "test_what_can_be_written_is_read_each_time",),
    ),
    Bug(
        "memo-takes-bytes-of-any-class",
        DIGEST,
        "if frozen is None and type(source) is bytes:",
        "if frozen is None and isinstance(source, bytes):",
        (DIGEST_TESTS + "test_bytes_of_a_class_of_their_own_are_not_remembered",),
    ),
    Bug(
        "memo-of-names-forgets-what-is-named",
        DIGEST,
        "key = (frozen, *outline(source))",
        "key = (frozen,)",
        (DIGEST_TESTS + "test_a_frozen_source_is_read_once",),
    ),
    Bug(
        "memo-keeps-more-bytes-than-it-may",
        DIGEST,
        "while len(self._by_id) > self._entries or self._nbytes > self._nbytes_max:",
        "while len(self._by_id) > self._entries:",
        (DIGEST_TESTS + "test_the_memo_keeps_within_its_bounds",),
    ),
)
