"""The manager over the host backend: real threads, real bytes."""

import threading
import time

from kvkeep.transfer.backend import NO_WAIT, Job
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import Completion, TransferManager
from kvkeep.transfer.plan import Cause
from tests.transfer.pools import LAYOUT, PAGES, Flag, fill_all, host_memory, plan
from tests.transfer.rigs import end_thread

PAGE = LAYOUT.page_nbytes


def test_polls_from_many_threads_share_the_completions():
    """Whoever polls, each job is reported once, and submissions from other threads are not lost."""
    pages, jobs_a_thread, threads = 32, 50, 4
    device, host = host_memory(pages), host_memory(pages)
    fill_all(device, pages, 0)
    fill_all(host, pages, 1000)
    manager = TransferManager(
        HostBackend(device, host), bytes_in_flight_max=8 * PAGE, queue_pages_max=10_000, deadline_s=60.0
    )
    said: list[Job] = []
    submitted: list[Job] = []

    def work(number: int) -> None:
        for i in range(jobs_a_thread):
            page = number * (pages // threads) + i % (pages // threads)
            cause: Cause = "promote" if i % 2 else "clean"
            job = manager.submit(plan(cause, [page], [page]), after=NO_WAIT)
            if job is not None:
                submitted.append(job)
            said.extend(done.job for done in manager.poll())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    said += [done.job for done in manager.close(drain=True, timeout_s=60.0)]
    assert sorted(job.number for job in submitted) == sorted(job.number for job in said)
    assert len(submitted) >= threads * jobs_a_thread // 2, "loads are never refused here"


def test_thread_that_dies_in_a_copy_is_not_silent():
    """A copying thread that ends without a word is found out: its jobs fail, and the manager says that it is dead."""
    device, host = host_memory(), host_memory()
    backend = HostBackend(device, host)
    manager = TransferManager(backend, bytes_in_flight_max=PAGES * PAGE, queue_pages_max=99, deadline_s=60.0)
    waiting = manager.submit(plan("promote", [1], [1]), after=Flag())
    assert waiting is not None
    manager.poll()
    end_thread(backend)
    said: list[Completion] = []
    until = time.monotonic() + 20.0
    while not said and time.monotonic() < until:
        said += manager.poll()
    assert [(waiting, False, True)] == [(done.job, done.ok, done.final) for done in said]
    assert manager.dead is not None and "SystemExit" in manager.dead
    assert [] == manager.close(drain=True, timeout_s=1.0)


def test_host_copies_land_while_the_caller_goes_on():
    """Between launch and completion the caller is free: real bytes move without it."""
    device, host = host_memory(), host_memory()
    expected = fill_all(host, PAGES, 5)
    manager = TransferManager(
        HostBackend(device, host), bytes_in_flight_max=PAGES * PAGE, queue_pages_max=99, deadline_s=60.0
    )
    job = manager.submit(plan("promote", range(PAGES), range(PAGES)), after=NO_WAIT)
    assert job is not None
    manager.start()
    until = time.monotonic() + 20.0
    while device.page_bytes(PAGES - 1) != expected[-1] and time.monotonic() < until:
        time.sleep(0.001)
    assert expected == [device.page_bytes(page) for page in range(PAGES)]
    assert [job] == [done.job for done in manager.close(drain=True, timeout_s=10.0)]
