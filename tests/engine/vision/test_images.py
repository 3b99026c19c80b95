"""Images in the embedded engine: what transformers computes, one encoder run an image, no hit about another one."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.engine.engine import Engine, EngineConfig, ImageInput, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.paged_attention import BLOCK_ROWS, Segment
from kvkeep.engine.vision.models import BEGIN_OF_IMAGE, END_OF_IMAGE, build, load_vision_model
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.media.canonical import processor_parameters
from kvkeep.media.digest import digest
from tests.engine.vision.conftest import MODELS, SIZE, hugging_face_logits, loaded, prompt, text

Photos = tuple[ImageInput, ...]
PAGE = 48


def engine_of(model: LoadedModel, **settings: Any) -> Engine:
    return Engine(model, EngineConfig(**{"page_size": PAGE, "pool_pages": 64, "threads": 1} | settings))


def answer(engine: Engine, ids: list[int], images: list[ImageInput], new: int = 3, **options: Any) -> Request:
    request = engine.submit(ids, SamplingParams(max_new_tokens=new), images=images, **options)
    engine.run()
    engine.cache.check_invariants()
    return request


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [16, 1024])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, chunk_tokens: int, photos: Photos):
    """Prefilled in chunks and decoded, over pages, with features: transformers' full forward within float32's error."""
    model, reference = loaded(name), build(name)
    assert model.vision is not None
    ids, images = prompt(
        model,
        [
            text(30, 1),
            [BEGIN_OF_IMAGE],
            photos[0],
            [END_OF_IMAGE],
            text(200, 2),
            photos[1],
            [7],
            photos[0],
            text(70, 3),
        ],
    )
    for settings in ({"reuse": False, "store": False}, {}, {}):
        engine = engine_of(model, chunk_tokens=chunk_tokens, page_size=16, **settings)
        seen: dict[int, torch.Tensor] = {}

        def watch(
            request: Request, start: int, end: int, logits: torch.Tensor | None, seen: dict[int, torch.Tensor] = seen
        ) -> None:
            if logits is not None:
                seen[end - 1] = logits.clone()

        engine.on_forward = watch
        request = answer(engine, ids, images, new=6)
        wanted = hugging_face_logits(reference, model.vision.placeholder, list(request.ids), images)
        assert len(seen) == 6
        for position, logits in seen.items():
            torch.testing.assert_close(logits, wanted[position], atol=5e-5, rtol=1e-4)
            assert int(logits.argmax()) == int(wanted[position].argmax())


def test_images_matter(model: LoadedModel, photos: Photos):
    """Another photograph in the same place gives other logits: a test that compares nothing would not be noticed."""
    assert model.vision is not None
    with torch.inference_mode():
        features = [model.vision.encode(photo.pixels) for photo in photos]
    assert all(f.abs().max() > 0.1 for f in features)
    assert (features[0] - features[1]).abs().max() > 0.1


def test_company_changes_no_image(model: LoadedModel, photos: Photos):
    """Two requests with images in one batch get what each gets alone."""
    prompts = [prompt(model, [text(9, n), photos[n], text(40, n + 5)]) for n in range(3)]
    alone = [answer(engine_of(model), *one, new=5).output_ids for one in prompts]
    engine = engine_of(model)
    together = [engine.submit(ids, SamplingParams(max_new_tokens=5), images=images) for ids, images in prompts]
    engine.run()
    assert alone == [request.output_ids for request in together]
    assert 3 == len({tuple(output) for output in alone})


def test_a_unit_is_never_split(photos: Photos):
    """An image whose positions see each other is computed in one chunk, whole, however short the chunks are."""
    model = loaded("gemma3")
    ids, images = prompt(model, [text(10, 1), photos[0], text(3, 2), photos[1], text(20, 4)])
    engine = engine_of(model, page_size=8, chunk_tokens=8)
    chunks: list[tuple[int, int]] = []
    engine.on_forward = lambda request, start, end, logits: chunks.append((start, end))
    answer(engine, ids, images)
    assert [(0, 8), (8, 10), (10, 26), (26, 29), (29, 45)] == chunks[:5]
    with pytest.raises(InvariantViolation, match="10 to 26"):
        Segment([0, 1], 0, 16, [(10, 26)])


@pytest.mark.parametrize("lead", [BLOCK_ROWS - 5, BLOCK_ROWS - 1, BLOCK_ROWS])
def test_an_image_over_two_blocks_of_rows(lead: int, gemma3: LoadedModel, photos: Photos):
    """Attention takes a chunk's rows in blocks: an image that lies in two of them is seen whole by all of itself."""
    assert gemma3.vision is not None
    ids, images = prompt(gemma3, [text(lead, 1), photos[0], text(3, 2)])
    engine = engine_of(gemma3, page_size=512, pool_pages=2)
    seen: list[torch.Tensor] = []
    engine.on_forward = lambda request, start, end, logits: seen.append(logits) if logits is not None else None
    answer(engine, ids, images, new=1)
    wanted = hugging_face_logits(build("gemma3"), gemma3.vision.placeholder, ids, images)[-1]
    torch.testing.assert_close(seen[0], wanted, atol=5e-5, rtol=1e-4)


