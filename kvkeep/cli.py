"""The command line: kvkeep demo, verify, replay, size, route, bench and report.

Must not import torch, transformers or rich before a command needs them; must not measure anything itself.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvkeep import __version__
from kvkeep import report as reports
from kvkeep.errors import BadInput, KvkeepError
from kvkeep.parsing import Parser, count, count_or_none, rate, seed
from kvkeep.report import Report

EXIT_FINE = 0
EXIT_BROKEN = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

ENGINE_EXTRA = {"torch", "transformers", "tokenizers", "gguf", "safetensors", "huggingface_hub", "rich", "matplotlib"}
ROUTE_EXTRA = {"aiohttp", "uvicorn", "httptools", "yarl"}

MODEL = "smollm2-135m"

Command = Callable[[argparse.Namespace], Report]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 fine, 1 a promise is broken, 2 bad input, 130 interrupted."""
    said = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(said)
    except (BadInput, KvkeepError) as error:
        return _complain(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ENGINE_EXTRA | ROUTE_EXTRA:
            raise
        extra = "replay" if said[:1] in (["replay"], ["size"]) else "route" if package in ROUTE_EXTRA else "engine"
        return _complain(f"this command needs {package}, which is not installed: pip install 'kvkeep[{extra}]'")
    except KeyboardInterrupt:
        print("kvkeep: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Point stdout elsewhere, or the interpreter complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN


def _run(argv: list[str]) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    command: Command | None = arguments.command
    if command is None and rest:
        parser.error(f"no command is named, and {' '.join(rest)} is not known")
    if command is None:
        parser.print_help()
        return EXIT_FINE
    if command is _bench:
        arguments.case_arguments = rest
    elif rest:
        parser.error(f"{arguments.name} does not know {' '.join(rest)}")
    path: Path | None = arguments.json
    trace: Path | None = arguments.trace_file
    if path is not None:
        reports.check_writable(path)
    if trace is not None:
        reports.check_writable(trace, "--trace")
    try:
        result = command(arguments) if trace is None else _traced(command, arguments, said=argv)
    except KeyboardInterrupt:
        # The long commands hand back what they measured so far; this one had not begun to measure.
        print("kvkeep: interrupted, nothing measured yet", file=sys.stderr)
        result = reports.interrupted(arguments.name)
    if path is not None:
        # A second Ctrl-C while the partial result is being written must not lose it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            result.write(path)
        finally:
            signal.signal(signal.SIGINT, before)
    if reports.INTERRUPTED in result.metrics:
        return EXIT_INTERRUPTED
    return EXIT_FINE if result.ok else EXIT_BROKEN


def _traced(command: Command, arguments: argparse.Namespace, said: Sequence[str]) -> Report:
    from kvkeep.reporting.traced import traced

    with traced(arguments.trace_file, said):
        return command(arguments)


def _complain(message: str) -> int:
    print("kvkeep: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_BAD_INPUT


def _wait_politely() -> None:
    """Let the threads of a parallel region sleep when they wait for each other; an explicit setting wins.

    OpenMP's default is to spin, and on a busy machine a thread that spins takes the core from the one it is waiting
    for: with six other processes on two cores a prefill took 25 to 36 s spinning and 5 to 8 s asleep. It has to be said
    before torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _demo(arguments: argparse.Namespace) -> Report:
    _wait_politely()
    from kvkeep.engine import demo

    return demo.run(
        demo.DemoOptions(
            sessions=arguments.sessions,
            turns=arguments.turns,
            pool_pages=arguments.pool_pages,
            host_pages=arguments.host_pages,
            private=arguments.private,
            page_size=arguments.page_size,
            max_new_tokens=arguments.max_new_tokens,
            device=arguments.device,
            model=arguments.model,
            seed=arguments.seed,
        )
    )


def _verify(arguments: argparse.Namespace) -> Report:
    _wait_politely()
    if arguments.multimodal:
        return _verify_multimodal(arguments)
    from kvkeep.engine import verify

    return verify.run(
        verify.VerifyOptions(
            mode=arguments.mode,
            model=arguments.model,
            cases=arguments.cases,
            page_size=arguments.page_size,
            device=arguments.device,
            seed=arguments.seed,
        )
    )


def _verify_multimodal(arguments: argparse.Namespace) -> Report:
    from kvkeep.engine.verify import multimodal

    for option, said in (("--model", arguments.model != MODEL), ("--mode", arguments.mode == "same-schedule")):
        if said or arguments.device != "cpu":
            option = option if said else "--device"
            raise BadInput(f"{option} with --multimodal: it runs its own models, strict, on a cpu; leave it out")
    return multimodal.run(
        multimodal.MultimodalOptions(cases=arguments.cases, page_size=arguments.page_size, seed=arguments.seed)
    )


def _replay(arguments: argparse.Namespace) -> Report:
    from kvkeep.replay import command
    from kvkeep.replay.result import Settings

    return command.run(
        command.ReplayOptions(
            trace=arguments.trace,
            settings=Settings(
                gpu_tokens=arguments.gpu_tokens,
                cpu_tokens=arguments.cpu_tokens,
                accounting=arguments.accounting,
                eviction=arguments.eviction,
                index_at=arguments.index_at,
                concurrency=arguments.concurrency,
                explain=arguments.explain,
                prefill_tokens_per_s=arguments.prefill_rate,
                decode_tokens_per_s=arguments.decode_rate,
                link_tokens_per_s=arguments.link_rate,
            ),
            page_size=arguments.page_size,
            order=arguments.order,
            sessions=arguments.sessions,
            limit=arguments.limit,
            prompts_only=arguments.prompts_only,
            best=not arguments.no_best,
            tokenizer=arguments.tokenizer,
            skip_bad=arguments.skip_bad,
            names_folder=_cache_folder(),
        )
    )


def _size(arguments: argparse.Namespace) -> Report:
    from kvkeep.sizing import command

    return command.run(
        command.SizeOptions(
            trace=arguments.trace,
            gpu=arguments.gpu,
            cpu=arguments.cpu,
            model=arguments.model,
            kv_dtype=arguments.kv_dtype,
            page_size=arguments.page_size,
            evictions=tuple(arguments.eviction.split(",")),
            order=arguments.order,
            sessions=arguments.sessions,
            limit=arguments.limit,
            best=not arguments.no_best,
            plot=arguments.plot,
            tokenizer=arguments.tokenizer,
            skip_bad=arguments.skip_bad,
            names_folder=_cache_folder(),
        )
    )


def _route(arguments: argparse.Namespace) -> Report:
    from kvkeep.proxy import command
    from kvkeep.routing.guard import Guard
    from kvkeep.routing.settings import RoutingSettings

    settings = RoutingSettings(arguments.page_size, arguments.depth, Guard(slack=arguments.slack))
    return command.run(command.RouteOptions(arguments.replica, arguments.host, arguments.port, settings))


def _cache_folder() -> Path:
    """Where a user's caches are, by the XDG rules: an absolute $XDG_CACHE_HOME, or ~/.cache."""
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".cache") / "kvkeep"


def _bench(arguments: argparse.Namespace) -> Report:
    from kvkeep.benching import command

    _wait_politely()
    if arguments.case is None and arguments.help:
        arguments.parser.print_help()
        raise SystemExit(EXIT_FINE)
    if arguments.help:
        arguments.case_arguments.append("--help")  # the case knows its own options, and lists them
    if arguments.case is None:
        raise BadInput(f"bench: name a case: {', '.join(command.names())}")
    if arguments.case == command.ALL and arguments.trace_file is not None:
        raise BadInput("--trace with bench all: each case runs in a process of its own; name one case")
    return command.run(arguments.case, arguments.case_arguments, arguments.baseline)


def _report(arguments: argparse.Namespace) -> Report:
    from kvkeep.reporting import command

    return command.run(command.ReportOptions(arguments.results, arguments.output, arguments.point))


def _parser() -> Parser:
    parser = Parser(
        prog="kvkeep",
        description="Keeps the KV pages of finished requests and hands them to the next request "
        "that begins with the same tokens.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvkeep {__version__}")
    parser.set_defaults(command=None, name=None, json=None, trace_file=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_demo(commands)
    _add_verify(commands)
    _add_replay(commands)
    _add_size(commands)
    _add_route(commands)
    _add_bench(commands)
    _add_report(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[Parser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="run interleaved agent sessions on a real model, with and without kept pages",
        description="Interleaved agent sessions on a real model: time to first token with kept pages and "
        "without, and whether the outputs are identical. Exit code 1 when they are not.",
        allow_abbrev=False,
    )
    demo.set_defaults(command=_demo, name="demo")
    demo.add_argument("--sessions", type=count, default=3, metavar="N", help="sessions in rotation (3)")
    demo.add_argument("--turns", type=count, default=5, metavar="N", help="turns of each session (5)")
    demo.add_argument(
        "--pool-pages", type=count, default=64, metavar="N", help="pages in the pool of the cached run (64)"
    )
    demo.add_argument(
        "--host-pages",
        type=count_or_none,
        default=0,
        metavar="N",
        help="pages of a tier in host memory for what the pool cannot hold (0: none)",
    )
    demo.add_argument(
        "--private",
        action="store_true",
        help="sessions share nothing, as those of different tenants, so that each can push the whole of another out",
    )
    demo.add_argument(
        "--max-new-tokens", type=count, default=24, metavar="N", help="tokens the model writes per turn (24)"
    )
    _add_model_options(demo)


def _add_verify(commands: "argparse._SubParsersAction[Parser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="compare cached and uncached runs of a real model, byte for byte",
        description="The bit gate: KV bytes and logits of cached runs are compared exactly with runs that "
        "took no page from the cache. Exit code 1 when any differs.",
        allow_abbrev=False,
    )
    verify.set_defaults(command=_verify, name="verify")
    verify.add_argument(
        "--mode",
        choices=("strict", "same-schedule"),
        help="strict: against computing from scratch; same-schedule: against the same forwards over pages "
        "that were never dropped (default: strict on cpu, same-schedule on cuda)",
    )
    verify.add_argument(
        "--cases",
        type=count,
        default=None,
        metavar="N",
        help="stop when N requests or a few more have been compared (220)",
    )
    verify.add_argument(
        "--multimodal",
        action="store_true",
        help="with photographs: two vision-language architectures, small, their weights from a seed",
    )
    _add_model_options(verify)


def _add_replay(commands: "argparse._SubParsersAction[Parser]") -> None:
    replay = commands.add_parser(
        "replay",
        help="replay recorded requests over the index and the eviction order, without a model",
        description="Recorded requests over the real index, pools and eviction order, without a model and without "
        "page bytes: what each tier hits, what waits, what the best possible order would hit in the same room.",
        allow_abbrev=False,
    )
    replay.set_defaults(command=_replay, name="replay")
    add = replay.add_argument
    _add_trace_options(replay)
    add("--gpu-tokens", type=count, required=True, metavar="N", help="token positions that the GPU tier holds")
    add("--cpu-tokens", type=count_or_none, default=0, metavar="N", help="and the tier in host memory (0: none)")
    add("--eviction", default="rhythm", metavar="NAME", help="the order in which cached pages leave (rhythm)")
    add(
        "--accounting",
        choices=("engine", "reference"),
        default="engine",
        help="engine: requests last, and hold their pages and a tail page; reference: only full cached pages count",
    )
    add("--index-at", choices=("seal", "finish"), default="seal", help="when pages become visible (seal)")
    add("--concurrency", type=count, metavar="N", help="live requests at most (1 in a rotation, else any number)")
    add("--prefill-rate", type=rate, default=50_000.0, metavar="R", help="tokens a second, one prompt a time (50000)")
    add("--decode-rate", type=rate, default=50.0, metavar="R", help="tokens a second, each request (50)")
    add("--link-rate", type=rate, metavar="R", help="tokens a second between the tiers (copies take no time)")
    add("--explain", action="store_true", help="say why pages were not found, by cause")
    add("--prompts-only", action="store_true", help="as if generated pages were not stored")
    _add_json(replay)


def _add_size(commands: "argparse._SubParsersAction[Parser]") -> None:
    size = commands.add_parser(
        "size",
        help="say how large the tiers should be for recorded requests",
        description="The hit curve of recorded requests over the size of the tiers, what doubling either buys, and how "
        "much memory is worth having. Sizes are tokens, or with --model GiB of its KV.",
        allow_abbrev=False,
    )
    size.set_defaults(command=_size, name="size")
    add = size.add_argument
    _add_trace_options(size)
    add("--gpu", type=rate, required=True, metavar="SIZE", help="the GPU tier: tokens, or with --model GiB")
    add("--cpu", type=rate, default=0.0, metavar="SIZE", help="the tier in host memory (none)")
    add("--model", type=Path, metavar="CONFIG", help="the model's config.json: sizes are GiB of its KV")
    add("--kv-dtype", metavar="DTYPE", help="of the KV pool (the model's)")
    add("--eviction", default="lru,rhythm", metavar="NAMES", help="the advice is for the last of these (lru,rhythm)")
    add("--plot", type=Path, metavar="FILE", help="a picture as well: FILE.png or FILE.html")
    _add_json(size)


def _add_route(commands: "argparse._SubParsersAction[Parser]") -> None:
    route = commands.add_parser(
        "route",
        help="send OpenAI-compatible requests to the replica that their prefix asks for",
        description="A reverse proxy before several copies of a model: requests with the same prefix meet on one "
        "replica, without any of them being asked. GET /health tells who is alive and who waits where.",
        allow_abbrev=False,
    )
    route.set_defaults(command=_route, name="route")
    add = route.add_argument
    add("--replica", action="append", required=True, metavar="URL", help="a replica's address; once for each of them")
    add("--host", default="127.0.0.1", metavar="HOST", help="the address to listen on (127.0.0.1)")
    add("--port", type=count_or_none, default=8080, metavar="N", help="the port (8080; 0: any that is free)")
    add("--page-size", type=count, default=128, metavar="N", help="token positions in a page (128)")
    add("--depth", type=count, metavar="K", help="the K-th page decides (learned from what prompts share)")
    add("--slack", type=rate, default=12.0, metavar="N", help="requests more than elsewhere that may wait (12)")
    _add_json(route)


def _add_trace_options(command: Parser) -> None:
    add = command.add_argument
    what = "a trace file, the NAME of NAME.sessions.jsonl.gz, or for replay workload:NAME?parameter=value&..."
    add("trace", type=Path, metavar="TRACE", help=what)
    add("--page-size", type=count, default=128, metavar="N", help="token positions in a page (128)")
    add("--order", metavar="ORDER", help="recorded, rotate:N (N sessions in turn) or open:N (N at their own pace)")
    add("--sessions", type=count, metavar="N", help="only the first N sessions")
    add("--limit", type=count, metavar="N", help="stop after N requests")
    add("--no-best", action="store_true", help="leave the best possible out")
    add("--tokenizer", type=Path, metavar="FILE", help="the tokenizer.json that chat logs are tokenised with")
    add("--skip-bad", action="store_true", help="leave malformed lines out, and use what there is of a cut file")


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="run a bench case of the repository, or all",
        description="Run bench/CASE.py of the checkout, or all of them; what is not listed here is handed to it. "
        "`kvkeep bench CASE --help` lists the case's own options.",
        allow_abbrev=False,
        add_help=False,
    )
    bench.set_defaults(command=_bench, name="bench", parser=bench)
    bench.add_argument("-h", "--help", action="store_true", help="this list, or that of the case")
    _add_json(bench)
    _add_trace(bench)
    add = bench.add_argument
    add("--baseline", type=Path, metavar="FILE", help="an earlier result: say what is better, worse or within noise")
    add("case", nargs="?", metavar="CASE", help="the case, such as index; all: every case that can run here")


def _add_report(commands: "argparse._SubParsersAction[Parser]") -> None:
    report = commands.add_parser(
        "report",
        help="make one page of pictures of what was measured",
        description="One HTML file of results and traces, with nothing to load from elsewhere: what is gained, where "
        "it comes from and what it costs.  A file of another version, or one that was cut short, is named and skipped.",
        allow_abbrev=False,
    )
    report.set_defaults(command=_report, name="report")
    add = report.add_argument
    add("results", nargs="+", type=Path, metavar="RESULTS", help="files of --json and --trace, or folders of them")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the page, such as report.html")
    add("--point", metavar="SIZE", help="your pool, on the hit curve: 18 (pages), 131072tokens or 24GiB")


def _add_model_options(command: Parser) -> None:
    command.add_argument(
        "--model",
        default=MODEL,
        metavar="NAME",
        help="smollm2-135m, stories260k, or the path of a .gguf, a llama2.c .bin or a Hugging Face folder",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (cpu)")
    command.add_argument("--page-size", type=count, default=128, metavar="N", help="token positions in a page (128)")
    command.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed of everything that is drawn at random (0)"
    )
    _add_json(command)
    _add_trace(command)


def _add_trace(command: Parser) -> None:
    what = "record requests, gates, copies and evictions to FILE, which Perfetto and `kvkeep report` open"
    command.add_argument("--trace", type=Path, dest="trace_file", metavar="FILE", help=what)


def _add_json(command: Parser) -> None:
    command.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result as JSON to FILE")


if __name__ == "__main__":
    sys.exit(main())
