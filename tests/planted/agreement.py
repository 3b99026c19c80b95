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
COUNTING = "kvkeep/counting.py"
MISSES = "kvkeep/misses.py"
STORING = "kvkeep/storing.py"

OF_CHANNEL = "tests/agreement/test_channel.py::"
OF_SETTINGS = "tests/agreement/test_settings.py::"
OF_MINIMUM = "tests/agreement/test_minimum.py::"
OF_LEADER = "tests/agreement/test_leader.py::"
OF_BACKEND = "tests/agreement/test_group_backend.py::"
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
        "self._broken = str(error) or type(error).__name__",
        "pass",
        (OF_CHANNEL + "test_ranks_in_different_steps_stop_all_of_them",),
    ),
    Bug(
        "agree-half-an-exchange-is-gone-on-with",
        CHANNEL,
        "except BaseException as error:",
        "except (RankLost, InvariantViolation) as error:",
        (OF_CHANNEL + "test_an_exchange_that_ended_half_way_ends_the_channel",),
    ),
    Bug(
        "agree-joins-without-its-deadline",
        DISTRIBUTED,
        "thread.join(self._deadline_s + GRACE_S)",
        "thread.join(self._deadline_s * 3)",
        (PROCESSES + "test_a_world_that_hangs_is_noticed_when_a_group_is_joined",),
    ),
    Bug(
        "agree-joins-where-a-group-was-before",
        DISTRIBUTED,
        "uuid.uuid4().hex",
        "str(members)",
        (PROCESSES + "test_groups_are_joined_again_whatever_else_a_rank_has_joined",),
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
        'if field != "tensor_parallel")',
        "if field)",
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
        "if all(pinned for _, pinned, _ in ranks):",
        "if any(pinned for _, pinned, _ in ranks):",
        (OF_SETTINGS + "test_all_ranks_pin_or_none",),
    ),
    Bug(
        "agree-what-others-could-not-make-stays",
        SETTINGS,
        "            undo(one)\n",
        "            pass\n",
        (OF_SETTINGS + "test_what_one_rank_cannot_make_none_has",),
    ),
    Bug(
        "agree-foreign-errors-are-not-told",
        SETTINGS,
        "except Exception as error:",
        "except KvkeepError as error:",
        (OF_SETTINGS + "test_others_hear_whatever_keeps_a_rank_from_making_it",),
    ),
    Bug(
        "agree-raises-alone-at-the-start",
        SETTINGS,
        '        mine = {"refused": str(error)}\n',
        "        raise\n",
        (OF_SETTINGS + "test_what_one_rank_cannot_say_is_refused_on_all",),
    ),
    Bug(
        "agree-pins-for-longer-than-the-deadline",
        SETTINGS,
        "pool.wait_pinned(PIN_PERIOD_S)",
        "pool.wait_pinned()",
        (OF_SETTINGS + "test_ranks_wait_for_one_that_pins_for_longer_than_the_deadline",),
    ),
    Bug(
        "agree-two-leaders",
        LEADER,
        "leader_settings(rank, copied_on,",
        "leader_settings(0, copied_on,",
        (OF_SETTINGS + "test_rank_0_leads_and_all_others_follow",),
    ),
    Bug(
        "agree-copies-of-fewer-ranks",
        LEADER,
        "size if self._backend is None else self._backend.size",
        "size",
        (OF_SETTINGS + "test_rank_0_leads_and_all_others_follow",),
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
        "agree-followers-keep-pages-that-were-taken-back",
        GROUP,
        "        del lease.table[pages:]\n",
        "",
        (OF_LEADER + "test_tokens_are_taken_back_on_the_same_pages",),
    ),
    Bug(
        "agree-page-counts-part-when-tokens-are-taken-back",
        GROUP,
        "lease.length, lease.page_count = length, pages",
        "lease.length = length",
        (OF_LEADER + "test_tokens_are_taken_back_on_the_same_pages",),
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
        "least = min(found.pages for found in looks)",
        "least = max(found.pages for found in looks)",
        (OF_MINIMUM + "test_nothing_is_loaded_before_the_length_is_agreed",),
    ),
    Bug(
        "minimum-does-not-hear-a-refusal",
        MINIMUM,
        "is not None:\n                raise error\n        self._yield",
        "is not None:\n                pass\n        self._yield",
        (OF_MINIMUM + "test_a_rank_without_room_refuses_for_all",),
    ),
    Bug(
        "minimum-has-room-for-its-own-match-only",
        MINIMUM,
        "found.refusal_at(least)",
        "found.refusal",
        (OF_MINIMUM + "test_what_is_not_taken_is_no_room_where_others_hold_it",),
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
        "minimum-takes-what-others-lack",
        MINIMUM,
        "pages_max=least,",
        "pages_max=None,",
        (OF_MINIMUM + "test_nothing_is_loaded_before_the_length_is_agreed",),
    ),
    Bug(
        "minimum-keeps-what-it-cannot-shorten",
        MINIMUM,
        "            self.cache.abort(local)\n",
        "",
        (OF_MINIMUM + "test_a_rank_without_room_to_give_pages_back_revokes_on_all_once",),
    ),
    Bug(
        "minimum-ready-while-it-is-revoked",
        MINIMUM,
        "        if lease.revoked:\n            return GONE\n        return lease.matched_len",
        "        if lease.revoked and not over:\n            return GONE\n        return lease.matched_len",
        (OF_MINIMUM + "test_a_lease_that_is_revoked_meanwhile_is_not_ready",),
    ),
    Bug(
        "minimum-keeps-pages-that-others-lack",
        MINIMUM,
        "                self.cache.truncate(lease.local, lease.length)\n                raise error\n",
        "                raise error\n",
        (OF_MINIMUM + "test_more_pages_for_all_or_for_none",),
    ),
    # The leader and its followers.
    Bug(
        "leader-copy-over-when-one-rank-says-so",
        LEADER,
        "            entry.missing.discard(rank)\n            entry.copy_ns",
        "            entry.missing.clear()\n            entry.copy_ns",
        (
            OF_BACKEND + "test_a_copy_is_over_when_every_rank_says_so",
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
        (OF_BACKEND + "test_a_copy_is_over_when_every_rank_says_so",),
    ),
    Bug(
        "leader-dead-while-copies-run",
        LEADER,
        "if self._death is not None and not self._running and not over:",
        "if self._death is not None and not over:",
        (OF_BACKEND + "test_a_dead_rank_ends_the_backend_once_nothing_moves_any_more",),
    ),
    Bug(
        "leader-launches-for-a-dead-rank",
        LEADER,
        "                return  # it stays in flight until",
        "                pass  # it stays in flight until",
        (OF_BACKEND + "test_a_dead_rank_ends_the_backend_once_nothing_moves_any_more",),
    ),
    Bug(
        "leader-unconfirmed-copy-has-arrived",
        LEADER,
        "e.error or (why if e.missing else None)",
        "e.error",
        (OF_BACKEND + "test_closing_reports_what_ranks_had_not_said_when_their_group_is_over",),
    ),
    Bug(
        "leader-closes-while-others-copy",
        LEADER,
        "if late and not self._left:",
        "if late and self._death is not None:",
        (OF_BACKEND + "test_nothing_is_closed_while_other_ranks_copy",),
    ),
    Bug(
        "leader-dies-before-the-copies-of-others-are-over",
        LEADER,
        "            self.died(0, str(death))\n\n    def completions",
        "            raise BackendDied(str(death)) from death\n\n    def completions",
        (OF_BACKEND + "test_a_backend_that_dies_when_a_copy_begins_frees_no_page_of_others",),
    ),
    Bug(
        "leader-copies-by-itself",
        LEADER,
        "cache.transfers.backend is not backend",
        "backend is None",
        (OF_LEADER + "test_a_leader_must_copy_by_the_groups_backend",),
    ),
    Bug(
        "leader-ready-while-it-is-revoked",
        LEADER,
        "        if lease.revoked:\n            return GONE\n        return PENDING",
        "        if lease.revoked and copying:\n            return GONE\n        return PENDING",
        (OF_MINIMUM + "test_a_lease_that_is_revoked_meanwhile_is_not_ready",),
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
        "        short += on_gpu - sum(busy)  # the idle ones that match are no room\n",
        "",
        (LOOK + "test_what_is_seen_is_what_is_admitted",),
    ),
    Bug(
        "look-takes-what-others-hold-for-room",
        ADMISSION,
        "short = self.short + sum(self.busy[kept:])",
        "short = self.short",
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
        "shorten-knows-no-ids",
        STORING,
        '            raw = b"".join(self._tree.page_content(page)[0] for page in gone)\n',
        "",
        (LOOK + "test_nothing_of_a_prompt_is_asked_for_again",),
    ),
    Bug(
        "shorten-goes-on-behind-what-it-gave-back",
        STORING,
        "        lease.path = None if before is None else self.page_id(before)\n",
        "",
        (LOOK + "test_a_lease_that_is_shortened_is_one_that_took_no_more",),
    ),
    Bug(
        "shorten-forgets-what-was-loaded",
        STORING,
        "lease.loaded_len = max(0, lease.taken_len - found_len)",
        "lease.loaded_len = 0",
        (LOOK + "test_pages_that_were_loaded_are_counted_while_they_are_kept",),
    ),
    Bug(
        "shorten-takes-what-others-hold-for-room",
        ADMISSION,
        "sum(self._ledger.holders(page) == 1 for page in gone)",
        "len(gone)",
        (LOOK + "test_a_lease_without_room_to_be_shortened_stays_as_it_is",),
    ),
    Bug(
        "shorten-does-not-wait-for-its-room",
        ADMISSION,
        "self._traffic.copies.wait(lease, copy)\n        self._counting",
        "pass\n        self._counting",
        (LOOK + "test_room_for_a_shortened_lease_may_have_to_be_waited_for",),
    ),
    Bug(
        "counting-keeps-what-was-given-back",
        COUNTING,
        "        self._matched_tokens -= taken_len - lease.taken_len\n",
        "",
        (LOOK + "test_a_lease_that_is_shortened_is_one_that_took_no_more",),
    ),
    Bug(
        "counting-keeps-what-was-loaded-and-given-back",
        COUNTING,
        "        self._matched_host_tokens -= loaded_len - lease.loaded_len\n",
        "",
        (LOOK + "test_pages_that_were_loaded_are_counted_while_they_are_kept",),
    ),
    Bug(
        "misses-capped-has-no-name",
        MISSES,
        "causes[Cause.CAPPED] += looked.capped",
        "causes[Cause.NO_IDENTITY] += looked.capped",
        (LOOK + "test_what_was_not_to_be_taken_is_a_cause_of_its_own",),
    ),
)
