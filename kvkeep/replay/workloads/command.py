"""`kvkeep replay workload:NAME`: serves a synthetic workload, shows what its hits of both kinds saved.

Must not count anything.
"""

from typing import TYPE_CHECKING

from kvkeep.errors import BadInput
from kvkeep.replay.seat import check_order
from kvkeep.replay.workloads.named import make_workload
from kvkeep.replay.workloads.serving import Saved, Serving
from kvkeep.replay.workloads.workload import Workload
from kvkeep.report import JsonValue, Metric, Report

if TYPE_CHECKING:
    from kvkeep.replay.command import ReplayOptions


def serve(options: "ReplayOptions") -> Report:
    """Serves the workload, prints a table and returns the numbers.  Raises `BadInput`."""
    _check(options)
    workload = make_workload(str(options.trace))
    if options.limit is not None:
        workload = workload._replace(requests=workload.requests[: options.limit])
    saved = Serving(workload, options.settings, options.page_size).run()
    _show(workload, options, saved)
    return _report(str(options.trace), workload, options, saved)


def _check(options: "ReplayOptions") -> None:
    settings = options.settings
    check_order(settings.eviction)
    meaningless = {
        "--order": options.order,
        "--sessions": options.sessions,
        "--tokenizer": options.tokenizer,
        "--skip-bad": options.skip_bad,
        "--prompts-only": options.prompts_only,
        "--explain": settings.explain,
        "--concurrency": settings.concurrency,
        "--accounting reference": settings.accounting == "reference",
    }
    for name, given in meaningless.items():
        if given:
            raise BadInput(f"{name} is for recorded traces: {options.trace} has arrivals of its own")
    if settings.cpu_tokens and settings.cpu_tokens < options.page_size:
        raise BadInput(f"--cpu-tokens {settings.cpu_tokens}: it must be a page of {options.page_size} tokens or more")


def _show(workload: Workload, options: "ReplayOptions", saved: Saved) -> None:
    from rich.console import Console
    from rich.table import Table

    settings, console = options.settings, Console()
    gib = [tokens * workload.kv_nbytes_per_token / (1 << 30) for tokens in (settings.gpu_tokens, settings.cpu_tokens)]
    title = f"workload {workload.name}, page {options.page_size}, {settings.eviction}, {gib[0]:.1f} GiB on the GPU"
    console.print(title + (f", {gib[1]:.1f} below" if gib[1] else ""), highlight=False)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, count, of in (
        ("requests", saved.requests, None),
        ("prompt tokens", saved.prompt_tokens, saved.prompt_tokens),
        ("  matched on the GPU", saved.matched_tokens_gpu, saved.prompt_tokens),
        ("  matched below", saved.matched_tokens_cpu, saved.prompt_tokens),
        ("encoder outputs asked for", saved.asked, saved.asked),
        ("  not needed: their KV matched", saved.unneeded, saved.asked),
        ("  found on the GPU", saved.gpu_hits, saved.asked),
        ("  found below", saved.host_hits, saved.asked),
        ("  computed", saved.computed, saved.asked),
        ("  asked for before", saved.asked_again, saved.asked),
        ("media items in prompts", saved.media_items, None),
    ):
        table.add_row(name, f"{count:,}", f"{100 * count / of:.1f} %" if of else "")
    table.add_row("  duplicates", "", f"{100 * saved.duplicate_media_rate:.1f} %")
    for name, seconds, of_s in (
        ("prefill saved", saved.kv_s, saved.prefill_all_s),
        ("encoding saved", saved.encoder_s, saved.encoder_all_s),
        ("saved in all", saved.saved_s, saved.prefill_all_s + saved.encoder_all_s),
        ("waited for pages", saved.waited_s, 0.0),
    ):
        table.add_row(name, f"{seconds:.1f} s", f"{100 * seconds / of_s:.1f} %" if of_s else "")
    console.print(table)
    console.print(f"{workload.note}; no model runs: this is the cache's side alone", highlight=False, soft_wrap=True)
    if saved.unserved:
        console.print(f"{saved.unserved} requests are larger than the GPU tier and were not served", highlight=False)


def _report(name: str, workload: Workload, options: "ReplayOptions", saved: Saved) -> Report:
    settings = options.settings
    of_tokens = max(1, saved.prompt_tokens)
    hits = saved.unneeded + saved.gpu_hits + saved.host_hits
    metrics = {
        "requests": Metric(saved.requests, "requests"),
        "prompt_tokens": Metric(saved.prompt_tokens, "tokens"),
        "hit_share": Metric((saved.matched_tokens_gpu + saved.matched_tokens_cpu) / of_tokens, "of prompt tokens"),
        "encoder_asked": Metric(saved.asked, "outputs"),
        "encoder_hit_share": Metric(hits / max(1, saved.asked), "of outputs asked for"),
        "encoder_unneeded": Metric(saved.unneeded, "outputs"),
        "encoder_gpu_hits": Metric(saved.gpu_hits, "outputs"),
        "encoder_host_hits": Metric(saved.host_hits, "outputs"),
        "encoder_computed": Metric(saved.computed, "outputs"),
        "encoder_refused": Metric(saved.refused, "outputs"),
        "encoder_asked_again": Metric(saved.asked_again, "outputs"),
        "media_items": Metric(saved.media_items, "items"),
        "duplicate_media_rate": Metric(saved.duplicate_media_rate, "of media items"),
        "kv_saved_s": Metric(saved.kv_s, "s"),
        "encoder_saved_s": Metric(saved.encoder_s, "s"),
        "saved_s": Metric(saved.saved_s, "s"),
        "compute_s": Metric(saved.prefill_all_s + saved.encoder_all_s, "s"),
        "waited_s": Metric(saved.waited_s, "s"),
        "stalls": Metric(saved.stalls, "requests"),
        "unserved": Metric(saved.unserved, "requests"),
        "replay_seconds": Metric(saved.seconds, "s"),
    }
    row: dict[str, JsonValue] = {
        "trace": name,
        "note": workload.note,
        "page_size": options.page_size,
        "page_nbytes": options.page_size * workload.kv_nbytes_per_token,
        "gpu_tokens": settings.gpu_tokens,
        "cpu_tokens": settings.cpu_tokens,
        "eviction": settings.eviction,
        "index_at": settings.index_at,
        "prefill_tokens_per_s": settings.prefill_tokens_per_s,
        "decode_tokens_per_s": settings.decode_tokens_per_s,
        "link_tokens_per_s": settings.link_tokens_per_s,
        "simulated_s": saved.simulated_s,
    }
    return Report("replay", ok=True, metrics=metrics, rows=[row])
