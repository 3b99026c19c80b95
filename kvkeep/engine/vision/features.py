"""Images of requests: checked when a request is submitted, their features at hand when a forward needs them.

Must not know how a forward is computed, nor when requests run.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from kvkeep.cache import TieredCache
from kvkeep.encoder import EncoderCache, EncoderOutput
from kvkeep.engine.arithmetic import threads_set
from kvkeep.engine.forward import Piece
from kvkeep.engine.request import ImageInput, Request
from kvkeep.engine.vision.tower import Vision
from kvkeep.errors import BadInput
from kvkeep.index.media import MediaItem
from kvkeep.index.names import TokenIds

SALTS_MAX = 64  # tenants whose encoder caches are kept at hand; another one is made again


class ImageFeatures:
    """The features of images, from the encoder cache that shares the tiers of a cache, or else from the tower.

    threads: intra-op threads of torch that the tower uses.
    """

    def __init__(self, vision: Vision, cache: TieredCache, threads: int) -> None:
        self._vision = vision
        self._threads = threads
        self._outputs = lru_cache(SALTS_MAX)(lambda salt: EncoderCache(cache, vision.fingerprint, salt=salt))

    def media(self, images: Sequence[ImageInput], ids: TokenIds) -> tuple[MediaItem, ...]:
        """The media items of a prompt.   `BadInput` for pixels, or placeholders, that are not what the model takes."""
        vision, spans = self._vision, []
        for image in images:
            if not isinstance(image, ImageInput):
                raise BadInput(f"images has {type(image).__name__}: it must be a sequence of `ImageInput`")
            if tuple(image.pixels.shape) != vision.pixels_shape or image.pixels.dtype != torch.float32:
                raise BadInput(
                    f"image at {image.offset} has pixels {image.pixels.dtype} {list(image.pixels.shape)}: the model "
                    f"takes torch.float32 {list(vision.pixels_shape)}"
                )
            spans.append(MediaItem(image.offset, vision.tokens, image.digest, vision.causal))
        self._check_placeholders(spans, ids)
        return tuple(spans)

    def _check_placeholders(self, spans: Sequence[MediaItem], ids: TokenIds) -> None:
        """Images stand behind placeholders, and nothing else does."""
        placeholder = self._vision.placeholder
        count = int((ids == placeholder).sum())
        behind = -1
        for span in spans:
            end = span.offset + span.length
            if end > len(ids) or not (ids[span.offset : end] == placeholder).all():
                raise BadInput(f"image at {span.offset}: the {span.length} tokens there must all be {placeholder}")
            if span.offset < behind + (not span.causal):
                raise BadInput(
                    f"image at {span.offset}: images must be in order and apart, and where the positions of an image "
                    "see each other a token must be between them"
                )
            behind = end
        if count != len(spans) * self._vision.tokens:
            raise BadInput(
                f"{count} tokens of the prompt are placeholders ({placeholder}): {len(spans)} images of "
                f"{self._vision.tokens} have {len(spans) * self._vision.tokens}"
            )

    @contextlib.contextmanager
    def held(self, batch: Sequence[tuple[Request, Piece]]) -> Iterator[list[Piece]]:
        """The pieces with the features that they need, which are held meanwhile.

        An image none of whose positions a piece computes is neither looked up nor encoded.
        """
        holding: list[EncoderOutput] = []
        try:
            yield [replace(piece, features=self._of(request, piece, holding)) for request, piece in batch]
        finally:
            for output in holding:
                output.release()

    def _of(self, request: Request, piece: Piece, holding: list[EncoderOutput]) -> tuple[tuple[int, torch.Tensor], ...]:
        """Rows of the piece, and the features that begin there."""
        start, end = piece.segment.start, piece.segment.end
        found = []
        for image in request.images:
            first, last = max(start, image.offset), min(end, image.offset + self._vision.tokens)
            if first < last:
                features = self._features(request, image, holding)
                found.append((first - start, features[first - image.offset : last - image.offset]))
        return tuple(found)

    def _features(self, request: Request, image: ImageInput, holding: list[EncoderOutput]) -> torch.Tensor:
        """Features [tokens, hidden] of an image."""

        def compute() -> torch.Tensor:
            request.encoded += 1
            with torch.inference_mode(), threads_set(self._threads):
                return self._vision.encode(image.pixels).contiguous()

        if image.digest is None or not (request.reuse and request.store):
            return compute()
        output = self._outputs(request.salt).get_or_compute(image.digest, compute)
        request.features_found += output.source in ("gpu", "cpu")
        request.features_from_host += output.source == "cpu"
        holding.append(output)
        return output.tensor
