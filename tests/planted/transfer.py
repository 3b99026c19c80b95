"""Planted bugs in the transfers and the pool in host memory.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

MANAGER = "kvkeep/transfer/manager.py"
PLAN = "kvkeep/transfer/plan.py"
PIECES = "kvkeep/transfer/pieces.py"
HOST = "kvkeep/transfer/host.py"
SIMULATED = "kvkeep/transfer/simulated.py"
CUDA = "kvkeep/transfer/cuda.py"
WAYS = "kvkeep/transfer/cuda_ways.py"
KERNEL = "kvkeep/transfer/kernel.py"
POOL = "kvkeep/tiers/cpu_pool.py"
PINNING = "kvkeep/tiers/pinning.py"
LIMIT = "kvkeep/tiers/memory_limit.py"
MEMORY = "kvkeep/tiers/memory.py"

MANAGER_TESTS = "tests/transfer/test_manager.py::"
NAIVE = "tests/transfer/test_manager_properties.py::TestManager"
CONFORMANCE = "tests/transfer/test_conformance.py::"
PLAN_TESTS = "tests/transfer/test_plan.py::"
HOST_TESTS = "tests/transfer/test_host.py::"
SIMULATED_TESTS = "tests/transfer/test_simulated.py::"
CUDA_TESTS = "tests/transfer/test_cuda.py::"
KERNEL_TESTS = "tests/transfer/test_kernel.py::"
POOL_TESTS = "tests/transfer/test_cpu_pool.py::"

WAITS = CONFORMANCE + "test_copy_waits_for_its_event"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------ a missing barrier
    Bug(
        "host-copy-ignores-its-event",
        HOST,
        "ready = job.after is NO_WAIT or job.after.query()",
        "ready = True",
        (WAITS,),
    ),
    Bug(
        "simulated-copy-ignores-its-event",
        SIMULATED,
        "return running.begun or after is NO_WAIT or after.query()",
        "return True",
        (WAITS,),
    ),
    Bug(
        "cuda-copy-ignores-its-event",
        CUDA,
        "self._api.stream_wait(stream, _handle(job.after))",
        "_handle(job.after)",
        (WAITS,),
    ),
    Bug(
        "cuda-event-never-recorded-is-taken",
        CUDA,
        "if not handle:",
        "if handle is None:",
        (CUDA_TESTS + "test_event_that_was_never_recorded_is_a_bug",),
    ),
    Bug(
        "manager-takes-no-after-for-nothing-to-wait-for",
        MANAGER,
        "if after is None:",
        "if after == ():",
        (MANAGER_TESTS + "test_after_has_no_default",),
    ),
    Bug(
        "manager-passes-another-job-on",
        MANAGER,
        "self._backend.launch(job)",
        "self._backend.launch(Job(job.number, job.plan, job.after, job.nbytes, job.due))",
        (MANAGER_TESTS + "test_copy_begins_in_poll_and_lands_in_poll",),
    ),
    Bug(
        "simulated-misses-a-missing-barrier",
        SIMULATED,
        "            both = reads.meets(write.touched) | writes.meets(write.touched)\n            if both and",
        "            both = reads.meets(write.touched) & writes.meets(write.touched)\n            if both and",
        (SIMULATED_TESTS + "test_store_of_a_page_that_is_being_written_is_seen",),
    ),
    Bug(
        "simulated-misses-jobs-that-overlap",
        SIMULATED,
        "both = writes.meets(others_reads) | writes.meets(others_writes) | reads.meets(others_writes)",
        "both = writes.meets(others_writes)",
        (SIMULATED_TESTS + "test_overlapping_jobs_are_seen",),
    ),
    Bug(
        "simulated-is-kind-to-early-readers",
        SIMULATED,
        "target[list(job.plan.targets)] = POISON_BYTE",
        "assert POISON_BYTE",
        (SIMULATED_TESTS + "test_targets_hold_garbage_until_the_last_moment",),
    ),
    # ------------------------------------------------------------------ completions
    Bug(
        "manager-filters-late-completions",
        MANAGER,
        "done += [self._settle(outcome) for outcome in self._backend.completions()]",
        "done += [self._settle(outcome) for outcome in self._backend.completions() if not outcome.job.overdue]",
        (MANAGER_TESTS + "test_overdue_copy_is_said_once_and_stays_owned",),
    ),
    Bug(
        "manager-loses-completions-at-a-death",
        MANAGER,
        "            done += self._bury(death)\n        return done",
        "            done = self._bury(death)\n        return done",
        (MANAGER_TESTS + "test_what_ended_before_the_death_is_not_lost",),
    ),
    Bug(
        "manager-takes-a-job-reported-twice",
        MANAGER,
        "if job not in self._in_flight:",
        "if job.nbytes < 0:",
        (MANAGER_TESTS + "test_job_reported_twice_is_a_bug",),
    ),
    Bug(
        "manager-forgets-queued-jobs-at-a-death",
        MANAGER,
        "return done + self._end_queued(error)",
        "return done",
        (MANAGER_TESTS + "test_dead_backend_ends_every_job_and_is_said_once",),
    ),
    Bug(
        "manager-says-a-death-again-and-again",
        MANAGER,
        "            if self._dead is None:\n",
        "            if error:\n",
        (MANAGER_TESTS + "test_dead_backend_ends_every_job_and_is_said_once",),
    ),
    Bug(
        "manager-takes-plans-for-a-dead-backend",
        MANAGER,
        "if self._closed or self._dead is not None or not self._has_room(plan, nbytes):",
        "if self._closed or not self._has_room(plan, nbytes):",
        (MANAGER_TESTS + "test_dead_backend_ends_every_job_and_is_said_once", NAIVE),
    ),
    Bug(
        "manager-takes-plans-after-close",
        MANAGER,
        "if self._closed or self._dead is not None or not self._has_room(plan, nbytes):",
        "if self._dead is not None or not self._has_room(plan, nbytes):",
        (MANAGER_TESTS + "test_close_completes_every_job_once",),
    ),
    Bug(
        "manager-forgets-queued-jobs-at-close",
        MANAGER,
        'done += self._end_queued("cancelled: the transfers were closed before it started")',
        "assert done is not None",
        (MANAGER_TESTS + "test_close_completes_every_job_once", NAIVE),
    ),
    Bug(
        "manager-forgets-copies-in-flight-at-close",
        MANAGER,
        "done += [self._settle(outcome) for outcome in outcomes]",
        "_ = [self._settle(outcome) for outcome in outcomes]",
        (MANAGER_TESTS + "test_close_completes_every_job_once", NAIVE),
    ),
    # ------------------------------------------------------------------ deadlines
    Bug(
        "deadline-is-final-before-the-copy-is-over",
        MANAGER,
        "done.append(Completion(job, False, False, error, True, 0, 0))",
        "done.append(Completion(job, False, True, error, True, 0, 0))",
        (MANAGER_TESTS + "test_overdue_copy_is_said_once_and_stays_owned", NAIVE),
    ),
    Bug(
        "deadline-is-said-at-every-poll",
        MANAGER,
        "for job in self._overdue(now):\n                job.overdue = True\n",
        "for job in self._overdue(now):\n                job.overdue = False\n",
        (MANAGER_TESTS + "test_overdue_copy_is_said_once_and_stays_owned",),
    ),
    Bug(
        "deadline-forgets-queued-jobs",
        MANAGER,
        "if self._unqueue(job):\n                    done.append",
        "if job in self._loads and not self._loads:\n                    done.append",
        (MANAGER_TESTS + "test_queued_job_ends_at_its_deadline", NAIVE),
    ),
    Bug(
        "deadline-looks-once-only",
        MANAGER,
        'self._next_due = min(waiting, default=float("inf"))',
        'self._next_due = float("inf")',
        (MANAGER_TESTS + "test_each_job_has_its_own_deadline",),
    ),
    # ------------------------------------------------------------------ order and bounds
    Bug(
        "manager-starts-stores-before-loads",
        MANAGER,
        "next(iter(self._loads or self._stores), None)",
        "next(iter(self._stores or self._loads), None)",
        (MANAGER_TESTS + "test_loads_start_before_stores_that_came_first", NAIVE),
    ),
    Bug(
        "manager-lets-a-small-store-overtake-a-load",
        MANAGER,
        "            return job\n        return None\n\n    def _alone",
        "            return job\n        return next(iter(self._stores), None)\n\n    def _alone",
        (MANAGER_TESTS + "test_no_store_starts_while_a_load_waits", NAIVE),
    ),
    Bug(
        "manager-ignores-the-bound-in-flight",
        MANAGER,
        "self._in_flight_nbytes + job.nbytes <= self._in_flight_nbytes_max",
        "self._in_flight_nbytes <= self._in_flight_nbytes_max",
        (MANAGER_TESTS + "test_bytes_in_flight_are_bounded", NAIVE),
    ),
    Bug(
        "manager-stores-beyond-the-bound",
        MANAGER,
        "self._in_flight_nbytes + self._queued_nbytes + nbytes <= self._in_flight_nbytes_max",
        "self._in_flight_nbytes + nbytes <= self._in_flight_nbytes_max",
        (MANAGER_TESTS + "test_store_beyond_the_bound_is_not_made", NAIVE),
    ),
    Bug(
        "manager-never-takes-a-load-larger-than-its-queue",
        MANAGER,
        "return not self._loads or self._queued_load_pages",
        "return self._queued_load_pages",
        (MANAGER_TESTS + "test_load_larger_than_the_queue_waits_alone", NAIVE),
    ),
    Bug(
        "manager-never-takes-a-store-larger-than-the-bound",
        MANAGER,
        "if not self._loads and not self._stores and self._alone():",
        "if False:",
        (MANAGER_TESTS + "test_store_larger_than_the_bound_runs_alone", NAIVE),
    ),
    Bug(
        "manager-waits-for-copies-that-hang",
        MANAGER,
        "return self._in_flight_nbytes < self._in_flight_nbytes_max and self._all_overdue()",
        "return not self._in_flight",
        (MANAGER_TESTS + "test_a_copy_that_hangs_does_not_hold_up_larger_ones_for_ever", NAIVE),
    ),
    Bug(
        "manager-ends-copies-that-nobody-could-stop",
        MANAGER,
        "return done + self._give_up(str(error))",
        "return done + self._bury(BackendDied(str(error)))",
        ("tests/core/test_closing.py::test_a_copy_that_outlives_the_end_keeps_its_pages_until_it_is_over",),
    ),
    Bug(
        "manager-queues-loads-without-bound",
        MANAGER,
        "self._queued_load_pages + pages <= self._queue_pages_max",
        "pages <= self._queue_pages_max",
        (MANAGER_TESTS + "test_queue_of_loads_is_bounded_in_pages", NAIVE),
    ),
    Bug(
        "manager-keeps-the-room-of-what-left-the-queue",
        MANAGER,
        "        self._queued_nbytes -= job.nbytes\n",
        "",
        (NAIVE,),
    ),
    Bug(
        "manager-keeps-the-bytes-of-what-is-over",
        MANAGER,
        "            self._in_flight_nbytes -= job.nbytes\n",
        "",
        (MANAGER_TESTS + "test_bytes_in_flight_are_bounded", NAIVE),
    ),
    Bug(
        "manager-starts-what-was-revoked",
        MANAGER,
        "        del queue[job]\n",
        "",
        (MANAGER_TESTS + "test_revoked_job_touches_nothing", NAIVE),
        may_hang=True,
    ),
    Bug(
        "host-copies-stores-first",
        HOST,
        '= {"h2d": deque(), "d2h": deque()}',
        '= {"d2h": deque(), "h2d": deque()}',
        (HOST_TESTS + "test_loads_overtake_stores_that_no_thread_has_begun",),
    ),
    # ------------------------------------------------------------------ plans, pieces
    Bug(
        "plan-aliases-the-callers-array",
        PLAN,
        'own(self, "targets", array("i", self.targets))',
        'own(self, "targets", self.targets)',
        (PLAN_TESTS + "test_plan_keeps_its_own_page_ids",),
    ),
    Bug(
        "plan-of-uneven-arrays",
        PLAN,
        "if not n == len(self.targets) == len(self.source_generations) == len(self.target_generations):",
        "if not n == len(self.targets) == len(self.source_generations):",
        (PLAN_TESTS + "test_plan_of_uneven_pages_is_a_bug",),
    ),
    Bug(
        "negative-page-is-another-page",
        PIECES,
        "if low < 0 or high >= len(pool):",
        "if high >= len(pool):",
        (CONFORMANCE + "test_page_outside_the_pool_is_a_bug",),
    ),
    Bug(
        "pieces-of-pools-that-differ",
        PIECES,
        "if device_ends[-1] != host_ends[-1]:",
        "if device_ends[-1] < host_ends[-1] < 0:",
        (PLAN_TESTS + "test_pools_of_different_pages_are_refused",),
    ),
    Bug(
        "pieces-are-read-at-the-wrong-offset",
        PIECES,
        "return planes[number][:, start - offset : end - offset]",
        "return planes[number][:, : end - start]",
        (CONFORMANCE + "test_store_moves_its_pages_and_no_others",),
    ),
    Bug(
        "planes-take-k-and-v-as-neighbours",
        MEMORY,
        "split = not self.layers[0].is_contiguous()",
        "split = False",
        (CONFORMANCE + "test_load_moves_its_pages_and_no_others",),
    ),
    # ------------------------------------------------------------------ backends
    Bug(
        "host-forgets-the-error-of-an-earlier-task",
        HOST,
        "running.error = running.error or error",
        "running.error = error",
        (HOST_TESTS + "test_one_bad_page_fails_its_whole_job",),
    ),
    Bug(
        "host-copies-all-pages-but-the-last",
        HOST,
        "for i in range(task.first, task.last):",
        "for i in range(task.first, max(task.first + 1, task.last - 1)):",
        (CONFORMANCE + "test_round_trip",),
    ),
    Bug(
        "host-forgets-jobs-that-wait-at-close",
        HOST,
        "        out += [Outcome(job, CUT_SHORT, 0) for job in self._held]\n",
        "",
        (CONFORMANCE + "test_close_reports_every_job_and_ends_all_copying",),
    ),
    Bug(
        "host-thread-dies-unseen",
        HOST,
        "        dead = [thread.name for thread in self._threads if not thread.is_alive()]\n",
        "        dead = [thread.name for thread in self._threads if thread.name is None]\n",
        (CONFORMANCE + "test_dead_backend_says_so_every_time",),
    ),
    Bug(
        "cuda-is-dead-while-copies-run",
        CUDA,
        "        if quiet:\n",
        "        if quiet or self._fault:\n",
        (CUDA_TESTS + "test_fault_is_no_death_before_the_streams_are_idle",),
    ),
    Bug(
        "cuda-reports-a-failure-before-the-rest-is-over",
        CUDA,
        "while queue and self._api.done(queue[0].end):",
        "while queue and (queue[0].error or self._api.done(queue[0].end)):",
        (CUDA_TESTS + "test_failure_half_way_is_over_when_the_rest_is",),
    ),
    Bug(
        "cuda-kernel-on-memory-that-is-not-pinned",
        CUDA,
        'if way != "dma" and last >= self._host.pinned_pages:',
        'if way != "dma" and last < 0:',
        (CUDA_TESTS + "test_pages_that_are_not_pinned_go_by_dma",),
    ),
    Bug(
        "cuda-jobs-share-a-descriptor",
        WAYS,
        "address = free.pop()",
        "address = free[-1]",
        (CUDA_TESTS + "test_descriptors_belong_to_their_job",),
    ),
    Bug(
        "cuda-descriptors-run-over",
        WAYS,
        "if self._next + nbytes > self._end:",
        "if self._next > self._end:",
        (CUDA_TESTS + "test_descriptors_are_blocks_of_their_own",),
    ),
    Bug(
        "cuda-calibration-takes-the-slowest",
        WAYS,
        "fastest[direction] = max(WAYS, key=lambda way: rates[way])",
        "fastest[direction] = min(WAYS, key=lambda way: rates[way])",
        (CUDA_TESTS + "test_calibration_takes_the_fastest_way",),
    ),
    Bug(
        "kernel-cuts-offsets-to-32-bits",
        KERNEL,
        "(plane_addresses[piece] + device_pages[page] * plane_strides[piece])",
        "(plane_addresses[piece] + (unsigned)(device_pages[page] * plane_strides[piece]))",
        (KERNEL_TESTS + "test_pools_of_many_gigabytes",),
    ),
    Bug(
        "kernel-takes-pieces-for-pages",
        KERNEL,
        "const int page = (int)(row / pieces);",
        "const int page = (int)(row % pages);",
        (KERNEL_TESTS + "test_every_piece_goes_to_its_place",),
    ),
    # ------------------------------------------------------------------ the pool in host memory
    Bug(
        "pool-larger-than-the-limit",
        POOL,
        "if limit_nbytes is not None and need > limit_nbytes:",
        "if limit_nbytes is not None and need > 2 * limit_nbytes:",
        (POOL_TESTS + "test_pool_larger_than_the_limit_is_bad_input",),
    ),
    Bug(
        "pool-chunk-cuts-a-page-in-two",
        POOL,
        "chunk_nbytes_max // step * step",
        "chunk_nbytes_max // mmap.PAGESIZE * mmap.PAGESIZE",
        (POOL_TESTS + "test_chunks_of_pages_that_are_no_multiple_of_the_systems",),
    ),
    Bug(
        "pool-stays-half-registered",
        POOL,
        "        message = self._failure(pinning)\n        pinning.release()\n",
        "        message = self._failure(pinning)\n",
        (POOL_TESTS + "test_failed_pinning_leaves_nothing_registered",),
    ),
    Bug(
        "pinning-leaves-its-first-chunk",
        PINNING,
        "while self._chunks:",
        "while len(self._chunks) > 1:",
        (POOL_TESTS + "test_failed_pinning_leaves_nothing_registered",),
    ),
    Bug(
        "limit-looks-at-the-innermost-group-only",
        LIMIT,
        "for depth in range(len(parts) + 1):",
        "for depth in range(len(parts), len(parts) + 1):",
        (POOL_TESTS + "test_limit_of_the_container",),
    ),
)
