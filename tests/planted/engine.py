"""Planted bugs of the embedded engine.

Must not hold anything but data.
"""

from tests.planted.bug import Bug

STRICT = "tests/engine/test_strict.py"
ENGINE = "tests/engine/test_engine.py"
ATTENTION_FILE = "kvkeep/engine/paged_attention.py"
ENGINE_FILE = "kvkeep/engine/engine.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        id="decode-rows-are-not-padded",
        file="kvkeep/engine/forward.py",
        old="padding = [0] * (self._arithmetic.rows(len(ids)) - len(ids))",
        new="padding = [0] * 0",
        caught_by=(f"{STRICT}::test_any_split",),
    ),
    Bug(
        id="query-rows-are-not-padded",
        file="kvkeep/engine/arithmetic.py",
        old="return _up(count, self.query_quantum)",
        new="return count",
        caught_by=(f"{STRICT}::test_any_split",),
    ),
    Bug(
        id="keys-are-padded-to-pages-only",
        file="kvkeep/engine/arithmetic.py",
        old="if not self.key_tails:",
        new="if self.key_tails:",
        caught_by=(f"{STRICT}::test_smollm2",),
    ),
    Bug(
        id="calibration-tries-one-row-count",
        file="kvkeep/engine/arithmetic.py",
        old="counts = {candidate.rows(count) for count in self._tried}",
        new="counts = {candidate.rows(max(self._tried))}",
        caught_by=("tests/engine/test_arithmetic.py::test_rows_are_padded_as_far_as_needed",),
    ),
    Bug(
        id="garbage-behind-the-last-position-is-not-blanked",
        file=ATTENTION_FILE,
        old="            if gather.blank is not None:",
        new="            if False:",
        caught_by=(f"{ENGINE}::test_what_free_pages_hold_does_not_matter",),
    ),
    Bug(
        id="a-position-lands-one-slot-off",
        file=ATTENTION_FILE,
        old="parts.append(own[positions // page_size - first] * per_page + positions % page_size)",
        new="parts.append(own[positions // page_size - first] * per_page + (positions + 1) % page_size)",
        caught_by=(f"{ENGINE}::test_only_computed_positions_are_written",),
    ),
    Bug(
        id="a-row-sees-the-one-behind-it",
        file=ATTENTION_FILE,
        old="mask = self._mask(torch.arange(keys, device=self._device)[None, :] > last_seen)",
        new="mask = self._mask(torch.arange(keys, device=self._device)[None, :] > last_seen + 1)",
        caught_by=(f"{STRICT}::test_any_split",),
    ),
    Bug(
        id="decode-does-not-see-its-own-token",
        file=ATTENTION_FILE,
        old="mask = self._mask(torch.arange(gather.keys, device=self._device)[None, :] >= ends[:, None])",
        new="mask = self._mask(torch.arange(gather.keys, device=self._device)[None, :] >= ends[:, None] - 1)",
        caught_by=(f"{STRICT}::test_decode_equals_prefill",),
    ),
    Bug(
        id="the-oldest-is-preempted",
        file=ENGINE_FILE,
        old="youngest = self._running[-1]",
        new="youngest = self._running[0] if len(self._running) > 1 else self._running[-1]",
        caught_by=(f"{ENGINE}::test_oldest_is_never_preempted",),
        may_hang=True,
    ),
    Bug(
        id="a-preempted-request-loses-its-place-in-line",
        file=ENGINE_FILE,
        old="self._waiting = deque(sorted((*self._waiting, request), key=_number))",
        new="self._waiting.append(request)",
        caught_by=(f"{ENGINE}::test_96_pages_for_32_requests",),
    ),
    Bug(
        id="the-sampled-token-is-taken-to-have-kv",
        file=ENGINE_FILE,
        old="            self._commit(request, piece.segment.end)",
        new="            self._commit(request, piece.segment.end + piece.wanted)",
        caught_by=(f"{ENGINE}::test_ends",),
    ),
    Bug(
        id="a-draw-does-not-depend-on-the-position",
        file="kvkeep/engine/sampling.py",
        old="key=[params.seed, position]",
        new="key=[params.seed, 0]",
        caught_by=("tests/engine/test_sampling.py::test_a_draw_depends_on_seed_and_position_only",),
    ),
    Bug(
        id="rope-pairs-are-left-as-neighbours",
        file="kvkeep/engine/llama2c.py",
        old='half_split(tensors["wk"][layer], header.kv_heads)',
        new='tensors["wk"][layer]',
        caught_by=("tests/engine/test_loader.py::test_stories_text",),
    ),
    Bug(
        id="a-request-larger-than-the-pool-is-accepted",
        file=ENGINE_FILE,
        old="            if total > limit:",
        new="            if len(ids) > limit:",
        caught_by=(f"{ENGINE}::test_refused_requests",),
    ),
    Bug(
        id="a-failed-load-is-taken-to-have-arrived",
        file="kvkeep/engine/request.py",
        old="        self.gated = lease.read_in_progress",
        new="        self.gated = False",
        caught_by=("tests/engine/test_tiers.py::test_pages_that_fail_to_arrive_are_computed",),
    ),
    Bug(
        id="a-shortened-lease-keeps-its-holes",
        file="kvkeep/lease.py",
        old="        self.holes = []  # they are behind it",
        new="        pass",
        caught_by=("tests/sim/test_faults.py::test_holes_behind_a_load_that_failed_are_holes_no_more",),
    ),
    Bug(
        id="suspension-is-always-exclusive",
        file=ENGINE_FILE,
        old='complete=self.config.suspend == "complete")',
        new="complete=False)",
        caught_by=("tests/cli/test_verify.py::test_the_gate_passes_on_the_real_thing[strict]",),
    ),
    Bug(
        id="opting-out-of-reuse-is-ignored",
        file=ENGINE_FILE,
        old="            reuse=reuse and self.config.reuse,",
        new="            reuse=self.config.reuse,",
        caught_by=(f"{ENGINE}::test_salt_and_opt_outs",),
    ),
)
