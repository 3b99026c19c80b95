"""A run of the simulator as a list of operations: replayed exactly, shortened, printed as a script.

Must not choose operations.
"""

from collections.abc import Sequence
from pprint import pformat

from tests.sim.ending import end
from tests.sim.world import Operation, Setup, World

#: Runs that shortening a failure may take.
SHORTENING_RUNS_MAX = 400


def replay(setup: Setup, operations: Sequence[Operation]) -> World:
    """Does the operations in a new world, and ends it; raises what they raised when they were first done."""
    world = World(setup)
    for operation in operations:
        world.do(operation)
    end(world)
    return world


def failure_of(setup: Setup, operations: Sequence[Operation]) -> str | None:
    """What a replay raises, as a line; None when all is well."""
    try:
        replay(setup, operations)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shortened(setup: Setup, operations: Sequence[Operation]) -> list[Operation]:
    """Fewer operations that fail in the same way: ever smaller chunks are left out while what is left still does."""
    kind = _kind(failure_of(setup, operations))
    left, runs, chunk = list(operations), 0, max(1, len(operations) // 2)
    while runs < SHORTENING_RUNS_MAX:
        at, gone = 0, False
        while at < len(left) and runs < SHORTENING_RUNS_MAX:
            without = left[:at] + left[at + chunk :]
            runs += 1
            if _kind(failure_of(setup, without)) == kind:
                left, gone = without, True
            else:
                at += chunk
        if chunk == 1 and not gone:
            break
        chunk = max(1, chunk // 2)
    return left


def _kind(failure: str | None) -> str | None:
    return failure and failure.partition(":")[0]


def script(setup: Setup, operations: Sequence[Operation]) -> str:
    """Python that replays the operations; run it at the root of the repository."""
    listed = pformat([tuple(operation) for operation in operations], width=110)
    return f"from tests.sim.replay import replay\nfrom tests.sim.world import Setup\n\nreplay({setup},\n{listed})\n"
