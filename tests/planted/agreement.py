"""Planted bugs in how ranks agree, and in what the cache has for it.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

CHANNEL = "kvkeep/agreement/channel.py"
DISTRIBUTED = "kvkeep/agreement/distributed.py"
SETTINGS = "kvkeep/agreement/settings.py"
GROUP = "kvkeep/agreement/group.py"
MINIMUM = "kvkeep/agreement/minimum.py"
LEADER = "kvkeep/agreement/leader.py"
FOLLOWER = "kvkeep/agreement/follower.py"
WIRE = "kvkeep/agreement/wire.py"
ADMISSION = "kvkeep/admission.py"
CACHE = "kvkeep/cache.py"
COUNTING = "kvkeep/counting.py"
MISSES = "kvkeep/misses.py"

OF_CHANNEL = "tests/agreement/test_channel.py::"
OF_SETTINGS = "tests/agreement/test_settings.py::"
OF_MINIMUM = "tests/agreement/test_minimum.py::"
OF_LEADER = "tests/agreement/test_leader.py::"
PROCESSES = "tests/agreement/test_processes.py::"
LOOK = "tests/core/test_look.py::"

BUGS: tuple[Bug, ...] = (
    # What is exchanged.
    Bug(
        "agree-another-prompt-is-the-same-step",
        CHANNEL,
        "if step != steps[0]:",
        "if step[:2] != steps[0][:2]:",
        (OF_MINIMUM + "test_ranks_that_are_asked_different_things_stop",),
    ),
    Bug(
        "agree-collective-sized-by-this-rank",
        CHANNEL,
        "longest = _HEAD.size + max(head[0] for head in heads)",
        "longest = len(message)",
        (OF_CHANNEL + "test_every_rank_hears_what_every_rank_says",),
    ),
    Bug(
        "agree-broken-group-goes-on",
        CHANNEL,
        "self._broken = str(error)",
        "pass",
        (OF_CHANNEL + "test_ranks_in_different_steps_stop_all_of_them",),
    ),
    Bug(
        "agree-joins-without-its-deadline",
        DISTRIBUTED,
        'timeout_s = deadline_s * NCCL_DEADLINES if backend == "nccl" else deadline_s',
        "timeout_s = deadline_s * NCCL_DEADLINES",
        (PROCESSES + "test_a_rank_that_never_joins",),
    ),
    Bug(
        "agree-failure-without-words-is-none",
        WIRE,
        '(report.error or "failed").encode()',
        "report.error.encode()",
        (OF_CHANNEL + "test_reports_and_refusals_come_out_as_they_went_in",),
    ),
    # Settings.
    Bug(
        "agree-slices-must-be-equal",
        SETTINGS,
        'if field != "tensor_parallel"}',
        "if field}",
        (OF_SETTINGS + "test_fingerprints_differ_in_their_slice_only",),
    ),
    Bug(
        "agree-most-is-the-least",
        SETTINGS,
        '(("least", min), ("most", max))',
        '(("least", min), ("most", min))',
        (OF_SETTINGS + "test_settings_are_the_same_on_every_rank_afterwards",),
    ),
    Bug(
        "agree-pinned-where-one-is",
        SETTINGS,
        "if all(pinned for pinned, _ in ranks):",
        "if any(pinned for pinned, _ in ranks):",
        (OF_SETTINGS + "test_all_ranks_pin_or_none",),
    ),
    Bug(
        "agree-what-others-could-not-make-stays",
        SETTINGS,
        "            undo(one)\n",
        "            pass\n",
        (OF_SETTINGS + "test_what_one_rank_cannot_make_none_has",),
    ),
    # A request of the group.
    Bug(
        "agree-pages-before-all-agree",
        GROUP,
        "        self.check_ready()\n        return self.table",
        "        return self.table",
        (OF_MINIMUM + "test_a_request_runs_nowhere_before_all_have_their_pages",),
    ),
    Bug(
        "agree-lease-of-a-broken-group-is-held",
        GROUP,
        "            self._end(lease)\n            raise\n",
        "            raise\n",
        (PROCESSES + "test_a_rank_that_is_killed_raises_on_the_other[leader-1-admit]",),
    ),
    Bug(
        "agree-prompt-is-its-callers-buffer",
        GROUP,
        "ids = np.array(as_int32(tokens), dtype=np.int32)",
        "ids = as_int32(tokens)",
        (OF_MINIMUM + "test_the_prompts_buffer_may_be_used_again_at_once",),
    ),
    Bug(
        "agree-page-counts-part-at-a-refusal",
        GROUP,
        "                lease.page_count = -(-lease.length // self._page_size)\n                raise\n",
        "                raise\n",
        (OF_MINIMUM + "test_more_pages_for_all_or_for_none",),
    ),
    Bug(
        "agree-revoked-lease-keeps-its-pages",
        GROUP,
        "                self.stats.revocations += 1\n                self._end(lease)\n",
        "                self.stats.revocations += 1\n",
        (OF_MINIMUM + "test_a_request_that_one_rank_loses_is_revoked_on_all",),
    ),
    Bug(
        "agree-followers-do-not-know-what-is-sealed",
        GROUP,
        "            self._how.cache.seal(lease.local, kv_len)\n        lease.sealed = kv_len // self._page_size\n",
        "            self._how.cache.seal(lease.local, kv_len)\n",
        (OF_LEADER + "test_a_wrong_kv_len_is_refused_on_every_rank",),
    ),
    # The minimum.
    Bug(
        "minimum-is-the-longest",
        MINIMUM,
        "least = min(reader.parts(_PAGES)[0] for reader in readers)",
        "least = max(reader.parts(_PAGES)[0] for reader in readers)",
        (OF_MINIMUM + "test_nothing_is_loaded_before_the_length_is_agreed",),
    ),
    Bug(
        "minimum-does-not-hear-a-refusal",
        MINIMUM,
        "        _raise_first(readers)\n        self._yield",
        "        self._yield",
        (OF_MINIMUM + "test_a_rank_without_room_refuses_for_all",),
    ),
    Bug(
        "minimum-revoked-where-rank-0-is",
        MINIMUM,
        "if GONE in states:",
        "if states[0] == GONE:",
        (OF_MINIMUM + "test_a_request_that_one_rank_loses_is_revoked_on_all",),
    ),
    Bug(
        "minimum-does-not-wait-for-others",
        MINIMUM,
        "elif PENDING not in states:",
        "elif states[0] != PENDING:",
        (OF_MINIMUM + "test_a_request_runs_nowhere_before_all_have_their_pages",),
    ),
    Bug(
        "minimum-ready-with-different-lengths",
        MINIMUM,
        "if least == max(states):",
        "if least <= max(states):",
        (OF_MINIMUM + "test_a_load_that_fails_on_one_rank_shortens_all",),
    ),
    Bug(
        "minimum-shortened-is-admitted-twice",
        MINIMUM,
        "pages_max=pages, instead_of=instead_of,",
        "pages_max=pages,",
        (OF_MINIMUM + "test_a_load_that_fails_on_one_rank_shortens_all",),
    ),
    Bug(
        "minimum-keeps-pages-that-others-lack",
        MINIMUM,
        "            self.cache.truncate(lease.local, lease.length)\n            raise\n",
        "            raise\n",
        (OF_MINIMUM + "test_more_pages_for_all_or_for_none",),
    ),
    # The leader and its followers.
    Bug(
        "leader-copy-over-when-one-rank-says-so",
        LEADER,
        "            entry.missing.discard(rank)\n            entry.copy_ns",
        "            entry.missing.clear()\n            entry.copy_ns",
        (
            OF_LEADER + "test_a_copy_is_over_when_every_rank_says_so",
            OF_LEADER + "test_a_page_is_not_handed_on_while_a_follower_still_reads_it",
        ),
    ),
    Bug(
        "leader-does-not-hear-a-followers-failure",
        LEADER,
        "if report.error is not None and entry.error is None:",
        "if report.error is not None and not rank:",
        (OF_LEADER + "test_a_load_that_fails_on_one_rank_is_computed_by_all",),
    ),
    Bug(
        "leader-ships-a-copy-again",
        LEADER,
        "out, self._outbox = self._outbox, []",
        "out = list(self._outbox)",
        (OF_LEADER + "test_a_copy_is_over_when_every_rank_says_so",),
    ),
    Bug(
        "leader-dead-while-copies-run",
        LEADER,
        "if self._death is not None and not self._running and not over:",
        "if self._death is not None and not over:",
        (OF_LEADER + "test_a_dead_rank_ends_the_backend_once_nothing_moves_any_more",),
    ),
    Bug(
        "leader-launches-for-a-dead-rank",
        LEADER,
        "                return  # it stays in flight until",
        "                pass  # it stays in flight until",
        (OF_LEADER + "test_a_dead_rank_ends_the_backend_once_nothing_moves_any_more",),
    ),
    Bug(
        "leader-unconfirmed-copy-has-arrived",
        LEADER,
        "e.error or (late if e.missing else None)",
        "e.error",
        (OF_LEADER + "test_closing_reports_what_ranks_had_not_said",),
    ),
    Bug(
        "leader-keeps-room-that-others-gave-back",
        LEADER,
        "            self.cache.truncate(lease.local, lease.length)  # of room from before, as on every rank\n",
        "",
        (OF_LEADER + "test_pages_that_are_added_are_the_leaders",),
    ),
    Bug(
        "follower-takes-one-page-too-many",
        FOLLOWER,
        "not 0 <= min(pages) <= max(pages) < count:",
        "not 0 <= min(pages) <= max(pages) <= count:",
        (OF_LEADER + "test_ids_that_do_not_fit_the_pools_are_refused",),
    ),
    Bug(
        "follower-checks-against-the-other-pool",
        FOLLOWER,
        'up = plan.direction == "h2d"',
        'up = plan.direction != "h2d"',
        (OF_LEADER + "test_ids_that_do_not_fit_the_pools_are_refused",),
    ),
    Bug(
        "follower-lists-a-page-twice",
        FOLLOWER,
        "if len(set(pages)) < len(pages):",
        "if not pages and len(set(pages)) < len(pages):",
        (OF_LEADER + "test_ids_that_do_not_fit_the_pools_are_refused",),
    ),
    Bug(
        "follower-copies-before-its-writes",
        FOLLOWER,
        "plan, self._after, plan.nbytes",
        "plan, NO_WAIT, plan.nbytes",
        (OF_LEADER + "test_copies_of_a_follower_come_after_its_own_event",),
    ),
    Bug(
        "follower-keeps-room-that-others-gave-back",
        FOLLOWER,
        "            del lease.table[-(-lease.length // self.page_size) :]\n",
        "",
        (OF_LEADER + "test_pages_that_are_added_are_the_leaders",),
    ),
    # What the cache has for it.
    Bug(
        "look-counts-its-own-match-as-room",
        ADMISSION,
        "            idle -= sum(map(self._ledger.is_idle, pages))\n",
        "            idle -= 0\n",
        (LOOK + "test_what_is_seen_is_what_is_admitted",),
    ),
    Bug(
        "look-sees-a-load-that-is-refused",
        ADMISSION,
        "            below = below[:0]\n",
        "            pass\n",
        (LOOK + "test_a_load_that_would_be_refused_is_no_match",),
    ),
    Bug(
        "cache-takes-more-than-it-may",
        ADMISSION,
        "limit if most is None else min(limit, most)",
        "limit if most != 0 else 0",
        (LOOK + "test_an_admission_takes_no_more_than_it_may",),
    ),
    Bug(
        "cache-tells-of-an-admission-twice",
        CACHE,
        "None if instead_of else reuse",
        "reuse",
        (LOOK + "test_what_was_not_to_be_taken_is_a_cause_of_its_own",),
    ),
    Bug(
        "counting-adds-up-both-matches",
        COUNTING,
        "            self._matched_tokens -= instead_of.taken_len\n",
        "",
        (LOOK + "test_an_admission_in_place_of_another_is_counted_once",),
    ),
    Bug(
        "counting-two-waits-of-one-admission",
        COUNTING,
        "        elif instead_of is None:\n            self._gate.none()",
        "        else:\n            self._gate.none()",
        (LOOK + "test_an_admission_in_place_of_another_is_counted_once",),
    ),
    Bug(
        "counting-forgets-what-was-loaded-before",
        COUNTING,
        "self._matched_host_tokens += max(0, brought)",
        "self._matched_host_tokens += min(0, brought)",
        (LOOK + "test_pages_that_the_one_before_has_loaded_stay_counted_as_such",),
    ),
    Bug(
        "misses-capped-has-no-name",
        MISSES,
        "causes[Cause.CAPPED] += looked.capped",
        "causes[Cause.NO_IDENTITY] += looked.capped",
        (LOOK + "test_what_was_not_to_be_taken_is_a_cause_of_its_own",),
    ),
)
