"""Proxy: an ASGI application that sends OpenAI-compatible requests to the replica that their prefix asks for.

Must not know how a route is chosen, nor look into answers: they are passed on as they come.

A request is tried on another replica only while nothing of it has been sent: when no connection could be made.  What
comes later may have been computed already, so it ends in an error that says which replica it was.  (The client library
asks the same replica once more where a connection that it kept had just been closed, and only what changes nothing by
being asked twice: GET and the like.)
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from yarl import URL

from kvkeep.errors import BadInput
from kvkeep.proxy.bodies import read_prompt
from kvkeep.proxy.headers import REPLICA_HEADER, Headers, as_text, headers_down, headers_up
from kvkeep.proxy.intake import Full, Intake, Receive, Scope, TooLarge
from kvkeep.proxy.replicas import HEALTH, Replicas, is_ours, parse_address, why_not
from kvkeep.proxy.sockets import made_for_replica
from kvkeep.routing.router import Router
from kvkeep.routing.settings import RoutingSettings
from kvkeep.routing.shared import DEPTH_MAX

Send = Callable[[dict[str, Any]], Awaitable[None]]

#: Seconds.  A connection that lies idle longer may be closed by the replica just as a request is written into it, and
#: such a request cannot be sent again.  Replicas that run on uvicorn close them after 5.
KEEP_ALIVE_S = 3.0
CONNECT_MAX_S = 2.0


class Unreachable(Exception):
    """No connection could be made: nothing of the request has been sent."""


class NoRoom(Exception):
    """No connection could be made, and it is not the replica's fault."""


