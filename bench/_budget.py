"""What pools hold: bytes that outputs leave empty, and one budget for KV and outputs against a part for each.

Must not know how a figure is judged.  The caches have no bytes: their bookkeeping is the real one.
"""

import math
import random
from dataclasses import dataclass

import numpy as np

from bench._outputs import LAYOUT
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, EvictionName
from kvkeep.index.output import Tensor, encoder_identity
from kvkeep.replay.result import Settings
from kvkeep.replay.workloads.named import make_workload
from kvkeep.replay.workloads.serving import Saved, Serving
from kvkeep.tiers.gpu_pool import GpuPool

NBYTES_MIN, NBYTES_MAX = 20e3, 20e6
#: Pages of a chain of KV, at most; the share of outputs asked for that are new.
CHAIN_PAGES_MAX, NEW_SHARE = 8, 0.5
LOOK_EVERY = 50


def waste_share(kv_share: float, pages: int, operations: int, seed: int = 0) -> float:
    """1 - live bytes / bytes of pages that are not free, on average over the second half of the operations.

    An operation is a request with 1 to 8 pages of KV of its own (a share `kv_share` of them), or an occurrence of an
    output, new or seen before, of 20 KB to 20 MB, log-uniform.  Pages are of 2.8 MiB; the pool is full by then.
    """
    rng = random.Random(seed)
    cache = TieredCache(CacheConfig(eviction="lru"), GpuPool(pages, LAYOUT, None), b"bench")
    outputs, identity = cache.outputs(), encoder_identity(b"bench", b"")
    sizes: list[int] = []
    found = []
    for number in range(operations):
        if rng.random() < kv_share:
            length = rng.randint(1, CHAIN_PAGES_MAX) * 128
            cache.finish(cache.admit(np.full(length, number, dtype=np.int32)), length)
        else:
            new = not sizes or rng.random() < NEW_SHARE
            if new:
                sizes.append(int(math.exp(rng.uniform(math.log(NBYTES_MIN), math.log(NBYTES_MAX)))))
            which = len(sizes) - 1 if new else rng.randrange(max(0, len(sizes) - pages), len(sizes))
            record = which.to_bytes(16, "big")
            hold = outputs.find(identity, record)
            if hold is None:
                hold = outputs.reserve(identity, sizes[which])
                outputs.store(hold, record, (Tensor((sizes[which],), "uint8", 0, sizes[which]),), 0.01)
            outputs.release(hold)
        if number >= operations // 2 and number % LOOK_EVERY == 0:
            found.append(_waste(cache, pages))
    cache.check_invariants()
    return sum(found) / len(found)


def _waste(cache: TieredCache, pages: int) -> float:
    """KV pages are full; outputs fill whole pages and slots."""
    stats = cache.outputs().stats()
    taken = pages - cache.stats().pages_free
    kv = taken - stats.slotted_pages - stats.whole_pages
    return 1 - (stats.nbytes + kv * LAYOUT.page_nbytes) / (taken * LAYOUT.page_nbytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """One workload in one size of pool: what one budget saved, and what parts of it did, by the share that KV has.

    gain: seconds saved over those of two halves.
    """

    workload: str
    gpu_tokens: int
    eviction: str
    one: Saved
    parts: dict[float, Saved]

    @property
    def gain(self) -> float:
        return self.one.saved_s / self.parts[0.5].saved_s - 1

    @property
    def waited(self) -> bool:
        """Whether requests waited for pages: what a part saves by letting fewer requests run is not its own."""
        return self.one.waited_s > 1.0 or self.parts[0.5].waited_s > 1.0


def budget(workload: str, gpu_tokens: int, eviction: EvictionName, shares: tuple[float, ...]) -> Budget:
    """Serves a workload with one budget, and with so many shares of the pool for KV alone."""
    made, settings = make_workload(workload), Settings(gpu_tokens=gpu_tokens, eviction=eviction)
    parts = {share: Serving(made, settings, kv_share=share).run() for share in shares}
    return Budget(workload, gpu_tokens, eviction, Serving(made, settings).run(), parts)
