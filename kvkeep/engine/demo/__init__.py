"""The main job: interleaved agent sessions on a real model, with kept pages and without, side by side.

Must not know how tokens become forwards; it asks engines and compares what they give.
"""

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep import report as reports
from kvkeep.engine.demo.script import ChatFormat, Conversation, Excerpt, Script
from kvkeep.errors import BadInput
from kvkeep.report import INTERRUPTED, Metric, Report

if TYPE_CHECKING:
    from rich.console import Console

    from kvkeep.engine.demo.measure import Bench, Turn
    from kvkeep.engine.demo.table import Display
    from kvkeep.stats import Histogram


WHAT_RUNS = {
    "kept": "with kept pages",
    "exact": "without, same arithmetic",
    "fastest": "without, fastest arithmetic",
    "ample": "with kept pages, in an ample pool",
}


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs.

    sessions, turns: sessions in rotation (session 1 turn 1, session 2 turn 1, ..., session 1 turn 2, ...).
    pool_pages: pages of `page_size` positions in the pool of the run that keeps them.
    host_pages: pages of its tier in host memory; 0 is none.
    private: sessions share nothing, as those of different tenants; otherwise they share the pages of the system prompt.
    max_new_tokens: tokens the model writes in a turn at most.
    seed: seeds the order of the engines in a turn and the ids of the no-reuse measure.
    """

    sessions: int = 3
    turns: int = 5
    pool_pages: int = 64
    host_pages: int = 0
    private: bool = False
    page_size: int = 128
    max_new_tokens: int = 24
    device: str = "cpu"
    model: str = "smollm2-135m"
    seed: int = 0


@dataclass
class Measured:
    """What has been measured so far; what an interrupted demo still reports."""

    turns: "list[Turn]" = field(default_factory=list)
    no_reuse: list[float] = field(default_factory=list)
    room_wait: "Histogram | None" = None  # None without a tier in host memory
    pool_share: float | None = None
    interrupted: bool = False


def run(options: DemoOptions) -> Report:
    """Run the demo, show it, and return its report. Raises BadInput for options that cannot be run.

    An interrupt (Ctrl-C) ends the measuring, not the reporting: the report is then not ok and says so.
    """
    from rich.console import Console

    console = Console(highlight=False)
    started_s = time.perf_counter()
    measured = Measured()
    try:
        _run(options, console, measured)
    except KeyboardInterrupt:
        measured.interrupted = True
    report = _report(measured, time.perf_counter() - started_s)
    for line in _summary(report, measured):
        console.print(line, markup=False, soft_wrap=True)
    return report


def _run(options: DemoOptions, console: "Console", measured: Measured) -> None:
    from kvkeep.engine.demo.measure import NO_REUSE_PAIRS, Bench
    from kvkeep.engine.demo.table import Display
    from kvkeep.engine.loader import load_model

    with console.status(f"loading {options.model}"):
        loaded = load_model(options.model, device=options.device)
        if loaded.tokenizer is None:
            raise BadInput(f"--model {options.model}: has no tokenizer beside it; the demo needs one to speak")
        script = Script.write(
            Excerpt.bundled(),
            ChatFormat.of(loaded.tokenizer.encode, loaded.eos_ids),
            sessions=options.sessions,
            turns=options.turns,
            max_new_tokens=options.max_new_tokens,
            positions=loaded.positions_max,
        )
        _check_pool(options, script.tokens_max, loaded.layout(options.page_size).page_nbytes)
        bench = Bench(
            loaded, options.page_size, options.pool_pages, options.host_pages, options.sessions, script.tokens_max
        )
    if script.cut:
        console.print(f"the texts are cut to fit the {loaded.positions_max} positions of {loaded.name}")
    working_set = _working_set_pages(script, options)
    measured.pool_share = options.pool_pages / working_set
    title = (
        f"{loaded.name} on {options.device}: ms to the first token with kept pages and without; a pool of "
        f"{options.pool_pages} pages, {measured.pool_share:.0%} of the {working_set} that the sessions grow to, and "
        f"{options.host_pages or 'none'} in host memory"
    )
    with Display(title, console) as display:
        rng = random.Random(options.seed)
        display.now("warming up")
        bench.warm_up(rng)
        for number in range(1, options.turns + 1):
            for conversation in script.conversations:
                turn = _turn(options, bench, display, conversation, number, len(measured.turns))
                measured.turns.append(turn)
                measured.room_wait = bench.room_wait if options.host_pages else None
                display.add(turn)
        display.now(f"a request with nothing to reuse, with and without the cache, {NO_REUSE_PAIRS} pairs")
        for ratio in bench.no_reuse_ratios(rng, NO_REUSE_PAIRS):
            measured.no_reuse.append(ratio)
    bench.close()


def _check_pool(options: DemoOptions, tokens_max: int, page_nbytes: int) -> None:
    """Before the work, rather than at the turn that no longer fits."""
    pages = -(-tokens_max // options.page_size)
    if options.pool_pages < pages:
        raise BadInput(
            f"--pool-pages {options.pool_pages}: a session grows to {tokens_max} tokens, {pages} pages of "
            f"{options.page_size}; give at least {pages}"
        )
    memory_nbytes = reports.memory_nbytes()
    pool_nbytes = options.pool_pages * page_nbytes
    if options.device == "cpu" and memory_nbytes is not None and pool_nbytes > memory_nbytes:
        raise BadInput(
            f"--pool-pages {options.pool_pages}: {pool_nbytes / 2**30:.1f} GiB, more than this machine's memory of "
            f"{memory_nbytes / 2**30:.1f} GiB; give at most {memory_nbytes // page_nbytes}"
        )


def _working_set_pages(script: Script, options: DemoOptions) -> int:
    """Pages that would keep all sessions as long as they can grow."""
    shared = 0 if options.private else script.shared_tokens // options.page_size
    return shared + sum(-(-tokens // options.page_size) - shared for tokens in script.tokens_of)


def _turn(
    options: DemoOptions,
    bench: "Bench",
    display: "Display",
    conversation: Conversation,
    number: int,
    measured_before: int,
) -> "Turn":
    from kvkeep.engine.demo.measure import Turn

    prompt = conversation.next_prompt()
    first = measured_before % len(bench.names)
    answers = {}
    for name in bench.names[first:] + bench.names[:first]:
        display.now(f"{conversation.session}, turn {number}: {WHAT_RUNS[name]}")
        answers[name] = bench.ask(
            name,
            prompt,
            options.max_new_tokens,
            conversation.chat.stop_ids,
            salt=conversation.session.encode() if options.private else b"",
        )
    kept, exact, fastest, ample = answers["kept"], answers["exact"], answers["fastest"], answers.get("ample")
    conversation.answered(kept.output_ids)
    return Turn(
        session=conversation.session,
        turn=number,
        prompt_tokens=len(prompt),
        matched_tokens=kept.matched_tokens,
        output_tokens=len(kept.output_ids),
        identical=kept.output_ids == exact.output_ids and (ample is None or ample.output_ids == exact.output_ids),
        ttft_kept_ms=kept.ttft_ns / 1e6,
        ttft_exact_ms=exact.ttft_ns / 1e6,
        ttft_fastest_ms=fastest.ttft_ns / 1e6,
        host_tokens=kept.host_tokens,
        matched_ample_tokens=None if ample is None else ample.matched_tokens,
        ttft_ample_ms=None if ample is None else ample.ttft_ns / 1e6,
    )


def _report(measured: Measured, wall_s: float) -> Report:
    from kvkeep.engine.demo.measure import host_metrics_of, metrics_of

    metrics = metrics_of(measured.turns, measured.no_reuse) | {"wall_s": Metric(wall_s, "s")}
    if measured.pool_share is not None:
        metrics["pool_share"] = Metric(measured.pool_share, "share")
    if measured.room_wait is not None:
        metrics |= host_metrics_of(measured.turns, measured.room_wait)
    if measured.interrupted:
        metrics[INTERRUPTED] = Metric(1, "bool")
    ok = metrics["outputs_identical"].value == 1 and not measured.interrupted
    return Report("demo", ok, metrics, [turn.to_row() for turn in measured.turns])


def _summary(report: Report, measured: Measured) -> list[str]:
    value = {name: metric.value for name, metric in report.metrics.items()}
    lines = []
    if measured.interrupted:
        lines.append("interrupted: this is what was measured so far")
    if measured.turns:
        prompt_tokens = sum(turn.prompt_tokens for turn in measured.turns)
        lines += [
            f"matched share: {value['matched_share']:.1%} of {prompt_tokens:,} prompt tokens",
            f"time saved: {value['time_saved_s']:.1f} s of {value['time_without_s']:.1f} s to first tokens",
            f"strict arithmetic costs: {value['strict_cost_ratio']:.2f} x the fastest (both keep nothing)",
        ]
    if value["ttft_ratio_median"] is not None:
        lines.append(
            f"TTFT from 1,500 prompt tokens up: {value['ttft_ratio_median']:.1f} x lower with kept pages "
            f"(median of {report.metrics['ttft_ratio_median'].samples} turns, against the faster baseline)"
        )
    if value.get("ttft_ratio_cpu_hit") is not None:
        lines.append(
            f"hits in host memory, from 1,500 prompt tokens up: {value['ttft_ratio_cpu_hit']:.1f} x lower, "
            f"{value['ttft_cpu_over_gpu_hit']:.2f} x a hit on the GPU "
            f"({report.metrics['ttft_ratio_cpu_hit'].samples} turns); {value['stalls']} requests waited for room, "
            f"{value['stall_s']:.3f} s in all"
        )
    if measured.no_reuse:
        lines.append(
            f"a request with nothing to reuse: {value['no_reuse_overhead']:+.1%} with the cache on "
            f"(median of {len(measured.no_reuse)} pairs)"
        )
    if measured.turns:
        lines.append(f"outputs identical: {'yes' if value['outputs_identical'] else 'NO'}")
    return lines
