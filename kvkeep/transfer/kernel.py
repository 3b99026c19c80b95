"""The kernel that gathers a page's pieces from device memory into pinned host memory, or scatters them back.

Must not know streams or jobs.  The source is C that a system compiler takes as well, so that its index arithmetic is
tested without a GPU.
"""

from kvkeep.errors import KvkeepError

NAME = "kvkeep_move"
VECTOR_NBYTES = 16

SOURCE = r"""
/* Moves `pages` pages of `pieces` pieces each.  A row is one piece of one page; a block takes rows, its threads take
   vectors of 16 bytes.

     on the device   plane_addresses[piece] + device_pages[page] * plane_strides[piece]
     in host memory  host_address + host_pages[page] * host_stride + piece * piece_nbytes

   All addresses, strides and piece_nbytes are multiples of 16. */

#ifndef KVKEEP_KERNEL
#define KVKEEP_KERNEL extern "C" __global__
#endif

KVKEEP_KERNEL void kvkeep_move(
    const unsigned long long *plane_addresses, const unsigned long long *plane_strides,
    unsigned long long host_address, unsigned long long host_stride,
    const int *device_pages, const int *host_pages,
    int pages, int pieces, unsigned long long piece_nbytes, int to_host)
{
    const unsigned long long vectors = piece_nbytes / sizeof(uint4);
    const unsigned long long rows = (unsigned long long)pages * pieces;
    for (unsigned long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const int page = (int)(row / pieces);
        const int piece = (int)(row % pieces);
        uint4 *device = (uint4 *)(plane_addresses[piece] + device_pages[page] * plane_strides[piece]);
        uint4 *host = (uint4 *)(host_address + host_pages[page] * host_stride + piece * piece_nbytes);
        const uint4 *__restrict__ source = to_host ? device : host;
        uint4 *__restrict__ target = to_host ? host : device;
        for (unsigned long long i = threadIdx.x; i < vectors; i += blockDim.x)
            target[i] = source[i];
    }
}
"""


class CompilerMissing(KvkeepError):
    """NVRTC is not installed, or does not work."""


def compile_kernel(arch: str) -> bytes:
    """Machine code of the kernel for an architecture such as "sm_90".  Needs NVRTC; neither a GPU nor a driver.

    Raises `CompilerMissing`.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerMissing(f"cuda-bindings is not installed ({error}): pip install 'kvkeep[cuda]'") from None
    try:
        _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"kvkeep_move.cu", 0, [], [])
    except Exception as missing:  # it raises whatever its loader raises when the library is not there
        raise CompilerMissing(f"NVRTC cannot be loaded ({missing})") from None
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CompilerMissing(f"NVRTC does not take the kernel for {arch}: {log.decode(errors='replace')}")
    code = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code
