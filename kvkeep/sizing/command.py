"""`kvkeep size`: reads a trace, finds its hit curves, says how large the tiers should be.

Must not count anything; must not read the environment.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import BadInput
from kvkeep.replay.command import percent
from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.seat import check_order
from kvkeep.replay.trace import Trace, prompt_tokens
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.sizing.model import token_nbytes
from kvkeep.sizing.plot import check_plot, plot
from kvkeep.sizing.sizing import BEST, Sizing, marks, size_tiers

GIB = 2**30


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """What the command line said.

    gpu, cpu: what the user has: tokens, or with `model` GiB.   evictions: orders; the advice is for the last.
    model: a config.json.   kv_dtype: of the pool, None: the model's.
    order, sessions, limit: as of `kvkeep replay`.
    """

    trace: Path
    gpu: float
    cpu: float = 0.0
    model: Path | None = None
    kv_dtype: str | None = None
    page_size: int = 128
    evictions: tuple[str, ...] = ("lru",)
    order: str | None = None
    sessions: int | None = None
    limit: int | None = None
    best: bool = True
    plot: Path | None = None
    tokenizer: Path | None = None
    skip_bad: bool = False
    names_folder: Path | None = None


def run(options: SizeOptions) -> Report:
    """Sizes, prints a table and a sentence, and returns the numbers.  Raises `BadInput`."""
    from rich.console import Console

    begun = time.perf_counter()
    for name in options.evictions:
        check_order(name)
    if options.plot is not None:
        check_plot(options.plot)
    nbytes = None if options.model is None else token_nbytes(options.model, options.kv_dtype)
    gpu_tokens, cpu_tokens = _tokens("--gpu", options.gpu, nbytes), _tokens("--cpu", options.cpu, nbytes)
    if gpu_tokens < options.page_size:
        raise BadInput(f"--gpu {options.gpu:g}: it must be a page of {options.page_size} tokens or more")
    trace = read_trace(options.trace, tokenizer=options.tokenizer, skip_bad=options.skip_bad)
    order = Order("recorded") if trace.clock == "shared" else Order("rotate", 8)
    if options.order is not None:
        order = Order.parse(options.order)
    arrivals = order.arrivals(trace, options.sessions).limited(options.limit)
    pages = Pages(trace, options.page_size, options.names_folder)
    sizing = size_tiers(
        pages,
        arrivals,
        options.evictions,
        gpu_tokens=gpu_tokens,
        cpu_tokens=cpu_tokens,
        best=options.best,
    )
    seconds = time.perf_counter() - begun
    show = Amounts(nbytes)
    console = Console()
    console.print(_table(trace, order, sizing, show))
    for line in [*advice(sizing, show), *trace.remarks]:
        console.print(line, highlight=False, soft_wrap=True)
    if options.plot is not None:
        plot(sizing, f"{trace.name}, {order}", show.of, options.plot)
        console.print(f"picture: {options.plot}", highlight=False, soft_wrap=True)
    return _report(trace, order, sizing, prompt_tokens(arrivals.requests), nbytes, seconds)


def _tokens(name: str, size: float, nbytes: int | None) -> int:
    if nbytes is not None:
        return int(size * GIB) // nbytes
    if size != int(size):
        raise BadInput(f"{name} {size:g}: without --model it is a number of tokens; with --model it is GiB")
    return int(size)


class Amounts:
    """How amounts of KV are written.   nbytes: of a token; None: in tokens."""

    def __init__(self, nbytes: int | None) -> None:
        self._nbytes = nbytes

    def of(self, tokens: int) -> str:
        """An amount with its unit."""
        if self._nbytes is None:
            return f"{tokens:,} tokens"
        gib = tokens * self._nbytes / GIB
        return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"


def _table(trace: Trace, order: Order, sizing: Sizing, show: Amounts) -> "object":
    from rich.table import Table

    table = Table(title=f"{trace.name}, {order}, page {sizing.page_size}: hits of prompt tokens", title_justify="left")
    table.add_column("both tiers together", justify="right")
    for name in sizing.shares:
        table.add_column("best possible" if name == BEST else name, justify="right")
    table.add_column("")
    for i, size in enumerate(sizing.sizes):
        table.add_row(show.of(size), *(percent(shares[i]) for shares in sizing.shares.values()), _mark(sizing, size))
    return table


def _mark(sizing: Sizing, size: int) -> str:
    return ", ".join(mark.what for mark in marks(sizing) if mark.tokens == size)


def advice(sizing: Sizing, show: Amounts) -> list[str]:
    """What the figures mean for whoever buys memory."""
    gpu, cpu = sizing.gpu_tokens, sizing.cpu_tokens
    today, knee, full = sizing.share(gpu + cpu), sizing.knee_tokens, max(sizing.shares[sizing.order])
    lines = []
    if knee > gpu + cpu:
        host, then = knee - gpu, sizing.share(knee)
        lines.append(f"With {show.of(host)} of host memory this workload hits {percent(then)}; today {percent(today)}.")
    else:
        lines.append(f"This workload hits {percent(today)} today; more memory buys little: {percent(full)} at most.")
    doubled = f"Twice the GPU tier would hit {percent(sizing.share(2 * gpu + cpu))}"
    if cpu:
        doubled += f", twice the host tier {percent(sizing.share(gpu + 2 * cpu))}"
    lines.append(f"{doubled} (order {sizing.order}).")
    lines.append("Sizes count cached pages; pages of the requests that run come on top.")
    return lines


def _report(trace: Trace, order: Order, sizing: Sizing, tokens: int, nbytes: int | None, seconds: float) -> Report:
    gpu, cpu = sizing.gpu_tokens, sizing.cpu_tokens
    share: Callable[[int], Metric] = lambda size: Metric(sizing.share(size), "of prompt tokens")  # noqa: E731
    metrics = {
        "tiers_tokens": Metric(gpu + cpu, "tokens"),
        "hit_share_gpu": share(gpu),
        "hit_share": share(gpu + cpu),
        "hit_share_gpu_doubled": share(2 * gpu + cpu),
        "hit_share_cpu_doubled": share(gpu + 2 * cpu),
        "knee_tokens": Metric(sizing.knee_tokens, "tokens"),
        "hit_share_knee": share(sizing.knee_tokens),
        "full_tokens": Metric(sizing.full_tokens, "tokens"),
        "prompt_tokens": Metric(tokens, "tokens"),
        "kv_nbytes_per_token": Metric(nbytes, "bytes"),
        "bad_lines": Metric(trace.bad, "lines"),
        "seconds": Metric(seconds, "s"),
    }
    what: dict[str, JsonValue] = {"trace": trace.name, "order": str(order), "page_size": sizing.page_size}
    what["note"] = trace.note
    rows = [
        what | {"tokens": size} | {name: shares[i] for name, shares in sizing.shares.items()}
        for i, size in enumerate(sizing.sizes)
    ]
    return Report("size", ok=True, metrics=metrics, rows=rows)
