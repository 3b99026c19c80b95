"""Measure: one prompt through engines with and without kept pages, and what the difference is.

Must not know what is said in the sessions nor how results are shown.

Every turn is asked of three engines over the same weights, one after the other, in an order that changes from
turn to turn, so that a machine that slows down or speeds up does so for all of them:
  kept     strict arithmetic (where there is none, on CUDA, the fast one), pages kept and matched;
  exact    the same arithmetic, nothing kept: its output must be the same ids;
  fastest  the arithmetic that the engine is fastest with, nothing kept: its first token is timed, no more.
With a tier in host memory, one more:
  ample    as kept, in a pool that nothing has to leave: what a hit costs when the pages are where they are read.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.benching import median, p99
from kvkeep.engine.arithmetic import Mode
from kvkeep.engine.asking import Answer, ask, pages_of, random_ids
from kvkeep.engine.engine import Engine, EngineConfig
from kvkeep.engine.loader import LoadedModel
from kvkeep.report import JsonValue, Metric
from kvkeep.stats import Histogram

LONG_PROMPT_TOKENS = 1_500
WARM_UP_PAGES = 2

# The request of the no-reuse measure fills its pool, so that storing it has to drop cached pages each time.
NO_REUSE_PAGES = 2
NO_REUSE_PAIRS = 30

EngineName = Literal["kept", "exact", "fastest", "ample"]


@dataclass(frozen=True)
class Turn:
    """One turn of one session, measured on all engines. Times are milliseconds to the first token.

    host_tokens: of the matched ones, those that came from host memory.
    ttft_ample_ms, matched_ample_tokens: of the same prompt in a pool that nothing leaves; None without a tier below.
    """

    session: str
    turn: int
    prompt_tokens: int
    matched_tokens: int
    output_tokens: int
    identical: bool
    ttft_kept_ms: float
    ttft_exact_ms: float
    ttft_fastest_ms: float
    host_tokens: int = 0
    ttft_ample_ms: float | None = None
    matched_ample_tokens: int | None = None

    @property
    def is_long_and_from_host(self) -> bool:
        """Whether most of what was matched, of a long prompt, came from host memory."""
        return self.prompt_tokens >= LONG_PROMPT_TOKENS and self.host_tokens > self.matched_tokens // 2

    @property
    def ttft_without_ms(self) -> float:
        """Time to first token without kept pages: the faster of the two baselines, whichever it was."""
        return min(self.ttft_exact_ms, self.ttft_fastest_ms)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes with kept pages."""
        return self.ttft_without_ms / self.ttft_kept_ms

    @property
    def is_long_and_cached(self) -> bool:
        """Whether this turn counts for `ttft_ratio_median`."""
        return self.prompt_tokens >= LONG_PROMPT_TOKENS and self.matched_tokens > 0

    def to_row(self) -> dict[str, JsonValue]:
        """The turn as a row of the report."""
        return {
            "session": self.session,
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "matched_host_tokens": self.host_tokens,
            "output_tokens": self.output_tokens,
            "outputs_identical": int(self.identical),
            "ttft_ms": self.ttft_kept_ms,
            "ttft_without_ms": self.ttft_without_ms,
            "ttft_without_same_arithmetic_ms": self.ttft_exact_ms,
            "ttft_without_fastest_ms": self.ttft_fastest_ms,
            "ttft_gpu_hit_ms": self.ttft_ample_ms,
            "matched_gpu_hit_tokens": self.matched_ample_tokens,
            "ttft_ratio": self.ratio,
        }