# --- what the cache finds --------------------------------------------------------------------------------------------


def test_the_tower_runs_once_an_image(model: LoadedModel, photos: Photos):
    """Twice in a prompt, in another prompt, behind other text: the tower has seen it once."""
    engine = engine_of(model)
    first = answer(engine, *prompt(model, [text(20, 1), photos[0], text(60, 2), photos[0], text(9, 3)]))
    second = answer(engine, *prompt(model, [text(70, 4), photos[0], text(5, 5)]))
    assert (1, 0) == (first.encoded, second.encoded)
    assert second.features_found


def test_an_image_that_is_matched_is_not_even_looked_up(model: LoadedModel, photos: Photos):
    """An image wholly inside the matched prefix is neither encoded nor fetched, also where its features have gone."""
    engine = engine_of(model)
    ids, images = prompt(model, [text(20, 1), photos[0], text(60, 2)])
    answer(engine, ids, images)
    again = answer(engine, [*ids, *text(9, 3)], images)
    assert (PAGE * 2, 0, 0) == (again.matched_len, again.encoded, again.features_found)


def test_another_image_or_the_same_moved_is_another_prompt(model: LoadedModel, photos: Photos):
    """Behind the same tokens another photograph matches only pages before it; a shift by one token as well."""
    engine = engine_of(model)
    before, after = text(PAGE + 5, 1), text(2 * PAGE, 2)
    answer(engine, *prompt(model, [before, photos[0], after]))
    other = answer(engine, *prompt(model, [before, photos[1], after]))
    moved = answer(engine, *prompt(model, [[*before, 9], photos[0], after]))
    same = answer(engine, *prompt(model, [before, photos[0], after]))
    assert (PAGE, PAGE, 3 * PAGE) == (other.matched_len, moved.matched_len, same.matched_len)


def test_a_match_may_end_inside_an_image_only_where_attention_is_causal(photos: Photos):
    """The page that ends inside an image is found again by LLaVA, and left to be computed by Gemma 3."""
    found = {}
    for name in MODELS:
        engine = engine_of(loaded(name))
        for seed in (2, 3):
            ids, images = prompt(loaded(name), [text(PAGE - 5, 1), photos[0], text(PAGE, seed)])
            found[name] = answer(engine, ids, images).matched_len
    assert {"llava": PAGE, "gemma3": 0} == found


def test_tenants_share_no_features(llava: LoadedModel, photos: Photos):
    """Under another salt the tower runs again."""
    engine = engine_of(llava)
    one = prompt(llava, [text(20, 1), photos[0], text(60, 2)])
    assert [1, 1, 0] == [answer(engine, *one, salt=salt).encoded for salt in (b"a", b"b", b"a")]


def test_an_image_without_a_name_leaves_nothing(llava: LoadedModel, photos: Photos):
    """Neither its features nor the pages from it on are kept; those before it are."""
    engine = engine_of(llava)
    ids, images = prompt(llava, [text(PAGE, 1), replace(photos[0], digest=None), text(60, 2)])
    runs = [answer(engine, ids, images) for _ in range(2)]
    assert [(0, 1), (PAGE, 1)] == [(run.matched_len, run.encoded) for run in runs]


