"""Models of random weights in the shapes of real ones: for what depends on sizes, not on sense.

Must not know the cache, nor where real weights are found.

    random-8b:4      four of the 32 layers of Llama 3 8B, each as large as there
"""

from dataclasses import dataclass, replace

from kvkeep.config import check_int
from kvkeep.errors import BadInput

PREFIX = "random-"
#: The generator's; the weights are a function of it, the shape, the dtype, the kind of device and torch's version.
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama: `layers` with `heads` query heads and `kv_heads` of K and V, `head_dim` wide each.

    The vocabulary is a quarter of the real ones', since its matrix is no KV cache's business.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 32_768
    positions: int = 131_072
    rope_theta: float = 500_000.0


#: From the models' own config.json: meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B.  "tiny" is nobody's.
SHAPES = {
    "tiny": Shape(4, 64, 128, 4, 2, 16, vocabulary=512),
    "1b": Shape(16, 2048, 8192, 32, 8, 64),
    "8b": Shape(32, 4096, 14336, 32, 8, 128),
}


def shape_of(name: str) -> Shape:
    """The shape that "random-KIND" or "random-KIND:LAYERS" stands for."""
    kind, _, layers = name.removeprefix(PREFIX).partition(":")
    if kind not in SHAPES:
        known = ", ".join(f"{PREFIX}{one}" for one in SHAPES)
        raise BadInput(f"unknown shape {name!r}: use one of {known}, with :LAYERS behind it for fewer layers")
    shape = SHAPES[kind]
    if not layers:
        return shape
    try:
        number = int(layers)
    except ValueError:
        raise BadInput(f"{name!r}: {layers!r} is no number of layers") from None
    check_int(f"layers of {name!r}", number, at_least=1)
    return replace(shape, layers=number)
