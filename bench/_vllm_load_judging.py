"""Figures of load passes: what each configuration got under a load, one against the other, and what is judged.

Must not run anything.
"""

from collections.abc import Iterator, Mapping, Sequence

from bench._load import Served, Slo, goodput_per_s
from bench._vllm_judging import Limit, Row
from bench._vllm_load_cases import LoadCase
from bench._vllm_load_found import ALONE, KVKEEP, Found, LoadPass
from bench._vllm_load_sending import Outcome
from kvkeep.benching import median, p99, summary
from kvkeep.benching.samples import ratio
from kvkeep.report import Metric

#: Of what a cache would match that never evicts and has each prompt before the next.
OF_CEILING_MIN = 0.9
SAID = {ALONE: "vLLM", KVKEEP: "with kvkeep"}
SGLANG = (
    "SGLang end to end needs a GPU: its packages are built for CUDA; what it has for CPUs has to be built from source, "
    "for processors with AMX"
)


def metrics(cases: Sequence[LoadCase], found: Found, block_size: int, slo: Slo) -> dict[str, Metric]:
    """All figures by name; see README.md beside this file."""
    out: dict[str, Metric] = {}
    for case in cases:
        by = {
            name: [one for one in found.passes if (one.case, one.configuration) == (case.name, name)] for name in SAID
        }
        out |= _compared(case, by, block_size, slo)
        for name, passes in by.items():
            out |= {f"{case.name}_{name}_{what}": metric for what, metric in _figures(case, passes, slo).items()}
    failed = [one for each in found.passes for one in each.outcomes if one.failure]
    out["errors"] = Metric(len(failed), "requests", samples=sum(len(one.outcomes) for one in found.passes))
    out["log_errors"] = Metric(len(found.bad_lines), "lines")
    out["probe_texts_apart"] = Metric(sum(one.apart for one in found.probes), "texts", samples=2 * len(found.probes))
    out["probe_external_tokens"] = Metric(int(min(one.external_tokens for one in found.probes)), "tokens")
    out["capacity_per_s"] = _summary([[one] for one in found.capacities_per_s], "prompt tokens/s", 1)
    out |= {
        "slo_ttft_s": Metric(round(slo.ttft_s, 3), "s of the SLO"),
        "slo_itl_s": Metric(round(slo.itl_s, 3), "s of the SLO"),
    }
    return out


def judge(cases: Sequence[LoadCase], found: Mapping[str, Metric]) -> Iterator[Row]:
    """What a run must reach; times are for information, other programs change them too much."""
    limits = {f"{case.name}_of_ceiling": Limit(at_least=OF_CEILING_MIN) for case in cases}
    limits |= dict.fromkeys(("errors", "log_errors", "probe_texts_apart"), Limit(at_most=0))
    limits["probe_external_tokens"] = Limit(at_least=1)
    for name, limit in limits.items():
        value = found[name].value
        assert value is not None
        row: Row = {"series": "limit", "metric": name, "median": value}
        yield row | limit.row(value)


