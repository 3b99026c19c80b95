"""Faults: a real backend some of whose copies fail, after they have spoilt what they were to write.

Must not know who waits for a copy, nor what is compared afterwards.
"""

from collections.abc import Callable

from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.backend import Backend, Job, Outcome
from kvkeep.transfer.plan import Cause


class FailingBackend:
    """`inner`, whose copies of one cause fail where `fails` says so of their number, counted from 0.

    The pages that such a copy was to write are poisoned before it is reported, so that whoever reads them shows.
    gpu, host: the pools.   failed: copies that were reported as failed.
    """

    def __init__(
        self, inner: Backend, gpu: PageMemory, host: PageMemory, cause: Cause, fails: Callable[[int], bool]
    ) -> None:
        self._inner = inner
        self._targets = {"h2d": gpu, "d2h": host}
        self._cause = cause
        self._fails = fails
        self._seen = 0
        self._doomed: set[Job] = set()
        self.failed = 0

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return self._inner.page_nbytes

    def launch(self, job: Job) -> None:
        """Begins to copy; what will be said of it is decided here."""
        if job.plan.cause == self._cause:
            if self._fails(self._seen):
                self._doomed.add(job)
            self._seen += 1
        self._inner.launch(job)

    def completions(self) -> list[Outcome]:
        """What has ended since the last call."""
        return [self._told(outcome) for outcome in self._inner.completions()]

    def order_after(self, job: Job, stream: object) -> bool:
        """False: a stream that went on with a doomed copy would not hear that it failed."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Blocks until `completions` has something to say, or until the time is up."""
        self._inner.wait(timeout_s)

    def close(self, timeout_s: float) -> list[Outcome]:
        """Ends `inner`; what `completions` has not said yet."""
        return [self._told(outcome) for outcome in self._inner.close(timeout_s)]

    def _told(self, outcome: Outcome) -> Outcome:
        if outcome.job not in self._doomed:
            return outcome
        self._doomed.remove(outcome.job)
        self.failed += 1
        plan = outcome.job.plan
        self._targets[plan.direction].poison(plan.targets)
        return Outcome(outcome.job, outcome.error or "made to fail", outcome.copy_ns)
