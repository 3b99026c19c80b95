"""Planted bugs in what is said to the CUDA driver, and in the check that a GPU machine runs.

Must not hold anything but data: see `bugs` for what an entry is.
"""

from tests.planted.bug import Bug

API = "kvkeep/transfer/cuda_api.py"
ADDRESSES = "kvkeep/transfer/addresses.py"

CUDA = "kvkeep/transfer/cuda.py"
PARTS = "bench/_gpu_parts.py"
PATH = "bench/_gpu_path.py"

API_TESTS = "tests/transfer/test_cuda_api.py::"
CUDA_TESTS = "tests/transfer/test_cuda.py::"

CHECK_TESTS = "tests/bench/test_gpu_check.py::"

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
    Bug(
        "gpu-check-asks-for-half",
        PARTS,
        "ONE_DIRECTION = 0.90",
        "ONE_DIRECTION = 0.50",
        (CHECK_TESTS + "test_limits_of_rates",),
    ),
    Bug(
        "gpu-check-overlooks-versions-of-calls",
        PATH,
        'if name.partition("_")[0] in BLOCKING',
        "if name in BLOCKING",
        (CHECK_TESTS + "test_names_of_calls_that_block",),
    ),
    Bug(
        "gpu-check-sees-beside-the-path",
        PATH,
        "if event.name != stretch and any(one.start <= event.time_range.start <= one.end for one in ranges)",
        "if event.name != stretch",
        (CHECK_TESTS + "test_stretch_ends_where_it_should",),
    ),
    Bug(
        "gpu-check-believes-an-idle-stream",
        PARTS,
        '"reached": not walked.waited and walked.outlasted,',
        '"reached": not walked.waited,',
        (CHECK_TESTS + "test_stream_that_is_idle_is_no_proof",),
    ),
    Bug(
        "gpu-check-believes-a-blind-observer",
        PARTS,
        '"reached": bool(by_torch and by_api),',
        '"reached": bool(by_torch or by_api),',
        (CHECK_TESTS + "test_observer_that_sees_nothing_is_no_proof",),
    ),
    Bug(
        "gpu-check-is-fine-without-its-parts",
        PARTS,
        'yield {"metric": name, "part": name, "note": "not run: the time was over", "reached": False}',
        'yield {"metric": name, "part": name, "note": "not run: the time was over"}',
        (CHECK_TESTS + "test_parts_beyond_the_time_are_missed",),
    ),
    Bug(
        "gpu-check-runs-what-it-was-told-to-skip",
        PARTS,
        "for row in [skipped] if name_of(part) in skip else _guarded(part, run):",
        "for row in _guarded(part, run):",
        (CHECK_TESTS + "test_skipped_part_says_so_and_is_no_failure",),
    ),
    Bug(
        "gpu-check-compares-a-hit-with-itself",
        "bench/_gpu_model.py",
        "self._compare(self._last[self._session], kv, request.matched_len)",
        "self._compare(kv, kv, request.matched_len)",
        (CHECK_TESTS + "test_bits_that_changed_between_two_turns_are_seen",),
    ),
    Bug(
        "random-model-of-other-weights-each-time",
        "kvkeep/engine/loader.py",
        "    random = torch.Generator(device).manual_seed(SEED)\n",
        "    random = torch.Generator(device); random.seed()\n",
        ("tests/engine/test_shapes.py::test_same_weights_each_time",),
    ),
    Bug(
        "cuda-closes-its-streams-twice",
        CUDA,
        "self._streams, self._free_events = {}, []",
        "self._free_events = []",
        (CUDA_TESTS + "test_close_gives_everything_back",),
    ),
    Bug(
        "bench-keeps-the-help-of-its-cases",
        "kvkeep/cli.py",
        'arguments.case_arguments.append("--help")',
        "arguments.parser.print_help()",
        ("tests/cli/test_benching.py::test_every_case_lists_its_own_options",),
    ),
)
