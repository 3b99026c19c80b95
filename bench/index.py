"""kvkeep bench index: names, match, seal, allocation and whole requests, against their floors and limits.

Must not know how a case measures what it measures.

    kvkeep bench index [--smoke] [--rounds N] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from bench import _cases as cases
from bench._eviction import ManyRuns
from bench._measure import SPIN_QUIET_US, Case, Measured, case_parser, measure, row, table
from bench._requests import Requests, bytes_per_page_runs, bytes_per_page_w1, resident_bytes_per_page_w1
from bench._workload import Workload, agent_workload
from kvkeep.benching import median, p99, summary
from kvkeep.benching.record import work_checksum
from kvkeep.report import JsonValue, Metric, Report

BYTES_PER_PAGE_MAX = 640.0
CAPACITIES = {"4m": (4_000_000, 120.0), "1m": (1_000_000, 150.0), "256k": (256_000, 200.0)}
ALLOCATION_LIMITS_US = {64: {1: 2.0, 8: 0.9, 64: 0.2}, 3: {1: 3.0, 8: 3.5, 64: 2.5}}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: rounds of each case, samples a round, pages of the full pools, sessions of W1."""

    rounds: int
    times: int
    pool_pages: int
    sessions: int
    turns: int


FULL = Sizes(rounds=7, times=24, pool_pages=32_768, sessions=64, turns=30)
SMOKE = Sizes(rounds=1, times=4, pool_pages=2_048, sessions=8, turns=4)


def run(arguments: list[str]) -> Report:
    """Measure everything once, print the table, return the report."""
    options = _parse(arguments)
    sizes = SMOKE if options.smoke else FULL
    rounds = options.rounds or sizes.rounds
    workload = agent_workload(sessions=sizes.sessions, turns=sizes.turns)
    requests = {name: Requests(workload, tokens) for name, (tokens, _) in CAPACITIES.items()}
    every = [*_index_cases(sizes), *_allocation_cases(sizes), *_order_cases(sizes), *_request_cases(requests)]
    measured = measure(every, rounds)
    rows = [row(entry, measured) for entry in measured.values()]
    w1_nbytes = bytes_per_page_w1(sizes.pool_pages)
    rows += [*_part_rows(requests), *_memory_rows(sizes.pool_pages, w1_nbytes)]
    metrics = {name: entry.metric() for name, entry in measured.items()}
    metrics["spin_us"] = _spin(measured)
    metrics["bytes_per_page"] = Metric(round(w1_nbytes, 1), "bytes")
    for line in table(rows):
        print(line)
    missed = [str(entry["metric"]) for entry in rows if entry.get("reached") is False]
    print(f"spin {metrics['spin_us'].value:.0f} us ({SPIN_QUIET_US:.0f} when quiet)")
    print(f"limits missed: {', '.join(missed) or 'none'}")
    for fact in _request_facts(requests, workload):
        print(f"{fact['metric']}: matched {fact['matched_share']} of prompt tokens, checksum {fact['checksum']}")
        rows.append(fact)
    work = work_checksum(*(str(row["checksum"]) for row in rows if "checksum" in row))
    return Report("bench index", not missed, metrics, rows, work)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("index")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="times that every case is run (7)")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it must be 1 or more")
    return options


def _index_cases(sizes: Sizes) -> Iterator[Case]:
    n = sizes.times
    one_run, rotation = cases.Chains(1, 1000), cases.Chains(64, 1000)
    branched, long_run = cases.Chains(1, 1000, branches=30), cases.Chains(1, 8000)
    yield Case("floor_xxh3_us_1000", "a bare loop of chained xxh3_64 over 1,000 pages", cases.xxh3_floor(1000, n))
    yield Case(
        "names_us_1000",
        "names of 1,000 new pages from an int32 array, its ids checked",
        cases.names(1000, n),
        floor="floor_xxh3_us_1000",
        floor_ratio=1.5,
    )
    yield Case("floor_memcmp_us_1000", "libc memcmp of 512,000 bytes", one_run.memcmp(n))
    yield Case("match_us_1000_one_run", "match, verify and pin 1,000 pages in one run", one_run.match(n), 60.0)
    yield Case("match_us_1000_rotation", "the same, 64 chains in rotation", rotation.match(n), 150.0)
    yield Case("match_us_1000_30_branches", "the same, across 30 branch points", branched.match(n), 200.0)
    yield Case("admit_us_1000_one_run", "a whole admission, 1,000 of 1,001 pages cached", cases.admit(1000, n))
    yield Case("floor_memcmp_us_8000", "libc memcmp of the same 4,096,000 bytes", long_run.memcmp(n))
    yield Case(
        "match_us_8000",
        "match, verify and pin 8,000 pages in one run",
        long_run.match(n),
        floor="floor_memcmp_us_8000",
        floor_ratio=1.5,
    )
    yield Case("seal_us_per_page", "seal and insert 1,000 pages, names given, a page", cases.seal_chain(1000, n), 0.2)
    yield Case(
        "seal_us_per_page_fresh_memory",
        "the same into an empty pool: the system hands over its memory meanwhile",
        cases.seal_chain(1000, n, fresh_memory=True),
    )
    for cached, whose in ((True, "that the index has too"), (False, "of its own")):
        name = f"release_oldest_us_1000_{'cached' if cached else 'own'}"
        yield Case(name, f"a window slides past 1,000 pages {whose}", cases.release_oldest(1000, n, cached), 150.0)
    yield Case("seal_us_one_page", "seal and insert one page behind its run", cases.seal_one_page(8, 1000, n), 5.0)


