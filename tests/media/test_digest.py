"""Digests of media: the bytes and what they mean decide, not what they come in; and nothing fools the memo.

Must not test how parameters are encoded: see `test_canonical`.
"""

import base64
import io
import mmap
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from kvkeep.errors import BadInput
from kvkeep.media import digest as digests
from kvkeep.media import sources
from kvkeep.media.digest import Digester, digest

CONTENT = bytes(range(256)) * 40


def raw(source: Any) -> str:
    return digest(source, "image").hex()


# ---------------------------------------------------------------------- raw bytes


class NoSeek(io.RawIOBase):
    """A pipe, from which a few bytes come at a time."""

    def __init__(self, content: bytes) -> None:
        self._rest = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, space: Any) -> int:
        return self._rest.readinto(memoryview(space)[:1000])


class OnlyRead:
    """A file of another library."""

    def __init__(self, content: bytes) -> None:
        self._rest = io.BytesIO(content)

    def read(self, count: int) -> bytes:
        return self._rest.read(count)


def shifted(content: bytes) -> io.BytesIO:
    file = io.BytesIO(content)
    file.seek(7)
    return file


def every_second(content: bytes) -> memoryview:
    doubled: Any = np.repeat(np.frombuffer(content, dtype=np.uint8), 2)
    return memoryview(doubled)[::2]


CARRIERS: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview with gaps": every_second,
    "file": io.BytesIO,
    "file in the middle": shifted,
    "pipe": NoSeek,
    "other file": OnlyRead,
    "data URL": lambda c: "data:image/png;base64," + base64.b64encode(c).decode(),
    "data URL of another type": lambda c: "DATA:;charset=x;BASE64," + base64.b64encode(c).decode(),
    "data URL in lines": lambda c: "data:;base64," + base64.encodebytes(c).decode(),
    "data URL without padding": lambda c: "data:;base64," + base64.b64encode(c).decode().rstrip("="),
    "data URL, escaped base64": lambda c: "data:;base64," + quote(base64.b64encode(c).decode(), safe=""),
    "data URL, escaped": lambda c: "data:," + quote(c),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("content", [CONTENT, b"\0", b"a,b%25", os.urandom(3_000_001)])
def test_equal_bytes_have_one_digest(carrier: str, content: bytes) -> None:
    """Whatever they come in, in however many blocks."""
    assert raw(content) == raw(CARRIERS[carrier](content))


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    """By path, open, and mapped; an open one stays where it was."""
    path = tmp_path / "picture"
    path.write_bytes(CONTENT)
    assert raw(CONTENT) == raw(path) == raw(str(path))
    with path.open("rb") as file:
        file.seek(5)
        assert raw(CONTENT) == raw(file)
        assert 5 == file.tell()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert raw(CONTENT) == raw(mapped)


def test_a_digest_is_the_same_everywhere() -> None:
    """Names travel between processes and versions: this one was made when the format was."""
    made = digest(b"content", "image", {"size": [224, 224], "mean": 0.5})
    assert (32, "066930d9172ef8e986c35af6f556ccfc4993c3e0863165d8ff8fc4e7aa876486") == (len(made), made.hex())
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert "872580e86158cdad003b78c494de792ad04cf9fa7bd06c1b9c79fe58e88e1e42" == digest(grid, "audio").hex()


def test_kind_content_and_preprocessing_are_told_apart() -> None:
    """Each is a field of its own: none can be taken for a part of another."""
    made = {
        digest(content, kind, how)
        for content in (b"ab", b"a", b"abc")
        for kind in ("image", "imag", "imageab", "video")
        for how in (None, {}, "ab", b"ab", {"mode": "RGB"}, {"background": "black"})
    }
    assert 3 * 4 * 6 == len(made)


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40), st.binary(), st.binary())
def test_digests_are_equal_exactly_where_content_and_parameters_are(
    one: bytes, other: bytes, how: bytes, another: bytes
) -> None:
    """Moving bytes between content and parameters gives another digest."""
    assert ((one, how) == (other, another)) is (digest(one, "k", how) == digest(other, "k", another))
    assert (how == b"") is (digest(one, "k", how) == digest(one + how, "k", b""))


# ---------------------------------------------------------------------- arrays and tensors


def layouts(array: Any) -> list[Any]:
    """The same values, lying otherwise in memory."""
    wide = np.zeros((*array.shape, 2), dtype=array.dtype)
    wide[..., 0] = array
    backwards = np.ascontiguousarray(array[::-1])[::-1]
    return [array, np.asfortranarray(array), wide[..., 0], backwards, array.copy()]


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize(
    "dtype", ["uint8", "bool", "int16", "float16", "float32", "float64", "complex64", "complex128"]
)
def test_arrays_and_tensors_with_equal_values_have_one_digest(
    monkeypatch: pytest.MonkeyPatch, dtype: str, block: int
) -> None:
    """Whichever library they are of, and however they lie in memory."""
    monkeypatch.setattr(sources, "BLOCK_NBYTES", block)
    array = np.arange(3 * 5 * 37).reshape(3, 5, 37).astype(dtype)
    expected = raw(np.ascontiguousarray(array))
    for one in layouts(array):
        assert expected == raw(one)
    assert expected == raw(torch.from_numpy(array))
    turned = torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))).permute(1, 2, 0)
    assert not turned.is_contiguous() and expected == raw(turned)


