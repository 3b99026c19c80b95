"""Chooses operations for a simulated world: everything that is random, from one seed.

Must not do them.  Each seed has a world and habits of its own: some operations often, some never.
"""

import random
from collections.abc import Callable

from kvkeep.index.run import Root, Run
from tests.sim.device import PAGE_SIZE
from tests.sim.output_chooser import OutputChooser
from tests.sim.request import Item, Request
from tests.sim.world import SALTS, WEIGHTS, Operation, Setup, World

#: How often each operation is chosen, before a seed's habits.
WEIGHT = {
    "admit": 30, "compute": 24, "extend": 6, "truncate": 2, "finish": 20, "abort": 2, "suspend": 2, "resume": 4,
    "discard": 0.3, "poll": 8, "step": 90, "written": 40, "follow": 4, "stick": 0.6, "free": 2, "fail": 0.6,
    "late": 0.6, "reset": 0.15, "set_fingerprint": 0.1, "prefilled": 0.1, "die": 0.02, "close": 0.02,
    "protect": 3, "release": 8, "fork": 2,
}  # fmt: skip
HABITS = (0.25, 1.0, 1.0, 3.0)


def setup_of(seed: int) -> Setup:
    """The world of a seed."""
    pick = random.Random(f"setup {seed}").choice
    tier_pages = pick((None, 0, 1, 2, 3, 6, 12, 12, 24, 24))
    pages = pick((4, 6, 8, 8, 12, 16))
    if pick((False,) * 11 + (True,)):  # arrays long enough for numpy
        pages, tier_pages = 48, 96
    return Setup(
        pages=pages,
        tier_pages=tier_pages,
        suspend_pages=pick((0, 2, 4, 8)) if tier_pages is not None else 0,
        asynchronous=pick((False, True)),
        index_at=pick(("seal", "seal", "finish")),
        narrow_names=pick((False, False, False, True)),
        seed=seed,
        fail_rate=pick((0.0, 0.0, 0.1, 0.3)),
        stuck_rate=pick((0.0, 0.0, 0.03)),
        deadline_steps=pick((8, 40, 1000)),
        in_flight_pages=pick((2, 6, 1000)),
        queue_pages=pick((2, 6, 1000)),
        listening=pick((False, False, True)),
        traced=pick((False, False, False, True)),
        eviction=pick(("lru", "lru", "rhythm")),
        outputs=pick((0, 0, 0, 0, 0, 0, 2, 5, 12)),
    )


