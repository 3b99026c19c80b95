"""Planted bugs in the telemetry of the machine.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

ENERGY = "kvkeep/telemetry/energy.py"
HOST = "kvkeep/telemetry/host.py"
MACHINE = "kvkeep/telemetry/machine.py"
NVML = "kvkeep/telemetry/nvml.py"
RESULT = "kvkeep/telemetry/result.py"
SAMPLING = "kvkeep/telemetry/sampling.py"
SERIES = "kvkeep/telemetry/series.py"
TRACK = "kvkeep/telemetry/track.py"

ENERGY_TESTS = "tests/telemetry/test_energy.py::"
HOST_TESTS = "tests/telemetry/test_host.py::"
MACHINE_TESTS = "tests/telemetry/test_machine.py::"
NVML_TESTS = "tests/telemetry/test_nvml.py::"
SAMPLING_TESTS = "tests/telemetry/test_sampling.py::"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------ when counters are read
    Bug(
        "telemetry-samples-faster-than-a-counter-changes",
        TRACK,
        "return max(self._interval_s, self.update_s or 0.0, window_s,",
        "return max(self._interval_s, window_s,",
        (SAMPLING_TESTS + "test_counter_is_sampled_no_faster_than_it_changes",),
    ),
    Bug(
        "telemetry-takes-any-read-for-a-change",
        TRACK,
        "if self._seen is not None and answer != self._seen:",
        "if self._seen is not None:",
        (SAMPLING_TESTS + "test_pace_that_does_not_show_is_not_told",),
    ),
    Bug(
        "telemetry-waits-in-windows-all-the-time",
        TRACK,
        "window_s = self.counter.window_s / WINDOW_SHARE_MAX",
        "window_s = self.counter.window_s",
        (SAMPLING_TESTS + "test_windows_take_a_tenth_of_the_time_at_most",),
    ),
    Bug(
        "telemetry-reads-dear-counters-as-often-as-others",
        TRACK,
        "window_s, self.cpu_s / CPU_SHARE_MAX)",
        "window_s)",
        (SAMPLING_TESTS + "test_reads_that_cost_much_are_seldom",),
    ),
    Bug(
        "telemetry-wakes-for-each-counter",
        SAMPLING,
        "max(0.0, due_s + GATHER_S - self._clock())",
        "max(0.0, due_s - self._clock())",
        (SAMPLING_TESTS + "test_what_is_due_together_is_read_together",),
    ),
    Bug(
        "telemetry-thread-dies-silently",
        SAMPLING,
        """            self._failed = error
        finally""",
        """            del error
        finally""",
        (SAMPLING_TESTS + "test_error_of_ours_in_the_thread_is_raised_by_stop",),
    ),
    Bug(
        "telemetry-leaves-its-thread",
        SAMPLING,
        "        self._stopping.set()\n",
        "",
        (SAMPLING_TESTS + "test_no_thread_is_left_and_both_ends_are_sampled",),
        may_hang=True,
    ),
    Bug(
        "telemetry-has-no-last-sample",
        SAMPLING,
        """        self._ends()
        if self._failed""",
        """        if self._failed""",
        (SAMPLING_TESTS + "test_no_thread_is_left_and_both_ends_are_sampled",),
    ),
    # ------------------------------------------------------------------ what does not answer
    Bug(
        "telemetry-asks-a-device-that-is-gone",
        NVML,
        "    Code.GPU_IS_LOST,\n",
        "",
        (MACHINE_TESTS + "test_device_that_vanishes_in_the_middle",),
    ),
    Bug(
        "telemetry-lost-device-takes-the-host-along",
        SAMPLING,
        "if one.counter.source == source:",
        "if one.ended is None:",
        (SAMPLING_TESTS + "test_source_that_is_lost_takes_its_counters_along_and_no_others",),
    ),
    Bug(
        "telemetry-fills-gaps-with-zeros",
        TRACK,
        "answer or [None] * len(self.counter.fields)",
        "answer or [0.0] * len(self.counter.fields)",
        (SAMPLING_TESTS + "test_answer_that_does_not_come_is_a_gap",),
    ),
    Bug(
        "telemetry-never-gives-a-counter-up",
        TRACK,
        "if self._failed_in_a_row == FAILURES_MAX:",
        "if self._failed_in_a_row < 0:",
        (SAMPLING_TESTS + "test_counter_that_fails_for_ever_is_given_up",),
    ),
    Bug(
        "telemetry-has-no-older-name-for-an-old-driver",
        NVML,
        "if error.value == Code.FUNCTION_NOT_FOUND:",
        "if error.value == Code.NOT_SUPPORTED:",
        (NVML_TESTS + "test_older_names_of_functions_are_tried",),
    ),
    Bug(
        "telemetry-leaves-the-library-open",
        NVML,
        """        _shut(nvml)
        raise""",
        """        raise""",
        (NVML_TESTS + "test_machine_without_a_device_is_told_so_in_one_line",),
    ),
    # ------------------------------------------------------------------ numbers
    Bug(
        "telemetry-millijoules-for-joules",
        NVML,
        'TotalEnergyConsumption") / 1000,)  # mJ',
        'TotalEnergyConsumption") / 1,)  # mJ',
        (NVML_TESTS + "test_numbers_are_in_the_units_that_their_names_say",),
    ),
    Bug(
        "telemetry-received-for-sent",
        NVML,
        "TX_BYTES, RX_BYTES = 0, 1",
        "TX_BYTES, RX_BYTES = 1, 0",
        (
            NVML_TESTS + "test_each_clock_and_direction_is_asked_for_by_its_number",
            MACHINE_TESTS + "test_link_is_set_beside_what_our_copies_moved",
        ),
    ),
    Bug(
        "telemetry-counts-everybody-for-this-process",
        NVML,
        "listed.pop(self._pid, None)",
        "listed.pop(self._pid, next(iter(listed.values()), None))",
        (NVML_TESTS + "test_memory_of_processes",),
    ),
    Bug(
        "telemetry-power-is-added-up-over-gaps",
        SERIES,
        "        self._before, self._before_s = answer, time_s\n",
        "        self._before, self._before_s = [now or was for now, was in zip(answer, self._before)], time_s\n",
        (SAMPLING_TESTS + "test_sums_are_those_of_all_samples",),
    ),
    Bug(
        "telemetry-memory-grows-with-the-run",
        SERIES,
        "            self._stride *= 2\n",
        "            self._stride *= 1\n",
        (SAMPLING_TESTS + "test_memory_is_bounded_and_the_whole_run_stays_in_sight",),
    ),
    Bug(
        "telemetry-reset-of-the-energy-counter-is-energy",
        ENERGY,
        "if after.counter_falls != before.counter_falls else None,",
        "if after.counter_falls < before.counter_falls else None,",
        (
            ENERGY_TESTS + "test_power_stands_in_where_the_counter_cannot_tell",
            MACHINE_TESTS + "test_energy_counter_that_starts_again_is_no_energy",
        ),
    ),
    Bug(
        "telemetry-tells-energy-of-less-than-an-update",
        ENERGY,
        "seconds < UPDATES_MIN * update_s:",
        "seconds < 0 * update_s:",
        (MACHINE_TESTS + "test_span_of_few_updates_is_not_told",),
    ),
    Bug(
        "telemetry-joules-by-token-for-thousands",
        ENERGY,
        "energy.joules / prompt_tokens * 1000",
        "energy.joules / prompt_tokens",
        (ENERGY_TESTS + "test_joules_of_a_thousand_prompt_tokens",),
    ),
    Bug(
        "telemetry-energy-of-the-last-sample-not-of-now",
        MACHINE,
        "if self._sampler.read_now(name):",
        "if track.ended is None:",
        (MACHINE_TESTS + "test_reading_is_of_the_moment",),
    ),
    Bug(
        "telemetry-only-one-cause-of-our-copies",
        MACHINE,
        "moved[direction] += copied.nbytes",
        "moved[direction] = copied.nbytes",
        (MACHINE_TESTS + "test_link_is_set_beside_what_our_copies_moved",),
    ),
    Bug(
        "telemetry-throttling-without-its-share",
        RESULT,
        "sum(bool(value & bit) for value in seen)",
        "sum(value & bit for value in seen)",
        (MACHINE_TESTS + "test_throttling_is_told_by_reason",),
    ),
    # ------------------------------------------------------------------ the host's side
    Bug(
        "telemetry-children-of-the-main-thread-only",
        HOST,
        "        for thread in threads:\n",
        "        for thread in threads[:1]:\n",
        (HOST_TESTS + "test_numbers_are_taken_from_the_right_places",),
    ),
    Bug(
        "telemetry-grandchildren-are-forgotten",
        HOST,
        "            found += self._direct(child)\n",
        "            self._direct(child)\n",
        (HOST_TESTS + "test_numbers_are_taken_from_the_right_places",),
    ),
    Bug(
        "telemetry-command-names-move-the-fields",
        HOST,
        'text.rpartition(")")[2].split()',
        'text.partition(")")[2].split()',
        (HOST_TESTS + "test_numbers_are_taken_from_the_right_places",),
    ),
    Bug(
        "telemetry-child-counts-twice-when-it-ends",
        HOST,
        "if before == _usage(resource.RUSAGE_CHILDREN):",
        "if before:",
        (HOST_TESTS + "test_child_that_ends_meanwhile_is_not_counted_twice",),
    ),
    Bug(
        "telemetry-child-that-may-not-be-seen-is-zero",
        HOST,
        "if error.errno not in ENDED:",
        "if not error.errno:",
        (HOST_TESTS + "test_child_that_may_not_be_looked_into_is_no_zero",),
    ),
)
