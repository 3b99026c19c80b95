"""SGLang's prefix caches: `python -m bench.peers.sglang_peer` serves them.

Must not know the others.

`sglang_rust` is `UnifiedRadixCache` over its tree core in Rust, `sglang_radix` the `RadixCache` in Python.  With host
memory below, `sglang_rust` is HiCache, which writes through: its engine's published configuration is a small stand-in,
and registration of memory and copies are switched off, as there is no GPU.
"""

from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sglang
import sglang.srt.runtime_context as runtime_context
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common as pool_host_common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench._workload import Ids, Turn
from bench.peers.plans import PAGE
from bench.peers.wire import Cannot

#: What HiCache reads of the engine's configuration.
MEMORY = SimpleNamespace(
    enable_unified_memory=False,
    hicache_host_memory_fraction=0.5,
    hicache_host_memory_mode="cache",
    hicache_io_backend="direct",
    hicache_mem_layout="layer_first",
    hicache_ratio=4.0,
    hicache_size=0,
    hicache_storage_backend=None,
    hicache_storage_backend_extra_config=None,
    hicache_storage_prefetch_policy="best_effort",
    hicache_write_policy="write_through",
)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a request leaves.   whole, prompt: keys of its full pages, and of those of its prompt, with their tokens."""

    whole: Any
    whole_len: int
    prompt: Any
    prompt_len: int
    kv_len: int


Prepared = tuple[str, Any, Kept]


def no_copy(*_: object, **__: object) -> None:
    """What is called where bytes would move."""


def published() -> None:
    """The stand-in for the engine's configuration, and no copies."""
    runtime_context._CONTEXT._config_bags = {
        "memory": MEMORY,
        "observability": SimpleNamespace(extra_metric_labels=None),
        "serving": SimpleNamespace(served_model_name="model"),
        "disagg": SimpleNamespace(disaggregation_mode="null"),
        "model": SimpleNamespace(context_length=2_000_000),
    }
    runtime_context.get_parallel().override_permanently(dcp_enabled=False, dcp_size=1, dcp_rank=0)
    pool_host_common._cuda_host_register = no_copy
    MHATokenToKVPoolHost.backup_from_device_all_layer_physical = no_copy
    MHATokenToKVPoolHost.load_to_device_per_layer_physical = no_copy


class OneTier:
    """A tree over an allocator of slots."""

    def __init__(self, variant: str, tokens: int, host_tokens: int = 0) -> None:
        tokens = tokens // PAGE * PAGE
        pool = MHATokenToKVPool(tokens, PAGE, torch.bfloat16, 1, 8, 1, "cpu", False) if host_tokens else None
        self.slots = PagedTokenToKVPoolAllocator(tokens, PAGE, torch.bfloat16, "cpu", pool, False)
        settings = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(2, 64, "cpu", False),
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
        )
        if variant == "sglang_radix":
            self.tree = RadixCache(settings)
            return
        settings.tree_components = (ComponentType.FULL,)
        settings.tree_core_backend = "rust"
        self.tree = UnifiedRadixCache(settings)
        assert "RustUnifiedTreeCore" == type(self.tree.tree_core).__name__
        if host_tokens:
            MEMORY.hicache_ratio = host_tokens / tokens
            self.tree.init_hicache(SimpleNamespace(file_storage_path=None), settings)

    def prepare(self, ids: "array[int]", turn: Turn) -> Prepared:
        """Keys: of the prompt but for the token that is always computed, of all full pages, of those of the prompt."""
        whole, prompt = (ids[: length // PAGE * PAGE] for length in (turn.kv_len, turn.prompt_len))
        kept = Kept(RadixKey(whole), len(whole), RadixKey(prompt), len(prompt), turn.kv_len)
        return str(id(turn)), RadixKey(ids, limit=turn.prompt_len - 1), kept

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """Match and lock, gather the slots, take new ones, insert all pages, unlock."""
        _, key, kept = prepared
        tree = self.tree
        found = tree.match_prefix(MatchPrefixParams(key=key))
        node, matched = found.last_device_node, found.device_prefix_len
        lock = tree.lock(node)
        self.keep(node, matched, kept)
        tree.unlock(lock)
        return matched, 0

    def keep(self, node: Any, matched: int, kept: Kept) -> None:
        """Slots for all positions that `node` does not have, and all full pages into the tree.

        Where the answer begins a node does, of a higher priority, as in the engine.
        """
        before = self.tree.path_device_indices(node)
        new = self._take(-(-(kept.kv_len - matched) // PAGE) * PAGE)
        slots = torch.cat([before, new])
        self._insert(kept.whole, slots[: kept.whole_len], matched)
        if 0 < kept.prompt_len < kept.whole_len:
            self._insert(kept.prompt, slots[: kept.prompt_len], kept.prompt_len, priority=1)
        if kept.whole_len < len(slots):
            self.slots.free(slots[kept.whole_len :])

    def _insert(self, key: Any, slots: Any, known_len: int, priority: int = 0) -> None:
        """`known_len` positions of them are in the tree."""
        found = self.tree.insert(
            InsertParams(key=key, value=slots, prev_prefix_len=known_len, inserted_len=known_len, priority=priority)
        )
        assert known_len == found.prefix_len

    def _take(self, tokens: int) -> Any:
        """So many slots; what is cached makes room."""
        if not tokens:
            return torch.empty(0, dtype=torch.int64)
        short = tokens - self.slots.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        taken = self.slots.alloc(tokens)
        if taken is None:  # what was freed may have to be sorted in first
            self.tree.evict(EvictParams(num_tokens=tokens))
            taken = self.slots.alloc(tokens)
        assert taken is not None
        return taken

    def close(self) -> None:
        """Nothing outlives it."""


class TwoTiers(OneTier):
    """HiCache: the tree of the device above a pool in host memory."""

    def __init__(self, variant: str, tokens: int, host_tokens: int) -> None:
        published()
        super().__init__(variant, tokens, host_tokens)

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """What the host has behind the device's match is loaded back before the rest."""
        name, key, kept = prepared
        tree = self.tree
        found = tree.match_prefix(MatchPrefixParams(key=key))
        node, matched, loaded = found.last_device_node, found.device_prefix_len, 0
        lock = tree.lock(node)
        if found.host_hit_length:
            request = SimpleNamespace(
                rid=name,
                last_node=node,
                swa_host_hit_length=0,
                mamba_host_hit_length=0,
                kv=SimpleNamespace(mamba_pool_idx=None),
            )
            loaded, node = tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
                )
            )
            if loaded:
                tree.ready_to_load_host_cache()
                behind = tree.lock(node)
                tree.unlock(lock)
                lock = behind
        self.keep(node, matched + loaded, kept)
        tree.unlock(lock)
        tree.check_hicache_events()
        return matched, loaded


class SglangAdapter:
    """`Adapter` of SGLang."""

    version = sglang.__version__
    variants = ("sglang_rust", "sglang_radix")

    def form(self, ids: Ids) -> "array[int]":
        """An array of 64-bit ids, as its keys hold."""
        return array("q", ids.tolist())

    def open(self, variant: str, tokens: int, host_tokens: int) -> OneTier:
        """See `Adapter`."""
        if not host_tokens:
            return OneTier(variant, tokens)
        if variant != "sglang_rust":
            raise Cannot("HiCache is measured over the Rust tree core")
        return TwoTiers(variant, tokens, host_tokens)
