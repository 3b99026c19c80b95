"""Sockets whose other end may vanish without a word, and how many of them a process may have.

Must not know requests.
"""

import os
import resource
import socket
from typing import Any

from kvkeep.errors import BadInput

BACKLOG = 2048
PORT_MAX = 65_535

#: Seconds of silence before the other machine is asked whether it is still there, between two questions, and how many
#: of them go unanswered before the connection is over.  A model may think for minutes; its machine answers at once.
ALIVE_AFTER_S, ALIVE_EVERY_S, ALIVE_ASKED = 20, 10, 3


def ask_if_alive(made: socket.socket) -> socket.socket:
    """The same socket; a machine on its other end that has gone ends the connection within a minute."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", ALIVE_AFTER_S),
        ("TCP_KEEPINTVL", ALIVE_EVERY_S),
        ("TCP_KEEPCNT", ALIVE_ASKED),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def made_for_replica(where: Any) -> socket.socket:
    """A socket to a replica.   where: as `getaddrinfo` gives it."""
    family, kind, protocol = where[:3]
    return ask_if_alive(socket.socket(family, kind, protocol))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; `BadInput` when it cannot."""
    if port > PORT_MAX:
        raise BadInput(f"--port {port}: cannot listen there; name another, {PORT_MAX} at most")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # asyncio turns Nagle's algorithm off only where a socket says that it is TCP: without it, answers that are
        # written in two pieces take 40 ms more.
        listener = socket.socket(found[0][0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            ask_if_alive(listener).setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or error
        raise BadInput(f"--host {host} --port {port}: cannot listen there ({why}); name another") from error


def address_of(host: str, port: int) -> str:
    """As a client writes it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_many() -> None:
    """As many open connections as this process may have at most: each request that is passed on takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
