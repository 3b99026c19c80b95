"""The CUDA backend over an emulated device: what is its own beyond the conformance suite."""

import logging
import threading
from collections.abc import Callable

import pytest

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.addresses import Addresses
from kvkeep.transfer.backend import NO_WAIT, After, BackendDied, Job, JobNumber, StillCopying
from kvkeep.transfer.cuda import CudaBackend
from kvkeep.transfer.cuda_api import CudaFault, Int64s
from kvkeep.transfer.cuda_ways import CALIBRATION_ROUNDS, Descriptors, Way
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import Cause, Plan, SlotCopy
from tests.transfer.emulated import ComputeEvent, EmulatedDevice, EmulatedEvent, EmulatedStream
from tests.transfer.pools import LAYOUT, PAGES, carried_out, fill_all, plan
from tests.transfer.rigs import make_memory
from tests.transfer.twin import kernel_twin

needs_compiler = pytest.mark.skipif(kernel_twin() is None, reason="there is no C compiler here")


class Bench:
    """A backend on an emulated device, with pages of known content."""

    def __init__(
        self,
        way: Way | None = "dma",
        kind: str = "layer-major",
        api: EmulatedDevice | None = None,
        pin: bool = True,
    ) -> None:
        self.api = api or EmulatedDevice()
        self.device: PageMemory = make_memory(kind)
        self.pool = CpuPool(LAYOUT, PAGES, registrar=self.api if pin else None)
        assert self.pool.memory is not None
        self.host = self.pool.memory
        self.device_bytes = fill_all(self.device, PAGES, 0)
        self.host_bytes = fill_all(self.host, PAGES, 1000)
        self.backend = CudaBackend(self.api, self.device, self.pool, way=way)
        self._jobs = 0

    def launch(self, what: Plan, after: After = NO_WAIT) -> Job:
        job = Job(JobNumber(self._jobs), what, after, 1, 0.0)
        self._jobs += 1
        self.backend.launch(job)
        return job

    def settle(self) -> list[str | None]:
        """Everything queued happens; the errors that are reported."""
        for _ in range(1000):
            self.api.tick()
        return [outcome.error for outcome in self.backend.completions()]


def test_event_that_was_never_recorded_is_a_bug():
    """A stream that waits for an event which was not recorded does not wait at all."""

    class Unrecorded:
        cuda_event = 0

        def query(self) -> bool:
            return False

    bench = Bench()
    with pytest.raises(InvariantViolation, match="record it"):
        bench.launch(plan("demote", [1], [1]), after=Unrecorded())


def test_stream_is_ordered_behind_a_store():
    """Work queued on the engine's stream after `order_after` happens after the copy, with no help from the host."""
    bench = Bench()
    write = ComputeEvent(bench.api)
    job = bench.launch(plan("demote", [3], [4]), after=write)
    compute = bench.api.new_stream()
    assert bench.backend.order_after(job, compute)
    seen: list[bytes] = []

    def overwrite() -> bool:
        seen.append(bench.host.page_bytes(4))
        bench.device.poison([3])
        return True

    compute.work.append(overwrite)
    for _ in range(200):
        bench.api.tick()
    assert [] == seen
    write.done = True
    assert [None] == bench.settle()
    assert [bench.device_bytes[3]] == seen == [bench.host.page_bytes(4)]
    assert not bench.backend.order_after(job, compute), "it is over"


@needs_compiler
def test_descriptors_belong_to_their_job():
    """A second job, queued before the first has begun, does not overwrite the page ids that the first one's kernel is
    going to read; when both are over their memory is used again."""
    bench = Bench("kernel")
    bench.launch(plan("promote", [1, 2], [3, 4]))
    bench.launch(plan("promote", [5, 6], [7, 8]))
    assert [None, None] == bench.settle()
    assert [bench.host_bytes[page] for page in (1, 2, 5, 6)] == [bench.device.page_bytes(p) for p in (3, 4, 7, 8)]
    pinned = len(bench.api.memory)
    for _ in range(50):
        bench.launch(plan("promote", [1, 2], [3, 4]))
        bench.settle()
    assert pinned == len(bench.api.memory)


def test_descriptors_are_blocks_of_their_own():
    """Blocks do not overlap, hold what was put in, come back, and run out with a word instead of growing."""
    import ctypes
    from array import array

    memory = (ctypes.c_int * 256)()  # more than it is told of, so that running over is seen and does no harm
    made = Descriptors(ctypes.addressof(memory), 64)
    first, second = made.take(array("i", range(20))), made.take(array("i", range(100, 117)))
    assert first and second
    assert 0 == made.take(array("i", [1]))
    assert list(range(20)) == list((ctypes.c_int * 20).from_address(first))
    made.give_back(second)
    assert second == made.take(array("i", range(32)))
    assert list(range(20)) == list((ctypes.c_int * 20).from_address(first))


