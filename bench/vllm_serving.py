"""kvkeep bench vllm_serving: real vLLM servers asked over the OpenAI API, with a CPU tier of ours, LMCache's, and none.

Must not know how a pass is measured.  Where something is missing it says so in one line.

    make bench-vllm                                                          # makes the environments, then all of it
    .venv-vllm/bin/python -m bench.vllm_serving [--smoke] [--workload 8x4,6x8] [--configs ample,quarter] [--json FILE]

Each pass leaves a file in --results, and one that is there is not run again: what was stopped goes on where it was.
The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import importlib.util
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.errors import BadInput
from kvkeep.report import Report

if TYPE_CHECKING:
    import argparse

    from bench._vllm_judging import Row
    from bench._vllm_passes import Place

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_JSON = ROOT / "bench" / "results" / "vllm_serving.json"
#: Why `bench all` leaves it out.
APART = "hours, in an environment of its own: make bench-vllm"
NEEDED = ("vllm", "openai", "psutil", "prometheus_client")
ROTATIONS = ("8x4", "6x8")
WORKLOADS = (*ROTATIONS, "concurrent", "random")
#: Who serves which workload unless --configs says otherwise.
SERVING = {
    "8x4": ("ample", "again", "quarter", "kvkeep", "lmcache", "kvkeep-checked", "kvkeep-half", "kvkeep-half-lru"),
    "6x8": ("ample", "again", "quarter", "kvkeep", "lmcache", "kvkeep-checked", "kvkeep-half", "kvkeep-half-lru"),
    "smoke": ("ample", "kvkeep"),
    "concurrent": ("quarter", "kvkeep"),
    "random": ("kvkeep",),
}


def missing() -> str | None:
    """What this environment lacks, in one line."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return (
        f"vllm_serving: {', '.join(lacking)} not installed here: make vllm-environment, then .venv-vllm/bin/python -m "
        "bench.vllm_serving (or make bench-vllm)"
    )


def run(arguments: list[str]) -> Report:
    """Runs the passes that are not there yet, prints the table, returns the report."""
    options = _parse(arguments)
    lacking = missing()
    if lacking is not None:
        raise BadInput(lacking)
    from bench._vllm_judging import metrics, table
    from bench._vllm_models import smollm2_directory, tiny_directory
    from bench._vllm_passes import Place

    model = tiny_directory if options.model == "tiny" else smollm2_directory
    place = Place(model(ROOT / ".cache"), options.results, options.block_size)
    rows: list[Row] = []
    for name in options.workload:
        configurations = _configurations(options.configs or SERVING[name])
        if name == "random":
            rows += _random(place, options) if configurations else []
        elif name == "concurrent":
            rows += _concurrent(place, options, configurations)
        else:
            rows += _rotation(name, place, options, configurations)
    for line in table(rows):
        print(line)
    missed = [
        f"{row['workload']} {row['configuration']} {row['metric']}" for row in rows if row.get("reached") is False
    ]
    print(f"limits missed: {', '.join(missed) or 'none'}")
    return Report("bench vllm_serving", not missed, metrics(rows), rows)


def _rotation(
    name: str, place: "Place", options: "argparse.Namespace", configurations: Sequence[str]
) -> "Sequence[Row]":
    from bench._vllm_judging import judge
    from bench._vllm_passes import CONFIGURATIONS, Store, key_of, rounds, run_pass
    from bench._vllm_workloads import rotation

    workload, store = rotation(name, options.traces), Store(place.results)
    found: dict[str, list[dict[str, Any]]] = {configuration: [] for configuration in configurations}
    for repeat, configuration in rounds(configurations, options.repeats):
        chosen = CONFIGURATIONS[configuration]
        path = store.path(name, configuration, repeat)
        if options.fresh:
            path.unlink(missing_ok=True)
        key = key_of(chosen, workload, place)
        found[configuration].append(store.made(path, key, partial(run_pass, chosen, workload, place, repeat)))
    return judge(workload, place.block_size, found)


