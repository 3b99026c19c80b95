"""Planted bugs in encoder outputs and the workloads that repeat them.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

LEDGER = "kvkeep/tiers/ledger.py"
ENCODER_TESTS = "tests/encoder/test_encoder.py::"
WORTH_TESTS = "tests/encoder/test_worth.py::"
SERVING = "kvkeep/replay/workloads/serving.py"
WORKLOAD_TESTS = "tests/replay/test_workloads.py::"

BUGS: tuple[Bug, ...] = (
    Bug(
        "rhythm-looks-at-outputs-alone",
        "kvkeep/index/rhythm.py",
        "self._compare(DRAWN_WHOLE)",
        "self._compare(0)",
        (WORTH_TESTS + "test_few_cold_pages_among_many_outputs_are_found",),
    ),
    Bug(
        "outputs-are-weighed-like-kv",
        "kvkeep/outputs.py",
        "self._costs.worth(run.seconds, run.nbytes, self.page_nbytes),",
        "1.0,",
        (WORTH_TESTS + "test_what_took_longer_to_compute_stays_longer",),
    ),
    Bug(
        "costs-of-an-output-are-not-by-the-byte",
        "kvkeep/costs.py",
        "return seconds / nbytes * page_nbytes / (self._page_size * self.prefill_s_per_token)",
        "return seconds / (self._page_size * self.prefill_s_per_token)",
        ("tests/core/test_costs.py::test_what_a_byte_of_an_output_saves",),
    ),
    Bug(
        "ledger-takes-slots-for-pages-where-several-outputs-leave",
        LEDGER,
        "return page_ids(p for p in pages if p < self.total), page_ids(p for p in pages if p >= self.total)",
        "return pages[:-1], pages[-1:]",
        (ENCODER_TESTS + "test_reset_forgets_many_outputs",),
    ),
    Bug(
        "workload-asks-the-encoder-though-its-kv-matched",
        SERVING,
        "if encoded.end is not None and encoded.end <= matched:",
        "if False:",
        (WORKLOAD_TESTS + "test_an_output_whose_kv_matched_is_not_needed",),
    ),
    Bug(
        "workload-placeholders-without-a-digest",
        SERVING,
        "lease = self.cache.admit(request.prompt, media=request.media)",
        "lease = self.cache.admit(request.prompt)",
        (WORKLOAD_TESTS + "test_another_picture_behind_the_same_text_matches_nothing",),
    ),
    Bug(
        "workload-split-shares-the-outputs-tier",
        SERVING,
        "self._outputs: Outputs = self._tiers[-1].cache.outputs()",
        "self._outputs: Outputs = self._tiers[0].cache.outputs()",
        (WORKLOAD_TESTS + "test_a_split_keeps_outputs_out_of_the_kv_part",),
    ),
    Bug(
        "workload-keeps-the-first-screenshots-instead-of-the-last",
        "kvkeep/replay/workloads/image_chat.py",
        "and drop > 0:",
        "and drop > 0 and part is past[-1]:",
        (WORKLOAD_TESTS + "test_a_session_keeps_its_screenshots",),
    ),
)
