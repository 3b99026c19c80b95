"""Planted bugs in the adapters for other engines.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

TRANSFORMERS = "kvkeep/integrations/transformers.py"
HF_TESTS = "tests/integrations/test_transformers.py::"

BUGS: tuple[Bug, ...] = (
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
        "            while lease.read_in_progress and not (self._below and lease.gate.wait_on(self._below.stream)):\n",
        "            while lease.read_in_progress and not lease.pages:\n",
        (HF_TESTS + "test_pages_come_back_from_host_memory_as_they_were",),
    ),
    Bug(
        "failed-forward-keeps-what-it-began",
        TRANSFORMERS,
        "        if output is None:\n",
        "        if output is None and not self._ids:\n",
        (HF_TESTS + "test_a_forward_that_fails_leaves_nothing_behind",),
    ),
    Bug(
        "changed-weights-go-unseen",
        TRANSFORMERS,
        "    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]\n",
        "    return [(p.data_ptr(), 0) for p in model.parameters()]\n",
        (HF_TESTS + "test_changed_weights_forget_what_was_computed",),
    ),
)
