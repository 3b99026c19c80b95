"""Small traces that these tests write themselves."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: Writes lines to NAME in an empty folder: text as it is, anything else as JSON.
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, *lines: Any) -> Path:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        path = tmp_path / name
        data = text.encode()
        if name.endswith(".gz"):
            data = gzip.compress(data)
        elif name.endswith(".xz"):
            data = lzma.compress(data)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[[str, list[int]], Path]:
    """Writes token ids as NAME.tokens.u16.xz."""

    def write(name: str, ids: list[int]) -> Path:
        path = tmp_path / f"{name}.tokens.u16.xz"
        path.write_bytes(lzma.compress(np.array(ids, dtype="<u2").tobytes()))
        return path

    return write
