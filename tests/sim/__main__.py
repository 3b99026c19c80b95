"""`python -m tests.sim`: many seeds of the simulator, in several processes; says how fast, and how to replay a failure.

Must not know what a seed does.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.sim.simulator import OPERATIONS, run_many


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Runs seeds of the simulated cache.")
    parser.add_argument("--first", type=int, default=0, help="first seed (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (default %(default)s)")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of each seed (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--unchecked", action="store_true", help="look at nothing but the end: for the speed alone")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    tally = run_many(options.first, options.seeds, options.jobs, options.operations, checked=not options.unchecked)
    took_s = time.monotonic() - began
    for failure in tally.failures[:1]:
        print(failure)
    rates = {"ops_per_s": tally.operations / took_s, "ops_per_cpu_s": tally.operations / tally.cpu_s}
    print(
        f"{tally.seeds} seeds, {tally.operations} operations in {took_s:.1f} s: {rates['ops_per_s']:.0f} a second, "
        f"{rates['ops_per_cpu_s']:.0f} a second and core, {'unchecked' if options.unchecked else 'checked'}; "
        f"{len(tally.failures)} seeds failed"
    )
    print(", ".join(f"{what} {count}" for what, count in tally.seen.most_common()))
    if options.json is not None:
        numbers = {"seeds": tally.seeds, "operations": tally.operations, "failures": len(tally.failures), **rates}
        options.json.write_text(json.dumps({**numbers, "seen": dict(tally.seen)}, indent=1) + "\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
