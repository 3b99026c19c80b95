"""What the manager asks of a backend, and what passes between them.

Must not know any backend, nor when a job is started.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NewType, Protocol

from kvkeep.errors import KvkeepError
from kvkeep.transfer.plan import Plan

JobNumber = NewType("JobNumber", int)


class Event(Protocol):
    """A point in the work of whoever writes pages, such as a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether everything before the point is done.  Never blocks."""


class _NoWait(Enum):
    NO_WAIT = "nothing to wait for"


#: The explicit "nothing to wait for": the bytes of the sources are complete and nobody uses the targets' old ones.
NO_WAIT: Final = _NoWait.NO_WAIT
After = Event | Literal[_NoWait.NO_WAIT]


class Job:
    """One submitted plan.

    number: in order of submission.   nbytes: what it copies.
    after: the copy may begin when this is done.   due: the manager's clock at which it is overdue.
    The manager alone changes it.
    """

    __slots__ = ("after", "due", "nbytes", "number", "overdue", "plan")

    def __init__(self, number: JobNumber, plan: Plan, after: After, nbytes: int, due: float) -> None:
        self.number = number
        self.plan = plan
        self.after = after
        self.nbytes = nbytes
        self.due = due
        self.overdue = False

    def __repr__(self) -> str:
        return f"Job {self.number} ({self.plan})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A copy that is over: no byte of it moves any more.

    error: None when every page and slot has arrived; otherwise why not, and the targets hold garbage.
    copy_ns: nanoseconds from its first byte to its last; 0 for one that never began.
    """

    job: Job
    error: str | None
    copy_ns: int


class BackendDied(KvkeepError):
    """The backend has stopped for good; none of its copies moves a byte any more."""


class StillCopying(KvkeepError):
    """The backend was to stop, and some of its copies still move bytes: their pages are not the caller's yet."""


class Backend(Protocol):
    """Copies pages between a GPU pool and a CPU pool.  The manager calls it from one thread at a time.

    A copy that fails is an `Outcome`.  `launch`, `completions` and `close` raise `BackendDied`, and nothing else of the
    world's making, once nothing moves any more and never will.
    """

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""

    def launch(self, job: Job) -> None:
        """Begins to copy, as soon as `job.after` is done.  Never blocks."""

    def completions(self) -> list[Outcome]:
        """Copies that have ended since the last call, each once.  Never blocks."""

    def order_after(self, job: Job, stream: object) -> bool:
        """Makes work that is queued on `stream` from now on wait for a launched job, without blocking the caller.

        False where it cannot: the host has to wait until the job is over.
        """

    def wait(self, timeout_s: float) -> None:
        """Blocks until `completions` has something to say, or until the time is up."""

    def close(self, timeout_s: float) -> list[Outcome]:
        """Cuts copies short where it can and waits for the others; returns what `completions` has not said yet.

        Afterwards nothing runs.  Raises `StillCopying` when copies did not end in time: it may be called again then.
        """