@needs_compiler
def test_pages_that_are_not_pinned_go_by_dma():
    """Only the driver copies memory that is not registered; a kernel would fault on it."""
    bench = Bench("kernel", pin=False)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the kernel ran on memory that is not pinned")

    bench.api.run = never  # type: ignore[method-assign]
    bench.launch(plan("promote", [1], [2]))
    assert [None] == bench.settle()
    assert bench.host_bytes[1] == bench.device.page_bytes(2)


SLOTS = (SlotCopy(1, 10, 2, 60, 100), SlotCopy(5, 0, 2, 20, 30))


def calls_of(bench: Bench) -> list[str]:
    """The copying calls that the backend makes from now on, in order."""
    calls: list[str] = []
    for name in ("copy", "copy_batch", "run"):
        real = getattr(bench.api, name)

        def called(*arguments: object, name: str = name, real: Callable[..., None] = real) -> None:
            calls.append(name)
            real(*arguments)

        setattr(bench.api, name, called)
    return calls


def test_slots_are_copied_in_the_same_batch():
    """Pages and slots are one call."""
    bench = Bench("batch")
    calls = calls_of(bench)
    what = plan("promote", [1, 3], [4, 5], *SLOTS)
    bench.launch(what)
    assert 1 == calls.count("copy_batch") and "run" not in calls
    assert [None] == bench.settle()
    assert carried_out(what, bench.device_bytes, bench.host_bytes)[0] == [
        bench.device.page_bytes(i) for i in range(PAGES)
    ]


@needs_compiler
@pytest.mark.parametrize("pages", [[], [7, 8]])
def test_slots_beside_a_kernel_are_plain_copies(pages: list[int]):
    """The kernel moves whole pages; each part of a slot is a copy of its own, on the same stream; slots alone need no
    kernel."""
    bench = Bench("kernel")
    calls = calls_of(bench)
    what = plan("demote", pages, pages, *SLOTS)
    bench.launch(what)
    parts = 2 + 1  # bytes 10 to 110 of pages of layers of 64 bytes are in two, 0 to 30 in one
    assert ["copy"] * parts + ["run"] * bool(pages) == calls
    assert [None] == bench.settle()
    assert carried_out(what, bench.device_bytes, bench.host_bytes)[1] == [
        bench.host.page_bytes(i) for i in range(PAGES)
    ]


@pytest.mark.parametrize("cause", ["promote", "demote"])
def test_slots_that_are_not_pinned_go_by_dma(cause: Cause, monkeypatch: pytest.MonkeyPatch):
    """A batch needs pinned memory, of slots too: while pages are pinned in the background only those that are."""
    monkeypatch.setattr(CpuPool, "pinned_pages", 4)
    bench = Bench("batch")
    calls = calls_of(bench)
    bench.launch(plan(cause, [1], [2], SlotCopy(3, 0, 3, 0, 9)))
    assert 1 == calls.count("copy_batch")
    calls.clear()
    bench.launch(plan(cause, [], [], SlotCopy(4, 0, 4, 0, 9)))
    assert ["copy"] == calls
    assert [None, None] == bench.settle()


