"""`CudaApi` through the real bindings, over a driver that does what it is told at once: every call, its arguments, and
what becomes of its errors.
"""

import subprocess
from pathlib import Path

import pytest

from kvkeep.transfer.kernel import CompilerMissing, compile_kernel
from tests.transfer.stub_driver import build_driver, run_on

ROUND_TRIP = """
import os, sys, threading
from pathlib import Path
import numpy as np
from cuda.bindings import driver
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.transfer.backend import NO_WAIT
from kvkeep.transfer.cuda import CudaBackend
from kvkeep.transfer import cuda_api
from kvkeep.transfer.cuda_api import CudaApi
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import SlotCopy
from tests.transfer.pools import LAYOUT, PAGES, fill_all, plan
from tests.transfer.rigs import make_memory

# Compiled outside: NVRTC asks the driver that it finds more than this one knows.
cuda_api.compile_kernel = lambda arch: {"sm_90": Path(os.environ["CUBIN"]).read_bytes()}[arch]
way = None if sys.argv[1] == "calibrated" else sys.argv[1]
api = CudaApi(0)
device, pool = make_memory("layer-major"), CpuPool(LAYOUT, PAGES, pin=True, registrar=api)
assert PAGES == pool.pinned_pages
before = fill_all(device, PAGES, 0)
backend = CudaBackend(api, device, pool, way=way)
manager = TransferManager(backend, bytes_in_flight_max=10**6, queue_pages_max=99, deadline_s=60.0)
pages = list(range(PAGES))

def copy(cause, *what):
    manager.submit(plan(cause, *what), after=NO_WAIT)
    done = []
    while not done:
        done = manager.poll()
    assert [None] == [one.error for one in done], done
    assert done[0].copy_ns > 0

def move():
    copy("demote", pages, pages[::-1])
    device.poison(pages)
    copy("promote", pages[::-1], pages)

def move_slots(*pages):
    copy("demote", pages, pages, SlotCopy(0, 0, 11, 20, 150), SlotCopy(0, 150, 10, 0, 42))
    device.poison([0, *pages])
    copy("promote", pages, pages, SlotCopy(11, 20, 0, 0, 150), SlotCopy(10, 0, 0, 150, 42))

move()
move_slots(4, 7)
move_slots()
mover = threading.Thread(target=move)  # a thread that has never had a context
mover.start()
mover.join()
assert manager.stats() and before == [device.page_bytes(page) for page in pages]
with api.on_device():
    compute = api.new_stream()
    assert api.idle(compute)
assert [] == manager.close(drain=True, timeout_s=10.0)
pool.close()
assert 0 == int(driver.cuCtxGetCurrent()[1]), "a context was left on this thread"
print("moved by", backend.ways)
"""

REFUSALS = """
from kvkeep.errors import BadInput
from kvkeep.tiers.pinning import PinFailed
from kvkeep.transfer.cuda_api import CudaApi, CudaFault

for index in (1, 2):
    try:
        CudaApi(index)
    except BadInput as error:
        print(error)
api = CudaApi(0)
try:
    api.register(4096, 2**31)
except PinFailed as error:
    print(error)
try:
    api.new_stream()
except CudaFault as error:
    print(error)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    made = build_driver(tmp_path_factory.mktemp("driver"))
    if made is None:
        pytest.skip("there is no C compiler here")
    try:
        made.with_name("kernel.cubin").write_bytes(compile_kernel("sm_90"))
    except CompilerMissing as missing:
        pytest.skip(f"NVRTC is not installed: {missing}")
    return made


def round_trip(driver: Path, way: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_on(driver, ROUND_TRIP, way, CUBIN=str(driver.with_name("kernel.cubin")), **environment)


@pytest.mark.parametrize("way", ["dma", "batch", "kernel"])
def test_pages_go_down_and_come_back(driver: Path, way: str):
    """Pinning, streams, events and each way of copying say to the driver what it understands; pages and slots come back
    bit for bit, from threads of every kind, and no thread is left on another context than it had."""
    done = round_trip(driver, way)
    assert (0, f"moved by {{'h2d': '{way}', 'd2h': '{way}'}}\n") == (done.returncode, done.stdout), done.stderr


def test_calibration_runs_on_a_driver(driver: Path):
    """Each way is tried on scratch memory of the driver's, which is given back."""
    done = round_trip(driver, "calibrated")
    assert (0, True) == (done.returncode, done.stdout.startswith("moved by")), done.stderr


def test_driver_without_batched_copies(driver: Path):
    """One that is older than CUDA 12.8 fails that job with the reason; a calibration goes another way."""
    done = round_trip(driver, "batch", OLD_DRIVER="1")
    assert "cuGetProcAddress: CUDA_ERROR_NOT_FOUND" in done.stderr
    done = round_trip(driver, "calibrated", OLD_DRIVER="1")
    assert 0 == done.returncode and "batch" not in done.stdout, done.stderr


def test_errors_are_translated(driver: Path):
    """A device that is not there is bad input, memory that cannot be pinned is that, a call without its context a
    fault; each names the call and the driver's word."""
    done = run_on(driver, REFUSALS)
    assert 0 == done.returncode, done.stderr
    assert [
        "CUDA device 1 cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_INVALID_DEVICE",
        "CUDA device 2 cannot be used: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE",
        "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY",
        "cuStreamCreate: CUDA_ERROR_INVALID_CONTEXT",
    ] == done.stdout.splitlines()


def test_machine_without_a_driver_is_bad_input(tmp_path: Path):
    """Bindings may be installed where no driver is: one line, whatever they raise."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    done = run_on(tmp_path / "libcuda.so.1", "from kvkeep.transfer.cuda_api import CudaApi; CudaApi(0)")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvkeep.errors.BadInput: CUDA device 0 cannot be used: cuInit:"), done.stderr
