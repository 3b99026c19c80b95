"""kvkeep bench gpu_check: what only a CUDA device can show, against the plain copies of the same run, in 8 minutes.

Must not know how a part measures what it measures.  Where something is missing it says so in one line; nothing but the
standard library is loaded before that is known.

    kvkeep bench gpu_check [--smoke] [--minutes N] [--skip PARTS] [--json FILE]
    python -m bench.gpu_check [...]     # the same without an installation, and a report to look at beside the file

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from bench._gpu_machine import Machine
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
    from bench import _gpu_sizes as sizes
    from bench._gpu_parts import chosen, watched
    from bench._gpu_summary import summary

    skip = chosen(options.skip)
    report = watched(_machine(), sizes.SMOKE if options.smoke else sizes.FULL, began + 60 * options.minutes, skip)
    print("", *summary(report), sep="\n")
    return report


def _machine() -> "Machine":
    from bench._gpu_machine import CudaMachine

    return CudaMachine()


def main(arguments: list[str]) -> int:
    """`run` from a bare checkout; writes its result (to `DEFAULT_JSON` unless --json says where) and a page."""
    wanted = not any(word in ("-h", "--help") for word in arguments)
    lacking = missing() if wanted else None
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    from kvkeep import cli

    named = _json_file(arguments)
    code = cli.main(["bench", "gpu_check", *arguments, *([] if named else ["--json", str(DEFAULT_JSON)])])
    file = Path(named or DEFAULT_JSON)
    if wanted and code in (0, 1) and file.is_file():
        return cli.main(["report", str(file), "-o", str(file.with_suffix(".html"))]) or code
    return code


def _json_file(arguments: list[str]) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], None], strict=True):
        if word.partition("=")[0] == "--json":
            return word.partition("=")[2] or following
    return None


def _parse(arguments: list[str]) -> "argparse.Namespace":
    from bench._measure import case_parser

    parser = case_parser("gpu_check")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="N", help=f"parts that begin later are left out ({MINUTES})"
    )
    parser.add_argument("--skip", default="", metavar="PARTS", help="parts that are not run, with commas between them")
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