def _concurrent(place: "Place", options: "argparse.Namespace", configurations: Sequence[str]) -> "Sequence[Row]":
    from bench._vllm_concurrent import run_concurrent
    from bench._vllm_judging import judge_concurrent
    from bench._vllm_passes import CONFIGURATIONS, Store, key_of
    from bench._vllm_workloads import clients

    workload, store = clients(options.traces), Store(place.results)
    rows: list[Row] = []
    for configuration in configurations:
        chosen, path = CONFIGURATIONS[configuration], store.path(workload.name, configuration, 0)
        if options.fresh:
            path.unlink(missing_ok=True)
        key = key_of(chosen, workload, place)
        one = store.made(path, key, partial(run_concurrent, chosen, workload, place, options.seed))
        rows += judge_concurrent(configuration, one)
    return rows


def _random(place: "Place", options: "argparse.Namespace") -> "Sequence[Row]":
    from bench._vllm_judging import judge_random
    from bench._vllm_passes import RECIPE, Store
    from bench._vllm_random import run_random

    store = Store(place.results)
    path = store.path("random", "kvkeep", 0)
    if options.fresh:
        path.unlink(missing_ok=True)
    key = {"recipe": RECIPE, "pairs": options.pairs, "model": place.model.name, "block_size": place.block_size}
    return judge_random(store.made(path, key, lambda: key | run_random(place, options.pairs)))


def _configurations(names: Sequence[str]) -> list[str]:
    """Those that can run here; why one cannot is said once."""
    from bench._vllm_passes import CONFIGURATIONS, lacking

    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        raise BadInput(f"--configs {unknown[0]}: there is no such configuration; known: {', '.join(CONFIGURATIONS)}")
    reasons = {name: lacking(CONFIGURATIONS[name]) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{name} is left out: {reason}")
    return [name for name in names if reasons[name] is None]


def _parse(arguments: list[str]) -> "argparse.Namespace":
    from bench._measure import case_parser

    parser = case_parser("vllm_serving")
    parser.add_argument(
        "--workload", metavar="NAMES", help=f"which, of {','.join((*WORKLOADS, 'smoke'))} (all but smoke)"
    )
    parser.add_argument("--configs", metavar="NAMES", help="which configurations (those that the workload is made for)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="passes of each, interleaved (1)")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="pairs of the random workload (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the concurrent workload's clients (0)")
    parser.add_argument("--model", choices=("smollm2", "tiny"), help="the model that is served (smollm2)")
    parser.add_argument("--block-size", type=int, default=128, metavar="N", help="vLLM's, tokens (128)")
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", help="recorded sessions")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where passes leave files (results/vllm_serving)"
    )
    parser.add_argument("--fresh", action="store_true", help="run every pass, whatever is there")
    options = parser.parse_args(arguments)
    for name in ("repeats", "pairs", "block_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be 1 or more")
    if options.block_size % 32:
        parser.error(f"--block-size {options.block_size}: vLLM's attention on a CPU takes multiples of 32")
    options.workload = _named(options.workload, ("smoke",) if options.smoke else WORKLOADS)
    unknown = [name for name in options.workload if name not in SERVING]
    if unknown:
        parser.error(f"--workload {unknown[0]}: there is no such workload; known: {', '.join(SERVING)}")
    options.configs = _named(options.configs, ())
    options.model = options.model or ("tiny" if options.smoke else "smollm2")
    options.results = (options.results or ROOT / "results" / "vllm_serving").resolve() / options.model
    return options


def _named(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    return tuple(default) if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def main(arguments: list[str]) -> int:
    """`run` from a checkout; writes the report, to `DEFAULT_JSON` unless --json says where or the run is a smoke."""
    from kvkeep import cli

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the servers would outlive us
    plain = any(word.split("=")[0] in ("--json", "--smoke", "--quick", "-h", "--help") for word in arguments)
    return cli.main(["bench", "vllm_serving", *arguments, *([] if plain else ["--json", str(DEFAULT_JSON)])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
