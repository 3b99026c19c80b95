"""M*: its KV manager over a kvkeep cache, without a change to its source.

Must not know models, nor how M* schedules.  Written for mstar-ai 0.2.1, and refused by any other release.

    (kept,) = attach(engine, nodes=("LLM",), cpu_tier_gib=32)                   once, after `load_model`
    engine.add_request(rid, {"kv": KeptReqConfig(prompts={"main": Prompt(ids)})})

What is wrapped, in the order in which a request meets it:

    Engine.check_ready        probe: what matches is pinned, and pages are reserved to the end of the prompt; not ready
                              while pages are on their way, so a load that fails is a miss before M* has seen anything
    submodule.prepare_inputs  trim: the matched ids leave the inputs, once they have been compared with the prompt
    submodule.declare_step    the sampler's seen tokens: those that were trimmed as well
    KVManager.commit          store: pages that are full
    KVManager._alloc, reload  whose pages the arena's `acquire` gives
    remove, reset, offload    whose pages the arena's `release` takes
    SubmoduleManagement.forward, forward_batched    of encoders: their outputs (`mstar_encoders.py`)

Each (request, label) of M* that has pages has a lease; the arena is the cache's pool, but for page 0, M*'s sink.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from mstar.engine.resources.attn.base import AttentionManager
from mstar.engine.resources.attn.cross import CrossAttentionManager
from mstar.engine.resources.kv.config import KVLayout
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.position.manager import PositionManager
from mstar.engine.resources.step import FULL_ADMIT_NOT_READY

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, EvictionName, check_choice
from kvkeep.engine.host_tier import HostTier, WrapBackend
from kvkeep.errors import BadInput
from kvkeep.index.names import frame
from kvkeep.integrations.mstar_encoders import KeptEncoder, keep_encoder
from kvkeep.integrations.mstar_streams import Counts, KeptReqConfig, Prompt, Streams
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import DTYPE_NBYTES, PageLayout

__all__ = ["VERSION", "KeptEncoder", "KeptKV", "KeptReqConfig", "Options", "Prompt", "attach", "check_version"]

log = logging.getLogger(__name__)

VERSION = "0.2.1"
CLOSE_S = 5.0  # seconds that copies get to end


@dataclass(frozen=True)
class Options:
    """Settings of `attach`.

    nodes: the nodes whose prompts may be cut: what they give for the positions that are left out, nobody needs.
    cpu_tier_gib: GiB of host memory for cached pages, for each KV cache.  M*'s own `cpu_offload_pages`, for requests
        that it has suspended, come on top, and neither takes the other's.
    encoders: by node, encoders whose outputs are kept.
    eviction: see `CacheConfig`.
    model: names the weights.
    wrap_backend: for tests, see `HostTier`.
    """

    nodes: tuple[str, ...] = ()
    cpu_tier_gib: float = 0.0
    encoders: Mapping[str, KeptEncoder] = field(default_factory=dict)
    eviction: EvictionName = "lru"
    model: str = ""
    wrap_backend: WrapBackend | None = None


def attach(engine: Any, **options: Any) -> "list[KeptKV]":
    """Puts every KV cache of a loaded M* engine over a kvkeep cache; see `Options`.

    To be called before the first request.  With more than one rank it changes nothing and says so: ranks would decide
    each for itself.  Raises `BadInput` for an option, a release, a layout or a size that it cannot serve.
    """
    check_version(version("mstar-ai"))
    known = [f.name for f in fields(Options)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise BadInput(f"unknown option {', '.join(unknown)}: there are {', '.join(known)}")
    settings = Options(**options)
    check_choice("eviction", settings.eviction, ("lru", "rhythm"))
    managers = {key: res for key, res in engine._resources.items() if isinstance(res, KVManager)}
    if not managers:
        raise BadInput("the engine has no KV cache: call attach after load_model, where the KV caches are")
    strange = sorted({*settings.nodes, *settings.encoders} - set(engine._submodules))
    if strange:
        raise BadInput(f"no node {', '.join(strange)} in this engine: there are {', '.join(engine._submodules)}")
    for node in settings.nodes:
        _check_node(node, engine._submodules[node].resources)
    ranks = {key: kv._world_size for key, kv in managers.items() if kv._world_size > 1}
    if ranks:
        log.warning("kvkeep: %s has %d ranks, which would decide each for itself: nothing is kept", *ranks.popitem())
        return []
    kept = [KeptKV(engine, key, kv, settings) for key, kv in managers.items()]
    for node, encoder in settings.encoders.items():
        keep_encoder(engine._submodules[node], encoder, kept[0].cache)
    return kept


def check_version(found: str) -> None:
    """`BadInput` for another release: what is wrapped are not public names."""
    if found != VERSION:
        raise BadInput(f"mstar-ai {found}: kvkeep knows {VERSION} from the inside, and no other")


class KeptKV:
    """One KV manager of M*, with its pages from `cache`; `streams` says who holds them."""

    def __init__(self, engine: Any, key: str, kv: Any, options: Options) -> None:
        layout = layout_of(kv)
        if kv._arena.num_free != kv.config.max_num_pages - 1:
            raise BadInput(f"KV cache {key!r} has requests already: attach before the first one")
        positions = _positions_of(engine, key)
        pool = GpuPool.adopt([kv.kv_cache.layer_view(i) for i in range(layout.layers)], layout)
        self._below = _host_tier(key, kv, pool, options)
        self.cache = TieredCache(
            CacheConfig(page_size=layout.page_size, eviction=options.eviction),
            pool,
            frame([("mstar", VERSION.encode()), ("model", options.model.encode()), ("layout", repr(layout).encode())]),
            host=self._below.pool if self._below is not None else None,
            transfers=self._below.transfers if self._below is not None else None,
        )
        self.streams = Streams(kv, self.cache, self._below, positions)
        kv._arena = Arena(self.streams, kv.kv_cache)
        self._wrap_pages(kv)
        self._wrap_requests(kv)
        nodes = {name for name in options.nodes if key in engine._submodules[name].resources}
        for node in nodes:
            self._wrap_node(node, engine._submodules[node].submodule)
        if nodes:
            self._wrap_check_ready(engine, nodes)

    @property
    def counts(self) -> Counts:
        """What became of prompts so far."""
        return self.streams.counts

    def close(self) -> None:
        """Ends the copies and lets go of host memory; M* must have stopped."""
        if self._below is not None:
            self.cache.close(drain=False, timeout_s=CLOSE_S)
            self._below.pool.close()

    def check_invariants(self) -> None:
        """Raises `InvariantViolation` when pages and their owners differ; for tests, and while nothing runs."""
        self.streams.check_invariants()

    # ------------------------------------------------------------------ what is wrapped

    def _wrap_pages(self, kv: Any) -> None:
        """Who takes pages, and who writes over those that it has."""
        streams, alloc, commit, reload, fork = self.streams, kv._alloc, kv.commit, kv.reload, kv._reserve_fork

        def kept_alloc(request_id: str, label: str, seq_len: int) -> Any:
            with streams.acting_for((request_id, label)):
                return alloc(request_id, label, seq_len)

        def kept_commit(step: Any, ctx: Any) -> None:
            with kv._lock:
                commit(step, ctx)
                if step.commit:
                    streams.committed(step)

        def kept_reload(rid: str) -> bool:
            labels = kv._cpu_pool.labels(rid) if kv._cpu_pool is not None else ()
            with streams.acting_for(*((rid, label) for label in labels)):
                return bool(reload(rid))

        def kept_fork(rid: str, from_label: str, to_label: str, **more: Any) -> Any:
            with kv._lock:
                streams.forked_onto((rid, to_label))
                return fork(rid, from_label, to_label, **more)

        kv._alloc, kv.commit, kv.reload, kv._reserve_fork = kept_alloc, kept_commit, kept_reload, kept_fork

    def _wrap_requests(self, kv: Any) -> None:
        """Who gives pages back, and how many others could have then."""
        streams, remove, reset, offload = self.streams, kv.remove_request, kv.reset_request, kv.offload
        commit_offload = kv._commit_offload

        def kept_remove(rid: str) -> None:
            with streams.acting_for((rid, "")):
                remove(rid)
                streams.forget(rid)

        def kept_reset(rid: str, free: bool = False) -> None:
            with streams.acting_for((rid, "")):
                reset(rid, free=free or streams.named(rid))  # pages that others may read are not written again

        def kept_commit_offload(rid: str, moved: Any) -> Any:
            with kv._lock, streams.acting_for((rid, "")):
                before = streams.sleeping(rid, [claim.label for claim in moved])
                freed, labels = commit_offload(rid, moved)
                streams.asleep(before, labels)
                return freed, labels

        def kept_offload(rid: str) -> int:
            exclusive = streams.exclusive_pages(rid)
            return min(exclusive, int(offload(rid)))

        kv.remove_request, kv.reset_request, kv._commit_offload = kept_remove, kept_reset, kept_commit_offload
        kv.offload, kv.reclaimable = kept_offload, streams.exclusive_pages

    def _wrap_node(self, node: str, submodule: Any) -> None:
        """What a node is given to compute."""
        streams = self.streams
        prepare: Callable[..., Any] = submodule.prepare_inputs
        declare: Callable[..., Any] = submodule.declare_step

        def kept_prepare(graph_walk: str, fwd_info: Any, inputs: Any, **more: Any) -> Any:
            out = prepare(graph_walk=graph_walk, fwd_info=fwd_info, inputs=inputs, **more)
            key = streams.kept_label(node, fwd_info.request_id, graph_walk)
            return out if key is None or out is None else streams.trim(key, out)

        def kept_declare(*args: Any, **more: Any) -> Any:
            step = declare(*args, **more)
            if step is not None:
                streams.seen(step)
            return step

        submodule.prepare_inputs, submodule.declare_step = kept_prepare, kept_declare

    def _wrap_check_ready(self, engine: Any, nodes: set[str]) -> None:
        """Whether a request may run."""
        probe, check = self.streams.probe, engine.check_ready

        def kept_check_ready(node_name: str, request_id: str, request_info: Any) -> Any:
            if node_name in nodes and not probe(node_name, request_id, request_info):
                return FULL_ADMIT_NOT_READY
            return check(node_name, request_id, request_info)

        engine.check_ready = kept_check_ready


class Arena:
    """What `KVManager` asks for pages, in the shape of its `PageArena`."""

    def __init__(self, streams: Streams, kv_cache: Any) -> None:
        self._streams = streams
        self.kv_cache = kv_cache

    def acquire(self, n: int) -> list[int] | None:
        """`n` pages, or None."""
        return self._streams.acquire(n)

    def release(self, pages: Sequence[int]) -> None:
        """Takes the pages of one stream back."""
        self._streams.release(pages)

    def copy_pages(self, src: list[int], dst: list[int]) -> None:
        """Copies whole pages."""
        self.kv_cache.copy_pages(src, dst)

    @property
    def num_free(self) -> int:
        """Pages that can be had."""
        return self._streams.num_free


def layout_of(kv: Any) -> PageLayout:
    """What a page of a KV manager looks like; `BadInput` for one that is not understood."""
    config, tensor = kv.config, kv.kv_cache.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    if config.layout is not KVLayout.NHD:
        raise BadInput(f"KV layout {config.layout}: kvkeep knows NHD")
    if dtype not in DTYPE_NBYTES:
        raise BadInput(f"KV dtype {dtype}: it must be one of {', '.join(DTYPE_NBYTES)}")
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, config.page_size)
    return PageLayout(*sizes, dtype)  # type: ignore[arg-type]


def _check_node(node: str, resources: Mapping[str, Any]) -> None:
    """Whatever depends on the whole prompt must be in the one KV cache, or cutting prompts would change outputs."""
    caches = [key for key, resource in resources.items() if isinstance(resource, KVManager)]
    if len(caches) != 1:
        raise BadInput(f"node {node} has {len(caches)} KV caches: prompts can be cut where there is exactly one")
    for resource in resources.values():
        if isinstance(resource, CrossAttentionManager):
            raise BadInput(f"node {node} has cross attention: what it keeps of a prompt is not in its KV cache")
    attention = [resource for resource in resources.values() if isinstance(resource, AttentionManager)]
    if attention and not any(resource.requires_kv_write for resource in attention):
        raise BadInput(f"node {node} has an attention that writes no KV pages: there is nothing to keep")


def _positions_of(engine: Any, key: str) -> Any:
    """The resource that counts positions over this KV cache; None when the model has none."""
    found = [r for r in engine._resources.values() if isinstance(r, PositionManager) and key in r.depends_on()]
    if any(not hasattr(resource, "_counters") for resource in found) or len(found) > 1:
        raise BadInput(f"KV cache {key!r} has positions that cannot be set: {[type(r).__name__ for r in found]}")
    return found[0] if found else None


def _host_tier(key: str, kv: Any, pool: GpuPool, options: Options) -> HostTier | None:
    """Host memory for cached pages, beside M*'s own for suspended requests."""
    assert pool.layout is not None
    page_nbytes, page_size = pool.layout.page_nbytes, pool.layout.page_size
    if not options.cpu_tier_gib >= 0:
        raise BadInput(f"cpu_tier_gib is {options.cpu_tier_gib!r}: it must be a number of GiB, 0 or more")
    pages = int(options.cpu_tier_gib * 2**30) // page_nbytes
    request = min(-(-kv.config.max_seq_len // page_size), pool.pages - 1)
    if options.cpu_tier_gib and pages < request:
        raise BadInput(
            f"cpu_tier_gib={options.cpu_tier_gib:g} holds {pages} pages, and one request of {key!r} may have {request}"
            f": use {request * page_nbytes / 2**30:.3g} or more, or 0 for none"
        )
    theirs = kv.config.cpu_offload_pages
    log.info("kvkeep: %s: %d host pages for cached prefixes, %d of M*'s for suspended requests", key, pages, theirs)
    sizes = SimpleNamespace(host_pages=pages, suspend_pages=0, copy_threads=1)
    return HostTier(pool, sizes, options.wrap_backend) if pages else None
