"""Planted bugs in the rhythm order: what it learns, what it lets go of, what it remembers.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

FORECAST = "kvkeep/index/forecast.py"
USES = "kvkeep/index/uses.py"
ORDER = "kvkeep/index/rhythm.py"
STORING = "kvkeep/storing.py"

CASES = "tests/core/test_rhythm.py::"
TREE = "tests/core/test_tree.py::test_a_tree_equals_the_naive_index[RhythmTreeMachine]"

BUGS: tuple[Bug, ...] = (
    Bug(
        "rhythm-horizons-joined-the-wrong-way",
        FORECAST,
        "while stack and stack[-1][3] <= cost:",
        "while stack and stack[-1][3] >= cost:",
        (CASES + "test_a_cost_is_the_least_over_all_horizons",),
    ),
    Bug(
        "rhythm-waits-are-not-counted",
        FORECAST,
        "        self._waits -= np.bincount(row + last, minlength=_PLACES)",
        "        self._waits -= np.bincount(row + first, minlength=_PLACES)",
        (CASES + "test_chains_that_never_come_back_cost_more_the_longer_they_wait",),
    ),
    Bug(
        "rhythm-every-fork-goes-on",
        USES,
        "if old.tail - shared <= shared - old.start:",
        "if shared > old.start:",
        (CASES + "test_a_fork_makes_what_is_shared_nobodys_own",),
    ),
    Bug(
        "rhythm-forgets-what-has-left",
        USES,
        "        self._of_name[use.name] = row",
        "        self._of_name.pop(use.name)",
        (CASES + "test_a_chain_that_was_let_go_of_is_known_when_it_comes_back",),
    ),
    Bug(
        "rhythm-remembers-everything",
        USES,
        "while self._remembered > self._remembered_max or",
        "while self._remembered > 1 << 30 or",
        (CASES + "test_memory_of_what_has_left_is_bounded",),
    ),
    Bug(
        "rhythm-discards-what-others-share",
        USES,
        "if said.discarded and (run is None or run.end > use.start):",
        "if said.discarded:",
        (CASES + "test_what_a_discarded_chain_shares_does_not_leave_with_it",),
    ),
    Bug(
        "rhythm-pins-for-ever",
        USES,
        "if now_s < said.until_s:",
        "if said.until_s > 0.0:",
        (CASES + "test_what_is_pinned_leaves_last_but_leaves",),
    ),
    Bug(
        "rhythm-late-hint-is-lost",
        STORING,
        "if self._uses is not None and lease.use is not None:",
        "if self._uses is not None and lease.use is None:",
        (CASES + "test_what_is_discarded_leaves_first", CASES + "test_what_is_pinned_leaves_last_but_leaves"),
    ),
    Bug(
        "rhythm-abort-takes-over-a-use",
        STORING,
        "if stamp in uses.of_stamp:",
        "if stamp == NO_STAMP:",
        (CASES + "test_an_aborted_request_that_stored_nothing_changes_nothing",),
    ),
    Bug(
        "rhythm-never-takes-back-what-it-dropped",
        ORDER,
        "        runs[at].queued &= ~self._bit",
        "        runs[at].queued |= self._bit",
        (TREE,),
    ),
    Bug(
        "rhythm-goes-on-with-another-use",
        ORDER,
        "            if self._stamp(run) == stamp:\n                return run",
        "            if self._stamp(run) != NO_TAIL:\n                return run",
        (CASES + "test_a_choice_ends_where_another_use_begins",),
    ),
    Bug(
        "rhythm-waits-are-counted-again",
        FORECAST,
        'chains["paused"][some] = last = np.maximum(first, last)',
        "last = np.maximum(first, last)",
        (CASES + "test_waits_are_counted_once_however_often_they_are_told_of",),
    ),
    Bug(
        "rhythm-pauses-by-the-scale",
        USES,
        "(log2(age) - PAUSE_LOW) * PAUSE_PER_OCTAVE",
        "(log2(ratio) - PAUSE_LOW) * PAUSE_PER_OCTAVE",
        (CASES + "test_in_a_pause_the_age_alone_counts",),
    ),
    Bug(
        "rhythm-late-hint-hits-another-chain",
        USES,
        "case _ if use.row == NO_ROW:",
        "case _ if use.row is None:",
        (CASES + "test_a_hint_for_what_has_left_changes_nothing",),
    ),
    Bug(
        "rhythm-worth-is-ignored",
        USES,
        "self._cost(use, now_s) / said.worth",
        "self._cost(use, now_s)",
        (CASES + "test_of_two_uses_alike_what_saves_less_leaves_first",),
    ),
    Bug(
        "rhythm-pauses-that-get-cheaper",
        FORECAST,
        "np.maximum.accumulate(cost_row(",
        "np.array(cost_row(",
        (CASES + "test_in_a_pause_the_age_alone_counts",),
    ),
)
