"""Mistakes that caches make with images, planted on purpose: the gate has to notice each of them.

Must not know how requests are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.request import ImageInput
from kvkeep.engine.verify.images import Album
from kvkeep.engine.verify.scenarios import Ask, Ids, Scenario, Waves
from kvkeep.engine.vision.tower import Vision


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in the cached engine alone.

    scenario: the one that is there to notice it.   vision: what becomes of the tower.   digest: of an image's name.
    """

    name: str
    scenario: str
    vision: Callable[[Vision], Vision] = lambda vision: vision
    digest: Callable[[Album, ImageInput], bytes | None] = lambda album, image: image.digest

    def model(self, loaded: LoadedModel) -> LoadedModel:
        """The model of the cached engine."""
        assert loaded.vision is not None
        return replace(loaded, vision=self.vision(loaded.vision))

    def planted(self, scenario: Scenario, album: Album) -> Scenario:
        """The scenario, whose requests are changed on their way to the cached engine."""

        def waves() -> Waves:
            inner = scenario.waves()
            asks = next(inner)
            while True:
                outputs: list[Ids] = yield [self._changed(ask, album) for ask in asks]
                try:
                    asks = inner.send(outputs)
                except StopIteration:
                    return

        return replace(scenario, waves=waves)

    def _changed(self, ask: Ask, album: Album) -> Ask:
        return replace(ask, images=tuple(replace(image, digest=self.digest(album, image)) for image in ask.images))


def _one_name(album: Album, image: ImageInput) -> bytes | None:
    return album.photos[0].digest


def _without_preprocessing(album: Album, image: ImageInput) -> bytes | None:
    """The name that the photograph has under the first preprocessing."""
    names = {other.digest: photo.digest for photo, other in zip(album.photos, album.again, strict=True)}
    return names.get(image.digest, image.digest)


def _first_features(vision: Vision) -> Vision:
    """A tower whose every image gets the features of the first one it saw."""
    seen: list[torch.Tensor] = []

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if not seen:
            seen.append(vision.encode(pixels))
        return seen[0].clone()

    return replace(vision, encode=encode)


def _features_turned(vision: Vision) -> Vision:
    """A tower whose features come in the wrong order."""
    return replace(vision, encode=lambda pixels: vision.encode(pixels).flip(0))


FAULTS = (
    Fault("placeholders name the page", "another image", digest=_one_name),
    Fault("names leave preprocessing out", "other preprocessing", digest=_without_preprocessing),
    Fault("features of another image", "another image", vision=_first_features),
    Fault("features out of place", "same image", vision=_features_turned),
)