def test_who_opts_out_gets_and_leaves_nothing(llava: LoadedModel, photos: Photos):
    """`reuse=False` or `store=False` goes past the encoder cache too."""
    engine = engine_of(llava)
    one = prompt(llava, [text(20, 1), photos[0], text(60, 2)])
    ways: tuple[dict[str, Any], ...] = ({"store": False}, {}, {"reuse": False}, {})
    assert [1, 1, 1, 0] == [answer(engine, one[0], one[1], **way).encoded for way in ways]


def test_a_placeholder_is_never_generated(llava: LoadedModel):
    """The token that a model would give next is not given where it is the placeholder."""
    assert llava.vision is not None
    ids = text(40, 8)
    said = answer(engine_of(llava), ids, [], new=1).output_ids[0]
    assert said not in ids
    other = replace(llava, vision=replace(llava.vision, placeholder=said))
    assert said != answer(engine_of(other), ids, [], new=1).output_ids[0]


# --- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("skimage") is None or find_spec("PIL") is None, reason="needs photographs")
def test_the_digest_is_that_of_the_raw_picture_and_the_parameters():
    """A router that never runs the processor names the picture alike; other parameters name it otherwise."""
    from PIL import Image
    from transformers import SiglipImageProcessorPil

    from kvkeep.engine.vision.pictures import Preprocessing, photographs

    path: Path = photographs()["astronaut.png"]
    one, other = SiglipImageProcessorPil(size=SIZE), SiglipImageProcessorPil(size=SIZE, image_mean=[0.4, 0.4, 0.4])
    image = Preprocessing(one).image(3, path)
    with Image.open(path) as raw:
        assert digest(raw, "image", processor_parameters(one)) == image.digest
    assert image.digest != Preprocessing(other).image(3, path).digest
    assert (3, (3, 64, 64), torch.float32) == (image.offset, tuple(image.pixels.shape), image.pixels.dtype)


def test_the_fingerprint_follows_the_weights():
    """Another seed is another model to both caches; the same seed is the same."""
    one, same, other = load_vision_model("llava"), load_vision_model("llava"), load_vision_model("llava", seed=1)
    assert one.weights_digest == same.weights_digest != other.weights_digest
    assert one.vision is not None and other.vision is not None
    assert one.vision.fingerprint != other.vision.fingerprint
    assert one.fingerprint(16, "strict") != other.fingerprint(16, "strict")


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_images_are_refused_one_by_one(gemma3: LoadedModel, photos: Photos):
    """Each is a clear error for that request alone; the next one is answered."""
    engine = engine_of(gemma3)
    ids, (image,) = prompt(gemma3, [text(20, 1), photos[0], text(60, 2)])
    touching, pair = prompt(gemma3, [text(5, 1), photos[0], photos[1], text(5, 2)])
    bad: list[tuple[list[int], list[Any], str]] = [
        (ids, [], "16 tokens of the prompt are placeholders"),
        (ids, [replace(image, offset=21)], "the 16 tokens there must all be"),
        (ids, [replace(image, offset=-1)], "offset must be"),
        (ids, [image, image], "in order and apart"),
        (ids, [replace(image, pixels=image.pixels[:, :32])], "the model takes"),
        (ids, [replace(image, pixels=image.pixels.double())], "the model takes"),
        (ids, [replace(image, digest=b"short")], "5 bytes"),
        (ids, ["photo.png"], "ImageInput"),
        (ids[:30], [image], "must all be"),
        (touching, pair, "a token must be between"),
    ]
    for wrong_ids, images, words in bad:
        with pytest.raises(BadInput, match=words):
            engine.submit(wrong_ids, images=images)
    assert 1 == answer(engine, ids, [image]).encoded
    assert answer(engine_of(loaded("llava")), touching, pair).encoded == 2, "causal images may touch"


def test_a_text_model_takes_no_images(stories: LoadedModel, photos: Photos):
    """Images for a model without a tower are refused."""
    with pytest.raises(BadInput, match="text model"):
        Engine(stories, EngineConfig(page_size=16, pool_pages=8)).submit([1, 2, 3], images=[photos[0]])


def test_unknown_models_are_refused():
    """The error lists what there is."""
    with pytest.raises(BadInput, match="llava, gemma3"):
        load_vision_model("llava-13b")
