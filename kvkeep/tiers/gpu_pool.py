"""The pool of pages that the model reads: on a GPU, or in host memory where there is none.

Must not know names, runs or requests; who owns a page is the ledger's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.config import check_int
from kvkeep.errors import BadInput
from kvkeep.tiers import memory
from kvkeep.tiers.layout import PageLayout

if TYPE_CHECKING:
    import torch


class GpuPool:
    """`pages` numbered pages and their bytes.

    Made by `allocate` (memory of its own), `adopt` (an engine's tensors) or `bookkeeping` (no bytes at all: for
    engines that keep the bytes themselves, and for replays).
    """

    def __init__(self, pages: int, layout: PageLayout | None, page_memory: memory.PageMemory | None) -> None:
        self.pages = check_int("pages", pages, at_least=1)
        self.layout = layout
        self.memory = page_memory

    @classmethod
    def allocate(cls, layout: PageLayout, pages: int, device: str = "cpu") -> "GpuPool":
        """A pool with zeroed memory of `pages * layout.page_nbytes` bytes on a torch device."""
        check_int("pages", pages, at_least=1)
        return cls(pages, layout, memory.allocate(layout, pages, device))

    @classmethod
    def adopt(
        cls, tensors: "torch.Tensor | Sequence[torch.Tensor]", layout: PageLayout, page_axis: int = 0
    ) -> "GpuPool":
        """A pool over tensors that an engine has allocated; see `memory.adopt` for the shapes."""
        adopted, pages = memory.adopt(tensors, layout, page_axis)
        return cls(pages, layout, adopted)

    @classmethod
    def bookkeeping(cls, pages: int) -> "GpuPool":
        """A pool without bytes."""
        return cls(pages, None, None)

    def check_page_size(self, page_size: int) -> None:
        """`BadInput` unless a page holds so many positions; a pool without bytes does not know."""
        if self.layout is not None and self.layout.page_size != page_size:
            raise BadInput(
                f"the pool has pages of {self.layout.page_size} positions and the configuration says {page_size}: "
                f"they must be equal"
            )

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page; `BadInput` for a pool without bytes."""
        if self.layout is None:
            raise BadInput("this pool has no bytes: make it with GpuPool.allocate or GpuPool.adopt")
        return self.layout.page_nbytes

    @property
    def kv(self) -> "torch.Tensor":
        """The page-major tensor [pages, layers, 2, page_size, kv_heads, head_dim] of a pool that has one."""
        if not isinstance(self.memory, memory.PageMajorMemory):
            raise BadInput("this pool has no page-major tensor: make it with GpuPool.allocate")
        return self.memory.kv

    def copy_positions(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` positions of a page to another; nothing in a pool without bytes."""
        if self.memory is not None:
            self.memory.copy_positions(source, target, count)
