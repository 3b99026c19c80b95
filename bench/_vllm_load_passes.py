"""Load passes: two vLLM servers, without and with our connector, asked the same load in turn from empty caches.

Must not know limits or figures.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from bench._load import Arrivals
from bench._vllm_load_cases import LoadCase
from bench._vllm_load_found import ALONE, KVKEEP, Found, LoadPass, Probe
from bench._vllm_load_sending import Outcome, send
from bench._vllm_models import kv_nbytes_per_token
from bench._vllm_passes import CONFIGURATIONS, GIB, TIER_ROOM, Place, changes, kvkeep_connector
from bench._vllm_server import MODEL_NAME, Served, ServerFailed, VllmSetup
from bench._vllm_workloads import random_prompt
from kvkeep.benching import median, spin_us

#: vLLM's KV space as a share of the smallest working set; the tier holds the largest.
SPACE = 0.25
#: Without it there is no way to empty the caches between two passes.
DEVELOPING = {"VLLM_SERVER_DEV_MODE": "1"}
RESET_S_MAX = 20.0
#: Tokens that the steps computed, steps, and preemptions.
WORKED = ("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count", "vllm:num_preemptions_total")
#: Of the prompts that are asked alone, without load; what is generated for each.
ALONE_TOKENS, ALONE_NEW, ALONE_PROMPTS = 900, 8, 3
ALONE_SEED = 5_000_000


def run_load(cases: Sequence[LoadCase], place: Place, repeats: int, load: float, seed: int) -> Found:
    """All cases, `repeats` times at each server.

    load: the offered rate, over what the server without a connector can serve of prompts that match nothing.
    """
    working = [case.blocks(place.block_size) for case in cases]
    least = max(case.blocks_min(place.block_size) for case in cases)
    least = max(least, 1 + -(-(ALONE_TOKENS + ALONE_NEW) // place.block_size))
    block_nbytes = place.block_size * kv_nbytes_per_token(place.model)
    found = Found(max(1 + round(SPACE * min(working)), least), TIER_ROOM * max(working) * block_nbytes / GIB)
    ups = {name: _served(name, found, (least - 1) * place.block_size, place) for name in (ALONE, KVKEEP)}
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(ups)) as pool:
            starting = [pool.submit(stack.enter_context, up) for up in ups.values()]
        for each in starting:
            each.result()
        found.starts_s = [round(up.vllm.started_s, 1) for up in ups.values()]
        say(f"two servers of {found.blocks} blocks are up after {max(found.starts_s):.0f} s")
        for up in ups.values():
            _warm_up(up)
        for number, (repeat, case, names) in enumerate(_order(cases, repeats)):
            found.capacities_per_s.append(_capacity_per_s(ups[ALONE], number))
            per_s = load * found.capacities_per_s[-1] * len(case.asks) / case.prompt_tokens
            arrivals = case.arrivals(per_s, seed + repeat)
            found.passes += [_pass(ups[name], name, case, repeat, arrivals) for name in names]
        found.probes = [_probe(ups, number) for number in range(ALONE_PROMPTS)]
        for up in ups.values():
            up.check_alive()
    found.bad_lines = [line for up in ups.values() for line in up.bad_lines()]
    return found


def say(text: str) -> None:
    """What goes on, as it goes on."""
    print(f"  {text}", flush=True)


def _order(cases: Sequence[LoadCase], repeats: int) -> Iterator[tuple[int, LoadCase, tuple[str, str]]]:
    """A case at both servers, one right after the other; every second repeat in the other order."""
    for repeat in range(repeats):
        for case in cases:
            yield repeat, case, (ALONE, KVKEEP) if repeat % 2 == 0 else (KVKEEP, ALONE)


def _served(name: str, found: Found, length_max: int, place: Place) -> Served:
    connector = kvkeep_connector(found.tier_gib, CONFIGURATIONS["kvkeep"]) if name == KVKEEP else None
    setup = VllmSetup(
        model=place.model,
        blocks=found.blocks,
        block_size=place.block_size,
        length_max=length_max,
        connector=connector,
        kv_space_gib=place.kv_space_gib,
        environment=DEVELOPING,
    )
    return Served(setup, place.results / "logs", f"load-{name}")


def _pass(up: Served, name: str, case: LoadCase, repeat: int, arrivals: Arrivals) -> LoadPass:
    _reset(up, tier=True)
    spin, before, cpu_s = float(spin_us().value or 0.0), up.metrics(), up.cpu_s()
    began = time.perf_counter()
    prompts = [ask.prompt for ask in case.asks]
    outcomes = asyncio.run(send(up.url, MODEL_NAME, prompts, case.new_tokens, arrivals))
    wall_s, cpu_s = time.perf_counter() - began, up.cpu_s() - cpu_s
    up.check_alive()
    after = up.metrics()
    local, external = _hits(before, after)
    worked = [after.get(name, 0.0) - before.get(name, 0.0) for name in WORKED]
    say(f"{case.name} {name} {repeat}: {wall_s:.1f} s, {arrivals.per_s:.2f} requests a second")
    return LoadPass(case.name, name, repeat, arrivals, outcomes, local, external, cpu_s, wall_s, spin, *worked)


def _hits(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    rise = changes(before, after)
    return rise["vllm:prefix_cache_hits_total"], rise.get("vllm:external_prefix_cache_hits_total", 0.0)


def _reset(up: Served, tier: bool) -> None:
    """Empties vLLM's own cache, and the connector's where `tier` says so; waits until nothing is held any more."""
    began = time.monotonic()
    url = f"{up.url}/reset_prefix_cache?reset_external={'true' if tier else 'false'}"
    while True:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
            if json.load(answer)["success"]:
                return
        if time.monotonic() - began > RESET_S_MAX:
            raise ServerFailed(f"vllm still holds blocks {RESET_S_MAX:.0f} s after its last answer")
        time.sleep(0.1)


def _alone(up: Served, prompt: Sequence[int], new_tokens: int = ALONE_NEW) -> Outcome:
    """One request with nothing beside it.   Raises `ServerFailed` where it is not answered."""
    [one] = asyncio.run(send(up.url, MODEL_NAME, [prompt], [new_tokens], Arrivals((0.0,), "alone")))
    if one.failure:
        raise ServerFailed(f"a request without load failed: {one.failure}")
    return one


def _warm_up(up: Served) -> None:
    """A cold prompt and a hit; the first answer takes up to 25 s."""
    prompt = random_prompt(ALONE_TOKENS, ALONE_SEED)
    for length in (ALONE_TOKENS // 2, ALONE_TOKENS):
        _alone(up, prompt[:length])


def _capacity_per_s(up: Served, number: int) -> float:
    """Measured right before a case, since the machine changes its speed by the minute."""
    seeds = (ALONE_SEED + 1000 + ALONE_PROMPTS * number + at for at in range(ALONE_PROMPTS))
    times_s = [_alone(up, random_prompt(ALONE_TOKENS, seed)).served.total_s for seed in seeds]
    return ALONE_TOKENS / median(times_s)


def _probe(ups: dict[str, Served], number: int) -> Probe:
    """The second time the prompt is in vLLM's blocks without a connector, and with it in the tier only."""
    prompt = random_prompt(ALONE_TOKENS, ALONE_SEED + 100 + number)
    first, again = {}, {}
    for name, up in ups.items():
        _reset(up, tier=True)
        first[name] = _alone(up, prompt)
        if name == KVKEEP:
            _reset(up, tier=False)
        before = up.metrics()
        again[name] = _alone(up, prompt)
        _, external = _hits(before, up.metrics())
    return Probe(
        {name: one.token_ids for name, one in first.items()},
        {name: one.token_ids for name, one in again.items()},
        {name: one.cached_tokens or 0 for name, one in again.items()},
        external,
    )