class Bench:
    """The engines, warmed up, and the asking of one prompt.

    names: of the engines, in the order of the first turn.
    sessions, tokens_max: how many prompts of at most that length come back in rotation.
    """

    def __init__(
        self, loaded: LoadedModel, page_size: int, pool_pages: int, host_pages: int, sessions: int, tokens_max: int
    ) -> None:
        self._loaded = loaded
        self._page_size = page_size
        one_request = pages_of(tokens_max, page_size)
        self._exact: Mode = "strict" if loaded.device == "cpu" else "fast"
        self._engines: dict[EngineName, Engine] = {
            "kept": self._engine(pool_pages, self._exact, keep=True, host_pages=host_pages),
            "exact": self._engine(one_request, self._exact, keep=False),
            "fastest": self._engine(one_request, "fast", keep=False),
        }
        if host_pages:
            self._engines["ample"] = self._engine(sessions * one_request, self._exact, keep=True)
        self.names: tuple[EngineName, ...] = tuple(self._engines)

    def _engine(self, pool_pages: int, arithmetic: Mode, keep: bool, host_pages: int = 0) -> Engine:
        return Engine(
            self._loaded,
            EngineConfig(
                page_size=self._page_size,
                pool_pages=pool_pages,
                arithmetic=arithmetic,
                reuse=keep,
                store=keep,
                host_pages=host_pages,
            ),
        )

    def warm_up(self, rng: random.Random) -> None:
        """Run every engine once over ids that no session begins with; nothing of it is stored."""
        ids = random_ids(rng, self._loaded, WARM_UP_PAGES * self._page_size)
        for engine in self._engines.values():
            ask(engine, ids, max_new_tokens=2, store=False)

    @property
    def room_wait(self) -> Histogram:
        """How often, and how long, a request of the engine that keeps pages waited for room."""
        return self._engines["kept"].cache.stats().room_wait

    def close(self) -> None:
        """Ends copies."""
        for engine in self._engines.values():
            engine.close()

    def ask(
        self, name: EngineName, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int], salt: bytes = b""
    ) -> Answer:
        """The answer of one engine. The fastest is asked for its first token only."""
        return ask(self._engines[name], prompt, 1 if name == "fastest" else max_new_tokens, stop_ids, salt=salt)

    def no_reuse_ratios(self, rng: random.Random, pairs: int) -> Iterator[float]:
        """Cache on over cache off, same arithmetic: requests that find nothing to reuse, a ratio a pair.

        The pool holds just one such request, so storing it has to drop what the one before left: the cache
        does all of its work and gives nothing for it. Which of the two runs first alternates.
        """
        length = NO_REUSE_PAGES * self._page_size + 1
        pages = pages_of(length + 1, self._page_size)
        engines = [self._engine(pages, self._exact, keep=keep) for keep in (True, False)]
        for engine in engines:
            ask(engine, random_ids(rng, self._loaded, length), max_new_tokens=1)
        for pair in range(pairs):
            ids = random_ids(rng, self._loaded, length)
            total_ns = [0, 0]
            for which in (0, 1) if pair % 2 else (1, 0):
                answer = ask(engines[which], ids, max_new_tokens=1)
                if answer.matched_tokens:
                    raise AssertionError("ids drawn at random were found in the cache")
                total_ns[which] = answer.total_ns
            yield total_ns[0] / total_ns[1]


def host_metrics_of(turns: Sequence[Turn], room_wait: Histogram) -> dict[str, Metric]:
    """What hits in host memory cost: against computing, and against the same prompts where all pages are on the GPU.

    cpu_hit_missed_tokens: what the latter found and the former did not, and had to compute.
    """
    long = [turn for turn in turns if turn.is_long_and_from_host]
    over_gpu = [turn.ttft_kept_ms / turn.ttft_ample_ms for turn in long if turn.ttft_ample_ms is not None]
    host_tokens = sum(turn.host_tokens for turn in turns)
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    missed = sum((turn.matched_ample_tokens or 0) - turn.matched_tokens for turn in turns)
    return {
        "ttft_ratio_cpu_hit": _median([turn.ratio for turn in long], "ratio"),
        "ttft_cpu_over_gpu_hit": _median(over_gpu, "ratio"),
        "matched_host_share": Metric(host_tokens / prompt_tokens if prompt_tokens else None, "share"),
        "cpu_hit_missed_tokens": Metric(missed, "tokens"),
        "stalls": Metric(room_wait.count, "requests"),
        "stall_s": Metric(room_wait.sum_s, "s"),
    }


def metrics_of(turns: Sequence[Turn], no_reuse: Sequence[float]) -> dict[str, Metric]:
    """The demo's metrics over the turns and the no-reuse pairs that were measured, however few."""
    ratios = [turn.ratio for turn in turns if turn.is_long_and_cached]
    strict_costs = [turn.ttft_exact_ms / turn.ttft_fastest_ms for turn in turns]
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    matched_tokens = sum(turn.matched_tokens for turn in turns)
    without_ms = sum(turn.ttft_without_ms for turn in turns)
    return {
        "ttft_ratio_median": _median(ratios, "ratio"),
        "matched_share": Metric(matched_tokens / prompt_tokens if prompt_tokens else None, "share"),
        "outputs_identical": Metric(int(bool(turns) and all(turn.identical for turn in turns)), "bool"),
        "no_reuse_overhead": Metric(median(no_reuse) - 1 if no_reuse else None, "share", samples=len(no_reuse)),
        "strict_cost_ratio": _median(strict_costs, "ratio"),
        "time_saved_s": Metric((without_ms - sum(turn.ttft_kept_ms for turn in turns)) / 1000, "s"),
        "time_without_s": Metric(without_ms / 1000, "s"),
        "ttft_ms": _tail([turn.ttft_kept_ms for turn in turns]),
        "ttft_without_ms": _tail([turn.ttft_without_ms for turn in turns]),
    }


def _median(samples: Sequence[float], unit: str) -> Metric:
    return Metric(median(samples) if samples else None, unit, samples=len(samples))


def _tail(samples_ms: Sequence[float]) -> Metric:
    if not samples_ms:
        return Metric(None, "ms", samples=0)
    return Metric(median(samples_ms), "ms", p99=p99(samples_ms), samples=len(samples_ms))