def _compared(case: LoadCase, by: Mapping[str, Sequence[LoadPass]], block_size: int, slo: Slo) -> dict[str, Metric]:
    """Our connector against vLLM alone.  Equal requests of equal repeats belong together."""
    pairs = [
        (one.served.ttft_s, other.served.ttft_s)
        for plain, kept in zip(by[ALONE], by[KVKEEP], strict=True)
        for one, other in zip(plain.outcomes, kept.outcomes, strict=True)
        if not one.failure and not other.failure
    ]
    good = {name: _goodput(passes, slo) for name, passes in by.items()}
    gained = round(good[KVKEEP] / good[ALONE], 3) if good[ALONE] else None
    texts = [
        one.token_ids == other.token_ids
        for plain, kept in zip(by[ALONE], by[KVKEEP], strict=True)
        for one, other in zip(plain.outcomes, kept.outcomes, strict=True)
    ]
    ceiling = case.ceiling_share(block_size)
    of_ceiling = median([hit_share(case, one) for one in by[KVKEEP]]) / ceiling if ceiling else 1.0
    cpu = [[one.cpu_s for one in by[name]] for name in (KVKEEP, ALONE)]
    out = {
        "ttft_ratio": ratio([[a] for a, _ in pairs], [[b] for _, b in pairs], "higher", digits=3),
        "goodput_ratio": Metric(gained, "ratio", better="higher"),
        "of_ceiling": Metric(round(of_ceiling, 4), "of the ceiling", samples=len(by[KVKEEP]), better="higher"),
        "ceiling_share": Metric(round(ceiling, 4), "of prompt tokens"),
        "cpu_over_alone": Metric(round(sum(cpu[0]) / sum(cpu[1]), 3), "ratio", better="lower"),
        "texts_same": Metric(round(sum(texts) / len(texts), 4), "of texts", samples=len(texts)),
        "offered_per_s": _summary([[one.arrivals.per_s] for one in by[ALONE]], "requests/s", 4),
    }
    return {f"{case.name}_{name}": metric for name, metric in out.items()}


def _figures(case: LoadCase, passes: Sequence[LoadPass], slo: Slo) -> dict[str, Metric]:
    """Of one configuration, all repeats."""
    ttft_s = [[one.ttft_s for one in _whole(each)] for each in passes]
    gaps = [[1e3 * gap for one in _whole(each) for gap in one.itl_s] for each in passes]
    shares = [hit_share(case, one) for one in passes]
    return {
        "ttft_s": _summary(ttft_s, "s", 3),
        "itl_ms": _summary(gaps, "ms", 1),
        "throughput": Metric(round(median([throughput_per_s(one) for one in passes]), 1), "tokens/s"),
        "goodput_per_s": Metric(round(_goodput(passes, slo), 4), "requests/s"),
        "hit_share": Metric(round(median(shares), 4), "of prompt tokens", samples=len(shares), better="higher"),
    }


def _summary(groups: Sequence[Sequence[float]], unit: str, digits: int) -> Metric:
    samples = [sample for group in groups for sample in group]
    return summary(samples, unit, groups=groups, digits=digits) if samples else Metric(None, unit, samples=0)


def _whole(one: LoadPass) -> list[Served]:
    """Requests that were answered; those that failed have no times, and count among the errors."""
    return [outcome.served for outcome in one.outcomes if not outcome.failure]


def _goodput(passes: Sequence[LoadPass], slo: Slo) -> float:
    """Mean over the repeats; who failed has not met the SLO."""
    return sum(goodput_per_s(_counted(one), one.arrivals, slo) for one in passes) / len(passes)


def _counted(one: LoadPass) -> list[Served]:
    """All requests; those that failed without the tokens that they had before."""
    return [
        Served(outcome.served.number, outcome.served.due_s, outcome.served.wanted)
        if outcome.failure
        else outcome.served
        for outcome in one.outcomes
    ]


def hit_share(case: LoadCase, one: LoadPass) -> float:
    """Prompt tokens from vLLM's blocks or through the connector, of all that were asked."""
    return (one.local_tokens + one.external_tokens) / case.prompt_tokens


def throughput_per_s(one: LoadPass) -> float:
    """Prompt and output tokens a second, from the first arrival to the last token; of answered requests."""
    answered = [outcome for outcome in one.outcomes if not outcome.failure]
    if not answered:
        return 0.0
    tokens = sum(outcome.prompt_tokens + len(outcome.token_ids) for outcome in answered)
    return tokens / max(outcome.served.tokens_s[-1] for outcome in answered)


# ---------------------------------------------------------------------- rows


