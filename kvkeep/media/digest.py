"""The digest of a media item: which content, of which kind, preprocessed how.

Must not know kinds of sources, nor where the digest goes.

    content  = SHA-256(raw bytes)                                     in blocks: no source is in memory as a whole
    digest   = SHA-256(format, kind, meaning of the bytes, their number, content, preprocessing)
                       each framed: tag, length, bytes

SHA-256 is in the standard library, and processors have instructions for it: 10 MB take some milliseconds, less than
any decoder.  BLAKE3 is several times as fast (`kvkeep bench media` shows it where it is installed), and would be a
dependency of every machine that makes digests, for those made by a router must equal those made by an engine.
"""

import struct
from collections import OrderedDict
from collections.abc import Hashable
from hashlib import sha256
from threading import Lock
from typing import Any

from kvkeep.config import check_int
from kvkeep.errors import BadInput
from kvkeep.index.names import frame
from kvkeep.media.canonical import canonical
from kvkeep.media.sources import open_source, outline

#: Smaller contents are digested again: that takes no longer than to remember them.
MEMO_NBYTES_MIN = 4096

_FORMAT = b"kvkeep media 1"


class Digester:
    """Digests media of one kind under one preprocessing, and remembers them.   May be used from any thread.

    kind: "image", "audio", "video" or another name for what the content is taken for.
    preprocessing: parameters that the input of the encoder depends on, see `canonical`; for a Hugging Face processor
        `processor_parameters(processor)`.   Everything that changes pixels or samples must be in it.
    memo_entries, memo_nbytes: how many digests are remembered, and how many bytes of content are kept alive for that.
    """

    def __init__(
        self, kind: str, preprocessing: Any = None, *, memo_entries: int = 1024, memo_nbytes: int = 256 << 20
    ) -> None:
        self._memo = _Memo(
            check_int("memo_entries", memo_entries, at_least=0), check_int("memo_nbytes", memo_nbytes, at_least=0)
        )
        self._fixed = frame(
            [("format", _FORMAT), ("kind", _check_kind(kind)), ("preprocessing", canonical(preprocessing))]
        )

    def digest(self, source: Any, *, frozen: Hashable = None) -> bytes:
        """The digest, 32 bytes, of a source.

        source: bytes or another buffer, a path, a binary file (all of it, whatever its position, if it can be sought),
            a data URL, a PIL image of one frame, a numpy array or a torch tensor.
        frozen: a caller's name for the content, such as its upload's id: a promise that whatever has this name has the
            same content, which is not read again then.  Without it only `bytes` objects are remembered, since nobody
            can write into them; they are kept alive meanwhile, so that no other object gets their address.

        Raises `BadInput` for what is no such source, cannot be read, or is empty.
        """
        if frozen is None and type(source) is bytes:
            known = self._memo.of_bytes(source)
            if known is None:
                known = self._make(source)
                self._memo.keep_bytes(source, known)
            return known
        if frozen is None:
            return self._make(source)
        key = (frozen, *outline(source))
        try:
            known = self._memo.of_name(key)
        except TypeError:
            raise BadInput(f"frozen is {type(frozen).__name__}: it must be hashable") from None
        if known is None:
            known = self._make(source)
            self._memo.keep_name(key, known)
        return known

    def _make(self, source: Any) -> bytes:
        meaning, blocks = open_source(source)
        content, nbytes = sha256(), 0
        for block in blocks:
            content.update(block)
            nbytes += memoryview(block).nbytes
        if not nbytes:
            raise BadInput("media of 0 bytes: it must not be empty")
        fields = [("meaning", meaning), ("nbytes", struct.pack("<Q", nbytes)), ("content", content.digest())]
        return sha256(self._fixed + frame(fields)).digest()


def digest(source: Any, kind: str, preprocessing: Any = None) -> bytes:
    """The digest of one source, 32 bytes; nothing is remembered.   See `Digester`."""
    return Digester(kind, preprocessing, memo_entries=0).digest(source)


def _check_kind(kind: object) -> bytes:
    if not isinstance(kind, str) or not kind:
        raise BadInput(f"media kind is {kind!r}: it must be a name, such as 'image'")
    return kind.encode("utf-8", "surrogatepass")


class _Memo:
    """Digests by object and by name, the last used ones.

    An entry by object holds the object: as long as it is here, its address is no other's.
    """

    def __init__(self, entries: int, nbytes: int) -> None:
        self._entries = entries
        self._nbytes_max = nbytes
        self._nbytes = 0
        self._by_id: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._by_name: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = Lock()

    def of_bytes(self, content: bytes) -> bytes | None:
        with self._lock:
            found = self._by_id.get(id(content))
            if found is None:
                return None
            self._by_id.move_to_end(id(content))
            return found[1]

    def keep_bytes(self, content: bytes, made: bytes) -> None:
        if not MEMO_NBYTES_MIN <= len(content) <= self._nbytes_max:
            return
        with self._lock:
            if id(content) not in self._by_id:
                self._by_id[id(content)] = (content, made)
                self._nbytes += len(content)
            while len(self._by_id) > self._entries or self._nbytes > self._nbytes_max:
                _, (gone, _) = self._by_id.popitem(last=False)
                self._nbytes -= len(gone)

    def of_name(self, key: Hashable) -> bytes | None:
        with self._lock:
            found = self._by_name.get(key)
            if found is not None:
                self._by_name.move_to_end(key)
            return found

    def keep_name(self, key: Hashable, made: bytes) -> None:
        with self._lock:
            self._by_name[key] = made
            while len(self._by_name) > self._entries:
                self._by_name.popitem(last=False)
