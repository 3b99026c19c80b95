"""What a page is called: token ids, media items, identities, and the chain of 64-bit names.

Must not know pages or runs.  A name nominates; it never decides (that is the comparison in `runs`).

    root   = H(fingerprint, salt, adapter, label)     every field framed: tag, length, bytes
    name_i = H(name_{i-1}, tokens of page i, media items that touch page i)

H is XXH3 at 64 bits with the parent's name as its seed and token ids as little-endian int32, so names are equal
across processes and machines.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index.media import MediaItem, PageMedia, is_integer

#: Anything that holds token ids: a numpy array or `array` of integers, a buffer, or a sequence of ints.
#: `bytes`, `bytearray` and unsigned-byte views are read as native int32.
TokenIds = Any

#: Token ids as kvkeep keeps them.
Int32s = npt.NDArray[np.int32]

#: 64-bit hash of a buffer under a 64-bit seed.  Tests put narrow or constant ones here.
Hash64 = Callable[[Any, int], int]

TOKEN_NBYTES = 4

#: Identities remembered: beyond it they are all forgotten, and made again.  One whose fields have more bytes than that
#: is not remembered: a salt may come from anybody.
IDENTITIES_MAX, IDENTITY_NBYTES_MAX = 4096, 512

hash64: Hash64 = xxhash.xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that KV bytes depend on besides tokens: constants of the process.

    Two processes whose fingerprints are equal would compute the same pages; a change of any field makes every old
    name unmatchable.
    """

    weights: str
    revision: str
    dtype: str
    attention: str
    rope: str
    page_size: int
    layout: str
    tensor_parallel: str = "0/1"

    def encode(self) -> bytes:
        """The fields, framed."""
        return frame((name, str(getattr(self, name)).encode()) for name in self.__dataclass_fields__)


def fingerprint_bytes(fingerprint: Fingerprint | bytes) -> bytes:
    """A fingerprint as bytes; `BadInput` when it is neither bytes nor a `Fingerprint`."""
    if isinstance(fingerprint, Fingerprint):
        return fingerprint.encode()
    if not isinstance(fingerprint, bytes):
        raise BadInput(f"fingerprint is {type(fingerprint).__name__}: it must be bytes or a Fingerprint")
    return fingerprint


@dataclass(frozen=True, slots=True)
class Identity:
    """Where a chain starts: the framed root record, compared in full, and its 64-bit name.

    salt, adapter: of those that the record was made of, what requests with another label may share with it.
    """

    record: bytes
    name: int
    salt: bytes = b""
    adapter: bytes = b""


