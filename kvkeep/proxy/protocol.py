"""uvicorn's HTTP protocol, with two things that a proxy needs: heads end somewhere, and trailers are no headers.

Must not know requests.

uvicorn calls back alike for a header and for a field behind a chunked body, and puts both into the same list: what was
sent behind the body would be passed on as if it had come before it, past whoever looked at the headers.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's line and headers.
HEAD_NBYTES_MAX = 128 << 10


class Protocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._in_head, self._began_now, self._head_nbytes = True, False, 0

    def data_received(self, data: bytes) -> None:
        """Closes the connection of a head that does not end.  Counted from the read behind that in which it began."""
        self._began_now = False
        super().data_received(data)
        if self._in_head and not self._began_now:
            self._head_nbytes += len(data)
            if self._head_nbytes > HEAD_NBYTES_MAX and not self.transport.is_closing():
                self.send_400_response(f"The headers are larger than {HEAD_NBYTES_MAX >> 10} KiB.")

    def on_message_begin(self) -> None:
        self._in_head, self._began_now, self._head_nbytes = True, True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
