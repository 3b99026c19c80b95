"""The pool in host memory: its pages, its limit, and pinning that succeeds, fails part-way or goes on behind."""

import logging
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from kvkeep.errors import BadInput
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.memory import POISON_BYTE, PageMajorMemory
from kvkeep.tiers.memory_limit import memory_limit_nbytes
from kvkeep.tiers.pinning import PinFailed
from tests.transfer.pools import content

#: Pages of 12,288 bytes: no multiple of the chunks below, and no power of two.
LAYOUT = PageLayout(layers=3, kv_heads=2, head_dim=16, page_size=32, dtype="float16")
PAGE = LAYOUT.page_nbytes
GIB = 2**30


class Allocator:
    """A registrar that pins at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.chunks: dict[int, int] = {}
        self.calls: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def register(self, address: int, nbytes: int) -> None:
        assert self.go_on.wait(20.0)
        assert 0 == address % mmap.PAGESIZE
        self.calls.append(nbytes)
        if sum(self.chunks.values()) + nbytes > self.limit:
            raise PinFailed("out of pinnable memory")
        self.chunks[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.chunks[address]

    @property
    def nbytes(self) -> int:
        return sum(self.chunks.values())


# ---------------------------------------------------------------------- pages


def test_pages_are_split_and_zeroed():
    """Cached pages come first, pages of preempted requests after them; all are there and hold zeros."""
    pool = CpuPool(LAYOUT, tier_pages=5, suspend_pages=2)
    assert pool.memory is not None
    assert (5, 2, 7, 7 * PAGE, 0) == (pool.tier_pages, pool.suspend_pages, pool.pages, pool.nbytes, pool.pinned_pages)
    assert [bytes(PAGE)] * 7 == [pool.memory.page_bytes(page) for page in range(7)]


def test_memory_has_the_face_of_the_gpu_pools():
    """Bytes, poison and copied positions are those that the model's pool shows for the same pages."""
    import torch

    pool = CpuPool(LAYOUT, tier_pages=3)
    theirs = PageMajorMemory(torch.zeros((3, *LAYOUT.shape), dtype=torch.float16))
    ours = pool.memory
    assert ours is not None
    for memory in (ours, theirs):
        for plane in memory.planes():
            assert isinstance(plane, np.ndarray)
            plane[:] = np.arange(3 * PAGE, dtype=np.uint8).reshape(3, PAGE)
        memory.copy_positions(0, 2, 11)
        memory.poison([1])
    assert [theirs.page_bytes(page) for page in range(3)] == [ours.page_bytes(page) for page in range(3)]
    assert bytes([POISON_BYTE]) * PAGE == ours.page_bytes(1)


@pytest.mark.parametrize("suspend_pages", [0, 3])
def test_pool_of_no_cached_pages(suspend_pages: int):
    """A tier of 0 pages is no error; without any page there is no memory."""
    pool = CpuPool(LAYOUT, 0, suspend_pages)
    assert (0, suspend_pages) == (pool.tier_pages, pool.pages)
    assert (pool.memory is None) == (not suspend_pages)
    assert pool.wait_pinned()
    pool.close()


def test_bookkeeping_pool_has_no_bytes():
    """Replays have pages without memory, more of them than memory could hold."""
    pool = CpuPool.bookkeeping(10**9, 10)
    assert (10**9 + 10, None, 0) == (pool.pages, pool.memory, pool.nbytes)


@pytest.mark.parametrize(("tier", "suspend"), [(-1, 0), (0, -1), (1.5, 0)])
def test_pages_that_cannot_be_counted_are_bad_input(tier: int, suspend: int):
    """Each setting is an integer of 0 or more; the message names it."""
    with pytest.raises(BadInput, match=r"tier_pages|suspend_pages"):
        CpuPool(LAYOUT, tier, suspend)


# ---------------------------------------------------------------------- the limit


