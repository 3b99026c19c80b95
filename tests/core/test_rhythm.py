"""What the rhythm order learns, and what it lets go of: small cases with a clock that the test holds.

Must not know traces: tests/traces/test_rhythm.py replays them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest

import kvkeep
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput
from kvkeep.index.forecast import BINS, LOW, PAUSE, PER_OCTAVE, REFRESH_USES, Forecast, bin_of, cost_row, edges
from kvkeep.index.hints import Hint
from kvkeep.index.names import make_identity
from kvkeep.index.records import Record, Records
from kvkeep.index.rhythm import ALL_MAX, RhythmOrder
from kvkeep.index.run import Run
from kvkeep.index.uses import NO_STAMP, REMEMBERED_MIN, Began, PathUse, Uses
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool

PAGE = 2


class Clocked:
    """A cache with the rhythm order, and a clock."""

    def __init__(self, pages: int, seed: int = 0) -> None:
        self.seconds = 0.0
        self.uses = Uses(pages, lambda: self.seconds)
        self.order = RhythmOrder(self.uses, seed=seed)
        config = CacheConfig(page_size=PAGE, eviction="rhythm")
        self.cache = TieredCache(config, GpuPool.bookkeeping(pages), b"fp", order=self.order)

    def serve(self, chain: list[int], at: float, hint: Hint | None = None) -> Lease:
        """A request for all of `chain` but its last page, which it generates, at `at` seconds."""
        self.seconds = at
        lease = self.cache.admit(chain[:-PAGE])
        self.cache.extend(lease, chain[-PAGE:])
        self.cache.finish(lease, len(chain), hint)
        self.cache.check_invariants()
        return lease

    def cached(self, chain: list[int]) -> int:
        """How many leading pages of `chain` are cached."""
        raw = np.array(chain, dtype=np.int32).data.cast("B")
        return len(self.cache._tree.match(make_identity(b"fp"), raw, len(chain) // PAGE).pages)


def known_of(world: Clocked, lease: Lease) -> Record:
    """What is known of the use that a lease ended with."""
    assert lease.use is not None
    return world.uses.records[lease.use.row]


def chain(number: int, pages: int) -> list[int]:
    return [number] * (PAGE * pages)


# ---------------------------------------------------------------------- the forecast


def brute_cost(hazard: list[float], b: int) -> float:
    """The least of waiting over chance of a use, by trying every horizon."""
    ends = edges(LOW, PER_OCTAVE, BINS)
    alive, used, waiting, best = 1.0, 0.0, 0.0, math.inf
    for i in range(b, BINS):
        width, chance = ends[i + 1] - ends[i], min(hazard[i], 0.999)
        waiting += alive * (chance * width / 2 + (1 - chance) * width)
        used += alive * chance
        alive *= 1 - chance
        best = min(best, waiting / used)
    return best


@pytest.mark.parametrize("shape", ["certain", "falling", "two peaks", "flat"])
def test_a_cost_is_the_least_over_all_horizons(shape: str) -> None:
    """The table's stretches give what trying every horizon gives."""
    hazard = [
        {
            "certain": 0.9 if b == 20 else 0.001,
            "falling": 0.5 * 0.9**b + 1e-4,
            "two peaks": 0.5 if b in (8, 30) else 0.01,
            "flat": 0.1,
        }[shape]
        for b in range(BINS)
    ]
    ends = edges(LOW, PER_OCTAVE, BINS)
    row = cost_row(hazard, [b - a for a, b in pairwise(ends)])
    assert [brute_cost(hazard, b) for b in range(BINS)] == pytest.approx(row[:BINS])


def test_a_forecast_learns_what_a_gap_depends_on() -> None:
    """Gaps that grow with the completion's length are predicted from it; at first the last gap is."""
    forecast = Forecast()
    assert 50.0 == pytest.approx(forecast.predict(math.log(50.0), math.log(20.0), forecast.log_out(300)))
    for i in range(2000):
        out = 100 + 37 * i % 4000
        forecast.learn(3.0, 3.0, forecast.log_out(out), math.log(0.01 * (out + 256)))
        forecast.tick()
    assert 0.01 * 2256 == pytest.approx(forecast.predict(3.0, 3.0, forecast.log_out(2000)), rel=0.05)


