"""kvkeep bench agreement: what it costs that ranks agree, over gloo, against one bare all-reduce of the same run.

Must not know how ranks come to agree, nor how they are timed.

    kvkeep bench agreement [--smoke] [--rounds N] [--ranks N] [--json FILE]

The report is ok when an agreement takes at most 1 ms longer, at the median, than the all-reduce beside it.
"""

import argparse

from bench._measure import case_parser, lacking, table
from bench._ranks import Rounds, timed
from kvkeep.benching import median, p99, spin_us, summary
from kvkeep.benching.record import work_checksum
from kvkeep.report import JsonValue, Metric, Report

PAGES = 1000
BEYOND_US = 1000.0  # what an agreement may take beyond one all-reduce, at the median
MECHANISMS = ("minimum", "leader")
WHAT = {
    "all_reduce": "a bare gloo all-reduce of 8 numbers, beside the others",
    "admit": "a prompt admitted on every rank, of whose pages all have {pages}",
    "run": "the same, until every rank may run it: with the next poll",
    "extend": "one page more on every rank",
}


def missing() -> str | None:
    """What is not installed here."""
    return lacking(("torch",), "engine")


def run(arguments: list[str]) -> Report:
    """Measure everything once, print the table, return the report."""
    options = _parse(arguments)
    pages = 20 if options.smoke else PAGES
    rounds = options.rounds or (5 if options.smoke else 400)
    spins = [spin_us(5).value or 0.0]
    rows: list[dict[str, JsonValue]] = []
    metrics: dict[str, Metric] = {}
    for mechanism in MECHANISMS:
        found = timed(mechanism, options.ranks, pages, rounds)
        spins.append(spin_us(5).value or 0.0)
        for name, samples in found.items():
            metric = f"{mechanism}_{name}_us"
            metrics[metric] = summary(samples, "us", digits=1)
            rows.append(_row(metric, name, samples, found, pages, median(spins)))
    for line in table(rows):
        print(line)
    missed = [str(row["metric"]) for row in rows if row.get("reached") is False]
    metrics |= {"ranks": Metric(options.ranks, "ranks"), "pages": Metric(pages, "pages")}
    metrics["spin_us"] = Metric(round(median(spins), 1), "us", samples=len(spins))
    print(f"{options.ranks} ranks, {pages} pages; limits missed: {', '.join(missed) or 'none'}")
    work = work_checksum("agreement", options.ranks, pages, rounds, sorted(metrics))
    return Report("bench agreement", not missed, metrics, rows, work)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("agreement")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="times that ranks agree (400)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes that agree (4)")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: it must be 2 or more")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it must be 1 or more")
    return options


def _row(metric: str, name: str, samples: list[float], found: Rounds, pages: int, spin: float) -> dict[str, JsonValue]:
    out: dict[str, JsonValue] = {
        "metric": metric,
        "what": WHAT[name].format(pages=pages),
        "unit": "us",
        "median": round(median(samples), 1),
        "p99": round(p99(samples), 1),
        "samples": len(samples),
        "spin_us": round(spin, 1),
    }
    if name == "admit":
        bound = median(found["all_reduce"]) + BEYOND_US
        out |= {
            "limit": f"all_reduce + {BEYOND_US:.0f}",
            "bound": round(bound, 1),
            "reached": median(samples) <= bound,
        }
    return out
