"""The parts of the GPU check: their sizes, their limits, and how what they measured becomes rows and a verdict.

Must not know how a part measures, nor what kind of machine it runs on.

A part that fails is a row that says why, and the others go on: a machine with a device is not to be had every day.
"""

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench import _gpu_children as children
from bench._agent_figures import BOTH, OFF
from bench._gpu_copies import open_pools, pinned_pool, pinning, rate, round_trips
from bench._gpu_machine import Machine, PlainCopies
from bench._gpu_path import control, host_hits, walk
from bench._gpu_sizes import KIB, MIB, NAMES, Sizes, layout_of
from bench._measure import SPIN_QUIET_US
from bench._telemetry import with_telemetry
from kvkeep.benching import median, p99, spin_us
from kvkeep.errors import BadInput
from kvkeep.report import JsonValue, Metric, Report
from kvkeep.telemetry.energy import EnergyReading
from kvkeep.telemetry.machine import MachineTelemetry
from kvkeep.transfer.cuda_api import CudaFault
from kvkeep.transfer.cuda_ways import WAYS
from kvkeep.transfer.plan import Cause

ONE_DIRECTION = 0.90
BOTH_DIRECTIONS = 0.85
ADMIT_LOCK_US = 150.0

DIRECTIONS: dict[str, tuple[Cause, ...]] = {"h2d": ("promote",), "d2h": ("demote",), "both": ("promote", "demote")}
Row = dict[str, JsonValue]


@dataclass(frozen=True)
class Run:
    """What a part is given.   deadline: of `time.monotonic`.   energy: of the device so far; None: not watched."""

    machine: Machine
    sizes: Sizes
    deadline: float
    energy: Callable[[], EnergyReading] | None = None


def check(run: Run, skip: Collection[str] = ()) -> Report:
    """Runs every part that begins before the deadline; the table is printed as it grows.   skip: parts, by name."""
    rows: list[Row] = []
    device = run.machine.describe()
    print(", ".join(f"{key} {value}" for key, value in device.items()))
    print(f"{'metric':<40}{'value':>12}{'bound':>12}  {'unit':<8}{'of floor':>9}  reached")
    for part in PARTS:
        skipped: Row = {"metric": name_of(part), "part": name_of(part), "note": "skipped: --skip"}
        for row in [skipped] if name_of(part) in skip else _guarded(part, run):
            rows.append(row)
            print(line(row), flush=True)
    missed = [str(row["metric"]) for row in rows if row.get("reached") is False]
    print(f"limits missed: {', '.join(missed) or 'none'}")
    metrics = {
        str(row["metric"]): Metric(value, str(row["unit"]))
        for row in rows
        if isinstance(value := row.get("value"), int | float)
    }
    return Report("bench gpu_check", not missed, metrics, [{"metric": "machine", **device}, *rows])


def watched(machine: Machine, sizes: Sizes, deadline: float, skip: Collection[str] = ()) -> Report:
    """`check`, and beside it the telemetry of the device and of the host."""
    with MachineTelemetry(device=machine.nvml_device) as telemetry:
        report = check(Run(machine, sizes, deadline, telemetry.energy), skip)
    report = with_telemetry(report, telemetry)
    print(line(dict(report.rows[-1])))
    return report


def name_of(part: "Part") -> str:
    """What a part is called, in rows and by --skip."""
    return part.__name__.strip("_")


def line(row: Row) -> str:
    """A row of the table; what has no number says its words."""
    value, bound, ratio = (_cell(row.get(key)) for key in ("value", "bound", "of_floor"))
    reached = "" if "reached" not in row else "yes" if row["reached"] else "NO"
    text = f"{row['metric']!s:<40}{value:>12}{bound:>12}  {row.get('unit', '')!s:<8}{ratio:>9}  {reached:<3}"
    return f"{text}  {row.get('note', '')}".rstrip()


def _cell(value: JsonValue) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value) if isinstance(value, int) else ""


