"""kvkeep keeps the KV pages of finished requests and hands them to the next request that begins the same way.

Must not know torch, cupy or a model library: importing it loads none of them, and each public name loads its
own module on first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME_OF = {
    "CacheConfig": "kvkeep.config",
    "BadInput": "kvkeep.errors",
    "InvariantViolation": "kvkeep.errors",
    "KvkeepError": "kvkeep.errors",
    "OutOfPages": "kvkeep.errors",
    "GpuPool": "kvkeep.tiers.gpu_pool",
    "PageLayout": "kvkeep.tiers.layout",
    "Identity": "kvkeep.index.names",
    "MediaItem": "kvkeep.index.names",
    "Lease": "kvkeep.cache",
    "TieredCache": "kvkeep.cache",
}

__all__ = [
    "BadInput",
    "CacheConfig",
    "GpuPool",
    "Identity",
    "InvariantViolation",
    "KvkeepError",
    "Lease",
    "MediaItem",
    "OutOfPages",
    "PageLayout",
    "TieredCache",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load the module that a public name lives in, the first time the name is used."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
