"""A worker's side of the vLLM connector: its part of the tier, and the copies between it and vLLM's blocks.

Must not import vLLM, nor know requests beyond their ids: what is copied where is decided by the scheduler's side.

One job of the scheduler is one load, or the stores of one step; a large store is cut into parts.  A part that does not
fit beside what is in flight waits here, in order.  Nothing blocks the caller: `poll` says what is over.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from kvkeep.errors import BadInput
from kvkeep.integrations.vllm_settings import Settings, tier_slots
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.layout import OpaqueLayout
from kvkeep.tiers.memory import OpaqueMemory, PageMemory
from kvkeep.transfer.backend import NO_WAIT, After, Backend
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import Plan

log = logging.getLogger(__name__)

#: Copies that run at the same time, and a store of a step is cut into parts of so many bytes.
IN_FLIGHT_NBYTES_MAX, PART_NBYTES = 256 * 2**20, 64 * 2**20
#: After this a copy is reported to be overdue; its blocks stay its own until it is over.
DEADLINE_S = 30.0


def regions_of(caches: Mapping[str, torch.Tensor], placements: Sequence[Any], blocks: int) -> list[torch.Tensor]:
    """Where the bytes of a block lie: uint8 [blocks, bytes], one for each contiguous piece of every block.

    caches: a layer's KV tensor by its name.   placements: vLLM's `KVCacheTensor`: how the layers lie in an allocation.
    Raises `BadInput` for a layout whose blocks are not such pieces.
    """
    regions: list[torch.Tensor] = []
    seen = set()
    for placed in placements:
        names = [name for name in placed.layers if name in caches]
        if not names:
            continue
        raw = torch.empty(0, dtype=torch.uint8, device=caches[names[0]].device)
        raw.set_(caches[names[0]].untyped_storage())
        stride, span = int(placed.block_stride), blocks * int(placed.block_stride)
        layers = len(placed.layers)
        apart = placed.layer_stride >= span  # each layer's blocks in an area of their own
        start, nbytes = (placed.offset, layers * placed.layer_stride) if apart else (0, span)
        if raw.numel() < start + nbytes or nbytes % span:
            raise BadInput(
                f"KV layer {names[0]}: {blocks} blocks of {stride} bytes, layers {placed.layer_stride} bytes apart, in "
                f"{raw.numel()} bytes: this layout is not known"
            )
        for region in raw[start : start + nbytes].view(-1, blocks, stride):
            if region.data_ptr() not in seen:
                seen.add(region.data_ptr())
                regions.append(region)
    if not regions:
        raise BadInput("vLLM has registered no KV cache: there is nothing to keep")
    return regions


class WorkerSide:
    """The tier of one rank.

    ranks: how many share `settings.cpu_tier_gib`.   wrap: for tests, makes the backend to use of the real one.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: int,
        regions: Sequence[torch.Tensor],
        wrap: Callable[[Backend, PageMemory, PageMemory], Backend] | None = None,
    ) -> None:
        self.blocks = OpaqueMemory(regions)
        self.block_nbytes = sum(int(region.shape[1]) for region in regions)
        self.slots = tier_slots(settings, self.block_nbytes, ranks)
        if not self.slots:
            need = self.block_nbytes * ranks * settings.blocks_per_page / 2**30
            raise BadInput(f"cpu_tier_gib {settings.cpu_tier_gib:g} does not hold one page: give {need:.3f} or more")
        self._device = regions[0].device
        layout = OpaqueLayout(self.block_nbytes)
        backend: Backend
        if self._device.type == "cuda":
            from kvkeep.transfer.cuda import CudaBackend
            from kvkeep.transfer.cuda_api import CudaApi

            self.pool = CpuPool(layout, self.slots, registrar=CudaApi(self._device.index or 0))
            backend = CudaBackend.on(self.blocks, self.pool)
        else:
            self.pool = CpuPool(layout, self.slots)
            assert self.pool.memory is not None
            backend = HostBackend(self.blocks, self.pool.memory, threads=settings.copy_threads)
        if wrap is not None:
            assert self.pool.memory is not None
            backend = wrap(backend, self.blocks, self.pool.memory)
        in_flight = max(IN_FLIGHT_NBYTES_MAX, 4 * self.block_nbytes)
        self._manager = TransferManager(
            backend, bytes_in_flight_max=in_flight, queue_pages_max=2**31 - 1, deadline_s=DEADLINE_S
        )
        self._part = max(1, PART_NBYTES // self.block_nbytes)
        self._waiting: deque[tuple[int, Plan, After]] = deque()
        self._parts: dict[Any, int] = {}  # the scheduler's number of each of the manager's jobs
        self._left: dict[int, int] = {}  # parts of each of the scheduler's jobs that are not over
        self._failed: set[int] = set()
        self._loads: dict[int, tuple[str, array[int], array[int]]] = {}  # request, blocks, slots
        self._digests: dict[int, int] | None = {} if settings.check_copies else None
        self.numbers: dict[str, float] = {}

    # ------------------------------------------------------------------ copies begin

    def load(self, job: int, request_id: str, slots: "array[int]", blocks: "array[int]") -> None:
        """Begins to bring `slots[i]` into `blocks[i]`, which nobody uses."""
        self._loads[job] = (request_id, blocks, slots)
        self._submit(job, [_plan("h2d", slots, blocks)], NO_WAIT)

    def store(self, job: int, blocks: "array[int]", slots: "array[int]") -> None:
        """Begins to bring `blocks[i]` into `slots[i]` when what has been queued on the device so far is done."""
        after: After = NO_WAIT
        if self._device.type == "cuda":
            after = torch.cuda.current_stream(self._device).record_event()
        if self._digests is not None:
            self._digests.update((slot, self._digest(block)) for block, slot in zip(blocks, slots, strict=True))
        step = self._part
        cuts = range(0, len(blocks), step)
        self._submit(job, [_plan("d2h", blocks[i : i + step], slots[i : i + step]) for i in cuts], after)

    def _submit(self, job: int, plans: list[Plan], after: After) -> None:
        self._left[job] = len(plans)
        self._waiting.extend((job, plan, after) for plan in plans)
        self._start()

    def _start(self) -> None:
        """Hands over what waits, in order; loads do not wait behind stores that do not fit."""
        kept: deque[tuple[int, Plan, After]] = deque()
        stores_wait = False
        while self._waiting:
            job, plan, after = self._waiting.popleft()
            store = plan.direction == "d2h"
            if self._manager.ended:
                self._failed.add(job)
                self._left[job] -= 1
                continue
            taken = None if store and stores_wait else self._manager.submit(plan, after=after)
            if taken is None:
                stores_wait = stores_wait or store
                kept.append((job, plan, after))
            else:
                self._parts[taken] = job
        self._waiting = kept
        self._manager.start()

    # ------------------------------------------------------------------ copies are over

    def poll(self) -> tuple[list[int], set[int], list[str], set[int]]:
        """Jobs that are over; those of them that failed; requests whose load is over; blocks that did not arrive."""
        for completion in self._manager.poll():
            if not completion.final:
                log.warning("kvkeep: %s: %s", completion.plan, completion.error)
                continue
            job = self._parts.pop(completion.job)
            self._left[job] -= 1
            direction = completion.plan.direction
            self.count(f"{'loaded' if direction == 'h2d' else 'saved'}_bytes", completion.nbytes)
            self.count(f"{'load' if direction == 'h2d' else 'save'}_seconds", completion.copy_ns / 1e9)
            if not completion.ok:
                log.warning("kvkeep: %s failed: %s", completion.plan, completion.error)
                self._failed.add(job)
        if self._waiting:
            self._start()
        over = [job for job, left in self._left.items() if not left]
        failed = self._failed.intersection(over)
        requests, lost = [], set[int]()
        for job in over:
            del self._left[job]
            if job in self._loads:
                request_id, blocks, slots = self._loads.pop(job)
                requests.append(request_id)
                if job in failed:
                    lost.update(blocks)
                elif self._digests is not None:
                    self._compare(blocks, slots)
        self._failed -= failed
        return over, failed, requests, lost

    @property
    def dead(self) -> bool:
        """Whether nothing is copied any more."""
        return self._manager.ended

    def take_numbers(self) -> dict[str, float]:
        """The counters since the last call."""
        numbers, self.numbers = self.numbers, {}
        return numbers

    def count(self, name: str, value: float) -> None:
        """Adds to a counter."""
        self.numbers[name] = self.numbers.get(name, 0) + value

    def _digest(self, block: int) -> int:
        return int(xxhash.xxh3_64_intdigest(self.blocks.page_bytes(block)))

    def _compare(self, blocks: "array[int]", slots: "array[int]") -> None:
        """Counts loaded blocks, and those whose bytes are not the ones that were saved."""
        assert self._digests is not None
        wrong = sum(self._digest(b) != self._digests.get(s) for b, s in zip(blocks, slots, strict=True))
        self.count("checked_blocks", len(blocks))
        self.count("wrong_blocks", wrong)
        if wrong:
            log.error("kvkeep: %d of %d loaded blocks differ from what was saved", wrong, len(blocks))

    def close(self) -> None:
        """Ends the copies, and lets go of the memory."""
        self._manager.close(drain=False, timeout_s=5.0)
        if self._manager.idle and not self._manager.busy:
            self.pool.close()


def _plan(direction: Any, sources: "array[int]", targets: "array[int]") -> Plan:
    none = array("q", bytes(8 * len(sources)))
    return Plan(direction, "promote" if direction == "h2d" else "clean", sources, targets, none, none)