def rows(cases: Sequence[LoadCase], found: Found, slo: Slo) -> Iterator[Row]:
    """A row a pass, a row a probe, a row a request, and the one that says what is not here."""
    of = {case.name: case for case in cases}
    for one in found.passes:
        yield _pass_row(of[one.case], one, found, slo)
    for number, probe in enumerate(found.probes):
        said: Row = {"series": "probe", "number": number, "apart": probe.apart}
        said["external_tokens"] = probe.external_tokens
        yield said | {f"matched_{name}_tokens": matched for name, matched in probe.matched.items()}
    for one in found.passes:
        for ask, outcome in zip(of[one.case].asks, one.outcomes, strict=True):
            where: Row = {"series": "request", "case": one.case, "config": one.configuration, "repeat": one.repeat}
            yield where | {"session": ask.session, "turn": ask.turn} | _request(outcome)
    yield {"series": "left out", "config": "sglang", "reason": SGLANG}


def _pass_row(case: LoadCase, one: LoadPass, found: Found, slo: Slo) -> Row:
    whole = _whole(one)
    ttft_s, gaps = [served.ttft_s for served in whole], [gap for served in whole for gap in served.itl_s]
    late_s = [(outcome.served.sent_s or 0.0) - outcome.served.due_s for outcome in one.outcomes]
    return {
        "series": "load",
        "case": case.name,
        "what": case.what,
        "config": one.configuration,
        "repeat": one.repeat,
        "arrivals": one.arrivals.what,
        "requests": len(one.outcomes),
        "digest": case.digest(),
        "blocks": found.blocks,
        "tier_gib": round(found.tier_gib, 4) if one.configuration == KVKEEP else 0,
        "ttft_s": round(median(ttft_s), 4) if ttft_s else None,
        "ttft_p99_s": round(p99(ttft_s), 4) if ttft_s else None,
        "itl_ms": round(1e3 * median(gaps), 2) if gaps else None,
        "itl_p99_ms": round(1e3 * p99(gaps), 2) if gaps else None,
        "slo_met": sum(map(slo.met, _counted(one))),
        "goodput_per_s": round(goodput_per_s(_counted(one), one.arrivals, slo), 4),
        "tokens_per_s": round(throughput_per_s(one), 1),
        "hit_share": round(hit_share(case, one), 4),
        "external_share": round(one.external_tokens / case.prompt_tokens, 4),
        "failures": [outcome.failure for outcome in one.outcomes if outcome.failure],
        "late_ms_max": round(1e3 * max(late_s), 1),
        "wall_s": round(one.wall_s, 2),
        "cpu_s": round(one.cpu_s, 2),
        "computed_tokens": round(one.computed_tokens),
        "steps": round(one.steps),
        "preemptions": round(one.preemptions),
        "spin_us": round(one.spin_us, 1),
    }


def _request(outcome: Outcome) -> Row:
    served = outcome.served
    return {
        "due_s": round(served.due_s, 3),
        "ttft_s": round(served.ttft_s, 3) if served.tokens_s else None,
        "end_s": round(served.tokens_s[-1], 3) if served.tokens_s else None,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
    }


def table(every: Sequence[Row]) -> Iterator[str]:
    """The passes as lines of text."""
    head = f"{'case':<16}{'':>2} {'':<12}{'TTFT s':>8}{'p99':>8}{'ITL ms':>8}{'p99':>8}"
    yield head + f"{'tokens/s':>10}{'in SLO':>8}{'goodput':>9}{'hits':>8}{'tier':>8}"
    for row in every:
        if row["series"] == "load":
            cells = [_cell(row[key], 2) for key in ("ttft_s", "ttft_p99_s")]
            cells += [_cell(row[key], 1) for key in ("itl_ms", "itl_p99_ms")]
            met = f"{row['slo_met']}/{row['requests']}"
            yield (
                f"{row['case']!s:<16}{row['repeat']:>2} {SAID[str(row['config'])]:<12}{''.join(cells)}"
                f"{row['tokens_per_s']:>10.0f}{met:>8}{row['goodput_per_s']:>9.3f}{row['hit_share']:>8.1%}"
                f"{row['external_share']:>8.1%}"
            )


def _cell(value: object, digits: int) -> str:
    return f"{value:>8.{digits}f}" if isinstance(value, int | float) else f"{'-':>8}"
