"""Headers: which of them belong to a connection and not to a message, and which answers can be passed on.

Must not know replicas.
"""

import re
from collections.abc import Sequence

Headers = list[tuple[bytes, bytes]]

#: Of the connection, not of the message (RFC 9110, 7.6.1), or for the next hop alone, or written anew.
OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host")
) | {b"proxy-authorization", b"proxy-authenticate"}
REPLICA_HEADER = b"x-kvkeep-replica"

_NAMES = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]*")
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def headers_up(headers: Headers, client: tuple[str, int] | None) -> list[tuple[str, str]]:
    """What the replica is told.  The length is written anew.   headers: with names in lower case."""
    own = OWN_HEADERS | _named_by_connection(headers) | {b"content-length", b"expect"}
    out = [(name.decode("latin-1"), as_text(value)) for name, value in headers if name not in own]
    if client:
        out.append(("X-Forwarded-For", client[0]))
    return out


def headers_down(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """What the client is told; `ValueError` for an answer that no server may give."""
    if not 200 <= status <= 599:
        raise ValueError(f"status {status} is no final one")
    lower = [(name.lower(), value) for name, value in headers]
    own = OWN_HEADERS | _named_by_connection(lower) | {REPLICA_HEADER}
    if status in (204, 304):
        own |= {b"content-length"}  # of a body that does not come
    out = [(name, value) for name, value in lower if name not in own]
    if not _NAMES.fullmatch(b"".join(name for name, _ in out)) or _NO_VALUE.search(b"".join(value for _, value in out)):
        raise ValueError("a header has bytes that none may have")
    return out


def as_text(raw: bytes) -> str:
    """Bytes of a header as the client library takes them: it writes UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    return frozenset(
        word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")
    )
