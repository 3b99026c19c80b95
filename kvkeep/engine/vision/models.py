"""Vision-language models that can be had anywhere: transformers' architectures, small, with weights from a seed.

Must not know caches or requests.  The weights have learnt nothing, so outputs mean nothing; the arithmetic, the places
of features, the positions and the masks are those of the real architectures.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

from kvkeep.encoder import EncoderFingerprint
from kvkeep.engine import paged_attention
from kvkeep.engine.linear import can_pack, pack_linears
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.vision.tower import Vision
from kvkeep.errors import BadInput

IMAGE_SIDE = 64  # pixels; both models see an image as 4 x 4 features
TOKENS = 16
BEGIN_OF_IMAGE, END_OF_IMAGE, PLACEHOLDER = 509, 510, 511

# Weights of a spread at which attention and layers matter: at transformers' 0.02 all logits are nearly equal.
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": IMAGE_SIDE,
    "vision_use_head": False,
}


def _llava() -> PreTrainedModel:
    """LLaVA: SigLIP, two linear layers, a Llama that attends to images as it does to text."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(**TOWER, patch_size=16),
            text_config=LlamaConfig(**TEXT),
            image_token_index=PLACEHOLDER,
            vision_feature_layer=-2,
            vision_feature_select_strategy="full",
        )
    )


def _gemma3() -> PreTrainedModel:
    """Gemma 3: SigLIP, pooled, and a text model in which the positions of an image see each other.

    All layers attend to everything: pages of a sliding window are no part of this engine.
    """
    text = TEXT | {"query_pre_attn_scalar": TEXT["head_dim"], "bos_token_id": 2, "eos_token_id": 1}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SiglipVisionConfig(**TOWER, patch_size=8),
            text_config=Gemma3TextConfig(**text, layer_types=["full_attention"] * TEXT["num_hidden_layers"]),
            image_token_index=PLACEHOLDER,
            boi_token_index=BEGIN_OF_IMAGE,
            eoi_token_index=END_OF_IMAGE,
            mm_tokens_per_image=TOKENS,
        )
    )


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {"llava": (_llava, True), "gemma3": (_gemma3, False)}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The model as transformers has it, for inference in float32 on the CPU; the seed determines its weights."""
    if name not in MODELS:
        raise BadInput(f"unknown vision-language model {name!r}: use one of {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = MODELS[name][0]()
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # Gemma 3's projector begins at zero, and would hide every image
                torch.nn.init.normal_(weight, std=TEXT["initializer_range"])
    model.eval().requires_grad_(False)
    return model


def load_vision_model(name: str, seed: int = 0) -> LoadedModel:
    """A model of `MODELS` whose text model runs over kvkeep's pages.   `BadInput` for a name that is unknown."""
    model = build(name, seed)
    config: Any = model.config
    digest = _weights_digest(model)
    paged_attention.register()
    model.get_decoder().set_attn_implementation(paged_attention.NAME)
    packed = can_pack("cpu", model.dtype)
    if packed:
        pack_linears(model)
    inner: Any = model.model

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = inner.get_image_features(pixels[None]).pooler_output[0]
        return features

    vision = Vision(
        encode=encode,
        pixels_shape=(3, IMAGE_SIDE, IMAGE_SIDE),
        tokens=TOKENS,
        placeholder=int(config.image_token_id),
        causal=MODELS[name][1],
        fingerprint=EncoderFingerprint(weights=digest, dtype="float32", settings="packed" if packed else "plain"),
    )
    return LoadedModel(
        name=f"{name} (small, seeded weights)",
        model=model,
        config=config.text_config,
        tokenizer=None,
        eos_ids=(),
        device="cpu",
        dtype="float32",
        weights_digest=digest,
        packed=packed,
        vision=vision,
    )


def _weights_digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()
