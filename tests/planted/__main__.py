"""`python -m tests.planted [ID ...]`: plants each bug and shows which ones the suite catches.

Must not know how a bug is planted.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from queue import Queue

from tests.planted.bugs import BUGS, Bug
from tests.planted.nursery import LARGE, VLLM, Nursery
from tests.planted.plant import (
    DoesNotApply,
    Outcome,
    RunTests,
    Verdict,
    check_applies,
    copy_of,
    plant,
    run_tests,
)

#: So many bugs are planted before a nursery, which takes as long to begin as two or three of them, has been of use.
FEW = 6

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: Sequence[str] | None = None, bugs: Sequence[Bug] = BUGS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Do the tests catch each planted bug?")
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these bugs (default: all)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one bug (default %(default)g)")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default %(default)s)")
    parser.add_argument("--needing", metavar="MODULE", help="only bugs whose tests need this module")
    options = parser.parse_args(arguments)
    unknown = set(options.ids) - {bug.id for bug in bugs}
    if unknown:
        print(f"no planted bug is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [bug for bug in bugs if not options.ids or bug.id in options.ids]
    if options.needing:
        chosen = [bug for bug in chosen if bug.needs == options.needing]
    missing = [bug for bug in chosen if bug.needs and find_spec(bug.needs) is None]
    for bug in missing:
        print(f"left out           {bug.id}: {bug.needs} is not installed in this environment", flush=True)
    chosen = [bug for bug in chosen if bug not in missing]
    if not sound(chosen, root, options.limit, options.jobs if len(chosen) > FEW else 1):
        return 1
    caught = 0
    modules = (*LARGE, *VLLM) if options.needing == "vllm" else LARGE
    with ExitStack() as stack:
        free: Queue[RunTests] = Queue()
        for _ in range(options.jobs):
            free.put(stack.enter_context(Nursery(modules)).run if len(chosen) > FEW else run_tests)

        def plant_one(bug: Bug) -> Verdict:
            run = free.get()
            try:
                return plant(bug, root, options.limit, run)
            finally:
                free.put(run)

        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        stack.callback(pool.shutdown, cancel_futures=True)
        for verdict in pool.map(plant_one, chosen):
            show(verdict)
            caught += verdict.outcome is Outcome.CAUGHT
    print(f"{caught} of {len(chosen)} planted bugs caught")
    return 0 if caught == len(chosen) else 1


def sound(chosen: Sequence[Bug], root: Path, limit_s: float, processes: int) -> bool:
    """Whether the tests named pass without a bug: a test that fails anyway catches nothing."""
    nodes = sorted({node for bug in chosen if applies(bug, root) for node in bug.caught_by})
    if not nodes:
        return True
    with copy_of(root) as copy:
        status, output = run_tests(copy, nodes, limit_s * max(1, len(nodes)), processes)
    if status != 0:
        print(output)
        print("the tests named in the list do not pass without a bug planted", file=sys.stderr)
    return status == 0


def applies(bug: Bug, root: Path) -> bool:
    try:
        check_applies(bug, root)
    except DoesNotApply:
        return False  # `plant` says why
    return True


def show(verdict: Verdict) -> None:
    line = f"{verdict.outcome.value:9}{verdict.took_s:6.1f} s  {verdict.bug.id}"
    print(f"{line}: {verdict.detail}" if verdict.detail else line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
