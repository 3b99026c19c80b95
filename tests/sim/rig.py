"""A simulated world that a test drives by hand: requests by name, and copies that move when the test says so.

Must not choose anything.  What must hold after each operation is checked here as in the simulator.
"""

from collections.abc import Sequence
from typing import Any

from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger
from kvkeep.traffic import Traffic
from kvkeep.transfer.backend import Job
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import Cause
from kvkeep.transfer.simulated import SimulatedBackend
from tests.sim.request import Item, Request
from tests.sim.world import Setup, World


class Rig:
    """A world, copies of which read and write at their last moment unless `when` says otherwise."""

    def __init__(self, **setup: Any) -> None:
        self.world = World(Setup(**{"pages": 8, "tier_pages": 16, "when": "late", **setup}))
        self.cache = self.world.cache
        self._handles = 0

    # ------------------------------------------------------------------ requests

    def admit(self, tokens: Sequence[int], items: Sequence[Item] = (), **how: Any) -> Request | None:
        """A request, or None when it is refused."""
        self._handles += 1
        how = {"salt": 0, "reuse": True, "store": True, **how}
        self.world.do(("admit", self._handles, how["salt"], list(tokens), items, how["reuse"], how["store"]))
        return self.world.requests.get(self._handles)

    def admitted(self, tokens: Sequence[int], items: Sequence[Item] = (), **how: Any) -> Request:
        """A request that is not refused."""
        request = self.admit(tokens, items, **how)
        assert request is not None, f"{len(tokens)} tokens were refused"
        return request

    def do(self, name: str, request: Request, *values: Any) -> None:
        """One operation on a request."""
        self.world.do((name, request.handle, *values))

    def compute(self, request: Request, count: int = 1000) -> None:
        """A forward over all that is left, or over `count` positions; then `seal`."""
        self.do("compute", request, count, 0)

    def serve(self, tokens: Sequence[int], **how: Any) -> int:
        """A whole request, copies and all; how many of its tokens matched."""
        request = self.admitted(tokens, **how)
        matched = self.lease(request).matched_len
        self.settle()
        self.compute(request)
        self.do("finish", request)
        return matched

    def serve_alone(self, tokens: Sequence[int], **how: Any) -> int:
        """A whole request that needs no copy, while others stand still."""
        request = self.admitted(tokens, **how)
        assert request.readable
        matched = self.lease(request).matched_len
        self.compute(request)
        self.do("finish", request)
        return matched

    def matched(self, tokens: Sequence[int], **how: Any) -> int:
        """How many tokens of a prompt match; it is aborted at once."""
        request = self.admitted(tokens, **how)
        matched = self.lease(request).matched_len
        self.do("abort", request)
        return matched

    @staticmethod
    def lease(request: Request) -> Lease:
        """Of a request that has one."""
        assert request.lease is not None
        return request.lease

    # ------------------------------------------------------------------ copies

    def jobs(self, *causes: Cause) -> list[Job]:
        """Copies in flight, for one of these causes if any is given."""
        return [job for job in self.backend.jobs if not causes or job.plan.cause in causes]

    def finish(self, job: Job) -> None:
        """Moves a copy until it is reported; nobody has been told yet."""
        self.backend.free(job)
        while job in self.backend.jobs:
            assert self.backend.step(job), f"{job} does not move"

    def poll(self) -> None:
        """The cache is told."""
        self.world.do(("poll",))

    def settle(self) -> None:
        """Every copy that can end has ended, and so have those that follow from it."""
        self.poll()
        while jobs := self.backend.movable:
            for job in jobs:
                self.finish(job)
            self.poll()

    def push_out(self) -> None:
        """Whatever is cached on the GPU goes down to host memory: a prompt as large as the pool comes and goes."""
        self.settle()
        request = self.admitted([9] * (self.world.setup.pages * 2), reuse=False, store=False)
        self.settle()
        self.do("abort", request)

    # ------------------------------------------------------------------ counts

    @property
    def backend(self) -> SimulatedBackend:
        """What moves the copies."""
        assert self.world.backend is not None
        return self.world.backend

    @property
    def transfers(self) -> TransferManager:
        """What decides which copies move."""
        assert self.cache.transfers is not None
        return self.cache.transfers

    @property
    def traffic(self) -> Traffic:
        """What the cache knows of its copies."""
        assert self.cache._traffic is not None
        return self.cache._traffic

    @property
    def host(self) -> Ledger:
        """Who owns the host pages."""
        assert self.cache._host is not None
        return self.cache._host.ledger

    @property
    def waiting(self) -> int:
        """Copies that have not started."""
        queues = self.transfers.stats().queues
        return queues.loads + queues.stores

    @property
    def free(self) -> int:
        """Free GPU pages."""
        return self.cache.stats().pages_free

    @property
    def host_cached(self) -> int:
        """Host pages that only the index owns."""
        return self.cache.stats().host_pages_cached

    @property
    def host_only(self) -> int:
        """Pages in the index whose only copy is in host memory."""
        return sum(len(run.names) - len(run.pages) for run in self.cache._tree.runs())
