"""Planted bugs in the service, in what is counted and in what is told.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

MEDIA = "kvkeep/index/media.py"
WATCH = "kvkeep/index/watch.py"
TIERMAP = "kvkeep/index/tiermap.py"
RUNS = "kvkeep/index/runs.py"
TRAFFIC = "kvkeep/traffic.py"
EVENTS = "kvkeep/telemetry/events.py"
PROMETHEUS = "kvkeep/telemetry/prometheus.py"
COUNTING = "kvkeep/counting.py"
HANDLES = "kvkeep/handles.py"
SERVICE = "kvkeep/service.py"

EVENT_TESTS = "tests/telemetry/test_events.py::"
COUNTER_TESTS = "tests/telemetry/test_counters.py::"
SERVICE_TESTS = "tests/service/test_service.py::"
COPY_TESTS = "tests/service/test_copies.py::"
CLOSING_TESTS = "tests/service/test_closing.py::"

FOLLOWER = EVENT_TESTS + "test_a_follower_knows_the_index"
CUT = COPY_TESTS + "test_cancellation_at_every_await"

BUGS: tuple[Bug, ...] = (
    Bug(
        "service-keeps-the-buffer-of-its-caller",
        SERVICE,
        "desk.cache.admit, as_int32(tokens).copy(), salt=salt",
        "desk.cache.admit, as_int32(tokens), salt=salt",
        (SERVICE_TESTS + "test_what_waits_does_not_change_with_what_was_handed_in",),
    ),
    Bug(
        "service-reads-media-again-at-every-try",
        SERVICE,
        "media=tuple(media),",
        "media=media,",
        (SERVICE_TESTS + "test_what_waits_does_not_change_with_what_was_handed_in",),
    ),
    Bug(
        "names-bad-media-is-not-bad-input",
        MEDIA,
        "if not isinstance(item, MediaItem):",
        "if False:",
        (SERVICE_TESTS + "test_bad_input_of_one_who_waits_is_nobody_elses",),
    ),
    # ------------------------------------------------------------------ what the tree tells
    Bug(
        "watch-takes-the-first-page-of-a-run-for-its-last",
        WATCH,
        "return run.parent.names[-1] if run.parent.names else run.parent.key",
        "return run.parent.key",
        (EVENT_TESTS + "test_every_chain_has_its_own_event",),
    ),
    Bug(
        "watch-takes-first-and-last-of-one-run-for-all-of-one-run",
        WATCH,
        "ends = [*(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist(), len(runs)]",
        "ends = [*(np.flatnonzero(runs[1:] != runs[:-1]) + 1).tolist() * (runs[0] is not runs[-1]), len(runs)]",
        (EVENT_TESTS + "test_copies_of_several_chains_leave_in_any_order",),
    ),
    Bug(
        "watch-calls-a-failed-copy-demoted",
        WATCH,
        'if reason == "evicted" and self._tier is Tier.GPU and run.host is not None:',
        "if self._tier is Tier.GPU and run.host is not None:",
        (EVENT_TESTS + "test_a_failed_copy_is_a_reason",),
    ),
    Bug(
        "map-does-not-tell-of-a-reset",
        TIERMAP,
        """            self.watch.clear()
""",
        """            self.watch = None
""",
        (EVENT_TESTS + "test_row_54_a_reset_is_an_event_of_each_tier",),
    ),
    Bug(
        "tree-evicts-one-page-unseen",
        RUNS,
        "if count == 1 and self.gpu.watch is None:",
        "if count == 1:",
        (EVENT_TESTS + "test_one_page_that_leaves_is_told",),
    ),
    Bug(
        "tree-cut-for-a-failure-is-told-as-an-eviction",
        RUNS,
        "            self.cut(run, run.start if run.whole else depth, reason)",
        "            self.cut(run, run.start if run.whole else depth)",
        (EVENT_TESTS + "test_a_failed_copy_is_a_reason",),
    ),
    # ------------------------------------------------------------------ the event stream
    Bug(
        "events-every-copy-is-the-last",
        EVENTS,
        "last.append(not more)",
        "last.append(True)",
        (FOLLOWER,),
    ),
    Bug(
        "events-every-copy-is-the-first",
        EVENTS,
        "if len(fresh) == len(values) and self.names.isdisjoint(fresh):",
        "if len(fresh) == len(values):",
        (FOLLOWER,),
    ),
    Bug(
        "events-a-gap-in-the-feed-has-no-number",
        EVENTS,
        "self._sequence += 1  # a number without an event, so that no reader goes on across the gap",
        "self._sequence += 0",
        (EVENT_TESTS + "test_row_54_a_gap_is_reported_and_a_snapshot_mends_it",),
    ),
    Bug(
        "events-what-fell-out-of-the-buffer-is-not-missed",
        EVENTS,
        """            self._complete_after = oldest.sequence
