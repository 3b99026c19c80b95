"""kvkeep bench transfer: copies through the host backend against plain memcpy of the same run; the manager's own cost;
the simulator's speed.

Must not know how a case measures what it measures.

    kvkeep bench transfer [--smoke] [--rounds N] [--threads N] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from bench import _copies as cases
from bench import _host_hits as host_hits
from bench import _simulating as simulating
from bench._measure import SPIN_QUIET_US, Case, Measured, case_parser, measure, row, table
from kvkeep.benching import median, summary
from kvkeep.benching.record import work_checksum
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.transfer.plan import Cause

MIB = 2**20
FLOOR = "floor_memcpy_gbps"
CHUNKS_MIB = (0.25, 1, 4, 16, 64)
WHOLE_PAGES_RATIO = 0.85
PIECES_RATIO = 0.75
RATES = {
    "h2d_gbps": ("pages of 16 MiB in one piece, to the model's pool", WHOLE_PAGES_RATIO),
    "d2h_gbps": ("the same, to host memory", WHOLE_PAGES_RATIO),
    "both_gbps": ("both directions at once, together", None),
    "pieces_h2d_gbps": ("pages of 64 pieces of 256 KiB, to the model's pool", PIECES_RATIO),
    "pieces_d2h_gbps": ("the same, to host memory", PIECES_RATIO),
    "h2d_beside_python_gbps": ("pages of one piece while another thread holds the interpreter", None),
    "pieces_h2d_beside_python_gbps": ("pages of 64 pieces, the same", None),
}
MANAGER = {
    "manager_us_per_page_64": (64, 3.0),
    "manager_us_per_page_1000": (1000, 0.3),
    "manager_us_plan_of_one": (1, 100.0),
}


ADMISSIONS = {"admit_cpu_hit_us_1000": (1000, 150.0)}
DEMOTIONS = {"demote_us_per_run_1000": 1000}

#: 10,000 seeds of 200 operations in 6 minutes.
SIM_OPS_PER_S = 10_000 * 200 / 360
SIMULATIONS = {"sim_ops_per_s": (False, None), "sim_ops_per_s_checked": (True, SIM_OPS_PER_S)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: rounds of each case, copies of whole pools a round, pages a pool, plans a round; rounds of
    the simulator, seeds a round."""

    rounds: int
    copies: int
    pages: int
    plans: int
    sim_rounds: int
    seeds: int


FULL = Sizes(rounds=7, copies=3, pages=32, plans=100, sim_rounds=3, seeds=200)
SMOKE = Sizes(rounds=1, copies=1, pages=4, plans=20, sim_rounds=1, seeds=4)


def run(arguments: list[str]) -> Report:
    """Measure everything once, print the table, return the report."""
    options = _parse(arguments)
    sizes = SMOKE if options.smoke else FULL
    submits: dict[str, dict[str, list[float]]] = {name: {} for name in MANAGER}
    every = [*_rate_cases(sizes, options.threads), *_manager_cases(sizes, submits), *_admission_cases(sizes)]
    measured = measure(every, options.rounds or sizes.rounds)
    per_cpu_s: dict[str, list[float]] = {name: [] for name in SIMULATIONS}
    simulated = measure(
        list(_simulations(sizes, per_cpu_s)), sizes.sim_rounds
    )  # its processes would evict the pools above
    plain = [entry for name, entry in measured.items() if name.startswith("memcpy")]
    floor = max(plain, key=lambda entry: entry.median)
    rows = [_rate_row(FLOOR, f"the best of plain memcpy: {floor.case.what}", floor, None)]
    rows += [_rate_row(entry.case.name, entry.case.what, entry, None) for entry in plain]
    for name, (what, ratio) in RATES.items():
        rows.append(_rate_row(name, what, measured[name], None if ratio is None else (ratio, floor)))
    rows += [row(measured[name], measured) for name in (*MANAGER, *ADMISSIONS, *DEMOTIONS)]
    rows += _submit_rows(submits)
    rows += [_simulation_row(entry, per_cpu_s[name]) for name, entry in simulated.items()]
    metrics = {name: entry.metric() for name, entry in measured.items() if name in (*MANAGER, *ADMISSIONS, *DEMOTIONS)}
    metrics |= {name: measured[name].metric(2) for name in RATES}
    metrics[FLOOR] = floor.metric(2)
    metrics["pieces_gbps"] = min(metrics["pieces_h2d_gbps"], metrics["pieces_d2h_gbps"], key=lambda m: m.value or 0.0)
    metrics |= {name: entry.metric(2) for name, entry in simulated.items()}
    metrics["threads"] = Metric(options.threads, "threads")
    metrics["spin_us"] = summary([round(spin, 2) for entry in measured.values() for spin in entry.spins], "us")
    for line in table(rows):
        print(line)
    missed = [str(entry["metric"]) for entry in rows if entry.get("reached") is False]
    print(f"spin {metrics['spin_us'].value:.0f} us; limits missed: {', '.join(missed) or 'none'}")
    # Every copy is checked where it is made: what the same sizes copy is the same.
    work = work_checksum("transfer", asdict(sizes), options.threads, sorted(measured), sorted(simulated))
    return Report("bench transfer", not missed, metrics, rows, work)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("transfer")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="times that every case is run (7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="copying threads, plain memcpy's too (2)")
    options = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: it must be 1 or more")
    return options