class Chooser:
    """Operations for one world."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(f"operations {seed}")
        self._handles = 0
        self._names = list(WEIGHT)
        # The last three have a choice of their own, so that what older seeds do stays what it was.
        self._weights = [WEIGHT[name] * self._random.choice(HABITS) for name in self._names[:-3]]
        reshaped = random.Random(f"reshaped {seed}").choice
        self._weights += [WEIGHT[name] * reshaped((0, 0, 0, 1, 2)) for name in self._names[-3:]]
        self._load = self._random.choice((0.0, 0.3, 0.6, 0.9))
        self._ones = self._random.choice((0.1, 0.3, 0.5))
        self._media_rate = self._random.choice((0.0, 0.0, 0.25))
        self._ways: dict[str, Callable[[], Operation | None]] = {
            "admit": self._admit,
            "compute": self._compute,
            "extend": self._extend,
            "truncate": self._truncate,
            "suspend": self._suspend,
            "resume": lambda: self._on("resume", self._parked()),
            "discard": lambda: self._on("discard", self._parked()),
            "finish": self._finish,
            "abort": lambda: self._on("abort", self._live()),
            "follow": self._follow,
            "close": lambda: ("close", self._random.random() < 0.5),
            "late": lambda: ("late", self._random.choice((3, 20, world.setup.deadline_steps))),
            "written": lambda: ("written",) if world.device.writing else None,
            "prefilled": lambda: ("prefilled", self._random.choice((1, 100, 10_000))),
            "protect": self._protect,
            "release": self._release,
            "fork": self._fork,
            "set_fingerprint": lambda: ("set_fingerprint", self._random.randrange(len(WEIGHTS))),
        }
        for name in ("step", "stick", "free", "fail"):
            self._ways[name] = lambda name=name: self._copy(name)  # type: ignore[misc]
        for name in ("poll", "reset", "die"):
            self._ways[name] = lambda name=name: (name,)  # type: ignore[misc]
        self._outputs = OutputChooser(world, seed) if world.outputs is not None else None
        if world.backend is None:
            self._never("late", "die", "suspend", "resume", "discard", "poll", "prefilled", "close")

    def next(self) -> Operation:
        """An operation that makes sense now."""
        if self._outputs is not None and self._outputs.turn():
            return self._outputs.next()
        while True:
            (name,) = self._random.choices(self._names, self._weights)
            operation = self._ways[name]()
            if operation is not None:
                return operation

    def _never(self, *names: str) -> None:
        for name in names:
            self._weights[self._names.index(name)] = 0

    def _live(self) -> list[Request]:
        return [request for request in self._world.requests.values() if request.lease is not None]

    def _parked(self) -> list[Request]:
        return [request for request in self._world.requests.values() if request.ticket is not None]

    def _on(self, name: str, requests: list[Request]) -> Operation | None:
        return (name, self._random.choice(requests).handle) if requests else None

    def _one_readable(self) -> Request | None:
        readable = [request for request in self._live() if request.readable]
        return self._random.choice(readable) if readable else None

    # ------------------------------------------------------------------ requests

    def _admit(self) -> Operation | None:
        rng, ended, stats = self._random, self._world.ended, self._world.cache.stats()
        if stats.pages_live > self._load * stats.pages_total and rng.random() < 0.9:
            return None
        salt, tokens, items = 0 if rng.random() < 0.9 else rng.randrange(len(SALTS)), list[int](), list[Item]()
        below = self._below()
        if below and rng.random() < 0.5:
            salt, tokens = rng.choice(below)
        elif ended and rng.random() < 0.8:
            # A session that goes on, recently seen more often; or another that begins like it.
            at = rng.randrange(len(ended)) if rng.random() < 0.5 else max(0, len(ended) - 1 - rng.randrange(4))
            salt, known, items = ended[at]
            tokens = known[: len(known) if rng.random() < 0.7 else rng.randint(1, len(known))]
            items = [item for item in items if item.end <= len(tokens)]
        tokens = tokens + self._tokens(rng.randint(0, 4) if tokens else rng.randint(1, self._world.setup.pages))
        del tokens[self._world.setup.pages * PAGE_SIZE :]
        items = [item for item in items if item.end <= len(tokens)]
        if rng.random() < self._media_rate:
            first = items[-1].end if items else 0
            if first < len(tokens):
                offset = rng.randrange(first, len(tokens))
                digest = rng.choice((1, 1, 2, None))
                items = [*items, Item(offset, rng.randint(1, len(tokens) - offset), digest, rng.random() < 0.6)]
        self._handles += 1
        plain = [tuple(item) for item in items]
        return ("admit", self._handles, salt, tokens, plain, rng.random() < 0.92, rng.random() < 0.95)

    def _below(self) -> list[tuple[int, list[int]]]:
        """Salts and tokens of the chains whose ends are in host memory only."""
        found = []
        for run in self._world.cache._tree.runs():
            if len(run.pages) < len(run.names) and not run.whole:
                tokens = b""
                at: Run | None = run
                while at is not None and at.parent is not None:
                    tokens, at = bytes(at.tokens) + tokens, at.parent
                assert isinstance(at, Root)
                salt = next((s for s in range(len(SALTS)) if self._world.identity(s).record == at.record), None)
                if salt is not None:
                    found.append((salt, memoryview(tokens).cast("i").tolist()))
        return found

    def _tokens(self, count: int) -> list[int]:
        return [int(self._random.random() < self._ones) for _ in range(count)]

    def _compute(self) -> Operation | None:
        request = self._one_readable()
        if request is None:
            return None
        return ("compute", request.handle, self._random.choice((1, 4, 32, 32)), self._random.choice((0, 0, 0, 1, 3)))

    def _finish(self) -> Operation | None:
        """Mostly when all is computed."""
        live = self._live()
        done = [request for request in live if request.readable and len(request.tokens) - len(request.kvs) < 2]
        return self._on("finish", done if done or self._random.random() < 0.7 else live)

    def _follow(self) -> Operation | None:
        waiting = [request for request in self._live() if request.lease is not None and request.lease.read_in_progress]
        return self._on("follow", waiting) if self._world.setup.asynchronous else None

    def _copy(self, name: str) -> Operation | None:
        backend = self._world.backend
        jobs = () if backend is None else backend.movable if name == "step" else backend.jobs
        return (name, self._random.randrange(len(jobs))) if jobs else None

    def _extend(self) -> Operation | None:
        """What an engine does when all is computed; and at other times, room."""
        live = self._live()
        if not live:
            return None
        request = self._random.choice(live)
        done = request.readable and len(request.kvs) == len(request.tokens)
        tokens = self._tokens(self._random.randint(1, 3)) if done else []
        return ("extend", request.handle, tokens, self._random.choice((0, 0, 1, 4)))

    def _truncate(self) -> Operation | None:
        live = self._live()
        if not live:
            return None
        request = self._random.choice(live)
        return ("truncate", request.handle, self._random.randint(1, len(request.tokens)))

    def _protect(self) -> Operation | None:
        """Mostly something short, so that a window may slide behind it."""
        live = [request for request in self._live() if request.lease is not None and not request.lease.released]
        if not live:
            return None
        request = self._random.choice(live)
        longest = len(request.tokens) if self._random.random() < 0.3 else min(5, len(request.tokens))
        return ("protect", request.handle, self._random.randint(0, longest))

    def _release(self) -> Operation | None:
        windowed = [request for request in self._live() if request.lease is not None and request.lease.window]
        if not windowed:
            return None
        return ("release", self._random.choice(windowed).handle, self._random.choice((1, 1, 1, 2, 3)))

    def _fork(self) -> Operation | None:
        request = self._one_readable()
        if request is None:
            return None
        self._handles += 1
        return ("fork", request.handle, self._handles)

    def _suspend(self) -> Operation | None:
        live = self._live()
        if not live:
            return None
        return ("suspend", self._random.choice(live).handle, self._random.random() < 0.3)
