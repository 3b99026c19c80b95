"""The simulator: one seed, one world, its operations; and many seeds in several processes.

Must not know what must hold: see `watch` and `ending`.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.sim.chooser import Chooser, setup_of
from tests.sim.ending import end
from tests.sim.replay import script, shortened
from tests.sim.world import Operation, Setup, World

OPERATIONS = 200
CHUNK_SEEDS = 50


@dataclass(frozen=True, slots=True)
class Failure:
    """What a seed ran into.   operations: all that it had done by then, the one that failed last."""

    seed: int
    setup: Setup
    operations: list[Operation]
    error: str

    def __str__(self) -> str:
        few = shortened(self.setup, self.operations)
        return (
            f"seed {self.seed} failed at operation {len(self.operations)}: {self.error}\n"
            f"This replays it, in {len(few)} operations:\n\n{script(self.setup, few)}"
        )


@dataclass
class Tally:
    """What a number of seeds did.   cpu_s: processor time of the runs, over all processes."""

    seeds: int = 0
    operations: int = 0
    cpu_s: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Those of another process too."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.cpu_s += other.cpu_s
        self.seen.update(other.seen)
        self.failures += other.failures


def run_seed(seed: int, operations: int = OPERATIONS, *, checked: bool = True) -> tuple[World, Failure | None]:
    """The world of a seed after its operations and its end, and what it ran into."""
    setup = setup_of(seed)
    world = World(setup, checked=checked)
    chooser = Chooser(world, seed)
    done: list[Operation] = []
    try:
        for _ in range(operations):
            done.append(chooser.next())
            world.do(done[-1])
        end(world)
    except Exception as error:
        return world, Failure(seed, setup, done, f"{type(error).__name__}: {error}")
    return world, None


def run_seeds(seeds: Iterable[int], operations: int = OPERATIONS, *, checked: bool = True) -> Tally:
    """Every seed, in this process."""
    tally = Tally()
    began = time.process_time()
    with quiet_deaths():
        for seed in seeds:
            world, failure = run_seed(seed, operations, checked=checked)
            tally.seeds += 1
            tally.operations += operations if failure is None else len(failure.operations)
            tally.seen.update(world.seen)
            if failure is not None:
                tally.failures.append(failure)
    tally.cpu_s = time.process_time() - began
    return tally


@contextlib.contextmanager
def quiet_deaths() -> Iterator[None]:
    """Backends die by design in here: no word of it in the log, and afterwards the log is as it was."""
    log = logging.getLogger("kvkeep.transfer.manager")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def run_many(first: int, count: int, processes: int, operations: int = OPERATIONS, *, checked: bool = True) -> Tally:
    """`count` seeds from `first` on, in `processes` processes; stops early when some fail."""
    tally = Tally()
    for part in _parts(first, count, processes, operations, checked):
        tally.add(part)
        if tally.failures:
            break
    return tally


def _parts(first: int, count: int, processes: int, operations: int, checked: bool) -> Iterator[Tally]:
    chunks = [range(at, min(at + CHUNK_SEEDS, first + count)) for at in range(first, first + count, CHUNK_SEEDS)]
    if processes == 1:
        for chunk in chunks:
            yield run_seeds(chunk, operations, checked=checked)
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(run_seeds, chunk, operations, checked=checked) for chunk in chunks]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
