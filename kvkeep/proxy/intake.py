"""Request bodies: read whole, since the prompt is in them and a refused connection needs them again, within limits.

Must not know what is in them.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from kvkeep.errors import BadInput

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]

#: Of one request: longer ones keep all others waiting while they are parsed.  Of all requests that have not ended.
BODY_NBYTES_MAX, BODIES_NBYTES_MAX = 64 << 20, 1 << 30


class TooLarge(BadInput):
    """A body of more bytes than are read."""


class Full(Exception):
    """No room for another body now."""


class Intake:
    """What is held of all of them."""

    def __init__(self) -> None:
        self.nbytes = 0

    def hold(self) -> "Held":
        """Room for one request's body, until it is left."""
        return Held(self)


class Held:
    """One request's body, as far as it has come."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._nbytes = 0

    def __enter__(self) -> "Held":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._intake.nbytes -= self._nbytes

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """All of it.  Raises `TooLarge`, `Full`, and `ConnectionResetError` when the client goes meanwhile."""
        self._check(said_nbytes(scope))  # before a client that asks is told to go on
        parts = list[bytes]()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            part = message.get("body", b"")
            self._check(len(part))
            self._nbytes += len(part)
            self._intake.nbytes += len(part)
            if not message.get("more_body"):
                return b"".join([*parts, part]) if parts else part
            parts.append(part)

    def _check(self, more_nbytes: int) -> None:
        if self._nbytes + more_nbytes > BODY_NBYTES_MAX:
            raise TooLarge(f"the body is larger than {BODY_NBYTES_MAX >> 20} MiB")
        if self._intake.nbytes + more_nbytes > BODIES_NBYTES_MAX:
            raise Full(f"the bodies of all requests are larger than {BODIES_NBYTES_MAX >> 20} MiB")


def said_nbytes(scope: Scope) -> int:
    """What the length of a body is said to be; 0 where nothing is said."""
    said = (value for name, value in scope["headers"] if name == b"content-length")
    return max((int(value) for value in said if value.isdigit()), default=0)