def _guarded(part: "Part", run: Run) -> Iterator[Row]:
    """The part's rows, when it began and how long it took; one that says what went wrong where it did."""
    name = name_of(part)
    began, began_s = time.monotonic(), time.perf_counter()
    if began >= run.deadline:
        yield {"metric": name, "part": name, "note": "not run: the time was over", "reached": False}
        return
    try:
        for row in part(run):
            yield {**row, "part": name}
    except Exception as error:  # whatever it is, the parts behind it are still worth the machine's time
        traceback.print_exc()
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield {"metric": name, "part": name, "note": said, "reached": False}
    took: Row = {"metric": f"{name}_s", "part": name, "value": round(time.monotonic() - began, 2), "unit": "s"}
    yield {**took, "began_s": round(began_s, 6)}  # on the clock of the telemetry's series


# ---------------------------------------------------------------------- the parts


def _admit_path(run: Run) -> Iterator[Row]:
    """No call on the admit path blocks its caller; that is worth something only if a blocking one would be seen."""
    by_torch, by_api = control(run.machine)
    yield {
        "metric": "control_seen",
        "what": "blocking calls that were made on purpose, by torch and by the api, and were seen",
        "value": bool(by_torch) + bool(by_api),
        "unit": "calls",
        "bound": 2,
        "reached": bool(by_torch and by_api),
        "seen": [*by_torch, *by_api],
    }
    walked = walk(run.machine, run.sizes.path_layout, run.sizes.path)
    yield {
        "metric": "blocking_calls",
        "what": "calls of CUDA that block, inside admit, extend, seal, suspend, poll, start, finish, abort",
        "value": len(walked.blocking),
        "unit": "calls",
        "bound": 0,
        "reached": not walked.blocking,
        "blocking": walked.blocking,
        "seen": walked.cuda,
        "note": ", ".join(walked.blocking),
    }
    yield {
        "metric": "calls_that_waited",
        "what": "calls that came back only when the work queued before them was done, while the model's stream is busy",
        "value": len(walked.waited),
        "unit": "calls",
        "bound": 0,
        "reached": not walked.waited and walked.outlasted,
        "waited": walked.waited,
        "note": ", ".join(walked.waited) or ("" if walked.outlasted else "the busy stream was done before the end"),
    }
    yield {"metric": "longest_call_us", "value": round(walked.longest_us, 1), "unit": "us", "note": walked.longest}


def _bytes(run: Run) -> Iterator[Row]:
    """Pages that go to host memory and come back are the same bits."""
    layout, pages = run.sizes.trip
    for trip in round_trips(run.machine, layout, pages):
        row: Row = {
            "metric": f"round_trip_{trip.kind}_{trip.way}_{trip.pin.replace(', ', '_').replace(' ', '_')}",
            "what": f"{trip.pages} random pages of {layout.page_nbytes} bytes, {trip.kind}, by {trip.way}, {trip.pin}",
            "value": trip.different,
            "unit": "pages",
            "bound": 0,
            "reached": not trip.different,
        }
        yield row | ({} if trip.error is None else {"note": trip.error})


def _rates(run: Run) -> Iterator[Row]:
    """Copies of whole pools against the plain copies of the same rounds."""
    samples: dict[str, list[float]] = {}
    with ExitStack() as opened:
        cases, rows = _rate_cases(run.machine, run.sizes, opened)
        yield from rows
        for name, sample in cases.items():
            sample()  # the first one does not count
            samples[name] = []
        for _ in range(run.sizes.rounds):
            for name, sample in cases.items():
                samples[name] += sample()
    yield from _rate_rows(samples)


