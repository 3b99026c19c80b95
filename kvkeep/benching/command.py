"""`kvkeep bench CASE|all`: a case beside its record, or every case that can run here; compared with a baseline.

Must not know what a case measures.

In `all` each case is a process of its own, so that a figure does not depend on which cases ran before it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvkeep.benching.cases import bench_directory, bench_names, left_out, load_case
from kvkeep.benching.compare import Verdict, compare, table
from kvkeep.benching.record import Watch
from kvkeep.benching.results import SMOKE, Results, Unusable, read_all, read_results
from kvkeep.errors import BadInput
from kvkeep.parsing import Parser
from kvkeep.report import INTERRUPTED, JsonValue, Metric, Report, machine

ALL = "all"


def run(case: str, arguments: Sequence[str], baseline: Path | None) -> Report:
    """Runs a case, or all.   baseline: a results file to compare with, or a folder of them.

    Raises `BadInput` for a case or a baseline that is not there, before anything is measured.
    """
    before = _read_baseline(baseline)
    if case == ALL:
        return _run_all(_parse_all(arguments), before)
    found = load_case(case)
    watch = Watch.begin()
    report: Report = found.run(list(arguments))
    report = replace(report, record=watch.record(arguments, report.work))
    return _compared(report, before) if baseline is not None else report


def names() -> list[str]:
    """What can be named: the cases, and `all`."""
    return [*bench_names(bench_directory()), ALL]


# ---------------------------------------------------------------------- against a baseline


def _read_baseline(path: Path | None) -> list[Results]:
    """The results in a file, or in the files of a folder, by case; those that cannot be used are said."""
    if path is None:
        return []
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BadInput(f"--baseline {path}: there is no *.json in that folder; name a results file, or their folder")
    found, skipped = read_all(files)
    for line in skipped:
        print(f"--baseline {line}")
    return [part for one in found for part in _parts(one)]


def _parts(found: Results) -> list[Results]:
    """The result of `bench all` as a result for each case."""
    if found.command != f"bench {ALL}":
        return [found]
    by_case: dict[str, dict[str, Metric]] = {}
    for name, metric in found.metrics.items():
        case, dot, own = name.partition(".")
        if dot:
            by_case.setdefault(case, {})[own] = metric
    records = found.record.get("cases", {})
    return [
        replace(found, command=f"bench {case}", metrics=metrics, record=records.get(case, {}))
        for case, metrics in by_case.items()
    ]


def _compared(report: Report, baseline: Sequence[Results]) -> Report:
    """Says how the report compares with the baseline's result of the same case; the report with that in its record."""
    before = next((one for one in baseline if one.command == report.command), None)
    if before is None:
        print(f"the baseline has no result of {report.command}: nothing is compared")
        return report
    record = dict(report.record or {})
    noise, words = record.get("noise"), record.get("arguments")
    spin = noise.get("spin_us") if isinstance(noise, dict) else None
    found = compare(before.metrics, report.metrics, before.spin_us, float(spin) if spin else None)
    print(f"against {before.path}, commit {(before.commit or 'unknown')[:12]}:")
    for line in table(found):
        print(line)
    cpus = [before.machine.get("cpu"), machine()["cpu"]]
    if cpus[0] != cpus[1]:
        print(f"that was another machine: {cpus[0]}, this is {cpus[1]}")
    if before.smoke != bool(isinstance(words, list) and set(SMOKE) & set(map(str, words))):
        print("one of the two is a smoke run: their figures do not compare")
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count) or "no metric in common")
    record["baseline"] = {"commit": before.commit, "metrics": [one.row() for one in found]}
    return replace(report, record=record)


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True, slots=True)
class Ran:
    """A case that `all` has run.   code: its exit code.   results: what it has written; None: nothing usable."""

    name: str
    code: int
    seconds: float
    results: Results | None

    def fine(self, smoke: bool) -> bool:
        """Whether it measured, and reached its limits where they are judged."""
        return self.results is not None and (self.code == 0 or (smoke and self.code == 1))

    def outcome(self, smoke: bool) -> str:
        """In words."""
        if self.results is None or self.code not in (0, 1):
            return f"failed, exit code {self.code}"
        missed = "ran; the figures of a smoke run are not judged" if smoke else "ran; limits are missed"
        return "ran" if self.code == 0 else missed


