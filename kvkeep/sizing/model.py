"""Bytes of KV a token, from a model's Hugging Face `config.json`.

Must not load a model.
"""

import json
from pathlib import Path
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.tiers.layout import DTYPE_NBYTES

#: Keys by which a config says that a token's KV is not one K and one V of each head in every layer.
OTHER_LAYOUTS = {
    "kv_lora_rank": "latent attention (MLA)",
    "sliding_window_pattern": "sliding windows in some layers",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "layers_block_type": "layers of several kinds",
}


def token_nbytes(path: Path, dtype: str | None = None) -> int:
    """Bytes of K and V of one position: layers * 2 * KV heads * head dimension * bytes of an element.

    dtype: of the KV pool; None: the model's own.
    Raises `BadInput` for a file that is no such config, or a layout that kvkeep does not know.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {path}: {_first_line(error)}; it must be a model's config.json") from None
    if not isinstance(config, dict):
        raise BadInput(f"--model {path}: it must be a JSON object, a model's config.json")
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    for key, what in OTHER_LAYOUTS.items():
        if config.get(key):
            raise BadInput(f"--model {path}: {key} says {what}, whose KV kvkeep does not lay out yet")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise BadInput(f"--model {path}: layer_types has {sorted(kinds)}; kvkeep lays out full attention only")
    heads = _number(config, "num_attention_heads", path)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or _number(config, "hidden_size", path) // heads
    name = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_NBYTES:
        raise BadInput(f"--model {path}: KV of {name}; known are {', '.join(DTYPE_NBYTES)}: say --kv-dtype")
    return int(_number(config, "num_hidden_layers", path) * 2 * kv_heads * head_dim * DTYPE_NBYTES[name])


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"--model {path}: {key} is {value!r}; it must be a number of 1 or more")
    return value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
