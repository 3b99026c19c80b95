"""The tables of bench figures in the documents, made from bench/results/*.json: none of them is typed.

Must not know what a figure means.

    python -m tools.bench_tables [--check]

A table stands between two marks, and whatever is between them is made anew:

    <!-- bench CASE: metric metric ... -->      the metrics of bench/results/CASE.json, in this order; none: all of them
    <!-- end -->

--check: writes nothing, and says which documents are behind the results; exit code 1 if one is.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvkeep.benching.results import SMOKE, Results, Unusable, read_results
from kvkeep.errors import BadInput
from kvkeep.report import JsonValue, Metric

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "bench/README.md")
RESULTS = "bench/results"
BLOCK = re.compile(r"(<!-- bench (?P<case>\w+)(?:: (?P<names>[\w ]+))? -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_tables", description="Tables of bench figures.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a document is behind")
    options = parser.parse_args(arguments)
    behind = 0
    for name in DOCUMENTS:
        path = root / name
        text = path.read_text(encoding="utf-8")
        made = renewed(text, root / RESULTS)
        if made == text:
            continue
        behind += 1
        if options.check:
            print(f"{name}: its tables are not those of {RESULTS}: python -m tools.bench_tables")
        else:
            path.write_text(made, encoding="utf-8")
            print(f"{name}: renewed")
    return int(options.check and behind > 0)


def renewed(text: str, folder: Path) -> str:
    """A document with its tables made anew from the results in `folder`."""

    def block(found: "re.Match[str]") -> str:
        names = (found["names"] or "").split()
        return found[1] + "".join(f"{line}\n" for line in lines(found["case"], names, folder)) + found[5]

    return BLOCK.sub(block, text)


def lines(case: str, names: Sequence[str], folder: Path) -> Iterator[str]:
    """The table of a case, or the line that says why there is none."""
    path = folder / f"{case}.json"
    try:
        found = read_results(path)
    except BadInput:
        yield f"Not measured yet: `kvkeep bench {case} --json {RESULTS}/{case}.json`."
        return
    except Unusable as reason:
        yield f"There is no table: {str(reason).replace(str(path), path.name)}."
        return
    limits = {str(row["metric"]): row for row in found.rows if "metric" in row and "limit" in row}
    yield "| figure | value | 95 % | p99 | samples | limit |"
    yield "|---|---|---|---|---|---|"
    for name in names or found.metrics:
        metric = found.metrics.get(name)
        absent = f"| `{name}` | not in this result | | | | |"
        yield absent if metric is None else _row(name, metric, limits.get(name, {}))
    yield ""
    yield _source(case, found)


def _row(name: str, metric: Metric, limit: Mapping[str, JsonValue]) -> str:
    value = "none" if metric.value is None else f"{_number(metric.value)} {metric.unit}"
    interval = "" if metric.interval is None else " to ".join(map(_number, metric.interval))
    tail = "" if metric.p99 is None else _number(metric.p99)
    samples = "" if metric.samples is None else f"{metric.samples:,}"
    said = str(limit.get("limit", ""))
    if said and limit.get("reached") is False:
        said += ", missed"
    return f"| `{name}` | {value} | {interval} | {tail} | {samples} | {said} |"


def _source(case: str, found: Results) -> str:
    """What was run, where, when and how quiet it was."""
    words = " ".join(str(word) for word in found.record.get("arguments", ()) if word not in SMOKE)
    command = " ".join(f"kvkeep bench {case} {words}".split())
    machine = found.machine
    parts = [
        f"`{command} --json {RESULTS}/{case}.json`",
        f"commit {(found.commit or 'unknown')[:12]}",
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB",
    ]
    if found.spin_us is not None:
        parts.append(f"spin {found.spin_us:.0f} us")
    noise = found.record.get("noise")
    if isinstance(noise, dict) and noise.get("noisy"):
        parts.append("other programs kept the machine busy")
    if found.smoke:
        parts.append("a smoke run: its figures mean little")
    return "; ".join(parts) + "."


def _number(value: float) -> str:
    """Four digits, as far as there are as many."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