def _parse_all(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog=f"kvkeep bench {ALL}",
        allow_abbrev=False,
        description="Every case that can run here, each in a process of its own.",
        epilog="--json FILE writes all results as one object to FILE; --baseline takes such a file, or a folder.",
    )
    parser.add_argument(*SMOKE, action="store_true", dest="smoke", help="smoke runs: seconds each, nothing is judged")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="also write FOLDER/CASE.json for each case")
    parser.add_argument("--only", metavar="CASES", help="these cases only, such as index,agent")
    options = parser.parse_args(list(arguments))
    if options.results is not None and not options.results.is_dir():
        parser.error(f"--results {options.results}: there is no such folder; make it, or name one")
    if options.results is not None and options.smoke:
        parser.error("--results with --smoke: figures of smoke runs mean little; leave one of them out")
    return options


def _chosen(only: str | None) -> list[str]:
    known = bench_names(bench_directory())
    if only is None:
        return known
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise BadInput(f"--only {name}: there is no such case; known: {', '.join(known)}")
    return chosen


def _run_all(options: argparse.Namespace, baseline: Sequence[Results]) -> Report:
    chosen = _chosen(options.only)
    absent = {name: _why_not(name, options.smoke) for name in chosen}
    watch, ran = Watch.begin(), list[tuple[Ran, Report]]()
    interrupted = False
    for name in (name for name in chosen if absent[name] is None):
        print(f"\n--- {name}", flush=True)
        try:
            one = _run_apart(name, options.smoke, options.results)
        except KeyboardInterrupt:
            interrupted = True
            break
        report = Report(f"bench {name}", False, {})
        if one.results is not None:
            report = Report(one.results.command, one.results.ok, one.results.metrics, one.results.rows)
            report = replace(report, record=dict(one.results.record))
            report = _compared(report, baseline) if baseline else report
        ran.append((one, report))
    rows = _summary(ran, options.smoke)
    rows += [{"case": name, "left_out": why} for name, why in absent.items() if why is not None]
    for line in _lines(rows):
        print(line)
    metrics = {f"{one.name}.{key}": metric for one, report in ran for key, metric in report.metrics.items()}
    metrics["seconds"] = Metric(round(sum(one.seconds for one, _ in ran), 1), "s")
    if interrupted:
        metrics[INTERRUPTED] = Metric(1, "bool")
    cases: dict[str, JsonValue] = {one.name: dict(report.record or {}) for one, report in ran}
    record = watch.record(SMOKE[:1] if options.smoke else (), None) | {"cases": cases}
    ok = not interrupted and all(one.fine(options.smoke) for one, _ in ran)
    rows += [{"case": one.name, **row} for one, report in ran for row in report.rows]
    return Report(f"bench {ALL}", ok, metrics, rows, record=record)


def _why_not(name: str, smoke: bool) -> str | None:
    """Why a case does not run here; None where it does."""
    try:
        return left_out(load_case(name), smoke)
    except ModuleNotFoundError as error:
        return f"it needs {error.name}, which is not installed"


def _run_apart(name: str, smoke: bool, folder: Path | None) -> Ran:
    """One case in a process of its own; what it prints is seen.   folder: where its file is left, too."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as scratch:
        file = Path(scratch) / f"{name}.json"
        words = ["bench", name, *(SMOKE[:1] if smoke else ()), "--json", str(file)]
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "kvkeep.cli", *words], check=False)
        seconds = time.monotonic() - began
        try:
            found = read_results(file)
        except (BadInput, Unusable):
            return Ran(name, done.returncode, seconds, None)
        if folder is not None and done.returncode in (0, 1):
            shutil.copyfile(file, folder / file.name)
        return Ran(name, done.returncode, seconds, found)


def _summary(ran: Sequence[tuple[Ran, Report]], smoke: bool) -> list[dict[str, JsonValue]]:
    return [
        {"case": one.name, "seconds": round(one.seconds, 1), "exit_code": one.code, "outcome": one.outcome(smoke)}
        for one, _ in ran
    ]


def _lines(summary: Sequence[dict[str, JsonValue]]) -> list[str]:
    out = ["", f"{'case':<16}{'seconds':>8}  outcome"]
    for row in summary:
        outcome = f"left out: {row['left_out']}" if "left_out" in row else row["outcome"]
        out.append(f"{row['case']!s:<16}{row.get('seconds', '')!s:>8}  {outcome}")
    return out
