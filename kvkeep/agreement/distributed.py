"""Distributed: blocks over torch.distributed.

Must not know what is in them.  torch is loaded when a group is joined, and by nobody else in this package.

Each group gets a process group of its own, so that its timeout is this deadline and nobody else's operations wait in
its queue.  gloo is right for GPUs as well: what is decided here is decided on the host, and gloo waits there, without
the interpreter's lock, for as long as it is told and no longer.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvkeep.agreement.channel import BLOCK_NBYTES, Channel
from kvkeep.config import check_choice
from kvkeep.errors import BadInput, RankLost

if TYPE_CHECKING:
    import torch

#: Seconds after the deadline at which the host stops to wait, should the backend not have done so by itself.
GRACE_S = 0.25
#: NCCL's watchdog ends the process at the timeout of its group: so many deadlines later than we raise.
NCCL_DEADLINES = 4
POLL_PERIOD_S = 0.00002

BackendName = Literal["gloo", "nccl"]


def join(ranks: Sequence[int] | None = None, *, deadline_s: float = 10.0, backend: BackendName = "gloo") -> Channel:
    """The channel of a group of ranks of an initialised torch.distributed; see `Distributed`."""
    return Channel(Distributed(ranks, deadline_s=deadline_s, backend=backend))


class Distributed:
    """A `Transport` over a process group of its own.

    ranks: of the world, those that are members; None: all.  Every one of them must make it, with the same values.
    deadline_s: seconds after which a rank that has not come is taken for lost: more than ranks are ever apart while all
        are well.  A rank that has died is noticed at once by its neighbours, and by the others as they go; one that
        hangs is noticed at the deadline.
    backend: what carries the blocks.  "nccl": through the memory of the current CUDA device.
    Raises `BadInput`, or `RankLost` when a member does not come.
    """

    def __init__(self, ranks: Sequence[int] | None, *, deadline_s: float, backend: BackendName) -> None:
        import torch
        import torch.distributed as dist

        check_choice("backend", backend, ("gloo", "nccl"))
        if not 0 < deadline_s < float("inf"):
            raise BadInput(f"deadline_s is {deadline_s!r}: it must be a number of seconds above 0")
        if not dist.is_initialized():
            raise BadInput("torch.distributed is not initialised: call init_process_group on every rank before")
        world = range(dist.get_world_size())
        members = list(world) if ranks is None else sorted(set(ranks))
        me = dist.get_rank()
        if me not in members or not set(members) <= set(world):
            raise BadInput(f"ranks {members}: they must be of the world of {len(world)}, and this rank, {me}, of them")
        self._deadline_s = deadline_s
        self._rank, self._size = members.index(me), len(members)
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        timeout_s = deadline_s * NCCL_DEADLINES if backend == "nccl" else deadline_s
        try:
            self._group: Any = dist.new_group(
                members, timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
            )
        except RuntimeError as error:
            raise RankLost(f"the {len(members)} ranks of the group did not all come: {_first_line(error)}") from error
        self._first = self._buffers(BLOCK_NBYTES)

    @property
    def rank(self) -> int:
        """This rank's number among the members, which are in the order of the world."""
        return self._rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._size

    def gather(self, block: bytes) -> list[bytes]:
        """See `Transport`."""
        import torch.distributed as dist

        mine, theirs = self._first if len(block) == BLOCK_NBYTES else self._buffers(len(block))
        host = mine if self._device.type == "cpu" else mine.cpu()
        host.numpy()[:] = np.frombuffer(block, dtype=np.uint8)
        if host is not mine:
            mine.copy_(host)
        try:
            work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
            self._wait(work)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self._rank} of {self._size} has no answer from all others, within {self._deadline_s:g} s: "
                f"{_first_line(error)}"
            ) from error
        return [tensor.cpu().numpy().tobytes() for tensor in theirs]

    def close(self) -> None:
        """Leaves the process group."""
        import torch.distributed as dist

        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _wait(self, work: Any) -> None:
        """Until it is over; RuntimeError at the deadline."""
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=self._deadline_s + GRACE_S))
            return
        import torch

        until = time.monotonic() + self._deadline_s
        work.wait()  # of the stream, not of the host
        over = torch.cuda.Event()
        over.record()
        while not over.query():
            if time.monotonic() > until:
                raise RuntimeError("timed out")
            time.sleep(POLL_PERIOD_S)

    def _buffers(self, nbytes: int) -> "tuple[torch.Tensor, list[torch.Tensor]]":
        import torch

        every = torch.zeros((self._size + 1, nbytes), dtype=torch.uint8, device=self._device)
        return every[0], list(every[1:])


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
