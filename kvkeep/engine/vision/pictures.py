"""Real photographs for tests and the bit gate, and what an image processor makes of them.

Must not know requests or models.  The photographs are those in scikit-image's package: nothing is downloaded.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from kvkeep.engine.request import ImageInput
from kvkeep.errors import BadInput
from kvkeep.media.canonical import processor_parameters
from kvkeep.media.digest import Digester

PHOTOGRAPHS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "retina.jpg", "motorcycle_left.png")


def photographs() -> dict[str, Path]:
    """The files of `PHOTOGRAPHS`.   `BadInput` where Pillow, scikit-image or one of its files is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise BadInput("photographs need Pillow, which is not installed: pip install 'kvkeep[multimodal]'")
    spec = importlib.util.find_spec("skimage")  # found without importing: its own imports are not needed
    if spec is None or spec.origin is None:
        raise BadInput(
            "photographs need scikit-image, which is not installed: pip install --no-deps scikit-image==0.26.0"
        )
    folder = Path(spec.origin).parent / "data"
    found = {name: folder / name for name in PHOTOGRAPHS}
    missing = [name for name, path in found.items() if not path.is_file()]
    if missing:
        raise BadInput(f"the package scikit-image here lacks {', '.join(missing)}: reinstall it")
    return found


class Preprocessing:
    """A Hugging Face image processor, and the digests that go with it.

    processor: gives pixels of one size, whatever it is given.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._digester = Digester("image", processor_parameters(processor))

    def image(self, offset: int, path: Path) -> ImageInput:
        """The photograph as a model takes it, named by its raw pixels, as stored, and the processor's parameters."""
        from PIL import Image

        with Image.open(path) as opened:
            digest = self._digester.digest(opened)
            pixels = self._processor(images=opened, return_tensors="np")["pixel_values"][0]
        return ImageInput(offset, torch.from_numpy(pixels), digest)
