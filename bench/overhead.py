"""kvkeep bench overhead: what a cache costs where nothing is ever found: random prompts, paired, beside an A/A.

Must not know how an engine runs.

    kvkeep bench overhead [--smoke] [--model NAME] [--rounds N] [--seed N] [--json FILE]

Each round asks the same random prompt of four engines, in an order that turns round from round to round: two without a
cache, one that keeps pages, one with a tier in host memory as well.  Their pools hold one request, so each that ends
pushes out the one before.  The report is ok when the cache costs 1 % at most; README.md beside this file says more.
"""

import argparse
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from bench._measure import ENGINE, case_parser, lacking, quiet_gc
from kvkeep.benching import median, p90, p99, spin_us
from kvkeep.benching.record import work_checksum
from kvkeep.benching.samples import summary
from kvkeep.report import JsonValue, Metric, Report

if TYPE_CHECKING:
    from kvkeep.cache import TieredCache
    from kvkeep.engine.engine import Engine
    from kvkeep.engine.loader import LoadedModel

Row = dict[str, JsonValue]

SHARE_MAX = 0.01
#: Of a forward: threads that wait for one another take longer whenever another program runs, and copies need a core.
THREADS = 1
#: Between two looks at copies that are still running.
NAP_S = 1e-4
OFF, AGAIN, GPU, BOTH = "off", "off_again", "gpu", "both"
WHAT = {
    OFF: "nothing matched, nothing kept",
    AGAIN: "the same once more: what equal engines differ by",
    GPU: "pages kept, and matched if any did",
    BOTH: "the same above a tier in host memory, into which everything is copied",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """prompt_pages: full pages of a prompt.   new_tokens: that are generated.   requests: of each engine in a round.

    host_requests: whose pages fit into the tier below.
    """

    model: str
    page_size: int
    prompt_pages: int
    new_tokens: int
    rounds: int
    requests: int
    host_requests: int = 8


FULL = Sizes("smollm2-135m", 128, 1, 2, rounds=72, requests=1)
SMOKE = Sizes("stories260k", 16, 8, 4, rounds=8, requests=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of a round: seconds by the wall and of all threads of this process, and the tokens."""

    wall_s: float
    cpu_s: float
    output_ids: tuple[int, ...]


def missing() -> str | None:
    """What is not installed here."""
    return lacking(ENGINE, "engine")


def run(arguments: list[str]) -> Report:
    """Measure everything, print the table, return the report."""
    from kvkeep.engine.loader import load_model

    options = _parse(arguments)
    sizes = SMOKE if options.smoke else FULL
    rounds = options.rounds or sizes.rounds
    loaded = load_model(options.model or sizes.model)
    engines = _engines(loaded, sizes)
    spin = spin_us()
    found = measure(engines, _prompts(loaded, sizes, options.seed), sizes, rounds)
    own = own_share(engines[GPU], _prompts(loaded, sizes, options.seed + 1), sizes, max(4, rounds // 4))
    for engine in engines.values():
        engine.close()
    metrics = metrics_of(found) | {"own_share": own, "spin_us": spin}
    rows = [*_rows(found, metrics, smoke=options.smoke)]
    for row in rows:
        print(_line(row))
    missed = [str(row["metric"]) for row in rows if row.get("reached") is False]
    length = sizes.prompt_pages * sizes.page_size + 1
    print(f"{rounds} rounds of prompts of {length} tokens; limits missed: {', '.join(missed) or 'none'}")
    work = work_checksum("overhead", sizes.prompt_pages, rounds, [list(one.output_ids) for one in found[OFF]])
    return Report("bench overhead", not missed, metrics, rows, work)


def _engines(loaded: "LoadedModel", sizes: Sizes) -> "dict[str, Engine]":
    from bench._serving import Setup, make_engine
    from kvkeep.engine.asking import pages_of

    pages = pages_of(sizes.prompt_pages * sizes.page_size + 1 + sizes.new_tokens, sizes.page_size)
    setups = (
        Setup(OFF, pages, keep=False, threads=THREADS),
        Setup(AGAIN, pages, keep=False, threads=THREADS),
        Setup(GPU, pages, threads=THREADS),
        Setup(BOTH, pages, sizes.host_requests * pages, threads=THREADS),
    )
    return {setup.name: make_engine(loaded, setup, sizes.page_size) for setup in setups}


def _prompts(loaded: "LoadedModel", sizes: Sizes, seed: int) -> Iterator[list[int]]:
    """Random ids without end."""
    from kvkeep.engine.asking import random_ids

    rng = random.Random(seed)
    while True:
        yield random_ids(rng, loaded, sizes.prompt_pages * sizes.page_size + 1)


def measure(
    engines: "dict[str, Engine]", prompts: Iterator[list[int]], sizes: Sizes, rounds: int
) -> dict[str, list[Asked]]:
    """By engine, what each round took; a round before them does not count."""
    names = list(engines)
    found: dict[str, list[Asked]] = {name: [] for name in names}
    with quiet_gc():
        for number in range(rounds + 1):
            chosen = [next(prompts) for _ in range(sizes.requests)]
            shift = number // 2 % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 else reversed(order):
                asked = _ask(engines[name], chosen, sizes.new_tokens)
                if number:
                    found[name].append(asked)
            gc.collect(0)
    return found


def _ask(engine: "Engine", prompts: Sequence[Sequence[int]], new_tokens: int) -> Asked:
    """One after the other; the copies that they caused are part of it."""
    from kvkeep.engine.asking import ask

    output_ids: list[int] = []
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for prompt in prompts:
        answer = ask(engine, prompt, new_tokens)
        if answer.matched_tokens:
            raise AssertionError("ids drawn at random were found in the cache")
        output_ids += answer.output_ids
    transfers = engine.cache.transfers
    while transfers is not None and transfers.busy:
        engine.cache.poll()
        time.sleep(NAP_S)
    return Asked(time.perf_counter() - wall_s, time.process_time() - cpu_s, tuple(output_ids))


class Stopwatch:
    """A cache whose public calls are timed."""

    def __init__(self, cache: "TieredCache") -> None:
        self._cache = cache
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if not callable(found):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - began

        return timed


def own_share(engine: "Engine", prompts: Iterator[list[int]], sizes: Sizes, rounds: int) -> Metric:
    """The time inside calls of the cache, over that of the requests: what a difference of two runs cannot resolve."""
    cache, watch = engine.cache, Stopwatch(engine.cache)
    shares = []
    for _ in range(rounds):
        chosen = [next(prompts) for _ in range(sizes.requests)]
        engine.cache, watch.spent_s = cast("TieredCache", watch), 0.0
        asked = _ask(engine, chosen, sizes.new_tokens)
        engine.cache = cache
        shares.append(watch.spent_s / asked.wall_s)
    return summary(shares, "of the time", digits=6, better="lower")


def metrics_of(found: dict[str, list[Asked]]) -> dict[str, Metric]:
    """What each engine takes more than the two without a cache, whose geometric mean it is held against."""

    def beyond(name: str, seconds: Callable[[Asked], float]) -> Metric:
        plain = [math.sqrt(seconds(one) * seconds(other)) for one, other in zip(found[OFF], found[AGAIN], strict=True)]
        shares = [seconds(one) / base - 1 for one, base in zip(found[name], plain, strict=True)]
        return summary(shares, "of the time", digits=5, better="lower")

    def differ(seconds: Callable[[Asked], float]) -> Metric:
        shares = [seconds(b) / seconds(a) - 1 for a, b in zip(found[OFF], found[AGAIN], strict=True)]
        return summary(shares, "of the time", digits=5)

    out = {"overhead_share": beyond(GPU, _wall), "overhead_both_share": beyond(BOTH, _wall), "aa_share": differ(_wall)}
    out |= {"overhead_cpu_share": beyond(GPU, _cpu), "overhead_both_cpu_share": beyond(BOTH, _cpu)}
    out["aa_cpu_share"] = differ(_cpu)
    same = all(len({one.output_ids for one in asked}) == 1 for asked in zip(*found.values(), strict=True))
    return out | {"outputs_identical": Metric(int(same), "bool", better="higher")}


def _wall(asked: Asked) -> float:
    return asked.wall_s


def _cpu(asked: Asked) -> float:
    return asked.cpu_s


def _rows(found: dict[str, list[Asked]], metrics: dict[str, Metric], *, smoke: bool) -> Iterator[Row]:
    """A row for each engine and each share; a smoke run is judged by its outputs only."""
    for name, asked in found.items():
        wall_ms, cpu_ms = ([1e3 * seconds(one) for one in asked] for seconds in (_wall, _cpu))
        yield {
            "series": "engine",
            "metric": f"{name}_ms",
            "what": WHAT[name],
            "unit": "ms",
            "median": round(median(wall_ms), 3),
            "p90": round(p90(wall_ms), 3),
            "p99": round(p99(wall_ms), 3),
            "cpu_ms": round(median(cpu_ms), 3),
            "samples": len(asked),
            "rounds_ms": [round(ms, 3) for ms in wall_ms],
        }
    noise = metrics["aa_share"].interval
    for name in ("overhead_share", "overhead_both_share", "aa_share", "own_share"):
        metric = metrics[name]
        row: Row = {"series": "share", "metric": name, "unit": metric.unit, "median": metric.value}
        if metric.interval is not None:
            row["interval"] = list(metric.interval)
        if noise is not None and metric.interval is not None and name.startswith("overhead"):
            row["within_noise"] = metric.interval[0] <= max(0.0, noise[1])
        if name == "overhead_share" and not smoke:
            row |= {"limit": SHARE_MAX, "bound": SHARE_MAX, "reached": (metric.value or 0.0) <= SHARE_MAX}
        yield row
    same = metrics["outputs_identical"].value
    yield {
        "series": "limit",
        "metric": "outputs_identical",
        "median": same,
        "limit": "at least 1",
        "reached": same == 1,
    }


def _line(row: Row) -> str:
    said = {key: row[key] for key in ("median", "interval", "p90", "p99", "cpu_ms", "limit", "reached") if key in row}
    within = {True: "within noise", False: "beyond noise"}.get(bool(row.get("within_noise")), "")
    words = "  ".join(f"{key} {value}" for key, value in said.items())
    return f"{row['metric']!s:<22}{words}  {within if 'within_noise' in row else row.get('what', '')}".rstrip()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("overhead")
    parser.add_argument("--model", metavar="NAME", help="as of `kvkeep demo` (smollm2-135m)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of a prompt for each engine ({FULL.rounds})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    options = parser.parse_args(arguments)
    for name, least in (("rounds", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: it must be {least} or more")
    return options
