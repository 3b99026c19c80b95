"""A real engine of vLLM in this process, on a tiny model, with the connector: what its tests share.

Must not test anything itself.  The engine starts once; each test gets new connectors over it, made as vLLM makes them.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from vllm import LLM, SamplingParams
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from bench._vllm_models import tiny_directory
from kvkeep.cache import TieredCache
from kvkeep.integrations.vllm import KvkeepConnector
from kvkeep.integrations.vllm_scheduler import SchedulerSide
from kvkeep.integrations.vllm_worker import WorkerSide
from kvkeep.transfer.backend import BackendDied, Job, Outcome

MODELS = Path(__file__).resolve().parent.parent.parent / ".cache" / "models"
BLOCK, BLOCKS, LONGEST, VOCABULARY = 32, 40, 1024, 40_000
#: Tokens of a step: longer prompts are computed in parts.
CHUNK = 512
#: Bytes of a block of the tiny model: 2 layers, K and V, 2 heads of 32, float32.
BLOCK_NBYTES = BLOCK * 1024
TIER_BLOCKS = 400
STEPS_MAX = 5_000


def gib(blocks: float) -> float:
    """`cpu_tier_gib` of a tier of so many blocks."""
    return blocks * BLOCK_NBYTES / 2**30


def transfer_config(**extra: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with these options of ours."""
    return {
        "kv_connector": "KvkeepConnector",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_tier_gib": gib(TIER_BLOCKS), "check_copies": True, **extra},
    }


