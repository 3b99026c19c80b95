"""Chooses the next token from logits: a function of the logits, the parameters and the position, of nothing else.

Must not know requests or batches: a draw must come out the same alone, in a batch and after a preemption.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.engine.request import SamplingParams


def sample(logits: torch.Tensor, choices: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token id for each row of `logits` [rows, vocabulary].

    choices: for each row the parameters, and the position in its sequence that the token will take.
    """
    best: list[int] = logits.argmax(dim=-1).tolist()
    for row, (params, position) in enumerate(choices):
        if params.temperature > 0:
            best[row] = _draw(logits[row].double().cpu().numpy(), params, position)
    return best


def _draw(logits: npt.NDArray[np.float64], params: SamplingParams, position: int) -> int:
    """Inverse transform: the first token, from the likeliest down, at which the summed shares pass a uniform number."""
    order = np.argsort(-logits, kind="stable")
    if params.top_k is not None:
        order = order[: params.top_k]
    scaled = (logits[order] - logits[order[0]]) / params.temperature
    sums = np.cumsum(np.exp(scaled))
    if params.top_p < 1:
        kept = int(np.searchsorted(sums, params.top_p * sums[-1])) + 1
        sums = sums[:kept]
    uniform = np.random.Generator(np.random.Philox(key=[params.seed, position])).random()
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(order[min(place, len(sums) - 1)])
