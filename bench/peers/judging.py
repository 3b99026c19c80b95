"""Figures of the managers side by side: the ratio of each to ours, from the same rounds, and its limit.

Must not know how a manager is asked.

A ratio is the peer's median over ours.  `kvkeep_lru` stands for us in them: exact LRU, which is the peers' order too,
names, and verification; `..._default` is over `kvkeep`, with the order that learns and the estimates of other sizes.
"""

from collections.abc import Iterator, Mapping

from bench.peers.comparing import Case, Found, Results
from kvkeep.benching import median, p99, summary
from kvkeep.benching.samples import exact, ratio
from kvkeep.report import JsonValue, Metric

Row = dict[str, JsonValue]

LIKE_FOR_LIKE, DEFAULT = "kvkeep_lru", "kvkeep"
OURS = (DEFAULT, LIKE_FOR_LIKE)
#: The least that a ratio must be.
LIMITS = {"w1_ratio_vllm": 12.0, "w1_ratio_sglang_rust": 4.0}


def metrics(cases: list[Case], peers: Mapping[str, str], results: Results) -> dict[str, Metric]:
    """Ratios first, then microseconds and matched shares.   peers: variant -> whose it is, of all that were asked."""
    out: dict[str, Metric] = {}
    for case in cases:
        found = results.found[case.name]
        for variant in (variant for variant in case.variants if variant in peers):
            theirs = found.get(variant)
            for suffix, whose in (("", LIKE_FOR_LIKE), ("_default", DEFAULT)):
                ours = found.get(whose)
                none = Metric(None, "ratio", samples=0)
                made = None if theirs is None or ours is None else ratio(theirs.us, ours.us, "higher")
                out[ratio_name(case, variant) + suffix] = made or none
    for case in cases:
        for variant, one in results.found[case.name].items():
            samples = [us for round_ in one.us for us in round_]
            out[f"{case.name}_us_{variant}"] = summary(samples, case.unit, groups=one.us, digits=4)
    for case in cases:
        for variant, share in _shares(case, results):
            out[f"{case.name}_matched_{variant}"] = exact(share, "of prompt tokens", better="higher")
    return out


def ratio_name(case: Case, variant: str) -> str:
    """`w1_ratio_vllm` of case w1, `w1_ratio_vllm_1m` of w1_1m."""
    name, _, size = case.name.partition("_")
    return "_".join(part for part in (name, "ratio", variant, size) if part)


def _shares(case: Case, results: Results) -> Iterator[tuple[str, float]]:
    """What was matched of the prompt tokens, both tiers together, and what could have been; of W1."""
    if case.name not in results.best:
        return
    whole = results.prompt_tokens[case.name]
    yield "best", round(results.best[case.name] / whole, 5)
    for variant, one in results.found[case.name].items():
        yield variant, round((one.matched + one.host) / whole, 5)


def rows(
    cases: list[Case],
    peers: Mapping[str, str],
    results: Results,
    figures: Mapping[str, Metric],
    limits: Mapping[str, float] = LIMITS,
) -> list[Row]:
    """A row for each manager and case, with its reason where it has no figures; the ratios; the peers.

    limits: the least that a ratio must be, by metric.
    """
    out: list[Row] = [
        {"peer": name, "version": results.versions.get(name), "reason": results.absent.get(name)}
        for name in dict.fromkeys(peers.values())
    ]
    for case in cases:
        for variant in (*OURS, *peers):
            if variant in case.variants:
                out.append(_row(case, variant, peers, results))
    for name, metric in figures.items():
        if metric.unit == "ratio":
            row: Row = {"metric": name, "unit": "ratio", "median": metric.value}
            limit = limits.get(name)
            if limit is not None and metric.value is not None:
                row |= {"limit": f"at least {limit:g}", "bound": limit, "reached": metric.value >= limit}
            out.append(row)
    return out


def _row(case: Case, variant: str, peers: Mapping[str, str], results: Results) -> Row:
    found: Found | None = results.found[case.name].get(variant)
    row: Row = {"case": case.name, "variant": variant, "checksum": results.checksums[case.name]}
    if found is None:
        peer = peers.get(variant, DEFAULT)
        reason = results.reasons.get((case.name, variant)) or results.absent.get(peer) or "it was not measured"
        return row | {"reason": reason}
    samples = [us for round_ in found.us for us in round_]
    row |= {"unit": case.unit, "median": round(median(samples), 4), "p99": round(p99(samples), 4)}
    row |= {
        "samples": len(samples),
        "rounds": len(found.us),
        "matched_tokens": found.matched,
        "host_tokens": found.host,
    }
    return row | {"tokens": case.tokens, "host_pool_tokens": case.host_tokens}


def table(cases: list[Case], peers: Mapping[str, str], results: Results) -> Iterator[str]:
    """A line for each case: microseconds of each manager, and the ratio to ours; reasons below."""
    variants = [*OURS, *peers]
    yield f"{'':<10}" + "".join(f"{variant:>22}" for variant in variants)
    for case in cases:
        found = results.found[case.name]
        ours = found.get(LIKE_FOR_LIKE)
        cells = [_cell(found.get(variant), ours if variant not in OURS else None) for variant in variants]
        yield f"{case.name:<10}" + "".join(f"{cell:>22}" for cell in cells)
    for case in cases:
        shares = ", ".join(f"{variant} {share:.4f}" for variant, share in _shares(case, results))
        if shares:
            yield f"{case.name}: matched of the prompt tokens: {shares}"
    for name, reason in results.absent.items():
        yield f"{name}: none: {reason}"
    for (name, variant), reason in results.reasons.items():
        yield f"{name}, {variant}: none: {reason}"


def _cell(found: Found | None, ours: Found | None) -> str:
    if found is None:
        return "none"
    middle = median([us for round_ in found.us for us in round_])
    beside = "" if ours is None else f" ({ratio(found.us, ours.us).value or 0:.1f} x)"
    return f"{middle:.4g}{beside}"
