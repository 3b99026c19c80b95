"""Seeded runs of the whole cache: thousands of worlds, each operation followed by a look at everything.

Must not know the cache.  200 seeds of 200 operations run in `make test`, 12,000 in `make test-full`, a million
by `make soak`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.chooser import Chooser, setup_of
from tests.sim.replay import failure_of, replay, script, shortened
from tests.sim.simulator import OPERATIONS, run_seed, run_seeds
from tests.sim.world import Operation, Setup, World

CHUNK = 100

#: What these seeds must have come across; where one is missing the simulator has become blind on that side.
REACHED = (
    "matched host pages", "matched GPU pages", "joined", "revoked", "holes", "resumed", "closed", "died",
    "stuck", "aborted while copying", "admit refused", "extend refused", "truncate refused", "suspend refused",
    "resume refused", "resume too early", "outputs found", "outputs held twice", "outputs stored",
    "outputs stored by another", "outputs refused",
)  # fmt: skip
#: The same of many seeds.
REACHED_BY_MANY = (
    "shortened", "outputs loaded", "outputs joined", "outputs too old to store", "outputs released while copying",
    "outputs forgotten", "outputs stored over a host copy", "outputs revoked",
)  # fmt: skip


def must_hold(first: int, count: int) -> None:
    """Prints and fails with the script of the first seed that failed."""
    tally = run_seeds(range(first, first + count))
    for failure in tally.failures[:1]:
        pytest.fail(str(failure), pytrace=False)
    for what in REACHED + (REACHED_BY_MANY if count > CHUNK else ()):
        assert tally.seen[what], f"seeds {first} to {first + count}: never {what}"


@pytest.mark.parametrize(
    "first",
    [*range(0, 200, CHUNK), *(pytest.param(first, marks=pytest.mark.slow) for first in range(200, 2_000, CHUNK))],
)
def test_every_seed_holds(first: int) -> None:
    """After each operation of each seed the cache is whole, every byte is right, and at the end nothing is left."""
    must_hold(first, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2_000, 12_000, 5 * CHUNK))
def test_every_seed_of_ten_thousand_holds(first: int) -> None:
    """The same for more seeds; in chunks so large that even what is rare is met in each."""
    must_hold(first, 5 * CHUNK)


def test_a_seed_gives_the_same_run_each_time() -> None:
    """Nothing but the seed decides: two runs do the same and leave the same."""
    for seed in range(20):
        first, second = (operations_of(seed) for _ in range(2))
        assert first == second


def operations_of(seed: int) -> tuple[list[Operation], Any]:
    """What a seed chooses, and what its world looks like afterwards."""
    world = World(setup_of(seed), checked=seed % 2 == 0)
    chooser, done = Chooser(world, seed), []
    for _ in range(OPERATIONS):
        done.append(chooser.next())
        world.do(done[-1])
    return done, (world.seen, world.cache.stats().pages_evicted, world.device.rows.tobytes())


@pytest.fixture
def broken_truncate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rollback fails once three requests have ended."""
    truncate = World.truncate

    def fails(self: World, handle: int, length: int) -> None:
        truncate(self, handle, length)
        if len(self.ended) >= 3:
            raise ValueError("three requests have ended")

    monkeypatch.setattr(World, "truncate", fails)
    yield


@pytest.mark.usefixtures("broken_truncate")
def test_a_failing_seed_prints_a_script_that_replays_it() -> None:
    """The script holds few operations, and running it fails in the same way."""
    failure = next(failure for seed in range(50) if (failure := run_seed(seed)[1]) is not None)
    assert "three requests have ended" in failure.error
    assert f"seed {failure.seed} failed at operation {len(failure.operations)}" in str(failure)
    few = shortened(failure.setup, failure.operations)
    assert len(few) <= 8 < len(failure.operations)
    with pytest.raises(ValueError, match="three requests have ended"):
        exec(script(failure.setup, few), {})
    assert failure_of(failure.setup, few) == failure.error


def test_operations_that_make_no_sense_do_nothing() -> None:
    """So a list of operations can be shortened anywhere."""
    nonsense: list[Operation] = [
        ("compute", 9, 1, 0), ("extend", 9, [1], 1), ("truncate", 9, 1), ("finish", 9), ("abort", 9),
        ("suspend", 9, True), ("resume", 9), ("discard", 9), ("step", 3), ("stick", 3), ("free", 3), ("fail", 3),
        ("written",), ("poll",),
    ]  # fmt: skip
    for setup in (Setup(), Setup(tier_pages=4)):
        world = replay(setup, nonsense)
        assert 0 == world.cache.stats().admissions