def test_views_that_conjugate_and_leaves_that_need_gradients() -> None:
    """A tensor is what its values are, not what its memory holds."""
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert raw(tensor.conj().resolve_conj().clone()) == raw(tensor.conj())
    assert raw(torch.tensor([-2.0, 4.0])) == raw(tensor.conj().imag)
    assert raw(torch.ones(3)) == raw(torch.ones(3, requires_grad=True))


def test_bfloat16_has_no_array_and_a_digest() -> None:
    """It is not taken for other two-byte numbers, and its values count."""
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous() and raw(tensor) == raw(turned)
    others = [tensor + 1, tensor.view(torch.int16), tensor.view(torch.float16), tensor.reshape(4, 3), tensor.float()]
    assert 6 == len({raw(one) for one in (tensor, *others)})


def test_arrays_that_differ_have_other_digests() -> None:
    """In a value, a shape, a type, a byte order; and an array is not its bytes."""
    array = np.arange(12, dtype=np.float32)
    changed = array.copy()
    changed[7] = -0.0
    others = [
        array, changed, array.reshape(3, 4), array.reshape(4, 3), array.reshape(1, 12), array.view(np.int32),
        array.astype(">f4"), array.tobytes(), array.view(np.uint8), array[::-1], array.astype(np.float64),
    ]  # fmt: skip
    assert len(others) == len({raw(one) for one in others})


@given(hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=9)), st.integers(1, 40), st.data())
def test_blocks_are_the_elements_in_order(array: Any, block: int, data: st.DataObject) -> None:
    """Of any strides, in blocks of any size."""
    order = data.draw(st.permutations(range(array.ndim)))
    view = array.transpose(order)[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in order)]
    before, sources.BLOCK_NBYTES = sources.BLOCK_NBYTES, block
    try:
        assert view.tobytes() == b"".join(bytes(part) for part in sources.open_source(view).blocks)
    finally:
        sources.BLOCK_NBYTES = before


# ---------------------------------------------------------------------- images


def picture(mode: str = "RGB", size: tuple[int, int] = (33, 17), seed: int = 0) -> Image.Image:
    width, height = size
    random = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(random).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "CMYK", "YCbCr", "LA", "I", "F"])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_an_image_is_its_pixels(monkeypatch: pytest.MonkeyPatch, mode: str, block: int) -> None:
    """All of them, in every mode, in however many blocks."""
    monkeypatch.setattr(sources, "BLOCK_NBYTES", block)
    image = picture(mode)
    _, blocks = sources.open_source(image)
    assert image.tobytes() == b"".join(bytes(part) for part in blocks)
    assert raw(image) == raw(image.copy())
    changed = image.copy()
    at = (32, 16)
    changed.putpixel(at, 1 if image.getpixel(at) == 0 else 0)
    assert raw(image) != raw(changed)


def saved(image: Image.Image, how: str, **settings: Any) -> Image.Image:
    file = io.BytesIO()
    image.save(file, how, **settings)
    file.seek(0)
    return Image.open(file)


def test_images_that_are_shown_differently_have_other_digests() -> None:
    """Equal pixel bytes under another size, mode, palette, transparency, orientation or colour profile."""
    image = picture("P", (16, 16))
    other_palette = image.copy()
    other_palette.putpalette([255 - value for value in image.getpalette() or ()])
    see_through = image.copy()
    see_through.info["transparency"] = 3
    grey = Image.frombytes("L", image.size, image.tobytes())
    wide = Image.frombytes("L", (32, 8), image.tobytes())
    turned, upright = Image.Exif(), Image.Exif()
    turned[0x0112], upright[0x0112] = 6, 1
    others = [
        image, other_palette, see_through, grey, wide, saved(grey, "PNG", icc_profile=b"profile"),
        saved(grey, "PNG", exif=turned), saved(grey, "PNG", exif=upright), np.asarray(grey),
    ]  # fmt: skip
    assert len(others) == len({raw(one) for one in others})
    assert raw(grey) == raw(saved(grey, "PNG")) == raw(saved(grey, "BMP")), "what it was saved as does not matter"


