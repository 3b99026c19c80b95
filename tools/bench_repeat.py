"""Runs a bench case in pairs: do the intervals of two runs of the same thing overlap?

Must not know any case.

    python -m tools.bench_repeat CASE [--pairs N] [--keep FOLDER] [OPTIONS OF THE CASE]

Each run is a process of its own.  Said are, for each metric that has an interval, in how many pairs the two have a
value in common, and that share over all of them: exit code 1 where it is below 19 of 20.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvkeep.benching.results import Results, read_results

SHARE_MIN = 0.95
PAIRS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_repeat",
        description="Do the intervals of two runs overlap? What is not listed here is handed to the case.",
        allow_abbrev=False,
    )
    parser.add_argument("case", metavar="CASE", help="as of `kvkeep bench`")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs of runs ({PAIRS})")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep results there; runs that are there count")
    options, rest = parser.parse_known_args(arguments)
    with _folder(options.keep) as folder:
        pairs = [
            (_run(options.case, rest, folder / f"{number}a.json"), _run(options.case, rest, folder / f"{number}b.json"))
            for number in range(options.pairs)
        ]
    found = overlaps(pairs)
    for name, (agree, of) in sorted(found.items(), key=lambda entry: entry[1][0] / entry[1][1]):
        print(f"{name:<40}{agree:>4} of {of}")
    agree, of = (sum(count[at] for count in found.values()) for at in (0, 1))
    print(f"{agree} of {of} pairs of intervals overlap: {agree / of if of else 0:.1%}")
    return int(not of or agree / of < SHARE_MIN)


def overlaps(pairs: Sequence[tuple[Results, Results]]) -> dict[str, tuple[int, int]]:
    """By metric, in how many pairs the intervals overlap, and in how many both have one."""
    out: dict[str, tuple[int, int]] = {}
    for first, second in pairs:
        for name, metric in first.metrics.items():
            one, other = metric.interval, second.metrics[name].interval if name in second.metrics else None
            if one is None or other is None:
                continue
            agree, of = out.get(name, (0, 0))
            out[name] = agree + (one[0] <= other[1] and other[0] <= one[1]), of + 1
    return out


def _run(case: str, words: Sequence[str], file: Path) -> Results:
    if not file.exists():
        print(f"{file.stem}: kvkeep bench {' '.join([case, *words])}", flush=True)
        command = [sys.executable, "-m", "kvkeep.cli", "bench", case, *words, "--json", str(file)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return read_results(file)


@contextmanager
def _folder(said: Path | None) -> Iterator[Path]:
    if said is not None:
        said.mkdir(exist_ok=True)
        yield said
        return
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
