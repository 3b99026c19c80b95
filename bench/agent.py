"""kvkeep bench agent: agent sessions served by the embedded engine under an open-loop load: cache off, GPU tier, both.

Must not know how a run is made or what is said of it.

    kvkeep bench agent [--smoke] [--model NAME] [--traces DIR] [--slo-ttft S] [--slo-itl S] [--seed N] [--json FILE]

The GPU pool holds a quarter of what the sessions grow to.  The report is ok when every limit is reached; README.md
beside this file says what each figure means.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench._agent_figures import (
    BOTH,
    GPU,
    OFF,
    Loaded,
    Row,
    alone_metrics,
    alone_rows,
    lines,
    load_metrics,
    look_rows,
    request_rows,
    run_row,
    ttft_ratio,
)
from bench._load import Arrivals, Slo, poisson, recorded
from bench._measure import ENGINE, SPIN_QUIET_US, case_parser, lacking, traces_folder
from bench._sessions import Held, Recorded, has_swe, hold, random_conversations, real_conversations, recorded_swe
from bench._telemetry import with_telemetry
from bench._vllm_workloads import Workload
from kvkeep.benching import spin_us
from kvkeep.benching.record import work_checksum
from kvkeep.report import Metric, Report
from kvkeep.telemetry.energy import joules_per_1k_prompt_tokens
from kvkeep.telemetry.machine import MachineTelemetry
from kvkeep.telemetry.sampling import Settings

if TYPE_CHECKING:
    from bench._serving import Run
    from kvkeep.engine.loader import LoadedModel

TTFT_RATIO_MIN, GOODPUT_RATIO_MIN = 4.0, 2.0
#: Every so manieth request is also asked alone, without a cache.
ALONE_EVERY = 3
#: Of each counter of the machine that the result keeps: one in two seconds or so.
SAMPLES_MAX = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is served.

    sessions, turns: of tau-bench retail, in rotation.   messages: of users and tools between two answers.
    loads: rates that are offered, over what the engine without a cache can serve; at the first it still keeps up.
    swe_*: of mini_swe, see `recorded_swe`.   slo: on a quiet machine of the kind that the limits were set on.
    """

    model: str
    page_size: int
    sessions: int
    turns: int
    messages: int
    new_tokens: int
    loads: tuple[float, ...]
    swe_sessions: int
    swe_turns: int
    swe_prompt_max: int
    swe_thin: int
    swe_load: float
    slo: Slo


FULL = Sizes("smollm2-135m", 128, 6, 4, 1, 8, (0.8, 2.0), 6, 2, 3000, 1, 1.5, Slo(ttft_s=3.0, itl_s=0.5))
SMOKE = Sizes("stories260k", 16, 6, 3, 1, 4, (0.8, 2.0), 3, 3, 480, 16, 1.5, Slo(ttft_s=0.05, itl_s=0.02))
#: Of the random sessions of a smoke run: tokens that they begin with, and tokens that a turn brings.
SMOKE_BEGIN, SMOKE_GROWTH = 96, 48


def missing() -> str | None:
    """What is not installed here."""
    return lacking(ENGINE, "engine")


def run(arguments: list[str]) -> Report:
    """Measure everything, print the table, return the report."""
    from kvkeep.engine.loader import load_model

    options = _parse(arguments)
    sizes = SMOKE if options.smoke else FULL
    scale = max(1.0, float(spin_us().value or 0) / SPIN_QUIET_US)
    slo = Slo(options.slo_ttft or sizes.slo.ttft_s * scale, options.slo_itl or sizes.slo.itl_s * scale)
    print(f"SLO: {slo}", flush=True)
    loaded = load_model(options.model or sizes.model, device=options.device)
    with MachineTelemetry(settings=Settings(samples_max=SAMPLES_MAX)) as telemetry:
        report = _measured(_Bench(loaded, sizes, options.seed, telemetry), options, slo)
    return with_telemetry(report, telemetry)


