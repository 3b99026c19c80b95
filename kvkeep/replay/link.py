"""A link between two tiers without bytes, in simulated time.

Must not know pages' content or what they are copied for.  Copies of one direction go one after the other; the two
directions go at the same time.  None fails.
"""

from kvkeep.replay.seat import TraceClock
from kvkeep.transfer.backend import Job, Outcome

#: `next_end_s` while no copy runs.
IDLE = float("inf")


class Link:
    """A `Backend` of `page_size` "bytes" a page, one a token position.

    clock: simulated seconds.   tokens_per_s: in each direction; None: copies take no time.
    """

    def __init__(self, clock: TraceClock, page_size: int, tokens_per_s: float | None) -> None:
        self._clock = clock
        self._page_size = page_size
        self._s_per_page = page_size / tokens_per_s if tokens_per_s is not None else 0.0
        self._free_s = {"h2d": 0.0, "d2h": 0.0}
        self._running: list[tuple[float, float, Job]] = []  # end, how long it takes, what

    @property
    def next_end_s(self) -> float:
        """When the next copy ends."""
        return min((end for end, _, _ in self._running), default=IDLE)

    @property
    def page_nbytes(self) -> int:
        """Token positions of a page."""
        return self._page_size

    def launch(self, job: Job) -> None:
        """Begins when the copies before it in its direction are over."""
        direction = job.plan.direction
        takes_s = job.nbytes / self._page_size * self._s_per_page
        end_s = max(self._clock.now_s, self._free_s[direction]) + takes_s
        self._free_s[direction] = end_s
        self._running.append((end_s, takes_s, job))

    def completions(self) -> list[Outcome]:
        """Copies that are over by now."""
        now_s = self._clock.now_s
        over = sorted((one for one in self._running if one[0] <= now_s), key=lambda one: (one[0], one[2].number))
        if over:
            self._running = [one for one in self._running if one[0] > now_s]
        return [Outcome(job, None, round(takes_s * 1e9)) for _, takes_s, job in over]

    def order_after(self, job: Job, stream: object) -> bool:
        """False: there are no streams."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Simulated time does not pass by waiting."""

    def close(self, timeout_s: float) -> list[Outcome]:
        """What runs is over."""
        left, self._running = self._running, []
        return [Outcome(job, None, round(takes_s * 1e9)) for _, takes_s, job in left]
