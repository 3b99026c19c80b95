"""The gather and scatter kernel: it compiles for the GPUs that matter, and its index arithmetic is right."""

import mmap
from array import array

import numpy as np
import pytest

from kvkeep.transfer.kernel import SOURCE, CompilerMissing, compile_kernel
from tests.transfer.twin import kernel_twin


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernel_compiles(arch: str):
    """NVRTC makes machine code of it, an ELF file that has the kernel, without a GPU or a driver."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        code = compile_kernel(arch)
    except CompilerMissing as missing:
        if "cannot be loaded" not in str(missing):
            raise
        pytest.skip(f"NVRTC is not installed: {missing}")
    assert b"\x7fELF" == code[:4]
    assert b"kvkeep_move" in code


def test_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch):
    """The compiler's words reach whoever reads the message."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setattr("kvkeep.transfer.kernel.SOURCE", SOURCE.replace("threadIdx", "nothingOfThisName"))
    with pytest.raises(CompilerMissing, match=r"nothingOfThisName|cannot be loaded"):
        compile_kernel("sm_90")


class Planes:
    """`pieces` planes of `pages` rows each in one mapping, rows `stride` bytes apart, and page-major host memory."""

    def __init__(self, pieces: int, pages: int, nbytes: int, stride: int, host_pages: int) -> None:
        self.nbytes = nbytes
        self.device_map = mmap.mmap(-1, pieces * pages * stride)
        self.host_map = mmap.mmap(-1, host_pages * pieces * nbytes)
        whole = np.frombuffer(self.device_map, dtype=np.uint8)
        self.planes = list(whole.reshape(pieces, pages, stride)[:, :, :nbytes])
        self.host = np.frombuffer(self.host_map, dtype=np.uint8).reshape(host_pages, pieces, nbytes)

    def run(self, device_pages: list[int], host_pages: list[int], to_host: bool, blocks: int, threads: int) -> None:
        """What `Copier` queues."""
        twin = kernel_twin()
        table = array("Q", [plane.ctypes.data for plane in self.planes] + [p.strides[0] for p in self.planes])
        ids = array("i", device_pages + host_pages)
        tables, descriptor = table.buffer_info()[0], ids.buffer_info()[0]
        pieces, pages = len(self.planes), len(device_pages)
        twin(
            blocks, threads, tables, tables + 8 * pieces, self.host.ctypes.data, self.host.strides[0],
            descriptor, descriptor + 4 * pages, pages, pieces, self.nbytes, int(to_host),
        )  # fmt: skip


needs_compiler = pytest.mark.skipif(kernel_twin() is None, reason="there is no C compiler here")


@needs_compiler
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (3, 5), (32, 512), (7, 64)])
def test_every_piece_goes_to_its_place(to_host: bool, blocks: int, threads: int):
    """However many blocks and threads, each 16 bytes of each piece of each page are moved once, and nothing else."""
    memory = Planes(pieces=6, pages=9, nbytes=80, stride=96, host_pages=11)
    random = np.random.default_rng(blocks)
    for plane in memory.planes:
        plane[:] = random.integers(0, 255, plane.shape, dtype=np.uint8)
    memory.host[:] = random.integers(0, 255, memory.host.shape, dtype=np.uint8)
    device_pages, host_pages = [8, 0, 5, 3], [10, 7, 0, 2]
    planes, host = [plane.copy() for plane in memory.planes], memory.host.copy()
    memory.run(device_pages, host_pages, to_host, blocks, threads)
    for on_device, on_host in zip(device_pages, host_pages, strict=True):
        for piece, plane in enumerate(planes):
            if to_host:
                host[on_host, piece] = plane[on_device]
            else:
                plane[on_device] = host[on_host, piece]
    assert np.array_equal(host, memory.host)
    assert all(np.array_equal(a, b) for a, b in zip(planes, memory.planes, strict=True))


@needs_compiler
def test_pools_of_many_gigabytes():
    """Offsets beyond 4 GiB are not cut to 32 bits, on either side; the mappings are never touched but there."""
    stride = 2**20
    memory = Planes(pieces=2, pages=6000, nbytes=stride, stride=stride, host_pages=3000)
    memory.host[2999] = 7
    memory.run([5999], [2999], to_host=False, blocks=2, threads=64)
    assert (7, 7) == (memory.planes[0][5999].min(), memory.planes[1][5999].min())
    memory.planes[1][5998] = 9
    memory.run([5998], [2998], to_host=True, blocks=2, threads=64)
    assert [0, 9] == [int(memory.host[2998, piece].max()) for piece in (0, 1)]
