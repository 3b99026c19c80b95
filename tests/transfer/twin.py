"""The kernel of `kernel.py`, compiled for the processor: the same source, blocks and threads as loops."""

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvkeep.transfer.kernel import SOURCE

BEFORE = """
typedef struct { unsigned x; } dimension;
typedef struct { unsigned a, b, c, d; } uint4;
static dimension blockIdx, blockDim, threadIdx, gridDim;
#define KVKEEP_KERNEL static
"""

AFTER = """
void run(unsigned blocks, unsigned threads,
    const unsigned long long *plane_addresses, const unsigned long long *plane_strides,
    unsigned long long host_address, unsigned long long host_stride,
    const int *device_pages, const int *host_pages,
    int pages, int pieces, unsigned long long piece_nbytes, int to_host)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kvkeep_move(plane_addresses, plane_strides, host_address, host_stride, device_pages, host_pages,
                        pages, pieces, piece_nbytes, to_host);
}
"""

ADDRESS, SIZE, INT = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int


@cache
def kernel_twin() -> Any:
    """`run(blocks, threads, *the kernel's arguments)`; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "twin.c", Path(folder) / "twin.so"
        source.write_text(BEFORE + SOURCE + AFTER)
        command = [compiler, "-O1", "-std=c99", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        run = ctypes.CDLL(str(library)).run
    run.restype = None
    run.argtypes = [
        ctypes.c_uint, ctypes.c_uint, ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS, ADDRESS, INT, INT, SIZE, INT,
    ]  # fmt: skip
    return run
