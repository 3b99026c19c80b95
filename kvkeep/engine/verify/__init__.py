"""The bit gate: cached runs of a real model against uncached ones, KV bytes and logits compared exactly.

Must not know how tokens become forwards. Two modes: strict, against computing from scratch; same schedule, against the
same forwards over pages that were never dropped.
"""

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from kvkeep.benching import median
from kvkeep.errors import BadInput
from kvkeep.report import INTERRUPTED, Metric, Report

if TYPE_CHECKING:
    from rich.console import Console

    from kvkeep.engine.loader import LoadedModel
    from kvkeep.engine.verify.gate import Case, Findings, Judge
    from kvkeep.engine.verify.scenarios import Scenario, Sizes

Mode = Literal["strict", "same-schedule"]

# Compared requests where nobody says how many: the fixed scenarios, about 200, and some drawn at random.
CASES_DEFAULT = 220
COST_PAIRS = 5
SHOWN_MAX = 10


@dataclass(frozen=True)
class VerifyOptions:
    """What the gate runs.

    mode: None is strict on a CPU, same-schedule elsewhere.
    cases: requests to compare, the fixed scenarios first; None is the default number.
    """

    mode: Mode | None = None
    model: str = "smollm2-135m"
    cases: int | None = None
    page_size: int = 128
    device: str = "cpu"
    seed: int = 0


def run(options: VerifyOptions) -> Report:
    """Run the gate, say what was found, and return its report. Raises BadInput for options that cannot be run.

    An interrupt (Ctrl-C) ends the comparing, not the reporting: the report is then not ok and says so.
    """
    from rich.console import Console

    from kvkeep.engine.verify.gate import Findings

    console = Console(highlight=False)
    findings = Findings()
    costs: list[float] = []
    started_s = time.perf_counter()
    interrupted = False
    mode = options.mode or ("strict" if options.device == "cpu" else "same-schedule")
    if mode == "strict" and options.device != "cpu":
        raise BadInput(f"--mode strict: holds on a cpu only, not on {options.device}; use --mode same-schedule")
    try:
        _run(options, mode, console, findings, costs)
    except KeyboardInterrupt:
        interrupted = True
    report = _report(mode, findings, costs, interrupted, time.perf_counter() - started_s)
    for line in _summary(mode, findings, report):
        console.print(line, markup=False, soft_wrap=True)
    return report


def _run(options: VerifyOptions, mode: Mode, console: "Console", findings: "Findings", costs: list[float]) -> None:
    from kvkeep.engine.asking import random_ids
    from kvkeep.engine.loader import load_model
    from kvkeep.engine.verify import gate, scenarios, tiers

    with console.status(f"loading {options.model}") as status:
        loaded = load_model(options.model, device=options.device)
        sizes = scenarios.Sizes.fitting(options.page_size, loaded.positions_max)
        if sizes is None:
            page_max = loaded.positions_max // (scenarios.PAGES_MIN + 1)
            raise BadInput(
                f"--page-size {options.page_size}: pages of {scenarios.PAGE_MIN} to {page_max} positions can be "
                f"verified with {loaded.name}, which has {loaded.positions_max}"
            )
        rng = random.Random(options.seed)
        running = gate.Gate(loaded, options.page_size, mode == "strict", _judge(mode, loaded, sizes), findings)

        def draw(count: int) -> list[int]:
            status.update(f"{findings.scenario}: {len(findings.cases)} compared, {findings.mismatches} differ")
            return random_ids(rng, loaded, count)

        cases_max = options.cases if options.cases is not None else CASES_DEFAULT
        planned = [scenarios.fixed_scenarios(sizes, draw), tiers.host_scenarios(sizes, draw)]
        drawn = scenarios.random_scenarios(sizes, draw, rng)
        if mode == "strict":
            planned += [tiers.suspension_scenarios(sizes, draw), tiers.failing_scenarios(sizes, draw)]
            drawn = chain.from_iterable(zip(drawn, tiers.random_tier_scenarios(sizes, draw, rng), strict=False))
        running.run(_announced(chain(*planned, drawn), console, findings), cases_max)
        if options.device == "cpu":
            status.update("what strict arithmetic costs")
            _measure_cost(loaded, sizes, draw(sizes.pages * sizes.page), costs)


