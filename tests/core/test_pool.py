"""The pool's memory: the same bytes at the same positions, whoever allocated it and however it is laid out.

Must not know owners or names.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.errors import BadInput
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import DTYPE_NBYTES, DType, PageLayout
from kvkeep.tiers.memory import POISON_BYTE

torch = pytest.importorskip("torch")

PAGES = 5


def layout_of(dtype: DType = "float32") -> PageLayout:
    return PageLayout(layers=3, kv_heads=2, head_dim=4, page_size=8, dtype=dtype)


def numbered(shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor in which every element differs from its neighbours."""
    return (torch.arange(torch.Size(shape).numel()) % 251).reshape(shape).to(getattr(torch, dtype))


def allocated(layout: PageLayout) -> GpuPool:
    pool = GpuPool.allocate(layout, PAGES)
    pool.kv.copy_(numbered((PAGES, *layout.shape), layout.dtype))
    return pool


def page_major(layout: PageLayout) -> GpuPool:
    return GpuPool.adopt(allocated(layout).kv, layout)


def layer_major(layout: PageLayout) -> GpuPool:
    return GpuPool.adopt([t.contiguous() for t in allocated(layout).kv.unbind(1)], layout)


def keys_before_values(layout: PageLayout) -> GpuPool:
    return GpuPool.adopt([t.transpose(0, 1).contiguous() for t in allocated(layout).kv.unbind(1)], layout, page_axis=1)


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("make", [allocated, page_major, layer_major, keys_before_values])
def test_pages_copy_and_poison_alike_in_every_layout(make: Callable[[PageLayout], GpuPool], dtype: DType) -> None:
    """A copy moves K and V of the first positions of all layers, poison fills one page, and nothing else changes."""
    layout = layout_of(dtype)
    pool = make(layout)
    assert pool.memory is not None
    expected = numbered((PAGES, *layout.shape), dtype)

    def as_bytes(page: int) -> bytes:
        return bytes(expected[page].contiguous().view(-1).view(torch.uint8).numpy())

    assert [as_bytes(page) for page in range(PAGES)] == [pool.memory.page_bytes(page) for page in range(PAGES)]
    assert (PAGES, layout.page_nbytes) == (pool.pages, len(as_bytes(0)))
    pool.copy_positions(1, 3, 5)
    expected[3, :, :, :5] = expected[1, :, :, :5]
    pool.copy_positions(2, 4, 0)
    assert [as_bytes(page) for page in range(PAGES)] == [pool.memory.page_bytes(page) for page in range(PAGES)]
    pool.memory.poison([2])
    assert bytes([POISON_BYTE]) * layout.page_nbytes == pool.memory.page_bytes(2)
    assert [as_bytes(page) for page in (0, 1, 3, 4)] == [pool.memory.page_bytes(page) for page in (0, 1, 3, 4)]


def test_an_adopted_tensor_is_the_engines_own() -> None:
    """Adopting copies nothing: what the engine writes is what the pool reads."""
    layout = layout_of()
    kv = torch.zeros((PAGES, *layout.shape))
    pool = GpuPool.adopt(kv, layout)
    kv[1] = 7.0
    assert pool.kv is kv
    assert pool.memory is not None
    assert bytes(kv[1].reshape(-1).view(torch.uint8).numpy()) == pool.memory.page_bytes(1)


def test_poison_is_no_number() -> None:
    """Any use of a poisoned page shows: it is NaN in every dtype."""
    for dtype in DTYPE_NBYTES:
        pool = GpuPool.allocate(layout_of(dtype), 1)  # type: ignore[arg-type]
        assert pool.memory is not None
        pool.memory.poison([0])
        assert bool(pool.kv.isnan().all())


def test_a_pool_without_bytes_has_none() -> None:
    """Bookkeeping alone copies nothing and has no tensor to give."""
    pool = GpuPool.bookkeeping(4)
    pool.copy_positions(0, 1, 3)
    with pytest.raises(BadInput, match="no page-major tensor"):
        _ = pool.kv


LAYER = (PAGES, 2, 8, 2, 4)


def zeros(*shape: int, dtype: Any = None) -> Any:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda la: GpuPool.adopt(zeros(PAGES, 3, 2, 8, 4, 2), la), r"shape \(5, 3, 2, 8, 4, 2\): a page must be \[3"),
        (lambda la: GpuPool.adopt(zeros(3, 2, 8, 2, 4), la), "a page must be"),
        (lambda la: GpuPool.adopt(zeros(0, 3, 2, 8, 2, 4), la), "a page must be"),
        (
            lambda la: GpuPool.adopt(zeros(PAGES, 3, 2, 8, 2, 4, dtype=torch.half), la),
            "float16: the layout says float32",
        ),
        (lambda la: GpuPool.adopt(zeros(PAGES, 3, 2, 8, 4, 2).transpose(4, 5), la), "only contiguous tensors"),
        (lambda la: GpuPool.adopt(zeros(PAGES, 3, 2, 8, 2, 4), la, page_axis=1), "page_axis=0"),
        (lambda la: GpuPool.adopt([zeros(*LAYER)] * 2, la), "2 tensors for 3 layers"),
        (lambda la: GpuPool.adopt([zeros(*LAYER)] * 3, la, page_axis=2), "page_axis 2"),
        (lambda la: GpuPool.adopt([zeros(*LAYER)] * 3, la, page_axis=1), "tensor of layer 0 has shape"),
        (lambda la: GpuPool.adopt([zeros(*LAYER)] * 2 + [zeros(6, 2, 8, 2, 4)], la), "layer 2 has another number"),
        (lambda la: GpuPool.allocate(la, 0), "pages is 0: it must be an integer of 1 or more"),
        (lambda la: GpuPool.allocate(la, 1 << 50), "pages needs .* GiB on 'cpu', which cannot be had"),
        (lambda la: GpuPool.bookkeeping(-1), "pages is -1"),
        (lambda la: PageLayout(layers=1, kv_heads=0, head_dim=4), "kv_heads is 0"),
        (lambda la: PageLayout(1, 1, 4, dtype="int8"), "dtype is 'int8': it must be one of"),  # type: ignore[arg-type]
    ],
)
def test_memory_that_is_not_understood_is_refused(make: Callable[[PageLayout], Any], says: str) -> None:
    """Shapes, strides, dtypes and sizes that do not fit are named in one line, before anything is read wrongly."""
    with pytest.raises(BadInput, match=says) as caught:
        make(layout_of())
    assert 1 == len(str(caught.value).splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    """Asking for a GPU where there is none says so, and says what would work."""
    with pytest.raises(BadInput, match="no CUDA device here; use 'cpu'"):
        GpuPool.allocate(layout_of(), 1, device="cuda")
