"""What has been copied, refused and lost, counted.

Must not know how a copy is decided.  `Direction` follows from `Cause`, so counting by cause counts by both.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvkeep.transfer.backend import Job
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Direction, Plan


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies of one direction and cause that are over.

    copies, pages, nbytes: those that arrived; bytes of slots count, as no page.
    copy_s: seconds from first to last byte, added up over those copies.
    failures: copies that did not arrive, those that never started counted too.
    """

    copies: int = 0
    pages: int = 0
    nbytes: int = 0
    copy_s: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Queues:
    """loads, stores: jobs that wait; load_pages: pages of those loads (slots alone as one).
    in_flight: jobs that run, and their bytes."""

    loads: int
    stores: int
    load_pages: int
    in_flight: int
    in_flight_nbytes: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A snapshot; all but `queues` and `dead` count since the start.

    by: copies by direction and cause.
    refused_loads, refused_stores: plans that a bound, a dead backend or a closed manager refused.
    revoked: jobs taken back before they started.
    overdue: jobs that reached their deadline.   late: of those, the ones that have ended.
    dead: why the backend died.
    """

    by: Mapping[tuple[Direction, Cause], Copied]
    refused_loads: int
    refused_stores: int
    revoked: int
    overdue: int
    late: int
    queues: Queues
    dead: str | None

    @property
    def failures(self) -> int:
        """Copies that did not arrive."""
        return sum(one.failures for one in self.by.values())


class Tally:
    """The counters of a manager, changed under its lock."""

    def __init__(self) -> None:
        self.revoked = 0
        self.overdue = 0
        self._late = 0
        self._refused: dict[Direction, int] = {"h2d": 0, "d2h": 0}
        self._counts: dict[Cause, list[int]] = {cause: [0, 0, 0, 0, 0] for cause in DIRECTION_OF}

    def refused(self, plan: Plan) -> None:
        """A plan was not taken."""
        self._refused[plan.direction] += 1

    def ended(self, job: Job, ok: bool, copy_ns: int) -> None:
        """A job has had its final completion."""
        self._late += job.overdue
        counts = self._counts[job.plan.cause]
        if not ok:
            counts[4] += 1
            return
        counts[0] += 1
        counts[1] += len(job.plan)
        counts[2] += job.nbytes
        counts[3] += copy_ns

    def snapshot(self, queues: Queues, dead: str | None) -> TransferStats:
        """The counters as a value."""
        by = {
            (DIRECTION_OF[cause], cause): Copied(copies, pages, nbytes, copy_ns / 1e9, failures)
            for cause, (copies, pages, nbytes, copy_ns, failures) in self._counts.items()
        }
        refused = self._refused
        return TransferStats(by, refused["h2d"], refused["d2h"], self.revoked, self.overdue, self._late, queues, dead)
