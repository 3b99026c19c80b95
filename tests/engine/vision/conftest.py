"""What the tests of the multimodal path share: photographs, and prompts with them.

Must not know how a forward is computed.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import SiglipImageProcessorPil

from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.request import ImageInput
from kvkeep.engine.vision.models import IMAGE_SIDE, load_vision_model
from kvkeep.engine.vision.pictures import Preprocessing, photographs

MODELS = ("llava", "gemma3")
SIZE = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}


@cache
def loaded(name: str) -> LoadedModel:
    return load_vision_model(name)


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded(request.param)


@pytest.fixture(scope="session")
def llava() -> LoadedModel:
    return loaded("llava")


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    return loaded("gemma3")


@pytest.fixture(scope="session")
def photos() -> tuple[ImageInput, ...]:
    if find_spec("skimage") is None or find_spec("PIL") is None:
        pytest.skip("needs Pillow, and the photographs of scikit-image")
    way = Preprocessing(SiglipImageProcessorPil(size=SIZE))
    return tuple(way.image(0, path) for path in photographs().values())


def text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


def prompt(model: LoadedModel, parts: Sequence[list[int] | ImageInput]) -> tuple[list[int], list[ImageInput]]:
    """Token ids and images of a prompt made of text and images."""
    assert model.vision is not None
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, ImageInput):
            images.append(replace(part, offset=len(ids)))
            ids += [model.vision.placeholder] * model.vision.tokens
        else:
            ids += part
    return ids, images


def hugging_face_logits(reference: Any, placeholder: int, ids: list[int], images: list[ImageInput]) -> torch.Tensor:
    """Logits [positions, vocabulary] of transformers' own forward over a whole sequence."""
    tokens = torch.tensor([ids])
    kinds = {"token_type_ids": (tokens == placeholder).long()} if reference.config.model_type == "gemma3" else {}
    with torch.inference_mode():
        seen = torch.stack([image.pixels for image in images])
        logits: torch.Tensor = reference(input_ids=tokens, pixel_values=seen, **kinds).logits[0]
    return logits
