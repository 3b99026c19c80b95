"""Where page bytes are: memory of our own, or an engine's tensors.

Must not know owners or names.  The only part of `tiers` that imports torch, and only when memory is asked for.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.layout import OpaqueLayout, PageLayout

if TYPE_CHECKING:
    import torch

#: What freed pages are filled with in tests: a NaN in every float dtype, so that any use of it shows.
POISON_BYTE = 0xFF

#: A piece of every page: uint8 of shape [pages, nbytes], each row contiguous.  numpy in host memory, torch on a device.
Plane: TypeAlias = "npt.NDArray[np.uint8] | torch.Tensor"


#: Bytes of a page: uint8 of one dimension.  numpy of `HostMemory`, torch of the others, on the device of the memory.
PageBytes: TypeAlias = "npt.NDArray[np.uint8] | torch.Tensor"

#: Bytes to write: bytes-like, or uint8 of any shape, whose elements are taken in order.
Data: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8] | torch.Tensor"


class PageMemory(Protocol):
    """The bytes of numbered pages.  Part of a page is said in the order of `page_bytes`, however it lies in memory;
    one that is not in its page is an `InvariantViolation`: it would be another page's."""

    def copy_positions(self, source: int, target: int, count: int) -> None:
        """Copies K and V of the first `count` positions of one page to another, in the device's stream order."""

    def page_bytes(self, page: int) -> bytes:
        """A copy of one page's bytes in the order of `PageLayout.shape`."""

    def poison(self, pages: Sequence[int]) -> None:
        """Fills pages with `POISON_BYTE`."""

    def planes(self) -> list[Plane]:
        """The same bytes, writable: the rows of all planes, joined in order, are a page's `page_bytes`."""

    def read(self, page: int, offset: int, nbytes: int) -> PageBytes:
        """`nbytes` of a page from `offset` on: a view where they lie in one piece, otherwise gathered into a copy."""

    def write(self, page: int, offset: int, data: Data) -> None:
        """Writes bytes into a page from `offset` on, in the device's stream order."""


class PageMajorMemory:
    """One tensor `kv` of shape [pages, *layout.shape]: a page is one contiguous piece."""

    def __init__(self, kv: "torch.Tensor") -> None:
        self.kv = kv

    def copy_positions(self, source: int, target: int, count: int) -> None:
        self.kv[target, :, :, :count].copy_(self.kv[source, :, :, :count])

    def page_bytes(self, page: int) -> bytes:
        return _as_bytes(self.kv[page])

    def poison(self, pages: Sequence[int]) -> None:
        _fill(self.kv, list(pages))

    def planes(self) -> list[Plane]:
        rows = _rows(self.kv)
        return [rows if rows.is_cuda else rows.numpy()]

    def read(self, page: int, offset: int, nbytes: int) -> "torch.Tensor":
        part: torch.Tensor = _parts([_rows(self.kv)], page, offset, nbytes)[0]
        return part

    def write(self, page: int, offset: int, data: Data) -> None:
        _write([_rows(self.kv)], page, offset, data)

    def span(self, first_page: int, nbytes: int) -> "torch.Tensor":
        """A view of `nbytes` over consecutive pages, from the start of `first_page` on.  torch uint8 [nbytes]."""
        rows = _rows(self.kv)
        pages, page_nbytes = rows.shape
        if first_page < 0 or nbytes < 1 or first_page * page_nbytes + nbytes > rows.numel():
            raise InvariantViolation(
                f"{nbytes} bytes from page {first_page} on of {pages} pages of {page_nbytes} bytes"
            )
        return rows.view(-1)[first_page * page_nbytes :][:nbytes]


