"""Figures of `bench agent`: what is said of each run, and of one configuration against another.

Must not run anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bench._load import Slo, goodput_per_s
from kvkeep.benching import median, p90, p99, summary
from kvkeep.benching.samples import DRAWS, LEVEL, ratio
from kvkeep.report import JsonValue, Metric
from kvkeep.telemetry.energy import JoulesPerTokens

if TYPE_CHECKING:
    from bench._serving import Run
    from kvkeep.engine.asking import Answer

Row = dict[str, JsonValue]

OFF, GPU, BOTH = "off", "gpu", "both"
SAID = {OFF: "cache off", GPU: "GPU tier", BOTH: "both tiers"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """One workload at one rate, by configuration.

    load: of what the engine without a cache can serve.   pool_share: of the working set, that fits into the pool.
    joules: of 1,000 prompt tokens, by configuration.
    """

    workload: str
    load: float
    pool_share: float
    runs: "dict[str, Run]"
    joules: Mapping[str, JoulesPerTokens] = field(default_factory=dict)


def run_row(loaded: Loaded, run: "Run", slo: Slo) -> Row:
    """One configuration under one load."""
    ttft_s, itl_s = [one.ttft_s for one in run.served], [gap for one in run.served for gap in one.itl_s]
    return {
        "series": "load",
        "workload": loaded.workload,
        "arrivals": run.arrivals.what,
        "load": loaded.load,
        "offered_per_s": round(run.arrivals.per_s, 4),
        "config": run.setup.name,
        "pool_pages": run.setup.pool_pages,
        "pool_share": round(loaded.pool_share, 3),
        "host_pages": run.setup.host_pages,
        "requests": len(run.served),
        "ttft_s": round(median(ttft_s), 4),
        "ttft_p90_s": round(p90(ttft_s), 4),
        "ttft_p99_s": round(p99(ttft_s), 4),
        "itl_ms": round(1e3 * median(itl_s), 2),
        "itl_p99_ms": round(1e3 * p99(itl_s), 2),
        "slo_met": sum(map(slo.met, run.served)),
        "goodput_per_s": round(goodput_per_s(run.served, run.arrivals, slo), 4),
        "tokens_per_s": round((run.prompt_tokens + run.output_tokens) / run.span_s, 1),
        "output_tokens_per_s": round(run.output_tokens / run.span_s, 2),
        "matched_share_gpu": round(run.matched_gpu / run.prompt_tokens, 4),
        "matched_share_cpu": round(run.matched_cpu / run.prompt_tokens, 4),
        "stalls": run.stalls,
        "stall_s": round(run.stall_s, 4),
        "live_stalls": len(run.starved),
        "preemptions": sum(request.preemptions for request in run.requests),
        "late_ms_max": round(1e3 * max((one.sent_s or 0.0) - one.due_s for one in run.served), 1),
        **_joules(loaded.joules.get(run.setup.name)),
    }


def _joules(found: JoulesPerTokens | None) -> Row:
    if found is None:
        return {}
    value = None if found.value is None else round(found.value, 3)
    return {"joules_per_1k": value, "joules_how": found.how if found.value is not None else found.reason}


def request_rows(loaded: Loaded, run: "Run", turns: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Each request of a run.   turns: session and turn of each."""
    for served, request, (session, turn) in zip(run.served, run.requests, turns, strict=True):
        yield {
            "series": "request",
            "workload": loaded.workload,
            "load": loaded.load,
            "config": run.setup.name,
            "session": session,
            "turn": turn,
            "due_s": round(served.due_s, 4),
            "sent_s": round(served.sent_s or 0.0, 4),
            "first_s": round(served.tokens_s[0], 4),
            "end_s": round(served.tokens_s[-1], 4),
            "ttft_s": round(served.ttft_s, 4),
            "prompt_tokens": request.prompt_len,
            "matched_gpu_tokens": request.matched_len - request.host_len,
            "matched_cpu_tokens": request.host_len,
        }


def look_rows(loaded: Loaded, run: "Run") -> Iterator[Row]:
    """The cache's numbers during a run."""
    for look in run.looks:
        yield {
            "series": "cache",
            "workload": loaded.workload,
            "load": loaded.load,
            "config": run.setup.name,
            **look,
        }


def ttft_ratio(loaded: Loaded) -> Metric:
    """Median time to first token without a cache over that with both tiers; requests are drawn in pairs."""
    off, both = ([[one.ttft_s] for one in loaded.runs[name].served] for name in (OFF, BOTH))
    return ratio(off, both, "higher", digits=3)


