"""kvkeep bench sweep: what pools of different sizes bring end to end: the curve of hits, and of times to first token.

Must not know how an engine runs.

    kvkeep bench sweep [--smoke] [--model NAME] [--seed N] [--json FILE]

Sessions that share nothing are answered in rotation, one request at a time (latency, not load), once for each size of
the pool.  Beside each measured share stands what a replay of the same prompts predicts for that size.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench._measure import ENGINE, case_parser, lacking
from bench._sessions import Held, hold, random_conversations, real_conversations
from kvkeep.benching import median, p90, spin_us, summary
from kvkeep.benching.record import work_checksum
from kvkeep.benching.samples import exact
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.replaying import replay
from kvkeep.replay.result import Settings
from kvkeep.replay.trace import Request, Trace
from kvkeep.report import JsonValue, Metric, Report

if TYPE_CHECKING:
    from kvkeep.engine.asking import Answer
    from kvkeep.engine.loader import LoadedModel

Row = dict[str, JsonValue]

#: Points by which a measured share may be off from that of the replay: a replay of the same order decides on the same
#: pages, but learns from other times.
PREDICTION_POINTS_MAX = 5.0
#: Of what the largest pool hits, that a pool at the knee does.
KNEE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Sizes:
    """shares: of the working set, that pools have; the smallest that can hold a request is taken for less."""

    model: str
    page_size: int
    sessions: int
    turns: int
    messages: int
    new_tokens: int
    shares: tuple[float, ...]


FULL = Sizes("smollm2-135m", 128, 5, 3, 2, 8, (0.25, 0.6, 1.0))
SMOKE = Sizes("stories260k", 16, 5, 3, 1, 4, (0.25, 0.6, 1.0))
SMOKE_GROWTH = 64


def missing() -> str | None:
    """What is not installed here."""
    return lacking(ENGINE, "engine")


def run(arguments: list[str]) -> Report:
    """Measure everything, print the table, return the report."""
    from kvkeep.engine.loader import load_model

    options = _parse(arguments)
    sizes = SMOKE if options.smoke else FULL
    loaded = load_model(options.model or sizes.model)
    spin = spin_us()
    held = _held(loaded, sizes, options.seed)
    working_set = held.working_set(sizes.page_size)
    rows = list(_sweep(loaded, sizes, held, working_set))
    metrics = dict(_metrics(rows)) | {"spin_us": spin, "working_set_pages": Metric(working_set, "pages")}
    for line in _lines(rows):
        print(line)
    off = max(abs(float(str(row["matched_share"])) - float(str(row["predicted_share"]))) for row in rows)
    same = all(row["outputs_identical"] for row in rows)
    judged: list[Row] = [
        {"metric": "outputs_identical", "median": int(same), "limit": "at least 1", "reached": same},
        {
            "metric": "prediction_points",
            "median": round(100 * off, 2),
            "limit": f"at most {PREDICTION_POINTS_MAX:g}",
            "reached": 100 * off <= PREDICTION_POINTS_MAX,
        },
    ]
    metrics["prediction_points"] = exact(round(100 * off, 2), "points", "lower")
    missed = [str(row["metric"]) for row in judged if not row["reached"]]
    print(f"limits missed: {', '.join(missed) or 'none'}")
    work = work_checksum(held.workload.digest(), [row["pool_pages"] for row in rows], held.outputs)
    return Report("bench sweep", not missed, metrics, [*rows, *judged], work)


def _held(loaded: "LoadedModel", sizes: Sizes, seed: int) -> Held:
    """The sessions, held in a pool with room for all, each with a salt of its own."""
    from bench._serving import Setup, warmed
    from kvkeep.engine.asking import pages_of

    if sizes is FULL and loaded.tokenizer is not None:
        conversations, longest = real_conversations(
            *(loaded, sizes.sessions, sizes.turns, sizes.messages, sizes.new_tokens)
        )
    else:
        conversations = random_conversations(loaded, sizes.sessions, 0, SMOKE_GROWTH, seed)
        longest = sizes.turns * (SMOKE_GROWTH + sizes.new_tokens)
    salts = [f"session {number}".encode() for number in range(sizes.sessions)]
    pages = sizes.sessions * pages_of(longest, sizes.page_size)
    engine = warmed(loaded, Setup("ample", pages), sizes.page_size)
    held = hold("sweep", engine, conversations, sizes.turns, sizes.new_tokens, salts)
    engine.close()
    return held


def _sweep(loaded: "LoadedModel", sizes: Sizes, held: Held, working_set: int) -> Iterator[Row]:
    from bench._serving import Setup, answer_alone, warmed

    asks, new_tokens = held.workload.asks, held.workload.new_tokens
    least = max(-(-(len(one.prompt) + new_tokens) // sizes.page_size) for one in asks)
    predicted = _Predicted(held, sizes.page_size)
    for pages in sorted({max(least, round(share * working_set)) for share in sizes.shares}):
        engine = warmed(loaded, Setup(f"{pages} pages", pages), sizes.page_size)
        answers = answer_alone(engine, asks, new_tokens, held.salts)
        engine.close()
        yield _row(held, answers, pages, working_set, sizes.page_size) | {
            "predicted_share": round(predicted.share(pages), 4),
            "predicted_lru_share": round(predicted.share(pages, "lru"), 4),
        }


def _row(held: Held, answers: "Sequence[Answer]", pages: int, working_set: int, page_size: int) -> Row:
    ttft_ms = [answer.ttft_ns / 1e6 for answer in answers]
    seconds = sum(answer.total_ns for answer in answers) / 1e9
    matched = sum(answer.matched_tokens for answer in answers)
    return {
        "series": "sweep",
        "pool_pages": pages,
        "pool_tokens": pages * page_size,
        "of_working_set": round(pages / working_set, 3),
        "matched_share": round(matched / held.workload.prompt_tokens, 4),
        "ttft_ms": round(median(ttft_ms), 3),
        "ttft_p90_ms": round(p90(ttft_ms), 3),
        "ttft_mean_ms": round(sum(ttft_ms) / len(ttft_ms), 3),
        "prompt_tokens_per_s": round(held.workload.prompt_tokens / seconds, 1),
        "requests": len(answers),
        "outputs_identical": [answer.output_ids for answer in answers] == held.outputs,
        "ttft_ms_by_request": [round(ms, 3) for ms in ttft_ms],
    }


class _Predicted:
    """What a replay of the same requests finds, without a model."""

    def __init__(self, held: Held, page_size: int) -> None:
        asks, outputs = held.workload.asks, held.outputs
        last = {one.session: number for number, one in enumerate(asks)}
        # Sessions share nothing: ids of each are moved apart, as their salts do.
        top = 1 + max(max(one.prompt) for one in asks)
        chains = [
            np.array((*asks[number].prompt, *outputs[number]), dtype=np.int32) + session * top
            for session, number in sorted(last.items())
        ]
        sessions: list[list[Request]] = [[] for _ in chains]
        for one in asks:
            final = len(one.prompt) + held.workload.new_tokens
            request = Request(one.session, one.session, len(one.prompt), final, final)
            sessions[one.session].append(request)
        self._pages = Pages(Trace("sweep", "sweep", None, chains, sessions, "none"), page_size)
        self._arrivals = Order("rotate", len(chains)).arrivals(self._pages.trace)
        self._page_size = page_size
        # As fast as the model was: an order that learns goes by seconds.
        computed = sum(len(one.prompt) - a.matched_tokens for one, a in zip(asks, held.alone, strict=True))
        self._prefill = 1e9 * computed / sum(answer.ttft_ns for answer in held.alone)
        later = sum(len(answer.output_ids) - 1 for answer in held.alone)
        self._decode = 1e9 * max(1, later) / sum(answer.total_ns - answer.ttft_ns for answer in held.alone)

    def share(self, pages: int, eviction: str = "rhythm") -> float:
        """Of the prompt tokens."""
        settings = Settings(
            pages * self._page_size,
            eviction=eviction,
            prefill_tokens_per_s=self._prefill,
            decode_tokens_per_s=self._decode,
        )
        return replay(self._pages, self._arrivals, settings).hit_share


def _metrics(rows: Sequence[Row]) -> Iterator[tuple[str, Metric]]:
    best = max(float(str(row["matched_share"])) for row in rows)
    knee = next(row for row in rows if float(str(row["matched_share"])) >= KNEE_SHARE * best)
    yield "knee_of_working_set", exact(float(str(knee["of_working_set"])), "of the working set", "lower")
    for row in rows:
        name = f"{100 * float(str(row['of_working_set'])):.0f}"
        yield f"matched_share_{name}", exact(float(str(row["matched_share"])), "of prompt tokens", "higher")
        by_request = row["ttft_ms_by_request"]
        assert isinstance(by_request, list)
        yield f"ttft_ms_{name}", summary([float(str(ms)) for ms in by_request], "ms", digits=3)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'pool':>8}{'of set':>8}{'matched':>9}{'replay':>8}{'LRU':>8}{'TTFT ms':>10}{'p90':>10}{'tokens/s':>10}"
    for row in rows:
        shares = "".join(f"{row[key]:>8.1%}" for key in ("predicted_share", "predicted_lru_share"))
        times = "".join(f"{row[key]:>10.1f}" for key in ("ttft_ms", "ttft_p90_ms", "prompt_tokens_per_s"))
        yield f"{row['pool_pages']:>8}{row['of_working_set']:>8.0%}{row['matched_share']:>9.1%}{shares}{times}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("sweep")
    parser.add_argument("--model", metavar="NAME", help="as of `kvkeep demo` (smollm2-135m)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random sessions (0)")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: it must be 0 or more")
    return options
