"""Many clients at once that think, go away in the middle, and come back: does everybody get an answer, and is all
that they held given back?

Must not know limits.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from bench._vllm_client import Reading, async_client, body, client
from bench._vllm_passes import Configuration, Place, Sizes, changes, idle, key_of, served, sizes, warm_up
from bench._vllm_workloads import Workload

#: Shares of the requests that are given up before their first token, and while they decode.
EARLY_SHARE, DECODING_SHARE = 0.2, 0.2
EARLY_S_MAX, PAUSE_S_MAX = 1.5, 2.0
#: KV space of vLLM as a share of the working set: requests wait for each other, and their prefixes leave.
SPACE = 0.25


@dataclass(slots=True)
class Outcome:
    """What became of the requests.   ended: by kind.   failures: of those that nobody gave up."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0


def run_concurrent(configuration: Configuration, workload: Workload, place: Place, seed: int) -> dict[str, Any]:
    """Each session of the workload is a client of its own; all at once.  Returns what the pass's file holds."""
    size = sizes(configuration, workload, place)
    size = Sizes(max(size.blocks, workload.blocks_min(place.block_size)), size.tier_gib, size.length_max)
    out: dict[str, Any] = key_of(configuration, workload, place) | {"repeat": seed, "blocks": size.blocks}
    out["tier_gib"] = round(size.tier_gib, 4)
    with served(configuration, size, place, f"{workload.name}-{configuration.name}-{seed}") as up:
        warm_up(client(up.url))
        before, began = up.metrics(), time.monotonic()
        found = asyncio.run(run_storm(up.url, workload, seed))
        out["wall_s"] = round(time.monotonic() - began, 3)
        out["metrics"], out["idle"] = changes(before, up.metrics()), idle(up)
        up.check_alive()
    out["ended"], out["failures"] = dict(found.ended), found.failures
    out["cached_tokens"], out["prompt_tokens"] = found.cached_tokens, found.prompt_tokens
    out["clients"] = len({ask.session for ask in workload.asks})
    out["pss_peak_nbytes"], out["bad_lines"] = up.memory.peak_nbytes, up.bad_lines()
    return out


async def run_storm(url: str, workload: Workload, seed: int) -> Outcome:
    """Each session is a client of its own, all at once."""
    by_session: dict[int, list[Sequence[int]]] = {}
    for ask in workload.asks:
        by_session.setdefault(ask.session, []).append(ask.prompt)
    out = Outcome()
    async with async_client(url) as server:
        clients = (
            _client(server, prompts, workload.new_tokens, random.Random(f"{seed}.{session}"), out)
            for session, prompts in by_session.items()
        )
        await asyncio.gather(*clients)
    return out


async def _client(
    server: openai.AsyncOpenAI, prompts: Sequence[Sequence[int]], new_tokens: int, rng: random.Random, out: Outcome
) -> None:
    """One session, turn by turn; a turn that is given up is not asked again."""
    for prompt in prompts:
        await asyncio.sleep(rng.uniform(0.0, PAUSE_S_MAX))
        drawn = rng.random()
        early = drawn < EARLY_SHARE
        stop_after = rng.randint(1, new_tokens - 1) if EARLY_SHARE <= drawn < EARLY_SHARE + DECODING_SHARE else None
        reading = Reading()
        request = asyncio.create_task(_request(server, reading, prompt, new_tokens, stop_after, out))
        try:
            if early:
                await asyncio.wait_for(request, rng.uniform(0.0, EARLY_S_MAX))
            else:
                await request
        except TimeoutError:
            out.ended["aborted while decoding" if reading.tokens else "aborted before a token"] += 1
        except (openai.APIError, RuntimeError) as error:
            out.ended["failed"] += 1
            out.failures.append(f"{type(error).__name__}: {error}"[:300])


async def _request(
    server: openai.AsyncOpenAI,
    reading: Reading,
    prompt: Sequence[int],
    new_tokens: int,
    stop_after: int | None,
    out: Outcome,
) -> None:
    """One request; it is closed after `stop_after` tokens."""
    stream = await server.completions.create(**body(prompt, new_tokens))
    async with stream:
        async for chunk in stream:
            reading.add(chunk)
            if stop_after is not None and reading.tokens >= stop_after:
                out.ended["aborted while decoding"] += 1
                return
    answer = reading.answer()
    if len(answer.token_ids) != new_tokens:
        raise RuntimeError(f"{len(answer.token_ids)} tokens came, not {new_tokens}")
    out.ended["finished"] += 1
    out.cached_tokens += answer.cached_tokens or 0
    out.prompt_tokens += answer.prompt_tokens