class LayerMajorMemory:
    """One tensor a layer, each [pages, 2, page_size, kv_heads, head_dim], by a view where the engine differs."""

    def __init__(self, layers: Sequence["torch.Tensor"]) -> None:
        self.layers = list(layers)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        for layer in self.layers:
            layer[target, :, :count].copy_(layer[source, :, :count])

    def page_bytes(self, page: int) -> bytes:
        return b"".join(_as_bytes(layer[page]) for layer in self.layers)

    def poison(self, pages: Sequence[int]) -> None:
        for layer in self.layers:
            _fill(layer, list(pages))

    def planes(self) -> list[Plane]:
        """One plane a layer; two where the engine has all K pages before all V pages."""
        return [rows if rows.is_cuda else rows.numpy() for rows in self._pieces]

    def read(self, page: int, offset: int, nbytes: int) -> "torch.Tensor":
        parts = _parts(self._pieces, page, offset, nbytes)
        joined: torch.Tensor = parts[0] if len(parts) == 1 else _torch().cat(parts)
        return joined

    def write(self, page: int, offset: int, data: Data) -> None:
        _write(self._pieces, page, offset, data)

    @cached_property
    def _pieces(self) -> "list[torch.Tensor]":
        split = not self.layers[0].is_contiguous()
        return [_rows(part) for t in self.layers for part in ((t[:, 0], t[:, 1]) if split else (t,))]


class HostMemory:
    """Page-major host memory without torch: `rows` is uint8 [pages, layout.page_nbytes]."""

    def __init__(self, rows: "npt.NDArray[np.uint8]", layout: PageLayout | OpaqueLayout) -> None:
        self.rows = rows
        self._layout = layout

    def copy_positions(self, source: int, target: int, count: int) -> None:
        if isinstance(self._layout, OpaqueLayout):
            raise InvariantViolation("positions of a page whose layout is not known")
        positions = self.rows.reshape(len(self.rows), self._layout.layers * 2, self._layout.page_size, -1)
        positions[target, :, :count] = positions[source, :, :count]

    def page_bytes(self, page: int) -> bytes:
        return bytes(self.rows[page])

    def poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.rows[page] = POISON_BYTE

    def planes(self) -> list[Plane]:
        return [self.rows]

    def read(self, page: int, offset: int, nbytes: int) -> "npt.NDArray[np.uint8]":
        part: npt.NDArray[np.uint8] = _parts([self.rows], page, offset, nbytes)[0]
        return part

    def write(self, page: int, offset: int, data: Data) -> None:
        _write([self.rows], page, offset, data)


class OpaqueMemory:
    """An engine's blocks as they lie: row b of all `regions`, joined in order, is block b.

    regions: torch uint8 [blocks, bytes] each, every row contiguous, all on one device.
    """

    def __init__(self, regions: Sequence["torch.Tensor"]) -> None:
        self.regions = list(regions)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        raise InvariantViolation("positions of a page whose layout is not known")

    def page_bytes(self, page: int) -> bytes:
        return b"".join(_as_bytes(region[page]) for region in self.regions)

    def poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            for region in self.regions:
                region[page].fill_(POISON_BYTE)

    def planes(self) -> list[Plane]:
        return [region if region.is_cuda else region.numpy() for region in self.regions]

    def read(self, page: int, offset: int, nbytes: int) -> "torch.Tensor":
        parts = _parts(self.regions, page, offset, nbytes)
        joined: torch.Tensor = parts[0] if len(parts) == 1 else _torch().cat(parts)
        return joined

    def write(self, page: int, offset: int, data: Data) -> None:
        _write(self.regions, page, offset, data)


def allocate(layout: PageLayout, pages: int, device: str) -> PageMajorMemory:
    """New memory for `pages` pages on a torch device ("cpu", "cuda", "cuda:1")."""
    torch = _torch()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(f"device {device!r}: torch finds no CUDA device here; use 'cpu'")
    shape = (pages, *layout.shape)
    try:
        return PageMajorMemory(torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device))
    except (RuntimeError, MemoryError) as e:
        need = pages * layout.page_nbytes
        raise BadInput(
            f"a pool of {pages} pages needs {need / 2**30:.2f} GiB on {device!r}, which cannot be had; "
            f"use fewer pages ({str(e).splitlines()[0]})"
        ) from None


