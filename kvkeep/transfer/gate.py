"""Gate: the copies that a lease waits for.

Must not know pages or leases.  Costs a list of jobs; nobody is called back when it opens.
"""

from collections.abc import Iterable

from kvkeep.transfer.backend import Backend, Job


class Gate:
    """Closed while one of its jobs may still change, or read, the pages that the lease is about to use.

    Loads gate scheduling: no forward is launched before `open`.  Stores, copies out of pages that the lease is to
    write, gate streams only: `wait_on` lets a backend with streams order the writer behind them, and then they no
    longer keep the gate closed.
    """

    __slots__ = ("_backend", "_jobs")

    def __init__(self, jobs: Iterable[Job], backend: Backend) -> None:
        self._jobs = list(jobs)
        self._backend = backend

    @property
    def open(self) -> bool:
        """Whether every page of the lease may be read and written.  A load that failed never opens its gate."""
        return not any(job.gating for job in self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that keep it closed."""
        return [job for job in self._jobs if job.gating]

    def wait_on(self, stream: object) -> None:
        """Orders work queued on `stream` from now on behind the stores.  Does nothing where there are no streams."""
        self._jobs = [
            job
            for job in self._jobs
            if job.gating and not (job.plan.direction == "d2h" and self._backend.order_after(job, stream))
        ]

    def drop(self, job: Job) -> None:
        """No longer waits for `job`: its pages have been taken out of the lease, or are to be computed instead."""
        self._jobs = [other for other in self._jobs if other is not job]
