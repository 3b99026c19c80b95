"""Planted bugs in the hit curves, in the running estimate of other sizes, and in observe mode.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

STACK = "kvkeep/stack.py"
GHOSTS = "kvkeep/ghosts.py"
OBSERVE = "kvkeep/observe.py"

STACK_TESTS = "tests/sizing/test_stack.py::"
COMMAND_TESTS = "tests/sizing/test_command.py::"
GHOST_TESTS = "tests/core/test_ghosts.py::"
OBSERVE_TESTS = "tests/core/test_observe.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "stack-forgets-the-chain-before",
        STACK,
        "self._hits[later + first : later + stop] += 1",
        "self._hits[later : later + stop - first] += 1",
        (STACK_TESTS + "test_every_size_hits_what_a_pool_of_that_size_hits",),
    ),
    Bug(
        "stack-weights-are-ones",
        STACK,
        "one = 1 if weight_of is None else weight_of[page]",
        "one = 1",
        (STACK_TESTS + "test_weights_are_distances",),
    ),
    Bug(
        "ghosts-believe-a-run-that-lost-its-end",
        GHOSTS,
        "return self.start == run.start and at < len(run.names) and run.names[at] == self.last",
        "return self.start == run.start and at < len(run.names)",
        (GHOST_TESTS + "test_a_path_is_looked_at_as_it_is_now",),
    ),
    Bug(
        "ghosts-miss-that-a-run-was-split",
        GHOSTS,
        "return self.start == run.start and at < len(run.names) and run.names[at] == self.last",
        "return at < len(run.names) and run.names[at] == self.last",
        (GHOST_TESTS + "test_a_path_is_looked_at_as_it_is_now",),
    ),
    Bug(
        "ghosts-remember-every-run",
        GHOSTS,
        "if len(all_looked) > RUNS_MAX:",
        "if len(all_looked) < 0:",
        (GHOST_TESTS + "test_memory_is_bounded",),
    ),
    Bug(
        "stack-loses-count-when-renumbered",
        STACK,
        "self._uses, self.pages = len(uses), 0",
        "self._uses = len(uses)",
        (STACK_TESTS + "test_uses_may_be_renumbered_at_any_time",),
    ),
    Bug(
        "size-knee-is-where-a-curve-is-flat",
        "kvkeep/sizing/curve.py",
        "enough = KNEE_SHARE * max(shares)",
        "enough = KNEE_SHARE * min(shares)",
        (STACK_TESTS + "test_a_knee_is_where_more_buys_little",),
    ),
    Bug(
        "size-takes-a-windowed-model-for-full-attention",
        "kvkeep/sizing/model.py",
        "    if kinds:",
        "    if not kinds:",
        (COMMAND_TESTS + "test_a_model_that_is_not_understood_is_refused",),
    ),
    Bug(
        "ghosts-double-the-wrong-tier",
        GHOSTS,
        'out[f"host x{times:g}"] = gpu_pages + int(times * host_pages)',
        'out[f"host x{times:g}"] = int(times * gpu_pages) + host_pages',
        (GHOST_TESTS + "test_sizes_of_two_tiers",),
    ),
    Bug(
        "ghosts-never-forget",
        GHOSTS,
        "self._stack.pages > self._largest + self._largest // 4",
        "self._stack.pages < 0",
        (GHOST_TESTS + "test_memory_is_bounded",),
    ),
    Bug(
        "observe-keeps-more-than-its-size",
        OBSERVE,
        "ledger.drop(tree.evict(ledger.idle - self._capacity))",
        "ledger.drop(tree.evict(0))",
        (OBSERVE_TESTS + "test_it_forgets_what_a_pool_would_have_lost",),
    ),
    Bug(
        "observe-takes-every-replica-for-this-one",
        OBSERVE,
        "here = (computed_by >> np.uint64(replica)) & np.uint64(1)",
        "here = computed_by > np.uint64(0)",
        (OBSERVE_TESTS + "test_replicas_that_compute_the_same_pages",),
    ),
)