def record(group: int, scale: float = 1.0, ended_s: float = 0.0) -> Record:
    """A use of some chain of that class."""
    return Record(0, ended_s, scale, 0.0, 0.0, 0.0, 0, 1, 0, group, 0, -1)


def wait(forecast: Forecast, chains: list[Record], now_s: float) -> None:
    """Tells the forecast that they have waited until now."""
    records = Records()
    for chain in chains:
        records.add(*chain)
    forecast.waited(records.columns, np.flatnonzero(records.columns["scale"]), now_s)


def test_chains_that_never_come_back_cost_more_the_longer_they_wait() -> None:
    """Where nearly all uses come early, what has waited longer is worth less; where gaps are certain, more."""
    dying, living, certain = Forecast(), Forecast(), Forecast()
    for i in range(2000):
        if i % 2:
            dying.used(record(1), 0.1)
            living.used(record(1), 0.1)
        else:
            wait(dying, [record(1)], 7.9)
        certain.used(record(1), 1.0)
        for forecast in (dying, living, certain):
            forecast.tick()
    early, late = bin_of(0.2), bin_of(0.8)
    assert dying.table[1][0] < dying.table[1][late]
    assert dying.table[1][0] > 1.5 * living.table[1][0]
    assert certain.table[1][early] > certain.table[1][late]


def test_waits_are_counted_once_however_often_they_are_told_of() -> None:
    """One chain that is looked at ten times has waited as one that is looked at once; in a pause, too."""
    often, once = Forecast(), Forecast()
    records = Records()
    records.add(*record(0, scale=2.0))
    for now_s in range(10, 101, 10):
        often.waited(records.columns, np.array([np.argmax(records.columns["scale"])]), float(now_s))
    wait(once, [record(0, scale=2.0)], 100.0)
    for forecast in (often, once):
        while not forecast.tick():
            pass
    assert often.table == once.table
    assert often.pause == once.pause
    assert once.pause != Forecast().pause


def test_in_a_pause_the_age_alone_counts() -> None:
    """Behind eight times their scales chains cost the same at the same age, and more the older they are."""
    world = Clocked(64)
    for turn in range(40):  # some come back after a pause, most at their pace
        world.serve(chain(1, 4), 1000.0 * turn)
        world.serve(chain(2, 4), 1000.0 * turn + 1.0)
        world.serve(chain(2, 4), 1000.0 * turn + 3.0)
    a, b = world.serve(chain(3, 4), 50_000.0).use, world.serve(chain(4, 4), 50_000.0).use
    assert a is not None and b is not None
    a.scale, b.scale = 2.0, 16.0
    after = [50_000.0 + PAUSE * 16.0 * 1.5**i for i in range(1, 30)]
    costs = [world.uses.cost(a.stamp, None, now_s) for now_s in after]
    assert costs == [world.uses.cost(b.stamp, None, now_s) for now_s in after]
    assert all(x < y for x, y in pairwise(costs))


# ---------------------------------------------------------------------- the order


def rotate(world: Clocked, sessions: int, rounds: int, pages: int) -> int:
    """Sessions in rotation, each with its own chain of `pages`; how many pages the last round matched."""
    matched = 0
    for turn in range(rounds):
        for number in range(sessions):
            lease = world.serve(chain(number + 1, pages), 10.0 * (turn * sessions + number))
            matched += lease.matched_len // PAGE if turn == rounds - 1 else 0
    return matched


def test_a_rotation_that_does_not_fit_keeps_what_fits() -> None:
    """LRU hits nothing when sessions in rotation are more than fit; this order hits as good as all that can stay."""
    lru = TieredCache(CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(40), b"fp")
    hits = 0
    for _ in range(10):
        for number in range(8):
            lease = lru.admit(chain(number + 1, 10))
            hits += lease.matched_len
            lru.finish(lease, 10 * PAGE)
    assert 0 == hits
    assert 40 * 0.6 <= rotate(Clocked(40), 8, 10, 10)


def test_a_chain_that_was_let_go_of_is_known_when_it_comes_back() -> None:
    """Its rhythm is not lost with its pages: the use that ends now goes on from the one before."""
    world = Clocked(12)
    world.serve(chain(1, 4), 0.0)
    for number in (2, 3, 4):
        world.serve(chain(number, 4), 100.0 + number)
    assert 0 == world.cached(chain(1, 4))
    known = known_of(world, world.serve(chain(1, 5), 300.0))
    assert 1 == known.turns
    assert math.log(300.0) == pytest.approx(known.last)


