"""Planted bugs in the copies between the tiers, and in what the index knows of the lower one.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

TRAFFIC = "kvkeep/traffic.py"
ROOM = "kvkeep/room.py"
ADMISSION = "kvkeep/admission.py"
CACHE = "kvkeep/cache.py"
RUNS = "kvkeep/index/runs.py"
ALL_COPIES = "kvkeep/copies.py"
PARKING = "kvkeep/parking.py"

LARGE = "tests/core/test_large_copies.py::"
COPIES = "tests/sim/test_stepped_copies.py::"
BOTH_WAYS = "tests/sim/test_stepped_both_ways.py::"
LIFE = "tests/sim/test_stepped_life.py::"
FAULTS = "tests/sim/test_faults.py::"
FOUND = "tests/sim/test_found.py::"
TIERS = "tests/sim/test_tier_accounting.py::"
SEEDS = "tests/sim/test_simulator.py::test_every_seed_holds"

BUGS: tuple[Bug, ...] = (
    # Copies of more pages than the link or its queue takes at once.
    Bug(
        "traffic-demotes-all-or-nothing",
        TRAFFIC,
        "count = self._room(min(count, fit), run.stretch(run.gpu_end - 1)[0])",
        "count = self._room(count, run.stretch(run.gpu_end - 1)[0])",
        (LARGE + "test_of_more_pages_than_fit_on_the_link_those_that_do_are_demoted",),
    ),
    Bug(
        "traffic-cleans-all-or-nothing",
        TRAFFIC,
        "count = min(dirty, fit - len(copy.gpu))",
        "count = dirty if dirty <= fit - len(copy.gpu) else 0",
        (LARGE + "test_more_cold_pages_than_fit_on_the_link_are_copied_down_part_by_part",),
    ),
    Bug(
        "room-loses-pages-whose-copy-is-refused",
        ROOM,
        "            out.extend(down.gpu)",
        "            pass",
        (LARGE + "test_pages_whose_copy_is_refused_are_the_requests_at_once",),
    ),
    Bug(
        "traffic-refused-copy-down-stays-in-the-index",
        TRAFFIC,
        "        self._lose(copy)\n        return False",
        "        return False",
        (LARGE + "test_pages_whose_copy_is_refused_are_the_requests_at_once",),
    ),
    Bug(
        "room-copies-cold-pages-down-once",
        ROOM,
        "if now != self._clean_at and",
        "if self._clean_at is None and",
        (LARGE + "test_a_decode_finds_pages_that_are_copied_down_already",),
    ),
    Bug(
        "room-copies-each-cold-page-down-alone",
        ROOM,
        "CLEAN_PARTS = 16",
        "CLEAN_PARTS = 1 << 30",
        (LARGE + "test_a_decode_finds_pages_that_are_copied_down_already",),
    ),
    Bug(
        "doubles-forget-the-head-of-a-split",
        "kvkeep/index/doubles.py",
        "runs[head] = None",
        "pass",
        (LARGE + "test_copies_of_a_chain_that_was_split_still_give_way",),
    ),
    Bug(
        "room-looks-through-the-window-for-each-page",
        ROOM,
        "look_at = count - self.window // LOOKS_A_WINDOW",
        "look_at = count",
        (LARGE + "test_room_behind_many_short_chains_is_found_by_looking_at_each_a_few_times",),
    ),
    Bug(
        "traffic-takes-the-ticket-of-another-cache",
        PARKING,
        "if ticket.live and ticket.slots and ticket not in self.suspended:",
        "if False:",
        (LARGE + "test_a_ticket_is_good_in_its_own_cache_only",),
    ),
    # What a copy owns, and until when.
    Bug(
        "traffic-load-does-not-pin-its-sources",
        TRAFFIC,
        """        self._host.retain(host, copy)
        return copy""",
        """        return copy""",
        (COPIES + "test_row_23_a_load_keeps_its_sources_while_room_is_made_for_it",),
    ),
    Bug(
        "traffic-store-does-not-pin-its-sources",
        TRAFFIC,
        """            self._gpu.retain(copy.gpu, copy)
            return True""",
        """            return True""",
        (COPIES + "test_row_19_a_page_is_nobody_elses_while_it_is_copied_out",),
    ),
    Bug(
        "traffic-suspended-page-is-let-go-of-before-its-copy-is-over",
        "kvkeep/admission.py",
        """        traffic.parking.hold_sources(ticket)
