"""Replicas to stand behind a proxy: real servers on real sockets, which answer, stream, refuse, or speak nonsense."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from multidict import CIMultiDict

from kvkeep.proxy.app import Proxy
from kvkeep.proxy.command import Server, server_config
from kvkeep.proxy.sockets import listen

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stub:
    """A replica that notes what it is asked.

    requests: (method, path with query, headers, body).   healthy: what /health says.   gate: answers wait for it.
    gone: set when a client left before its answer ended.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, CIMultiDict[str], bytes]] = []
        self.healthy = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.gone = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """On the port that it had, if it had one."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/health"):
            return web.Response(status=200 if self.healthy else 500)
        body = await request.read()
        self.requests.append((request.method, request.path_qs, request.headers.copy(), body))
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """A stream when it is asked for one: a piece, and after the gate the rest; else one object, after the gate."""
        if body and json.loads(body).get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await stream.write(b"data: first\n\n")
            await self.gate.wait()
            for number in range(3):
                await stream.write(b"data: %d\n\n" % number)
            await stream.write_eof()
            return stream
        await self.gate.wait()
        return web.json_response({"path": request.path_qs, "port": self.port}, headers={"X-Own": "kept"})


class Nonsense:
    """A port where whoever sends anything gets these bytes, and then the end.

    health: what /health says.   unsent: bytes of that for which nobody waited.
    """

    def __init__(self, says: bytes) -> None:
        self._says = says
        self._server: asyncio.Server | None = None
        self.port = 0
        self.asked = self.unsent = 0
        self.health = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.read(65_536)
        if head.startswith(b"GET /health"):
            await self._tell_health(writer)
        elif head:
            self.asked += 1
            writer.write(self._says)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def _tell_health(self, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(self.health), 65_536):
            try:
                writer.write(self.health[at : at + 65_536])
                await writer.drain()
            except ConnectionError:
                self.unsent = len(self.health) - at
                break


@asynccontextmanager
async def served(proxy: Proxy) -> AsyncIterator[str]:
    """The proxy behind a real server; its address."""
    config = server_config(proxy)
    config.load()
    server = Server(config)
    listener = listen("127.0.0.1", 0)
    task = asyncio.create_task(_serve(server, listener))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        listener.close()


async def _serve(server: uvicorn.Server, listener: Any) -> None:
    await server._serve(sockets=[listener])  # `serve` would take the process's signals


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which anything can be said."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def chat(*messages: str, **more: Any) -> dict[str, Any]:
    """A chat request: a system message, and the user's and the assistant's in turn."""
    roles = ["system", *["user", "assistant"] * len(messages)]
    said = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return {"model": "m", "messages": said, **more}


async def post(
    session: aiohttp.ClientSession, url: str, what: Any, path: str = "/v1/chat/completions"
) -> tuple[int, Any]:
    """Status and parsed answer of one request."""
    data = what if isinstance(what, bytes) else json.dumps(what)
    async with session.post(url + path, data=data, headers={"Content-Type": "application/json"}) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text


async def until(what: Callable[[], bool]) -> None:
    """Waits for something that comes by itself."""
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)
