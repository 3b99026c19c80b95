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
        "        self._new_last.append(group * (BINS + 1) + last)",
        "        self._new_last.append(group * (BINS + 1) + first)",
        (CASES + "test_chains_that_never_come_back_cost_more_the_longer_they_wait",),
    ),
    Bug(
        "rhythm-every-fork-goes-on",
        USES,
        "if old.tail - depth <= depth - old.start:",
        "if depth > old.start:",
        (CASES + "test_a_fork_makes_what_is_shared_nobodys_own",),
    ),
    Bug(
        "rhythm-forgets-what-has-left",
        USES,
        "            self._remembered[use] = None\n            return True",
        "            self._of_name.pop(use.name)\n            return True",
        (CASES + "test_a_chain_that_was_let_go_of_is_known_when_it_comes_back",),
    ),
    Bug(
        "rhythm-remembers-everything",
        USES,
        "while len(self._remembered) > self._remembered_max:",
        "while len(self._remembered) > 1 << 30:",
        (CASES + "test_memory_of_what_has_left_is_bounded",),
    ),
    Bug(
        "rhythm-discards-what-others-share",
        USES,
        "if use.discarded and (run is None or run.end > use.start):",
        "if use.discarded:",
        (CASES + "test_what_a_discarded_chain_shares_does_not_leave_with_it",),
    ),
    Bug(
        "rhythm-pins-for-ever",
        USES,
        "if now_s < use.leave_s:",
        "if use.leave_s > 0.0:",
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
)
