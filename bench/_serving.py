"""Serving a workload with the embedded engine: one request at a time, or under an open loop.

Must not know which configuration is held against which, nor limits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench._agent_figures import BOTH, GPU, OFF
from bench._load import Arrivals, OpenLoop, Served
from bench._sessions import Held
from bench._vllm_workloads import Ask, Workload
from kvkeep.engine.asking import Answer, ask, random_ids
from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel
from kvkeep.errors import InvariantViolation
from kvkeep.report import JsonValue
from kvkeep.stats import CacheStats

#: How often the cache's numbers are looked at during a run, at most.
LOOK_EVERY_S = 1.0
WARM_UP_PAGES = 2
#: Of what the sessions grow to: the GPU pool, and the tier in host memory.
POOL_SHARE, HOST_SHARE = 0.25, 1.2


@dataclass(frozen=True, slots=True)
class Setup:
    """A configuration.   keep: pages are matched and kept.   host_pages: of the tier in host memory; 0: none.
    threads: of a forward; None: torch's setting."""

    name: str
    pool_pages: int
    host_pages: int = 0
    keep: bool = True
    threads: int | None = None


def setups_of(held: Held, page_size: int) -> dict[str, Setup]:
    """The three configurations, with the same memory where the model reads; the longest request has to fit."""
    working_set = held.working_set(page_size)
    pool = max(int(POOL_SHARE * working_set), held.workload.blocks_min(page_size) - 1)
    return {
        OFF: Setup(OFF, pool, keep=False),
        GPU: Setup(GPU, pool),
        BOTH: Setup(BOTH, pool, int(HOST_SHARE * working_set) + 1),
    }


def make_engine(loaded: LoadedModel, setup: Setup, page_size: int) -> Engine:
    """An engine of a configuration; all else is the default."""
    config = EngineConfig(
        page_size=page_size,
        pool_pages=setup.pool_pages,
        host_pages=setup.host_pages,
        reuse=setup.keep,
        store=setup.keep,
        threads=setup.threads,
    )
    return Engine(loaded, config)


def answer_alone(engine: Engine, asks: Sequence[Ask], new_tokens: int, salts: Sequence[bytes] = ()) -> list[Answer]:
    """One request after the other: latency without load.   salts: of the sessions."""
    return [ask(engine, one.prompt, new_tokens, salt=_salt(one, salts)) for one in asks]


def _salt(one: Ask, salts: Sequence[bytes]) -> bytes:
    return salts[one.session] if salts else b""


@dataclass(slots=True)
class Run:
    """What came of a workload under a load.

    requests, served: by number.   before, after: the cache's numbers.   looks: the same meanwhile, as rows.
    starved: requests that sat out a step, since the page for their next token was still being copied.
    """

    setup: Setup
    arrivals: Arrivals
    requests: list[Request] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    before: CacheStats | None = None
    after: CacheStats | None = None
    starved: set[int] = field(default_factory=set)
    looks: list[dict[str, JsonValue]] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """From when the first request was due to the last token of all."""
        return max(one.tokens_s[-1] for one in self.served) - self.served[0].due_s

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(len(request.output_ids) for request in self.requests)

    @property
    def matched_gpu(self) -> int:
        """Prompt tokens that were found where the model reads."""
        return sum(request.matched_len - request.host_len for request in self.requests)

    @property
    def matched_cpu(self) -> int:
        """Prompt tokens that came from host memory."""
        return sum(request.host_len for request in self.requests)

    @property
    def stalls(self) -> int:
        """Live requests that waited for cached pages to be copied out of their way, at their admission or later."""
        assert self.before is not None and self.after is not None
        return self.after.room_wait.count - self.before.room_wait.count + len(self.starved)

    @property
    def stall_s(self) -> float:
        """How long those waited at their admission, together."""
        assert self.before is not None and self.after is not None
        return self.after.room_wait.sum_s - self.before.room_wait.sum_s

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """By request, what was answered."""
        return [tuple(request.output_ids) for request in self.requests]


def warmed(loaded: LoadedModel, setup: Setup, page_size: int) -> Engine:
    """An engine that has run a prompt of two pages, of which nothing is kept."""
    engine = make_engine(loaded, setup, page_size)
    ask(engine, random_ids(random.Random(0), loaded, WARM_UP_PAGES * page_size), max_new_tokens=2, store=False)
    return engine


def serve(engine: Engine, setup: Setup, workload: Workload, arrivals: Arrivals, salts: Sequence[bytes] = ()) -> Run:
    """The workload's requests, each when it is due.   salts: of the sessions."""
    run = Run(setup, arrivals, before=engine.cache.stats())
    loop = OpenLoop(arrivals)
    params = SamplingParams(max_new_tokens=workload.new_tokens)
    looked_s = [-LOOK_EVERY_S]

    def send(served: Served) -> None:
        one = workload.asks[served.number]
        request = engine.submit(
            one.prompt, params, salt=_salt(one, salts), on_token=lambda request, token: loop.token(served)
        )
        run.requests.append(request)

    def step() -> bool:
        did = engine.step()
        run.starved |= {request.number for request in run.requests if request.starved}
        if did and loop.now_s - looked_s[0] >= LOOK_EVERY_S:
            looked_s[0] = loop.now_s
            run.looks.append(_look(engine, loop.now_s))
        return did

    run.served = loop.run(workload.new_tokens, send, step)
    run.after = engine.cache.stats()
    unserved = [one.number for one in run.served if not one.whole]
    if unserved:
        raise InvariantViolation(f"{setup.name}: requests {unserved} have not got all of their tokens")
    return run


def _look(engine: Engine, now_s: float) -> dict[str, JsonValue]:
    stats = engine.cache.stats()
    return {
        "t_s": round(now_s, 3),
        "running": engine.running,
        "waiting": engine.waiting,
        "pages_live": stats.pages_live,
        "pages_cached": stats.pages_cached,
        "pages_free": stats.pages_free,
        "host_pages_cached": stats.host_pages_cached,
        "pages_evicted": stats.pages_evicted,
        "pages_demoted": stats.pages_demoted,
        "pages_lost": stats.pages_lost,
        "matched_gpu_tokens": stats.matched_gpu_tokens,
        "matched_host_tokens": stats.matched_host_tokens,
    }