def _measured(bench: "_Bench", options: argparse.Namespace, slo: Slo) -> Report:
    sizes = bench.sizes
    held = bench.hold()
    per_s = bench.alone(held)
    every = [
        bench.load(held, poisson(len(held.workload.asks), load * per_s, options.seed), load) for load in sizes.loads
    ]
    bench.check(held.outputs, [run for one in every for run in one.runs.values()])
    rows, metrics = bench.rows, load_metrics(every[0], every, slo) | bench.metrics
    if has_swe(options.traces):
        swe, load = bench.swe(options.traces), sizes.swe_load
        one = bench.load(swe, recorded(swe.times_s, load * per_s), load, (OFF, BOTH))
        bench.check(one.runs[OFF].outputs, [one.runs[BOTH]])
        metrics["swe_ttft_ratio"] = ttft_ratio(one)
        every.append(one)
    else:
        print("mini_swe_500 is not beside this checkout: recorded arrivals are left out (--traces DIR)")
    rows += [run_row(one, run, slo) for one in every for run in one.runs.values()]
    rows += [row for one in every for run in one.runs.values() for row in bench.detail(one, run)]
    metrics["outputs_identical"] = Metric(int(bench.identical), "bool", better="higher")
    metrics["pool_share"] = Metric(round(bench.pool_share(held), 3), "of the working set")
    judged = list(_judge(metrics, options.smoke))
    for line in [*lines(rows), *map(_line, judged)]:
        print(line)
    work = work_checksum([one.workload for one in every], bench.digests, held.outputs)
    return Report("bench agent", all(row.get("reached", True) for row in judged), metrics, judged + rows, work)


