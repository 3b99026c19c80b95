"""Planted bugs in the life of a request and how room is made.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

LEASE = "kvkeep/lease.py"
STORING = "kvkeep/storing.py"
ROOM = "kvkeep/room.py"
COUNTING = "kvkeep/counting.py"
ADMISSION = "kvkeep/admission.py"
CACHE = "kvkeep/cache.py"
RESHAPING = "kvkeep/reshaping.py"

MISSES = "kvkeep/misses.py"
MISS_TESTS = "tests/core/test_misses.py::"
ELSEWHERE = "tests/core/test_revoked_elsewhere.py::"
CASES = "tests/core/test_cache_cases.py::"
ROWS = "tests/core/test_invariants_rows.py::"
NAIVE_CACHE = "tests/core/test_cache.py::test_a_cache_equals_the_naive_one[CacheMachine]"

BUGS: tuple[Bug, ...] = (
    # The cache: the life of a request.
    Bug(
        "cache-matches-the-whole-prompt",
        ADMISSION,
        "limit = (len(ids) - 1) // self._page_size",
        "limit = len(ids) // self._page_size",
        (CASES + "test_one_token_of_a_prompt_is_left_to_compute",),
    ),
    Bug(
        "cache-matches-what-has-no-digest",
        ADMISSION,
        "return limit if media.storable is None else min(limit, media.storable)",
        "return limit if media.storable is None else max(limit, media.storable)",
        (ROWS + "test_row_4_what_has_no_digest_is_not_cached_nor_what_follows",),
    ),
    Bug(
        "cache-abort-does-not-see-that-a-lease-was-revoked-meanwhile",
        CACHE,
        """            if not lease.revoked:
""",
        """            if True:
""",
        (ELSEWHERE + "test_a_lease_that_is_revoked_meanwhile_can_be_aborted",),
    ),
    Bug(
        "cache-extends-a-lease-that-was-revoked-meanwhile",
        CACHE,
        """                self._check_live(lease)
                try:
""",
        """                try:
""",
        (ELSEWHERE + "test_a_call_on_a_lease_that_is_revoked_meanwhile_says_so",),
    ),
    Bug(
        "cache-match-is-not-pinned",
        ADMISSION,
        "self._ledger.retain(pages, number)",
        "pass",
        (CASES + "test_matched_pages_are_pinned_before_room_is_made",),
    ),
    Bug(
        "cache-refusal-leaves-pins",
        ADMISSION,
        "self._ledger.release(pages, number)",
        "pass",
        (
            CASES + "test_a_refusal_changes_nothing_and_carries_its_numbers",
            ROWS + "test_row_44_nothing_stays_pinned_on_any_way_out",
        ),
    ),
    Bug(
        "cache-counts-prompts-and-not-their-tokens",
        COUNTING,
        "self._prompt_tokens += lease.prompt_len",
        "self._prompt_tokens += 1",
        (ROWS + "test_row_56_tokens_are_counted_once_an_admission",),
    ),
    Bug(
        "cache-extend-forgets-the-room",
        CACHE,
        "need = -(-(length + room) // self._page_size) - lease.released",
        "need = -(-length // self._page_size) - lease.released",
        (NAIVE_CACHE,),
    ),
    Bug(
        "cache-seals-the-token-without-kv",
        STORING,
        "first, last = lease.sealed, lease.kv_len // self._page_size",
        "first, last = lease.sealed, (lease.kv_len + 1) // self._page_size",
        (CASES + "test_a_session_that_ends_on_a_page_boundary_does_not_store_its_last_page",),
    ),
    Bug(
        "cache-seals-a-page-in-part",
        STORING,
        "first, last = lease.sealed, lease.kv_len // self._page_size",
        "first, last = lease.sealed, -(-lease.kv_len // self._page_size)",
        (ROWS + "test_row_17_a_page_that_was_computed_in_part_is_never_exposed",),
    ),
    Bug(
        "cache-shows-pages-before-the-end",
        CACHE,
        "if self._store_at_seal and lease.window is None:",
        "if self._lock and lease.window is None:",
        (CASES + "test_pages_are_visible_when_they_fill_or_when_their_request_ends",),
    ),
    Bug(
        "cache-stores-what-has-no-digest",
        STORING,
        "last = lease.sealed if lease.media.storable is None else min(lease.sealed, lease.media.storable)",
        "last = lease.sealed",
        (ROWS + "test_row_4_what_has_no_digest_is_not_cached_nor_what_follows",),
    ),
    Bug(
        "cache-stores-against-the-callers-will",
        STORING,
        "if last <= lease.stored or not lease.store or lease.epoch != self.epoch:",
        "if last <= lease.stored or lease.epoch != self.epoch:",
        (CASES + "test_reuse_and_store_can_be_declined",),
    ),
    Bug(
        "cache-stores-from-before-a-reset",
        STORING,
        "if last <= lease.stored or not lease.store or lease.epoch != self.epoch:",
        "if last <= lease.stored or not lease.store:",
        (
            CASES + "test_reset_forgets_everything_and_says_what_is_still_held",
            ROWS + "test_row_14_new_weights_make_every_old_page_unmatchable_at_once",
        ),
    ),
    Bug(
        "cache-path-through-a-page-that-changed-hands",
        STORING,
        "return self._tree.place(page) if self._ledger.generation(page) == generation else None",
        "return self._tree.place(page) if generation >= 0 else None",
        (CASES + "test_a_page_that_changed_hands_ends_no_path",),
    ),
    Bug(
        "cache-loser-forgets-its-pages",
        STORING,
        "if self.store(lease):",
        "if lease.store:",
        (CASES + "test_a_loser_stores_its_pages_when_the_winners_have_left",),
    ),
    Bug(
        "cache-reader-does-not-warm",
        CACHE,
        """                self._storing.touch(lease)
            if self._ghosts""",
        """                pass
            if self._ghosts""",
        (CASES + "test_reuse_and_store_can_be_declined",),
    ),
    Bug(
        "cache-ended-lease-lives-on",
        CACHE,
        """        lease.live = False
