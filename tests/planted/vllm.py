"""Planted bugs in the connector for vLLM.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

CONNECTOR = "kvkeep/integrations/vllm.py"
SCHEDULER = "kvkeep/integrations/vllm_scheduler.py"
WORKER = "kvkeep/integrations/vllm_worker.py"
IDENTITY = "kvkeep/integrations/vllm_identity.py"
SETTINGS = "kvkeep/integrations/vllm_settings.py"
EVENTS = "kvkeep/integrations/vllm_events.py"
STATS = "kvkeep/integrations/vllm_stats.py"
MESSAGES = "kvkeep/integrations/vllm_messages.py"

ENGINE = "tests/integrations/test_vllm.py::"
FAILURES = "tests/integrations/test_vllm_failures.py::"
NAMES = "tests/integrations/test_vllm_names.py::"
START = "tests/integrations/test_vllm_settings.py::"


def in_vllm(name: str, file: str, old: str, new: str, *caught_by: str, may_hang: bool = False) -> Bug:
    return Bug(f"vllm-{name}", file, old, new, caught_by, may_hang, needs="vllm")


BUGS = (
    # what is matched and loaded
    in_vllm(
        "loads-from-the-start",
        SCHEDULER,
        "        first, last = chain.local // self._block_tokens, ",
        "        first, last = 0, ",
        ENGINE + "test_a_prefix_partly_in_vllms_blocks_is_loaded_from_where_they_end",
    ),
    in_vllm(
        "slot-of-the-page-alone",
        SCHEDULER,
        "(pages * self._per_page + at % self._per_page)",
        "(pages * self._per_page)",
        ENGINE + "test_pages_of_several_blocks_are_found_whole",
    ),
    in_vllm(
        "promises-what-vllm-has",
        SCHEDULER,
        "* self._page_size - computed)",
        "* self._page_size)",
        NAMES + "test_media_are_told_apart_from_the_page_of_their_first_position",
    ),
    in_vllm(
        "takes-the-page-before-another-token-from-a-draft-model",
        SCHEDULER,
        "(found.pages - self._looks_ahead)",
        "(found.pages - 0)",
        NAMES + "test_the_last_page_of_a_match_is_left_where_a_draft_model_looks_ahead",
    ),
    in_vllm(
        "load-without-salt",
        SCHEDULER,
        "self.cache.look(chain.known(), salt, adapter,",
        'self.cache.look(chain.known(), b"", adapter,',
        ENGINE + "test_salts_share_nothing",
    ),
    in_vllm(
        "loads-for-those-who-need-their-prompt-computed",
        SCHEDULER,
        "        if chain is None or request.skip_reading_prefix_cache:\n",
        "        if chain is None:\n",
        NAMES + "test_a_request_that_needs_its_prompt_computed_is_promised_nothing",
    ),
    in_vllm(
        "old-lease-of-a-preempted-request-is-dropped",
        SCHEDULER,
        "            left.over = True\n            self._settle(left)\n",
        "            left.over = True\n",
        ENGINE + "test_preempted_requests_end_with_the_same_texts",
    ),
    # what is stored
    in_vllm(
        "stores-what-is-not-computed-yet",
        SCHEDULER,
        "            pages = min(computed, request.num_tokens) // size\n",
        "            pages = request.num_tokens // size\n",
        ENGINE + "test_an_abort_between_the_parts_of_a_prompt_keeps_the_first",
        ENGINE + "test_whole_blocks_before_the_last_token_come_from_the_tier",
    ),
    in_vllm(
        "blocks-being-stored-are-not-held",
        SCHEDULER,
        "        self._pool.touch([of[i] for i in blocks])\n",
        "        self._pool.touch([])\n",
        ENGINE + "test_what_is_being_stored_is_not_found_yet_and_not_overwritten",
    ),
    in_vllm(
        "blocks-are-held-for-ever",
        SCHEDULER,
        "        self._storing.difference_update(job.blocks)\n        self._let_go(job.blocks)\n",
        "        self._storing.difference_update(job.blocks)\n",
        ENGINE + "test_whole_blocks_before_the_last_token_come_from_the_tier",
    ),
    in_vllm(
        "computes-and-stores-twice",
        SCHEDULER,
        "                return False  # another request is storing them: they will be found in the tier\n",
        "                pass\n",
        ENGINE + "test_what_another_request_is_storing_is_stored_once",
    ),
    in_vllm(
        "end-of-a-request-is-not-stored",
        SCHEDULER,
        "        if pages > chain.pages and not chain.full and",
        "        if pages < 0 and",
        ENGINE + "test_what_another_request_is_storing_is_stored_once",
    ),
    # aborts, failures, resets
    in_vllm(
        "failed-load-leaves-the-tier",
        SCHEDULER,
        "            chain.full = True\n            self.reset()\n",
        "            chain.full = True\n",
        FAILURES + "test_blocks_of_a_failed_load_are_computed",
    ),
    in_vllm(
        "request-of-a-failed-load-fails",
        CONNECTOR,
        '            transfer.kv_load_failure_policy = "recompute"',
        '            transfer.kv_load_failure_policy = "fail"',
        FAILURES + "test_the_engine_is_told_to_compute_what_was_not_loaded",
    ),
    in_vllm(
        "failed-blocks-are-not-told",
        WORKER,
        "                    lost.update(blocks)\n",
        "                    lost.update(())\n",
        FAILURES + "test_blocks_of_a_failed_load_are_computed",
    ),
    in_vllm(
        "dead-worker-is-not-told",
        CONNECTOR,
        "        return Done(dict.fromkeys(jobs, 1), failed, worker.dead, numbers)",
        "        return Done(dict.fromkeys(jobs, 1), failed, False, numbers)",
        FAILURES + "test_an_engine_outlives_its_copies",
    ),
    in_vllm(
        "late-blocks-are-held-behind-a-dead-worker",
        SCHEDULER,
        "            for chain in self._late:\n                self._let_go(chain.blocks)\n",
        "            for chain in self._late:\n                self._let_go([])\n",
        FAILURES + "test_blocks_that_wait_to_be_stored_are_let_go_when_the_copies_die",
    ),
    in_vllm(
        "reset-of-the-tier-is-not-passed-on",
        CONNECTOR,
        "        return self._the_scheduler().reset()\n",
        "        return True\n",
        ENGINE + "test_a_reset_of_vllm_alone_leaves_the_tier",
    ),
    in_vllm(
        "reset-spares-what-waits-to-be-stored",
        SCHEDULER,
        "        for chain in self._late:\n            chain.full = True\n",
        "        for chain in self._late:\n            chain.full = False\n",
        ENGINE + "test_a_reset_forgets_what_is_only_to_be_stored",
    ),
    in_vllm(
        "reset-spares-half-full-pages",
        SCHEDULER,
        "                chain.full = chain.full or chain.lease is not None or chain.computed > 0\n",
        "                chain.full = chain.full or chain.lease is not None\n",
        ENGINE + "test_a_reset_forgets_the_page_that_was_half_full",
    ),
    in_vllm(
        "engine-sleeps-while-copies-run",
        SCHEDULER,
        "        return bool(self._jobs or self._late)\n",
        "        return False\n",
        ENGINE + "test_what_another_request_is_storing_is_stored_once",
    ),
    in_vllm(
        "job-is-over-when-one-rank-is-through",
        SCHEDULER,
        "            job.left -= count\n",
        "            job.left = 0\n",
        NAMES + "test_a_store_is_there_when_every_rank_has_it",
    ),
    # the worker
    in_vllm(
        "lost-part-of-a-large-store",
        WORKER,
        "        self._left[job] = len(plans)\n",
        "        self._left[job] = 1\n",
        START + "test_a_store_of_many_parts_is_over_with_the_last",
    ),
    in_vllm(
        "layers-on-top-of-each-other",
        WORKER,
        "        apart = placed.layer_stride >= span",
        "        apart = placed.layer_stride > span * 2",
        START + "test_the_bytes_of_a_block_are_found_in_every_layout",
    ),
    in_vllm(
        "region-twice",
        WORKER,
        "            if region.data_ptr() not in seen:\n",
        "            if True:\n",
        START + "test_the_bytes_of_a_block_are_found_where_layers_differ",
    ),
    in_vllm(
        "wrong-bytes-are-not-counted",
        WORKER,
        '        self.count("wrong_blocks", wrong)\n',
        '        self.count("wrong_blocks", 0)\n',
        START + "test_bytes_that_changed_in_the_tier_are_counted",
    ),
    # identities
    in_vllm(
        "salt-is-dropped",
        IDENTITY,
        '    salt = request.cache_salt.encode() if request.cache_salt else b""\n',
        '    salt = b""\n',
        NAMES + "test_requests_that_differ_in_what_kv_depends_on_are_told_apart",
    ),
    in_vllm(
        "adapter-by-name-alone",
        IDENTITY,
        ', ("id", str(lora.lora_int_id)), ("path", lora.lora_path))',
        ', ("id", "0"), ("path", ""))',
        NAMES + "test_requests_that_differ_in_what_kv_depends_on_are_told_apart",
    ),
    in_vllm(
        "adapter-that-is-exchanged-in-place",
        IDENTITY,
        "        if lora.load_inplace:\n",
        "        if not lora:\n",
        NAMES + "test_a_request_that_cannot_be_named_is_counted_and_not_cached",
    ),
    in_vllm(
        "mixed-embeddings-are-cached",
        IDENTITY,
        "    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:\n",
        "    if request.prompt_embeds is not None:\n",
        NAMES + "test_a_request_that_cannot_be_named_is_counted_and_not_cached",
    ),
    in_vllm(
        "media-without-identifier-are-named",
        IDENTITY,
        "hashlib.sha256(name).digest() if feature.identifier else None\n",
        "hashlib.sha256(name).digest()\n",
        NAMES + "test_a_request_that_cannot_be_named_is_counted_and_not_cached",
    ),
    in_vllm(
        "media-of-another-kind",
        IDENTITY,
        '(("modality", feature.modality.encode()), ("identifier"',
        '(("identifier"',
        NAMES + "test_media_are_told_apart_from_the_page_of_their_first_position",
    ),
    in_vllm(
        "match-inside-an-image",
        IDENTITY,
        "causal=not whole",
        "causal=True",
        NAMES + "test_no_match_ends_inside_an_item_whose_attention_is_not_causal",
    ),
    # settings
    in_vllm(
        "unknown-option-is-ignored",
        SETTINGS,
        "    if unknown:\n",
        "    if not known:\n",
        START + "test_options_that_are_wrong_are_named",
    ),
    in_vllm(
        "any-version",
        SETTINGS,
        '".".join(found.split(".")[:2]) not in KNOWN_VERSIONS:',
        'found.split(".")[0] not in ("0",):',
        START + "test_another_vllm_is_refused_unless_allowed",
    ),
    in_vllm(
        "any-kv-dtype",
        SETTINGS,
        "    if dtype not in KV_DTYPES:\n",
        "    if not dtype:\n",
        START + "test_an_engine_that_cannot_be_served_is_refused",
    ),
    in_vllm(
        "half-a-role",
        SETTINGS,
        '    if transfer.kv_role != "kv_both":\n',
        '    if transfer.kv_role == "kv_producer":\n',
        START + "test_an_engine_that_cannot_be_served_is_refused",
    ),
    in_vllm(
        "windows-are-served",
        SETTINGS,
        '    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):\n',
        '    if not kind.endswith("Spec"):\n',
        START + "test_kv_layers_of_other_kinds_are_refused",
    ),
    in_vllm(
        "tier-one-block-too-small",
        SETTINGS,
        "    if slots * block_tokens < longest:\n",
        "    if (slots + 1) * block_tokens < longest:\n",
        START + "test_a_tier_smaller_than_one_request_is_refused",
    ),
    in_vllm(
        "each-rank-takes-all-of-the-memory",
        SETTINGS,
        "(block_nbytes * ranks * settings.blocks_per_page)",
        "(block_nbytes * settings.blocks_per_page)",
        START + "test_ranks_share_the_memory_and_hold_the_same_pages",
    ),
    in_vllm(
        "tier-of-the-largest-rank",
        CONNECTOR,
        "        slots = min(ready.slots",
        "        slots = max(ready.slots",
        START + "test_a_tier_smaller_than_one_request_is_refused",
    ),
    in_vllm(
        "inside-another-connector",
        CONNECTOR,
        "        if has_kv_transfer_group() and get_kv_transfer_group() is not self:\n",
        "        if has_kv_transfer_group() and get_kv_transfer_group() is None:\n",
        START + "test_a_second_connector_is_refused",
    ),
    # events and counters
    in_vllm(
        "event-without-its-parent",
        EVENTS,
        "            parent=request.block_hashes[start - 1] if start else None,\n",
        "            parent=None,\n",
        FAILURES + "test_events_tell_vllms_own_hashes",
    ),
    in_vllm(
        "removed-blocks-are-not-told",
        EVENTS,
        "            self._told.append(Removed(gone))\n",
        "            pass\n",
        FAILURES + "test_events_tell_what_leaves",
    ),
    in_vllm(
        "shared-block-leaves-with-the-first-page",
        EVENTS,
        "            if left:\n",
        "            if not left:\n",
        FAILURES + "test_events_tell_what_leaves",
    ),
    in_vllm(
        "block-told-twice",
        EVENTS,
        "        return not before\n",
        "        return True\n",
        FAILURES + "test_pages_that_begin_alike_are_told_block_by_block",
    ),
    in_vllm(
        "pages-that-come-at-the-end-are-not-told",
        SCHEDULER,
        "            if self.events is not None:  # its pages may take",
        "            if self.events is None:  # its pages may take",
        FAILURES + "test_events_tell_pages_that_take_the_place_of_others",
    ),
    in_vllm(
        "dead-tier-is-not-told",
        SCHEDULER,
        "            self.cache.reset()  # so that whoever follows",
        "            pass  # so that whoever follows",
        FAILURES + "test_an_engine_outlives_its_copies",
    ),
    in_vllm(
        "events-of-the-gpu",
        CONNECTOR,
        "                medium=MEDIUM_CPU,\n",
        '                medium="GPU",\n',
        FAILURES + "test_events_tell_vllms_own_hashes",
    ),
    in_vllm(
        "counters-since-the-start",
        SCHEDULER,
        "        since = {name: value - self._reported.get(name, 0)",
        "        since = {name: value - 0",
        FAILURES + "test_counters_are_at_vllms_metrics",
    ),
    in_vllm(
        "ranks-are-not-added-up",
        MESSAGES,
        "            ranks[job] = ranks.get(job, 0) + count\n",
        "            ranks[job] = count\n",
        START + "test_ranks_share_the_memory_and_hold_the_same_pages",
    ),
    in_vllm(
        "later-report-replaces-the-earlier",
        STATS,
        "            counters[name] = counters.get(name, 0) + value\n",
        "            counters[name] = value\n",
        FAILURES + "test_reports_add_up",
    ),
)
