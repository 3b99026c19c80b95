"""Planted bugs in windows, forks and what a reset says.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

RESHAPING = "kvkeep/reshaping.py"
STORING = "kvkeep/storing.py"
LEASE = "kvkeep/lease.py"
CACHE = "kvkeep/cache.py"
ROOM = "kvkeep/room.py"
COUNTING = "kvkeep/counting.py"
ADMISSION = "kvkeep/admission.py"
WINDOWS = "tests/core/test_windows.py::"
FORKS = "tests/core/test_forks.py::"
RESETS = "tests/core/test_resets.py::"

BUGS: tuple[Bug, ...] = (
    # Windows: what is stored.
    Bug(
        "window-stores-all-its-pages",
        STORING,
        "last = min(last, lease.window.protected)",
        "last = min(last, lease.sealed)",
        (WINDOWS + "test_only_what_the_protected_tokens_fill_is_stored",),
    ),
    Bug(
        "window-stores-the-page-that-the-prefix-ends-in",
        RESHAPING,
        "protected, kept = length // self._page_size, -(-length // self._page_size)",
        "protected, kept = -(-length // self._page_size), -(-length // self._page_size)",
        (WINDOWS + "test_only_what_the_protected_tokens_fill_is_stored",),
    ),
    Bug(
        "window-stores-before-the-end",
        CACHE,
        "if self._store_at_seal and lease.window is None:",
        "if self._store_at_seal:",
        (WINDOWS + "test_only_what_the_protected_tokens_fill_is_stored",),
    ),
    Bug(
        "window-keeps-token-ids-behind-a-released-page",
        CACHE,
        'lease.tokens += ids.data if not lease.closed else b""',
        "lease.tokens += ids.data",
        (WINDOWS + "test_a_closed_chain_keeps_no_token_ids",),
    ),
    Bug(
        "window-protected-again-is-not-longer",
        RESHAPING,
        "                window.protected = protected\n",
        "                pass\n",
        (WINDOWS + "test_a_prefix_may_be_protected_again_before_a_page_is_released",),
    ),
    # Windows: what is released.
    Bug(
        "window-releases-the-newest",
        RESHAPING,
        "gone = lease.pages[window.kept : window.kept + count]",
        "gone = lease.pages[lease.sealed - window.released - count : lease.sealed - window.released]",
        (WINDOWS + "test_pages_that_nobody_else_has_are_free_at_once",),
    ),
    Bug(
        "window-releases-the-protected-page",
        RESHAPING,
        "protected, kept = length // self._page_size, -(-length // self._page_size)",
        "protected, kept = length // self._page_size, length // self._page_size",
        (WINDOWS + "test_pages_that_nobody_else_has_are_free_at_once",),
    ),
    Bug(
        "window-frees-what-others-hold",
        RESHAPING,
        "        window.epoch += 1\n        self._release(lease, gone)\n",
        "        window.epoch += 1\n        self._ledger.drop(gone)\n",
        (WINDOWS + "test_a_released_page_of_another_request_stays_its",),
    ),
    Bug(
        "window-releases-pages-that-are-written",
        RESHAPING,
        "have = max(0, sealed - window.kept - window.released)",
        "have = max(0, sealed + 1 - window.kept - window.released)",
        (WINDOWS + "test_what_makes_no_sense_is_refused_and_changes_nothing",),
    ),
    Bug(
        "window-forgets-what-it-has-released",
        RESHAPING,
        "        window.released += count\n",
        "        window.released = count\n",
        (WINDOWS + "test_pages_that_nobody_else_has_are_free_at_once",),
    ),
    Bug(
        "window-does-not-say-that-its-pages-changed",
        RESHAPING,
        "        window.epoch += 1\n",
        "",
        (WINDOWS + "test_pages_that_nobody_else_has_are_free_at_once",),
    ),
    Bug(
        "window-releases-while-copies-run",
        RESHAPING,
        '        _check_arrived(lease, "released")\n',
        "",
        (WINDOWS + "test_nothing_is_released_while_pages_are_on_their_way",),
    ),
    Bug(
        "window-chain-stays-open",
        RESHAPING,
        "            window.sealed = sealed\n",
        "            pass\n",
        (WINDOWS + "test_a_closed_chain_grows_seals_and_rolls_back_what_is_not_sealed",),
    ),
    Bug(
        "window-media-end-with-the-chain",
        RESHAPING,
        "        lease.media = media  # where its items are still matters to whoever computes them\n",
        "",
        (WINDOWS + "test_an_item_behind_a_released_page_is_still_not_split",),
    ),
    Bug(
        "window-extend-does-not-know-of-released-pages",
        CACHE,
        "need = -(-(length + room) // self._page_size) - lease.released - len(lease.pages)",
        "need = -(-(length + room) // self._page_size) - len(lease.pages)",
        (WINDOWS + "test_a_closed_chain_grows_seals_and_rolls_back_what_is_not_sealed",),
    ),
    Bug(
        "window-seals-by-place-in-the-chain",
        STORING,
        "self._ledger.seal(lease.pages[lease.index_of(window.sealed) : full - window.released], lease.number)",
        "self._ledger.seal(lease.pages[window.sealed : full], lease.number)",
        (WINDOWS + "test_a_closed_chain_grows_seals_and_rolls_back_what_is_not_sealed",),
    ),
    Bug(
        "window-rolled-back-into-the-protected-prefix",
        RESHAPING,
        "            if length < least:\n",
        "            if length < 0:\n",
        (WINDOWS + "test_what_is_protected_is_not_rolled_back",),
    ),
    Bug(
        "window-is-suspended",
        ADMISSION,
        "        if lease.closed:\n",
        "        if not lease.live:\n",
        (WINDOWS + "test_a_closed_lease_is_not_suspended",),
    ),
    Bug(
        "window-idle-pages-it-has-passed-are-stuck",
        ROOM,
        "            self._cut_closed(free_min, owner)\n",
        "            pass\n",
        (WINDOWS + "test_idle_pages_that_a_window_has_slid_past_can_be_had",),
    ),
    Bug(
        "window-that-slid-first-is-looked-at-only",
        ROOM,
        "for lease in [lease for lease in self._leases.values() if lease.closed]:",
        "for lease in [lease for lease in self._leases.values() if lease.closed][:1]:",
        (WINDOWS + "test_room_is_found_behind_any_of_several_windows",),
    ),
    Bug(
        "fork-holds-pages-behind-those-of-another",
        ROOM,
        "for lease in [lease for lease in self._leases.values() if lease.closed]:",
        "for lease in [lease for lease in self._leases.values() if lease.released]:",
        (FORKS + "test_idle_pages_of_who_won_the_race_can_be_had_behind_a_fork",),
    ),
    Bug(
        "window-idle-pages-before-a-copied-one-are-stuck",
        ROOM,
        "(depth for depth in before if self._ledger",
        "(depth for depth in before[:1] if self._ledger",
        (WINDOWS + "test_idle_pages_before_one_that_a_copy_reads_can_be_had",),
    ),
    # Forks.
    Bug(
        "fork-though-forks-are-off",
        CACHE,
        "        if not self.config.forks:\n",
        "        if not self.config:\n",
        (FORKS + "test_forks_are_off_unless_they_are_asked_for",),
    ),
    Bug(
        "fork-does-not-count-its-pages",
        RESHAPING,
        "        self._ledger.retain(shared, number)\n",
        "",
        (FORKS + "test_full_pages_are_shared_and_the_tail_is_copied",),
    ),
    Bug(
        "fork-writes-into-the-tail-of-the-other",
        RESHAPING,
        "        shared = lease.pages[:at]\n",
        "        shared = lease.pages[: at + 1]\n",
        (FORKS + "test_full_pages_are_shared_and_the_tail_is_copied",),
    ),
    Bug(
        "fork-tail-is-not-copied",
        RESHAPING,
        "        if lease.kv_len > sealed * size:\n",
        "        if lease.kv_len > (sealed + 1) * size:\n",
        (FORKS + "test_full_pages_are_shared_and_the_tail_is_copied",),
    ),
    Bug(
        "fork-while-copies-run",
        RESHAPING,
        '        _check_arrived(lease, "forked")\n',
        "",
        (FORKS + "test_nothing_is_forked_while_pages_are_on_their_way",),
    ),
    Bug(
        "fork-of-a-window-has-all-pages",
        RESHAPING,
        "fork.window = lease.window.copy(0, sealed) if lease.window is not None else Window(0, 0, sealed)",
        "fork.window = Window(0, 0, sealed)",
        (FORKS + "test_a_fork_may_be_rolled_back_to_what_it_shares_and_forked_and_windowed",),
    ),
    # What a reset says.
    Bug(
        "reset-stores-what-was-suspended-before",
        ADMISSION,
        "lease.store = ticket.store and current",
        "lease.store = ticket.store",
        (RESETS + "test_what_was_suspended_before_a_reset_is_not_stored_after_it",),
    ),
    Bug(
        "reset-does-not-tell-of-copies",
        COUNTING,
        "pages_copying=len(traffic.copies.pages_held_alone()) if traffic is not None else 0,",
        "pages_copying=0,",
        (RESETS + "test_a_reset_says_what_it_could_not_do_yet",),
    ),
    Bug(
        "reset-does-not-tell-of-suspended-requests",
        COUNTING,
        "suspended=len(traffic.parking.suspended) if traffic is not None else 0,",
        "suspended=0,",
        (RESETS + "test_a_reset_says_what_it_could_not_do_yet",),
    ),
    Bug(
        "reset-counts-outputs-as-requests",
        CACHE,
        "return self._counting.reset(freed, held, len(self._leases) - held_outputs, held_outputs, self._host, traffic)",
        "return self._counting.reset(freed, held, len(self._leases), held_outputs, self._host, traffic)",
        (RESETS + "test_outputs_in_live_requests_are_told_apart",),
    ),
)
