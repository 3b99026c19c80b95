"""Keeps the names of a trace's pages in a file between replays.

Must not know what a name is.  A file that is absent, damaged or of another version is as good as none.

    magic (16 bytes) | XXH3-128 of the rest (16 bytes) | names, little-endian uint64
"""

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

log = logging.getLogger(__name__)

MAGIC = b"kvkeep names 1\n\x00"
HEADER_NBYTES = len(MAGIC) + 16


def load_names(folder: Path, digest: str, page_size: int) -> npt.NDArray[np.uint64] | None:
    """The names kept for (digest of the trace, page size), or None."""
    path = _path(folder, digest, page_size)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[HEADER_NBYTES:]
    if data[:HEADER_NBYTES] != _header(body) or len(body) % 8:
        log.warning("%s is damaged; it is made anew", path)
        return None
    return np.frombuffer(body, dtype="<u8").astype(np.uint64)


def save_names(folder: Path, digest: str, page_size: int, names: npt.NDArray[np.uint64]) -> None:
    """Keeps names, whole or not at all; where the folder cannot be written, not at all."""
    path = _path(folder, digest, page_size)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    body = names.astype("<u8").tobytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(_header(body) + body)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        log.info("%s: names are not kept (%s)", path, error)


def _header(body: bytes) -> bytes:
    return MAGIC + xxhash.xxh3_128_digest(body)


def _path(folder: Path, digest: str, page_size: int) -> Path:
    return folder / f"{digest}-{page_size}.names"