def test_pool_larger_than_the_limit_is_bad_input():
    """The message has the setting, what it needs, what there is, and how many pages would fit."""
    with pytest.raises(BadInput) as refusal:
        CpuPool(LAYOUT, 8, 3, limit_nbytes=10 * PAGE)
    for number in ("tier_pages=8", "suspend_pages=3", str(11 * PAGE), str(10 * PAGE), "at most 10 pages"):
        assert number in str(refusal.value)
    CpuPool(LAYOUT, 8, 2, limit_nbytes=10 * PAGE)


def test_machine_is_the_limit_when_nothing_is_given():
    """A pool of more than all memory is refused before anything is mapped."""
    with pytest.raises(BadInput, match="may use"):
        CpuPool(LAYOUT, 2**50 // PAGE)


GROUPS: dict[str, tuple[str, dict[str, int | str], int | None]] = {
    "v2": ("0::/a/b\n", {"a/b/memory.max": 7 * GIB, "a/memory.max": "max", "memory.max": 9 * GIB}, 7 * GIB),
    "v2-parent": ("0::/a/b\n", {"a/b/memory.max": 7 * GIB, "a/memory.max": 2 * GIB}, 2 * GIB),
    "v2-root-only": ("0::/\n", {"memory.max": 3 * GIB}, 3 * GIB),
    "v2-path-not-visible": ("0::/../../kubepods/x\n", {"memory.max": 3 * GIB}, 3 * GIB),
    "v1": ("9:name=systemd:/\n4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": 5 * GIB}, 5 * GIB),
    "v1-not-visible": ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": 4 * GIB}, 4 * GIB),
    "unlimited": ("0::/\n", {"memory.max": "max"}, None),
    "v1-unlimited": ("4:memory:/\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_limit_of_the_container(tmp_path: Path, case: str):
    """The least limit of the process's groups counts, of either version; without one, the machine's memory."""
    groups, files, expected = GROUPS[case]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    machine = memory_limit_nbytes(tmp_path / "nothing here")
    assert machine is not None and machine > 0
    assert min(expected or machine, machine) == memory_limit_nbytes(tmp_path)


# ---------------------------------------------------------------------- pinning


def test_pinning_in_chunks_that_end_where_pages_end():
    """No chunk is larger than the limit, none cuts a page in two, together they are exactly the pool."""
    allocator = Allocator(GIB)
    pool = CpuPool(LAYOUT, 20, 3, registrar=allocator, chunk_nbytes_max=5 * PAGE)
    assert (23, 23 * PAGE) == (pool.pinned_pages, allocator.nbytes)
    assert all(nbytes % PAGE == 0 and nbytes <= 5 * PAGE for nbytes in allocator.calls)
    assert pool.memory is not None
    assert pool.memory.rows.ctypes.data == min(allocator.chunks)
    pool.close()
    assert ({}, 0) == (allocator.chunks, pool.pinned_pages)


def test_chunks_of_pages_that_are_no_multiple_of_the_systems():
    """Pages of 48 bytes: a chunk ends only where a page of ours and one of the system end together."""
    small = PageLayout(layers=1, kv_heads=1, head_dim=3, page_size=4, dtype="float16")
    allocator = Allocator(GIB)
    pool = CpuPool(small, 1000, registrar=allocator, chunk_nbytes_max=20_000)
    assert (1000, 1000 * 48) == (pool.pinned_pages, allocator.nbytes)
    assert all(nbytes % 48 == 0 for nbytes in allocator.calls) and len(allocator.calls) > 1
    pool.close()


def test_failed_pinning_leaves_nothing_registered():
    """With pin=True it raises with the setting and the bytes; nothing stays half-registered."""
    allocator = Allocator(12 * PAGE)
    with pytest.raises(BadInput) as refusal:
        CpuPool(LAYOUT, 18, 2, pin=True, registrar=allocator, chunk_nbytes_max=5 * PAGE)
    for part in ("tier_pages=18", "suspend_pages=2", str(20 * PAGE), str(10 * PAGE), "out of pinnable", "pin=False"):
        assert part in str(refusal.value)
    assert (3, {}) == (len(allocator.calls), allocator.chunks)


def test_failed_pinning_falls_back_when_allowed(caplog: pytest.LogCaptureFixture):
    """With pin="auto" the pool works unpinned, all of it, and one warning says so."""
    allocator = Allocator(12 * PAGE)
    with caplog.at_level(logging.WARNING):
        pool = CpuPool(LAYOUT, 20, registrar=allocator, chunk_nbytes_max=5 * PAGE)
    assert (0, {}) == (pool.pinned_pages, allocator.chunks)
    assert pool.memory is not None
    pool.memory.poison([19])
    (record,) = caplog.records
    assert f"{20 * PAGE} bytes" in record.getMessage() and "unpinned" in record.getMessage()


def test_pin_settings():
    """pin=False registers nothing; pin=True without anything to pin for is bad input; "auto" without it is unpinned."""
    allocator = Allocator(GIB)
    assert 0 == CpuPool(LAYOUT, 2, pin=False, registrar=allocator).pinned_pages
    assert [] == allocator.calls
    assert 0 == CpuPool(LAYOUT, 2).pinned_pages
    with pytest.raises(BadInput, match="pin=True"):
        CpuPool(LAYOUT, 2, pin=True)


def test_registrar_that_breaks_is_not_hidden():
    """An error that is no refusal of the device is raised as it is, with nothing left registered."""

    class Broken(Allocator):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            if len(self.calls) == 2:
                del self.chunks[address]
                raise RuntimeError("a bug")

    allocator = Broken(GIB)
    with pytest.raises(RuntimeError, match="a bug"):
        CpuPool(LAYOUT, 20, registrar=allocator, chunk_nbytes_max=5 * PAGE)
    assert {} == allocator.chunks


def test_pinning_in_the_background():
    """The pool is usable at once; pages become pinned from id 0 on."""
    allocator = Allocator(GIB)
    allocator.go_on.clear()
    pool = CpuPool(LAYOUT, 20, registrar=allocator, background=True, chunk_nbytes_max=5 * PAGE)
    assert pool.memory is not None
    fill_page = content(1, LAYOUT)
    pool.memory.rows[7] = np.frombuffer(fill_page, dtype=np.uint8)
    assert (0, False) == (pool.pinned_pages, pool.wait_pinned(0.01))
    allocator.go_on.set()
    assert pool.wait_pinned(20.0)
    assert (20, fill_page) == (pool.pinned_pages, pool.memory.page_bytes(7))
    pool.close()
    assert {} == allocator.chunks


def test_pinning_that_fails_in_the_background():
    """What is registered stays whole, since copies may be using it; whoever waits is told; close leaves nothing."""
    allocator = Allocator(12 * PAGE)
    pool = CpuPool(LAYOUT, 20, registrar=allocator, background=True, chunk_nbytes_max=5 * PAGE)
    with pytest.raises(BadInput, match=f"{20 * PAGE} bytes.*after {10 * PAGE} bytes: out of pinnable memory"):
        pool.wait_pinned(20.0)
    assert (10, 10 * PAGE) == (pool.pinned_pages, allocator.nbytes)
    pool.close()
    assert {} == allocator.chunks


def test_close_while_pinning_goes_on():
    """Registration in the background stops after the chunk at hand, and that one is unpinned too."""
    allocator = Allocator(GIB)
    allocator.go_on.clear()
    pool = CpuPool(LAYOUT, 20, registrar=allocator, background=True, chunk_nbytes_max=5 * PAGE)
    threading.Timer(0.05, allocator.go_on.set).start()
    pool.close()
    assert (1, {}) == (len(allocator.calls), allocator.chunks)


def test_a_pool_holds_what_is_written():
    """Pages do not overlap: each keeps its own content."""
    pool = CpuPool(LAYOUT, 6)
    assert pool.memory is not None
    for page in range(6):
        pool.memory.rows[page] = np.frombuffer(content(page, LAYOUT), dtype=np.uint8)
    assert [content(page, LAYOUT) for page in range(6)] == [pool.memory.page_bytes(page) for page in range(6)]
