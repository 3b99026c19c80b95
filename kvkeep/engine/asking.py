"""Asking: one request through an idle engine, timed; what demo and verify have in common.

Must not know sessions, cases or reports.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.engine.engine import Engine, SamplingParams
from kvkeep.engine.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave for one prompt; `total_ns` is from submission to the last token.

    matched_tokens: prompt tokens taken from the cache.   host_tokens: of those, the ones that came from host memory.
    """

    output_ids: tuple[int, ...]
    matched_tokens: int
    host_tokens: int
    ttft_ns: int
    total_ns: int


def ask(
    engine: Engine,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    store: bool = True,
    salt: bytes = b"",
) -> Answer:
    """Run one prompt, greedily, on an engine that has nothing else to do."""
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_ids=tuple(stop_ids))
    start = time.perf_counter_ns()
    request = engine.submit(prompt, params, store=store, salt=salt)
    engine.run()
    return Answer(
        output_ids=tuple(request.output_ids),
        matched_tokens=request.matched_len,
        host_tokens=request.host_len,
        ttft_ns=request.ttft_ns,
        total_ns=time.perf_counter_ns() - start,
    )


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_size)


def random_ids(rng: random.Random, loaded: LoadedModel, count: int) -> list[int]:
    """`count` ids drawn uniformly from the model's vocabulary."""
    return [rng.randrange(loaded.config.vocab_size) for _ in range(count)]
