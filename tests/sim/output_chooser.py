"""Chooses operations on encoder outputs for a simulated world, from one seed.

Must not do them, nor draw from what `chooser` draws: worlds without outputs stay as they are.
"""

import random
from collections.abc import Callable

from kvkeep.index.output import find_output
from kvkeep.tiers.ledger import State
from tests.sim.outputs import FORMS, HINTS, Occurrence, record_of
from tests.sim.world import Operation, World

#: How often each is chosen, before a seed's habits.
WEIGHT = {"find": 20, "reserve": 16, "write": 40, "store": 40, "release": 30, "hint": 1, "forget": 1}
HABITS = (0.5, 1.0, 1.0, 2.0)
#: What computing an output takes, in seconds: less than loading it, or more.
SECONDS = (1e-6, 1.0, 1.0, 1.0)


class OutputChooser:
    """Operations on the outputs of one world."""

    def __init__(self, world: World, seed: int) -> None:
        assert world.outputs is not None
        self._world = world
        self._outputs = world.outputs
        self._live = world.outputs.live
        self._count = world.setup.outputs
        self._random = random.Random(f"outputs {seed}")
        self._weights = [weight * self._random.choice(HABITS) for weight in WEIGHT.values()]
        self._share = self._random.choice((0.1, 0.2, 0.4))
        self._live_max = self._random.choice((1, 3, 8))
        self._other_form = self._random.choice((0.0, 0.0, 0.1))
        self._handles = 0

    def turn(self) -> bool:
        """Whether the next operation is one on outputs."""
        return self._random.random() < self._share

    def next(self) -> Operation:
        """One that makes sense now."""
        ways: dict[str, Callable[[], Operation | None]] = {
            "find": self._find,
            "reserve": self._reserve,
            "write": lambda: self._on("write", [o for o in self._live.values() if not o.written]),
            "store": self._store,
            "release": lambda: self._on("release", list(self._live.values())),
            "hint": lambda: ("output", "hint", *self._which(), self._random.randrange(len(HINTS))),
            "forget": lambda: ("output", "forget", *self._which()),
        }
        while True:
            (name,) = self._random.choices(list(WEIGHT), self._weights)
            operation = ways[name]()
            if operation is not None:
                return operation

    def _which(self) -> tuple[int, int]:
        """An encoder and the number of an output: the first ones more often."""
        rng = self._random
        return int(rng.random() < 0.2), min(rng.randrange(self._count), rng.randrange(self._count))

    def _on(self, name: str, occurrences: list[Occurrence]) -> Operation | None:
        return ("output", name, self._random.choice(occurrences).handle) if occurrences else None

    def _find(self) -> Operation | None:
        if len(self._live) >= self._live_max:
            return None
        self._handles += 1
        form = self._form() if self._random.random() < 0.5 else None
        there, below = self._cached()
        return ("output", "find", self._handles, *self._one_of(below or there, 0.8), form)

    def _one_of(self, some: list[tuple[int, int]], rate: float) -> tuple[int, int]:
        return self._random.choice(some) if some and self._random.random() < rate else self._which()

    def _cached(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Outputs that are cached; and those that only host memory has, or that are on their way up."""
        world, there, below = self._world, [], []
        states = world.cache._ledger._states
        for encoder in range(2):
            for which in range(self._count):
                run = find_output(world.cache._tree, self._outputs.identity(encoder), record_of(which))
                if run is not None:
                    there.append((encoder, which))
                    if not run.pages or states[run.pages[0]] == State.LOADING:
                        below.append((encoder, which))
        return there, below

    def _reserve(self) -> Operation | None:
        if len(self._live) >= self._live_max:
            return None
        self._handles += 1
        below = self._cached()[1]  # computed all the same, since loading takes longer
        return ("output", "reserve", self._handles, *self._one_of(below, 0.3), self._form())

    def _form(self) -> int:
        return self._random.randrange(FORMS) if self._random.random() < self._other_form else 0

    def _store(self) -> Operation | None:
        ready = [o for o in self._live.values() if o.written and o.hold.output is None]
        operation = self._on("store", ready)
        return (*operation, self._random.choice(SECONDS)) if operation is not None else None
