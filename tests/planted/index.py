"""Planted bugs in names and the run tree.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

NAMES = "kvkeep/index/names.py"
MEDIA = "kvkeep/index/media.py"
RUN = "kvkeep/index/run.py"
RUNS = "kvkeep/index/runs.py"
FAMILY = "kvkeep/index/family.py"
COMPARE = "kvkeep/index/compare.py"
EVICTION = "kvkeep/index/eviction.py"

NAMES_TESTS = "tests/core/test_names.py::"
TREE_TESTS = "tests/core/test_tree.py::"
CASES = "tests/core/test_cache_cases.py::"
ROWS = "tests/core/test_invariants_rows.py::"
NAIVE_TREE = TREE_TESTS + "test_a_tree_equals_the_naive_index[TreeMachine]"
COLLIDING_TREE = TREE_TESTS + "test_a_tree_equals_the_naive_index[ConstantTreeMachine]"

BUGS: tuple[Bug, ...] = (
    # Names: what is told apart.
    Bug(
        "names-drop-the-salt",
        NAMES,
        'fields = (("fingerprint", fingerprint), ("salt", salt), ("adapter", adapter), ("label", label))',
        'fields = (("fingerprint", fingerprint), ("salt", b""), ("adapter", adapter), ("label", label))',
        (ROWS + "test_row_11_a_salt_keeps_tenants_apart", NAMES_TESTS + "test_identities_differ_where_a_field_does"),
    ),
    Bug(
        "names-unframed-fields",
        NAMES,
        'parts += [struct.pack("<I", len(name)), name, struct.pack("<Q", len(value)), value]',
        "parts += [name, value]",
        (NAMES_TESTS + "test_framed_fields_can_be_read_back", ROWS + "test_row_6_a_field_cannot_imitate_another"),
    ),
    Bug(
        "names-ignore-the-page-before",
        NAMES,
        "parent = hash_fn(raw[at : at + page_nbytes], parent)",
        "_, parent = parent, hash_fn(raw[at : at + page_nbytes], 0)",
        (NAMES_TESTS + "test_a_name_carries_everything_before_its_page",),
    ),
    Bug(
        "names-of-media-pages-begin-at-zero",
        NAMES,
        "for i, at in enumerate(range(0, len(raw), page_nbytes), first):",
        "for i, at in enumerate(range(0, len(raw), page_nbytes)):",
        (NAMES_TESTS + "test_a_chain_goes_on_from_any_page",),
    ),
    Bug(
        "names-digest-left-out",
        NAMES,
        'struct.pack("<QQ?I", m.offset, m.length, m.causal, len(m.digest or b"")) + (m.digest or b"") for m in items',
        'struct.pack("<QQ?I", m.offset, m.length, m.causal, len(m.digest or b"")) for m in items',
        (NAMES_TESTS + "test_a_page_is_named_by_all_of_its_media",),
    ),
    Bug(
        "names-short-digest-trusted",
        MEDIA,
        "DIGEST_NBYTES_MIN = 16",
        "DIGEST_NBYTES_MIN = 8",
        (NAMES_TESTS + "test_media_that_cannot_be_is_refused",),
    ),
    Bug(
        "names-negative-ids-accepted",
        NAMES,
        "if len(ids) and ids.min() < 0:",
        "if len(ids) and ids.max() < 0:",
        (NAMES_TESTS + "test_what_is_no_list_of_ids_is_refused",),
    ),
    Bug(
        "names-unsigned-ids-wrap",
        NAMES,
        'may_overflow = ids.dtype.itemsize > TOKEN_NBYTES or ids.dtype.kind == "u"',
        "may_overflow = ids.dtype.itemsize > TOKEN_NBYTES",
        (NAMES_TESTS + "test_what_is_no_list_of_ids_is_refused",),
    ),
    Bug(
        "names-floats-accepted",
        NAMES,
        'if ids.dtype.kind not in "iu":',
        'if ids.dtype.kind not in "iuf":',
        (NAMES_TESTS + "test_what_is_no_list_of_ids_is_refused",),
    ),
    Bug(
        "names-media-misses-its-last-page",
        MEDIA,
        "for page in range(item.offset // page_size, (end - 1) // page_size + 1):",
        "for page in range(item.offset // page_size, max(item.offset, end - 2) // page_size + 1):",
        (
            NAMES_TESTS + "test_media_goes_to_every_page_that_it_touches",
            NAMES_TESTS + "test_media_of_a_sequence_that_was_cut",
        ),
    ),
    Bug(
        "names-page-without-digest-is-named",
        MEDIA,
        "storable = item.offset // page_size",
        "storable = item.offset // page_size + 1",
        (
            NAMES_TESTS + "test_an_item_without_a_digest_ends_what_can_be_named",
            ROWS + "test_row_4_what_has_no_digest_is_not_cached_nor_what_follows",
        ),
    ),
    Bug(
        "names-match-may-end-inside-an-item",
        MEDIA,
        "split = [m for m in media.get(pages - 1, ()) if not m.causal and m.offset < end < m.offset + m.length]",
        "split = [m for m in media.get(pages - 1, ()) if not m.causal and m.offset < end < m.length]",
        (
            NAMES_TESTS + "test_a_match_never_ends_inside_an_item_that_looks_ahead",
            ROWS + "test_a_match_does_not_end_inside_an_item_that_looks_ahead",
        ),
    ),
    Bug(
        "names-cut-item-is-not-told",
        MEDIA,
        "known = [m.offset // page_size for items in left.values() for m in items if m.offset + m.length > length]",
        "known = [m.offset // page_size for items in left.values() for m in items if m.length > length]",
        (NAMES_TESTS + "test_media_of_a_sequence_that_was_cut", CASES + "test_a_picture_that_was_cut_is_not_stored"),
    ),
    # The run tree: matches, splits, recency.
    Bug(
        "run-compares-one-page-of-many",
        RUN,
        "if tokens.startswith(raw[offset : offset + count * page_nbytes], at):",
        "if tokens.startswith(raw[offset : offset + page_nbytes], at):",
        (NAIVE_TREE, CASES + "test_a_page_that_is_not_full_is_never_shared"),
    ),
    Bug(
        "run-takes-the-name-for-the-tokens",
        RUN,
        "low, high = 0, count  # `low` pages are equal, `high` are not",
        "low, high = 1, count  # `low` pages are equal, `high` are not",
        (COLLIDING_TREE, ROWS + "test_row_1_pages_of_equal_name_are_told_apart"),
    ),
    Bug(
        "run-keeps-the-recency-of-what-left",
        RUN,
        "while len(ends) > 1 and ends[1] >= end:",
        "while len(ends) > 1 and ends[1] > end:",
        (NAIVE_TREE,),
    ),
    Bug(
        "run-keeps-the-media-of-what-left",
        RUN,
        "self.media = {d: m for d, m in self.media.items() if d < end} or None",
        "self.media = {d: m for d, m in self.media.items() if d <= end} or None",
        ("tests/core/test_cache_cases.py::test_media_of_a_page_that_left_are_no_longer_the_chains",),
    ),
    Bug(
        "run-split-gives-the-tail-the-heads-recency",
        RUN,
        "keep = j + (ends[j] > depth)",
        "keep = j + 1",
        (NAIVE_TREE, TREE_TESTS + "test_a_split_shares_out_recency_and_media"),
    ),
    Bug(
        "run-split-leaves-the-media-behind",
        RUN,
        "self.media = {d: m for d, m in self.media.items() if d >= depth} or None",
        "self.media = {d: m for d, m in self.media.items() if d > depth} or None",
        (NAIVE_TREE, TREE_TESTS + "test_a_split_shares_out_recency_and_media"),
    ),
    Bug(
        "run-touch-skips-what-ends-there",
        RUN,
        "while ends and ends[-1] <= end:",
        "while ends and ends[-1] < end:",
        (NAIVE_TREE,),
    ),
    Bug(
        "run-loses-its-head",
        RUN,
        """        del self.pages[at:]
        del self.names[at:]""",
        """        del self.pages[: len(self.pages) - at]
        del self.names[at:]""",
        (NAIVE_TREE,),
    ),
    Bug(
        "tree-skips-the-media-of-a-plain-prompt",
        COMPARE,
        "if media or run.media:",
        "if media:",
        (ROWS + "test_row_4_equal_placeholders_do_not_make_pictures_equal",),
    ),
    Bug(
        "tree-compares-how-many-media",
        COMPARE,
        "if (one is not one_before or other is not other_before) and one != other:",
        "if (one is not one_before or other is not other_before) and len(one) != len(other):",
        (ROWS + "test_row_3_digests_are_compared_in_full",),
    ),
    Bug(
        "tree-matches-beyond-the-limit",
        RUNS,
        "found = self._compare.child(run, last_name, raw, depth * page_nbytes, depth, limit - depth, media)",
        "found = self._compare.child(run, last_name, raw, depth * page_nbytes, depth, limit, media)",
        (TREE_TESTS + "test_a_match_stops_at_its_limit_in_every_run",),
    ),
    Bug(
        "tree-split-does-not-rewrite-the-map",
        RUNS,
        """        self.gpu.run_of[as_index(head.pages)] = head
