"""Replicas in simulated time: real index and eviction order each, one prefill at a time, requests sent by a policy.

Must not know which policies there are, nor what is judged.

A request waits in its replica's queue, is prefilled there, alone, and has its first token then; it decodes beside the
others, and its session's next turn comes when the user has thought.  A prompt is matched as its prefill begins: by then
the pages of those before it in the queue are there.  Decoding takes nothing from prefills, and live requests no pages
from the cache: both are equal for all policies.
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

#: (request, how many wait or are prefilled on each replica) -> the replica's number.
Policy = Callable[[Request, Sequence[int]], int]

#: Times that copies are counted, in the second half of a run.
SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Speeds:
    """Service times: a prefill takes `overhead_s` and its new tokens at one rate; requests decode at another.

    A prefill of 10,000 tokens a second is a model of 8 billion parameters on a middling GPU, or 70 on several.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 50.0
    overhead_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Visit:
    """A session: when it begins, its requests, and how long before each of them its user thinks."""

    start_s: float
    requests: Sequence[Request]
    think_s: Sequence[float]


@dataclass(slots=True)
class Outcome:
    """What came of it.

    ttft_s: by request, in the order of their first tokens.   by_replica: requests.
    busy: share of the time that replicas prefilled, from a quarter of the run to the last session's beginning.
    copies: of the pages held, the share that could go without one being lost; mean over the samples.
    moves: requests that went elsewhere than the one before of their session.
    """

    prompt_tokens: int = 0
    matched_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    by_replica: list[int] = field(default_factory=list)
    busy: float = 0.0
    copies: float = 0.0
    moves: int = 0

    @property
    def hit_share(self) -> float:
        return self.matched_tokens / self.prompt_tokens

    def ttft_quantile_s(self, quantile: float) -> float:
        return float(np.quantile(self.ttft_s, quantile))


class Replicas:
    """`lanes` prefill lanes over as many caches, or over one of their summed size."""

    def __init__(
        self,
        pages: Pages,
        lanes: int,
        tokens_each: int,
        *,
        one_cache: bool = False,
        eviction: str = "rhythm",
        speeds: Speeds | None = None,
    ) -> None:
        self.pages, self.lanes, self.speeds = pages, lanes, speeds or Speeds()
        self.clock = TraceClock()
        each = tokens_each // pages.page_size
        sizes = [each * lanes] if one_cache else [each] * lanes
        self.caches = [Reference(pages, n, make_order(eviction, n, self.clock), self.clock, unwritten=1) for n in sizes]
        self.outcome = Outcome(by_replica=[0] * lanes)
        self._queues: list[deque[tuple[Request, float, Visit, int]]] = [deque() for _ in range(lanes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tick = count()
        self._window_s = (0.0, 0.0)
        self._busy_s = 0.0
        self._last: dict[int, int] = {}

    def run(self, visits: Sequence[Visit], policy: Policy) -> Outcome:
        """Serves all of them to the end."""
        out, last_s = self.outcome, visits[-1].start_s
        self._window_s = last_s / 4, last_s
        for visit in visits:
            self._at(visit.start_s, self._arrival(visit, 0, policy))
        total = sum(len(visit.requests) for visit in visits)
        marks = deque(total // 2 + total * number // (2 * SAMPLES) for number in range(SAMPLES))
        copies = []
        while self._events:
            self.clock.now_s, _, happen = heapq.heappop(self._events)
            happen()
            if marks and len(out.ttft_s) >= marks[0]:
                marks.popleft()
                copies.append(self._copies())
        first_s, last_s = self._window_s
        out.busy = self._busy_s / max((last_s - first_s) * self.lanes, 1e-9)
        out.copies = sum(copies) / len(copies)
        return out

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._tick), happen))

    def _arrival(self, visit: Visit, turn: int, policy: Policy) -> Callable[[], None]:
        def arrive() -> None:
            request = visit.requests[turn]
            lane = policy(request, [len(queue) for queue in self._queues])
            self.outcome.by_replica[lane] += 1
            self.outcome.moves += self._last.setdefault(request.session, lane) != lane
            self._last[request.session] = lane
            queue = self._queues[lane]
            queue.append((request, self.clock.now_s, visit, turn))
            if len(queue) == 1:
                self._prefill(lane, policy)

        return arrive

    def _prefill(self, lane: int, policy: Policy) -> None:
        request = self._queues[lane][0][0]
        cache = self.caches[lane % len(self.caches)]
        before = cache.counts.matched_pages_gpu
        cache.serve(request)
        matched = (cache.counts.matched_pages_gpu - before) * self.pages.page_size
        self.outcome.prompt_tokens += request.prompt_len
        self.outcome.matched_tokens += matched
        takes_s = self.speeds.overhead_s + (request.prompt_len - matched) / self.speeds.prefill_tokens_per_s
        first_s, last_s = self._window_s
        now_s = self.clock.now_s
        self._busy_s += max(0.0, min(last_s, now_s + takes_s) - max(first_s, now_s))
        self._at(now_s + takes_s, lambda: self._prefilled(lane, policy))

    def _prefilled(self, lane: int, policy: Policy) -> None:
        request, since_s, visit, turn = self._queues[lane].popleft()
        self.outcome.ttft_s.append(self.clock.now_s - since_s)
        if self._queues[lane]:
            self._prefill(lane, policy)
        if turn + 1 < len(visit.requests):
            decode_s = (request.final_len - request.prompt_len) / self.speeds.decode_tokens_per_s
            later_s = self.clock.now_s + decode_s + visit.think_s[turn + 1]
            self._at(later_s, self._arrival(visit, turn + 1, policy))

    def _copies(self) -> float:
        held = [{name for run in cache.tree.runs() for name in run.names} for cache in self.caches]
        total = sum(map(len, held))
        return 1 - len(set().union(*held)) / total if total else 0.0


#: Longer pauses in a recorded session are cut to this.
THINK_MAX_S = 60.0


def visits(sessions: Sequence[Sequence[Request]], per_s: float, *, think_s: float | None, seed: int = 0) -> list[Visit]:
    """Sessions that begin at random, `per_s` a second on average, each with its turns in order.

    think_s: mean of the seconds between an answer's end and the next turn, drawn; None: those between the recorded
        turns' beginnings, at most a minute.
    """
    rng = random.Random(seed)
    out, now_s = [], 0.0
    for session in sessions:
        now_s += rng.expovariate(per_s)
        ordered = sorted(session, key=lambda request: request.time_s)
        if think_s is None:
            gaps = [min(max(0.0, after.time_s - before.time_s), THINK_MAX_S) for before, after in pairwise(ordered)]
        else:
            gaps = [rng.expovariate(1 / think_s) for _ in ordered[1:]]
        out.append(Visit(now_s, ordered, [0.0, *gaps]))
    return out


#: Runs that looking for a rate takes at most, and how near it must come.
TRIES_MAX, NEAR = 8, 0.015


def find_rate(run: Callable[[float], Outcome], guess: float, busy: float) -> tuple[float, Outcome]:
    """The sessions a second at which replicas are busy for the share `busy` of the time, and what came of that run."""
    low, high, rate = 0.0, float("inf"), guess
    for _ in range(TRIES_MAX - 1):
        out = run(rate)
        if abs(out.busy - busy) < NEAR:
            return rate, out
        if out.busy > busy:
            high = rate
        else:
            low = rate
        rate = float((low * high) ** 0.5) if low and high < float("inf") else rate * busy / max(out.busy, 0.01)
    return rate, run(rate)
