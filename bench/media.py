"""kvkeep bench media: digests of media against the hash's own speed on the same bytes, and of media seen before.

Must not know how a case measures what it measures.

    kvkeep bench media [--quick] [--rounds N] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from bench import _digests as cases
from bench._measure import SPIN_QUIET_US, Case, Measured, case_parser, measure, row, table
from kvkeep.benching import summary
from kvkeep.report import Metric, Report

#: Of the hash's own time on the same bytes.
DIGEST_RATIO_MAX = 1.3
MEMO_US_MAX = 10.0

FLOOR = "floor_sha256_ms"

#: What is held against the limit: here the content lies as it is digested, and nothing has to be decoded.
JUDGED = ("bytes", "file", "array", "tensor")


def run(arguments: list[str]) -> Report:
    """Measure everything, print the table, return the report."""
    options = _parse(arguments)
    rounds = options.rounds or (2 if options.quick else 15)
    array = cases.pixels()
    with cases.carriers(array) as carriers:
        measured = measure([*_digest_cases(carriers), *_memo_cases(carriers)], rounds)
    rows = [row(entry, measured) for entry in measured.values()]
    metrics = {name: entry.metric() for name, entry in measured.items()}
    metrics["digest_ratio"] = _ratio(measured)
    metrics["digest_memo_us"] = max(
        (metric for name, metric in metrics.items() if name.startswith("digest_memo_us_")), key=lambda m: m.value or 0
    )
    metrics["spin_us"] = summary([round(spin, 2) for entry in measured.values() for spin in entry.spins], "us")
    for line in table(rows):
        print(line)
    missed = [str(entry["metric"]) for entry in rows if entry.get("reached") is False]
    print(f"digest_ratio {metrics['digest_ratio'].value} of at most {DIGEST_RATIO_MAX}")
    print(f"spin {metrics['spin_us'].value:.0f} us ({SPIN_QUIET_US:.0f} when quiet)")
    print(f"limits missed: {', '.join(missed) or 'none'}")
    return Report("bench media", not missed, metrics, rows)


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


def _ratio(measured: dict[str, Measured]) -> Metric:
    """The slowest of those that are judged, over the hash alone."""
    found = [measured[f"digest_ms_{name}"] for name in JUDGED if f"digest_ms_{name}" in measured]
    slowest = max(found, key=lambda entry: entry.median)
    return Metric(round(slowest.median / measured[FLOOR].median, 3), "ratio", samples=len(slowest.samples))
