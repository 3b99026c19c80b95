"""vLLM's `KVCacheManager` and `CPUOffloadingManager`: `python -m bench.peers.vllm_manager`, where vLLM is.

Must not know the others.

A request pays its names: `Request` hashes the pages of its prompt, and of its answer as tokens come.  `vllm` is as it
is by default (SHA-256); `vllm_xxhash` takes its fastest.  With host memory below, `vllm` evicts by LRU there and
`vllm_arc` by ARC; chunks are looked up, loaded, and stored as its offloading connector does, without the copies.
"""

import sys
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

from bench._workload import Ids, Turn
from bench.peers.plans import PAGE
from bench.peers.wire import Cannot, answers_apart, serve

SAMPLING = SamplingParams(max_tokens=16)
MODEL_LEN_MAX = 2_000_000
HASHES = {"vllm": "sha256", "vllm_arc": "sha256", "vllm_xxhash": "xxhash"}

Prepared = tuple[str, list[int], list[int], int]


class OneTier:
    """A `KVCacheManager` over one group of full attention, driven as the scheduler drives it."""

    def __init__(self, hash_name: str, tokens: int) -> None:
        attention = FullAttentionSpec(block_size=PAGE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=tokens // PAGE + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=MODEL_LEN_MAX, scheduler_block_size=PAGE, hash_block_size=PAGE, enable_caching=True
        )
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(PAGE, hash_fn)
        self._asked = 0

    def prepare(self, ids: list[int], turn: Turn) -> Prepared:
        """A name for the request, and lists of token ids."""
        self._asked += 1
        prompt_len = turn.prompt_len
        return str(self._asked), ids[:prompt_len], ids[prompt_len : turn.final_len], turn.kv_len

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """Names and lookup; pages for the prompt; pages for the answer; the end."""
        name, prompt, answer, kv_len = prepared
        manager = self.manager
        request = Request(name, prompt, SAMPLING, None, block_hasher=self.hasher)
        blocks, matched, _ = manager.get_computed_blocks(request)
        allocated = manager.allocate_slots(request, len(prompt) - matched, matched, blocks)
        assert allocated is not None
        self.decode(request, answer, kv_len)
        manager.free(request)
        return matched, 0

    def decode(self, request: Any, answer: list[int], kv_len: int) -> None:
        """The answer's tokens, with pages for those that have KV; full pages are named and indexed."""
        prompt_len = request.num_prompt_tokens
        request.num_computed_tokens = prompt_len
        if answer:
            request.append_output_token_ids(answer)
            if kv_len > prompt_len:
                allocated = self.manager.allocate_slots(request, kv_len - prompt_len)
                assert allocated is not None
            request.num_computed_tokens = kv_len

    def close(self) -> None:
        """Nothing outlives it."""


class TwoTiers(OneTier):
    """The same above a `CPUOffloadingManager`."""

    def __init__(self, hash_name: str, tokens: int, host_tokens: int, policy: str) -> None:
        super().__init__(hash_name, tokens)
        self.host = CPUOffloadingManager(num_chunks=host_tokens // PAGE, cache_policy=policy)

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """The lookup goes on in host memory where the first tier ends; what is new is stored there as well."""
        name, prompt, answer, kv_len = prepared
        manager, host = self.manager, self.host
        request = Request(name, prompt, SAMPLING, None, block_hasher=self.hasher)
        blocks, matched, _ = manager.get_computed_blocks(request)
        context = ReqContext(name)
        host.on_new_request(context)
        keys = self._keys(context, request, 0)
        first = at = matched // PAGE
        most = (len(prompt) - 1) // PAGE
        while at < most and host.lookup(keys[at], context) is LookupResult.HIT:
            at += 1
        if at > first:
            host.prepare_load(keys[first:at], context)
            host.complete_load(keys[first:at], context)
        loaded = (at - first) * PAGE
        new = len(prompt) - matched - loaded
        allocated = manager.allocate_slots(request, new, matched, blocks, num_external_computed_tokens=loaded)
        assert allocated is not None
        self.decode(request, answer, kv_len)
        self._store(keys[at:] if loaded else keys, context)
        self._store(self._keys(context, request, len(keys))[: kv_len // PAGE - len(keys)], context)
        manager.free(request)
        host.on_request_finished(context)
        return matched, loaded

    def _keys(self, context: Any, request: Any, begin: int) -> list[Any]:
        """The keys of the request's pages from `begin` on."""
        keys = [make_offload_key(name, 0) for name in request.block_hashes[begin:]]
        for place, key in enumerate(keys, begin + 1):
            context.set_offload_key_position(key, place * PAGE)
        return keys

    def _store(self, keys: list[Any], context: Any) -> None:
        """Room for what is not there yet; None: it finds none, and nothing is stored."""
        if keys:
            prepared = self.host.prepare_store(keys, context)
            if prepared is not None:
                self.host.complete_store(prepared.keys_to_store, context)


class VllmAdapter:
    """`Adapter` of vLLM."""

    version = vllm.__version__
    variants = tuple(HASHES)

    def form(self, ids: Ids) -> list[int]:
        """A list, as `Request` takes it."""
        listed: list[int] = ids.tolist()
        return listed

    def open(self, variant: str, tokens: int, host_tokens: int) -> OneTier:
        """See `Adapter`."""
        if not host_tokens:
            if variant == "vllm_arc":
                raise Cannot("ARC is the order of its host tier")
            return OneTier(HASHES[variant], tokens)
        return TwoTiers(HASHES[variant], tokens, host_tokens, "arc" if variant == "vllm_arc" else "lru")


if __name__ == "__main__":
    answers = answers_apart()
    torch.set_num_threads(1)
    serve(VllmAdapter(), answers)
    sys.exit(0)
