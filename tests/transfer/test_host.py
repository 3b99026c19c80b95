"""The host backend: what is its own beyond the conformance suite."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import BadInput
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import HostMemory
from kvkeep.transfer.backend import NO_WAIT, After, Job, JobNumber, Outcome
from kvkeep.transfer.host import TASK_NBYTES, HostBackend
from kvkeep.transfer.plan import Plan, SlotCopy
from tests.transfer.pools import PAGES, host_memory, plan

PATIENCE_S = 20.0

#: A page is a task: a job of two pages is done by two threads.
LARGE = PageLayout(layers=1, kv_heads=1, head_dim=1024, page_size=TASK_NBYTES // 4096, dtype="float16")


class Watched:
    """Rows that call `on_write` with each page before it is written."""

    def __init__(self, rows: Any, on_write: Callable[[int], None]) -> None:
        self.rows = rows
        self.on_write = on_write

    def __setitem__(self, page: int, row: Any) -> None:
        self.on_write(page)
        self.rows[page] = row


@pytest.fixture
def backends() -> Iterator[list[HostBackend]]:
    """What a test opens is closed."""
    opened: list[HostBackend] = []
    yield opened
    for backend in opened:
        backend.close(PATIENCE_S)


def watch(backend: HostBackend, on_write: Callable[[int], None]) -> None:
    """Has every page that a load writes told."""
    backend._routes["h2d"] = [
        (source, Watched(target, on_write))  # type: ignore[misc]
        for source, target in backend._routes["h2d"]
    ]


def job(number: int, what: Plan, after: After = NO_WAIT) -> Job:
    return Job(JobNumber(number), what, after, 1, 0.0)


def finish(backend: HostBackend, count: int) -> list[Outcome]:
    """Waits for so many outcomes."""
    out: list[Outcome] = []
    until = time.monotonic() + PATIENCE_S
    while len(out) < count and time.monotonic() < until:
        backend.wait(0.05)
        out += backend.completions()
    assert count == len(out)
    return out


def test_one_bad_page_fails_its_whole_job(backends: list[HostBackend]):
    """A job that is cut into tasks has failed when one of them has, also when another ends well after that."""
    memory = [HostMemory(np.zeros((2, LARGE.page_nbytes), dtype=np.uint8), LARGE) for _ in range(2)]
    backend = HostBackend(*memory, threads=2)
    backends.append(backend)
    begun = threading.Event()

    def first_fails_while_second_copies(page: int) -> None:
        if page == 0:
            assert begun.wait(PATIENCE_S)
            raise OSError("a worn-out cell")
        begun.set()
        until = time.monotonic() + PATIENCE_S
        while all(running.error is None for running in backend._running.values()):
            assert time.monotonic() < until

    watch(backend, first_fails_while_second_copies)
    backend.launch(job(0, plan("promote", [0, 1], [0, 1])))
    (outcome,) = finish(backend, 1)
    assert "OSError: a worn-out cell" == outcome.error


def test_loads_overtake_stores_that_no_thread_has_begun(backends: list[HostBackend]):
    """A thread that is free takes a load before a store that was launched earlier."""
    backend = HostBackend(host_memory(), host_memory(), threads=1)
    backends.append(backend)
    first, go_on = threading.Event(), threading.Event()

    def hold_first(page: int) -> None:
        if page == 0:
            first.set()
            assert go_on.wait(PATIENCE_S)

    watch(backend, hold_first)
    backend.launch(job(0, plan("promote", [0], [0])))
    assert first.wait(PATIENCE_S)
    for number in (1, 2, 3):
        backend.launch(job(number, plan("demote", [number], [number])))
    backend.launch(job(4, plan("promote", [4], [4])))
    go_on.set()
    assert [0, 4, 1, 2, 3] == [outcome.job.number for outcome in finish(backend, 5)]


def test_event_that_fails_fails_its_job(backends: list[HostBackend]):
    """An event that cannot be asked is the job's bad luck, not the backend's, nor that of other jobs."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("illegal address")

    backend = HostBackend(host_memory(), host_memory())
    backends.append(backend)
    backend.launch(job(0, plan("demote", [0], [0]), after=Broken()))
    backend.launch(job(1, plan("demote", [1], [1])))
    errors = {int(outcome.job.number): outcome.error for outcome in finish(backend, 2)}
    assert errors[0] is not None and "illegal address" in errors[0]
    assert None is errors[1]


def test_close_ends_its_threads():
    """Nothing keeps running, also with most of a job undone."""
    before = set(threading.enumerate())
    backend = HostBackend(host_memory(), host_memory(), threads=3)
    watch(backend, lambda page: time.sleep(0.01))
    backend.launch(job(0, plan("promote", [i % PAGES for i in range(1000)], [i % PAGES for i in range(1000)])))
    (outcome,) = backend.close(PATIENCE_S)
    assert outcome.error is not None and "cut short" in outcome.error
    assert before == set(threading.enumerate())


def test_close_cuts_slots_short(backends: list[HostBackend]):
    """What is left of a job when the page at hand is done are its slots: they are not copied, and it says so."""
    device, host = host_memory(), host_memory()
    host.rows[:] = 7
    backend = HostBackend(device, host, threads=1)
    begun = threading.Event()

    def until_close(page: int) -> None:
        begun.set()
        until = time.monotonic() + PATIENCE_S
        while not backend._stopping:
            assert time.monotonic() < until

    watch(backend, until_close)
    backend.launch(job(0, plan("promote", [0], [0], SlotCopy(1, 0, 1, 0, 10))))
    assert begun.wait(PATIENCE_S)
    (outcome,) = backend.close(PATIENCE_S)
    assert outcome.error is not None and "cut short" in outcome.error
    assert (7, 0) == (device.rows[0].max(), device.rows[1].max())


def test_slots_are_copied_once(backends: list[HostBackend]):
    """Of a job that is cut into many tasks, one copies the slots."""
    memory = [HostMemory(np.zeros((5, LARGE.page_nbytes), dtype=np.uint8), LARGE) for _ in range(2)]
    backend = HostBackend(*memory, threads=2)
    backends.append(backend)
    asked: list[SlotCopy] = []
    route = backend._slot_routes["h2d"]
    real = route.views

    def counted(slot: SlotCopy) -> Any:
        asked.append(slot)
        return real(slot)

    route.views = counted  # type: ignore[method-assign]
    slots = [SlotCopy(4, 0, 4, 9, 100), SlotCopy(4, 200, 4, 500, 100)]
    backend.launch(job(0, plan("promote", [0, 1, 2], [0, 1, 2], *slots)))
    assert [None] == [outcome.error for outcome in finish(backend, 1)]
    assert slots == asked


def test_device_memory_is_refused():
    """Threads copy host memory only."""
    import torch

    class OnDevice(HostMemory):
        def planes(self) -> Any:
            return [torch.empty((PAGES, self.rows.shape[1]), dtype=torch.uint8, device="meta")]

    elsewhere = host_memory()
    elsewhere.__class__ = OnDevice
    with pytest.raises(BadInput, match="meta"):
        HostBackend(elsewhere, host_memory())