def test_an_image_of_several_frames_is_not_its_first() -> None:
    """It cannot be told by what it shows now; one frame, or the file, can."""
    frames = [picture("P", seed=seed) for seed in (1, 2)]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(
        BadInput, match=r"an image of 2 frames: give its file's bytes, or one frame as `image.copy\(\)`"
    ):
        raw(moving)
    first = raw(moving.copy())
    moving.seek(1)
    assert first != raw(moving.copy())


# ---------------------------------------------------------------------- bad input


def broken_image() -> Image.Image:
    file = io.BytesIO()
    picture(size=(200, 200)).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:2000]))


def closed() -> io.BytesIO:
    file = io.BytesIO(b"a")
    file.close()
    return file


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: b"", "media of 0 bytes: it must not be empty"),
        (lambda: io.BytesIO(), "media of 0 bytes"),
        (lambda: "data:image/png;base64,", "media of 0 bytes"),
        (lambda: np.zeros((0, 3)), "media of 0 bytes"),
        (lambda: torch.zeros(3, 0), "media of 0 bytes"),
        (lambda: Image.new("RGB", (0, 4)), "media of 0 bytes"),
        (lambda: None, "media of type NoneType: it must be bytes, a path, a binary file, a data URL"),
        (lambda: [1, 2], "media of type list"),
        (lambda: "https://a.example/b.png", "is a URL: fetch it, and give its bytes"),
        (lambda: Path("no/such/file"), "media file 'no/such/file' cannot be read: No such file"),
        (lambda: Path("."), "media file '.' cannot be read: Is a directory"),
        (lambda: "data:image/png;base64", "has no comma"),
        (lambda: "data:;base64,YW-_", "its content is not base64"),
        (lambda: "data:;base64,YWJjZ", "its content is not base64"),
        (lambda: "data:;base64,YQ==YQ==", "its content is not base64"),
        (lambda: io.StringIO("text"), "is open as text: open it with mode 'rb'"),
        (closed, "cannot be read: I/O operation on closed file"),
        (lambda: np.array(["a"]), "media array of dtype <U1: its elements must be numbers"),
        (lambda: np.array([object()]), "its elements must be numbers"),
        (lambda: np.zeros(2, dtype=[("a", "f4")]), "its elements must be numbers"),
        (lambda: np.ma.masked_array([1, 2], [True, False]), "media array with a mask"),
        (lambda: torch.zeros(2, device="meta"), "media tensor of layout .* it must be dense, not quantized or nested"),
        (lambda: torch.eye(2).to_sparse(), "media tensor of layout torch.sparse_coo"),
        (broken_image, "image .* cannot be read"),
    ],
)
def test_what_is_no_source_is_refused(make: Callable[[], Any], says: str) -> None:
    """In one line, with or without a memo; and nothing is remembered of it."""
    made = Digester("image")
    for frozen in (None, "name"):
        with pytest.raises(BadInput, match=says):
            made.digest(make(), frozen=frozen)
    assert not made._memo._by_id and not made._memo._by_name


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"kind": ""}, "media kind is '': it must be a name"),
        ({"kind": None}, "media kind is None"),
        ({"kind": "image", "memo_entries": -1}, "memo_entries is -1"),
        ({"kind": "image", "memo_nbytes": 1.5}, "memo_nbytes is 1.5"),
        ({"kind": "image", "preprocessing": {"size": object()}}, r"preprocessing\['size'\] is object"),
    ],
)
def test_a_digester_that_cannot_be_is_refused(how: dict[str, Any], says: str) -> None:
    """In one line."""
    with pytest.raises(BadInput, match=says):
        Digester(**how)


# ---------------------------------------------------------------------- memory and the memo


