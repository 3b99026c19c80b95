"""kvkeep keeps the KV pages of finished requests and hands them to the next request that begins the same way.

Must not know torch, cupy or a model library: importing it loads none of them.
"""

__version__ = "0.1.0"

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, KvkeepError, OutOfPages
from kvkeep.index.hints import Discard, Expect, Pin
from kvkeep.index.media import MediaItem
from kvkeep.index.names import Identity
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout

__all__ = [
    "BadInput",
    "CacheConfig",
    "Discard",
    "Expect",
    "GpuPool",
    "Identity",
    "InvariantViolation",
    "KvkeepError",
    "Lease",
    "MediaItem",
    "OutOfPages",
    "PageLayout",
    "Pin",
    "TieredCache",
    "__version__",
]
