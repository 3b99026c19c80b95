"""What an operator may set for the vLLM connector, and what it refuses at start-up.

Must not import vLLM: it is handed the configuration objects, and reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvkeep.config import EvictionName, check_choice, check_int
from kvkeep.errors import BadInput

#: The releases whose connector interface this was written for and is tested with.
KNOWN_VERSIONS = ("0.32",)
#: KV dtypes whose bytes have passed the bit gate; quantised ones have not.
KV_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`.

    cpu_tier_gib: host memory of the tier in GiB, of all ranks of one engine together; each has its share.
    eviction: the order in which pages leave the tier, see `CacheConfig`.
    blocks_per_page: a page of the tier is so many of vLLM's blocks.  1 keeps every whole block of a prefix; more makes
        the index smaller where blocks are small.
    copy_threads: threads that copy where the KV cache is in host memory; a CUDA device copies by itself.
    allow_untested_vllm: start with a release of vLLM that is not in `KNOWN_VERSIONS`.
    check_copies: compare the bytes of every loaded block with those saved, by digest; for tests, since it holds up
        steps.
    """

    cpu_tier_gib: float
    eviction: EvictionName = "rhythm"
    blocks_per_page: int = 1
    copy_threads: int = 1
    allow_untested_vllm: bool = False
    check_copies: bool = False

    def __post_init__(self) -> None:
        gib: object = self.cpu_tier_gib
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < float("inf"):
            raise BadInput(f"cpu_tier_gib is {gib!r}: it must be a number of GiB above 0")
        check_choice("eviction", self.eviction, ("rhythm", "lru"))
        check_int("blocks_per_page", self.blocks_per_page, at_least=1)
        check_int("copy_threads", self.copy_threads, at_least=1)
        for name in ("allow_untested_vllm", "check_copies"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"{name} is {getattr(self, name)!r}: it must be true or false")

    @property
    def tier_nbytes(self) -> int:
        """Bytes of the tier, of all ranks together."""
        return int(self.cpu_tier_gib * 2**30)


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings in `kv_connector_extra_config`; `BadInput` names what is unknown or wrong."""
    known = [f.name for f in fields(Settings)]
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise BadInput(f"kv_connector_extra_config has no option {', '.join(unknown)}: there are {', '.join(known)}")
    if "cpu_tier_gib" not in extra:
        raise BadInput("kv_connector_extra_config lacks cpu_tier_gib: the GiB of host memory to keep KV in")
    return Settings(**extra)


def check_version(found: str, settings: Settings) -> None:
    """`BadInput` for a release whose interface may differ, unless the operator allows it."""
    if not settings.allow_untested_vllm and ".".join(found.split(".")[:2]) not in KNOWN_VERSIONS:
        raise BadInput(
            f"vLLM {found}: this connector is known to work with {', '.join(f'{v}.x' for v in KNOWN_VERSIONS)}; "
            f"install one of those, or set allow_untested_vllm to true and watch the outputs"
        )


def check_engine(config: Any, kv_cache_config: Any) -> int:
    """Token positions of one of vLLM's blocks; `BadInput` for what this connector cannot serve.

    config, kv_cache_config: vLLM's `VllmConfig` and `KVCacheConfig`.
    """
    transfer = config.kv_transfer_config
    if transfer.kv_connector != "KvkeepConnector":
        raise BadInput(
            f"kv_connector is {transfer.kv_connector}: KvkeepConnector works alone; two caches behind one engine would "
            "each hold half of what was kept"
        )
    if transfer.kv_role != "kv_both":
        raise BadInput(f"kv_role is {transfer.kv_role}: it must be kv_both, since what is stored is loaded here")
    if not config.cache_config.enable_prefix_caching:
        raise BadInput("prefix caching is off: kvkeep reuses where vLLM does; drop --no-enable-prefix-caching")
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise BadInput("context parallelism is on: a rank's block holds other positions then; use a size of 1")
    dtype = config.cache_config.cache_dtype
    if dtype not in KV_DTYPES:
        raise BadInput(f"kv_cache_dtype is {dtype}: only {', '.join(KV_DTYPES)} are known to come back bit for bit")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise BadInput(
            f"the model has {len(groups)} groups of KV layers: only models whose layers all attend to every position "
            "are served (add --disable-hybrid-kv-cache-manager for those with some sliding windows)"
        )
    spec = groups[0].kv_cache_spec
    for layer in getattr(spec, "kv_cache_specs", {"": spec}).values():  # one spec a layer where they differ in size
        kind = type(layer).__name__
        if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
            raise BadInput(f"the model's KV layers are {kind}: only those of full attention and of MLA are served")
        if str(layer.dtype).removeprefix("torch.") not in KV_DTYPES:
            raise BadInput(
                f"the model's KV is {layer.dtype}: only {', '.join(KV_DTYPES[1:])} are known to come back bit for bit"
            )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise BadInput("HiSparse keeps blocks in host memory itself: switch it off to use kvkeep")
    return int(spec.block_size)


def tier_slots(settings: Settings, block_nbytes: int, ranks: int) -> int:
    """Blocks that the tier holds when a block takes `block_nbytes` on each of `ranks`; a whole number of pages."""
    pages = settings.tier_nbytes // (block_nbytes * ranks * settings.blocks_per_page)
    return pages * settings.blocks_per_page


def check_tier(settings: Settings, slots: int, block_nbytes: int, ranks: int, block_tokens: int, longest: int) -> None:
    """`BadInput` for a tier that does not hold one request of `longest` tokens."""
    if slots * block_tokens < longest:
        pages = -(-longest // (block_tokens * settings.blocks_per_page))
        need = pages * settings.blocks_per_page * block_nbytes * ranks / 2**30
        raise BadInput(
            f"cpu_tier_gib {settings.cpu_tier_gib:g} holds {slots * block_tokens} tokens, and one request may have "
            f"{longest}: give {need:.2f} or more, or lower --max-model-len"
        )