def test_a_fork_makes_what_is_shared_nobodys_own() -> None:
    """Two chains that part soon are two: neither takes the other's last use for its own."""
    world = Clocked(64)
    head = chain(9, 2)
    first = world.serve(head + chain(1, 8), 0.0)
    second = known_of(world, world.serve(head + chain(2, 8), 50.0))
    assert 2 == known_of(world, first).start
    again = known_of(world, world.serve(head + chain(1, 9), 60.0))
    assert (2, 0) == (second.start, second.turns)
    assert (2, 1) == (again.start, again.turns)
    assert 60.0 == pytest.approx(math.exp(again.last))


def test_what_an_aborted_request_stored_can_leave() -> None:
    """Its pages are its own use's, and go like any other; the chain's last use before it still counts."""
    world = Clocked(8)
    world.serve(chain(1, 3), 0.0)
    lease = world.cache.admit(chain(1, 6))
    world.cache.seal(lease, 5 * PAGE)
    world.seconds = 20.0
    world.cache.abort(lease)
    assert 1 == known_of(world, lease).turns
    world.cache.check_invariants()
    world.serve(chain(2, 8), 30.0)
    assert 8 == world.cached(chain(2, 8))


def test_an_aborted_request_that_stored_nothing_changes_nothing() -> None:
    """A use is a request's that has stamped its path."""
    world = Clocked(8)
    use = world.serve(chain(1, 3), 0.0).use
    lease = world.cache.admit(chain(1, 6))
    world.cache.abort(lease)
    assert lease.use is None
    assert [use] == list(world.uses.of_stamp.values())


def test_memory_of_what_has_left_is_bounded() -> None:
    """Thousands of chains that never come back leave no more than their share behind."""
    world = Clocked(64)
    for number in range(3000):
        world.serve(chain(number + 1, 3), float(number))
    assert len(world.uses.of_stamp) <= 2 * 64
    assert len(world.uses._of_name) <= 2 * 64 + REMEMBERED_MIN
    assert np.count_nonzero(world.uses.records.columns["scale"]) <= 2 * 64 + REMEMBERED_MIN + 2 * REFRESH_USES
    assert len(world.order._runs) <= 64