class Proxy:
    """The application.  Its lifespan starts and ends the health checks."""

    def __init__(self, replicas: Sequence[str], settings: RoutingSettings | None = None) -> None:
        """replicas: addresses such as http://10.0.0.1:8000.   Raises `BadInput`."""
        self.router = Router(map(parse_address, replicas), settings)
        self.replicas = Replicas(self.router)
        self._intake = Intake()
        self._prompt_nbytes = DEPTH_MAX * self.router.settings.page_nbytes
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            raise BadInput(f"{scope['type']}: only http requests are routed")

    # ------------------------------------------------------------------ beginning and end

    async def start(self) -> None:
        """Before the first request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=made_for_replica
                ),
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_MAX_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
            self._watch = asyncio.get_running_loop().create_task(self.replicas.watch(self._session))

    async def close(self) -> None:
        """After the last one."""
        if self._session is not None and self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            await self._session.close()
            self._session = self._watch = None

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # ------------------------------------------------------------------ one request

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == HEALTH:
            await self._tell_health(send)
            return
        with self._intake.hold() as held:
            try:
                body = await held.read(scope, receive)
                order = self._order(scope, body)
            except BadInput as error:
                status = 413 if isinstance(error, TooLarge) else 400
                await _refuse(send, status, "invalid_request_error", str(error))
            except Full as error:
                await _refuse(send, 503, "no_room", f"no room for another request: {error}", SOON)
            except ConnectionResetError:
                pass
            else:
                if order:
                    await self._until_gone(self._forward(scope, body, order, send), receive)
                else:
                    await self._refuse_all(send)

    def _order(self, scope: Scope, body: bytes) -> list[str]:
        """The replicas that may be asked, the chosen one first."""
        if not _raw_path(scope).startswith("/"):  # behind an address it would be another address
            raise BadInput(f"{_raw_path(scope)}: the path must begin with a slash")
        if not self.router.replicas:
            return []
        packed = any(name == b"content-encoding" for name, _ in scope["headers"])
        prompt = None if packed or not body else read_prompt(scope["path"], body, self._prompt_nbytes)
        if prompt is None:
            loads, known = self.router.loads, self.replicas.by_id
            return sorted(loads, key=lambda replica: (loads[replica], known[replica].routed))
        route = self.router.route_bytes(prompt.raw, prompt.kind, salt=prompt.salt, adapter=prompt.adapter)
        return [route.replica, *(replica for replica in route.order if replica != route.replica)]

    async def _forward(self, scope: Scope, body: bytes, order: Sequence[str], send: Send) -> None:
        for replica in order:
            try:
                await self._ask(replica, scope, body, send)
                return
            except Unreachable as error:
                self.replicas.unreachable(replica, str(error))
            except NoRoom as error:
                await _refuse(send, 503, "no_room", f"no room for another connection here: {error}", SOON)
                return
        await self._refuse_all(send)

    async def _ask(self, replica: str, scope: Scope, body: bytes, send: Send) -> None:
        """Sends the request to one replica, and its answer back as it comes."""
        assert self._session is not None
        known = self.replicas.by_id[replica]
        known.routed += 1
        self.router.begin(replica)
        waits, begun = True, False
        try:
            async with self._session.request(
                scope["method"],
                _url(replica, scope),
                headers=headers_up(scope["headers"], scope.get("client")),
                data=body or None,
                allow_redirects=False,
            ) as answer:
                headers = headers_down(answer.status, answer.raw_headers)
                headers.append((REPLICA_HEADER, replica.encode()))
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                begun = True
                async for chunk in answer.content.iter_any():
                    if waits:
                        waits = False
                        self.router.end(replica)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                self.replicas.answered(replica)
        except aiohttp.ClientConnectorError as error:
            known.routed -= 1  # it has not been there
            raise (NoRoom if is_ours(error) else Unreachable)(why_not(error)) from error
        except aiohttp.ConnectionTimeoutError as error:
            known.routed -= 1
            raise Unreachable(f"no connection within {CONNECT_MAX_S:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            self.replicas.broke(replica, f"it took a request and gave no whole answer ({type(error).__name__})")
            if begun:
                return  # without an end: the server closes the connection, so the client sees that something is missing
            what = f"{replica} gave no usable answer ({type(error).__name__}: {error}); it may have begun to compute"
            await _refuse(send, 502, "bad_replica", what)
        finally:
            if waits:
                self.router.end(replica)

    async def _until_gone(self, work: Any, receive: Receive) -> None:
        """Does the work, and stops it when the client goes: the replica need not compute what nobody reads."""
        loop = asyncio.get_running_loop()
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        gone = False

        def leave(listener: "asyncio.Task[Any]") -> None:
            nonlocal gone
            if not listener.cancelled():
                gone = True
                task.cancel()

        listener = loop.create_task(_gone(receive))
        listener.add_done_callback(leave)
        try:
            await work
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
        finally:
            listener.remove_done_callback(leave)
            listener.cancel()

    async def _refuse_all(self, send: Send) -> None:
        dead = "; ".join(f"{name}: {replica.why}" for name, replica in self.replicas.by_id.items())
        await _refuse(send, 503, "no_replica", f"no replica is alive ({dead})", SOON)

    async def _tell_health(self, send: Send) -> None:
        loads = self.router.loads
        told = {
            name: {"alive": replica.alive, "waiting": loads.get(name, 0), "routed": replica.routed, "why": replica.why}
            for name, replica in self.replicas.by_id.items()
        }
        await _answer(send, 200 if loads else 503, {"replicas": told})


def _url(replica: str, scope: Scope) -> URL:
    path = replica + _raw_path(scope)
    query = as_text(scope["query_string"])
    return URL(f"{path}?{query}" if query else path, encoded=True)


def _raw_path(scope: Scope) -> str:
    """As it was sent, without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return as_text(raw)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


#: With what may work in a second.
SOON: Headers = [(b"retry-after", b"1")]


async def _refuse(send: Send, status: int, kind: str, message: str, headers: Headers | None = None) -> None:
    """An error as OpenAI's clients expect it."""
    await _answer(send, status, {"error": {"message": message, "type": kind, "code": status}}, headers or [])


async def _answer(send: Send, status: int, what: Any, headers: Headers | None = None) -> None:
    body = json.dumps(what).encode()
    told = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body, "more_body": False})
