"""LMCache's `LMCacheEngine` over its `LocalCPUBackend`: `python -m bench.peers.lmcache_engine`, where LMCache is.

Must not know the others.

One tier, in host memory: what it is asked is to find and pin a prompt's chunks, hand them out, and keep new ones.  Its
engine's buffer moves no bytes, and objects are 4 KiB, the least that its allocator gives.  Names are made at each call
inside it, by the hash that it is configured with by default.
"""

import os
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from bench._workload import Ids, Turn
from bench.peers.plans import PAGE
from bench.peers.wire import Cannot, answers_apart, serve

OBJECT_NBYTES = 4096
#: KV of one layer and one head, bfloat16, so wide that a chunk is one object.
SHAPE = (1, 2, PAGE, 1, OBJECT_NBYTES // (2 * PAGE * 2))
NUMBERS = count(1)

Prepared = tuple[str, list[int], list[int]]


class Engine:
    """An engine of its own, with room for `tokens`."""

    def __init__(self, tokens: int) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=PAGE,
            local_cpu=True,
            save_unfull_chunk=False,
            max_local_cpu_size=tokens // PAGE * OBJECT_NBYTES / 2**30,
        )
        metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, SHAPE, chunk_size=PAGE)
        self._name = f"engine-{next(NUMBERS)}"
        self._engine = LMCacheEngineBuilder.get_or_create(
            self._name,
            config,
            metadata,
            MockGPUConnector(SHAPE),
            lambda tensor, source: None,
            lambda thing, source: thing,
        )
        self._engine.post_init()
        self._asked = 0

    def prepare(self, ids: list[int], turn: Turn) -> Prepared:
        """A name for the request; its prompt but for the token that is always computed; its full chunks at the end."""
        self._asked += 1
        return str(self._asked), ids[: turn.prompt_len - 1], ids[: turn.kv_len // PAGE * PAGE]

    def serve(self, prepared: Prepared) -> tuple[int, int]:
        """Lookup with pins, retrieval of what matched, release, storing of what is new."""
        name, prompt, whole = prepared
        engine = self._engine
        matched = engine.lookup(prompt, lookup_id=name, pin=True)
        if matched:
            engine.retrieve(prompt[:matched])
        engine.lookup_unpin(name)
        if len(whole) > matched:
            new = torch.ones(len(whole), dtype=torch.bool)
            new[:matched] = False
            engine.store(whole, mask=new)
        return matched, 0

    def close(self) -> None:
        """The engine, its threads and its buffer."""
        LMCacheEngineBuilder.destroy(self._name)


class LmcacheAdapter:
    """`Adapter` of LMCache."""

    version = version("lmcache")
    variants = ("lmcache",)

    def form(self, ids: Ids) -> list[int]:
        """A list."""
        listed: list[int] = ids.tolist()
        return listed

    def open(self, variant: str, tokens: int, host_tokens: int) -> Any:
        """See `Adapter`."""
        if host_tokens:
            raise Cannot("it has no tier on the GPU: what it does is in its W1 row")
        return Engine(tokens)


if __name__ == "__main__":
    answers = answers_apart()
    torch.set_num_threads(1)
    serve(LmcacheAdapter(), answers)
    os._exit(0)  # its threads would wait
