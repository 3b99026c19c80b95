"""What media come as: for each kind of source what its content means, and the content in blocks.

Must not know what is made of the blocks, nor import PIL or torch: whoever has an image or a tensor has imported them.

    raw bytes   bytes, buffers, paths, binary files, data URLs: the bytes decide, not what they came in
    pixels      PIL images: mode, size and palette, and what decoders act on (transparency, orientation, colour profile)
    array       numpy arrays and torch tensors: dtype and shape, elements in C order; equal in both libraries
"""

import binascii
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np

from kvkeep.errors import BadInput
from kvkeep.media.canonical import canonical

#: Bytes that are read, or brought into one piece, at a time.
BLOCK_NBYTES = 1 << 18

_RAW = b"bytes"
_ORIENTATION = 0x0112  # in EXIF


class Source(NamedTuple):
    """meaning: what the content is, no two sources the same unless their bytes mean the same.

    blocks: the content; each is good until the next is asked for.
    """

    meaning: bytes
    blocks: Iterator[Any]


def open_source(source: Any) -> Source:
    """A source that is read when its blocks are; `BadInput` for what is none, or cannot be told from another."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        return Source(_RAW, _data_url(source))
    if isinstance(source, str | os.PathLike):
        return Source(_RAW, _path(source))
    if isinstance(source, np.ndarray):
        return Source(_array_meaning(_numpy_dtype(source), source.shape), _array(source))
    if _is_a(source, "torch", "Tensor"):
        return Source(_array_meaning(_torch_dtype(source), source.shape), _tensor(source))
    if _is_a(source, "PIL.Image", "Image"):
        return Source(_image_meaning(source), _pixels(source))
    try:
        view = memoryview(source)
    except TypeError:
        if hasattr(source, "read"):
            return Source(_RAW, _file(source))
        raise BadInput(
            f"media of type {type(source).__name__}: it must be bytes, a path, a binary file, a data URL, a PIL image, "
            "a numpy array or a torch tensor"
        ) from None
    except ValueError as e:
        raise BadInput(f"media of type {type(source).__name__} cannot be read: {e}") from None
    return Source(_RAW, _buffer(view))


def outline(source: Any) -> tuple[Any, ...]:
    """What is seen of a source at once, in a microsecond: type, dtype or mode, shape or size."""
    shape = getattr(source, "shape", None)
    if shape is not None:
        return (type(source), getattr(source, "dtype", None), shape)
    if _is_a(source, "PIL.Image", "Image"):
        return (type(source), source.mode, source.size)
    return (type(source),)


def _is_a(source: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(source, getattr(loaded, name))


# ---------------------------------------------------------------------- raw bytes


def _buffer(view: memoryview) -> Iterator[Any]:
    if view.c_contiguous:
        yield view
        return
    try:
        array = np.asarray(view)
    except (TypeError, ValueError) as e:
        raise BadInput(f"a buffer of format {view.format!r} that is not in one piece cannot be read: {e}") from None
    yield from _array(array)


def _data_url(url: str) -> Iterator[bytes]:
    header, comma, data = url.partition(",")
    if not comma:
        raise BadInput(f"data URL {url[:40]!r} has no comma: it must be data:[type][;base64],content")
    try:
        content = unquote_to_bytes(data) if "%" in data else data.encode()
    except UnicodeEncodeError as e:
        raise BadInput(f"data URL {url[:40]!r}: its content is not text: {e}") from None
    if header.lower().rstrip().endswith(";base64"):
        try:
            content = _base64(content)
        except binascii.Error as e:
            raise BadInput(f"data URL {url[:40]!r}: its content is not base64: {e}") from None
    yield content


def _base64(text: bytes) -> bytes:
    """Decoded as browsers do: white space and missing padding are no fault."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        text = text.translate(None, b" \t\n\f\r").rstrip(b"=")
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)