""",
        "",
        (NAIVE_TREE,),
    ),
    Bug(
        "tree-siblings-of-equal-name-are-lost",
        FAMILY,
        """    child.sibling = parent.children.get(child.key)
""",
        "",
        (COLLIDING_TREE, ROWS + "test_row_1_pages_of_equal_name_are_told_apart"),
    ),
    Bug("tree-split-breaks-the-bucket", FAMILY, "new.sibling = run.sibling", "new.sibling = None", (COLLIDING_TREE,)),
    Bug(
        "tree-unlinked-run-takes-its-bucket-along",
        FAMILY,
        "after = new if new is not None else run.sibling",
        "after = new",
        (COLLIDING_TREE,),
    ),
    Bug(
        "tree-touch-forgets-the-runs-before",
        RUNS,
        """            end = run.start
            run = run.parent""",
        """            end = run.start
            run = None""",
        (NAIVE_TREE,),
    ),
    Bug(
        "tree-evicts-more-than-is-short",
        RUNS,
        "idle_tail(run.pages, k if k < count else count)",
        "idle_tail(run.pages, k)",
        (NAIVE_TREE, CASES + "test_only_the_coldest_tails_leave_and_only_as_many_as_are_short"),
    ),
    Bug(
        "tree-evicts-the-head",
        RUNS,
        """        pages = run.pages[at:]
        self.gpu.remove(pages)""",
        """        pages = run.pages[: len(run.pages) - at]
        self.gpu.remove(pages)""",
        (NAIVE_TREE,),
    ),
    Bug(
        "tree-evicts-one-page-that-is-held",
        RUNS,
        "if not self.gpu.ledger.is_idle(run.pages[-1]):",
        "if not self.gpu.ledger.kept(run.pages[-1]):",
        (TREE_TESTS + "test_a_page_that_is_held_stays_though_it_is_the_coldest",),
    ),
    Bug(
        "tree-parent-is-not-offered",
        RUNS,
        "self.offer_run(parent)",
        "pass",
        (TREE_TESTS + "test_a_parent_can_leave_after_a_child_used_as_late_as_itself",),
    ),
    Bug(
        "tree-replaced-page-stays-on-the-map",
        RUNS,
        """        self.gpu.remove(array("i", (old,)))
