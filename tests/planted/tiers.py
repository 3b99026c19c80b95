"""Planted bugs in the ledger and page memory.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

LEDGER = "kvkeep/tiers/ledger.py"
TRACING = "kvkeep/tiers/tracing.py"
MEMORY = "kvkeep/tiers/memory.py"

LEDGER_TESTS = "tests/core/test_ledger.py::"
CASES = "tests/core/test_cache_cases.py::"
NAIVE_LEDGER = LEDGER_TESTS + "test_a_ledger_equals_the_naive_one[LedgerMachine]"

BUGS: tuple[Bug, ...] = (
    Bug(
        "ledger-seals-what-is-sealed",
        LEDGER,
        "if self._states[p] != _OPEN or self._words[p] | 6 != 6:",
        "if self._words[p] | 6 != 6:",
        (NAIVE_LEDGER,),
    ),
    Bug(
        "ledger-seals-batch-of-sealed",
        LEDGER,
        "bad = (self._states_np.take(ids) != _OPEN) | (self._words_np.take(ids) | 6 != 6)",
        "bad = self._words_np.take(ids) | 6 != 6",
        (NAIVE_LEDGER,),
    ),
    Bug(
        "ledger-idle-kept-on-retain",
        LEDGER,
        "if words[p] == 1:\n                    self.idle -= 1",
        "if words[p] == 1:\n                    self.idle -= 0",
        (NAIVE_LEDGER,),
    ),
    Bug("ledger-retain-adds-half-a-holder", LEDGER, "found += 2", "found += 1", (NAIVE_LEDGER,)),
    Bug("ledger-releases-the-index", LEDGER, "if words[p] < 2:", "if words[p] < 1:", (NAIVE_LEDGER,)),
    Bug(
        "ledger-releases-batch-below-zero",
        LEDGER,
        "if found.min() < 0:",
        "if found.min() < -2:",
        (LEDGER_TESTS + "test_double_release_is_refused_with_the_story_of_the_page",),
    ),
    Bug(
        "ledger-keeps-twice",
        LEDGER,
        "if not _READY <= self._states[p] <= _LOADING or words[p] & 1 or not words[p]:",
        "if not _READY <= self._states[p] <= _LOADING or not words[p]:",
        (NAIVE_LEDGER,),
    ),
    Bug("ledger-idle-kept-on-drop", LEDGER, "self.idle -= len(freed)", "self.idle -= 0", (NAIVE_LEDGER,)),
    Bug("ledger-recycles-what-is-held", LEDGER, "if words[p] != 1:", "if not words[p] & 1:", (NAIVE_LEDGER,)),
    Bug(
        "ledger-recycle-keeps-generation",
        LEDGER,
        "                generations[p] += 1",
        "                generations[p] += 0",
        (NAIVE_LEDGER, LEDGER_TESTS + "test_a_page_that_changed_hands_has_another_generation"),
    ),
    Bug(
        "ledger-freed-batch-keeps-generation",
        LEDGER,
        """            self._generations_np[ids] += 1
            self._words_np[ids] = order""",
        """            self._generations_np[ids] += 0
            self._words_np[ids] = order""",
        (LEDGER_TESTS + "test_a_page_that_changed_hands_has_another_generation",),
    ),
    Bug(
        "ledger-frees-batch-twice",
        LEDGER,
        "if np.count_nonzero(twice):",
        "if count < 0:",
        (LEDGER_TESTS + "test_no_page_is_freed_twice_even_by_one_batch",),
    ),
    Bug(
        "ledger-idle-tail-off-by-one",
        LEDGER,
        "return count_max - 1 - int((tail != 1).nonzero()[0][-1])",
        "return count_max - int((tail != 1).nonzero()[0][-1])",
        (NAIVE_LEDGER,),
    ),
    Bug("ledger-opens-other-pages-than-it-takes", LEDGER, "del free[-count:]", "del free[:count]", (NAIVE_LEDGER,)),
    Bug(
        "ledger-check-misses-the-idle-count",
        LEDGER,
        '"idle is miscounted": self.idle != int((words[: self.total] == 1).sum()) + slotted,',
        '"idle is miscounted": self.idle > self.total,',
        (LEDGER_TESTS + "test_a_corrupted_ledger_is_found",),
    ),
    Bug(
        "tracing-lets-strangers-release",
        TRACING,
        """            if not self.owners[p][owner]:
                raise""",
        """            if not self.owners[p]:
                raise""",
        (LEDGER_TESTS + "test_a_ledger_equals_the_naive_one[TracingLedgerMachine]",),
    ),
    Bug(
        "tracing-forgets-where",
        TRACING,
        "self._since[p].setdefault(owner, where)",
        "self._since[p].setdefault(owner, str(owner))",
        (LEDGER_TESTS + "test_the_tracing_twin_tells_who_and_where",),
    ),
    Bug(
        "memory-copies-a-position-less",
        MEMORY,
        "self.kv[target, :, :, :count].copy_(self.kv[source, :, :, :count])",
        "self.kv[target, :, :, : count - 1].copy_(self.kv[source, :, :, : count - 1])",
        (CASES + "test_truncate_never_rewrites_a_sealed_page",),
    ),
)