def _path(path: Any) -> Iterator[Any]:
    if isinstance(path, str) and "://" in path:
        raise BadInput(f"media {path[:80]!r} is a URL: fetch it, and give its bytes")
    try:
        with open(path, "rb", buffering=0) as file:
            yield from _read(file)
    except (OSError, ValueError) as e:
        if isinstance(e, BadInput):
            raise
        raise BadInput(f"media file {os.fspath(path)!r} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _file(file: Any) -> Iterator[Any]:
    """All of a file that can be read from its beginning, and left where it was; else what is left of it."""
    try:
        back = file.tell() if hasattr(file, "seekable") and file.seekable() else None
        if back is not None:
            file.seek(0)
        try:
            yield from _read(file)
        finally:
            if back is not None:
                file.seek(back)
    except (OSError, ValueError) as e:
        if isinstance(e, BadInput):
            raise
        raise BadInput(f"media file {file!r} cannot be read: {e}") from None


def _read(file: Any) -> Iterator[Any]:
    readinto = getattr(file, "readinto", None)
    space = memoryview(bytearray(BLOCK_NBYTES)) if readinto is not None else None
    while True:
        block = file.read(BLOCK_NBYTES) if readinto is None else readinto(space)
        if block is None:
            raise BadInput(f"media file {file!r} does not block: it must be read in full before it is named")
        if isinstance(block, str):
            raise BadInput(f"media file {file!r} is open as text: open it with mode 'rb'")
        if not block:
            return
        yield space[:block] if space is not None else block


# ---------------------------------------------------------------------- arrays


def _array_meaning(dtype: str, shape: Any) -> bytes:
    return f"array {dtype} {','.join(map(str, shape))}".encode()


def _numpy_dtype(array: Any) -> str:
    dtype = array.dtype
    numbers = dtype.kind in "biufc" or (dtype.kind == "V" and dtype.names is None and not dtype.name.startswith("void"))
    if not numbers:
        raise BadInput(f"media array of dtype {dtype}: its elements must be numbers")
    if isinstance(array, np.ma.MaskedArray):
        raise BadInput("media array with a mask: give its `filled()`")
    return str(dtype.name if dtype.isnative else dtype.str)


def _torch_dtype(tensor: Any) -> str:
    plain = str(tensor.layout) == "torch.strided" and not tensor.is_quantized and not tensor.is_nested
    if not plain or tensor.device.type == "meta":
        raise BadInput(
            f"media tensor of layout {tensor.layout}, dtype {tensor.dtype}, on {tensor.device}: it must be dense, not "
            "quantized or nested, and have data"
        )
    return str(tensor.dtype).removeprefix("torch.")


def _array(array: Any) -> Iterator[Any]:
    for piece in _pieces(np.asarray(array), array.nbytes, lambda a: bool(a.flags.c_contiguous)):
        yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def _tensor(tensor: Any) -> Iterator[Any]:
    tensor = tensor.detach()
    on_cpu = tensor.device.type == "cpu"
    for piece in _pieces(tensor, tensor.numel() * tensor.element_size(), lambda _: on_cpu):
        values = piece.resolve_conj().resolve_neg().cpu()
        yield from _array(_as_numpy(values))


def _as_numpy(tensor: Any) -> Any:
    """A tensor on the CPU as an array over the same memory; numpy has no bfloat16, so mostly as integers."""
    torch = sys.modules["torch"]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return (tensor if integers is None else tensor.view(integers)).numpy()


def _pieces(array: Any, nbytes: int, as_it_lies: Callable[[Any], bool]) -> Iterator[Any]:
    """Parts of an array in C order: a block at most, or what needs no copy."""
    if nbytes <= BLOCK_NBYTES or as_it_lies(array):
        yield array
        return
    rows = array.shape[0]
    if rows == 1:
        yield from _pieces(array[0], nbytes, as_it_lies)
        return
    row_nbytes = nbytes // rows
    step = max(1, BLOCK_NBYTES // row_nbytes)
    for first in range(0, rows, step):
        part = array[first : first + step]
        yield from _pieces(part, part.shape[0] * row_nbytes, as_it_lies)


# ---------------------------------------------------------------------- images


def _image_meaning(image: Any) -> bytes:
    try:
        frames = getattr(image, "n_frames", 1)
    except (OSError, SyntaxError, ValueError) as e:
        raise BadInput(f"image {image!r} cannot be read: {e}") from None
    if frames > 1:
        raise BadInput(f"an image of {frames} frames: give its file's bytes, or one frame as `image.copy()`")
    try:
        image.load()
    except (OSError, SyntaxError, ValueError) as e:
        raise BadInput(f"image {image!r} cannot be read: {e}") from None
    palette = (image.palette.mode, bytes(image.getpalette(None) or ())) if image.palette is not None else None
    shown = [image.info.get("transparency"), image.getexif().get(_ORIENTATION), image.info.get("icc_profile")]
    return b"pixels " + canonical([image.mode, *image.size, palette, *shown])


def _pixels(image: Any) -> Iterator[bytes]:
    width, height = image.size
    step = max(1, BLOCK_NBYTES // (4 * width or 1))
    for first in range(0, height, step):
        yield image.crop((0, first, width, min(first + step, height))).tobytes()
