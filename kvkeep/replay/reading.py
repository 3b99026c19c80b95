"""Reads files line by line, plain or compressed, and says where what is wrong.

Must not know any format.
"""

import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from kvkeep.errors import BadInput

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
GZIP_WBITS = 31
TOKEN_MAX = 2**31 - 1


class Malformed(Exception):
    """A line cannot be used: `field` (a path such as turns[3], or empty for the whole line) and what is wrong."""

    def __init__(self, field: str, wrong: str) -> None:
        self.field = field
        self.wrong = wrong
        super().__init__(f"{field}: {wrong}" if field else wrong)


class _Decompressor(Protocol):
    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, /) -> bytes: ...


class Source:
    """Bytes of one file, decompressed.

    cut: None, or that its compressed data end early, with how much was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            packed = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
        self.digest = hashlib.sha256(packed).hexdigest()
        self.data, whole = self._unpack(packed)
        self.cut = None if whole else f"{path.name} is cut short: {len(self.data)} bytes of content were read"

    def _unpack(self, packed: bytes) -> tuple[bytes, bool]:
        if packed.startswith(GZIP_MAGIC):
            make: Any = lambda: zlib.decompressobj(GZIP_WBITS)  # noqa: E731 - one of two constructors
        elif packed.startswith(XZ_MAGIC):
            make = lzma.LZMADecompressor
        else:
            return packed, not self._should_be_packed()
        parts: list[bytes] = []
        while packed:
            stream: _Decompressor = make()
            try:
                parts.append(stream.decompress(packed))
            except (zlib.error, lzma.LZMAError) as error:
                read = sum(map(len, parts))
                raise BadInput(f"{self.path}: the compressed data are damaged ({error}), {read} bytes in") from error
            if not stream.eof:
                return b"".join(parts), False
            packed = stream.unused_data.lstrip(b"\x00")
        return b"".join(parts), True

    def _should_be_packed(self) -> bool:
        """A file that is called .gz or .xz and has not even the first bytes of one."""
        return self.path.suffix in (".gz", ".xz")


class Lines:
    """The JSON objects of a file, one a line; malformed ones are refused, or counted.

        for number, line in lines.objects():
            with lines.guard(number):
                ...                          # raises Malformed

    skip: leave malformed lines out and count them in `bad`; a file cut short is used as far as it goes.
    """

    def __init__(self, source: Source, skip: bool) -> None:
        self.source = source
        self.bad = 0
        self._skip = skip
        text, cut = source.data, source.cut
        if cut is not None:
            text = text[: text.rfind(b"\n") + 1]  # what is behind it is half a line
            whole = text.count(b"\n")
            self.note = f"{cut}, {whole} whole lines"
            if not skip:
                raise BadInput(f"{self.note}; --skip-bad uses those")
        else:
            self.note = ""
        self._text = text

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, object) of every line that is one; empty lines are passed over."""
        for number, raw in enumerate(self._text.split(b"\n"), 1):
            if not raw.strip():
                continue
            with self.guard(number):
                try:
                    line = json.loads(raw)
                except ValueError as error:
                    raise Malformed("", f"no JSON ({error})") from None
                if not isinstance(line, dict):
                    raise Malformed("", f"a JSON {type(line).__name__}: it must be an object")
                yield number, line

    def guard(self, number: int) -> "_Guard":
        """Turns `Malformed` inside it into a refusal that names the line, or counts it."""
        return _Guard(self, number)

    def malformed(self, number: int, error: Malformed) -> None:
        """Line `number` cannot be used."""
        if not self._skip:
            raise BadInput(f"{self.source.path.name} line {number}: {error}; --skip-bad leaves such lines out")
        self.bad += 1


class _Guard:
    def __init__(self, lines: Lines, number: int) -> None:
        self._lines = lines
        self._number = number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Malformed):
            return False
        self._lines.malformed(self._number, error)
        return True


# ---------------------------------------------------------------------- fields


def need(line: dict[str, Any], field: str, where: str = "") -> Any:
    """The value of a field that must be there."""
    if field not in line:
        raise Malformed(where + field, "is missing")
    return line[field]


def integer(value: Any, field: str, at_least: int = 0) -> int:
    """`value`, if it is a whole number of `at_least` or more."""
    if type(value) is not int or value < at_least:
        raise Malformed(field, f"{_shown(value)}: it must be a whole number of {at_least} or more")
    return value


def seconds(value: Any, field: str) -> float:
    """`value`, if it is a finite number of seconds, 0 or more."""
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise Malformed(field, f"{_shown(value)}: it must be a number of seconds, 0 or more")
    return float(value)


def seconds_or_none(line: dict[str, Any], field: str, where: str = "") -> float | None:
    """Seconds where the field is there and not null."""
    value = line.get(field)
    return None if value is None else seconds(value, where + field)


def listed(value: Any, field: str) -> list[Any]:
    """`value`, if it is a list."""
    if not isinstance(value, list):
        raise Malformed(field, f"{_shown(value)}: it must be a list")
    return value


def token_ids(value: Any, field: str) -> list[int]:
    """`value`, if it is a list of token ids."""
    ids = listed(value, field)
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= TOKEN_MAX:
            raise Malformed(f"{field}[{at}]", f"{_shown(token)}: a token id is a whole number, 0 to {TOKEN_MAX}")
    return ids


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
