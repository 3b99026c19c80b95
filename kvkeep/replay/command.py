"""`kvkeep replay`: reads a trace, replays it, shows what it found.

Must not count anything; must not read the environment.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import BadInput
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import best_possible, known_future, passes, replay
from kvkeep.replay.result import Progress, ReplayResult, Settings
from kvkeep.replay.seat import check_order
from kvkeep.replay.trace import Trace
from kvkeep.replay.workloads.command import serve
from kvkeep.replay.workloads.named import PREFIX
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.stats import Histogram


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line said.

    order: text of an `Order`; None: as recorded where the trace has times that can be compared, else one session after
        the other.   sessions, limit: only the first ones; None: all.
    prompts_only: as if no generated page were stored.   best: the offline bound as well.
    names_folder: where names are kept between replays.
    """

    trace: Path
    settings: Settings
    page_size: int = 128
    order: str | None = None
    sessions: int | None = None
    limit: int | None = None
    prompts_only: bool = False
    best: bool = True
    tokenizer: Path | None = None
    skip_bad: bool = False
    names_folder: Path | None = None


def run(options: ReplayOptions) -> Report:
    """Replays, prints a table and returns the numbers.  Raises `BadInput`."""
    if str(options.trace).startswith(PREFIX):
        return serve(options)
    from rich.console import Console

    begun = time.perf_counter()
    settings = options.settings
    order = None if options.order is None else Order.parse(options.order)
    check_order(settings.eviction)
    for name, tokens in (("--gpu-tokens", settings.gpu_tokens), ("--cpu-tokens", settings.cpu_tokens)):
        if tokens and tokens < options.page_size:
            raise BadInput(f"{name} {tokens}: it must be a page of {options.page_size} tokens or more")
    console, errors = Console(), Console(stderr=True)
    trace = read_trace(options.trace, tokenizer=options.tokenizer, skip_bad=options.skip_bad)
    if order is None:
        order = Order("recorded") if trace.clock == "shared" else Order("rotate", 1)
    arrivals = order.arrivals(trace, options.sessions).limited(options.limit)
    if options.prompts_only:
        arrivals = arrivals.prompts_only()
    pages = Pages(trace, options.page_size, options.names_folder)
    with _bar(errors, trace.name, len(arrivals.requests) * passes(settings)) as progress:
        result = replay(pages, arrivals, settings, progress)
    best = None
    if options.best:
        both = settings.gpu_tokens // options.page_size + settings.cpu_tokens // options.page_size
        capacity = both * options.page_size
        best = best_possible(known_future(pages, arrivals, settings), options.page_size, [capacity])[capacity]
    seconds = time.perf_counter() - begun
    _show(console, trace, order, result, best, seconds)
    return _report(trace, order, result, best, seconds)


@contextmanager
def _bar(console: "object", name: str, total: int) -> Iterator[Progress | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    assert isinstance(console, Console)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"replaying {name}", total=total)
        yield lambda done: bar.update(task, completed=done)


def _show(
    console: "object", trace: Trace, order: Order, result: ReplayResult, best: int | None, seconds: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    settings, counts = result.settings, result.counts
    title = f"{trace.name}, {order}, page {result.page_size}, {settings.eviction}, {settings.accounting} accounting"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    gpu, cpu = counts.matched_pages_gpu, counts.matched_pages_cpu
    table.add_row("requests", f"{counts.requests:,}", "")
    table.add_row("prompt tokens", f"{counts.prompt_tokens:,}", "100.0 %")
    table.add_row(f"hits on the GPU, {settings.gpu_tokens:,} tokens", f"{gpu:,} pages", percent(result.share(gpu)))
    if settings.cpu_tokens:
        table.add_row(f"hits below, {settings.cpu_tokens:,} tokens", f"{cpu:,} pages", percent(result.share(cpu)))
        table.add_row("hits in both", f"{gpu + cpu:,} pages", percent(result.hit_share))
    if best is not None:
        table.add_row("best possible in the same room", f"{best:,} pages", percent(result.share(best)))
    if settings.accounting == "engine":
        table.add_row("stalls: requests that waited for pages", f"{counts.stalls:,}", "")
        table.add_row("preemptions", f"{counts.preemptions:,}", "")
    for cause, missed in sorted((result.misses or {}).items(), key=lambda row: -row[1]):
        table.add_row(f"not found: {cause}", f"{missed:,} pages", percent(result.share(missed)))
    evict = result.evict_us_per_page
    table.add_row("evicted", f"{counts.pages_evicted:,} pages", "" if evict is None else f"{evict:.2f} us a page")
    table.add_row("replayed in", f"{result.seconds:.1f} s", f"{seconds:.1f} s in all")
    console.print(table)
    for line in remarks(trace, result):
        console.print(line, highlight=False, soft_wrap=True)


def remarks(trace: Trace, result: ReplayResult) -> list[str]:
    """What was left out, and how old what was missed was, in words."""
    out = []
    if result.evicted_age is not None and result.evicted_age.count:
        out.append(f"matches stopped at pages evicted {_ages(result.evicted_age)}")
    out += trace.remarks
    if result.counts.unserved:
        out.append(f"{result.counts.unserved} requests are larger than the GPU tier, or empty, and were not served")
    return out


def _ages(ages: Histogram) -> str:
    """How many of how old."""
    bounds = [*(f"{bound:g} s ago or less" for bound in ages.bounds), "longer ago"]
    return ", ".join(f"{bound}: {count}" for bound, count in zip(bounds, ages.counts, strict=True) if count)


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.1f} %"


def _report(trace: Trace, order: Order, result: ReplayResult, best: int | None, seconds: float) -> Report:
    settings, counts = result.settings, result.counts
    evict = result.evict_us_per_page
    metrics = {
        "requests": Metric(counts.requests, "requests"),
        "prompt_tokens": Metric(counts.prompt_tokens, "tokens"),
        "matched_pages_gpu": Metric(counts.matched_pages_gpu, "pages"),
        "matched_pages_cpu": Metric(counts.matched_pages_cpu, "pages"),
        "hit_share": Metric(result.hit_share, "of prompt tokens"),
        "best_hit_share": Metric(None if best is None else result.share(best), "of prompt tokens"),
        "stalls": Metric(counts.stalls, "requests"),
        "preemptions": Metric(counts.preemptions, "preemptions"),
        "unserved": Metric(counts.unserved, "requests"),
        "pages_evicted": Metric(counts.pages_evicted, "pages"),
        "evict_us_per_page": Metric(evict, "us", samples=counts.pages_evicted),
        **{f"missed_pages_{cause.replace(' ', '_')}": Metric(n, "pages") for cause, n in (result.misses or {}).items()},
        "bad_lines": Metric(trace.bad, "lines"),
        "seconds": Metric(seconds, "s"),
        "replay_seconds": Metric(result.seconds, "s"),
    }
    row: dict[str, JsonValue] = {
        "trace": trace.name,
        "order": str(order),
        "page_size": result.page_size,
        "gpu_tokens": settings.gpu_tokens,
        "cpu_tokens": settings.cpu_tokens,
        "accounting": settings.accounting,
        "eviction": settings.eviction,
        "index_at": settings.index_at,
        "concurrency": settings.concurrency,
        "prefill_tokens_per_s": settings.prefill_tokens_per_s,
        "decode_tokens_per_s": settings.decode_tokens_per_s,
        "link_tokens_per_s": settings.link_tokens_per_s,
        "simulated_s": result.simulated_s,
        "note": trace.note,
    }
    return Report("replay", ok=True, metrics=metrics, rows=[row])
