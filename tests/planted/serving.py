"""Bugs in the bench over real servers and in the environments that it runs in."""

from tests.planted.bug import Bug

JUDGING, WORKLOADS, SERVER = "bench/_vllm_judging.py", "bench/_vllm_workloads.py", "bench/_vllm_server.py"
TESTS, PROCESSES = "tests/bench/test_vllm_serving.py::", "tests/integrations/test_vllm_bench.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "ceiling-matches-a-whole-prompt",
        WORKLOADS,
        "        for name in names[: (len(ask.prompt) - 1) // block_size]:\n",
        "        for name in names[: len(ask.prompt) // block_size]:\n",
        (
            TESTS + "test_ceiling_is_what_a_cache_without_end_would_match",
            TESTS + "test_ceiling_agrees_with_a_cache_that_keeps_every_prompt",
        ),
    ),
    Bug(
        "block-named-without-its-beginning",
        WORKLOADS,
        "        running.update(ids[end - block_size : end].tobytes())\n",
        "        running = hashlib.sha256(ids[end - block_size : end].tobytes())\n",
        (TESTS + "test_block_stands_for_everything_before_it",),
    ),
    Bug(
        "text-explained-by-its-own-match-only",
        JUDGING,
        '            history.update(kept.get(block, b"unknown"))\n',
        "            history.update(block)\n",
        (TESTS + "test_text_that_differs_is_explained_only_by_other_steps",),
    ),
    Bug(
        "other-text-explained-by-nothing",
        JUDGING,
        "            unexplained += not equal and theirs[number] == origins[number]\n",
        "            unexplained += not equal and theirs[number] != origins[number]\n",
        (TESTS + "test_text_that_differs_is_explained_only_by_other_steps",),
    ),
    Bug(
        "times-compared-across-repeats",
        JUDGING,
        'for other in passes.get("ample", ()) if one["repeat"] == other["repeat"]]\n',
        'for other in passes.get("ample", ())[:1]]\n',
        (TESTS + "test_times_are_compared_within_a_repeat",),
    ),
    Bug(
        "memory-of-the-tier-counts-against-vllm",
        JUDGING,
        '        over = (peak - made[0]["tier_gib"] * GIB) / median([one["pss_peak_nbytes"] for one in alone])\n',
        '        over = peak / median([one["pss_peak_nbytes"] for one in alone])\n',
        (TESTS + "test_memory_is_held_against_vllm_of_the_same_space_and_the_tier",),
    ),
    Bug(
        "page-of-the-tier-gone-unseen",
        JUDGING,
        '        away = own["kvkeep_pages_total"] - own["kvkeep_pages_free"] - own["kvkeep_pages_cached"]\n',
        '        away = own["kvkeep_pages_total"] - own["kvkeep_pages_total"]\n',
        (TESTS + "test_all_who_stay_are_served_and_nothing_is_held_afterwards",),
    ),
    Bug(
        "overlay-trusts-half-made-environment",
        "tools/overlay_env.py",
        '"-r", str(listed)]):',
        '"-r", str(listed)]) > 1:',
        ("tests/test_overlay_env.py::test_half_made_environment_is_made_again",),
    ),
    Bug(
        "overlay-ignores-what-is-below",
        "tools/overlay_env.py",
        "        parts += [str(path.resolve()), str(CHECKOUT), *(stamp.read_text() for stamp in stamps)]\n",
        "        parts += [str(path.resolve()), str(CHECKOUT)]\n",
        ("tests/test_overlay_env.py::test_environment_is_made_again_only_where_its_contents_change",),
    ),
    Bug(
        "memory-without-the-children",
        SERVER,
        "            seen |= {process.pid: process for process in (parent, *parent.children(recursive=True))}\n",
        "            seen |= {process.pid: process for process in (parent, *parent.children())}\n",
        (PROCESSES + "test_memory_and_time_of_a_process_include_its_children",),
        needs="vllm",
    ),
    Bug(
        "log-looked-at-beyond-the-stop",
        SERVER,
        "        self._log_end = self.log.stat().st_size\n",
        "        self._log_end = None\n",
        (PROCESSES + "test_log_is_looked_at_up_to_the_stop",),
        needs="vllm",
    ),
    Bug(
        "file-of-another-pass-taken",
        "bench/_vllm_passes.py",
        "        return found if all(found.get(name) == value for name, value in key.items()) else None\n",
        "        return found\n",
        (PROCESSES + "test_pass_that_is_there_is_not_run_again",),
        needs="vllm",
    ),
)
