"""kvkeep bench media: digests of media, hits of encoder outputs, and what one budget for them and KV brings.

Must not know how a case measures what it measures.

    kvkeep bench media [--smoke] [--rounds N] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from bench import _budget as budgets
from bench import _digests as cases
from bench import _encoders as encoders
from bench import _outputs as outputs
from bench._measure import SPIN_QUIET_US, Case, Measured, case_parser, lacking, measure, row, table
from kvkeep.benching import summary
from kvkeep.benching.record import work_checksum
from kvkeep.benching.samples import exact
from kvkeep.config import EvictionName
from kvkeep.report import JsonValue, Metric, Report

#: Of the hash's own time on the same bytes.
DIGEST_RATIO_MAX = 1.3
MEMO_US_MAX = 10.0

FLOOR = "floor_sha256_ms"

HIT_US_MAX = 30.0
#: Of computing it.
HIT_RATIO_MAX = 1 / 50
WASTE_MAX = 0.12

#: Shares of KV among the operations: the worst of them counts.   Pages, operations.
KV_SHARES, POOL = (0.0, 0.25, 0.5, 0.75), (1000, 100_000)
SMOKE_KV_SHARES, SMOKE_POOL = (0.5,), (100, 2_000)
#: Workloads and sizes of the GPU tier, in tokens, where one budget is held against two halves.
BUDGETS = [
    *((f"workload:mixed?seed={seed}", tokens) for seed in range(3) for tokens in (65_536, 98_304, 131_072, 262_144)),
    *(("workload:image-chat?sessions=80", tokens) for tokens in (65_536, 131_072, 262_144)),
    *(("workload:image-chat?sessions=80&keep=3", tokens) for tokens in (65_536, 131_072)),
    *(("workload:audio", tokens) for tokens in (65_536, 131_072)),
    *(("workload:video", tokens) for tokens in (65_536, 131_072)),
]
SMOKE_BUDGETS = [("workload:mixed?seed=0", 262_144)]
#: What is judged is a mixture of modalities; the order that is judged comes last.
JUDGED_WORKLOAD = "workload:mixed"
ORDERS: tuple[EvictionName, ...] = ("lru", "rhythm")
PARTS = (0.5, 0.75)

#: What is held against the limit: here the content lies as it is digested, and nothing has to be decoded.
JUDGED = ("bytes", "file", "array", "tensor")


def missing() -> str | None:
    """What is not installed here."""
    return lacking(("torch",), "engine")


def run(arguments: list[str]) -> Report:
    """Measure everything, print the table, return the report."""
    options = _parse(arguments)
    rounds = options.rounds or (2 if options.smoke else 15)
    array = cases.pixels()
    with cases.carriers(array) as carriers:
        measured = measure([*_digest_cases(carriers), *_memo_cases(carriers), *_hit_cases()], rounds)
    rows = [row(entry, measured) for entry in measured.values()]
    rows += _waste_rows(*((SMOKE_KV_SHARES, *SMOKE_POOL) if options.smoke else (KV_SHARES, *POOL)))
    found = [
        budgets.budget(*which, eviction, PARTS)
        for which in (SMOKE_BUDGETS if options.smoke else BUDGETS)
        for eviction in ORDERS
    ]
    metrics = {name: entry.metric() for name, entry in measured.items()}
    metrics["digest_ratio"] = _ratio(measured)
    metrics["digest_memo_us"] = max(
        (metric for name, metric in metrics.items() if name.startswith("digest_memo_us_")), key=lambda m: m.value or 0
    )
    metrics["encoder_speedup"] = _speedup(measured)
    metrics["slot_waste_share"] = exact(
        max(float(str(r["median"])) for r in rows if "kv_share" in r), "of bytes", "lower"
    )
    worst = min(entry.gain for entry in found if _is_judged(entry))
    metrics["budget_gain_share"] = exact(round(worst, 4), "of seconds saved", "higher")
    rows += [_budget_row(entry) for entry in found]
    metrics["spin_us"] = summary([round(spin, 2) for entry in measured.values() for spin in entry.spins], "us")
    for line in [*table([r for r in rows if "median" in r]), *_budget_lines(found), *_absent()]:
        print(line)
    missed = [str(entry["metric"]) for entry in rows if entry.get("reached") is False]
    for name, limit in (
        ("digest_ratio", f"at most {DIGEST_RATIO_MAX}"),
        ("encoder_speedup", f"at least {1 / HIT_RATIO_MAX:.0f}"),
        ("slot_waste_share", f"at most {WASTE_MAX}"),
        ("budget_gain_share", "0 or more, at the worst"),
    ):
        print(f"{name} {metrics[name].value} of {limit}")
    print(f"spin {metrics['spin_us'].value:.0f} us ({SPIN_QUIET_US:.0f} when quiet)")
    print(f"limits missed: {', '.join(missed) or 'none'}")
    work = work_checksum([[row.get("median") for row in rows if "kv_share" in row], [row.get("gain") for row in rows]])
    return Report("bench media", not missed, metrics, rows, work)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("media")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="times that every case is run (15)")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it must be 1 or more")
    return options


def _digest_cases(carriers: dict[str, tuple[str, Any]]) -> Iterator[Case]:
    for name, hash_fn in cases.hashes().items():
        what = f"{name} over 10 MB in one call"
        yield Case(f"floor_{name}_ms", what, cases.bulk(hash_fn, carriers["bytes"][1]), unit="ms")
    for name, (what, source) in carriers.items():
        floor = FLOOR if name in JUDGED else None
        what = f"digest of an image of 10 MB: {what}"
        yield Case(f"digest_ms_{name}", what, cases.digests(source), None, floor, DIGEST_RATIO_MAX, unit="ms")


def _memo_cases(carriers: dict[str, tuple[str, Any]]) -> Iterator[Case]:
    for name in ("bytes", *(n for n in ("array", "tensor", "pil") if n in carriers)):
        frozen = None if name == "bytes" else "upload 1"
        what = f"the same again, {'the very object' if frozen is None else 'named as frozen'}: {carriers[name][0]}"
        yield Case(f"digest_memo_us_{name}", what, cases.again(carriers[name][1], 200, frozen), MEMO_US_MAX)


def _hit_cases() -> Iterator[Case]:
    yield Case("encoder_hit_us", "a hit of an output of 2 MB, as a view", outputs.hits_2mb(200), HIT_US_MAX)
    image, clip = outputs.image(), outputs.clip()
    for repeated in (image, clip):
        if repeated is not None and not repeated.check():
            raise AssertionError("a hit of other bits than computing gives")
    if image is not None:
        miss, what = "encoder_ms_image_miss", "a photograph of 240 KB through EfficientNet-Lite0, with its digest"
        yield Case(miss, what, image.misses(2), unit="ms")
        what = "the same photograph again"
        yield Case("encoder_ms_image_hit", what, image.hits(20), None, miss, HIT_RATIO_MAX, unit="ms")
    if clip is not None:
        what = "10 s of synthesised speech to the decoder's first token, Whisper tiny.en"
        yield Case("first_token_ms_miss", what, clip.misses(1), unit="ms")
        yield Case("first_token_ms_hit", f"{what}: the clip again", clip.hits(1), unit="ms")


def _absent() -> Iterator[str]:
    for encoder in ("vision", "speech"):
        absent = encoders.missing(encoder)
        if absent:
            yield f"the {encoder} encoder was not measured: {absent} not installed"


def _waste_rows(kv_shares: Sequence[float], pages: int, operations: int) -> Iterator[dict[str, JsonValue]]:
    for kv_share in kv_shares:
        found = round(budgets.waste_share(kv_share, pages, operations), 4)
        yield {
            "metric": f"slot_waste_share_kv_{kv_share:g}",
            "what": f"bytes left empty in a full pool of {pages} pages, {kv_share:.0%} of {operations:,} operations KV",
            "unit": "share",
            "median": found,
            "kv_share": kv_share,
            "limit": WASTE_MAX,
            "bound": WASTE_MAX,
            "reached": found <= WASTE_MAX,
        }


def _is_judged(entry: budgets.Budget) -> bool:
    return entry.workload.startswith(JUDGED_WORKLOAD) and entry.eviction == ORDERS[-1] and not entry.waited


def _budget_row(entry: budgets.Budget) -> dict[str, JsonValue]:
    return {
        "metric": "budget_gain_share",
        "what": f"{entry.workload} in {entry.gpu_tokens:,} tokens, {entry.eviction}",
        "gain": round(entry.gain, 4),
        "saved_s": round(entry.one.saved_s, 2),
        "of_s": round(entry.one.prefill_all_s + entry.one.encoder_all_s, 2),
        "waited_s": round(entry.one.waited_s, 1),
        "saved_s_by_kv_share": {f"{share:g}": round(part.saved_s, 2) for share, part in entry.parts.items()},
        "waited_s_by_kv_share": {f"{share:g}": round(part.waited_s, 1) for share, part in entry.parts.items()},
        "duplicate_media_rate": round(entry.one.duplicate_media_rate, 4),
        **({"limit": 0.0, "reached": entry.gain >= 0} if _is_judged(entry) else {}),
    }


def _budget_lines(found: Sequence[budgets.Budget]) -> Iterator[str]:
    """Seconds saved; in brackets the seconds that requests waited for pages, where they did."""
    yield f"{'seconds saved: one budget':<60}{'one':>12}" + "".join(f"{f'{share:.0%} KV':>14}" for share in PARTS)
    for entry in found:
        cells = [entry.one, *entry.parts.values()]
        shown = [f"{c.saved_s:.1f}" + (f" ({c.waited_s:.0f})" if c.waited_s > 1 else "") for c in cells]
        name = f"{entry.workload.removeprefix('workload:')} {entry.gpu_tokens:,} {entry.eviction}"
        yield f"{name:<60}{shown[0]:>12}" + "".join(f"{cell:>14}" for cell in shown[1:]) + f"  {entry.gain:+.1%}"


def _speedup(measured: dict[str, Measured]) -> Metric:
    """None where the encoder is not installed."""
    if "encoder_ms_image_hit" not in measured:
        return Metric(None, "ratio")
    return measured["encoder_ms_image_miss"].over(measured["encoder_ms_image_hit"], "higher", 1)


def _ratio(measured: dict[str, Measured]) -> Metric:
    """The slowest of those that are judged, over the hash alone."""
    found = [measured[f"digest_ms_{name}"] for name in JUDGED if f"digest_ms_{name}" in measured]
    slowest = max(found, key=lambda entry: entry.median)
    return slowest.over(measured[FLOOR], "lower", 3)
