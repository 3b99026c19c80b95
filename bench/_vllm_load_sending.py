"""An open loop over HTTP: streamed completions that are sent when they are due, however many are on their way.

Must not know servers' processes, cases or limits.  Failures are noted at their request and stop nothing.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench._load import Arrivals, Served

TIMEOUT_S = 300.0
#: Of one line of a stream: the first one repeats the ids of the prompt.
LINE_NBYTES_MAX = 1 << 20
SAID_MAX = 200


class StreamBroken(RuntimeError):
    """An answer that is not what was asked for; the message says how."""


@dataclass(slots=True)
class Outcome:
    """One request and what came of it.

    cached_tokens: of the prompt, by the server's account; None where it does not say.   failure: "" where all is well.
    """

    served: Served
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    failure: str = ""


def body(model: str, prompt: Sequence[int], new_tokens: int) -> bytes:
    """A greedy completion of exactly so many tokens, as JSON."""
    asked: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0.0}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}
    return json.dumps(asked).encode()


async def send(
    url: str, model: str, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], arrivals: Arrivals
) -> list[Outcome]:
    """Asks all of them, each when it is due; returns what came, in that order, when the last has ended.

    Nothing that the server does delays a request: each has a connection of its own.  None is used again, for a server
    may close it at the very moment at which the next request is sent, which would then fail.
    """
    out = [
        Outcome(Served(number, due_s, wanted))
        for number, (due_s, wanted) in enumerate(zip(arrivals.due_s, new_tokens, strict=True))
    ]
    bodies = [body(model, prompt, wanted) for prompt, wanted in zip(prompts, new_tokens, strict=True)]
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        url, connector=connections, timeout=timeout, read_bufsize=LINE_NBYTES_MAX
    ) as session:
        began_s, tasks = time.perf_counter(), []
        for one, content in zip(out, bodies, strict=True):
            await asyncio.sleep(max(0.0, one.served.due_s - (time.perf_counter() - began_s)))
            tasks.append(asyncio.create_task(_request(session, content, one, began_s)))
        await asyncio.gather(*tasks)
    return out


async def _request(session: aiohttp.ClientSession, content: bytes, one: Outcome, began_s: float) -> None:
    one.served.sent_s = time.perf_counter() - began_s
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/completions", data=content, headers=headers) as answer:
            if answer.status != 200:
                raise StreamBroken(f"status {answer.status}: {(await answer.text())[:SAID_MAX]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[len(b"data: ") :]), one, time.perf_counter() - began_s)
        if len(one.token_ids) != one.served.wanted:
            raise StreamBroken(f"{len(one.token_ids)} tokens came, not {one.served.wanted}")
    except (aiohttp.ClientError, TimeoutError, ValueError, StreamBroken) as error:
        one.failure = f"{type(error).__name__}: {error}"[: 2 * SAID_MAX]


def _take(chunk: dict[str, Any], one: Outcome, now_s: float) -> None:
    """One event of a stream, which may hold several tokens."""
    if "choices" not in chunk:
        raise StreamBroken(f"the stream says {json.dumps(chunk)[:SAID_MAX]}")
    for choice in chunk["choices"]:
        ids = choice.get("token_ids") or []
        one.token_ids += ids
        one.served.tokens_s += [now_s] * len(ids)
    usage = chunk.get("usage")
    if usage:
        one.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details")
        one.cached_tokens = None if details is None else details.get("cached_tokens")