def _rate_cases(sizes: Sizes, threads: int) -> Iterator[Case]:
    whole = cases.Pools(sizes.pages, layer_major=False)
    pieces = cases.Pools(sizes.pages, layer_major=True)
    for chunk in CHUNKS_MIB:
        sample = cases.plain_memcpy(whole, int(chunk * MIB), threads, sizes.copies)
        yield Case(f"memcpy_{chunk:g}_mib_gbps", f"{threads} threads, {chunk:g} MiB a call", sample, unit="GB/s")
    for name, (what, _) in RATES.items():
        pools = pieces if name.startswith("pieces") else whole
        causes: tuple[Cause, ...] = ("promote", "demote")
        if "both" not in name:
            causes = ("promote",) if "h2d" in name else ("demote",)
        sample = cases.copies(pools, causes, threads, sizes.copies)
        yield Case(name, what, cases.beside_python(sample) if "beside" in name else sample, unit="GB/s")


def _manager_cases(sizes: Sizes, submits: dict[str, dict[str, list[float]]]) -> Iterator[Case]:
    for name, (pages, limit) in MANAGER.items():
        sample = cases.manager(pages, sizes.plans, submits[name])
        what = f"plan, submit, start and end of a load of {pages} pages without bytes"
        if pages == 1:
            yield Case(name, what, sample, limit)
        else:
            yield Case(name, f"{what}, a page", _per_page(sample, pages), limit)


def _admission_cases(sizes: Sizes) -> Iterator[Case]:
    for name, (pages, limit) in ADMISSIONS.items():
        what = f"admit a prompt whose {pages} pages are in host memory, into a pool with room: time under the lock"
        yield Case(name, what, host_hits.admissions(pages, max(sizes.plans // 5, 2)), limit)
    for name, runs in DEMOTIONS.items():
        what = f"admit a prompt for which {runs} chains of a page go down: time under the lock, a chain"
        yield Case(name, what, _per_page(host_hits.demotions(runs, max(sizes.plans // 25, 1)), runs))


def _simulations(sizes: Sizes, per_cpu_s: dict[str, list[float]]) -> Iterator[Case]:
    for name, (checked, _) in SIMULATIONS.items():
        what = f"simulated operations, invariants {'checked after each' if checked else 'looked at in the end only'}"
        sample = simulating.operations(sizes.seeds, checked=checked, per_cpu_s=per_cpu_s[name])
        yield Case(name, f"{what}: {simulating.PROCESSES} processes together", sample, unit="ops/s")


def _per_page(sample: cases.Sample, pages: int) -> cases.Sample:
    return lambda: [us / pages for us in sample()]


def _rate_row(name: str, what: str, entry: Measured, held: tuple[float, Measured] | None) -> dict[str, JsonValue]:
    """More is better, so a row has its slowest sample instead of a p99."""
    out: dict[str, JsonValue] = {
        "metric": name,
        "what": what,
        "unit": entry.case.unit,
        "median": round(entry.median, 2),
        "slowest": round(min(entry.samples), 2),
        "samples": len(entry.samples),
        "spin_us": round(entry.spin, 1),
    }
    if held is not None:
        ratio, floor = held
        bound = ratio * floor.median
        out |= {
            "limit": f"{ratio} x {FLOOR}",
            "bound": round(bound, 2),
            "of_floor": round(entry.median / floor.median, 3),
            "reached": entry.median >= bound,
        }
    return out


def _simulation_row(entry: Measured, per_cpu_s: list[float]) -> dict[str, JsonValue]:
    """A limit of a rate: a slow moment of the machine lowers it, as it raises one of a time."""
    out = _rate_row(entry.case.name, entry.case.what, entry, None)
    out["ops_per_cpu_s"] = round(median(per_cpu_s), 2)
    _, limit = SIMULATIONS[entry.case.name]
    if limit is not None:
        bound = limit / max(1.0, entry.spin / SPIN_QUIET_US)
        out |= {"limit": round(limit), "bound": round(bound), "reached": entry.median >= bound}
    return out


def _submit_rows(submits: dict[str, dict[str, list[float]]]) -> Iterator[dict[str, JsonValue]]:
    for name, parts in submits.items():
        pages = MANAGER[name][0]
        yield {
            "metric": f"submit_us_{pages}",
            "what": f"plan and submit alone, {pages} pages: what a cache does under its lock",
            "unit": "us",
            "median": round(median(parts["submit"]), 2),
            "samples": len(parts["submit"]),
        }
