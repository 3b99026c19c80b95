"""kvkeep bench peers: W1, match, insert, evict and two tiers on the managers of vLLM, SGLang and LMCache and on ours.

Must not know how a manager is driven, nor how figures are judged.

    make bench-peers [ARGS="--only vllm,sglang --smoke --json FILE"]     # makes the environments, then all of it
    kvkeep bench peers [--only PEERS] [--smoke] [--rounds N] [--json FILE]

Each peer is a process of its own environment (`.venv-vllm`, `.venv-sglang`, `.venv-lmcache`); one that is not there is
said, and its column is empty.  The report is ok when every limit that could be judged is reached; a smoke run is not
judged.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.report import Report

if TYPE_CHECKING:
    from bench.peers.comparing import Case

#: Why `bench all` leaves it out.
APART = "environments of their own: make bench-peers"

#: Who is asked in every case; the others, which say more of the same peer, where it is cheap.
MAIN = ("kvkeep", "kvkeep_lru", "vllm", "sglang_rust", "lmcache")
MORE = ("vllm_xxhash", "sglang_radix")
PEERS = ("vllm", "sglang", "lmcache")


def run(arguments: list[str]) -> Report:
    """Measure everything once, print the table, return the report."""
    options = _parse(arguments)
    from bench.peers.comparing import Round
    from bench.peers.judging import LIMITS, metrics, rows, table
    from bench.peers.plans import SMOKE, Sizes
    from bench.peers.processes import ROOT, Peer, chosen
    from kvkeep.benching import spin_us
    from kvkeep.benching.record import work_checksum

    places, cases = chosen(options.only), _cases(options.smoke, options.rounds)
    peers = {variant: place.name for place in places for variant in place.variants}
    spins = [spin_us(5).value or 0.0]
    start = partial(Peer, root=options.environments or ROOT)
    round_ = Round(places, lambda line: print(line, flush=True), start)
    try:
        for case in cases:
            print(f"{case.name}: {case.rounds} rounds", flush=True)
            round_.run(case, SMOKE if options.smoke else Sizes())
            spins.append(spin_us(5).value or 0.0)
    finally:
        round_.end()
    results = round_.results
    figures = metrics(cases, peers, results)
    measured = rows(cases, peers, results, figures, {} if options.smoke else LIMITS)
    for line in table(cases, peers, results):
        print(line)
    missed = [str(row["metric"]) for row in measured if row.get("reached") is False]
    print(f"spin {min(spins):.0f} to {max(spins):.0f} us; limits missed: {', '.join(missed) or 'none'}")
    matched = [
        (case.name, variant, one.matched, one.host)
        for case in cases
        for variant, one in sorted(results.found[case.name].items())
    ]
    work = work_checksum("peers", results.checksums, results.versions, matched)
    return Report("bench peers", not missed, figures, measured, work)


def _parse(arguments: list[str]) -> argparse.Namespace:
    from bench._measure import case_parser

    parser = case_parser("peers")
    parser.add_argument("--only", metavar="PEERS", help=f"these peers only, of {','.join(PEERS)}; ours is always there")
    parser.add_argument("--rounds", type=int, metavar="N", help="passes of each case (2 to 7)")
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="where theirs are (the checkout)")
    options = parser.parse_args(arguments)
    if options.environments is not None and not options.environments.is_dir():
        parser.error(
            f"--environments {options.environments}: there is no such folder; make bench-peers makes them here"
        )
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it must be 1 or more")
    if options.only is not None:
        options.only = [name.strip() for name in options.only.split(",") if name.strip()]
        for name in options.only:
            if name not in PEERS:
                parser.error(f"--only {name}: there is no such peer; known: {', '.join(PEERS)}")
    return options


def _cases(smoke: bool, rounds: int | None) -> "list[Case]":
    from bench.peers.comparing import Case

    if smoke:
        few = rounds or 1
        return [
            Case("w1", "w1", few, MAIN + MORE, tokens=64_000),
            Case("match", "match", few, MAIN + MORE),
            Case("insert", "insert", few, MAIN + MORE, per=20, unit="us/page"),
            Case("evict", "evict", few, MAIN + MORE),
            Case("tier", "w1", few, (*MAIN, "vllm_arc"), tokens=16_000, host_tokens=64_000),
        ]
    return [
        Case("w1", "w1", rounds or 3, MAIN + MORE, tokens=4_000_000),
        Case("w1_1m", "w1", rounds or 2, MAIN, tokens=1_000_000),
        Case("w1_256k", "w1", rounds or 2, MAIN, tokens=256_000),
        Case("match", "match", rounds or 7, MAIN + MORE),
        Case("insert", "insert", rounds or 7, MAIN + MORE, per=1000, unit="us/page"),
        Case("evict", "evict", rounds or 5, MAIN + MORE),
        Case("tier", "w1", rounds or 2, (*MAIN, "vllm_arc"), tokens=256_000, host_tokens=2_000_000),
    ]
