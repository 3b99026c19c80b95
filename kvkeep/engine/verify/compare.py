"""Compare: are two tensors the same bits, and if not, where is the first that differs.

Must not know engines, requests or how the tensors came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BITS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs differ: KV of a layer at a position, the logits after it, or what was said."""

    what: str
    position: int
    layer: int | None = None

    def __str__(self) -> str:
        where = f"position {self.position}" if self.layer is None else f"layer {self.layer}, position {self.position}"
        return f"{self.what} differs at {where}"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two float tensors of one shape hold the same bits: a NaN equals itself, -0.0 is not 0.0."""
    return torch.equal(left.contiguous().view(BITS[left.dtype]), right.contiguous().view(BITS[right.dtype]))


def kv_difference(left: torch.Tensor, right: torch.Tensor, first_position: int = 0) -> Difference | None:
    """The first position, and its lowest layer, at which two KV tensors [layers, 2, positions, heads, dim] differ."""
    if left.shape != right.shape:
        return Difference("the number of KV positions", first_position + min(left.shape[2], right.shape[2]))
    if same_bits(left, right):
        return None
    bits = BITS[left.dtype]
    differs = (left.contiguous().view(bits) != right.contiguous().view(bits)).flatten(3).any(-1)
    position = int(differs.any(0).any(0).nonzero()[0, 0])
    layer, half = (int(x) for x in differs[:, :, position].nonzero()[0])
    return Difference("KV"[half], first_position + position, layer)


def logits_difference(left: torch.Tensor | None, right: torch.Tensor | None, position: int) -> Difference | None:
    """Whether the logits [vocabulary] after `position` differ; None stands for logits that were not wanted."""
    if left is None or right is None:
        return None if left is right else Difference("which logits were computed", position)
    return None if same_bits(left, right) else Difference("logits", position)


def output_difference(left: Sequence[int], right: Sequence[int], prompt_len: int) -> Difference | None:
    """The position of the first generated token that differs."""
    if list(left) == list(right):
        return None
    same = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return Difference("the generated token", prompt_len + same)
