"""Replicas in simulated time: real index and eviction order each, one prefill at a time, requests sent by a policy.

Must not know which policies there are, nor what is judged.

A request waits in its replica's queue, is prefilled there (`UNCACHED / prefill_tokens_per_s`, one at a time), and has
its first token then; it decodes beside the others, and the session's next turn comes when its user has thought.
Prompts are matched as their prefill begins, which is when those before them in the queue are there.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np

from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Request

#: (request, replicas' queues) -> the replica's number.
Policy = Callable[[Request, Sequence[int]], int]

#: Copies are counted so often, in the second half of the run.
SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Speeds:
    """Service times.   overhead_s: of a prefill, whatever it computes."""

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 50.0
    overhead_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Visit:
    """A session: when it begins, its requests, and the seconds between an answer's end and the next of them."""

    start_s: float
    requests: Sequence[Request]
    think_s: Sequence[float]


@dataclass(slots=True)
class Outcome:
    """What came of it.

    ttft_s: by request, in the order in which they were prefilled.   busy: share of the time that replicas prefilled.
    copies: of the pages held, those that another replica holds as well, less one each; mean over the samples.
    """

    prompt_tokens: int = 0
    matched_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    by_replica: list[int] = field(default_factory=list)
    busy: float = 0.0
    copies: float = 0.0
    span_s: float = 0.0
    moved: int = 0

    @property
    def hit_share(self) -> float:
        return self.matched_tokens / self.prompt_tokens

    def quantile_s(self, q: float) -> float:
        return float(np.quantile(self.ttft_s, q))


class Replicas:
    """`lanes` prefill lanes over as many caches, or over one that all of them share."""

    def __init__(
        self,
        pages: Pages,
        lanes: int,
        tokens_each: int,
        *,
        shared: bool = False,
        eviction: str = "lru",
        speeds: Speeds = Speeds(),
    ) -> None:
        self.pages, self.lanes, self.speeds = pages, lanes, speeds
        self.clock = TraceClock()
        each = tokens_each // pages.page_size
        sizes = [each * lanes] if shared else [each] * lanes
        self.caches = [Reference(pages, n, make_order(eviction, n, self.clock), self.clock, unwritten=1) for n in sizes]
        self._queues: list[deque[tuple[Request, float, Visit, int]]] = [deque() for _ in range(lanes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tick = count()
        self.out = Outcome(by_replica=[0] * lanes)
        self._busy_s = 0.0
        self._last: dict[int, int] = {}

    def run(self, visits: Sequence[Visit], policy: Policy) -> Outcome:
        """Serves all of them to the end."""
        self._policy = policy
        for visit in visits:
            self._at(visit.start_s, lambda visit=visit: self._arrive(visit, 0))  # type: ignore[misc]
        total = sum(len(visit.requests) for visit in visits)
        marks = deque(total // 2 + total * k // (2 * SAMPLES) for k in range(SAMPLES))
        copies = []
        last_s = visits[-1].start_s
        self._window_s = last_s / 4, last_s
        while self._events:
            self.clock.now_s, _, what = heapq.heappop(self._events)
            what()
            if marks and len(self.out.ttft_s) >= marks[0]:
                marks.popleft()
                copies.append(self._copies())
        self.out.busy = self._busy_s / (last_s * 3 / 4 * self.lanes)
        self.out.copies = sum(copies) / len(copies)
        self.out.span_s = self.clock.now_s
        return self.out

    def _at(self, time_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._tick), what))

    def _arrive(self, visit: Visit, turn: int) -> None:
        request = visit.requests[turn]
        lane = self._policy(request, [len(queue) for queue in self._queues])
        self.out.by_replica[lane] += 1
        if self._last.setdefault(request.session, lane) != lane:
            self.out.moved += 1
            self._last[request.session] = lane
        queue = self._queues[lane]
        queue.append((request, self.clock.now_s, visit, turn))
        if len(queue) == 1:
            self._prefill(lane)

    def _prefill(self, lane: int) -> None:
        request = self._queues[lane][0][0]
        cache = self.caches[lane % len(self.caches)]
        before = cache.counts.matched_pages_gpu
        cache.serve(request)
        matched = (cache.counts.matched_pages_gpu - before) * self.pages.page_size
        self.out.prompt_tokens += request.prompt_len
        self.out.matched_tokens += matched
        takes_s = self.speeds.overhead_s + (request.prompt_len - matched) / self.speeds.prefill_tokens_per_s
        first_s, last_s = self._window_s
        self._busy_s += max(0.0, min(last_s, self.clock.now_s + takes_s) - max(first_s, self.clock.now_s))
        self._at(self.clock.now_s + takes_s, lambda: self._prefilled(lane))

    def _prefilled(self, lane: int) -> None:
        request, since_s, visit, turn = self._queues[lane].popleft()
        self.out.ttft_s.append(self.clock.now_s - since_s)
        if self._queues[lane]:
            self._prefill(lane)
        if turn + 1 < len(visit.requests):
            decode_s = (request.final_len - request.prompt_len) / self.speeds.decode_tokens_per_s
            later_s = self.clock.now_s + decode_s + visit.think_s[turn + 1]
            self._at(later_s, lambda: self._arrive(visit, turn + 1))

    def _copies(self) -> float:
        held = [{name for run in cache.tree.runs() for name in run.names} for cache in self.caches]
        total = sum(map(len, held))
        return 1 - len(set().union(*held)) / total if total else 0.0


def visits(
    sessions: Sequence[Sequence[Request]],
    per_s: float,
    *,
    think_s: float | None,
    think_max_s: float = 60.0,
    seed: int = 0,
) -> list[Visit]:
    """Sessions that begin at random, `per_s` a second on average.

    think_s: mean of the seconds between a session's turns, drawn; None: as recorded, up to `think_max_s`.
    """
    rng = random.Random(seed)
    out, now_s = [], 0.0
    for session in sessions:
        now_s += rng.expovariate(per_s)
        ordered = sorted(session, key=lambda request: request.time_s)
        if think_s is None:
            gaps = [min(max(0.0, b.time_s - a.time_s), think_max_s) for a, b in pairwise(ordered)]
        else:
            gaps = [rng.expovariate(1 / think_s) for _ in ordered[1:]]
        out.append(Visit(now_s, ordered, [0.0, *gaps]))
    return out
