"""Planted bugs in replays: what is read, in which order it comes, how it is counted.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

READING = "kvkeep/replay/reading.py"
FORMATS = "kvkeep/replay/formats.py"
CHAT = "kvkeep/replay/chat.py"
ORDERS = "kvkeep/replay/orders.py"
PAGES = "kvkeep/replay/pages.py"
NAMEFILE = "kvkeep/replay/namefile.py"
BEST = "kvkeep/replay/best.py"
REFERENCE = "kvkeep/replay/reference.py"
ENGINE = "kvkeep/replay/engine.py"
LINK = "kvkeep/replay/link.py"
COMMAND = "kvkeep/replay/command.py"

READS = "tests/replay/test_formats.py::"
IN_ORDER = "tests/replay/test_orders.py::"
REPLAYS = "tests/replay/test_replaying.py::"
NAIVE = REPLAYS + "test_reference_accounting_is_a_page_lru"
BLOCKS = REPLAYS + "test_blocks_count_as_their_tokens_do"
RELATED = "tests/replay/test_related_orders.py::"

BUGS: tuple[Bug, ...] = (
    # What is read.
    Bug(
        "replay-takes-a-cut-file-for-a-whole-one",
        READING,
        'return b"".join(parts), False',
        'return b"".join(parts), True',
        (READS + "test_a_file_cut_short_says_how_much_was_read",),
    ),
    Bug(
        "replay-shares-block-ids-between-sessions",
        FORMATS,
        "block, base = own, base + top",
        "block, base = own, base",
        (READS + "test_claude_code_sessions",),
    ),
    Bug(
        "replay-lets-a-bad-session-leave-half-of-it",
        FORMATS,
        "            chains += own\n            read.append(requests)",
        "            read.append(requests)\n            chains += own[1:]",
        (READS + "test_a_token_trace_with_turns",),
    ),
    Bug(
        "replay-chat-forgets-the-line-end-behind-a-message",
        CHAT,
        '*completion, *encode("\\n")]',
        "*completion]",
        (READS + "test_a_chat_log",),
    ),
    Bug(
        "replay-joins-a-fork-to-the-chain-it-left",
        CHAT,
        "if np.array_equal(before[:both], ids[:both]):",
        "if both:",
        (READS + "test_token_ids_a_request_a_line",),
    ),
    # In which order.
    Bug(
        "replay-newcomer-enters-the-round-that-made-room",
        ORDERS,
        "after += [(newcomer, 0) for newcomer in islice(waiting, 1)]",
        "after[:0] = [(newcomer, 0) for newcomer in islice(waiting, 1)]",
        (IN_ORDER + "test_rotation",),
    ),
    Bug(
        "replay-open-takes-the-trace-time-of-a-session",
        ORDERS,
        "shift_s = start_s - session[0].time_s",
        "shift_s = start_s",
        (IN_ORDER + "test_open",),
    ),
    # How it is cut and counted.
    Bug(
        "replay-blocks-forget-the-part-of-a-page",
        PAGES,
        "return full * self.width + (part > 0)",
        "return full * self.width",
        (BLOCKS,),
    ),
    Bug(
        "replay-names-a-block-behind-the-wrong-page",
        PAGES,
        "parent = int(names[pages[first - 1]]) if first else self.identity.name",
        "parent = int(names[pages[0]]) if first else self.identity.name",
        (BLOCKS,),
    ),
    Bug(
        "replay-trusts-a-damaged-file-of-names",
        NAMEFILE,
        "if data[:HEADER_NBYTES] != _header(body) or len(body) % 8:",
        "if not data.startswith(MAGIC) or len(body) % 8:",
        (REPLAYS + "test_names_are_kept_and_made_anew",),
    ),
    Bug(
        "replay-bound-stores-an-answer-twice",
        BEST,
        "seen = min(end, max(prompt, first, top.get(use, 0)))",
        "seen = min(end, max(prompt, first))",
        (REPLAYS + "test_the_bound_with_answers_that_repeat",),
    ),
    Bug(
        "replay-bound-counts-answers-as-uses",
        BEST,
        "following[pages[:prompt]] = number",
        "following[pages] = number",
        (REPLAYS + "test_the_bound_with_answers_that_repeat",),
    ),
    Bug(
        "replay-reference-tells-no-time",
        REFERENCE,
        "            self._clock.now_s = request.time_s\n            self.serve(request)",
        "            self.serve(request)",
        (REPLAYS + "test_an_order_is_told_the_time_of_the_trace",),
    ),
    Bug(
        "replay-reference-keeps-a-page-too-many",
        REFERENCE,
        "over = ledger.idle - self.capacity_pages",
        "over = ledger.idle - self.capacity_pages - 1",
        (NAIVE,),
    ),
    Bug(
        "replay-engine-counts-a-resumed-request-again",
        ENGINE,
        "if not job.served:",
        "if not job.served or job.stalled:",
        (REPLAYS + "test_a_decode_that_finds_no_page_preempts_the_youngest",),
    ),
    Bug(
        "replay-engine-runs-two-turns-of-a-session",
        ENGINE,
        "return live is None or live[0] == job.request[1:3]",
        "return True",
        (REPLAYS + "test_a_turn_waits_for_the_turn_before_it",),
    ),
    Bug(
        "replay-engine-ignores-recorded-times",
        ENGINE,
        "return min(takes_s if request.first_token_s is None else request.first_token_s, request.service_s)",
        "return takes_s",
        (REPLAYS + "test_the_recorded_service_time_is_how_long_pages_are_held",),
    ),
    Bug(
        "replay-engine-prefills-all-at-once",
        ENGINE,
        "        if len(self._lane) == 1:\n            self._after(",
        "        if self._lane:\n            self._after(",
        (REPLAYS + "test_requests_are_prefilled_one_at_a_time",),
    ),
    Bug(
        "replay-link-copies-all-at-once",
        LINK,
        "end_s = max(self._clock.now_s, self._free_s[direction]) + takes_s",
        "end_s = self._clock.now_s + takes_s",
        (REPLAYS + "test_copies_of_one_direction_go_one_after_the_other",),
    ),
    Bug(
        "replay-best-is-given-the-gpu-only",
        COMMAND,
        "both = settings.gpu_tokens // options.page_size + settings.cpu_tokens // options.page_size",
        "both = settings.gpu_tokens // options.page_size",
        ("tests/cli/test_replay.py::test_the_best_possible_has_both_tiers",),
    ),
    Bug(
        "related-pages-leave-from-the-middle",
        "tools/prefix_pool.py",
        "        while path[-1] in tree.children:",
        "        while False:",
        (RELATED + "test_the_end_of_a_chain_leaves_for_a_page_before_it",),
    ),
    Bug(
        "related-lhd-lets-go-of-what-is-worth-most",
        "tools/classic_orders.py",
        "        at = int(worths.argmin())",
        "        at = int(worths.argmax())",
        (RELATED + "test_lhd_keeps_a_part_of_a_loop",),
    ),
    Bug(
        "related-lecar-rewards-regret",
        "tools/classic_orders.py",
        "self.RATE * (regrets[1] - regrets[0])",
        "self.RATE * (regrets[0] - regrets[1])",
        (RELATED + "test_lecar_turns_to_the_expert_that_would_have_kept",),
    ),
)
