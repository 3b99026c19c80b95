"""Preprocessing parameters as bytes: equal for equal parameters, however they are written, and for no others.

Must not know what parameters mean, nor import the libraries that they come from: those are told by what they can do.

    value = tag (1 byte), length (8 bytes, little-endian), content          so no value can imitate another

A number is its value: 224, 224.0 and numpy's are one.  A list and a tuple are one, and so is an array of the same
numbers; a mapping has no order.  True is not 1, text is not bytes, and float32's 0.1 is not float64's.
"""

import math
import operator
import struct
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvkeep.errors import BadInput

#: More values inside one another are a mistake: a list that holds itself, say.
DEPTH_MAX = 32

#: What a processor says of itself that changes no pixel and no sample: the class that it is saved with, the kind of
#: container that its results come in, and the text side, whose token ids are compared themselves.
NOT_PIXELS = frozenset({"processor_class", "_processor_class", "return_tensors", "chat_template", "tokenizer"})

_PARTS = frozenset({"image_processor_type", "video_processor_type", "feature_extractor_type"})
_NAN = struct.pack("<d", math.nan)


def canonical(parameters: Any) -> bytes:
    """Parameters (None, numbers, text, bytes, dtypes; lists, sets, mappings, arrays of them) in their one encoding.

    Raises `BadInput`, which says where it stands, for anything else.
    """
    return _encode(parameters, "preprocessing", 0)


def processor_parameters(processor: Any) -> dict[str, Any]:
    """What a Hugging Face processor, image processor or feature extractor does to its input, for `canonical`.

    It is `processor.to_dict()` without `NOT_PIXELS`, with the class that computes (two backends of one processor give
    other pixels under one `image_processor_type`) and the version of its library.  What is not known stays in: it can
    only cost a hit.  Settings of a single call are not in it: `{**processor_parameters(p), "call": settings}`.
    """
    if not callable(getattr(processor, "to_dict", None)):
        raise BadInput(f"{type(processor).__name__} is not a processor: it must have `to_dict`")
    kind = type(processor)
    library = sys.modules.get(kind.__module__.partition(".")[0])
    return {
        **_without(processor.to_dict()),
        "computed_by": f"{kind.__module__}.{kind.__qualname__}",
        "library_version": getattr(library, "__version__", None),
    }


def _without(known: Mapping[str, Any]) -> dict[str, Any]:
    """Without `NOT_PIXELS`, in this processor and in those that it is made of."""
    return {
        key: _without(value) if isinstance(value, Mapping) and not _PARTS.isdisjoint(value) else value
        for key, value in known.items()
        if key not in NOT_PIXELS
    }


def _encode(value: Any, where: str, depth: int) -> bytes:
    if depth > DEPTH_MAX:
        raise BadInput(f"{where}: more than {DEPTH_MAX} values inside one another")
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool | np.bool_):
        return _tagged(b"b", b"1" if value else b"0")
    if isinstance(value, str):
        return _tagged(b"s", str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return _tagged(b"y", bytes(value))
        except ValueError as e:
            raise BadInput(f"{where} cannot be read: {e}") from None
    if isinstance(value, np.timedelta64):  # numpy takes it for an integer
        raise BadInput(f"{where} is {value!r}: times must be given as numbers or text")
    if isinstance(value, int | float | np.integer | np.floating):
        return _number(value, where)
    if isinstance(value, Mapping):
        return _mapping(value, where, depth)
    if isinstance(value, list | tuple):
        return _tagged(b"l", b"".join(_encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)))
    if isinstance(value, AbstractSet):
        return _tagged(b"t", b"".join(sorted(_encode(v, f"{where}{{}}", depth + 1) for v in value)))
    return _foreign(value, where, depth)


def _tagged(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack("<Q", len(content)) + content


def _number(value: Any, where: str) -> bytes:
    if isinstance(value, int | np.integer):
        whole = operator.index(value)
    else:
        real = float(value)
        if real != value and value == value:
            raise BadInput(f"{where} is {value!r}: a number must fit float64")
        if not real.is_integer() or (real == 0 and math.copysign(1, real) < 0):
            return _tagged(b"f", struct.pack("<d", real) if real == real else _NAN)
        whole = int(real)
    return _tagged(b"i", whole.to_bytes(whole.bit_length() // 8 + 1, "little", signed=True))


def _mapping(value: Mapping[Any, Any], where: str, depth: int) -> bytes:
    pairs = sorted(
        (_encode(key, f"a key of {where}", depth + 1), _encode(item, f"{where}[{key!r}]", depth + 1))
        for key, item in value.items()
    )
    for (one, _), (other, _) in pairwise(pairs):
        if one == other:
            raise BadInput(f"{where} has a key twice: keys must differ by more than their type")
    return _tagged(b"m", b"".join(key + item for key, item in pairs))


def _foreign(value: Any, where: str, depth: int) -> bytes:
    """Values of numpy, torch and transformers."""
    kind = type(value)
    if isinstance(value, np.dtype) or (kind.__module__, kind.__qualname__) == ("torch", "dtype"):
        return _tagged(b"k", str(value).removeprefix("torch.").encode())
    if is_dataclass(value) and not isinstance(value, type):
        name = f"{kind.__module__}.{kind.__qualname__}"
        known = {field.name: getattr(value, field.name) for field in fields(value)}
        return _tagged(b"d", _encode(name, where, depth + 1) + _mapping(known, where, depth + 1))
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not isinstance(value, type):
        if getattr(value.dtype, "kind", "") in tuple("Mm"):
            raise BadInput(f"{where} is of dtype {value.dtype}: times must be given as numbers or text")
        try:
            empty, content = len(value.shape) > 1 and 0 in value.shape, value.tolist()
        except (RuntimeError, TypeError) as e:
            raise BadInput(f"{where} is a {kind.__name__} that cannot be read: {e}") from None
        if empty:
            raise BadInput(f"{where} is an array of shape {tuple(value.shape)}: it must not be empty")
        return _encode(content, where, depth + 1)
    raise BadInput(
        f"{where} is {kind.__name__}: it must be None, a number, text, bytes, a dtype, or a list, set, mapping or "
        "array of them"
    )
