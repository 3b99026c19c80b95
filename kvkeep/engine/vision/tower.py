"""The half of a vision-language model that looks at images: pixels to the features that stand for them in a prompt.

Must not know requests, caches or which architecture it belongs to.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep.encoder import EncoderFingerprint


@dataclass(frozen=True, slots=True)
class Vision:
    """What the engine needs of a vision tower and its projector.

    encode: pixels [channels, height, width] of one image to features [tokens, hidden]; always one image at a time, so
        that its bits do not depend on company.
    pixels_shape: of the input that `encode` takes.   tokens: placeholders of an image.
    placeholder: the token id that images stand behind.
    causal: False where the positions of an image see each other in the text model, whatever their order.
    fingerprint: what features depend on, besides pixels.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    pixels_shape: tuple[int, int, int]
    tokens: int
    placeholder: int
    causal: bool
    fingerprint: EncoderFingerprint
