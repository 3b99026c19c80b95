"""Preprocessing parameters: one encoding for equal ones, another for any other.

Must not digest anything: see `test_digest`.
"""

import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import BadInput
from kvkeep.media.canonical import canonical


class Resampling(IntEnum):
    BICUBIC = 3


@dataclass
class Size:
    height: int
    width: int


@dataclass
class Shape:
    height: int
    width: int


EQUAL: dict[str, tuple[Any, ...]] = {
    "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(b=2, a=1), MappingProxyType({"a": 1, "b": 2})),
    "numbers": (224, 224.0, np.int64(224), np.uint8(224), np.float32(224), np.float16(224), np.longdouble(224)),
    "halves": (0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.longdouble(0.5)),
    "flags": (True, np.True_),
    "text": ("bicubic", np.str_("bicubic")),
    "bytes": (b"ab", bytearray(b"ab"), memoryview(b"ab"), np.bytes_(b"ab")),
    "sequences": (
        [0.5, 0.25], (0.5, 0.25), np.array([0.5, 0.25]), np.array([0.5, 0.25], dtype=np.float32),
        torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
    ),
    "sets": ({1, 2}, frozenset((2, 1))),
    "enums": (Resampling.BICUBIC, 3),
    "dtypes": (torch.float32, np.dtype("float32")),
    "scalars": (7, np.array(7), torch.tensor(7)),
    "not a number": (math.nan, -math.nan, np.float32("nan"), struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0]),
    "infinite": (math.inf, np.float32("inf")),
    "large": (10**40, 10**40),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_one_value_has_one_encoding(name: str) -> None:
    """However it is written."""
    assert 1 == len({canonical(value) for value in EQUAL[name]})
    assert 1 == len({canonical({"x": [value]}) for value in EQUAL[name]})


def test_other_values_have_other_encodings() -> None:
    """Also where Python, or a looser encoding, takes them for one."""
    values: list[Any] = [
        None, True, False, 0, 1, -1, 255, 256, -256, 2**63, 2**64, 10**5000, 0.5, -0.0, 0.1, np.float32(0.1), 1e-320,
        math.inf, -math.inf, math.nan, "", "1", "True", "None", "nan", "\ud800", b"", b"1",
        [], [1], [[1]], [1, 1], [11], ["1"], ["1,1"], ["1", "1"], [[], []], [[[]]], [["a", 1]],
        {}, {"a": 1}, {"a": "1"}, {"a": {"b": 1}}, {"a": 1, "b": 1}, {1: "a"}, {"1": "a"}, {"ab": "c"}, {"a": "bc"},
        {"a": {}}, {"a": None}, {"height": 1, "width": 2}, set(), {1}, {2}, {1, 2}, {(1,)},
        np.dtype("float32"), np.dtype("float16"), "float32", np.dtype(">f4"), Size(1, 2), Size(2, 1), Shape(1, 2),
    ]  # fmt: skip
    encodings = [canonical(value) for value in values]
    assert len(values) == len(set(encodings))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-300, 300)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
parameters = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def form(value: Any) -> Any:
    """What a value is, so that two are equal exactly when they mean the same."""
    if isinstance(value, dict):
        return ("mapping", frozenset((key, form(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("sequence", tuple(map(form, value)))
    if isinstance(value, float) and value == 0:
        return ("number", 0 if math.copysign(1, value) > 0 else "-0")
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
        return (type(value).__name__, value)
    return ("number", value)


@given(parameters, parameters)
def test_encodings_are_equal_exactly_where_parameters_are(one: Any, other: Any) -> None:
    """Two of any parameters."""
    assert (form(one) == form(other)) is (canonical(one) == canonical(other))


def rewritten(draw: Any, value: Any) -> Any:
    """The same parameters in another order, in other containers and other types of number."""
    if isinstance(value, dict):
        return {key: rewritten(draw, value[key]) for key in draw(st.permutations(sorted(value)))}
    if isinstance(value, list):
        return draw(st.sampled_from([list, tuple]))(rewritten(draw, item) for item in value)
    if isinstance(value, bool | str | bytes) or value is None:
        return value
    if isinstance(value, int) and abs(value) < 2**53 and draw(st.booleans()):
        return draw(st.sampled_from([float, np.int64, np.float64]))(value)
    return np.float64(value) if isinstance(value, float) and draw(st.booleans()) else value


@given(st.data(), parameters)
def test_an_encoding_does_not_know_how_parameters_are_written(data: st.DataObject, value: Any) -> None:
    """Order, lists and tuples, types of numbers."""
    assert canonical(value) == canonical(rewritten(data.draw, value))


def endless() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"size": {"height": object()}}, r"preprocessing\['size'\]\['height'\] is object: it must be None, a number"),
        ([1, 2j], r"preprocessing\[1\] is complex"),
        ({"crop": len}, r"preprocessing\['crop'\] is builtin_function"),
        ({object(): 1}, "a key of preprocessing is object"),
        (np.longdouble(1) / 3, "a number must fit float64"),
        (np.zeros((0, 3)), r"array of shape \(0, 3\): it must not be empty"),
        (endless(), "more than 32 values inside one another"),
        ({math.nan: 1, -math.nan: 2}, "has a key twice"),
        (np.array([1 + 1j]), r"preprocessing\[0\] is complex"),
        (Size, "preprocessing is type"),
    ],
)
def test_what_has_no_encoding_is_refused(bad: Any, says: str) -> None:
    """And the place is named."""
    if isinstance(bad, np.longdouble) and float(bad) == bad:
        pytest.skip("long double is float64 on this machine")
    with pytest.raises(BadInput, match=says):
        canonical(bad)