def _rate_cases(
    machine: Machine, sizes: Sizes, opened: ExitStack
) -> tuple[dict[str, Callable[[], list[float]]], list[Row]]:
    """What is measured, by its metric; and rows of ways that are not here, or were chosen."""
    cases: dict[str, Callable[[], list[float]]] = {}
    rows: list[Row] = []
    for name in DIRECTIONS:
        plain = PlainCopies(
            machine, sizes.rate_nbytes, sizes.block_nbytes, ("h2d", "d2h") if name == "both" else (name,)
        )
        opened.callback(plain.close)
        cases[f"floor_{name}_gbps"] = _one(plain)
    for page_nbytes in sizes.page_nbytes:
        layout, pages = layout_of(page_nbytes // 64), sizes.rate_nbytes // page_nbytes
        pools = open_pools(machine, layout, pages, "page-major", None, pinned_pool(machine, layout, pages))
        opened.callback(pools.close)
        for name, causes in DIRECTIONS.items():
            cases[f"{name}_{page_nbytes // MIB}_mib_gbps"] = rate(pools, causes, 1)
    for piece_nbytes in sizes.piece_nbytes:
        layout, pages = layout_of(piece_nbytes), max(1, sizes.rate_nbytes // (64 * piece_nbytes))
        for way in (None, *WAYS):
            name = f"pieces_{piece_nbytes // KIB}_kib"
            pool = pinned_pool(machine, layout, pages)
            try:
                pools = open_pools(machine, layout, pages, "layer-major-split", way, pool)
            except CudaFault as fault:
                rows.append({"metric": f"{name}_{way}", "note": f"not here: {fault}"})
                pool.close()
                continue
            if way is None:
                chosen = getattr(pools.backend, "ways", {})
                rows += [{"metric": f"{name}_{direction}_chosen", "note": one} for direction, one in chosen.items()]
                pools.close()
                continue
            opened.callback(pools.close)
            for direction in ("h2d", "d2h"):
                sample = rate(pools, DIRECTIONS[direction], 1)
                try:
                    sample()
                except CudaFault as fault:
                    rows.append({"metric": f"{name}_{way}_{direction}", "note": f"not here: {fault}"})
                else:
                    cases[f"{name}_{way}_{direction}_gbps"] = sample
    return cases, rows


def _one(plain: PlainCopies) -> Callable[[], list[float]]:
    return lambda: [plain.sample()]


def _rate_rows(samples: dict[str, list[float]]) -> Iterator[Row]:
    """The floor is the best sample of its direction: what the link can do."""
    peak = {name: max(samples[f"floor_{name}_gbps"]) for name in DIRECTIONS}
    for metric, values in samples.items():
        found = median(values)
        row: Row = {"metric": metric, "value": round(found, 2), "unit": "GB/s", "slowest": round(min(values), 2)}
        direction = next(name for name in DIRECTIONS if f"{name}_" in metric)
        if metric.startswith("floor"):
            yield row | {"value": round(peak[direction], 2), "median": round(found, 2)}
            continue
        row["of_floor"] = round(found / peak[direction], 3)
        if metric.startswith("pieces"):
            yield row
            continue
        ratio = BOTH_DIRECTIONS if direction == "both" else ONE_DIRECTION
        bound = ratio * peak[direction]
        yield row | {"limit": f"{ratio} x floor", "bound": round(bound, 2), "reached": found >= bound}


def _hits(run: Run) -> Iterator[Row]:
    """What an admission takes whose prefix is in host memory."""
    layout, pages, times = run.sizes.hits
    spin = spin_us().value or SPIN_QUIET_US
    hits = host_hits(run.machine, layout, pages, times)
    bound = ADMIT_LOCK_US * max(1.0, spin / SPIN_QUIET_US) * max(1.0, pages / 1000)
    what = f"a prompt whose {pages} pages of {layout.page_nbytes} bytes are in host memory"
    yield {
        **_times("admit_lock_us", f"{what}: time under the lock", hits.lock_us),
        "bound": round(bound, 1),
        "reached": median(hits.lock_us) <= bound,
    }
    yield _times("admit_call_us", f"{what}: the whole call, which queues the copies", hits.call_us)
    yield _times("hit_ready_us", f"{what}: until they may be read", hits.ready_us)
    yield {"metric": "hit_ready_gbps", "value": round(hits.nbytes / median(hits.ready_us) / 1e3, 2), "unit": "GB/s"}
    yield {"metric": "hit_wrong_pages", "value": hits.wrong, "unit": "pages", "bound": 0, "reached": not hits.wrong}


def _times(metric: str, what: str, values: Sequence[float], unit: str = "us", digits: int = 1) -> Row:
    return {
        "metric": metric,
        "what": what,
        "value": round(median(values), digits),
        "p99": round(p99(values), digits),
        "unit": unit,
        "samples": len(values),
    }


def _pinning(run: Run) -> Iterator[Row]:
    """What taking and registering host memory costs."""
    values = [pinning(run.machine, layout_of(256 * KIB), run.sizes.pin_pages)()[0] for _ in range(3)]
    yield {"metric": "pin_s_per_gib", "value": round(median(values), 3), "unit": "s/GiB", "samples": len(values)}


def _device_tests(run: Run) -> Iterator[Row]:
    """The tests that are skipped where there is no device."""
    if not run.sizes.device_tests:
        yield {"metric": "device_tests", "note": "skipped: not part of a small run"}
        return
    found = children.run_tests(min(run.sizes.tests_s, run.deadline - time.monotonic()))
    fine = found.error is None and not found.failed and not found.without_device and found.passed > 0
    yield {
        "metric": "device_tests",
        "value": found.passed,
        "unit": "passed",
        "failed": found.failed,
        "skipped": found.skipped,
        "failures": list(found.failures),
        "reached": fine,
        "note": found.error or f"{found.failed} failed, {found.skipped} skipped {' '.join(found.failures)}".rstrip(),
    }


def _model(run: Run) -> Iterator[Row]:
    """Agent sessions over layers as large as a real model's: what the tiers are worth on this device."""
    try:
        from bench._gpu_model import joules, measure

        found = measure(run.machine.torch_device, run.sizes.model, run.energy)
    except ModuleNotFoundError as error:
        yield {"metric": "model", "note": f"skipped: {error.name} is not installed here (pip install transformers)"}
        return
    sizes, pools = run.sizes.model, found.asked[BOTH].setup
    yield {
        "metric": "model_pool_share",
        "what": f"{found.model}, {sizes.dtype}; {sizes.sessions} sessions, {sizes.turns} turns of {sizes.growth}",
        "value": round(pools.pool_pages / found.pages, 3),
        "unit": "of the working set",
        "pages": found.pages,
        "pool_pages": pools.pool_pages,
        "host_pages": pools.host_pages,
        "page_nbytes": found.page_nbytes,
    }
    for name in NAMES:
        what = "to the first token of a request that is not its session's first"
        yield _times(f"model_ttft_{name}_ms", what, found.later_ttft_ms(name), "ms", digits=2)
    ratio = median(found.later_ttft_ms(OFF)) / median(found.later_ttft_ms(BOTH))
    yield {
        "metric": "model_ttft_ratio",
        "what": "without a cache over both tiers",
        "value": round(ratio, 2),
        "unit": "x",
    }
    for name in NAMES:
        yield {"metric": f"model_{name}_tokens_per_s", "value": round(found.tokens_per_s(name)), "unit": "tokens/s"}
    for name in NAMES[1:]:
        for tier, share in zip(("gpu", "cpu"), found.shares(name), strict=True):
            row: Row = {"metric": f"model_{name}_matched_share_{tier}", "value": round(share, 4), "unit": "of prompts"}
            yield row
    for name in (OFF, BOTH):
        told = list(joules(found.asked[name]))
        known = [value for value, _ in told if value is not None]
        row = {"metric": f"model_{name}_joules_per_1k", "what": "joules of the device over 1,000 prompt tokens"}
        yield (
            row
            | ({"value": round(median(known), 3), "unit": "J"} if known else {})
            | {"note": told[-1][1] if told else "not watched"}
        )
    yield {
        "metric": "model_wrong_positions",
        "what": "positions of hits whose K and V are not the bits that the session's last request left",
        "value": found.wrong,
        "unit": "positions",
        "bound": 0,
        "reached": not found.wrong and found.compared > 0,
        "compared": found.compared,
    }


def _engine(run: Run) -> Iterator[Row]:
    """A small model on the device: the same outputs whatever was kept, and the same bits over the same forwards."""
    kind = run.machine.torch_device.partition(":")[0]
    for name, words in run.sizes.commands.items():
        limit_s = min(run.sizes.commands_s, run.deadline - time.monotonic())
        done = children.run_command([*words.split(), "--device", kind], limit_s)
        row: Row = {"metric": name, "metrics": done.metrics, "what": f"kvkeep {words}"}
        if done.error is None or children.NOT_INSTALLED not in done.error:
            row["reached"] = done.ok  # a machine may lack the engine's packages: that is no verdict
        yield row | ({} if done.error is None else {"note": done.error})


Part = Callable[[Run], Iterator[Row]]
PARTS: tuple[Part, ...] = (_admit_path, _bytes, _rates, _hits, _pinning, _device_tests, _model, _engine)


def chosen(words: str) -> frozenset[str]:
    """The parts that --skip names, with commas between them."""
    names = frozenset(filter(None, words.split(",")))
    known = [name_of(part) for part in PARTS]
    wrong = sorted(names - set(known))
    if wrong:
        raise BadInput(f"--skip {words}: there is no part {wrong[0]!r}; the parts are {', '.join(known)}")
    return names