def engine_options(**more: Any) -> dict[str, Any]:
    """What the engines of these tests are started with."""
    return {
        "model": str(tiny_directory(MODELS)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "kv_transfer_config": transfer_config(),
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
        **more,
    }


def ids_of(count: int, seed: float) -> list[int]:
    """A prompt of random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


class Gate:
    """Puts itself around a worker's backend: holds copies back, fails them, or dies.

    closed: directions whose copies do not begin.   failing: which copies fail; their targets hold garbage.
    """

    def __init__(self, worker: WorkerSide) -> None:
        self._worker = worker
        self._inner: Any = worker._manager._backend
        worker._manager._backend = self
        self._held: list[Job] = []
        self.closed: set[str] = set()
        self.failing: Callable[[Job], bool] = lambda job: False
        self.dying = False
        self.launched: list[Job] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def held(self) -> list[Job]:
        """Copies that have not begun."""
        return self._held

    def launch(self, job: Job) -> None:
        self.launched.append(job)
        if job.plan.direction in self.closed:
            self._held.append(job)
        else:
            self._inner.launch(job)

    def completions(self) -> list[Outcome]:
        if self.dying:
            self._held.clear()
            self._inner.close(5.0)
            raise BackendDied("pulled out")
        for job in [job for job in self._held if job.plan.direction not in self.closed]:
            self._held.remove(job)
            self._inner.launch(job)
        return [self._failed(o) if self.failing(o.job) else o for o in self._inner.completions()]

    def _failed(self, outcome: Outcome) -> Outcome:
        plan = outcome.job.plan
        if plan.direction == "h2d":
            self._worker.blocks.poison(plan.targets)
        return Outcome(outcome.job, "pulled", 0)

    def close(self, timeout_s: float) -> list[Outcome]:
        held, self._held = self._held, []
        return [Outcome(job, "closed", 0) for job in held] + list(self._inner.close(timeout_s))


class Engine:
    """vLLM's engine, and the connectors of the moment."""

    def __init__(self, **more: Any) -> None:
        self.llm = LLM(**engine_options(**more))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.config = self.core.vllm_config
        self._kv_cache_config = self.scheduler.kv_cache_config
        self._caches = {
            name: self.config.compilation_config.static_forward_context[name].kv_cache
            for group in self._kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        self.outputs: dict[str, Any] = {}
        self.events: list[Any] = []
        self.reports: list[Any] = []
        self._numbered = 0
        publish = self.scheduler.kv_event_publisher.publish

        def watched(batch: Any) -> None:
            self.events.extend(batch.events)
            publish(batch)

        self.scheduler.kv_event_publisher.publish = watched
        self.renew()

    # ------------------------------------------------------------------ connectors

    def renew(self, **extra: Any) -> None:
        """New connectors with an empty tier, by the calls that vLLM makes at its start; vLLM's blocks are empty."""
        if kv_transfer_state._KV_CONNECTOR_AGENT is not None:
            kv_transfer_state._KV_CONNECTOR_AGENT.shutdown()
        options = transfer_config(**extra)["kv_connector_extra_config"]
        self.config.kv_transfer_config.kv_connector_extra_config = options
        worker, scheduler = (
            KvkeepConnector(self.config, role, self._kv_cache_config)
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        worker.register_kv_caches(self._caches)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        scheduler.bind_kv_cache_manager(self.scheduler.kv_cache_manager)
        self.scheduler.connector = self.connector = scheduler
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.kv_cache_manager.take_events()
        self.worker: WorkerSide = worker._the_worker()
        self.side: SchedulerSide = scheduler._the_scheduler()
        self.gate = Gate(self.worker)
        self.totals: dict[str, float] = {}
        self.events.clear()
        self.outputs.clear()
        self._watch_stats(scheduler)
        self._watch_plans(scheduler)

    def _watch_stats(self, scheduler: Any) -> None:
        ask = scheduler.get_kv_connector_stats
        self.reports.clear()

        def watched() -> Any:
            stats = ask()
            if stats is not None:
                self.reports.append(stats)
                for name, value in stats.data["counters"].items():
                    self.totals[name] = self.totals.get(name, 0) + value
            return stats

        scheduler.get_kv_connector_stats = watched

    def _watch_plans(self, scheduler: Any) -> None:
        """What is loaded was stored under the block hash that vLLM itself gives that part of the request."""
        build = scheduler.build_connector_meta
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        self.hash_of_slot: dict[int, Any] = {}

        def watched(output: Any) -> Any:
            plan = build(output)
            for load in plan.loads:
                request = self.scheduler.requests[load.request_id]
                (of_request,) = self.scheduler.kv_cache_manager.get_block_ids(load.request_id)
                hashes = [request.block_hashes[of_request.index(block)] for block in load.blocks]
                known = [self.hash_of_slot[slot] for slot in load.slots]
                assert all(k in (None, h) for k, h in zip(known, hashes, strict=True)), f"{load} loads other blocks"
            for block, slot in zip(plan.store_blocks, plan.store_slots, strict=True):
                key = blocks[block].block_hash
                self.hash_of_slot[slot] = None if key is None else get_block_hash(key)
            return plan

        scheduler.build_connector_meta = watched

    # ------------------------------------------------------------------ requests

    def add(self, ids: Sequence[int], tokens: int = 1, *, rid: str = "", salt: str = "", **more: Any) -> str:
        """A request waits; its id."""
        self._numbered += 1
        rid = rid or f"r{self._numbered}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt:
            prompt["cache_salt"] = salt
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, **more)
        self.llm.llm_engine.add_request(rid, prompt, params)
        return rid

    def step(self) -> None:
        """One step of the engine."""
        for output in self.llm.llm_engine.step():
            self.outputs[output.request_id] = output

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def until(self, what: Callable[[], Any], within: int = STEPS_MAX) -> None:
        """Steps until something holds."""
        for _ in range(within):
            if what():
                return
            self.step()
        raise AssertionError(f"not within {within} steps; {self.story()}")

    def drain(self) -> None:
        """Steps until nothing is left to do."""
        self.until(lambda: not self.scheduler.has_requests() and not self.llm.llm_engine.has_unfinished_requests())

    def finish(self, *rids: str) -> None:
        """Steps until these have their answers, though copies of theirs may run on."""
        self.until(lambda: all(rid in self.outputs and self.outputs[rid].finished for rid in rids))

    def ask(self, ids: Sequence[int], tokens: int = 1, **more: Any) -> "Answer":
        """A request up to its end, its copies too."""
        rid = self.add(ids, tokens, **more)
        self.drain()
        return self.answer(rid)

    def answer(self, rid: str) -> "Answer":
        return Answer(self.outputs[rid])

    def request(self, rid: str) -> Any:
        """vLLM's own object, which has something more behind its id; None when it is gone."""
        of = self.scheduler.requests.items()
        return next((request for name, request in of if name == rid or name.startswith(f"{rid}-")), None)

    def abort(self, *rids: str) -> None:
        self.llm.llm_engine.abort_request(list(rids))

    def forget_blocks(self) -> None:
        """vLLM's own blocks hold nothing any more."""
        assert self.scheduler.reset_prefix_cache()

    @property
    def tier(self) -> TieredCache:
        """What is in the tier."""
        assert self.side.cache is not None
        return self.side.cache

    @property
    def in_tier(self) -> int:
        """Pages of the tier that can be found, and nobody holds."""
        return self.tier.stats().pages_cached

    # ------------------------------------------------------------------ at rest

    def story(self) -> str:
        """What is going on, for a failure."""
        side = self.side
        return f"requests {list(self.scheduler.requests)}, chains {list(side._chains)}, jobs {list(side._jobs)}"

    def check_idle(self) -> None:
        """Nothing is left behind on either side, and the loaded bytes were those saved."""
        side, worker = self.side, self.worker
        self.drain()
        self.connector.get_kv_connector_stats()
        assert ({}, {}, [], set(), []) == (side._chains, side._jobs, side._late, side._storing, side._loads)
        assert ({}, {}, {}, 0) == (worker._left, worker._parts, worker._loads, len(worker._waiting))
        pool = self.scheduler.kv_cache_manager.block_pool
        assert 0.0 == self.scheduler.kv_cache_manager.usage
        assert not [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        assert BLOCKS - 1 == pool.get_num_free_blocks()
        if side.cache is not None:
            stats = side.cache.stats()
            assert (0, 0) == (stats.leases, stats.pages_live)
            assert stats.pages_total == stats.pages_free + stats.pages_cached
            side.cache.check_invariants()
            self.check_events()
        numbers = self.connector._worker_numbers
        totals = {name: self.totals.get(name, 0) + numbers.get(name, 0) for name in ("wrong_blocks", "checked_blocks")}
        assert 0 == totals["wrong_blocks"]
        assert side.counters["loaded_tokens"] == totals["checked_blocks"] * BLOCK

    def tier_hashes(self) -> list[Any]:
        """The block hashes that the events of so far say are in the tier."""
        held: list[Any] = []
        for event in self.events:
            if getattr(event, "medium", None) != MEDIUM_CPU:
                continue
            if isinstance(event, BlockStored):
                held += event.block_hashes
            elif isinstance(event, BlockRemoved):
                for h in event.block_hashes:
                    held.remove(h)  # fails for one that was never stored
        return held

    def check_events(self) -> None:
        """What was told to be stored, less what was told to be removed, is what the tier's slots were filled with."""
        self.events += self.connector.take_events()  # what happened since the last step
        told, per_page = self.tier_hashes(), self.side._per_page
        assert len(told) == len(set(told)), "told twice"
        there = [page for page in range(self.tier.stats().pages_total) if page in self.tier._tree]
        assert self.in_tier == len(there)
        hashes = [self.hash_of_slot[page * per_page + i] for page in there for i in range(per_page)]
        known = {maybe_convert_block_hash(h) for h in hashes if h is not None}
        assert known <= set(told), "not told"
        assert None in hashes or known == set(told), "told, but not there"


class Answer:
    """cached: prompt tokens that were not computed.   ids, logprobs: of what was generated."""

    def __init__(self, output: Any) -> None:
        completion = output.outputs[0]
        self.cached: int = output.num_cached_tokens
        self.ids = list(completion.token_ids)
        self.logprobs = [next(iter(at.values())).logprob for at in completion.logprobs or ()]
        self.reason: str | None = completion.finish_reason

    @property
    def text(self) -> tuple[list[int], list[float]]:
        """What two runs of the same arithmetic agree in to the last bit."""
        return self.ids, self.logprobs


@contextmanager
def started(**more: Any) -> Iterator[Engine]:
    """An engine, and its end."""
    engine = Engine(**more)
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
