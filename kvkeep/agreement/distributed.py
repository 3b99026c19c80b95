"""Distributed: blocks over torch.distributed.

Must not know what is in them.  torch is loaded when a group is joined, and by nobody else in this package.

Each group is one of its own, so that its timeout is this deadline and nobody else's operations wait in its queue; and
it is made from the world's store only, so that it does not matter how many process groups a rank is in besides.  gloo
is right for GPUs as well: what is decided here is decided on the host, and gloo waits there, without the interpreter's
lock, for as long as it is told and no longer.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
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
        self._first = self._buffers(BLOCK_NBYTES)
        self._group: Any = None
        try:
            store = self._in_time(lambda: self._meet(members))
            self._group = self._in_time(lambda: self._connect(store, backend))
            self.gather(bytes(BLOCK_NBYTES))  # all are there
        except (RuntimeError, RankLost) as error:
            self.close()
            raise RankLost(f"the {len(members)} ranks of the group did not all come: {_first_line(error)}") from error

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
        if self._group is None:
            raise RankLost(f"rank {self._rank} of {self._size} has left the group")
        mine, theirs = self._first if len(block) == BLOCK_NBYTES else self._buffers(len(block))
        host = mine if self._device.type == "cpu" else mine.cpu()
        host.numpy()[:] = np.frombuffer(block, dtype=np.uint8)
        if host is not mine:
            mine.copy_(host)
        try:
            self._wait(self._group.allgather([theirs], [mine]))
        except RuntimeError as error:
            raise RankLost(
                f"rank {self._rank} of {self._size} has no answer from all others, within {self._deadline_s:g} s: "
                f"{_first_line(error)}"
            ) from error
        return [tensor.cpu().numpy().tobytes() for tensor in theirs]

    def close(self) -> None:
        """Leaves the process group."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.shutdown()

    # ------------------------------------------------------------------ inside

    def _meet(self, members: list[int]) -> Any:
        """Where the members find each other: a part of the world's store that no group has used.

        The first one names it, anew for each group and each try, and each of the others takes the name that it finds.
        Raises RuntimeError when one of them has not come by the deadline.
        """
        import torch.distributed

        dist: Any = torch.distributed  # not all of it is said to be exported
        store = dist.distributed_c10d._get_default_store()
        group, name = f"kvkeep agreement {members}", uuid.uuid4().hex
        for rank in range(1, self._size) if not self._rank else ():
            store.set(f"{group} {rank}", name)
        if self._rank:
            key = f"{group} {self._rank}"
            store.wait([key], timedelta(seconds=self._deadline_s))
            name = store.get(key).decode()
            store.delete_key(key)
        ours = dist.PrefixStore(name, store)
        ours.set(f"here {self._rank}", "1")
        ours.wait([f"here {rank}" for rank in range(self._size)], timedelta(seconds=self._deadline_s))
        return ours

    def _connect(self, store: Any, backend: BackendName) -> Any:
        import torch
        import torch.distributed as dist

        if backend == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, timedelta(seconds=self._deadline_s))
        torch.cuda.set_device(self._device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._deadline_s * NCCL_DEADLINES)
        return dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def _in_time(self, do: Callable[[], Any]) -> Any:
        """What `do` gives or raises; RuntimeError at the deadline: the world's store has none where its host hangs."""
        found: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                found.append(do())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="kvkeep-join", daemon=True)
        thread.start()
        thread.join(self._deadline_s + GRACE_S)
        if errors:
            raise errors[0]
        if not found:
            raise RuntimeError("the store that all ranks meet at does not answer")
        return found[0]

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