def goodput_ratio(every: Sequence[Loaded], slo: Slo, seed: int = 0) -> Metric:
    """Goodput with both tiers over that without a cache, each at the best of the rates that were offered.

    Where nothing at all meets the SLO without a cache, one request at the lowest rate is taken to have met it: the
    ratio is that much at least.
    """
    rates = [one.runs[OFF].arrivals.per_s for one in every]
    met = {name: [np.array([slo.met(s) for s in one.runs[name].served]) for one in every] for name in (OFF, BOTH)}
    rng, found = np.random.default_rng(seed), []
    for draw in range(DRAWS + 1):
        chosen = [np.arange(len(m)) if not draw else rng.integers(0, len(m), len(m)) for m in met[OFF]]
        best = {name: max(r * m[c].mean() for r, m, c in zip(rates, met[name], chosen, strict=True)) for name in met}
        least = min(rate / len(m) for rate, m in zip(rates, met[OFF], strict=True))
        found.append(float(best[BOTH] / max(best[OFF], least)))
    low, high = np.quantile(found[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    interval = (round(min(low, found[0]), 3), round(max(high, found[0]), 3))
    return Metric(round(found[0], 3), "ratio", samples=len(met[OFF][0]), interval=interval, better="higher")


def load_metrics(steady: Loaded, every: Sequence[Loaded], slo: Slo) -> dict[str, Metric]:
    """steady: the load at which the engine without a cache still keeps up: times are compared there."""
    both = steady.runs[BOTH]
    out = {
        "ttft_ratio": ttft_ratio(steady),
        "goodput_ratio": goodput_ratio(every, slo),
        "stalls": Metric(sum(one.runs[BOTH].stalls for one in every), "requests", better="lower"),
        "live_stalls": Metric(sum(len(one.runs[BOTH].starved) for one in every), "requests", better="lower"),
        "stall_s": Metric(round(sum(one.runs[BOTH].stall_s for one in every), 4), "s"),
        "matched_share_gpu": Metric(
            round(both.matched_gpu / both.prompt_tokens, 4), "of prompt tokens", better="higher"
        ),
        "matched_share_cpu": Metric(
            round(both.matched_cpu / both.prompt_tokens, 4), "of prompt tokens", better="higher"
        ),
        "slo_ttft_s": Metric(round(slo.ttft_s, 4), "s of the SLO"),
        "slo_itl_s": Metric(round(slo.itl_s, 4), "s of the SLO"),
    }
    for name, run in steady.runs.items():
        out[f"ttft_{name}_s"] = summary([one.ttft_s for one in run.served], "s", digits=4)
        gaps = [[1e3 * gap for gap in one.itl_s] for one in run.served]
        out[f"itl_{name}_ms"] = summary([gap for own in gaps for gap in own], "ms", groups=gaps, digits=2)
    for name in steady.runs:
        best = max(every, key=lambda one: goodput_per_s(one.runs[name].served, one.runs[name].arrivals, slo))
        run = best.runs[name]
        out[f"goodput_{name}_per_s"] = Metric(
            round(goodput_per_s(run.served, run.arrivals, slo), 4), "requests/s", samples=len(run.served)
        )
        fastest = max((one.runs[name] for one in every), key=lambda run: run.output_tokens / run.span_s)
        total = (fastest.prompt_tokens + fastest.output_tokens) / fastest.span_s
        out[f"throughput_{name}"] = Metric(round(total, 1), "tokens/s")
    for name, told in steady.joules.items():
        out[f"joules_per_1k_{name}"] = Metric(None if told.value is None else round(told.value, 3), "J", better="lower")
    return out


def alone_metrics(miss: "Sequence[Answer]", gpu: "Sequence[Answer]", cpu: "Sequence[Answer]") -> dict[str, Metric]:
    """Times to first token of single requests: without a cache, of hits where the model reads, of hits of which a part
    came from host memory."""
    kinds = {"miss": miss, "hit_gpu": gpu, "hit_cpu": cpu}
    return {
        f"{kind}_ttft_ms": summary([answer.ttft_ns / 1e6 for answer in answers], "ms", digits=2)
        for kind, answers in kinds.items()
        if answers
    }


def alone_rows(config: str, answers: "Sequence[tuple[int, int, int, Answer]]") -> Iterator[Row]:
    """answers: session, turn, prompt tokens and answer of single requests."""
    for session, turn, prompt_tokens, answer in answers:
        yield {
            "series": "alone",
            "config": config,
            "session": session,
            "turn": turn,
            "prompt_tokens": prompt_tokens,
            "matched_gpu_tokens": answer.matched_tokens - answer.host_tokens,
            "matched_cpu_tokens": answer.host_tokens,
            "ttft_ms": round(answer.ttft_ns / 1e6, 3),
            "total_ms": round(answer.total_ns / 1e6, 3),
        }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The loads as a table."""
    head = f"{'workload':<10}{'load':>6}{'per s':>8}  {'':<11}{'TTFT s':>8}{'p90':>8}{'p99':>8}{'ITL ms':>8}{'p99':>8}"
    yield head + f"{'tokens/s':>10}{'in SLO':>8}{'goodput':>9}{'GPU':>7}{'CPU':>7}{'stalls':>7}"
    for row in rows:
        if row["series"] != "load":
            continue
        cells = [f"{row[key]:>8.3f}" for key in ("ttft_s", "ttft_p90_s", "ttft_p99_s")]
        cells += [f"{row[key]:>8.1f}" for key in ("itl_ms", "itl_p99_ms")]
        shares = "".join(f"{row[key]:>7.1%}" for key in ("matched_share_gpu", "matched_share_cpu"))
        met = f"{row['slo_met']}/{row['requests']}"
        yield (
            f"{row['workload']!s:<10}{row['load']:>6.2f}{row['offered_per_s']:>8.3f}  {SAID[str(row['config'])]:<11}"
            f"{''.join(cells)}{row['tokens_per_s']:>10.0f}{met:>8}{row['goodput_per_s']:>9.3f}{shares}{row['stalls']:>7}"
        )
