"""Planted bugs of the multimodal path of the embedded engine.

Must not hold anything but data.
"""

from tests.planted.bug import Bug

IMAGES = "tests/engine/vision/test_images.py"
GATE = "tests/cli/test_verify_multimodal.py"
FEATURES_FILE = "kvkeep/engine/vision/features.py"
ATTENTION_FILE = "kvkeep/engine/paged_attention.py"
ENGINE_FILE = "kvkeep/engine/engine.py"

BUGS: tuple[Bug, ...] = (
    Bug(
        id="image-named-by-its-resized-pixels",
        file="kvkeep/engine/vision/pictures.py",
        old="            digest = self._digester.digest(opened)",
        new='            digest = self._digester.digest(self._processor(images=opened)["pixel_values"][0])',
        caught_by=(f"{IMAGES}::test_the_digest_is_that_of_the_raw_picture_and_the_parameters",),
    ),
    Bug(
        id="image-named-without-its-preprocessing",
        file="kvkeep/engine/vision/pictures.py",
        old='Digester("image", processor_parameters(processor))',
        new='Digester("image")',
        caught_by=(f"{IMAGES}::test_the_digest_is_that_of_the_raw_picture_and_the_parameters",),
    ),
    Bug(
        id="features-of-the-first-image-for-all",
        file=FEATURES_FILE,
        old="get_or_compute(image.digest, compute)",
        new="get_or_compute(request.images[0].digest or image.digest, compute)",
        caught_by=(f"{IMAGES}::test_logits_are_those_of_transformers",),
    ),
    Bug(
        id="features-of-tenants-are-shared",
        file=FEATURES_FILE,
        old="self._outputs(request.salt)",
        new='self._outputs(b"")',
        caught_by=(f"{IMAGES}::test_tenants_share_no_features",),
    ),
    Bug(
        id="tower-runs-for-matched-images",
        file=FEATURES_FILE,
        old="            if first < last:",
        new="            if image.offset < end:",
        caught_by=(f"{IMAGES}::test_an_image_that_is_matched_is_not_even_looked_up",),
    ),
    Bug(
        id="every-chunk-takes-an-image-from-its-start",
        file=FEATURES_FILE,
        old="features[first - image.offset : last - image.offset]",
        new="features[: last - first]",
        caught_by=(f"{IMAGES}::test_logits_are_those_of_transformers",),
    ),
    Bug(
        id="images-that-see-each-other-may-touch",
        file=FEATURES_FILE,
        old="if span.offset < behind + (not span.causal):",
        new="if span.offset < behind:",
        caught_by=(f"{IMAGES}::test_bad_images_are_refused_one_by_one",),
    ),
    Bug(
        id="features-land-in-the-first-request-of-a-batch",
        file="kvkeep/engine/forward.py",
        old="features.extend((len(ids) + row, found) for row, found in piece.features)",
        new="features.extend((row, found) for row, found in piece.features)",
        caught_by=(f"{IMAGES}::test_company_changes_no_image",),
    ),
    Bug(
        id="an-image-is-cut-where-the-chunk-ends",
        file=ENGINE_FILE,
        old="        end = request.held.chunk_end(start, want)",
        new="        end = want",
        caught_by=(f"{IMAGES}::test_a_unit_is_never_split",),
    ),
    Bug(
        id="an-image-longer-than-a-chunk-never-gets-its-turn",
        file=ENGINE_FILE,
        old="        if end - start > budget and budget < self._chunk_tokens:",
        new="        if end - start > budget:",
        caught_by=(f"{IMAGES}::test_a_unit_is_never_split",),
        may_hang=True,
    ),
    Bug(
        id="positions-of-an-image-do-not-see-each-other",
        file=ATTENTION_FILE,
        old="                    last_seen[max(first - start, 0) : last - start] = last - 1",
        new="                    last_seen[max(first - start, 0) : last - start] += 0",
        caught_by=(f"{IMAGES}::test_logits_are_those_of_transformers",),
    ),
    Bug(
        id="an-image-ends-where-a-block-of-rows-does",
        file=ATTENTION_FILE,
        old="keys = self._arithmetic.keys(max([end, *(last for _, last in units)]))",
        new="keys = self._arithmetic.keys(end)",
        caught_by=(f"{IMAGES}::test_an_image_over_two_blocks_of_rows",),
    ),
    Bug(
        id="a-split-image-goes-unnoticed",
        file=ATTENTION_FILE,
        old="            if first < self.start < last or first < self.end < last:",
        new="            if first < self.start < last:",
        caught_by=(f"{IMAGES}::test_a_unit_is_never_split",),
    ),
    Bug(
        id="the-cache-is-not-told-of-images",
        file=ENGINE_FILE,
        old="media=request.media, reuse=request.reuse",
        new="media=(), reuse=request.reuse",
        caught_by=(f"{IMAGES}::test_another_image_or_the_same_moved_is_another_prompt", f"{GATE}"),
    ),
    Bug(
        id="a-placeholder-is-generated",
        file=ENGINE_FILE,
        old="        if self.loaded.vision is not None:  # nothing could",
        new="        if False:  # nothing could",
        caught_by=(f"{IMAGES}::test_a_placeholder_is_never_generated",),
    ),
    Bug(
        id="the-gate-does-not-mind-unnoticed-faults",
        file="kvkeep/engine/verify/multimodal.py",
        old="held = bool(cases) and all(noticed) and",
        new="held = bool(cases) and",
        caught_by=(f"{GATE}::test_a_planted_fault_that_is_not_noticed_fails_the_gate",),
    ),
    Bug(
        id="the-judge-takes-digests-for-images",
        file="kvkeep/engine/verify/strict.py",
        old="seen = tuple((image.offset, image.pixels.numpy().tobytes()) for image in request.images)",
        new="seen = tuple((image.offset, image.digest) for image in request.images)",
        caught_by=(f"{GATE}::test_the_gate_passes_on_the_real_thing",),
    ),
)