def adopt(
    tensors: "torch.Tensor | Sequence[torch.Tensor]", layout: PageLayout, page_axis: int = 0
) -> tuple[PageMajorMemory | LayerMajorMemory, int]:
    """An engine's own tensors as page memory, and how many pages they hold.

    tensors: one of shape [pages, *layout.shape], or one a layer of shape [pages, 2, page_size, kv_heads, head_dim]
        (page_axis=0) or [2, pages, page_size, kv_heads, head_dim] (page_axis=1).
    Any other shape, dtype or stride is refused: pages would be read in the wrong places.
    """
    torch = _torch()
    if isinstance(tensors, torch.Tensor):
        if page_axis != 0:
            raise BadInput(f"page_axis {page_axis}: one tensor of all layers has its pages first, page_axis=0")
        _check_adopted(tensors, tensors, layout.shape, layout.dtype, "tensor")
        return PageMajorMemory(tensors), int(tensors.shape[0])
    if page_axis not in (0, 1):
        raise BadInput(f"page_axis {page_axis}: it must be 0, or 1 for tensors [2, pages, ...] a layer")
    if len(tensors) != layout.layers:
        raise BadInput(f"{len(tensors)} tensors for {layout.layers} layers: one tensor a layer is needed")
    views = [t.transpose(0, 1) if page_axis and t.dim() > 1 else t for t in tensors]
    for i, (t, view) in enumerate(zip(tensors, views, strict=True)):
        _check_adopted(t, view, layout.shape[1:], layout.dtype, f"tensor of layer {i}")
        if view.shape != views[0].shape or t.device != tensors[0].device:
            raise BadInput(f"tensor of layer {i} has another number of pages, or device, than that of layer 0")
    return LayerMajorMemory(views), int(views[0].shape[0])


def _check_adopted(t: "torch.Tensor", view: "torch.Tensor", want: tuple[int, ...], dtype: str, what: str) -> None:
    if tuple(view.shape[1:]) != want or not view.dim() or not view.shape[0]:
        raise BadInput(f"{what} has shape {tuple(t.shape)}: a page must be [{', '.join(map(str, want))}]")
    if str(t.dtype) != f"torch.{dtype}":
        raise BadInput(f"{what} is {t.dtype}: the layout says {dtype}")
    if not t.is_contiguous():
        raise BadInput(f"{what} has strides {t.stride()}: only contiguous tensors are understood")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise BadInput("page memory needs torch, which is not installed: pip install 'kvkeep[engine]'") from None
    return torch


def _as_bytes(tensor: "torch.Tensor") -> bytes:
    torch = _torch()
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())


def _rows(tensor: "torch.Tensor") -> "torch.Tensor":
    """uint8 [pages, bytes]."""
    return tensor.detach().view(_torch().uint8).view(tensor.shape[0], -1)


def _parts(planes: Sequence[Any], page: int, offset: int, nbytes: int) -> list[Any]:
    """Views of the bytes of a page from `offset` on, one for each plane that has some of them."""
    pages, page_nbytes = len(planes[0]), sum(plane.shape[1] for plane in planes)
    if not 0 <= page < pages or offset < 0 or nbytes < 1 or offset + nbytes > page_nbytes:
        raise InvariantViolation(
            f"{nbytes} bytes from byte {offset} on of page {page} of {pages} pages of {page_nbytes} bytes"
        )
    parts = []
    start = 0  # of the plane in the page
    for plane in planes:
        first, last = max(offset - start, 0), min(offset + nbytes - start, plane.shape[1])
        if first < last:
            parts.append(plane[page, first:last])
        start += plane.shape[1]
    return parts


def _write(planes: Sequence[Any], page: int, offset: int, data: Data) -> None:
    if isinstance(data, bytes | bytearray | memoryview):
        data = np.frombuffer(data, dtype=np.uint8)
    if str(data.dtype) not in ("uint8", "torch.uint8"):
        raise InvariantViolation(f"elements of {data.dtype} to be written into a page: view them as uint8")
    flat = data.reshape(-1)
    parts = _parts(planes, page, offset, len(flat))
    for part in parts:
        here, flat = flat[: len(part)], flat[len(part) :]
        if isinstance(part, np.ndarray):
            part[:] = here
        else:
            part.copy_(_torch().from_numpy(here.copy()) if isinstance(here, np.ndarray) else here)


def _fill(tensor: "torch.Tensor", pages: list[int]) -> None:
    torch = _torch()
    for page in pages:
        piece = tensor[page]
        whole = piece if piece.is_contiguous() else None
        for part in [whole] if whole is not None else [piece[0], piece[1]]:
            part.view(-1).view(torch.uint8).fill_(POISON_BYTE)