""",
        "",
        (CASES + "test_an_ended_request_cannot_be_used",),
    ),
    Bug("cache-tail-is-not-offered", CACHE, "self._tree.offer(pages)", "pass", (NAIVE_CACHE,)),
    Bug(
        "cache-match-ends-inside-an-item",
        ADMISSION,
        "if whole < on_gpu:",
        "if whole < 0:",
        (ROWS + "test_a_match_does_not_end_inside_an_item_that_looks_ahead",),
    ),
    Bug(
        "cache-new-weights-under-the-old-identity",
        CACHE,
        """            self._fingerprint = fingerprint_bytes(fingerprint)
            self._identities.clear()
""",
        """            self._fingerprint = fingerprint_bytes(fingerprint)
""",
        (ROWS + "test_row_14_new_weights_make_every_old_page_unmatchable_at_once",),
    ),
    Bug(
        "cache-reset-keeps-the-epoch",
        CACHE,
        """        self._storing.epoch += 1
""",
        "",
        (ROWS + "test_row_14_new_weights_make_every_old_page_unmatchable_at_once",),
    ),
    Bug(
        "truncate-writes-into-a-sealed-page",
        RESHAPING,
        "replace = part and full < lease.sealed",
        "replace = part and full < lease.sealed - 1",
        (CASES + "test_truncate_never_rewrites_a_sealed_page",),
    ),
    Bug(
        "truncate-changes-before-it-refuses",
        RESHAPING,
        "if replace and not self._room.could_be_had(gone):",
        "if replace and not self._room.could_be_had(lease.pages):",
        (CASES + "test_truncate_without_a_page_for_the_copy_changes_nothing",),
    ),
    Bug(
        "truncate-keeps-the-media",
        STORING,
        "lease.media = media_before(lease.media, length, self._page_size)",
        "media_before(lease.media, length, self._page_size)",
        (CASES + "test_media_that_was_rolled_back_names_nothing",),
    ),
    Bug(
        "truncate-keeps-the-path",
        STORING,
        "lease.path = None if page is None else self.page_id(page)",
        "pass",
        (CASES + "test_what_follows_a_roll_back_is_stored_where_it_was_cut",),
    ),
    Bug(
        "truncate-keeps-the-names",
        STORING,
        "del lease.names[max(full - lease.base, 0) :]",
        "del lease.names[full:]",
        (NAIVE_CACHE,),
    ),
    Bug(
        "lease-counts-pages-from-zero",
        LEASE,
        "return memoryview(self.tokens)[(first - self.base) * nbytes : (last - self.base) * nbytes]",
        "return memoryview(self.tokens)[first * nbytes : last * nbytes]",
        (NAIVE_CACHE,),
    ),
    # Room.
    Bug(
        "room-drops-before-it-refuses",
        ROOM,
        "if short > ledger.idle:",
        "if short > ledger.total:",
        (CASES + "test_a_refusal_changes_nothing_and_carries_its_numbers",),
    ),
    Bug(
        "room-drops-more-than-is-short",
        ROOM,
        "pages = self._tree.evict(short)",
        "pages = self._tree.evict(count)",
        (CASES + "test_only_the_coldest_tails_leave_and_only_as_many_as_are_short",),
    ),
    Bug(
        "room-twins-do-not-give-way",
        ROOM,
        "self._swap_twins(rest, owner)",
        "pass",
        (CASES + "test_a_loser_goes_on_until_the_pool_is_full",),
    ),
    Bug(
        "room-twins-of-one-request-only",
        ROOM,
        """            if ledger.free >= free_min:
                return""",
        """            if lease.number >= 0 and ledger.free:
                return""",
        (CASES + "test_twins_of_two_requests_give_way_when_one_does_not_suffice",),
    ),
    Bug(
        "room-cold-pages-counted-as-free",
        ROOM,
        "short = count - ledger.free",
        "short = count - ledger.free - ledger.idle",
        (NAIVE_CACHE,),
    ),
    # ------------------------------------------------------------------ the miss ledger
    Bug(
        "misses-take-demotions-for-evictions",
        MISSES,
        "if reason in _LEFT:",
        "if reason:",
        (MISS_TESTS + "test_pages_that_host_memory_has",),
    ),
    Bug(
        "misses-keep-requests-that-ended",
        MISSES,
        "for name in self._names_of.pop(number, ()):",
        "for name in self._names_of.pop(-number, ()):",
        (MISS_TESTS + "test_a_request_in_flight_has_it_already",),
    ),
    Bug(
        "misses-never-forget",
        MISSES,
        "if len(names) > count + count // 16 else ()",
        "if len(names) < 0 else ()",
        (MISS_TESTS + "test_names_are_forgotten_the_oldest_first",),
    ),
    Bug(
        "misses-other-listeners-hear-nothing",
        "kvkeep/index/watch.py",
        "told = Both(listener, always) if listener is not None and always is not None else listener or always",
        "told = always or listener",
        (MISS_TESTS + "test_every_token_has_its_place_and_listeners_hear_the_same",),
    ),
    Bug(
        "misses-resumed-requests-are-prompts",
        ADMISSION,
        "if self._misses is not None and reuse is not None:",
        "if self._misses is not None:",
        (MISS_TESTS + "test_a_resumed_request_is_no_prompt",),
    ),
)
