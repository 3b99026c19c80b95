"""`kvkeep route`: serves the proxy until it is stopped, and tells what went where.

Must not know requests.
"""

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from kvkeep.proxy.app import Proxy
from kvkeep.proxy.protocol import Protocol
from kvkeep.proxy.sockets import BACKLOG, address_of, allow_many, listen
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.routing.settings import RoutingSettings


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
    allow_many()
    address = address_of(options.host, listener.getsockname()[1])
    print(f"{address} routes to {len(options.replicas)} replicas", flush=True)
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
        http=Protocol,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )


def _report(proxy: Proxy) -> Report:
    rows: list[dict[str, JsonValue]] = [
        {"replica": name, "alive": replica.alive, "requests": replica.routed, "why": replica.why}
        for name, replica in proxy.replicas.by_id.items()
    ]
    for row in rows:
        print(f"{row['replica']}: {row['requests']:,} requests" + ("" if row["alive"] else f", {row['why']}"))
    total = sum(replica.routed for replica in proxy.replicas.by_id.values())
    return Report("route", ok=True, metrics={"requests": Metric(total, "requests")}, rows=rows)
