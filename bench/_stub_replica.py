"""`python -m bench._stub_replica`: a replica that answers at once, for measuring what is before it.

Must not compute.  It prints its port.  A request with "stream" gets pieces, each with the time at which it was sent.
"""

import asyncio
import json
import time
from typing import Any

import uvicorn

from kvkeep.proxy.command import Server
from kvkeep.proxy.sockets import listen

PIECES, PIECE_EVERY_S = 20, 0.02
ANSWER = json.dumps(
    {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "x" * 800}}]}
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """ASGI."""
    if scope["type"] != "http":
        return
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    if b'"stream"' in parts[-1][-64:]:
        await _stream(send)
        return
    body = ANSWER.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(PIECES):
        piece = b"data: %d\n\n" % time.monotonic_ns()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(PIECE_EVERY_S)
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    listener = listen("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_level="error", access_log=False)
    Server(config).run(sockets=[listener])
