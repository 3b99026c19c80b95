"""Parts of pages in memory: read and written in the order of a page's bytes, however they lie."""

from collections.abc import Callable

import numpy as np
import pytest

from kvkeep.errors import InvariantViolation
from kvkeep.tiers.memory import Data, LayerMajorMemory, PageMajorMemory, PageMemory
from tests.transfer.pools import LAYOUT, PAGES, fill_all
from tests.transfer.rigs import MEMORIES, make_memory

torch = pytest.importorskip("torch")

PAGE = LAYOUT.page_nbytes
K_OR_V = PAGE // LAYOUT.layers // 2

#: Within K of one layer, from one to the next, over several, the ends of a page, and all of it.
PARTS = [(0, 1), (3, 20), (K_OR_V - 1, 2), (K_OR_V, K_OR_V), (5, 3 * K_OR_V), (PAGE - 1, 1), (0, PAGE)]


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> PageMemory:
    made = make_memory(request.param)
    fill_all(made, PAGES, 0)
    return made


def pages_of(memory: PageMemory) -> list[bytes]:
    return [memory.page_bytes(page) for page in range(PAGES)]


@pytest.mark.parametrize(("offset", "nbytes"), PARTS)
def test_part_of_a_page_is_read(memory: PageMemory, offset: int, nbytes: int):
    """uint8 of one dimension: those bytes of `page_bytes`."""
    part = memory.read(3, offset, nbytes)
    assert (1, "uint8") == (part.ndim, str(part.dtype).removeprefix("torch."))
    assert memory.page_bytes(3)[offset : offset + nbytes] == bytes(np.asarray(part))


AS: dict[str, Callable[[bytes], Data]] = {
    "bytes": lambda data: data,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "numpy": lambda data: np.frombuffer(data, dtype=np.uint8),
    "torch": lambda data: torch.tensor(list(data), dtype=torch.uint8),
    "two dimensions": lambda data: torch.tensor(list(data), dtype=torch.uint8).reshape(-1, 1),
    "strided": lambda data: np.repeat(np.frombuffer(data, dtype=np.uint8), 2)[::2],
}


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize(("offset", "nbytes"), PARTS)
def test_part_of_a_page_is_written(memory: PageMemory, offset: int, nbytes: int, kind: str):
    """Those bytes and no others, of this page or another, from whatever holds bytes."""
    expected = pages_of(memory)
    data = np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8).tobytes()
    expected[3] = expected[3][:offset] + data + expected[3][offset + nbytes :]
    memory.write(3, offset, AS[kind](data))
    assert expected == pages_of(memory)


@pytest.mark.parametrize(
    ("page", "offset", "nbytes"), [(-1, 0, 1), (PAGES, 0, 1), (0, -1, 1), (0, PAGE - 3, 4), (0, 0, 0), (0, PAGE, 1)]
)
def test_part_outside_its_page_is_a_bug(memory: PageMemory, page: int, offset: int, nbytes: int):
    """Neither read nor written: it would be another page's, or shorter than was meant."""
    before = pages_of(memory)
    with pytest.raises(InvariantViolation, match="bytes"):
        memory.read(page, offset, nbytes)
    with pytest.raises(InvariantViolation, match="bytes"):
        memory.write(page, offset, bytes(nbytes))
    assert before == pages_of(memory)


def test_elements_that_are_no_bytes_are_a_bug(memory: PageMemory):
    """Numbers would be cut to 8 bits without a word."""
    for data in (torch.ones(4), np.ones(4, dtype=np.int64)):
        with pytest.raises(InvariantViolation, match="uint8"):
            memory.write(0, 0, data)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MEMORIES)
def test_contiguous_part_is_a_view(kind: str):
    """What is written into the page later shows; only a part that lies in pieces is gathered into a copy."""
    memory = make_memory(kind)
    within, across = memory.read(2, 4, 8), memory.read(2, K_OR_V - 4, 2 * K_OR_V)
    memory.write(2, 0, b"\7" * PAGE)
    assert 7 == within.max() == within.min()
    assert (0 if kind.startswith("layer") else 7) == across.max()


@pytest.mark.parametrize(("first_page", "nbytes"), [(0, PAGE), (3, 2 * PAGE), (4, PAGE + 5), (PAGES - 1, PAGE), (2, 1)])
def test_span_is_a_view_over_pages(first_page: int, nbytes: int):
    """The bytes of consecutive pages, joined; writing through it writes the pages."""
    memory = make_memory("page-major")
    assert isinstance(memory, PageMajorMemory)
    before = fill_all(memory, PAGES, 0)
    span = memory.span(first_page, nbytes)
    assert (torch.uint8, (nbytes,)) == (span.dtype, tuple(span.shape))
    assert b"".join(before[first_page:])[:nbytes] == bytes(span.numpy())
    span.fill_(9)
    expected = b"".join(before[:first_page]) + bytes([9]) * nbytes
    assert expected + b"".join(before)[len(expected) :] == b"".join(pages_of(memory))


@pytest.mark.parametrize(("first_page", "nbytes"), [(-1, PAGE), (PAGES, 1), (PAGES - 1, PAGE + 1), (0, 0)])
def test_span_outside_the_pool_is_a_bug(first_page: int, nbytes: int):
    """A view that is shorter than it was asked for, or of other pages, is never given."""
    memory = make_memory("page-major")
    assert isinstance(memory, PageMajorMemory)
    with pytest.raises(InvariantViolation, match=f"{PAGES} pages"):
        memory.span(first_page, nbytes)


def test_parts_of_an_engines_own_tensors():
    """K and V of one page lie apart where the engine has all K pages first: a part of each goes to each."""
    layers = [torch.zeros((2, 4, *LAYOUT.shape[2:]), dtype=torch.float16) for _ in range(LAYOUT.layers)]
    memory = LayerMajorMemory([layer.transpose(0, 1) for layer in layers])
    memory.write(1, K_OR_V - 2, torch.full((4,), 5, dtype=torch.uint8))
    one = torch.tensor([5, 5], dtype=torch.uint8).view(torch.float16)
    assert (one, one) == (layers[0][0, 1].reshape(-1)[-1], layers[0][1, 1].reshape(-1)[0])
    assert 2 == sum(int(layer.count_nonzero()) for layer in layers)