def frame(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Fields as one string that no other list of fields gives: for each, tag length, tag, value length, value."""
    parts = []
    for tag, value in fields:
        name = tag.encode()
        parts += [struct.pack("<I", len(name)), name, struct.pack("<Q", len(value)), value]
    return b"".join(parts)


def make_identity(
    fingerprint: bytes, salt: bytes = b"", adapter: bytes = b"", label: bytes = b"", hash_fn: Hash64 = hash64
) -> Identity:
    """The root record of (fingerprint, salt, adapter, label); `BadInput` when one of them is not bytes."""
    fields = (("fingerprint", fingerprint), ("salt", salt), ("adapter", adapter), ("label", label))
    for tag, value in fields:
        if not isinstance(value, bytes):
            raise BadInput(f"{tag} is {type(value).__name__}: it must be bytes")
    record = frame(fields)
    return Identity(record, hash_fn(record, 0), salt, adapter)


class Identities:
    """Identities remembered between admissions: making one takes about 2 us."""

    def __init__(self, hash_fn: Hash64) -> None:
        self._hash = hash_fn
        self._known: dict[tuple[bytes, bytes, bytes], Identity] = {}

    def get(self, fingerprint: bytes, salt: bytes, adapter: bytes, label: bytes) -> Identity:
        """The identity of these four; the fingerprint is the same until `clear`."""
        key = (salt, adapter, label)
        try:
            found = self._known.get(key)
        except TypeError:  # one of them is not even hashable: make_identity says which
            found = None
        if found is None:
            found = make_identity(fingerprint, *key, hash_fn=self._hash)
            if len(self._known) >= IDENTITIES_MAX:
                self._known.clear()
            if sum(map(len, key)) <= IDENTITY_NBYTES_MAX:
                self._known[key] = found
        return found

    def clear(self) -> None:
        """Forgets them."""
        self._known.clear()


def as_token_ids(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous int32 array of shape (n,), without a copy when they already are one.

    Raises `BadInput` for anything that is not integers of 0 to 2**31 - 1 in one dimension.
    """
    return check_token_range(as_int32(tokens))


def check_token_range(ids: npt.NDArray[np.int32], first: int = 0) -> npt.NDArray[np.int32]:
    """`ids`, which begin at position `first`, or `BadInput` naming the first negative one."""
    if len(ids) and ids.min() < 0:
        at = int((ids < 0).argmax())
        raise BadInput(f"token id {int(ids[at])} at position {first + at}: ids must be 0 to 2147483647")
    return ids


def as_int32(tokens: TokenIds) -> npt.NDArray[np.int32]:
    """`as_token_ids` without the check for negative ids in input that is int32 already."""
    if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1:
        return tokens if tokens.flags.c_contiguous else np.ascontiguousarray(tokens)
    if isinstance(tokens, list | tuple):
        return _from_sequence(tokens)
    return _from_buffer(tokens)


def _from_sequence(tokens: Sequence[Any]) -> npt.NDArray[np.int32]:
    try:
        return np.frombuffer(array("i", tokens), dtype=np.int32)
    except OverflowError:
        at, bad = next((i, t) for i, t in enumerate(tokens) if not -(2**31) <= t < 2**31)
        raise BadInput(f"token id {bad} at position {at}: ids must be 0 to 2147483647") from None
    except TypeError:
        at, bad = next((i, t) for i, t in enumerate(tokens) if not is_integer(t))
        raise BadInput(f"token id {bad!r} at position {at} is {type(bad).__name__}: ids must be integers") from None


def _from_buffer(tokens: Any) -> npt.NDArray[np.int32]:
    if isinstance(tokens, bytes | bytearray):
        tokens = memoryview(tokens)
    if isinstance(tokens, memoryview) and tokens.format in ("B", "b", "c"):
        if tokens.ndim != 1 or not tokens.contiguous:
            raise BadInput(f"token buffer of shape {tokens.shape}, strides {tokens.strides}: it must be one piece")
        if tokens.nbytes % TOKEN_NBYTES:
            raise BadInput(f"token buffer of {tokens.nbytes} bytes: int32 ids take a multiple of {TOKEN_NBYTES}")
        return np.frombuffer(tokens, dtype=np.int32)
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as e:
        raise BadInput(f"token ids of type {type(tokens).__name__} cannot be read: {e}") from None
    if ids.ndim != 1:
        raise BadInput(f"token ids of shape {ids.shape}: they must have one dimension")
    if ids.dtype.kind not in "iu":
        raise BadInput(f"token ids of dtype {ids.dtype}: ids must be integers")
    may_overflow = ids.dtype.itemsize > TOKEN_NBYTES or ids.dtype.kind == "u"
    if may_overflow and len(ids) and (ids.max() > 2**31 - 1 or ids.min() < 0):
        at = int(((ids > 2**31 - 1) | (ids < 0)).argmax())
        raise BadInput(f"token id {int(ids[at])} at position {at}: ids must be 0 to 2147483647")
    return np.ascontiguousarray(ids, dtype=np.int32)


def page_name(parent: int, raw: Any, items: tuple[MediaItem, ...] = (), hash_fn: Hash64 = hash64) -> int:
    """The name of one page: `raw` is its token ids as bytes, `items` the media items that touch it."""
    if not items:
        return hash_fn(raw, parent)
    parts = [
        struct.pack("<QQ?I", m.offset, m.length, m.causal, len(m.digest or b"")) + (m.digest or b"") for m in items
    ]
    return hash_fn(bytes(raw) + b"".join(parts), parent)


def chain_names(
    parent: int,
    raw: memoryview,
    page_nbytes: int,
    first: int = 0,
    media: PageMedia = None,
    hash_fn: Hash64 = hash64,
) -> list[int]:
    """The names of consecutive pages.

    parent: the name of the page before them (the root's name for page 0).
    raw: their token ids, a byte view of a multiple of `page_nbytes`.
    first: the index in its chain of the first page, for `media`.
    """
    names: list[int] = []
    append = names.append
    if not media:
        for at in range(0, len(raw), page_nbytes):
            parent = hash_fn(raw[at : at + page_nbytes], parent)
            append(parent)
        return names
    for i, at in enumerate(range(0, len(raw), page_nbytes), first):
        parent = page_name(parent, raw[at : at + page_nbytes], media.get(i, ()), hash_fn)
        append(parent)
    return names


def self_test() -> None:
    """Raises `InvariantViolation` when this machine does not give the names that every other one gives."""
    raw = np.arange(256, dtype=np.int32).data.cast("B")
    got = chain_names(make_identity(b"kvkeep").name, raw, 512)
    if got != GOLDEN_SELF_TEST:
        raise InvariantViolation(f"names differ on this machine: {got} instead of {GOLDEN_SELF_TEST}")


#: Names of the two pages of 128 ids 0..255 under fingerprint b"kvkeep".
GOLDEN_SELF_TEST = [14650892278896040279, 1782027582555636366]
