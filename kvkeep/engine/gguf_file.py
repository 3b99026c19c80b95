"""Reads a Llama of a GGUF file into the names and layout that transformers uses, dequantised to float32.

Must not know pages, caches or the engine.  (transformers reads GGUF itself, but parses the file twice, slowly, and
asks for one more package: 14 s against 3 s for SmolLM2; the tests compare the two.)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvkeep.engine.llama2c import half_split
from kvkeep.errors import BadInput

MAGIC = b"GGUF"
NORMAL_TOKEN = 1  # tokenizer.ggml.token_type of an ordinary token; all others are matched whole
DIGITS_ONE_BY_ONE = frozenset({"smollm"})  # tokenizer.ggml.pre whose digits are split one by one

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufFile:
    """An opened GGUF file of a plain Llama; all of it raises `BadInput` when the file lacks what is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != MAGIC:
            raise BadInput(f"{path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        try:
            self._reader = gguf.GGUFReader(path)
        # What numpy says when a count or an offset points past the end of the file, or a count is nonsense.
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            nbytes = path.stat().st_size
            raise BadInput(
                f"{path} is truncated or damaged: {nbytes} bytes end before the tensors that it lists"
            ) from error
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise BadInput(f"{path} holds a {architecture!r} model: only 'llama' is supported")
        for key in ("llama.expert_count", "llama.rope.scaling.type"):
            if self._field(key, None) not in (None, 0, "none"):
                raise BadInput(f"{path} sets {key}={self._field(key)}: only a plain Llama is supported")

    def config(self) -> dict[str, Any]:
        """LlamaConfig fields."""
        width = int(self._field("llama.embedding_length"))
        heads = int(self._field("llama.attention.head_count"))
        head_dim = int(self._field("llama.attention.key_length", width // heads))
        rotated = int(self._field("llama.rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise BadInput(f"{self.path} rotates {rotated} of {head_dim} head dimensions: all of them is supported")
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "token_embd.weight" not in tensors:
            raise BadInput(f"{self.path} has no tensor token_embd.weight")
        return {
            "hidden_size": width,
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "num_hidden_layers": int(self._field("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._field("llama.attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": int(self._field("llama.context_length")),
            "rms_norm_eps": float(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(self._field("llama.rope.freq_base", 10_000.0)),
            },
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
            "pad_token_id": None,
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """float32 weights; q and k projections in the half-split RoPE layout."""
        heads = int(self._field("llama.attention.head_count"))
        heads_of = {
            "attn_q.weight": heads,
            "attn_k.weight": int(self._field("llama.attention.head_count_kv", heads)),
        }
        state: dict[str, torch.Tensor] = {}
        for tensor in self._reader.tensors:
            name, short = self._translate(tensor.name)
            try:
                dequantised = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise BadInput(
                    f"{self.path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be dequantised"
                ) from error
            weight = torch.from_numpy(dequantised.copy()).float()
            if short in heads_of:
                weight = half_split(weight, heads_of[short])
            state[name] = weight
        if "lm_head.weight" not in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def tokenizer(self) -> Tokenizer | None:
        """The byte-level BPE tokenizer in the file; None when it holds another kind."""
        if self._field("tokenizer.ggml.model", None) != "gpt2":
            return None
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._field("tokenizer.ggml.merges")]
        types: Sequence[int] = self._field("tokenizer.ggml.token_type", [NORMAL_TOKEN] * len(tokens))
        bpe = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
        tokenizer = Tokenizer(bpe)
        byte_level = pre_tokenizers.ByteLevel(
            add_prefix_space=bool(self._field("tokenizer.ggml.add_space_prefix", False))
        )
        if self._field("tokenizer.ggml.pre", "") in DIGITS_ONE_BY_ONE:
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        else:
            tokenizer.pre_tokenizer = byte_level
        tokenizer.decoder = decoders.ByteLevel()
        whole = [token for token, kind in zip(tokens, types, strict=True) if kind != NORMAL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in whole])
        return tokenizer

    def _translate(self, name: str) -> tuple[str, str]:
        """Name of a tensor in transformers, and its name inside its block (empty outside the blocks)."""
        if name in TOP_NAMES:
            return TOP_NAMES[name], ""
        parts = name.split(".", 2)
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
            return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}", parts[2]
        raise BadInput(f"{self.path} holds the tensor {name}, which a plain Llama has not")

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise BadInput(f"{self.path} lacks the field {key}")