class _Bench:
    """The model, the configurations, and what has been found so far."""

    def __init__(self, loaded: "LoadedModel", sizes: Sizes, seed: int, telemetry: MachineTelemetry) -> None:
        self.loaded, self.sizes, self.seed, self.telemetry = loaded, sizes, seed, telemetry
        self.metrics: dict[str, Metric] = {}
        self.rows: list[Row] = []
        self.digests: list[str] = []
        self.turns: dict[str, list[tuple[int, int]]] = {}
        self.identical = True
        self._strict = loaded.device == "cpu"

    def hold(self) -> Held:
        """The sessions, held in a pool with room for all of them."""
        from bench._serving import Setup, warmed
        from kvkeep.engine.asking import pages_of

        sizes = self.sizes
        if self.loaded.tokenizer is not None and sizes is FULL:
            conversations, longest = real_conversations(
                *(self.loaded, sizes.sessions, sizes.turns, sizes.messages, sizes.new_tokens)
            )
        else:
            conversations = random_conversations(self.loaded, sizes.sessions, SMOKE_BEGIN, SMOKE_GROWTH, self.seed)
            longest = SMOKE_BEGIN + sizes.turns * (SMOKE_GROWTH + sizes.new_tokens)
        pages = sizes.sessions * pages_of(longest, sizes.page_size)
        engine = warmed(self.loaded, Setup("ample", pages), sizes.page_size)
        # Sessions of different tenants: each can push the whole of another out.
        salts = [f"session {number}".encode() for number in range(sizes.sessions)]
        held = hold("tau", engine, conversations, sizes.turns, sizes.new_tokens, salts)
        engine.close()
        self._took(held.workload)
        return held

    def alone(self, held: Held) -> float:
        """Single requests: what misses and hits cost.  Returns how many a second can be served without a cache."""
        from bench._serving import answer_alone, setups_of, warmed

        workload, setups = held.workload, setups_of(held, self.sizes.page_size)
        chosen = workload.asks[::ALONE_EVERY]
        answers = {}
        for name, asks in ((OFF, chosen), (BOTH, workload.asks)):
            engine = warmed(self.loaded, setups[name], self.sizes.page_size)
            answers[name] = answer_alone(engine, asks, workload.new_tokens, held.salts)
            engine.close()
        self._same([a.output_ids for a in answers[OFF]], held.outputs[::ALONE_EVERY])
        self._same([a.output_ids for a in answers[BOTH]], held.outputs)
        hits = [answer for answer in held.alone if answer.matched_tokens]
        from_host = [answer for answer in answers[BOTH] if answer.host_tokens]
        self.metrics |= alone_metrics(answers[OFF], hits, from_host)
        for name, asks, found in (
            (OFF, chosen, answers[OFF]),
            ("ample", workload.asks, held.alone),
            (BOTH, workload.asks, answers[BOTH]),
        ):
            asked = [(a.session, a.turn, len(a.prompt), answer) for a, answer in zip(asks, found, strict=True)]
            self.rows += alone_rows(name, asked)
        per_s = 1e9 * len(chosen) / sum(answer.total_ns for answer in answers[OFF])
        self.metrics["capacity_off_per_s"] = Metric(round(per_s, 4), "requests/s", samples=len(chosen))
        print(
            f"{workload.name}: {len(workload.asks)} requests, {workload.prompt_tokens:,} prompt tokens; a pool of "
            f"{setups[OFF].pool_pages} pages, {self.pool_share(held):.0%} of the working set; without a cache "
            f"{per_s:.3g} requests a second, one at a time",
            flush=True,
        )
        return per_s

    def pool_share(self, held: Held) -> float:
        """The pool that it came to, of the working set: the longest request has to fit."""
        from bench._serving import setups_of

        return setups_of(held, self.sizes.page_size)[OFF].pool_pages / held.working_set(self.sizes.page_size)

    def load(self, held: Held, arrivals: Arrivals, load: float, names: Sequence[str] = (OFF, GPU, BOTH)) -> Loaded:
        """One workload at one rate in each of the configurations, one after the other."""
        from bench._serving import serve, setups_of, warmed

        workload, runs, joules, setups = held.workload, {}, {}, setups_of(held, self.sizes.page_size)
        for name in names:
            print(f"{workload.name}, {arrivals.what}: {name}", flush=True)
            engine = warmed(self.loaded, setups[name], self.sizes.page_size)
            before = self.telemetry.energy()
            runs[name] = serve(engine, setups[name], workload, arrivals, held.salts)
            joules[name] = joules_per_1k_prompt_tokens(before, self.telemetry.energy(), workload.prompt_tokens)
            engine.close()
        return Loaded(workload.name, load, self.pool_share(held), runs, joules)

    def swe(self, traces: Path) -> Recorded:
        """Sessions of mini_swe as they were recorded."""
        sizes = self.sizes
        found = recorded_swe(
            *(traces, sizes.swe_sessions, sizes.swe_turns, sizes.swe_prompt_max, sizes.new_tokens),
            vocabulary=self.loaded.vocabulary,
            thin=sizes.swe_thin,
        )
        self._took(found.workload)
        return found

    def check(self, expected: Sequence[Sequence[int]], runs: "Sequence[Run]") -> None:
        """Every configuration answers the same."""
        for run in runs:
            self._same(run.outputs, expected)

    def detail(self, loaded: Loaded, run: "Run") -> Iterator[Row]:
        """A run request by request, and the cache's numbers meanwhile."""
        yield from request_rows(loaded, run, self.turns[loaded.workload])
        yield from look_rows(loaded, run)

    def _took(self, workload: Workload) -> None:
        self.digests.append(workload.digest())
        self.turns[workload.name] = [(one.session, one.turn) for one in workload.asks]

    def _same(self, found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        if self._strict:
            self.identical = self.identical and list(map(tuple, found)) == list(map(tuple, expected))


def _judge(metrics: dict[str, Metric], smoke: bool) -> Iterator[Row]:
    """A smoke run is judged by its outputs only."""
    limits = {"ttft_ratio": TTFT_RATIO_MIN, "goodput_ratio": GOODPUT_RATIO_MIN, "outputs_identical": 1.0}
    for name, least in limits.items():
        if not smoke or name == "outputs_identical":
            value = metrics[name].value
            reached = value is not None and value >= least
            yield {
                "metric": name,
                "series": "limit",
                "median": value,
                "limit": f"at least {least:g}",
                "reached": reached,
            }


def _line(row: Row) -> str:
    return f"{row['metric']} {row['median']}, {row['limit']}: {'reached' if row['reached'] else 'NOT REACHED'}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("agent")
    parser.add_argument("--model", metavar="NAME", help="as of `kvkeep demo` (smollm2-135m)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (cpu)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the recorded traces (../shared/traces)")
    parser.add_argument(
        "--slo-ttft", type=float, metavar="S", help="seconds to the first token (3, on a quiet machine)"
    )
    parser.add_argument("--slo-itl", type=float, metavar="S", help="seconds between tokens, on average (0.5, the same)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals (0)")
    options = parser.parse_args(arguments)
    for name in ("slo_ttft", "slo_itl"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: it must be a number above 0")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: it must be 0 or more")
    options.traces = traces_folder(parser, options.traces)
    return options
