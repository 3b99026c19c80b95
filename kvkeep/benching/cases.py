"""Cases: where they live, how one is found and run.

Must not know any case.  A case is a file `bench/NAME.py` beside the package, or a package `bench/NAME`, with one public
function:

    def run(arguments: list[str]) -> Report

It parses its own arguments, measures, and returns a report whose `command` is "bench NAME"; the command line writes it.
Every case takes --smoke: seconds instead of minutes, for figures that mean little.  It may say more of itself:

    APART = "..."                   why `bench all` leaves it out        LONG = "..."   the same, but for a smoke run
    def missing() -> str | None     what this machine lacks for it, in one line
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from kvkeep.errors import BadInput
from kvkeep.report import Report, checkout_root


def bench_directory() -> Path:
    """The folder of bench cases. Raises BadInput in an installed copy, which has none."""
    root = checkout_root()
    if root is None:
        raise BadInput(
            "bench: the cases are not installed with the package; run it from a checkout of the repository "
            "(.venv/bin/kvkeep bench ... after `make setup`)"
        )
    return root / "bench"


def bench_names(directory: Path) -> list[str]:
    """Names of the cases in `directory`, sorted. One that starts with "_" is a helper."""
    packages = (file.parent.name for file in directory.glob("[a-z]*/__init__.py"))
    return sorted([*(file.stem for file in directory.glob("[a-z]*.py")), *packages])


def load_case(name: str) -> ModuleType:
    """The case `name`. Raises BadInput for one that is not there."""
    directory = bench_directory()
    names = bench_names(directory)
    if name not in names:
        raise BadInput(f"bench: there is no case {name!r}; known: {', '.join(names) or 'none'}, or all of them: all")
    return _load(directory, name)


def run_bench(name: str, arguments: Sequence[str]) -> Report:
    """Run the case `name` and return its report. Raises BadInput for a name that is not there."""
    run: Callable[[list[str]], Report] = load_case(name).run
    return run(list(arguments))


def left_out(case: ModuleType, smoke: bool) -> str | None:
    """Why `bench all` does not run a case here; None where it does."""
    reasons = [getattr(case, "APART", None), None if smoke else getattr(case, "LONG", None)]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None and hasattr(case, "missing"):
        reason = case.missing()
    return reason


def _load(directory: Path, name: str) -> ModuleType:
    package = directory / name / "__init__.py"
    file = package if package.is_file() else directory / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvkeep_bench_{name}", file)
    if spec is None or spec.loader is None:
        raise BadInput(f"bench: {file.name} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being executed
    spec.loader.exec_module(module)
    return module
