"""Planted bugs in the bench harness: statistics, comparisons, the load generator, what cases say of their runs.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

SAMPLES, COMPARE = "kvkeep/benching/samples.py", "kvkeep/benching/compare.py"
RESULTS, COMMAND, CASES = (f"kvkeep/benching/{name}.py" for name in ("results", "command", "cases"))
LOAD, FIGURES = "bench/_load.py", "bench/_agent_figures.py"

SAMPLE_TESTS = "tests/bench/test_samples.py::"
COMPARE_TESTS = "tests/bench/test_compare.py::"
COMMAND_TESTS = "tests/bench/test_command.py::"
LOAD_TESTS = "tests/bench/test_load.py::"
AGENT_TESTS = "tests/bench/test_agent.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "bench-bootstrap-keeps-every-round",
        SAMPLES,
        "    chosen = rng.integers(0, len(groups), (draws, len(groups), 1))\n",
        "    chosen = np.tile(np.arange(len(groups))[:, None], (draws, 1, 1))\n",
        (
            SAMPLE_TESTS + "test_an_interval_holds_the_true_median_as_often_as_it_says",
            SAMPLE_TESTS + "test_rounds_count_and_not_only_samples",
        ),
    ),
    Bug(
        "bench-bootstrap-without-a-seed",
        SAMPLES,
        "    rng, size = np.random.default_rng(seed), _size(groups)\n",
        "    rng, size = np.random.default_rng(), _size(groups)\n",
        (SAMPLE_TESTS + "test_equal_samples_have_equal_intervals",),
    ),
    Bug(
        "bench-interval-without-its-tails",
        SAMPLES,
        "    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()\n",
        "    low, high = np.quantile(found, [LEVEL / 2, 1 - LEVEL / 2]).tolist()\n",
        (
            SAMPLE_TESTS + "test_an_interval_holds_the_true_median_as_often_as_it_says",
            SAMPLE_TESTS + "test_two_runs_of_the_same_overlap_19_times_in_20",
        ),
    ),
    Bug(
        "bench-ratio-draws-its-sides-apart",
        SAMPLES,
        "    tops, bottoms = (np.median(_drawn(side, draws, seed), axis=1) for side in (above, below))\n",
        "    tops, bottoms = (np.median(_drawn(side, draws, id(side)), axis=1) for side in (above, below))\n",
        (SAMPLE_TESTS + "test_ratio_is_drawn_in_pairs",),
    ),
    Bug(
        "bench-quantile-rounds-its-rank-down",
        SAMPLES,
        "    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]\n",
        "    return ordered[max(math.floor(share * len(ordered)) - 1, 0)]\n",
        (SAMPLE_TESTS + "test_spread_is_that_of_the_quartiles",),
    ),
    Bug(
        "bench-median-compared-with-an-interval",
        COMPARE,
        "    return int(now[0] > before[1]) - int(now[1] < before[0])\n",
        "    return int(now[0] > before[0]) - int(now[1] < before[1])\n",
        (COMPARE_TESTS + "test_a_difference_counts_only_beyond_both_intervals",),
    ),
    Bug(
        "bench-slow-machine-is-our-fault",
        COMPARE,
        "    if at_its_speed != at_ours or not at_ours:\n",
        "    if not at_its_speed:\n",
        (COMPARE_TESTS + "test_a_slower_machine_makes_nothing_worse",),
    ),
    Bug(
        "bench-more-time-is-better",
        COMPARE,
        '    return Verdict.BETTER if (at_ours > 0) == (better == "higher") else Verdict.WORSE\n',
        "    return Verdict.BETTER if at_ours > 0 else Verdict.WORSE\n",
        (COMPARE_TESTS + "test_a_difference_counts_only_beyond_both_intervals",),
    ),
    Bug(
        "bench-reads-results-of-any-version",
        RESULTS,
        '    if series(found["version"]) != series(__version__):\n',
        '    if series(found["version"]) == "":\n',
        (COMPARE_TESTS + "test_a_file_that_cannot_be_used_is_named_and_skipped",),
    ),
    Bug(
        "bench-all-stops-nowhere-for-what-is-missing",
        CASES,
        '    if reason is None and hasattr(case, "missing"):\n',
        '    if reason is not None and hasattr(case, "missing"):\n',
        (COMMAND_TESTS + "test_all_runs_what_can_run_and_says_the_rest",),
    ),
    Bug(
        "bench-smoke-run-is-judged",
        COMMAND,
        "        return self.results is not None and (self.code == 0 or (smoke and self.code == 1))\n",
        "        return self.results is not None and self.code == 0\n",
        (COMMAND_TESTS + "test_a_smoke_run_of_all_is_fine_when_everything_ran",),
    ),
    Bug(
        "bench-case-that-fails-is-fine",
        COMMAND,
        "        return self.results is not None and (self.code == 0 or (smoke and self.code == 1))\n",
        "        return self.code == 0 or (smoke and self.code == 1)\n",
        (COMMAND_TESTS + "test_a_smoke_run_of_all_is_fine_when_everything_ran",),
    ),
    Bug(
        "load-latency-counts-from-sending",
        LOAD,
        "        return self.tokens_s[0] - self.due_s\n",
        "        return self.tokens_s[0] - (self.sent_s or 0.0)\n",
        (LOAD_TESTS + "test_a_pause_is_seen_by_all_who_were_due_meanwhile",),
    ),
    Bug(
        "load-end-counts-from-sending",
        LOAD,
        "        return self.tokens_s[-1] - self.due_s\n",
        "        return self.tokens_s[-1] - (self.sent_s or 0.0)\n",
        (LOAD_TESTS + "test_a_pause_is_seen_by_all_who_were_due_meanwhile",),
    ),
    Bug(
        "load-due-when-the-one-before-has-ended",
        LOAD,
        "out[coming].due_s <= self.now_s:",
        "out[coming].due_s <= self.now_s and all(one.whole for one in out[:coming]):",
        (LOAD_TESTS + "test_requests_are_handed_over_when_they_are_due_however_many_wait",),
    ),
    Bug(
        "load-rate-of-one-gap-less",
        LOAD,
        "    stretch = (count - 1) / per_s / length if length else 0.0\n",
        "    stretch = count / per_s / length if length else 0.0\n",
        (
            LOAD_TESTS + "test_poisson_arrivals_have_their_rate_and_no_memory",
            LOAD_TESTS + "test_recorded_arrivals_keep_their_shape",
        ),
    ),
    Bug(
        "load-arrivals-evenly-spaced",
        LOAD,
        "    gaps = np.random.default_rng(seed).exponential(1.0, count)\n",
        "    gaps = np.random.default_rng(seed).uniform(0.9, 1.1, count)\n",
        (LOAD_TESTS + "test_poisson_arrivals_have_their_rate_and_no_memory",),
    ),
    Bug(
        "goodput-counts-what-never-ended",
        LOAD,
        "        return served.whole and served.ttft_s <= self.ttft_s and served.itl_mean_s <= self.itl_s\n",
        "        return served.ttft_s <= self.ttft_s and served.itl_mean_s <= self.itl_s\n",
        (LOAD_TESTS + "test_only_what_the_slo_asks_for_counts",),
    ),
    Bug(
        "goodput-forgets-the-tokens-after-the-first",
        LOAD,
        "        return served.whole and served.ttft_s <= self.ttft_s and served.itl_mean_s <= self.itl_s\n",
        "        return served.whole and served.ttft_s <= self.ttft_s\n",
        (LOAD_TESTS + "test_only_what_the_slo_asks_for_counts",),
    ),
    Bug(
        "goodput-ratio-at-each-side-its-worst-rate",
        FIGURES,
        "best = {name: max(r * m[c].mean()",
        "best = {name: min(r * m[c].mean()",
        (AGENT_TESTS + "test_goodput_is_compared_each_at_its_best_rate",),
    ),
    Bug(
        "overhead-against-one-engine-only",
        "bench/overhead.py",
        "math.sqrt(seconds(one) * seconds(other))",
        "math.sqrt(seconds(one) * seconds(one))",
        (AGENT_TESTS + "test_overhead_is_held_against_both_engines_without_a_cache",),
    ),
    Bug(
        "sessions-of-their-own-share-their-beginning",
        "bench/_sessions.py",
        'salt=salts[session] if salts else b"")',
        'salt=salts[0] if salts else b"")',
        (AGENT_TESTS + "test_sessions_of_their_own_match_only_themselves",),
    ),
    Bug(
        "soak-leaks-cancel-out",
        "bench/soak.py",
        "sum(sum(map(abs, stretch.held.values())) for stretch in stretches)",
        "max(0, sum(sum(stretch.held.values()) for stretch in stretches))",
        ("tests/bench/test_soak.py::test_what_grows_or_is_held_is_told",),
    ),
    Bug(
        "tables-are-never-behind",
        "tools/bench_tables.py",
        "    return int(options.check and behind > 0)\n",
        "    return int(options.check and behind < 0)\n",
        ("tests/bench/test_tables.py::test_documents_behind_the_results_are_found_and_renewed",),
    ),
)
