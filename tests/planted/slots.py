"""Planted bugs in copies of slots, and in reading and writing parts of pages.

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
ADDRESSES = "kvkeep/transfer/addresses.py"
MEMORY = "kvkeep/tiers/memory.py"

SLOT_TESTS = "tests/transfer/test_slots.py::"
CONFORMANCE = "tests/transfer/test_conformance.py::"
HOST_TESTS = "tests/transfer/test_host.py::"
SIMULATED_TESTS = "tests/transfer/test_simulated.py::"
CUDA_TESTS = "tests/transfer/test_cuda.py::"
MEMORY_TESTS = "tests/transfer/test_memory.py::"

MOVES = CONFORMANCE + "test_slot_moves_its_bytes_and_no_others"
BESIDE_PAGES = CONFORMANCE + "test_slots_beside_pages"
OUTSIDE = CONFORMANCE + "test_slot_outside_its_page_is_a_bug"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------ which bytes
    Bug(
        "slot-lands-at-its-source-offset",
        PIECES,
        "    to = slot.target_offset\n",
        "    to = slot.source_offset\n",
        (MOVES, SLOT_TESTS + "test_parts_of_a_slot"),
    ),
    Bug(
        "slot-goes-on-to-the-end-of-the-layer",
        PIECES,
        "nbytes = min(end - at, source_ends[source] - at, target_ends[target] - to)",
        "nbytes = min(source_ends[source] - at, target_ends[target] - to)",
        (MOVES, SLOT_TESTS + "test_parts_are_the_fewest"),
    ),
    Bug(
        "slot-runs-over-the-layer-of-its-target",
        PIECES,
        "nbytes = min(end - at, source_ends[source] - at, target_ends[target] - to)",
        "nbytes = min(end - at, source_ends[source] - at)",
        (MOVES, SLOT_TESTS + "test_parts_of_a_slot"),
    ),
    Bug(
        "slot-is-cut-where-nothing-ends",
        PIECES,
        "nbytes = min(end - at, source_ends[source] - at, target_ends[target] - to)",
        "nbytes = min(64, end - at, source_ends[source] - at, target_ends[target] - to)",
        (SLOT_TESTS + "test_parts_of_a_slot",),
    ),
    Bug(
        "host-writes-a-slot-past-its-length",
        PIECES,
        "target[to : to + part.nbytes]",
        "target[to : to + part.nbytes + 1]",
        (MOVES,),
    ),
    Bug(
        "cuda-slot-ignores-where-its-page-is",
        ADDRESSES,
        "on_host += self.host_address + host_page * self.host_stride",
        "on_host += self.host_address + device_page * self.host_stride",
        (MOVES, CUDA_TESTS + "test_slots_beyond_32_bits"),
    ),
    Bug(
        "cuda-slot-of-layers-in-the-wrong-pool",
        ADDRESSES,
        "ends = (piece_ends, page_end) if to_host else (page_end, piece_ends)",
        "ends = (piece_ends, page_end)",
        (MOVES,),
    ),
    # ------------------------------------------------------------------ slots beside pages
    Bug(
        "host-drops-slots-of-a-plan-with-pages",
        HOST,
        "for slot in plan.slots if task.last == len(plan) else ():",
        "for slot in plan.slots if task.last == 0 else ():",
        (BESIDE_PAGES,),
    ),
    Bug(
        "host-copies-slots-with-every-task",
        HOST,
        "for slot in plan.slots if task.last == len(plan) else ():",
        "for slot in plan.slots:",
        (HOST_TESTS + "test_slots_are_copied_once",),
    ),
    Bug(
        "host-finishes-slots-after-close",
        HOST,
        "                if task.running.error is not None or self._stopping:\n"
        "                    return task.running.error or CUT_SHORT\n"
        "                for source, target in self._slot",
        "                if task.running.error is not None:\n"
        "                    return task.running.error or CUT_SHORT\n"
        "                for source, target in self._slot",
        (HOST_TESTS + "test_close_cuts_slots_short",),
    ),
    Bug(
        "host-has-no-task-for-slots-alone",
        HOST,
        "for first in range(0, max(pages, 1), step):",
        "for first in range(0, pages, step):",
        (MOVES,),
        may_hang=True,
    ),
    Bug(
        "cuda-kernel-drops-slots",
        WAYS,
        "            if slots:  # before the kernel: when these fail, no descriptor is in use\n",
        "            if not device_pages:  # before the kernel: when these fail, no descriptor is in use\n",
        (BESIDE_PAGES, CUDA_TESTS + "test_slots_beside_a_kernel_are_plain_copies"),
    ),
    Bug(
        "cuda-copies-slots-twice-without-a-descriptor",
        WAYS,
        "                slots = ()\n",
        "                pass\n",
        (CUDA_TESTS + "test_slots_without_room_for_a_descriptor_are_copied_once",),
    ),
    Bug(
        "cuda-batch-of-slots-that-are-not-pinned",
        CUDA,
        "last = max(last, slot.target if to_host else slot.source)",
        "last = max(last, 0)",
        (CUDA_TESTS + "test_slots_that_are_not_pinned_go_by_dma",),
    ),
    # ------------------------------------------------------------------ never kinder than a device
    Bug(
        "simulated-reads-slots-when-it-writes-them",
        SIMULATED,
        "[source.copy() for source, _ in parts]",
        "[source for source, _ in parts]",
        (SIMULATED_TESTS + "test_slots_are_read_at_the_first_or_the_last_moment",),
    ),
    Bug(
        "simulated-slots-never-fail",
        SIMULATED,
        "slots[: max(0, count - len(plan))]",
        "slots",
        (SIMULATED_TESTS + "test_failed_copy_of_slots_leaves_garbage",),
    ),
    Bug(
        "simulated-slots-hold-no-garbage",
        SIMULATED,
        "                part[:] = POISON_BYTE\n",
        "                assert POISON_BYTE\n",
        (SIMULATED_TESTS + "test_slots_are_read_at_the_first_or_the_last_moment",),
    ),
    Bug(
        "simulated-takes-neighbours-for-the-same-bytes",
        SIMULATED,
        "page == its and start < its_end and end > its_start for",
        "page == its for",
        (SIMULATED_TESTS + "test_copies_of_one_pages_slots_may_overlap_in_time",),
    ),
    Bug(
        "simulated-misses-a-slot-of-a-page-copied-whole",
        SIMULATED,
        "        met.update(page for page, _, _ in other.parts if page in self.pages)\n",
        "",
        (SIMULATED_TESTS + "test_overlapping_slots_are_seen",),
    ),
    # ------------------------------------------------------------------ counts and bounds
    Bug(
        "plan-does-not-count-bytes-of-slots",
        PLAN,
        "return pages + sum(slot.nbytes for slot in self.slots) if self.slots else pages",
        "return pages",
        (SLOT_TESTS + "test_bytes_of_slots_are_counted", SLOT_TESTS + "test_plan_says_what_it_copies"),
    ),
    Bug(
        "queue-of-slots-without-bound",
        PLAN,
        "return len(self.sources) or 1",
        "return len(self.sources)",
        (SLOT_TESTS + "test_loads_of_slots_count_as_a_page_in_the_queue",),
    ),
    Bug(
        "queue-keeps-the-room-of-slots",
        MANAGER,
        "self._queued_load_pages -= job.plan.queue_pages",
        "self._queued_load_pages -= len(job.plan)",
        (SLOT_TESTS + "test_loads_of_slots_count_as_a_page_in_the_queue",),
    ),
    Bug(
        "plan-aliases-the-callers-slots",
        PLAN,
        'own(self, "slots", tuple(self.slots))',
        'own(self, "slots", self.slots)',
        (SLOT_TESTS + "test_plan_keeps_its_own_slots",),
    ),
    # ------------------------------------------------------------------ what is refused
    Bug(
        "slot-of-negative-offset",
        PLAN,
        "if slot.nbytes < 1 or slot.source_offset < 0 or slot.target_offset < 0:",
        "if slot.nbytes < 1 or slot.target_offset < 0:",
        (OUTSIDE,),
    ),
    Bug(
        "slots-written-twice",
        PLAN,
        "if one.target == other.target and one.target_offset + one.nbytes > other.target_offset:",
        "if one.target == other.target and one.target_offset == other.target_offset:",
        (OUTSIDE,),
    ),
    Bug(
        "slot-into-a-page-copied-whole",
        PLAN,
        "        if slot.target in whole:\n",
        "        if slot.target < 0:\n",
        (CONFORMANCE + "test_slot_of_a_page_copied_whole_is_a_bug",),
    ),
    Bug(
        "slot-past-the-end-of-its-target-page",
        PIECES,
        "if max(slot.source_offset, slot.target_offset) + slot.nbytes > page_nbytes:",
        "if slot.source_offset + slot.nbytes > page_nbytes:",
        (OUTSIDE,),
    ),
    Bug(
        "slot-of-a-page-outside-the-pool",
        PIECES,
        "targets = [*plan.targets, *(slot.target for slot in slots)] if slots else plan.targets",
        "targets = plan.targets or [0]",
        (OUTSIDE,),
    ),
    # ------------------------------------------------------------------ parts of pages in memory
    Bug(
        "memory-writes-every-layer-the-same-bytes",
        MEMORY,
        "here, flat = flat[: len(part)], flat[len(part) :]",
        "here, flat = flat[: len(part)], flat",
        (MEMORY_TESTS + "test_part_of_a_page_is_written",),
    ),
    Bug(
        "memory-reads-layers-from-their-start",
        MEMORY,
        "first, last = max(offset - start, 0), min(offset + nbytes - start, plane.shape[1])",
        "first, last = max(offset, 0), min(offset + nbytes - start, plane.shape[1])",
        (MEMORY_TESTS + "test_part_of_a_page_is_read",),
    ),
    Bug(
        "memory-cuts-what-goes-past-the-page",
        MEMORY,
        "if not 0 <= page < pages or offset < 0 or nbytes < 1 or offset + nbytes > page_nbytes:",
        "if not 0 <= page < pages or offset < 0 or nbytes < 1:",
        (MEMORY_TESTS + "test_part_outside_its_page_is_a_bug",),
    ),
    Bug(
        "memory-cuts-numbers-to-bytes",
        MEMORY,
        'if str(data.dtype) not in ("uint8", "torch.uint8"):',
        "if not data.dtype:",
        (MEMORY_TESTS + "test_elements_that_are_no_bytes_are_a_bug",),
    ),
    Bug(
        "span-starts-at-a-byte-for-a-page",
        MEMORY,
        "return rows.view(-1)[first_page * page_nbytes :][:nbytes]",
        "return rows.view(-1)[first_page:][:nbytes]",
        (MEMORY_TESTS + "test_span_is_a_view_over_pages",),
    ),
    Bug(
        "span-past-the-end-of-the-pool",
        MEMORY,
        "if first_page < 0 or nbytes < 1 or first_page * page_nbytes + nbytes > rows.numel():",
        "if first_page < 0 or nbytes < 1 or first_page > pages:",
        (MEMORY_TESTS + "test_span_outside_the_pool_is_a_bug",),
    ),
    Bug(
        id="a-slot-that-is-copied-keeps-its-page-for-good",
        file="kvkeep/copies.py",
        old="return {*pages, *(self._gpu.slots.pages_busy_with(slots) if self._gpu.slots is not None else ())}",
        new="return {*pages}",
        caught_by=("tests/encoder/test_two_tiers.py::test_a_page_whose_slot_is_being_copied_counts_as_in_flight",),
    ),
)