SPARSE = """
import resource, sys
from kvkeep.media.digest import digest
digest(b"a" * 5000000, "video")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = digest(sys.argv[1], "video")
print(made.hex(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_video_of_a_gigabyte_does_not_enter_memory(tmp_path: Path, repo_root: Path) -> None:
    """Its digest takes less than 4 MiB of memory."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.write(CONTENT)
        file.truncate(1 << 30)
    ran = subprocess.run(
        [sys.executable, "-c", SPARSE, str(large)],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    _, grown_kib = ran.stdout.split()
    assert int(grown_kib) < 4096


@pytest.mark.parametrize("what", ["array", "tensor", "image"])
def test_only_a_block_is_copied(what: str) -> None:
    """Of arrays that lie out of order, and of images: not the 12 MB that they have."""
    array = np.zeros((2000, 2000, 3), dtype=np.uint8)
    made: dict[str, Any] = {
        "array": array.transpose(2, 1, 0),
        "tensor": torch.from_numpy(array).permute(2, 1, 0),
        "image": Image.fromarray(array),
    }
    source = made[what]
    digest(source, "image")
    tracemalloc.start()
    try:
        digest(source, "image")
        assert tracemalloc.get_traced_memory()[1] < 3 * sources.BLOCK_NBYTES
    finally:
        tracemalloc.stop()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every source that is really read."""
    seen: list[Any] = []

    def opened(source: Any) -> sources.Source:
        seen.append(source)
        return sources.open_source(source)

    monkeypatch.setattr(digests, "open_source", opened)
    return seen


def test_the_same_bytes_object_is_read_once(reads: list[Any]) -> None:
    """Another object of the same content is read, and has the same digest."""
    made = Digester("image")
    content, copy = bytes(bytearray(CONTENT)), bytes(bytearray(CONTENT))
    assert made.digest(content) == made.digest(content) == made.digest(copy) == made.digest(content)
    assert [id(content), id(copy)] == [id(source) for source in reads]


def test_an_address_that_is_used_again_does_not_fool_the_memo() -> None:
    """Content comes and goes at few addresses, also of objects that the memo has let go of."""
    made = Digester("image", memo_entries=3)
    addresses = set()
    for number in range(200):
        content = bytes([number]) * 5000
        addresses.add(id(content))
        assert digest(content, "image") == made.digest(content)
        del content
    assert len(addresses) < 150, "this allocator gives no address twice: the test is none"


def test_what_can_be_written_is_read_each_time(reads: list[Any]) -> None:
    """A buffer that is changed in place has another digest; so has a read-only view of one."""
    made = Digester("image")
    buffer = bytearray(CONTENT)
    array = np.frombuffer(buffer, dtype=np.uint8)
    locked = array[:]
    locked.flags.writeable = False
    image = picture(size=(64, 64))
    tensor = torch.from_numpy(array.copy())
    views: list[Any] = [buffer, memoryview(buffer).toreadonly(), array, locked, tensor, image]
    before = [made.digest(source) for source in views]
    assert before == [made.digest(source) for source in views]
    buffer[100] ^= 1
    tensor[100] += 1
    image.putpixel((0, 0), (1, 2, 3) if image.getpixel((0, 0)) != (1, 2, 3) else (3, 2, 1))
    assert not set(before) & {made.digest(source) for source in views}
    assert 18 == len(reads)


class Text(bytes):
    """Bytes of another class may be anything."""


def test_bytes_of_a_class_of_their_own_are_not_remembered(reads: list[Any]) -> None:
    """Nor are small ones, which are digested as fast."""
    made = Digester("image")
    for content in (Text(CONTENT), b"small"):
        assert made.digest(content) == made.digest(content)
    assert 4 == len(reads)


def test_a_frozen_source_is_read_once(reads: list[Any]) -> None:
    """By the name that its caller gave it; under another name, shape, type or digester it is read again."""
    made = Digester("image")
    array = np.arange(20, dtype=np.int16)
    expected = digest(array, "image")
    reads.clear()
    assert expected == made.digest(array, frozen="a") == made.digest(array.copy(), frozen="a")
    assert 1 == len(reads)
    others: list[Any] = [array.reshape(4, 5), array.view(np.uint16), torch.from_numpy(array), array.tobytes()]
    for other in others:
        assert digest(other, "image") == made.digest(other, frozen="a")
    assert expected == made.digest(array, frozen="b")
    assert digest(array, "image", {"size": 2}) == Digester("image", {"size": 2}).digest(array, frozen="a")
    with pytest.raises(BadInput, match="frozen is list: it must be hashable"):
        made.digest(array, frozen=[1])  # type: ignore[arg-type]


def test_the_memo_keeps_within_its_bounds(reads: list[Any]) -> None:
    """The least recently used goes first, by number and by bytes; what is larger than all of it is not kept."""
    contents = [bytes([number]) * 5000 for number in range(4)]
    made = Digester("image", memo_entries=3)
    for content in (*contents[:3], contents[0], contents[3]):
        made.digest(content)
    assert [0, 2, 3] == sorted(content[0] for content, _ in made._memo._by_id.values())
    made = Digester("image", memo_nbytes=10_000)
    for content in (*contents, bytes(10_001)):
        made.digest(content)
    assert ([2, 3], 10_000) == ([c[0] for c, _ in made._memo._by_id.values()], made._memo._nbytes)
    for number in range(10):
        made.digest(b"x", frozen=number)
    assert 10 == len(made._memo._by_name)
    made = Digester("image", memo_entries=2)
    for number in (0, 1, 0, 2):
        made.digest(b"x", frozen=number)
    kept: list[Any] = list(made._memo._by_name)
    assert [0, 2] == [name for name, _ in kept]


def test_importing_it_loads_no_library_of_images_or_tensors(repo_root: Path) -> None:
    """Nor does digesting what needs none."""
    script = (
        "import sys; from kvkeep.media.digest import digest; digest(b'a', 'image'); "
        "print([name for name in ('PIL', 'torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=repo_root, capture_output=True, text=True, check=True)
    assert "[]" == ran.stdout.strip()
