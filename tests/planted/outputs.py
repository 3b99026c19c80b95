"""Planted bugs in encoder outputs beside KV pages: slots, room, copies, and who holds what.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

LEDGER = "kvkeep/tiers/ledger.py"
SLOTS = "kvkeep/tiers/slots.py"
RUNS = "kvkeep/index/runs.py"
OUTPUT = "kvkeep/index/output.py"
DOUBLES = "kvkeep/index/doubles.py"
OUTPUTS = "kvkeep/outputs.py"
ENCODER = "kvkeep/encoder.py"
ROOM = "kvkeep/room.py"
TRAFFIC = "kvkeep/traffic.py"
COPIES = "kvkeep/copies.py"

STEPPED = "tests/sim/test_stepped_outputs.py::"
ORDERS = STEPPED + "test_a_few_steps_in_every_order"
SLOT_TESTS = "tests/core/test_slots.py::"
ENCODER_TESTS = "tests/encoder/test_encoder.py::"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------ slots
    Bug(
        "slots-free-the-page-with-the-last-but-one",
        SLOTS,
        "        slotted.live -= 1\n",
        "        slotted.live = max(0, slotted.live - 2)\n",
        (SLOT_TESTS + "test_slots_against_a_naive_ledger", ORDERS),
    ),
    Bug(
        "slots-free-another-stretch",
        SLOTS,
        "((1 << self._size(self._nbytes[i])) - 1) << self._at[i])",
        "((1 << self._size(self._nbytes[i])) - 1))",
        (SLOT_TESTS + "test_the_shortest_hole_that_holds_it_is_taken", ORDERS),
    ),
    Bug(
        "copy-of-a-slot-lands-at-its-old-offset",
        COPIES,
        "SlotCopy(source.page, source.offset, target.page, target.offset, source.nbytes)",
        "SlotCopy(source.page, source.offset, target.page, source.offset, source.nbytes)",
        (STEPPED + "test_a_slot_goes_down_beside_others", ORDERS),
    ),
    Bug(
        "copy-leaves-the-slot-out",
        COPIES,
        "            slots=slots,\n",
        "            slots=slots[: not len(gpu)],\n",
        (STEPPED + "test_what_goes_down_comes_up_whole",),
    ),
    # ------------------------------------------------------------------ leaving
    Bug(
        "tree-evicts-an-output-that-is-held",
        RUNS,
        "return k if self.gpu.ledger.idle_tail(run.pages, k) == k else 0",
        "return k",
        (STEPPED + "test_an_output_that_is_held_stays",),
    ),
    Bug(
        "tree-evicts-part-of-an-output",
        RUNS,
        "k = self.leavable(run, k) if run.whole else idle_tail(run.pages, k if k < count else count)",
        "k = idle_tail(run.pages, k if k < count else count)",
        (STEPPED + "test_an_output_leaves_as_a_whole",),
    ),
    Bug(
        "tree-evicts-part-of-an-output-below",
        RUNS,
        "k = run.end - least if run.whole else min(run.end - least, count - done)",
        "k = min(run.end - least, count - done)",
        (STEPPED + "test_an_output_leaves_host_memory_as_a_whole",),
    ),
    Bug(
        "tree-counts-slots-as-pages-below",
        RUNS,
        "            done += ledger.free - free  #",
        "            done += k  #",
        (STEPPED + "test_host_memory_frees_as_many_pages_as_are_asked_for",),
    ),
    Bug(
        "room-waits-for-more-than-it-can-spare",
        ROOM,
        "if count - given <= spared else None",
        "if count else None",
        (ORDERS,),
    ),
    Bug(
        "room-counts-promised-pages-as-spare",
        ROOM,
        "                if not down.gpu:\n                    self._evict_whole",
        "                if down:\n                    self._evict_whole",
        (STEPPED + "test_pages_promised_already_are_not_spared_for_an_output",),
    ),
    Bug(
        "room-drops-for-an-output-that-is-refused",
        ROOM,
        "        if need > ledger.free + ledger.idle:\n",
        "        if count > ledger.free + ledger.idle:\n",
        (STEPPED + "test_a_refused_output_has_dropped_nothing",),
    ),
    Bug(
        "room-empties-a-page-for-a-slot",
        ROOM,
        "            found = self._some(1, owner, None)\n",
        "            found = self.take(1, owner)\n",
        (STEPPED + "test_slots_leave_one_by_one_until_there_is_room",),
    ),
    # ------------------------------------------------------------------ who has what
    Bug(
        "output-found-by-its-name-alone",
        OUTPUT,
        "    while at is not None and at.record != record:\n",
        "    while at is not None and not at.record:\n",
        (STEPPED + "test_outputs_of_one_name_are_told_apart",),
    ),
    Bug(
        "outputs-are-read-before-their-load-lands",
        OUTPUTS,
        "                self._traffic.join(hold.pages, hold)\n",
        "                self._traffic.join(hold.pages[:0], hold)\n",
        (STEPPED + "test_an_output_that_is_loaded_is_joined_and_whole",),
    ),
    Bug(
        "outputs-load-what-is-on-its-way-down",
        TRAFFIC,
        "        if self._host.ready_head(host) < len(host) or not",
        "        if self._host.ready_head(host) > len(host) or not",
        (STEPPED + "test_an_output_is_stored_while_its_copy_down_runs",),
    ),
    Bug(
        "outputs-make-room-for-a-load-that-is-refused",
        TRAFFIC,
        " or not self._manager.takes_load(pages or 1):",
        ":",
        (STEPPED + "test_no_room_is_made_for_a_load_that_is_refused",),
    ),
    Bug(
        "outputs-forget-what-is-held",
        OUTPUTS,
        "            if run is None or run.holds:\n",
        "            if run is None:\n",
        (ORDERS,),
    ),
    Bug(
        "outputs-of-other-tensors-take-the-record",
        OUTPUTS,
        "if run is not None and (run.pages or run.tensors != tensors):",
        "if run is not None and run.pages:",
        (STEPPED + "test_another_form_does_not_become_the_one_below",),
    ),
    Bug(
        "outputs-store-what-began-before-a-reset",
        OUTPUTS,
        "            if hold.epoch != self.epoch:\n",
        "            if hold.epoch > self.epoch:\n",
        (STEPPED + "test_a_reset_forgets_outputs_and_those_on_their_way",),
    ),
    Bug(
        "encoder-counts-the-reset-at-the-end-of-computing",
        ENCODER,
        "layout[-1].offset + layout[-1].nbytes, flight.epoch)",
        "layout[-1].offset + layout[-1].nbytes)",
        ("tests/encoder/test_once.py::test_a_reset_while_it_is_computed",),
    ),
    # ------------------------------------------------------------------ places below
    Bug(
        "doubles-give-up-more-outputs-than-are-needed",
        DOUBLES,
        "            if short <= 0 or vain == LOOK_MAX:\n",
        "            if vain == LOOK_MAX:\n",
        (STEPPED + "test_hot_outputs_give_up_no_more_places_than_are_needed",),
    ),
    Bug(
        "doubles-look-at-an-output-once",
        DOUBLES,
        "                left = not found and bool(run.pages) and run.host is not None\n",
        "                left = False\n",
        (STEPPED + "test_a_host_copy_that_could_not_be_given_up_is_looked_at_again",),
    ),
    Bug(
        "outputs-stored-over-a-host-copy-keep-both",
        OUTPUTS,
        "                self._tree.doubles.add((run,))\n",
        "",
        (STEPPED + "test_an_output_computed_again_gives_up_its_host_copy",),
    ),
    Bug(
        "traffic-pushes-out-for-what-never-fits",
        TRAFFIC,
        "        if make_room and len(run.pages) <= self._host.total:\n",
        "        if make_room:\n",
        (STEPPED + "test_an_output_larger_than_host_memory_takes_nobodys_place",),
    ),
)