""",
        "",
        (EVENT_TESTS + "test_row_54_a_gap_is_reported_and_a_snapshot_mends_it",),
    ),
    Bug(
        "events-two-chains-become-one",
        EVENTS,
        'if kind == "stored" and names and before != int(names[-1][-1]):',
        'if kind == "cleared" and names:',
        (EVENT_TESTS + "test_every_chain_has_its_own_event",),
    ),
    Bug(
        "events-number-of-another-log-is-taken",
        EVENTS,
        "if not self._complete_after <= after <= self._sequence:",
        "if not self._complete_after <= after:",
        (EVENT_TESTS + "test_a_number_of_another_process_is_a_gap",),
    ),
    # ------------------------------------------------------------------ counters
    Bug(
        "counters-everything-matched-came-from-the-host",
        COUNTING,
        "self._matched_host_tokens += lease.loaded_len",
        "self._matched_host_tokens += lease.taken_len",
        (COUNTER_TESTS + "test_row_56_tokens_of_the_tiers_add_up",),
    ),
    Bug(
        "counters-what-arrived-is-lost",
        COUNTING,
        "self._lost_tokens += gated.matched_len - lease.taken_len",
        "self._lost_tokens += gated.matched_len",
        (COUNTER_TESTS + "test_row_56_tokens_of_the_tiers_add_up",),
    ),
    Bug(
        "counters-every-load-is-a-wait-for-room",
        COUNTING,
        "if gated.for_room and not waits_for_room(lease):",
        "if not waits_for_room(lease):",
        (COUNTER_TESTS + "test_gate_wait_is_the_time_of_the_copies",),
    ),
    Bug(
        "counters-who-gave-up-has-waited",
        COUNTING,
        "elif lease.live:",
        "else:",
        (COUNTER_TESTS + "test_gate_wait_is_the_time_of_the_copies",),
    ),
    Bug(
        "prometheus-buckets-are-not-cumulative",
        PROMETHEUS,
        "below += count",
        "below = count",
        (COUNTER_TESTS + "test_the_exposition_says_what_the_snapshot_says",),
    ),
    # ------------------------------------------------------------------ the service
    Bug(
        "service-small-requests-overtake",
        HANDLES,
        "if self._queue or not handle.ask():",
        "if not handle.ask():",
        (SERVICE_TESTS + "test_who_waits_for_room_is_served_in_order",),
    ),
    Bug(
        "service-revoked-goes-to-the-end-of-the-queue",
        HANDLES,
        """            self._queue.move_to_end(handle, last=False)
""",
        "",
        (COPY_TESTS + "test_a_revoked_lease_goes_before_all_that_wait",),
    ),
    Bug(
        "service-readable-while-copies-write",
        HANDLES,
        "return lease is not None and not lease.read_in_progress and not lease.revoked",
        "return lease is not None and not lease.revoked",
        (COPY_TESTS + "test_ready_waits_for_the_copies_and_no_longer",),
    ),
    Bug(
        "service-who-leaves-lets-nobody-in",
        HANDLES,
        """        self._left()
        self.room_was_made()""",
        """        self._left()
        self.wake()""",
        (SERVICE_TESTS + "test_who_gives_up_lets_the_next_one_in",),
        may_hang=True,
    ),
    Bug(
        "service-room-that-copies-made-is-not-given-out",
        HANDLES,
        "if done or revoked:",
        "if revoked:",
        (COPY_TESTS + "test_pages_that_a_copy_lets_go_of_are_given_out",),
    ),
    Bug(
        "service-cancelled-admission-keeps-its-lease",
        SERVICE,
        """            handle.abort()
            if isinstance""",
        """            handle.moved()
            if isinstance""",
        (CUT,),
        may_hang=True,
    ),
    Bug(
        "service-error-of-the-poller-is-swallowed",
        SERVICE,
        'self._fail(poller.exception() or InvariantViolation("the poller returned"))',
        "poller.exception()",
        (CLOSING_TESTS + "test_an_error_in_the_poller_reaches_everybody",),
        may_hang=True,
    ),
    Bug(
        "service-polls-while-idle",
        SERVICE,
        "if not any(desk.busy for desk in desks):",
        "if not desks:",
        (SERVICE_TESTS + "test_an_idle_service_sleeps",),
    ),
    Bug(
        "service-closing-dies-with-its-caller",
        SERVICE,
        "await asyncio.shield(self._closing)",
        "await self._closing",
        (CLOSING_TESTS + "test_closing_goes_on_when_its_caller_is_cancelled",),
    ),
    Bug(
        "service-one-cache-that-does-not-close-keeps-the-others",
        SERVICE,
        "            failures.append(error)",
        "            raise",
        (CLOSING_TESTS + "test_a_cache_that_does_not_close_keeps_none_of_the_others",),
        may_hang=True,
    ),
)