def _allocation_cases(sizes: Sizes) -> Iterator[Case]:
    for run_pages, suffix in ((64, ""), (3, "_short_runs")):
        pool = cases.FullPool(sizes.pool_pages, run_pages)
        for count, limit in ALLOCATION_LIMITS_US[run_pages].items():
            times = sizes.pool_pages // 4 // max(count, 16)
            what = f"room for {count} in a pool full of cached runs of {run_pages}, a page"
            yield Case(f"alloc_us_per_page_{count}{suffix}", what, pool.take(count, times), limit)
        yield Case(f"extend_us_one_page{suffix}", f"extend by a page, runs of {run_pages}", pool.extend(1, sizes.times))


def _order_cases(sizes: Sizes) -> Iterator[Case]:
    runs = sizes.pool_pages * 10_000 // 32_768
    for name, limit in (("lru", None), ("rhythm", 3.0)):
        pool = ManyRuns(sizes.pool_pages, runs, name)
        what = (
            f"{name}: a page that leaves with 7 others, {sizes.pool_pages:,} pages in {runs:,} runs, one used a batch"
        )
        yield Case(f"{name}_evict_us_per_page", what, pool.sample("evict", 32 * sizes.times), limit)
        if limit is not None:
            yield Case(f"{name}_learn_us", "what is learned of a request", pool.sample("learn", 32 * sizes.times), 5.0)


def _request_cases(requests: dict[str, Requests]) -> Iterator[Case]:
    for name, (_, limit) in CAPACITIES.items():
        what = f"a whole request of W1 (admit, extend, finish) in a pool of {name.upper()} tokens"
        yield Case(f"w1_request_us_{name}", what, requests[name].sample, limit)


def _part_rows(requests: dict[str, Requests]) -> Iterator[dict[str, JsonValue]]:
    for name, entry in requests.items():
        for part, samples in entry.parts.items():
            yield {
                "metric": f"w1_{part}_us_{name}",
                "what": f"{part} alone, the last pass",
                "unit": "us",
                "median": round(median(samples), 2),
                "p99": round(p99(samples), 2),
                "samples": len(samples),
            }


def _request_facts(requests: dict[str, Requests], workload: Workload) -> Iterator[dict[str, JsonValue]]:
    ceiling = workload.ceiling(cases.PAGE)
    for name, entry in requests.items():
        yield {
            "metric": f"w1_matched_{name}",
            "matched_share": round(entry.matched_share, 5),
            "ceiling": round(ceiling, 5),
            "checksum": cases.checksum(entry.matched),
        }


def _memory_rows(pages: int, w1: float) -> list[dict[str, JsonValue]]:
    """The first row is the metric: what W1 leaves; the others say what it depends on."""
    rows = [
        _bytes_row("", f"traced, a pool of {pages} pages that W1 has overfilled, 512 bytes of token ids included", w1)
    ]
    rows[0] |= {"limit": BYTES_PER_PAGE_MAX, "bound": BYTES_PER_PAGE_MAX, "reached": w1 <= BYTES_PER_PAGE_MAX}
    for run_pages in (1024, 64, 8, 3):
        what = f"the same, filled by chains of {run_pages} that share nothing"
        rows.append(_bytes_row(f"_runs_of_{run_pages}", what, bytes_per_page_runs(pages, run_pages)))
    resident, trimmed = resident_bytes_per_page_w1(pages)
    rows.append(_bytes_row("_resident", "W1 again, by the growth of a process of its own", resident))
    rows.append(_bytes_row("_resident_trimmed", "the same, after malloc_trim gave back what is free", trimmed))
    return rows


def _bytes_row(suffix: str, what: str, found: float) -> dict[str, JsonValue]:
    return {"metric": f"bytes_per_page{suffix}", "what": what, "unit": "bytes", "median": round(found, 1)}


def _spin(measured: dict[str, Measured]) -> Metric:
    return summary([round(spin, 2) for entry in measured.values() for spin in entry.spins], "us")
