"""`kvkeep route`: serves the proxy until it is stopped, and tells what went where.

Must not know requests.
"""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from kvkeep.errors import BadInput
from kvkeep.proxy.app import Proxy
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.routing.settings import RoutingSettings

BACKLOG = 2048
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What the command line said.   port: 0 takes one that is free."""

    replicas: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8080
    settings: RoutingSettings = field(default_factory=RoutingSettings)


def run(options: RouteOptions) -> Report:
    """Serves until SIGINT or SIGTERM.  Raises `BadInput`."""
    proxy = Proxy(options.replicas, options.settings)
    listener = listen(options.host, options.port)
    logging.basicConfig(format="kvkeep: %(message)s")
    address = listener.getsockname()
    print(f"http://{options.host}:{address[1]} routes to {len(options.replicas)} replicas", flush=True)
    try:
        Server(server_config(proxy)).run(sockets=[listener])
    finally:
        listener.close()
    return _report(proxy)


class Server(uvicorn.Server):
    """uvicorn's, which ends in order when it is stopped, and then raises the signal anew; here it is the usual end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, a signal asks it to end."""
        before = {which: signal.signal(which, self.handle_exit) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def server_config(proxy: Proxy) -> uvicorn.Config:
    """How the proxy is served: headers are the replicas' own."""
    return uvicorn.Config(
        proxy,
        http="httptools",
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )


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
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def _report(proxy: Proxy) -> Report:
    rows: list[dict[str, JsonValue]] = [
        {"replica": name, "alive": replica.alive, "requests": replica.routed, "why": replica.why}
        for name, replica in proxy.replicas.by_id.items()
    ]
    for row in rows:
        print(f"{row['replica']}: {row['requests']:,} requests" + ("" if row["alive"] else f", {row['why']}"))
    total = sum(replica.routed for replica in proxy.replicas.by_id.values())
    return Report("route", ok=True, metrics={"requests": Metric(total, "requests")}, rows=rows)
