"""The cases of media digests: one image of 10 MB in everything that it can come in, and the same one again.

Must not know limits.
"""

import base64
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from bench._measure import now_ns
from kvkeep.media.digest import Digester

#: Height, width and channels: 10,002,000 bytes.
SHAPE = (1667, 2000, 3)

Sample = Callable[[], Sequence[float]]


def pixels() -> Any:
    """Noise, which no step on the way can make smaller: uint8 [height, width, channel]."""
    return np.random.default_rng(5).integers(0, 256, SHAPE, dtype=np.uint8)


@contextmanager
def carriers(array: Any) -> Iterator[dict[str, tuple[str, Any]]]:
    """What the image comes in, by name, and what that is; images and tensors where their libraries are installed."""
    content = array.tobytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        path.write_bytes(content)
        found = {
            "bytes": ("a bytes object", content),
            "file": ("a file in the page cache", path),
            "array": ("a numpy array, uint8", array),
            "array_turned": ("the array with its channels first, which lies out of order", array.transpose(2, 0, 1)),
            "data_url": ("a data URL, base64, decoded", "data:;base64," + base64.b64encode(content).decode()),
        }
        yield found | _of_libraries(array)


def _of_libraries(array: Any) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    try:
        import torch

        found["tensor"] = ("a torch tensor, uint8", torch.from_numpy(array))
    except ModuleNotFoundError:
        pass
    try:
        from PIL import Image

        found["pil"] = ("a PIL image, which keeps 4 bytes a pixel", Image.fromarray(array))
    except ModuleNotFoundError:
        pass
    return found


def hashes() -> dict[str, Callable[[bytes], Any]]:
    """The hash that digests are made with, and others that might be; BLAKE3 where it is installed."""
    found: dict[str, Callable[[bytes], Any]] = {"sha256": sha256, "blake2b": blake2b}
    with suppress(ModuleNotFoundError):
        found["blake3"] = importlib.import_module("blake3").blake3
    return found


def bulk(hash_fn: Callable[[bytes], Any], content: bytes) -> Sample:
    """A hash alone over the content, milliseconds."""

    def sample() -> list[float]:
        start = now_ns()
        hash_fn(content).digest()
        return [(now_ns() - start) / 1e6]

    return sample


def digests(source: Any) -> Sample:
    """A digest without a memo, milliseconds."""
    digester = Digester("image", {"size": 224}, memo_entries=0)

    def sample() -> list[float]:
        start = now_ns()
        digester.digest(source)
        return [(now_ns() - start) / 1e6]

    return sample


def again(source: Any, times: int, frozen: str | None = None) -> Sample:
    """The digest of a source that is remembered, microseconds."""
    digester = Digester("image", {"size": 224})
    expected = digester.digest(source, frozen=frozen)

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            start = now_ns()
            made = digester.digest(source, frozen=frozen)
            out.append((now_ns() - start) / 1e3)
            assert made == expected
        return out

    return sample
