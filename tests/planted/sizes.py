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
        "at = slice(later + first, later + stop) if before is None else later + before[first:stop]",
        "at = slice(later, later + stop - first) if before is None else later + before[first:stop]",
        (STACK_TESTS + "test_every_size_hits_what_a_pool_of_that_size_hits",),
    ),
    Bug(
        "stack-weights-are-ones",
        STACK,
        "before = None if self._weight is None else np.concatenate([[0], np.cumsum(self._weight[pages])])",
        "before = None",
        (STACK_TESTS + "test_weights_are_distances",),
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
