"""Reads a llama2.c checkpoint and its tokenizer into the names and layout that transformers uses.

Must not know pages, caches or the engine.
"""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import BadInput

BOS = 1
EOS = 2
FIRST_BYTE = 3  # id of byte 0; ids 3..258 are the bytes
HEADER_NBYTES = 7 * 4
RMS_NORM_EPS = 1e-5
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Header:
    """The seven int32 that open the file; `shared_classifier` is the sign of the vocabulary size."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    shared_classifier: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors in file order, each over all layers."""
        kv_dim = self.kv_heads * self.head_dim
        shapes: list[tuple[str, tuple[int, ...]]] = [
            ("embed", (self.vocab, self.dim)),
            ("attention_norm", (self.layers, self.dim)),
            ("wq", (self.layers, self.dim, self.dim)),
            ("wk", (self.layers, kv_dim, self.dim)),
            ("wv", (self.layers, kv_dim, self.dim)),
            ("wo", (self.layers, self.dim, self.dim)),
            ("ffn_norm", (self.layers, self.dim)),
            ("w1", (self.layers, self.hidden, self.dim)),
            ("w2", (self.layers, self.dim, self.hidden)),
            ("w3", (self.layers, self.hidden, self.dim)),
            ("norm", (self.dim,)),
            ("rope_cos", (self.positions, self.head_dim // 2)),
            ("rope_sin", (self.positions, self.head_dim // 2)),
        ]
        if not self.shared_classifier:
            shapes.append(("classifier", (self.vocab, self.dim)))
        return shapes


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """LlamaConfig fields and float32 state dict of a llama2.c .bin; `BadInput` when the file is none."""
    raw = path.read_bytes()
    header = _header(path, raw)
    shapes = header.shapes()
    counts = [_product(shape) for _, shape in shapes]
    right = HEADER_NBYTES + 4 * sum(counts)
    if len(raw) != right:
        what = "truncated" if len(raw) < right else "too long"
        raise BadInput(f"{path} is {what}: {len(raw)} bytes, its header asks for {right}")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.float32, offset=HEADER_NBYTES)
    parts = torch.split(flat, counts)
    tensors = {name: part.reshape(shape).clone() for (name, shape), part in zip(shapes, parts, strict=True)}
    _check_rope(path, header, tensors["rope_cos"])
    return _config(header), _state_dict(header, tensors)


def half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection [heads * head_dim, width] from RoPE pairs (2i, 2i+1) to pairs (i, i + head_dim/2).

    llama2.c and GGUF rotate neighbours, transformers rotates halves; the permutation is inside a head, so the dot
    products of q and k do not change.
    """
    rows, width = weight.shape
    pairs = rows // heads // 2
    return weight.reshape(heads, pairs, 2, width).transpose(1, 2).reshape(rows, width).contiguous()


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _header(path: Path, raw: bytes) -> Header:
    if len(raw) < HEADER_NBYTES:
        raise BadInput(f"{path} is truncated: {len(raw)} bytes, a llama2.c header alone has {HEADER_NBYTES}")
    dim, hidden, layers, heads, kv_heads, vocab, positions = struct.unpack("<7i", raw[:HEADER_NBYTES])
    sizes = (dim, hidden, layers, heads, kv_heads, abs(vocab), positions)
    if min(sizes) < 1 or max(sizes) > 1 << 24 or dim % heads or heads % kv_heads or dim // heads % 2:
        raise BadInput(
            f"{path} is no llama2.c checkpoint: its header reads dim {dim}, hidden {hidden}, layers {layers}, "
            f"heads {heads}, KV heads {kv_heads}, vocabulary {vocab}, positions {positions}"
        )
    return Header(dim, hidden, layers, heads, kv_heads, abs(vocab), positions, shared_classifier=vocab > 0)


def _check_rope(path: Path, header: Header, cosines: torch.Tensor) -> None:
    """The file carries its rotation table; transformers computes its own, so the two must agree."""
    frequencies = ROPE_THETA ** (-torch.arange(0, header.head_dim, 2).double() / header.head_dim)
    angles = torch.arange(header.positions).double()[:, None] * frequencies
    if not torch.allclose(angles.cos().float(), cosines, atol=1e-4):
        raise BadInput(f"{path} rotates with another base than {ROPE_THETA:.0f}, the only one supported for llama2.c")


def _config(header: Header) -> dict[str, Any]:
    return {
        "hidden_size": header.dim,
        "intermediate_size": header.hidden,
        "num_hidden_layers": header.layers,
        "num_attention_heads": header.heads,
        "num_key_value_heads": header.kv_heads,
        "head_dim": header.head_dim,
        "vocab_size": header.vocab,
        "max_position_embeddings": header.positions,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": header.shared_classifier,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }


def _state_dict(header: Header, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    classifier = "embed" if header.shared_classifier else "classifier"
    state = {
        "model.embed_tokens.weight": tensors["embed"],
        "model.norm.weight": tensors["norm"],
        "lm_head.weight": tensors[classifier],
    }
    for layer in range(header.layers):
        prefix = f"model.layers.{layer}."
        state[prefix + "self_attn.q_proj.weight"] = half_split(tensors["wq"][layer], header.heads)
        state[prefix + "self_attn.k_proj.weight"] = half_split(tensors["wk"][layer], header.kv_heads)
        for ours, theirs in (
            ("wv", "self_attn.v_proj"),
            ("wo", "self_attn.o_proj"),
            ("w1", "mlp.gate_proj"),
            ("w2", "mlp.down_proj"),
            ("w3", "mlp.up_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            state[f"{prefix}{theirs}.weight"] = tensors[ours][layer]
    return state


class Llama2cTokenizer:
    """The sentencepiece-like tokenizer of llama2.c: greedy merging of the best-scored neighbouring pair."""

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self._pieces = list(pieces)
        self._scores = list(scores)
        self._ids = {piece: number for number, piece in reversed(list(enumerate(self._pieces)))}

    @classmethod
    def read(cls, path: Path, vocab: int) -> "Llama2cTokenizer":
        """A tokenizer file of `vocab` entries: int32 longest length, then float32 score, int32 length, bytes."""
        raw = path.read_bytes()
        pieces: list[bytes] = []
        scores: list[float] = []
        at = 4
        for number in range(vocab):
            if at + 8 > len(raw):
                raise BadInput(f"{path} is truncated: it ends in entry {number} of {vocab}")
            score, length = struct.unpack_from("<fi", raw, at)
            piece = raw[at + 8 : at + 8 + length]
            if length < 0 or len(piece) != length:
                raise BadInput(f"{path} is truncated: it ends in entry {number} of {vocab}")
            pieces.append(piece)
            scores.append(score)
            at += 8 + length
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """BOS and the ids of `text`."""
        ids = [BOS]
        if text:
            ids.append(self._ids[b" "])
        for character in text:
            encoded = character.encode()
            known = self._ids.get(encoded)
            ids.extend([known] if known is not None else [byte + FIRST_BYTE for byte in encoded])
        while True:
            merged = [self._ids.get(self._pieces[a] + self._pieces[b]) for a, b in itertools.pairwise(ids)]
            places = [place for place, piece_id in enumerate(merged) if piece_id is not None]
            if not places:
                return ids
            best = max(places, key=lambda place: self._scores[merged[place] or 0])
            ids[best : best + 2] = [merged[best] or 0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: BOS and EOS dropped, the space that encoding put in front too."""
        out = b""
        for place, number in enumerate(ids):
            if number in (BOS, EOS):
                continue
            piece = self._pieces[number]
            if FIRST_BYTE <= number < FIRST_BYTE + 256:
                piece = bytes([number - FIRST_BYTE])
            if place and ids[place - 1] == BOS and piece.startswith(b" "):
                piece = piece[1:]
            out += piece
        return out.decode(errors="replace")
