"""kvkeep bench gpu_check: what only a CUDA device can show, against the plain copies of the same run, in 8 minutes.

Must not know how a part measures what it measures.  Where something is missing it says so in one line; nothing but the
standard library is loaded before that is known.

    kvkeep bench gpu_check [--smoke] [--minutes N] [--json FILE]
    python -m bench.gpu_check [--smoke] [--minutes N] [--json FILE]     # the same without an installation

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from kvkeep.report import Report

NEEDED = {
    "numpy": "pip install numpy",
    "xxhash": "pip install xxhash",
    "torch": "pip install torch, a build for CUDA",
    "cuda.bindings": "pip install cuda-bindings, of the driver's CUDA",
}
DEFAULT_JSON = Path(__file__).resolve().parent / "results" / "gpu_check.json"
MINUTES = 7.5
#: Why `bench all` leaves it out.
APART = "up to 8 minutes on a machine with a GPU: make gpu-check"


def missing() -> str | None:
    """What this machine lacks, in one line; None when the check can run."""
    lacking = [f"{name} ({hint})" for name, hint in NEEDED.items() if not _found(name)]
    if lacking:
        return f"gpu_check: not installed here: {'; '.join(lacking)}"
    import torch

    if not torch.cuda.is_available():
        return f"gpu_check: torch {torch.__version__} finds no CUDA device here: it needs one, and a driver"
    return None


def run(arguments: list[str]) -> "Report":
    """Measure everything once, print the table, return the report."""
    from kvkeep.errors import BadInput

    began = time.monotonic()
    options = _parse(arguments)
    lacking = missing()
    if lacking is not None:
        raise BadInput(lacking)
    from bench._gpu_machine import CudaMachine
    from bench._gpu_parts import FULL, SMOKE, watched

    deadline = began + 60 * options.minutes
    return watched(CudaMachine(), SMOKE if options.smoke else FULL, deadline)


def main(arguments: list[str]) -> int:
    """`run` from a bare checkout; writes the report, to `DEFAULT_JSON` unless --json says where."""
    wanted = not any(word in ("-h", "--help") for word in arguments)
    lacking = missing() if wanted else None
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    from kvkeep import cli

    named = any(word.split("=")[0] == "--json" for word in arguments)
    return cli.main(["bench", "gpu_check", *arguments, *([] if named else ["--json", str(DEFAULT_JSON)])])


def _parse(arguments: list[str]) -> "argparse.Namespace":
    from bench._measure import case_parser

    parser = case_parser("gpu_check")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="N", help=f"parts that begin later are left out ({MINUTES})"
    )
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes}: it must be more than 0")
    return options


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
