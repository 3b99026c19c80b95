"""Passes: one configuration serves one workload, start to stop, and leaves one JSON file.

Must not know limits.  What is measured is written down raw; `_vllm_judging` makes figures of it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from bench._vllm_client import ask, client
from bench._vllm_models import kv_nbytes_per_token
from bench._vllm_server import ROOT, Served, VllmSetup
from bench._vllm_workloads import Workload, ceiling, random_prompt
from kvkeep.benching import spin_us
from kvkeep.report import commit

GIB = 1 << 30
#: The tier that holds a working set has a tenth more: completions fill blocks too.
TIER_ROOM = 1.1
#: LMCache evicts from 80 % of its memory on: with this much more it, too, holds what a tier of the given size holds.
LMCACHE_ROOM = 1.3
IDLE_S_MAX = 15.0
WARM_UP_TOKENS = 700
WARM_UP_SEED = 77
LMCACHE_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"

CONNECTOR = Path("kvkeep") / "integrations" / "vllm.py"

#: Raise it when a pass measures otherwise: files of older passes are then not taken for new ones.
RECIPE = 1


@dataclass(frozen=True, slots=True)
class Configuration:
    """What serves.

    space: vLLM's KV space as a share of the working set; above 1 for ample space.
    tier: the CPU tier as a share of the working set; 0 for none.
    kind: vllm, kvkeep or lmcache.   eviction, extra: options of kvkeep's connector.
    """

    name: str
    what: str
    space: float
    tier: float = 0.0
    kind: str = "vllm"
    eviction: str = ""
    extra: tuple[tuple[str, Any], ...] = ()


CHECKED = (("check_copies", True),)
QUARTER = 0.25
CONFIGURATIONS = {
    made.name: made
    for made in (
        Configuration("ample", "vLLM, KV space for the whole working set", 1.5),
        Configuration("again", "the same, to see where vLLM's own texts part", 1.5),
        Configuration("quarter", "vLLM, KV space for a quarter of it", QUARTER),
        Configuration("kvkeep", "a quarter, and kvkeep's tier for all of it", QUARTER, TIER_ROOM, "kvkeep", "rhythm"),
        Configuration("lmcache", "a quarter, and LMCache's server for all of it", QUARTER, TIER_ROOM, "lmcache"),
        Configuration(
            "kvkeep-checked", "the same, every loaded byte compared", QUARTER, TIER_ROOM, "kvkeep", "rhythm", CHECKED
        ),
        Configuration("kvkeep-half", "a quarter, and kvkeep's tier for half of it", QUARTER, 0.5, "kvkeep", "rhythm"),
        Configuration("kvkeep-half-lru", "the same, evicted by LRU", QUARTER, 0.5, "kvkeep", "lru"),
    )
}


def lacking(configuration: Configuration) -> str | None:
    """Why a configuration cannot run here, in words; None where it can."""
    if configuration.kind == "lmcache" and not LMCACHE_PYTHON.is_file():
        return "LMCache is not installed: make lmcache-environment"
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    if configuration.kind == "kvkeep" and not any((Path(path) / CONNECTOR).is_file() for path in paths if path):
        return f"there is no {CONNECTOR}"
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where passes run and what they leave.

    results: the folder of their files.   more: words added to vLLM's command.
    """

    model: Path
    results: Path
    block_size: int = 128
    more: tuple[str, ...] = ()
    kv_space_gib: int = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """blocks: of vLLM's KV space, null block included.   tier_gib: 0 for none.   length_max: of a request, tokens."""

    blocks: int
    tier_gib: float
    length_max: int


def sizes(configuration: Configuration, workload: Workload, place: Place) -> Sizes:
    """Of a configuration for a workload; a KV space always holds the longest request."""
    working, least = workload.blocks(place.block_size), workload.blocks_min(place.block_size)
    nbytes = place.block_size * kv_nbytes_per_token(place.model)
    blocks = max(1 + round(configuration.space * working), least)
    return Sizes(blocks, configuration.tier * working * nbytes / GIB, (least - 1) * place.block_size)


def served(configuration: Configuration, size: Sizes, place: Place, name: str) -> Served:
    """The configuration's server, not started."""
    setup = VllmSetup(
        model=place.model,
        blocks=size.blocks,
        block_size=place.block_size,
        length_max=size.length_max,
        more=place.more,
        kv_space_gib=place.kv_space_gib,
        connector=kvkeep_connector(size.tier_gib, configuration) if configuration.kind == "kvkeep" else None,
        python=str(LMCACHE_PYTHON) if configuration.kind == "lmcache" else sys.executable,
    )
    lmcache_gib = LMCACHE_ROOM * size.tier_gib if configuration.kind == "lmcache" else None
    return Served(setup, place.results / "logs", name, lmcache_gib)