def _announced(planned: Iterable["Scenario"], console: "Console", findings: "Findings") -> Iterator["Scenario"]:
    """The scenarios as they are asked for; the one before has been run by then, and its result is said."""
    for scenario in planned:
        compared, differ, counts = len(findings.cases), findings.mismatches, findings.counts
        yield scenario
        compared, differ = len(findings.cases) - compared, findings.mismatches - differ
        happened = findings.counts - counts
        said = f"{scenario.name}: {compared} compared, {differ} differ"
        console.print(f"{said}; {happened}" if str(happened) else said, markup=False, soft_wrap=True)


def _judge(mode: Mode, loaded: "LoadedModel", sizes: "Sizes") -> "Judge":
    from kvkeep.engine.verify.scenarios import CONCURRENCY
    from kvkeep.engine.verify.schedule import SameForwards
    from kvkeep.engine.verify.strict import FromScratch

    request_pages_max = sizes.pages + 1
    if mode == "strict":
        return FromScratch(loaded, sizes.page, request_pages_max)
    return SameForwards(loaded, sizes.page, request_pages_max, CONCURRENCY)


def _measure_cost(loaded: "LoadedModel", sizes: "Sizes", prompt: list[int], costs: list[float]) -> None:
    """Strict over fast time to first token of one prompt from scratch, a ratio a pair; which comes first alternates."""
    from kvkeep.engine.asking import ask
    from kvkeep.engine.engine import Engine, EngineConfig

    strict, fast = (
        Engine(
            loaded,
            EngineConfig(
                page_size=sizes.page, pool_pages=sizes.pages + 1, arithmetic=arithmetic, reuse=False, store=False
            ),
        )
        for arithmetic in ("strict", "fast")
    )
    for pair in range(COST_PAIRS + 1):
        ttft_ns = {}
        for engine in (strict, fast) if pair % 2 else (fast, strict):
            ttft_ns[engine] = ask(engine, prompt, max_new_tokens=1).ttft_ns
        if pair:  # the first pair warms up
            costs.append(ttft_ns[strict] / ttft_ns[fast])


def _report(mode: Mode, findings: "Findings", costs: list[float], interrupted: bool, wall_s: float) -> Report:
    cases = findings.cases
    held = bool(cases) and not any(case.failed for case in cases) and not findings.untested and not interrupted
    prompt_tokens = sum(case.prompt_tokens for case in cases)
    matched_tokens = sum(case.matched_tokens for case in cases)
    metrics = {
        "cases": Metric(len(cases), "count"),
        "mismatches": Metric(findings.mismatches, "count"),
        "strict": Metric(int(mode == "strict" and held), "bool"),
        "strict_cost_ratio": Metric(median(costs) if costs else None, "ratio", samples=len(costs)),
        "wrong_matches": Metric(findings.complaints, "count"),
        "untested": Metric(len(findings.untested), "count"),
        "matched_share": Metric(matched_tokens / prompt_tokens if cases else None, "share"),
        "wall_s": Metric(wall_s, "s"),
    }
    metrics |= {name: Metric(value, "count") for name, value in findings.counts.items()}
    metrics |= {f"cases_{_slug(name)}": Metric(count, "count") for name, count in findings.cases_of().items()}
    if interrupted:
        metrics[INTERRUPTED] = Metric(1, "bool")
    return Report("verify", held, metrics, [case.to_row() for case in cases])


def _summary(mode: Mode, findings: "Findings", report: Report) -> list[str]:
    value = {name: metric.value for name, metric in report.metrics.items()}
    lines = []
    if INTERRUPTED in value:
        lines.append("interrupted: this is what was compared so far")
    failed = [case for case in findings.cases if case.failed]
    lines += [_complain(case) for case in failed[:SHOWN_MAX]]
    if len(failed) > SHOWN_MAX:
        lines.append(f"... and {len(failed) - SHOWN_MAX} more")
    lines += [f"not tested: {what}" for what in findings.untested]
    against = "computing from scratch" if mode == "strict" else "the same forwards over pages never dropped"
    lines.append(f"{mode}: {value['cases']} requests compared with {against}, {value['mismatches']} differ")
    if findings.cases:
        on_the_way = f"; on the way: {findings.counts}" if f"{findings.counts}" else ""
        lines.append(f"{value['matched_share']:.0%} of their prompt tokens came from the cache{on_the_way}")
    if value["strict_cost_ratio"] is not None:
        lines.append(f"strict arithmetic costs {value['strict_cost_ratio']:.2f} x the time of the fastest")
    return lines


def _slug(name: str) -> str:
    """A scenario's name as part of a metric's; those drawn at random are one."""
    return "_".join("".join(letter if letter.isalpha() else " " for letter in name).split())


def _complain(case: "Case") -> str:
    return f"{case.scenario}, request {case.request}: {case.difference or case.complaint}"
