"""What a page looks like in memory.

Must not know where the memory is or who owns the page.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.config import check_choice, check_int

DType = Literal["float32", "float16", "bfloat16"]
DTYPE_NBYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """A page of `page_nbytes` bytes of which no more is known: an engine's block, in its own order."""

    page_nbytes: int

    def __post_init__(self) -> None:
        check_int("page_nbytes", self.page_nbytes, at_least=1)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One page: K and V of `page_size` positions, all layers, shape [layers, 2, page_size, kv_heads, head_dim].

    K is stored after RoPE.  kv_heads are those of this rank.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int = 128
    dtype: DType = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_size"):
            check_int(name, getattr(self, name), at_least=1)
        check_choice("dtype", self.dtype, get_args(DType))

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page."""
        return (self.layers, 2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes of K and V of one position."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.token_nbytes
