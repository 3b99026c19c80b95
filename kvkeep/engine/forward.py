"""One forward of the model over rows of several requests.

Must not know the scheduler or the cache: it is given token ids and page tables, and returns logits.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvkeep.engine.arithmetic import Arithmetic, threads_set
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.paged_attention import Segment, Step, Workspace
from kvkeep.tiers.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one request: the token ids of its segment, and whether the logits of the last one are wanted.

    features: rows of the piece, and the features [rows, hidden] that take the places of the tokens from there on.
    """

    segment: Segment
    ids: Sequence[int]
    wanted: bool
    features: tuple[tuple[int, torch.Tensor], ...] = ()


class Forward:
    """Runs pieces through the model, K and V into and out of one pool of pages."""

    def __init__(self, loaded: LoadedModel, kv: torch.Tensor, layout: PageLayout, arithmetic: Arithmetic) -> None:
        self._decoder = loaded.model.get_decoder()
        self._head = loaded.model.get_output_embeddings()
        self._embeddings = self._decoder.get_input_embeddings()
        # Where layers attend in different ways transformers wants a mask for each; ours is made by `Step`.
        kinds = getattr(loaded.config, "layer_types", None)
        self._no_mask = None if kinds is None else dict.fromkeys(kinds)
        self._kv = kv
        self._layout = layout
        self._arithmetic = arithmetic
        self._workspace = Workspace(kv)

    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Logits [wanted pieces, vocabulary], in the order of `pieces`; no rows at all where none are wanted.

        One-row pieces that stand side by side are attended together; sorted by length they are fastest.
        """
        with torch.inference_mode(), threads_set(self._arithmetic.threads), self._kernel():
            ids: list[int] = []
            positions: list[int] = []
            wanted: list[int] = []
            features: list[tuple[int, torch.Tensor]] = []
            for piece in pieces:
                features.extend((len(ids) + row, found) for row, found in piece.features)
                ids.extend(piece.ids)
                positions.extend(range(piece.segment.start, piece.segment.end))
                if piece.wanted:
                    wanted.append(len(ids) - 1)
            # Rows of padding are token 0 at position 0; what becomes of them is never read.
            padding = [0] * (self._arithmetic.rows(len(ids)) - len(ids))
            device = self._kv.device
            segments = [piece.segment for piece in pieces]
            step = Step(self._kv, self._layout, segments, self._arithmetic, self._workspace)
            hidden: torch.Tensor = self._decoder(
                inputs_embeds=self._embed(ids + padding, features),
                position_ids=torch.tensor([positions + padding], device=device),
                attention_mask=self._no_mask,
                use_cache=False,
                step=step,
            ).last_hidden_state[0]
            if not wanted:
                return hidden[:0]
            rows = wanted + wanted[-1:] * (self._arithmetic.rows(len(wanted)) - len(wanted))
            logits: torch.Tensor = self._head(hidden[torch.tensor(rows, dtype=torch.long, device=device)])
            return logits[: len(wanted)]

    def _embed(self, ids: list[int], features: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """[1, rows, hidden]: the embeddings of tokens, but for the rows that have features."""
        embedded: torch.Tensor = self._embeddings(torch.tensor([ids], device=self._kv.device))
        for row, found in features:
            embedded[0, row : row + len(found)] = found
        return embedded

    def _kernel(self) -> contextlib.AbstractContextManager[None]:
        """Strict arithmetic is proved for one attention kernel: torch then fails rather than choose another."""
        if self._arithmetic.mode == "strict":
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        return contextlib.nullcontext()
