"""vLLM's real scheduler, KV manager and connector hooks over a model that is a hash, and copies that a seed disorders.

Must not stand in for anything of vLLM but the forward.  The KV of position p, layer l and rank r is a number that
depends on every token up to p: a block with another prefix's bytes, a torn one or one that was written too early is
seen at the first step over it.

    step: schedule -> workers: bind, forward, loads, stores, results -> update_from_output         (vLLM's own order)
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvkeep.integrations.vllm import KvkeepConnector
from kvkeep.integrations.vllm_worker import WorkerSide, regions_of
from kvkeep.transfer.simulated import SimulatedBackend

Kv = npt.NDArray[np.int64]

LAYERS = ("l0", "l1")
POSITION_NBYTES = 8
VOCABULARY = 1000
MODEL_LEN = 256


def make_config(model: Path) -> Any:
    """vLLM's configuration for a simulation; takes seconds, so it is made once and changed by each one."""
    return EngineArgs(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MODEL_LEN,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_transfer_config={
            "kv_connector": "KvkeepConnector",
            "kv_connector_module_path": "kvkeep.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_tier_gib": 1},
        },
    ).create_engine_config()


def kv_of(tokens: list[int]) -> Kv:
    """The number of each position."""
    out = np.empty(len(tokens), dtype=np.uint64)
    h = 0x9E3779B97F4A7C15
    for i, token in enumerate(tokens):
        h = (h * 6364136223846793005 + token * 2654435761 + 1442695040888963407) & (2**64 - 1)
        h ^= h >> 29
        out[i] = h
    return out.view(np.int64)


