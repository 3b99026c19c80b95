"""How much the GPU check measures: in full, and small.

Must not know how anything is measured, nor need more than the standard library and numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench._agent_figures import BOTH, GPU, OFF
from bench._gpu_path import Sizes as PathSizes
from kvkeep.tiers.layout import DType, PageLayout

MIB, KIB = 2**20, 2**10

#: The configurations of the model: no cache, pages kept in the pool, and in host memory too.
NAMES = (OFF, GPU, BOTH)

COMMANDS = {
    "engine_demo": "demo --model stories260k --sessions 3 --turns 3 --page-size 16 --pool-pages 40 --host-pages 200",
    "engine_verify": "verify --model stories260k --page-size 16 --cases 30",
}


def layout_of(piece_nbytes: int) -> PageLayout:
    """Pages of 64 pieces: 32 layers, K and V apart."""
    return PageLayout(layers=32, kv_heads=8, head_dim=128, page_size=piece_nbytes // 2048, dtype="float16")


@dataclass(frozen=True)
class ModelSizes:
    """What is asked.   growth: tokens that a turn brings.   rounds: of all configurations, their order turned round."""

    model: str
    dtype: DType
    page_size: int
    sessions: int
    turns: int
    growth: int
    new_tokens: int
    rounds: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    rate_nbytes: of a pool.   block_nbytes: a copy of the floor.   page_nbytes, piece_nbytes: pages of one piece, and
    pieces of which a page has 64.   rounds: in which all rates are measured.   trip: the layout and the pages that go
    there and back.   pin_pages: of 16 MiB.   path: the cache's.   hits: pages of the prompt, times.
    model: the agent sessions, and what they are held with.
    commands: of kvkeep, without --device.   commands_s, tests_s: seconds that one, and the device's tests, may take.
    """

    rate_nbytes: int
    block_nbytes: int
    page_nbytes: tuple[int, ...]
    piece_nbytes: tuple[int, ...]
    rounds: int
    trip: tuple[PageLayout, int]
    pin_pages: int
    path: PathSizes
    path_layout: PageLayout
    hits: tuple[PageLayout, int, int]
    model: ModelSizes
    commands: Mapping[str, str] = field(default_factory=lambda: COMMANDS)
    commands_s: float = 100.0
    tests_s: float = 150.0
    device_tests: bool = True


SMALL = PageLayout(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="float16")
FULL = Sizes(
    rate_nbytes=512 * MIB,
    block_nbytes=64 * MIB,
    page_nbytes=(MIB, 4 * MIB, 16 * MIB),
    piece_nbytes=(32 * KIB, 64 * KIB, 256 * KIB),
    rounds=7,
    trip=(layout_of(32 * KIB), 16),
    pin_pages=256,
    path=PathSizes(pool=64, host=256, suspend=32, prompt=12),
    path_layout=layout_of(32 * KIB),
    hits=(PageLayout(layers=4, kv_heads=2, head_dim=64, page_size=128, dtype="float16"), 1000, 20),
    model=ModelSizes("random-8b:4", "bfloat16", 128, sessions=8, turns=4, growth=4096, new_tokens=16, rounds=2),
)
SMOKE = Sizes(
    rate_nbytes=64 * MIB,
    block_nbytes=16 * MIB,
    page_nbytes=(MIB, 16 * MIB),
    piece_nbytes=(64 * KIB,),
    rounds=2,
    trip=(SMALL, 8),
    pin_pages=16,
    path=PathSizes(pool=64, host=256, suspend=32, prompt=12),
    path_layout=SMALL,
    hits=(SMALL, 100, 3),
    model=ModelSizes("random-tiny", "bfloat16", 16, sessions=4, turns=3, growth=64, new_tokens=4, rounds=1),
    device_tests=False,
)
