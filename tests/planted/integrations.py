"""Planted bugs in the adapters for other engines.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

TRANSFORMERS = "kvkeep/integrations/transformers.py"
HF_TESTS = "tests/integrations/test_transformers.py::"

MSTAR = "kvkeep/integrations/mstar.py"
STREAMS = "kvkeep/integrations/mstar_streams.py"
ENCODERS = "kvkeep/integrations/mstar_encoders.py"
M_TESTS = "tests/integrations/test_mstar.py::"
EDGES = "tests/integrations/test_mstar_edges.py::"


def in_mstar(name: str, file: str, old: str, new: str, *caught_by: str) -> Bug:
    return Bug(name, file, old, new, caught_by, needs="mstar")


MSTAR_BUGS = (
    in_mstar(
        "mstar-hit-without-positions",
        STREAMS,
        "        if self._positions is not None and stream.matched:\n",
        "        if self._positions is not None and not stream.matched:\n",
        M_TESTS + "test_pages_of_the_same_schedule_give_the_very_bits",
    ),
    in_mstar(
        "mstar-hit-before-its-pages-are-there",
        STREAMS,
        "        if not self._may_touch(lease):\n            return False\n        theirs",
        "        if not self._may_touch(lease) and not lease.pages:\n            return False\n        theirs",
        M_TESTS + "test_a_request_is_not_ready_while_its_pages_are_on_their_way",
    ),
    in_mstar(
        "mstar-matched-length-from-before-the-load",
        STREAMS,
        "        stream.at = stream.matched = lease.matched_len\n",
        "        stream.at = stream.matched = max(stream.matched, lease.matched_len)\n",
        M_TESTS + "test_a_failed_read_is_a_miss",
    ),
    in_mstar(
        "mstar-trims-without-looking",
        STREAMS,
        "if not _plain(inputs) or n <= cut or (len(want) and inputs.input_ids.tolist() != want.tolist()):",
        "if not _plain(inputs) or n <= cut:",
        EDGES + "test_ids_that_are_not_the_prompt_are_computed_whole",
    ),
    in_mstar(
        "mstar-trims-custom-positions",
        STREAMS,
        "        and inputs.custom_pos_ids is None\n",
        "",
        EDGES + "test_inputs_that_are_more_than_ids_are_computed_whole",
    ),
    in_mstar(
        "mstar-labels-share-a-root",
        STREAMS,
        "label=label, media=prompt.media",
        "label=label[:0], media=prompt.media",
        EDGES + "test_labels_are_kept_apart",
    ),
    in_mstar(
        "mstar-generated-ids-are-not-noted",
        STREAMS,
        "                stream.fed.append((ids, end - len(part), end))\n",
        "                stream.fed.append((ids, end, end))\n",
        M_TESTS + "test_what_was_generated_is_matched_too",
    ),
    in_mstar(
        "mstar-notes-ids-by-reference",
        STREAMS,
        "            ids, end = torch.cat([part for _, part in fed]), 0\n",
        "            ids, end = fed[0][1] if len(fed) == 1 else torch.cat([part for _, part in fed]), 0\n",
        M_TESTS + "test_ids_are_noted_as_they_were_when_they_were_computed",
    ),
    in_mstar(
        "mstar-sampler-sees-the-tail-only",
        STREAMS,
        "tracked[rid] = torch.cat([skipped, own])",
        "tracked[rid] = torch.cat([skipped[:0], own])",
        EDGES + "test_the_sampler_sees_what_was_trimmed",
    ),
    in_mstar(
        "mstar-reset-keeps-shared-pages",
        MSTAR,
        "reset(rid, free=free or streams.named(rid))",
        "reset(rid, free=free)",
        M_TESTS + "test_a_reset_stream_does_not_write_over_pages_of_others",
    ),
    in_mstar(
        "mstar-fork-writes-into-a-hit",
        MSTAR,
        "                streams.forked_onto((rid, to_label))\n",
        "",
        M_TESTS + "test_a_fork_does_not_write_over_pages_of_others",
    ),
    in_mstar(
        "mstar-victim-counts-shared-pages",
        MSTAR,
        "return min(exclusive, int(offload(rid)))",
        "return max(exclusive, int(offload(rid)))",
        M_TESTS + "test_offload_while_pages_are_shared",
    ),
    in_mstar(
        "mstar-forgets-tokens-of-an-offloaded-request",
        MSTAR,
        "                streams.asleep(before, labels)\n",
        "                streams.asleep(before, set())\n",
        M_TESTS + "test_offload_while_pages_are_shared",
    ),
    in_mstar(
        "mstar-offloaded-hit-is-not-cut",
        STREAMS,
        "            new.at, new.matched, new.started, new.stepped = old.at, old.matched, old.started, old.stepped\n",
        "            new.at, new.matched, new.started, new.stepped = old.at, 0, old.started, old.stepped\n",
        M_TESTS + "test_offload_of_a_hit_that_has_not_begun",
    ),
    in_mstar(
        "mstar-promised-pages-are-kept-for-ever",
        STREAMS,
        "                if not self._revoke():\n",
        "                if not self._acting or True:\n",
        M_TESTS + "test_promised_pages_can_be_had_back",
    ),
    in_mstar(
        "mstar-takes-back-pages-of-a-request-that-began",
        STREAMS,
        "            if not stream.started:\n",
        "            if not stream.stepped or True:\n",
        M_TESTS + "test_a_thousand_random_requests",
    ),
    in_mstar(
        "mstar-matches-what-another-worker-computed",
        STREAMS,
        "        if published is not None and label in published.get(self._kv._rank):\n",
        "        if published is not None and label not in published.get(self._kv._rank):\n",
        EDGES + "test_what_another_worker_has_computed_is_not_matched",
    ),
    in_mstar(
        "mstar-ranks-decide-each-for-itself",
        MSTAR,
        "if kv._world_size > 1}",
        "if kv._world_size > 2}",
        EDGES + "test_with_more_than_one_rank_nothing_is_kept",
    ),
    in_mstar(
        "mstar-encoder-output-of-another-walk",
        ENCODERS,
        '    return len(key).to_bytes(4, "little") + key + walk.encode()\n',
        "    return key\n",
        EDGES + "test_encoder_outputs_are_computed_once",
    ),
)

BUGS: tuple[Bug, ...] = (
    *MSTAR_BUGS,
    Bug(
        "exclusive-pages-of-whoever-holds-them",
        "kvkeep/room.py",
        "        return sum(self._ledger.holders(page) == 1 for page in pages)\n",
        "        return sum(self._ledger.holders(page) >= 1 for page in pages)\n",
        ("tests/core/test_exclusive_pages.py::test_exclusive_pages",),
    ),
    Bug(
        "chat-goes-on-with-a-prompt-that-differs",
        TRANSFORMERS,
        "if live is not None and len(ids) > len(self._ids) and ids[: len(self._ids)] == self._ids:",
        "if live is not None and len(ids) > len(self._ids):",
        (HF_TESTS + "test_sessions_in_turns_come_back_to_their_full_pages",),
    ),
    Bug(
        "chat-ends-the-sequence-at-each-call",
        TRANSFORMERS,
        "if live is not None and len(ids) > len(self._ids) and ids[: len(self._ids)] == self._ids:",
        "if live is not None and not self._ids:",
        (HF_TESTS + "test_ten_turns_give_the_same_tokens_and_prefill_only_what_is_new",),
    ),
    Bug(
        "positions-of-a-hit-begin-at-0",
        TRANSFORMERS,
        '    for name in ("input_ids", "position_ids", "cache_position"):\n        if _given(out, name):\n'
        "            out[name] = out[name][..., start:]\n",
        '    for name in ("input_ids", "position_ids", "cache_position"):\n        if _given(out, name):\n'
        '            out[name] = out[name][..., start:] - start * (name == "position_ids")\n',
        (HF_TESTS + "test_logits_after_a_hit_are_those_of_the_whole_prompt",),
    ),
    Bug(
        "forward-over-pages-that-are-on-their-way",
        TRANSFORMERS,
        "        while lease.read_in_progress and not (self._below and lease.gate.wait_on(self._below.stream)):\n",
        "        while lease.read_in_progress and not lease.pages:\n",
        (HF_TESTS + "test_pages_come_back_from_host_memory_as_they_were",),
    ),
    Bug(
        "growing-chat-drops-other-sessions",
        TRANSFORMERS,
        "            self._make_room(live, len(ids) - self.matched_len)\n",
        "",
        (HF_TESTS + "test_a_chat_that_grows_sends_other_sessions_down",),
    ),
    Bug(
        "failed-forward-keeps-what-it-began",
        TRANSFORMERS,
        "        if output is None:\n",
        "        if output is None and not self._ids:\n",
        (HF_TESTS + "test_a_forward_that_fails_leaves_nothing_behind",),
    ),
    Bug(
        "interrupted-call-misleads-the-next",
        TRANSFORMERS,
        "            if first != 0:  #",
        "            if first is None:  #",
        (HF_TESTS + "test_an_interrupted_call_does_not_mislead_the_next",),
    ),
    Bug(
        "changed-weights-go-unseen",
        TRANSFORMERS,
        "    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]\n",
        "    return [(p.data_ptr(), 0) for p in model.parameters()]\n",
        (HF_TESTS + "test_changed_weights_forget_what_was_computed",),
    ),
)