@pytest.mark.parametrize("runs", [ALL_MAX // 2, 4 * ALL_MAX])
def test_the_seed_decides(runs: int) -> None:
    """Two caches with one seed let go of the same pages."""
    left = []
    for _ in range(2):
        world = Clocked(3 * runs, seed=5)
        for turn in range(4):
            for number in range(2 * runs):
                world.serve(chain(1 + (number * 7 + turn * turn) % (2 * runs), 3), float(turn * 2 * runs + number))
        left.append([world.cached(chain(1 + number, 3)) for number in range(2 * runs)])
    assert left[0] == left[1]


def test_a_reset_forgets_uses() -> None:
    """After it nothing is known by its pages; what was learned of gaps stays."""
    world = Clocked(12)
    for turn in range(3):
        world.serve(chain(1, 3 + turn), 10.0 * turn)
    world.cache.reset()
    assert not world.uses.of_stamp
    lease = world.serve(chain(1, 6), 100.0)
    assert 0 == known_of(world, lease).turns


# ---------------------------------------------------------------------- hints


def full(hint: Hint | None, late: bool = False) -> Clocked:
    """A pool of three chains of four pages, the second with a hint, when it ends or after."""
    world = Clocked(12)
    leases = [world.serve(chain(n, 4), float(n), hint if n == 2 and not late else None) for n in (1, 2, 3)]
    if late and hint is not None:
        world.cache.hint(leases[1], hint)
    return world


@pytest.mark.parametrize("late", [False, True])
def test_what_is_discarded_leaves_first(late: bool) -> None:
    """All of it, before any page of another chain."""
    world = full(kvkeep.Discard(), late)
    world.serve(chain(4, 4), 4.0)
    assert [4, 0, 4, 4] == [world.cached(chain(n, 4)) for n in (1, 2, 3, 4)]


def test_what_a_discarded_chain_shares_does_not_leave_with_it() -> None:
    """Only its own pages leave first: the common prefix, which it used last, costs what it costs."""
    world = Clocked(16)
    head = chain(9, 4)
    world.serve(head + chain(1, 6), 1.0)
    world.serve(head + chain(2, 4), 2.0, kvkeep.Discard())
    runs = sorted(world.cache._tree.runs(), key=lambda run: (run.start, run.stamps[-1]))
    assert [0, 4, 4] == [run.start for run in runs]
    costs = [world.uses.cost(run.stamps[0], run, 3.0) for run in runs]
    assert (True, True, False) == tuple(math.isfinite(cost) for cost in costs)


def test_a_choice_ends_where_another_use_begins() -> None:
    """Of one run, the pages that a later request did not use leave; then all is compared again."""
    world = Clocked(12)
    world.serve(chain(1, 8), 0.0, kvkeep.Discard())
    world.serve(chain(1, 4), 1.0, kvkeep.Pin(100.0))
    world.serve(chain(2, 4), 2.0)
    world.serve(chain(3, 8), 3.0)
    assert [4, 0, 8] == [world.cached(chain(1, 8)), world.cached(chain(2, 4)), world.cached(chain(3, 8))]


@pytest.mark.parametrize("late", [False, True])
def test_what_is_pinned_leaves_last_but_leaves(late: bool) -> None:
    """Everything else goes before it; a live request gets its pages all the same, and in time the pin ends."""
    world = full(kvkeep.Pin(100.0), late)
    world.serve(chain(4, 8), 4.0)
    assert 4 == world.cached(chain(2, 4))
    world.serve(chain(5, 12), 5.0)
    assert 0 == world.cached(chain(2, 4))
    world = full(kvkeep.Pin(1.0), late)
    for n in range(4, 40):
        world.serve(chain(n, 4), 10.0 * n)
    assert 0 == world.cached(chain(2, 4))


@pytest.mark.parametrize("hint", [kvkeep.Discard(), kvkeep.Expect(5.0), kvkeep.Pin(5.0)])
def test_a_hint_for_what_has_left_changes_nothing(hint: Hint) -> None:
    """Neither what is remembered of the chain, nor whatever was learned of another one since."""
    world = Clocked(4)
    lease = world.serve(chain(1, 4), 0.0)
    for n in range(2, 400):
        world.serve(chain(n, 4), 10.0 * n)
    assert lease.use is not None
    before = [column.tolist() for column in world.uses.records.columns.values()]
    world.cache.hint(lease, hint)
    assert before == [column.tolist() for column in world.uses.records.columns.values()]


def test_of_two_uses_alike_what_saves_less_leaves_first() -> None:
    """Pages whose bytes are computed again sooner cost more to keep for what they save."""
    uses = Uses(8, lambda: 0.0)
    run = Run(None, 0, 1, 1)
    used = [
        uses.used(PathUse(stamp, run, 1, 0, 0, (stamp,), Began(0.0, NO_STAMP, 1), 1, worth))
        for stamp, worth in ((1, 1.0), (2, 0.5), (3, 4.0))
    ]
    for now_s in (0.0, 1.0, 100.0, 1e4):
        kv, cheap, dear = (uses.cost(use.stamp, None, now_s) for use in used)
        assert 2.0 * kv == pytest.approx(cheap)
        assert kv / 4.0 == pytest.approx(dear)


def test_what_is_expected_soon_stays() -> None:
    """Of three chains alike, the ones expected later leave before the one expected soon."""
    world = Clocked(12)
    for n, after_s in ((1, 1000.0), (2, 10.0), (3, 1000.0)):
        world.serve(chain(n, 4), float(n), kvkeep.Expect(after_s))
    world.serve(chain(4, 8), 4.0)
    assert 4 == world.cached(chain(2, 4))


def test_lru_takes_hints_and_does_as_before() -> None:
    """An order that does not learn is given hints like any other."""
    cache = TieredCache(CacheConfig(page_size=PAGE, eviction="lru"), GpuPool.bookkeeping(8), b"fp")
    lease = cache.admit([1, 1, 1])
    cache.finish(lease, 2, kvkeep.Discard())
    cache.hint(lease, kvkeep.Pin(5.0))
    cache.check_invariants()


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan, True, "5"])
def test_a_hint_of_no_time_is_refused(seconds: float) -> None:
    """One line that names the value."""
    with pytest.raises(BadInput, match="seconds"):
        kvkeep.Pin(seconds)
    with pytest.raises(BadInput, match="seconds"):
        kvkeep.Expect(seconds)