def kvkeep_connector(tier_gib: float, configuration: Configuration) -> Mapping[str, Any]:
    """The value of --kv-transfer-config for our connector."""
    extra = {"cpu_tier_gib": round(tier_gib, 4), "eviction": configuration.eviction, **dict(configuration.extra)}
    return {
        "kv_connector": "KvkeepConnector",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def warm_up(server: openai.OpenAI, seed: int = WARM_UP_SEED) -> None:
    """What a server does once: a cold prompt and a hit, neither of any workload.  The first takes up to 25 s."""
    prompt = random_prompt(WARM_UP_TOKENS, seed)
    for length in (WARM_UP_TOKENS // 2, WARM_UP_TOKENS):
        ask(server, prompt[:length], 8)


def run_pass(configuration: Configuration, workload: Workload, place: Place, repeat: int) -> dict[str, Any]:
    """Serves the workload once; returns what its file holds.  Raises `ServerFailed` where a server ends by itself."""
    size = sizes(configuration, workload, place)
    name = f"{workload.name}-{configuration.name}-{repeat}"
    out: dict[str, Any] = key_of(configuration, workload, place) | {
        "repeat": repeat,
        "blocks": size.blocks,
        "tier_gib": round(size.tier_gib, 4),
        "commit": commit(),
        "ceiling": ceiling(workload.asks, place.block_size),
    }
    with served(configuration, size, place, name) as up:
        server = client(up.url)
        warm_up(server)
        out["start_s"], out["spin_us"] = round(up.vllm.started_s, 1), spin_us().value
        idle_nbytes, before = up.pss_nbytes(), up.metrics()
        cpu_s, began = up.cpu_s(), time.monotonic()
        answers = []
        for number, sent in enumerate(workload.asks):
            answers.append(ask(server, sent.prompt, workload.new_tokens))
            _say(f"\r{name}: {number + 1}/{len(workload.asks)}, {time.monotonic() - began:.0f} s")
        out["wall_s"] = round(time.monotonic() - began, 3)
        out["cpu_s"] = round(up.cpu_s() - cpu_s, 3)
        out["answers"] = [answer.to_json() for answer in answers]
        out["metrics"] = changes(before, up.metrics())
        out["idle"] = idle(up)
        up.check_alive()
    out["pss_idle_nbytes"], out["pss_peak_nbytes"] = idle_nbytes, up.memory.peak_nbytes
    out["bad_lines"] = up.bad_lines()
    _say("\n")
    return out


#: Gauges whose name ends as a counter's does.
GAUGES = ("kvkeep_pages_",)


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters rose by, and gauges as they are, of all that vLLM's cache and kvkeep say."""
    out = {}
    for name, value in after.items():
        counts = name.partition("{")[0].endswith(("_total", "_sum", "_count")) and not name.startswith(GAUGES)
        if "kvkeep" in name or name.startswith(("vllm:prefix_", "vllm:external_", "vllm:prompt_tokens", "vllm:kv_")):
            out[name] = value - before.get(name, 0.0) if counts else value
    return out


USAGE = "vllm:kv_cache_usage_perc"


def idle(up: Served) -> dict[str, Any]:
    """What is held when nobody asks: vLLM's usage gauge, and kvkeep's metrics.

    The gauge is written by steps, so what a late completion frees shows only after one more request: one of one token
    is sent where the gauge does not come down by itself.
    """
    metrics = _until_idle(up)
    asked = metrics[USAGE] != 0.0
    if asked:
        ask(client(up.url), random_prompt(4, WARM_UP_SEED), 1)
        metrics = _until_idle(up)
    own = {name: value for name, value in metrics.items() if "kvkeep" in name}
    return {"kv_usage": metrics[USAGE], "asked": asked, "running": metrics.get("vllm:num_requests_running"), "own": own}


def _until_idle(up: Served) -> dict[str, float]:
    began = time.monotonic()
    while True:
        metrics = up.metrics()
        if metrics[USAGE] == 0.0 or time.monotonic() - began > IDLE_S_MAX:
            return metrics
        time.sleep(0.5)


# ---------------------------------------------------------------------- files


def key_of(configuration: Configuration, workload: Workload, place: Place) -> dict[str, Any]:
    """What must be the same for a file of an earlier run to count as this pass."""
    return {
        "recipe": RECIPE,
        "configuration": configuration.name,
        "workload": workload.name,
        "digest": workload.digest(),
        "model": place.model.name,
        "block_size": place.block_size,
        "more": list(place.more),
    }


@dataclass(slots=True)
class Store:
    """Files of passes, one each, written whole."""

    folder: Path
    failures: list[str] = field(default_factory=list)

    def path(self, workload: str, configuration: str, repeat: int) -> Path:
        return self.folder / f"{workload}-{configuration}-{repeat}.json"

    def read(self, path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a pass has left; None where there is no file, or one of another key."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return found if all(found.get(name) == value for name, value in key.items()) else None

    def write(self, path: Path, found: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(scratch, path)

    def made(self, path: Path, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the file holds, or what `make` returns, which is then written."""
        found = self.read(path, key)
        if found is None:
            found = make()
            self.write(path, found)
        return found


def rounds(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Which configuration when: all of them in each repeat, every second time from the last to the first."""
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            yield repeat, name


def _say(text: str) -> None:
    if sys.stderr.isatty() or text == "\n":
        print(text, end="", file=sys.stderr, flush=True)