@needs_compiler
def test_slots_that_fail_leave_no_descriptor_in_use():
    """A job whose slots cannot be queued is a failure; the pinned ids that its pages would have had stay free."""
    bench = Bench("kernel")
    real = bench.api.copy

    def fails(target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        raise CudaFault("invalid argument")

    bench.api.copy = fails  # type: ignore[method-assign]
    bench.launch(plan("promote", [1], [3], *SLOTS))
    assert ["invalid argument"] == bench.settle()
    bench.api.copy = real  # type: ignore[method-assign]
    descriptors = bench.backend._copier._descriptors
    assert descriptors is not None and {} == descriptors._nbytes


@needs_compiler
def test_slots_without_room_for_a_descriptor_are_copied_once():
    """Where the kernel's page ids find no room, pages go by plain copies too; slots are not copied again with them."""
    bench = Bench("kernel")
    descriptors = bench.backend._copier._descriptors
    assert descriptors is not None
    descriptors.take = lambda ids: 0  # type: ignore[method-assign]
    calls = calls_of(bench)
    what = plan("promote", [7], [8], *SLOTS)
    bench.launch(what)
    parts = 3 + 1  # bytes 60 to 160 of pages of layers of 64 bytes are in three, 20 to 50 in one
    assert ["copy"] * (parts + LAYOUT.layers) == calls
    assert [None] == bench.settle()
    assert carried_out(what, bench.device_bytes, bench.host_bytes)[0] == [
        bench.device.page_bytes(i) for i in range(PAGES)
    ]


def test_slots_beyond_32_bits():
    """Offsets in pools of many gigabytes stay whole numbers of 64 bits, on either side."""
    where = Addresses((2**40, 2**41), (3 * 2**20, 5 * 2**20), (2**20, 2**19), 2**42, 2**21, 10**6)
    on_device, on_host, sizes = where.of_slots([SlotCopy(900_000, 2**20 - 3, 800_000, 7, 10)], to_host=True)
    host = 2**42 + 800_000 * 2**21 + 7
    first, second = 2**40 + 900_000 * 3 * 2**20 + 2**20 - 3, 2**41 + 900_000 * 5 * 2**20
    assert ([first, second], [host, host + 3], [3, 7]) == (on_device.tolist(), on_host.tolist(), sizes.tolist())


class Counting(EmulatedDevice):
    """Every call takes a microsecond of the device, whatever it moves."""

    def __init__(self, batch: bool = True) -> None:
        super().__init__()
        self.moves_itself = True
        self._batch = batch

    def copy_batch(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: EmulatedStream) -> None:
        if not self._batch:
            raise CudaFault("the driver is too old")
        work: list[Callable[[], bool]] = []
        inner = EmulatedStream()
        super().copy_batch(targets, sources, sizes, inner)
        work += inner.work
        stream.work.append(lambda: all(one() for one in work))

    def tick(self) -> None:
        self.moves_itself = False
        super().tick()
        self.moves_itself = True


@pytest.mark.parametrize(
    ("batch", "kind", "expected"),
    [
        (True, "page-major", "dma"),
        pytest.param(False, "layer-major", "kernel", marks=needs_compiler),
        (False, "odd", "dma"),
        (True, "odd", "batch"),
    ],
)
def test_calibration_takes_the_fastest_way(
    batch: bool, kind: str, expected: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Pages of one piece are not calibrated; of others each way that works is timed, and the log has the figures."""
    monkeypatch.setattr("kvkeep.transfer.cuda_ways.CALIBRATION_NBYTES", 20 * LAYOUT.page_nbytes)
    if kind == "odd":
        kind = "layer-major"
        monkeypatch.setattr("kvkeep.transfer.cuda_ways.VECTOR_NBYTES", 1024)  # no piece is a multiple of it
    with caplog.at_level(logging.INFO):
        bench = Bench(None, kind, Counting(batch))
    assert {"h2d": expected, "d2h": expected} == bench.backend.ways
    words = " ".join(record.getMessage() for record in caplog.records)
    assert (kind == "page-major") == (not words)
    if words:
        assert f"go by {expected}" in words and "GB/s" in words
        assert ("batch not here" in words) == (not batch)
    job = bench.launch(plan("promote", [1, 2], [3, 4]))
    assert [None] == bench.settle()
    assert job.plan.sources[0] == 1 and bench.host_bytes[1:3] == [bench.device.page_bytes(p) for p in (3, 4)]


@pytest.mark.parametrize("pieces_max", [24, 4])
def test_calibration_of_tiny_pieces_is_short(pieces_max: int, monkeypatch: pytest.MonkeyPatch):
    """Pages of a few bytes do not make it copy a million pieces one by one; a page is never cut."""
    monkeypatch.setattr("kvkeep.transfer.cuda_ways.CALIBRATION_PIECES_MAX", pieces_max)

    class Counted(EmulatedDevice):
        asked = 0

        def copy(self, target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
            self.asked += 1
            super().copy(target, source, nbytes, stream)

    api = Counted()
    api.moves_itself = True
    bench = Bench(None, "layer-major-split", api)
    pieces = 2 * LAYOUT.layers
    most = max(pieces, pieces_max) * 2 * 2 * CALIBRATION_ROUNDS  # each way but the kernel, both directions
    assert 0 < api.asked <= most
    assert {"h2d", "d2h"} == set(bench.backend.ways)


def test_failure_half_way_is_over_when_the_rest_is():
    """A call that fails after others were queued fails the job, but not before those have stopped moving bytes."""
    bench = Bench()
    calls = []
    real = bench.api.copy

    def second_fails(target: int, source: int, nbytes: int, stream: EmulatedStream) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise CudaFault("invalid argument")
        real(target, source, nbytes, stream)

    bench.api.copy = second_fails  # type: ignore[method-assign]
    bench.launch(plan("promote", [1], [2]))
    assert [] == bench.backend.completions(), "the first piece is still on its way"
    assert ["invalid argument"] == bench.settle()


def test_fault_is_no_death_before_the_streams_are_idle():
    """When a call fails that everything depends on, copies that were queued before it still run: until they are over,
    none of their pages may be given away."""
    bench = Bench()
    stuck = ComputeEvent(bench.api)
    first = bench.launch(plan("promote", [1], [2]), after=stuck)
    real = bench.api.record

    def fails(event: EmulatedEvent, stream: EmulatedStream) -> None:
        raise CudaFault("out of memory")

    bench.api.record = fails  # type: ignore[method-assign]
    bench.launch(plan("promote", [3], [4]))
    bench.api.record = real  # type: ignore[method-assign]
    for _ in range(50):
        bench.api.tick()
        assert [] == bench.backend.completions()
        assert not bench.backend.order_after(first, bench.api.new_stream())
    stuck.done = True
    for _ in range(200):
        bench.api.tick()
    with pytest.raises(BackendDied, match="out of memory"):
        bench.backend.completions()


def test_dead_device_does_not_surprise_the_engine():
    """Ordering a stream behind a job of a device that has died is a no, not an exception in the engine's thread."""
    bench = Bench()
    job = bench.launch(plan("promote", [1], [2]))
    bench.api.dead = True
    assert not bench.backend.order_after(job, None)
    with pytest.raises(BackendDied, match="lost"):
        bench.backend.completions()


def test_close_gives_up_on_a_copy_that_never_ends():
    """It raises in time instead of hanging."""
    bench = Bench()
    bench.api.moves_itself = True
    bench.launch(plan("promote", [1], [2]), after=ComputeEvent(bench.api))
    with pytest.raises(StillCopying, match="not over"):
        bench.backend.close(0.1)


@needs_compiler
def test_close_gives_everything_back():
    """Streams, events and pinned memory, each once."""
    bench = Bench("kernel")
    bench.api.moves_itself = True
    bench.launch(plan("promote", [1], [2]))
    assert 1 == len(bench.backend.close(10.0))
    assert [] == bench.backend.close(10.0), "once"
    assert ({}, [], 0) == (bench.api.memory, bench.api.streams, bench.api.events)
    bench.pool.close()
    assert {} == bench.api.registered


def test_memory_elsewhere_is_refused():
    """Pages in host memory are another backend's; a CPU pool without memory has nothing to copy to."""
    with pytest.raises(BadInput, match="HostBackend"):
        CudaBackend.on(make_memory("numpy"), CpuPool(LAYOUT, PAGES))
    with pytest.raises(BadInput, match="without memory"):
        CudaBackend(EmulatedDevice(), make_memory("numpy"), CpuPool(LAYOUT, 0))


def test_device_that_dies_while_draining_ends_every_job():
    """Closing a manager whose device is lost meanwhile gives each job its final completion and does not hang."""
    bench = Bench()
    manager = TransferManager(bench.backend, bytes_in_flight_max=10**6, queue_pages_max=99, deadline_s=60.0)
    jobs = [manager.submit(plan("promote", [i], [i]), after=ComputeEvent(bench.api)) for i in range(3)]
    manager.poll()
    threading.Timer(0.1, lambda: setattr(bench.api, "dead", True)).start()
    done = manager.close(drain=True, timeout_s=20.0)
    assert [(job, False, True) for job in jobs] == [(one.job, one.ok, one.final) for one in done]
    assert "the device is lost" == manager.dead


def test_engines_stream_comes_after_a_store_that_runs():
    """A page handed over while its store still runs may be written at once by a stream that waits for the store."""
    bench = Bench()
    manager = TransferManager(bench.backend, bytes_in_flight_max=10**6, queue_pages_max=99, deadline_s=60.0)
    store = manager.submit(plan("demote", [3], [4]), after=ComputeEvent(bench.api, done=True))
    assert store is not None
    compute = bench.api.new_stream()
    assert not manager.order_after(store, compute), "it has not been launched"
    manager.start()
    assert manager.order_after(store, compute)

    def overwrite() -> bool:
        bench.device.poison([3])
        return True

    compute.work.append(overwrite)
    for _ in range(300):
        bench.api.tick()
    assert [True] == [one.ok for one in manager.poll()]
    assert bench.device_bytes[3] == bench.host.page_bytes(4) != bench.device.page_bytes(3)
    assert not manager.order_after(store, compute), "it is over"
