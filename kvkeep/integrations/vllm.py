"""vLLM: the tier in host memory, behind its connector interface.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvkeepConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvkeep.integrations.vllm", "kv_connector_extra_config": {"cpu_tier_gib": 32}}'

Must not decide: it hands vLLM's calls to the two sides, and measures what they take of a step.

    scheduler's process   SchedulerSide   index, ledger, eviction order, identities (`vllm_scheduler.py`)
        StepPlan  | every step: which blocks are copied where, as arrays
        Done      ^ what has arrived, added up over the ranks
    each worker's process WorkerSide      pinned memory and copies (`vllm_worker.py`)

One scheduler decides, each rank of a tensor- or pipeline-parallel group copies its own bytes of the same block ids.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.errors import BadInput
from kvkeep.index.names import frame
from kvkeep.integrations.vllm_events import Stored
from kvkeep.integrations.vllm_messages import Done, Load, Ready, StepPlan
from kvkeep.integrations.vllm_scheduler import SchedulerSide
from kvkeep.integrations.vllm_settings import check_engine, check_tier, check_version, read_settings
from kvkeep.integrations.vllm_stats import PromMetrics, Stats
from kvkeep.integrations.vllm_worker import WorkerSide, regions_of

log = logging.getLogger(__name__)


class KvkeepConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One of the two sides, by `role`; vLLM makes one of each in the process that needs it."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config or {})
        check_version(vllm.__version__, self._settings)
        self._block_tokens = check_engine(vllm_config, kv_cache_config)
        self._ranks = int(vllm_config.parallel_config.world_size)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._step_began_ns = self._own_ns = 0
        self._over: tuple[list[int], set[int], set[int]] = ([], set(), set())
        self._worker_numbers: dict[str, float] = {}
        if role == KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"  # the default fails the request
            events, drafts = vllm_config.kv_events_config, vllm_config.speculative_config
            self._scheduler = SchedulerSide(
                block_tokens=self._block_tokens,
                blocks_per_page=self._settings.blocks_per_page,
                eviction=self._settings.eviction,
                ranks=self._ranks,
                fingerprint=_fingerprint(vllm_config),
                whole_media=bool(vllm_config.model_config.is_mm_prefix_lm),
                looks_ahead=drafts is not None and bool(drafts.use_eagle()),
                events=events is not None and events.enable_kv_cache_events,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a page that is not stored is a miss later."""
        return False

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Takes this rank's part of the tier."""
        if has_kv_transfer_group() and get_kv_transfer_group() is not self:
            outer = type(get_kv_transfer_group()).__name__
            raise BadInput(f"KvkeepConnector is inside {outer}: it works alone; give it as kv_connector itself")
        config = self._kv_cache_config
        regions = regions_of(kv_caches, config.kv_cache_tensors, config.num_blocks)
        self._worker = WorkerSide(self._settings, self._ranks, regions)
        log.info("kvkeep: %d blocks of %d bytes in host memory", self._worker.slots, self._worker.block_nbytes)

    def get_handshake_metadata(self) -> Ready:
        """What the scheduler has to know of this rank before the first request."""
        worker = self._the_worker()
        same = {"settings": repr(self._settings), "block_tokens": str(self._block_tokens)}
        return Ready(worker.slots, worker.block_nbytes, same)

    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        """A step begins."""
        self._step_began_ns = time.perf_counter_ns()
        self._own_ns = 0
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads; their requests wait for them, nobody else."""
        plan = self._get_connector_metadata()
        began_ns = time.perf_counter_ns()
        for load in plan.loads:
            self._the_worker().load(load.job, load.request_id, load.slots, load.blocks)
        self._own_ns += time.perf_counter_ns() - began_ns

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no forward runs over a block that is being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, after the step that fills them."""

    def wait_for_save(self) -> None:
        """Begins the stores of what this step has filled."""
        plan = self._get_connector_metadata()
        began_ns = time.perf_counter_ns()
        if plan.store_job >= 0:
            self._the_worker().store(plan.store_job, plan.store_blocks, plan.store_slots)
        self._own_ns += time.perf_counter_ns() - began_ns

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load is over, failed ones too."""
        worker = self._the_worker()
        began_ns = time.perf_counter_ns()
        jobs, failed, requests, lost = worker.poll()
        self._over = (jobs, failed, lost)
        ended_ns = time.perf_counter_ns()
        worker.count("worker_seconds", (self._own_ns + ended_ns - began_ns) / 1e9)
        if self.has_connector_metadata() and self._get_connector_metadata().forward:
            worker.count("steps", 1)
            worker.count("step_seconds", (ended_ns - self._step_began_ns) / 1e9)
        return None, set(requests) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive: vLLM computes them."""
        return self._over[2]

    def build_connector_worker_meta(self) -> Done | None:
        """What has become of jobs since the last step."""
        worker = self._the_worker()
        jobs, failed, _ = self._over
        self._over = ([], set(), set())
        numbers = worker.take_numbers()
        return Done(dict.fromkeys(jobs, 1), failed, worker.dead, numbers) if jobs or numbers or worker.dead else None

    def _the_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM has registered no KV cache yet"
        return self._worker

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Ready]) -> None:
        """Every rank is ready: the tier is as large as the smallest part, the same pages on all."""
        ranks = sorted(metadata)
        first = metadata[ranks[0]]
        for rank in ranks:
            for name, value in metadata[rank].settings.items():
                if value != first.settings[name]:
                    raise BadInput(
                        f"rank {rank} has {name} {value}, rank {ranks[0]} {first.settings[name]}: make them equal"
                    )
        slots = min(ready.slots for ready in metadata.values())
        longest = int(self._vllm_config.model_config.max_model_len)
        check_tier(self._settings, slots, first.block_nbytes, len(ranks), self._block_tokens, longest)
        self._the_scheduler().begin(slots)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM's cache: when it is emptied, no block may be held, and the connector is asked too late for that."""
        super().bind_kv_cache_manager(kv_cache_manager)
        scheduler, empty = self._the_scheduler(), kv_cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            scheduler.give_up_stores()
            return bool(empty())

        kv_cache_manager.reset_prefix_cache = reset_prefix_cache

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's blocks."""
        self._the_scheduler().bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request waits."""
        self._timed(self._the_scheduler().arrived, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Positions that the tier has behind those of vLLM's blocks; they are loaded between steps."""
        found = self._timed(self._the_scheduler().matched, request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has blocks for the request."""
        if num_external_tokens:
            self._timed(self._the_scheduler().allocated, request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """What the workers copy in this step."""
        loads, job, blocks, slots = self._timed(self._the_scheduler().plan, scheduler_output)
        forward = scheduler_output.total_num_scheduled_tokens > 0
        return StepPlan([Load(*load) for load in loads], job, blocks, slots, forward)

    def update_connector_output(self, connector_output: Any) -> None:
        """What has arrived on all ranks."""
        done = connector_output.kv_connector_worker_meta
        if done is not None:
            for name, value in done.numbers.items():
                self._worker_numbers[name] = self._worker_numbers.get(name, 0) + value
            self._timed(self._the_scheduler().done, done.ranks, done.failed, done.dead)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM frees the request's blocks, but for those that a store reads: these have a count of their own."""
        self._timed(self._the_scheduler().finished, request, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether it helps to wait for a copy, before a request is preempted."""
        return self._the_scheduler().holds_blocks

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although no request is left."""
        return self._the_scheduler().busy

    def reset_cache(self) -> bool:
        """Forgets what the tier holds."""
        return self._the_scheduler().reset()

    def take_events(self) -> Iterable[Any]:
        """What has entered and left the tier, in vLLM's format."""
        events = self._the_scheduler().events
        return [] if events is None else [self._event(event) for event in events.take()]

    def _event(self, event: Any) -> Any:
        if isinstance(event, Stored):
            return BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in event.hashes],
                parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
                token_ids=event.tokens,
                block_size=self._block_tokens,
                lora_id=event.lora_id,
                medium=MEDIUM_CPU,
                lora_name=event.lora_name,
            )
        return BlockRemoved(block_hashes=[maybe_convert_block_hash(h) for h in event.hashes], medium=MEDIUM_CPU)

    def get_kv_connector_stats(self) -> Stats | None:
        """The counters since the last report: of the scheduler's side, which has the workers' from `Done`."""
        if self._scheduler is None:
            return None
        report = self._scheduler.report()
        if report is None:
            return None
        report["counters"].update(self._worker_numbers)
        self._worker_numbers = {}
        return Stats(report)

    def shutdown(self) -> None:
        """Ends the copies."""
        if self._worker is not None:
            self._worker.close()

    def _the_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's side"
        return self._scheduler

    def _timed(self, call: Any, *args: Any) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return call(*args)
        finally:
            self._the_scheduler().counters["scheduler_seconds"] += (time.perf_counter_ns() - began_ns) / 1e9

    # ------------------------------------------------------------------ both

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """See `KVConnectorBase_V1`."""
        return Stats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PromMetrics:
        """See `KVConnectorBase_V1`."""
        return PromMetrics(*args)


def _fingerprint(config: Any) -> bytes:
    """What KV bytes depend on besides tokens, adapters and media; the tier lives no longer than the engine."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    fields = {
        "vllm": vllm.__version__,
        "model": model.model,
        "revision": model.revision,
        "dtype": model.dtype,
        "kv_dtype": cache.cache_dtype,
        "parallel": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    }
    return frame((name, str(value).encode()) for name, value in fields.items())
