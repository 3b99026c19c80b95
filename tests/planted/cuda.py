"""Planted bugs in what is said to the CUDA driver, and in the check that a GPU machine runs.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

API = "kvkeep/transfer/cuda_api.py"
ADDRESSES = "kvkeep/transfer/addresses.py"

API_TESTS = "tests/transfer/test_cuda_api.py::"
CUDA_TESTS = "tests/transfer/test_cuda.py::"

MOVES = API_TESTS + "test_pages_go_down_and_come_back"

BUGS: tuple[Bug, ...] = (
    Bug(
        "cuda-thread-without-a-context",
        API,
        'self._call("cuCtxPushCurrent", self._context)',
        'self._call("cuInit", 0)',
        (MOVES,),
    ),
    Bug(
        "cuda-context-is-left-on-the-thread",
        API,
        'self._call("cuCtxPopCurrent")',
        "pass",
        (MOVES,),
    ),
    Bug(
        "cuda-batch-reads-before-its-event",
        API,
        "SOURCE_ACCESS_IN_STREAM_ORDER = 1",
        "SOURCE_ACCESS_IN_STREAM_ORDER = 3",
        (MOVES,),
    ),
    Bug(
        "cuda-batch-in-the-signature-of-another-version",
        API,
        "BATCH_VERSION = 12080",
        "BATCH_VERSION = 13000",
        (MOVES,),
    ),
    Bug(
        "cuda-kernel-gets-an-address-for-a-number",
        API,
        "INT_ARGUMENTS = frozenset({6, 7, 9})",
        "INT_ARGUMENTS = frozenset({4, 7, 9})",
        (MOVES,),
    ),
    Bug(
        "cuda-pinned-memory-is-not-mapped",
        API,
        'self._call("cuMemHostRegister", address, nbytes, PORTABLE | MAPPED)',
        'self._call("cuMemHostRegister", address, nbytes, PORTABLE)',
        (MOVES,),
    ),
    Bug(
        "cuda-stream-waits-for-the-default-one",
        API,
        "STREAM_NON_BLOCKING = 1",
        "STREAM_NON_BLOCKING = 0",
        (MOVES,),
    ),
    Bug(
        "cuda-not-ready-is-an-error",
        API,
        "if error == self._driver.CUresult.CUDA_ERROR_NOT_READY:",
        "if error == self._driver.CUresult.CUDA_ERROR_UNKNOWN:",
        (MOVES,),
    ),
    Bug(
        "cuda-calibrates-a-million-pieces",
        ADDRESSES,
        "pages = max(1, min(nbytes // like.page_nbytes, pieces_max // like.pieces))",
        "pages = max(1, min(nbytes // like.page_nbytes, pieces_max))",
        (CUDA_TESTS + "test_calibration_of_tiny_pieces_is_short",),
    ),
)