def continued(prompt: list[int], count: int) -> list[int]:
    """The prompt and the `count` tokens that the model says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(kv_of(tokens)[-1]) % VOCABULARY)
    return tokens


@dataclass
class Step:
    """A step that was scheduled.   sampling: whether each request gets a token.   blocks: of each, at that time."""

    output: Any
    sampling: dict[str, bool]
    computed: dict[str, int]
    blocks: dict[str, list[int]]


@dataclass
class Shape:
    """What differs between simulations.

    asynchronous: two steps in flight, and the second is scheduled before the first has run.
    part: blocks of a part of a store.
    """

    ranks: int = 1
    blocks: int = 24
    block_tokens: int = 16
    per_page: int = 1
    tier_pages: int = 40
    block_outermost: bool = False
    asynchronous: bool = False
    eviction: str = "rhythm"
    fail_rate: float = 0.0
    budget: int = 96
    running: int = 8
    part: int = 1000
    extra: dict[str, Any] = field(default_factory=dict)


class Sim:
    """One engine.   expected: by request, the tokens that it will have said.   texts: those that it has said."""

    def __init__(self, config: Any, seed: int, shape: Shape) -> None:
        self.random = random.Random(seed)
        self.shape = shape
        self.config = config
        block_nbytes = shape.block_tokens * POSITION_NBYTES * len(LAYERS)
        extra = {
            "cpu_tier_gib": shape.tier_pages * shape.per_page * block_nbytes * shape.ranks / 2**30,
            "blocks_per_page": shape.per_page,
            "eviction": shape.eviction,
            "check_copies": True,
            **shape.extra,
        }
        config.kv_transfer_config.kv_connector_extra_config = extra
        config.parallel_config.world_size = shape.ranks
        config.cache_config.block_size = shape.block_tokens
        config.cache_config.num_gpu_blocks = shape.blocks
        config.scheduler_config.max_num_batched_tokens = shape.budget
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.max_num_seqs = shape.running
        page = shape.block_tokens * POSITION_NBYTES
        strides = (page, page * len(LAYERS)) if shape.block_outermost else (page * shape.blocks, page)
        self._layer_stride, self._block_stride = strides
        spec = FullAttentionSpec(
            block_size=shape.block_tokens, num_kv_heads=1, head_size=2, dtype=torch.float16, head_size_v=2
        )
        assert spec.page_size_bytes == page
        size = page * shape.blocks * len(LAYERS)
        placed = KVCacheTensor(
            size=size, layers=list(LAYERS), layer_stride=self._layer_stride, block_stride=self._block_stride
        )
        kv_config = KVCacheConfig(shape.blocks, [placed], [KVCacheGroupSpec(list(LAYERS), spec)])
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(shape.ranks)]
        self.workers: list[Any] = []
        self.backends: list[SimulatedBackend] = []
        for rank, raw in enumerate(self.memory):
            worker = KvkeepConnector(config, KVConnectorRole.WORKER, kv_config)
            caches = dict.fromkeys(LAYERS, raw)
            regions = regions_of(caches, kv_config.kv_cache_tensors, kv_config.num_blocks)
            made = self._backend(seed * 31 + rank)
            worker._worker = WorkerSide(worker._settings, shape.ranks, regions, made)
            worker._worker._part = shape.part
            self.workers.append(worker)
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        config.scheduler_config.async_scheduling = shape.asynchronous
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            hash_block_size=shape.block_tokens,
            log_stats=True,
        )
        self.scheduler.defer_block_free = shape.asynchronous
        hashing = get_hash_fn_by_name("sha256")
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(shape.block_tokens, hashing)
        ready = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(ready)
        self.side = self.scheduler.connector._scheduler
        self._aggregator = KVOutputAggregator(shape.ranks)
        self._pending: list[Step] = []
        self.expected: dict[str, list[int]] = {}
        self.prompt_len: dict[str, int] = {}
        self.preempted: dict[str, int] = {}
        self._kv: dict[str, Kv] = {}
        self.texts: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.numbers: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._count = 0
        self.moving = True  # whether copies go on by themselves

    def _backend(self, seed: int) -> Any:
        def make(real: Any, device: Any, host: Any) -> SimulatedBackend:
            real.close(5.0)
            backend = SimulatedBackend(device, host, seed=seed, fail_rate=self.shape.fail_rate)
            self.backends.append(backend)
            return backend

        return make

    # ------------------------------------------------------------------ requests

    def add(self, prompt: list[int], say: int, **kwargs: Any) -> str:
        """A request that is to say `say` tokens."""
        name = f"r{self._count}"
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=say, ignore_eos=True)
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher, **kwargs)
        self.expected[name] = continued(prompt, say)
        self.prompt_len[name] = len(prompt)
        self._kv[name] = kv_of(self.expected[name])
        self.texts[name] = []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """Its client is gone."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "aborted"

    @property
    def live(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name in self.texts if name not in self.finished]

    # ------------------------------------------------------------------ steps

    def step(self) -> bool:
        """One of the engine's steps; False when it has nothing to do."""
        depth = 2 if self.shape.asynchronous else 1
        if self.scheduler.has_requests():
            self._pending.append(self._schedule())
            if len(self._pending) < depth and self.scheduler.has_requests():
                return True
        if not self._pending:
            return False
        step = self._pending.pop(0)
        outputs = [self._run(rank, step) for rank in range(self.shape.ranks)]
        output = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        for of_client in self.scheduler.update_from_output(step.output, output).values():
            for said in of_client.outputs:
                self.texts[said.request_id] += said.new_token_ids
                if said.finish_reason is not None:
                    self.finished[said.request_id] = str(said.finish_reason)
                if said.prefill_stats is not None:
                    self.cached[said.request_id] = said.prefill_stats.num_cached_tokens
            if of_client.scheduler_stats is not None and of_client.scheduler_stats.kv_connector_stats:
                self._take(of_client.scheduler_stats.kv_connector_stats)
        for backend in self.backends:
            for _ in range(self.random.randrange(6) if self.moving else 0):
                backend.step()
        return True

    def _take(self, report: dict[str, Any]) -> None:
        for name, value in report["counters"].items():
            self.numbers[name] = self.numbers.get(name, 0) + value
        self.gauges = report["gauges"]

    def run(self, steps_max: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise AssertionError(f"{steps_max} steps, and still {self.live}, jobs {self.side._jobs}")

    def _schedule(self) -> Step:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        requests = {name: self.scheduler.requests[name] for name in names}
        self.preempted.update((name, request.num_preemptions) for name, request in requests.items())
        computed = {name: r.num_computed_tokens - output.num_scheduled_tokens[name] for name, r in requests.items()}
        sampling = {name: not r.is_prefill_chunk for name, r in requests.items()}
        blocks = {name: self.scheduler.kv_cache_manager.get_block_ids(name)[0] for name in names}
        return Step(output, sampling, computed, blocks)

    def _run(self, rank: int, step: Step) -> ModelRunnerOutput:
        """What a rank's worker does in a step: vLLM's own mixin around the forward."""
        names = list(step.output.num_scheduled_tokens)
        said: list[list[int]] = []
        with (
            patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.workers[rank]),
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(step.output) as connector,
        ):
            for name in names:
                said.append(self._forward(rank, step, name))
        assert isinstance(connector, KVConnectorOutput)
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled_token_ids=said, kv_connector_output=connector)

    def _forward(self, rank: int, step: Step, name: str) -> list[int]:
        first, count = step.computed[name], step.output.num_scheduled_tokens[name]
        blocks, size = np.array(step.blocks[name]), self.shape.block_tokens
        last = first + count
        kv = self._kv[name]
        for layer in range(len(LAYERS)):
            view, salt = self._view(rank, layer), layer * 7919 + rank * 104729
            there = view[blocks[: -(-first // size)]].reshape(-1)[:first]
            wrong = np.flatnonzero(there != (kv[:first] ^ salt))
            assert not len(wrong), f"{name}: {len(wrong)} of {first} positions hold another KV, from {wrong[0]} on"
            at = np.arange(first, last)
            view[blocks[at // size], at % size] = kv[first:last] ^ salt
        return [self.expected[name][last]] if step.sampling[name] and last < len(self.expected[name]) else []

    def _view(self, rank: int, layer: int) -> Kv:
        """int64 [blocks, block_tokens]: a layer's KV."""
        raw = self.memory[rank].numpy()
        part = raw[layer * self._layer_stride :].view(np.int64)
        shape = (self.shape.blocks, self.shape.block_tokens)
        return np.lib.stride_tricks.as_strided(part, shape, (self._block_stride, POSITION_NBYTES))

    # ------------------------------------------------------------------ at the end

    def check_texts(self) -> None:
        """Every request that was not aborted has said its tokens."""
        assert not self.live
        for name, how in self.finished.items():
            said = self.texts[name]
            assert how == "aborted" or said == self.expected[name][self.prompt_len[name] :], name

    def check_idle(self) -> None:
        """Every request has said its tokens, and everybody has let go of everything."""
        self.check_texts()
        assert not self.scheduler.requests
        side, cache = self.side, self.side.cache
        assert not side.busy and not side.holds_blocks and not side._chains and not side._late
        assert self.scheduler.kv_cache_manager.usage == 0.0
        assert cache is not None
        cache.check_invariants()
        stats = cache.stats()
        assert stats.leases == 0 and stats.pages_live == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert self.numbers.get("wrong_blocks", 0) == 0
