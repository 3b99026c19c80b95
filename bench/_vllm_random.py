"""Random prompts with nothing to reuse: what a connector costs, in pairs beside pairs of equal servers.

Must not know limits.  Three servers are up at once and asked in turn, so that a pair is measured within seconds.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from bench._vllm_client import ask, client
from bench._vllm_models import kv_nbytes_per_token
from bench._vllm_passes import CONFIGURATIONS, GIB, Place, Sizes, changes, served, warm_up
from bench._vllm_server import Served
from bench._vllm_workloads import random_prompt
from kvkeep.benching import spin_us

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 1000, 32
BLOCKS, TIER_BLOCKS = 48, 256
PAIRS = 10
SERVERS = ("a", "b", "kvkeep")


def run_random(place: Place, pairs: int = PAIRS, kept: str = "kvkeep", plain: str = "quarter") -> dict[str, Any]:
    """`pairs` rounds over two servers without a connector and one with; returns what the pass's file holds.

    seconds: by server, one number a round: PROMPTS prompts of PROMPT_TOKENS random tokens, NEW_TOKENS generated each.
    """
    nbytes = TIER_BLOCKS * place.block_size * kv_nbytes_per_token(place.model)
    length_max = 2 * PROMPT_TOKENS
    names = {"a": plain, "b": plain, "kvkeep": kept}
    seconds: dict[str, list[float]] = {name: [] for name in SERVERS}
    spins = []
    out: dict[str, Any] = {"pairs": pairs, "kept": kept, "plain": plain}
    with ExitStack() as stack:
        ups: dict[str, Served] = {}
        for name in SERVERS:
            size = Sizes(BLOCKS, nbytes / GIB, length_max)
            ups[name] = stack.enter_context(served(CONFIGURATIONS[names[name]], size, place, f"random-{name}"))
        with ThreadPoolExecutor(len(SERVERS)) as pool:
            list(pool.map(lambda up: warm_up(client(up.url)), ups.values()))
        before = {name: up.metrics() for name, up in ups.items()}
        for number in range(pairs):
            order = SERVERS if number % 2 == 0 else tuple(reversed(SERVERS))
            spins.append(spin_us().value)
            for name in order:
                seconds[name].append(_serve(ups[name], seed=1_000_000 + 100 * number))
        out["metrics"] = {name: changes(before[name], up.metrics()) for name, up in ups.items()}
        for up in ups.values():
            up.check_alive()
    out["bad_lines"] = [line for up in ups.values() for line in up.bad_lines()]
    return out | {"seconds": seconds, "spins": spins, "tokens": PROMPTS * (PROMPT_TOKENS + NEW_TOKENS)}


def _serve(up: Served, seed: int) -> float:
    """Seconds of a round; all servers are asked the same, and nobody is asked anything twice."""
    server = client(up.url)
    prompts = [random_prompt(PROMPT_TOKENS, seed + number) for number in range(PROMPTS)]
    began = time.perf_counter()
    for prompt in prompts:
        ask(server, prompt, NEW_TOKENS)
    return round(time.perf_counter() - began, 4)