""",
        "",
        (LIFE + "test_row_31_a_suspended_page_stays_until_it_has_been_copied",),
    ),
    Bug(
        "traffic-deadline-frees-the-target-of-a-running-copy",
        TRAFFIC,
        "if not done.final:",
        "if not done.final and not done.late:",
        (FAULTS + "test_a_load_that_never_ends_releases_who_waits_and_keeps_its_pages",),
    ),
    Bug(
        "traffic-deadline-releases-nobody",
        TRAFFIC,
        "for lease in list(waiting.leases):",
        "for lease in []:",
        (FAULTS + "test_a_store_that_never_ends_releases_who_waits_and_keeps_its_pages",),
    ),
    Bug(
        "traffic-double-release-on-failure",
        TRAFFIC,
        "        self._host.hand_over(copy.host, copy)\n\n    def _room",
        "        self._host.hand_over(copy.host, copy), self._host.release(copy.host, copy)\n\n    def _room",
        (LIFE + "test_row_40_a_store_that_fails_is_no_copy",),
    ),
    Bug(
        "traffic-completion-filtered-by-request",
        TRAFFIC,
        "if not done.final:",
        "if not done.final or not (copy.leases or copy.ticket):",
        (LIFE + "test_row_34_a_hundred_aborts_leak_nothing",),
    ),
    Bug(
        "cleaning-stops-for-a-copy-that-never-ends",
        "kvkeep/transfer/manager.py",
        "return not self._loads and not self._stores and self._all_overdue()",
        "return not self._loads and not self._stores and not self._in_flight",
        (FAULTS + "test_cleaning_goes_on_beside_a_copy_that_never_ends",),
    ),
    Bug(
        "room-below-keeps-copies-of-pages-in-use",
        "kvkeep/index/doubles.py",
        "if at >= hot_until and gpu.is_idle(run.pages[at]):",
        "if at >= hot_until:",
        (FOUND + "test_what_a_live_request_uses_needs_no_copy_below",),
    ),
    Bug(
        "lease-believes-what-a-failed-load-was-to-bring",
        "kvkeep/lease.py",
        "if self.unread and kv_len > self.taken_len:",
        "if self.unread and kv_len < 0:",
        (FAULTS + "test_kv_that_a_failed_load_did_not_bring_is_not_taken_for_granted",),
    ),
    Bug(
        "gate-opens-without-an-order",
        ALL_COPIES,
        "if self.manager.order_after(copy.job, stream):",
        "if copy.job:",
        (COPIES + "test_row_19_a_stream_may_go_on_behind_the_copies_out_of_its_pages", SEEDS),
    ),
    Bug(
        "gate-lets-streams-pass-loads",
        ALL_COPIES,
        'for copy in [copy for copy in lease.copies if copy.cause == "demote"]:',
        "for copy in list(lease.copies):",
        (COPIES + "test_row_19_a_stream_does_not_go_on_before_loads",),
    ),
    Bug(
        "gate-frees-what-its-copy-reads",
        ALL_COPIES,
        "self.let_go(copy)\n\n    def let_go",
        "self._gpu.release(copy.gpu, copy)\n\n    def let_go",
        (COPIES + "test_row_19_a_stream_may_go_on_behind_the_copies_out_of_its_pages",),
    ),
    Bug(
        "traffic-abort-forgets-its-copies",
        ALL_COPIES,
        "copies, lease.copies = lease.copies, set()",
        "copies: set[Copy] = set()",
        (LIFE + "test_row_40_a_load_that_fails_is_known_to_all", SEEDS),
    ),
    Bug(
        "traffic-demotion-that-nobody-waits-for",
        ADMISSION,
        "self._traffic.copies.wait(lease, copy)\n        self._storing",
        "pass\n        self._storing",
        (COPIES + "test_row_19_a_page_promised_to_a_request_is_written_only_when_it_has_been_copied_out",),
    ),
    Bug(
        "traffic-store-without-its-barrier",
        ALL_COPIES,
        "copy.job = self.manager.submit(plan, after=self.fence)",
        "copy.job = self.manager.submit(plan, after=NO_WAIT)",
        (COPIES + "test_row_18_a_store_waits_for_the_last_write_of_its_source",),
    ),
    Bug(
        "traffic-load-without-its-barrier",
        ALL_COPIES,
        "copy.job = self.manager.submit(plan, after=self.fence)",
        "copy.job = self.manager.submit(plan, after=NO_WAIT if up else self.fence)",
        (COPIES + "test_row_25_a_load_comes_after_what_was_written_before",),
    ),
    # What may be read.
    Bug(
        "traffic-published-before-it-landed-below",
        TRAFFIC,
        "host = host[: self._host.ready_head(host)]",
        "host = host[:]",
        (COPIES + "test_a_page_is_loaded_only_when_it_has_landed_below",),
    ),
    Bug(
        "traffic-read-before-it-landed-above",
        ADMISSION,
        "self._traffic.join(pages[:matched], lease)",
        "self._traffic.join(pages[:on_gpu], lease)",
        (COPIES + "test_a_page_is_read_only_when_it_has_landed",),
    ),
    Bug(
        "traffic-who-joins-a-load-does-not-wait",
        ADMISSION,
        "self._traffic.join(pages[:matched], lease)",
        "self._traffic.join(pages[on_gpu:matched], lease)",
        (COPIES + "test_one_load_serves_everybody", COPIES + "test_a_page_is_read_only_when_it_has_landed"),
    ),
    Bug(
        "traffic-resumed-before-it-was-suspended",
        CACHE,
        "if not ticket.ready:",
        "if not ticket.live:",
        (COPIES + "test_resume_waits_for_its_own_suspension",),
    ),
    Bug(
        "traffic-stored-under-weights-of-another-name",
        "kvkeep/admission.py",
        "current = ticket.epoch == self._storing.epoch",
        "current = ticket.epoch <= self._storing.epoch",
        (FOUND + "test_weights_are_the_same_only_when_all_of_their_fingerprint_is",),
    ),
    # Failed loads.
    Bug(
        "traffic-heir-is-not-shortened",
        TRAFFIC,
        "self._shorten(heir, copy, depth)",
        "pass",
        (LIFE + "test_row_40_a_load_that_fails_is_known_to_all",),
    ),
    Bug(
        "traffic-heir-with-pages-behind",
        TRAFFIC,
        "if not lease.base or lease.copies != {copy} or lease.pages[lease.base - 1] not in copy.gpu:",
        "if not lease.base or lease.copies != {copy}:",
        (FOUND + "test_a_load_is_inherited_only_by_a_lease_that_ends_with_it",),
    ),
    Bug(
        "traffic-everybody-inherits",
        TRAFFIC,
        "for lease in [lease for lease in copy.leases if lease is not heir]:",
        "for lease in [lease for lease in copy.leases if heir is None]:",
        (LIFE + "test_row_40_a_load_that_fails_is_known_to_all",),
    ),
    Bug(
        "traffic-failed-load-stays-in-the-index",
        TRAFFIC,
        """        if place is not None:
            self._tree.cut(place.run, place.depth - 1, "failed")
        self.copies.let_go(copy)""",
        """        if place is None:
            self._tree.cut(place.run, place.depth - 1, "failed")
        self.copies.let_go(copy)""",
        (LIFE + "test_row_40_a_load_that_fails_is_known_to_all",),
    ),
    # Loads that are taken back.
    Bug(
        "traffic-takes-back-a-load-that-others-wait-for",
        ALL_COPIES,
        "return [copy for copy in copies if not copy.leases]",
        "return list(copies)",
        (LIFE + "test_row_33_a_load_that_has_not_started_is_taken_back",),
    ),
    Bug(
        "traffic-takes-back-a-load-that-others-have-built-on",
        TRAFFIC,
        "if inside and not self._tree.ends_with(inside[-1]):",
        "if not inside:",
        (LIFE + "test_a_load_that_others_have_built_on_is_not_taken_back",),
    ),
    Bug(
        "traffic-load-taken-back-can-be-joined",
        TRAFFIC,
        """        self._forget_load(copy)
        self._leave_gpu""",
        """        self._leave_gpu""",
        (SEEDS,),
    ),
    # Up into the place of what goes down.
    Bug(
        "traffic-load-does-not-wait-for-the-store-before-it",
        ALL_COPIES,
        "copy.after = set(after)",
        "copy.after = set()",
        (BOTH_WAYS + "test_a_load_into_pages_on_their_way_down_starts_when_they_are",),
    ),
    Bug(
        "traffic-load-waits-for-the-wrong-store",
        ALL_COPIES,
        "            other.after.discard(copy)",
        "            other.after.clear()",
        (SEEDS,),
    ),
    Bug(
        "traffic-deadline-forgets-the-load-behind",
        TRAFFIC,
        "for waiting in [copy, *(other for other in self.copies if copy in other.after)]:",
        "for waiting in [copy]:",
        (BOTH_WAYS + "test_a_store_that_never_ends_releases_who_waits_for_the_load_behind_it",),
    ),
    Bug(
        "traffic-pages-of-a-load-not-made-are-free-too-early",
        ALL_COPIES,
        "read = {page for other in copy.after for page in other.gpu}",
        "read: set[int] = set()",
        (BOTH_WAYS + "test_a_load_that_nobody_waits_for_is_not_made",),
    ),
    Bug(
        "traffic-late-targets-miscounted",
        ADMISSION,
        "late = max(0, len(below) + drains.count - take)",
        "late = max(0, len(below) - take)",
        (BOTH_WAYS + "test_a_load_into_pages_on_their_way_down_starts_when_they_are",),
    ),
    Bug(
        "parking-comes-back-without-waiting",
        PARKING,
        "        if readers:",
        "        if not gpu:",
        (BOTH_WAYS + "test_a_preempted_request_comes_back_into_pages_on_their_way_down",),
    ),
    Bug(
        "parking-asks-a-dead-engine-for-ever",
        ADMISSION,
        "lost = ticket.lost or (self._traffic is not None and self._traffic.copies.manager.ended)",
        "lost = ticket.lost",
        (FAULTS + "test_a_backend_that_dies_takes_its_tier_with_it",),
    ),
    # Room.
    Bug(
        "room-clean-first-without-a-window",
        ROOM,
        "left, seen, found = self.window, [], list[tuple[Run, int]]()",
        "left, seen, found = self._ledger.total, [], list[tuple[Run, int]]()",
        (TIERS + "test_a_hot_chain_stays_while_nothing_can_be_copied_ahead",),
    ),
    Bug(
        "room-does-not-expect-large-admissions",
        ROOM,
        "self.ahead = max(self.window, largest)",
        "self.ahead = self.window",
        (FOUND + "test_as_many_pages_are_copied_down_ahead_as_an_admission_may_ask_for",),
    ),
    Bug(
        "room-copies-ahead-of-need-fill-a-small-tier",
        ROOM,
        "self.window = min(self.window, tree.host.ledger.total // 4)",
        "self.window = max(self.window, tree.host.ledger.total // 4)",
        (FOUND + "test_copies_ahead_of_need_leave_a_small_tier_its_places",),
    ),
    Bug(
        "room-decode-waits-for-a-copy",
        ROOM,
        "fit = min(traffic.fit, drains.count_max - drains.count) if drains is not None else 0",
        "fit = traffic.fit if (drains := drains or Drains(count)) else 0",
        (LIFE + "test_row_47_both_tiers_are_full_and_there_is_room", SEEDS),
    ),
    Bug(
        "room-sheds-and-does-not-look-again",
        ROOM,
        "while (left := count - ledger.free - len(pages) - (drains.count if drains is not None else 0)) > 0:",
        "for left in (short,):",
        (FOUND + "test_room_is_found_behind_two_runs_that_only_copies_hold",),
    ),
    Bug(
        "traffic-cleans-a-hotter-page-for-want-of-a-place",
        TRAFFIC,
        "while all_of_it and looked_at < window and",
        "while looked_at < window and",
        (FOUND + "test_cleaning_does_not_push_out_pages_that_are_hotter",),
    ),
    Bug(
        "traffic-copies-of-other-requests-make-a-page-shared",
        ALL_COPIES,
        "return [count - copying[page] for page, count in zip(pages, holders, strict=True)]",
        "return holders",
        (LIFE + "test_a_page_being_cleaned_is_suspended_with_its_request",),
    ),
    # The lower tier in the index.
    Bug(
        "tree-place-remembered-across-a-split",
        RUNS,
        "self.host.run_of[host[host != NOWHERE]] = head",
        "pass",
        (COPIES + "test_a_copy_finds_its_pages_after_their_run_was_split",),
    ),
    Bug(
        "tree-dropped-last-copy-strands-deeper-pages",
        RUNS,
        "if bare < count:",
        "if bare < count and run.host is None:",
        (LIFE + "test_what_hangs_behind_a_dropped_last_copy_goes_with_it",),
    ),
    Bug(
        "tree-last-copy-taken-for-a-double",
        RUNS,
        "if depth >= run.gpu_end:\n            self.cut",
        "if depth > run.gpu_end:\n            self.cut",
        (SEEDS,),
    ),
    Bug(
        "tree-hot-page-keeps-its-place-below",
        "kvkeep/index/doubles.py",
        "hot = [rank(stamp) < bound for stamp in run.stamps]",
        "hot = [rank(stamp) > bound for stamp in run.stamps]",
        (FOUND + "test_a_host_copy_of_a_page_that_became_hot_gives_way",),
    ),
    Bug(
        "tree-host-evicts-what-is-hotter",
        RUNS,
        "if run is None or order.rank(run.stamps[0]) < bound:",
        "if run is None:",
        (TIERS + "test_a_hotter_page_below_is_not_pushed_out_by_a_colder_one",),
    ),
)