""",
        "",
        (NAIVE_TREE,),
    ),
    Bug(
        "tree-twins-not-told",
        RUNS,
        "return Inserted(twins, last)",
        "return Inserted(0, last)",
        (NAIVE_TREE, CASES + "test_a_loser_goes_on_until_the_pool_is_full"),
    ),
    Bug(
        "tree-clear-keeps-the-roots",
        RUNS,
        """        self._roots.clear()
""",
        "",
        (ROWS + "test_row_15_a_reset_is_over_when_it_returns",),
    ),
    Bug(
        "lru-trusts-an-old-stamp",
        EVICTION,
        "if now == stamp:",
        "if now >= stamp:",
        (NAIVE_TREE, CASES + "test_only_the_coldest_tails_leave_and_only_as_many_as_are_short"),
    ),
    Bug(
        "lru-never-takes-back-what-it-shelved",
        EVICTION,
        """        heapq.heappop(self._heap)
        run.queued &= ~self._bit""",
        """        heapq.heappop(self._heap)
        run.queued |= self._bit""",
        (NAIVE_TREE,),
    ),
    Bug(
        "lru-takes-a-page-with-pages-behind",
        EVICTION,
        "if run.gpu_children or not pages:",
        "if not pages:",
        (NAIVE_TREE,),
    ),
)
