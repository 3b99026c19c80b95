"""kvkeep bench vllm_load: real vLLM servers under an open-loop load, without and with our CPU tier.

Must not know how a pass is measured or judged.  Where something is missing it says so in one line.

    make bench-vllm-load                                                     # makes the environment, then 8 minutes
    .venv-vllm/bin/python -m bench.vllm_load [--smoke] [--case NAMES] [--load X] [--repeats N] [--seed N] [--json FILE]

The report is ok when every limit is reached; README.md beside this file says what each figure means.
"""

import importlib.util
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench._load import Slo
from bench._measure import SPIN_QUIET_US, case_parser, traces_folder
from bench._vllm_load_cases import (
    LoadCase,
    MooncakeShape,
    PrefixShape,
    SampledShape,
    mooncake_replay,
    mooncake_trace,
    prefix_caching,
    prefix_sampled,
)
from kvkeep.benching import spin_us
from kvkeep.benching.record import work_checksum
from kvkeep.errors import BadInput
from kvkeep.report import Report

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_JSON = ROOT / "bench" / "results" / "vllm_load.json"
#: Why `bench all` leaves it out.
APART = "8 minutes, in an environment of its own: make bench-vllm-load"
NEEDED = ("vllm", "aiohttp", "openai", "psutil", "prometheus_client")
CASES = ("prefix_caching", "prefix_sampled", "mooncake_replay")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked of which model, and the SLO on a quiet machine of the kind that it was set on."""

    model: str
    prefix: PrefixShape
    sampled: SampledShape
    mooncake: MooncakeShape
    repeats: int
    slo: Slo


FULL = Sizes(
    "smollm2",
    PrefixShape(prefixes=8, repeats=3, prefix_tokens=640, suffix_min=16, suffix_max=256, new_tokens=8),
    SampledShape(prompts=10, repeats=3, tokens_min=320, tokens_max=1280, new_tokens=8),
    MooncakeShape(10, 3, prompt_max=6144, within_s=600.0, block_tokens=128, output_over=64, new_tokens_max=12),
    repeats=2,
    slo=Slo(ttft_s=3.0, itl_s=0.5),
)
SMOKE = Sizes(
    "tiny",
    PrefixShape(prefixes=5, repeats=2, prefix_tokens=512, suffix_min=16, suffix_max=128, new_tokens=4),
    SampledShape(prompts=5, repeats=2, tokens_min=300, tokens_max=900, new_tokens=4),
    MooncakeShape(4, 2, prompt_max=6144, within_s=900.0, block_tokens=128, output_over=64, new_tokens_max=4),
    repeats=1,
    slo=Slo(ttft_s=1.0, itl_s=0.2),
)


def missing() -> str | None:
    """What this environment lacks, in one line."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return (
        f"vllm_load: {', '.join(lacking)} not installed here: make vllm-environment, then .venv-vllm/bin/python -m "
        "bench.vllm_load (or make bench-vllm-load)"
    )


def cases(sizes: Sizes, names: "tuple[str, ...]", traces: Path | None, scratch: Path, seed: int) -> list[LoadCase]:
    """Those of these names.   scratch: a folder for a made-up trace, where the recorded one is not there."""
    make = {
        "prefix_caching": lambda: prefix_caching(sizes.prefix, seed),
        "prefix_sampled": lambda: prefix_sampled(sizes.sampled, seed),
        "mooncake_replay": lambda: mooncake_replay(mooncake_trace(traces, scratch, seed), sizes.mooncake, seed),
    }
    return [make[name]() for name in names]


def run(arguments: list[str]) -> Report:
    """Runs all passes, prints the table, returns the report."""
    options = _parse(arguments)
    lacking = missing()
    if lacking is not None:
        raise BadInput(lacking)
    from bench._vllm_load_judging import SGLANG, judge, metrics, rows, table
    from bench._vllm_load_passes import run_load
    from bench._vllm_models import smollm2_directory, tiny_directory
    from bench._vllm_passes import Place

    sizes = SMOKE if options.smoke else FULL
    scratch = ROOT / "results" / "vllm_load"
    chosen = cases(sizes, options.case, None if options.smoke else options.traces, scratch, options.seed)
    model = (tiny_directory if sizes.model == "tiny" else smollm2_directory)(ROOT / ".cache")
    scale = max(1.0, float(spin_us().value or 0) / SPIN_QUIET_US)
    slo = Slo(options.slo_ttft or sizes.slo.ttft_s * scale, options.slo_itl or sizes.slo.itl_s * scale)
    for case in chosen:
        print(f"{case.name}: {len(case.asks)} requests, {case.prompt_tokens} prompt tokens; {case.what}", flush=True)
    print(f"SLO: {slo}", flush=True)
    place = Place(model, scratch)
    found = run_load(chosen, place, options.repeats or sizes.repeats, options.load, options.seed)
    made = metrics(chosen, found, place.block_size, slo)
    judged, every = list(judge(chosen, made)), list(rows(chosen, found, slo))
    for line in table(every):
        print(line)
    for row in judged:
        print(f"{row['metric']} {row['median']}, {row['limit']}: {'reached' if row['reached'] else 'NOT REACHED'}")
    print(f"sglang is left out: {SGLANG}")
    work = work_checksum([(case.name, case.digest()) for case in chosen])
    return Report("bench vllm_load", all(bool(row["reached"]) for row in judged), made, judged + every, work)


def _parse(arguments: list[str]) -> "argparse.Namespace":
    parser = case_parser("vllm_load")
    parser.add_argument("--case", metavar="NAMES", default=",".join(CASES), help=f"which, of {','.join(CASES)} (all)")
    parser.add_argument(
        "--load", type=float, default=1.2, metavar="X", help="offered, over what can be served without a match (1.2)"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="passes of each, interleaved (2)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the recorded traces (../shared/traces)")
    parser.add_argument(
        "--slo-ttft", type=float, metavar="S", help="seconds to the first token (3, on a quiet machine)"
    )
    parser.add_argument("--slo-itl", type=float, metavar="S", help="seconds between tokens, on average (0.5, the same)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (0)")
    options = parser.parse_args(arguments)
    for name in ("load", "slo_ttft", "slo_itl"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: it must be a number above 0")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: it must be 1 or more")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: it must be 0 or more")
    options.case = tuple(name.strip() for name in options.case.split(",") if name.strip())
    unknown = [name for name in options.case if name not in CASES]
    if unknown or not options.case:
        parser.error(f"--case {unknown[0] if unknown else '(none)'}: there is no such case; known: {', '.join(CASES)}")
    options.traces = traces_folder(parser, options.traces)
    return options


def main(arguments: list[str]) -> int:
    """`run` from a checkout; writes the report, to `DEFAULT_JSON` unless --json says where or the run is a smoke."""
    from kvkeep import cli

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the servers would outlive us
    plain = any(word.split("=")[0] in ("--json", "--smoke", "--quick", "-h", "--help") for word in arguments)
    return cli.main(["bench", "vllm_load", *arguments, *([] if plain else ["--json", str(DEFAULT_JSON)])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
