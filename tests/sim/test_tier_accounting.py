"""What two tiers hit, with copies that take no time: exact LRU on the GPU, and nearly exact LRU over both together.

Must not know the index: all it sees is what admissions matched.

By the stack property of LRU, G pages above H exclusive ones hit on the GPU what a pool of G hits, and below what a pool
of G + H hits more.  Below, the cache comes short of that by as much as places are taken twice: by the copies made ahead
of need (`window` pages), and while a chain goes up into the place of pages that go down at the same time.
"""

import random
from pathlib import Path

import pytest

from kvkeep.replay.formats import read_trace
from kvkeep.replay.orders import Order
from tests.sim.instant import Hits, Instant, Turn, hits_of
from tests.sim.rig import Rig

PAGE_SIZE = 2
LONG = 40  # tokens
WINDOW = 100 // 16  # of a pool of 100


def sessions(seed: int, count: int, turns: int) -> list[Turn]:
    """Sessions that go on by a few tokens a turn, some far more often than others; long ones begin again."""
    rng, known = random.Random(seed), [[1000 * number] * 2 for number in range(count)]
    out = []
    for _ in range(turns):
        number = min(int(rng.expovariate(0.15)), count - 1)
        prompt = known[number] + [rng.randrange(5, 9) for _ in range(rng.randint(1, 6))]
        final = prompt + [rng.randrange(5, 9) for _ in range(rng.randint(1, 6))]
        out.append(Turn(prompt, final))
        known[number] = final if len(final) < LONG else [1000 * number + rng.randrange(2, 900)] * 2
    return out


def lru(pages: int, host_pages: int, turns: list[Turn], page_size: int) -> Hits:
    """What exact LRU over exclusive tiers hits: by pools of one tier."""
    above, both = (hits_of(size, None, turns, page_size).gpu for size in (pages, pages + host_pages))
    return Hits(above, both - above)


@pytest.mark.parametrize(("host_pages", "share"), [(50, 0.85), (100, 0.90), (200, 0.95), (400, 0.98)])
def test_both_tiers_hit_what_lru_hits(host_pages: int, share: float) -> None:
    """On the GPU exactly; below, at least what LRU hits with a window and a chain's length fewer places."""
    turns = sessions(1, 40, 1000)
    want, got = lru(100, host_pages, turns, PAGE_SIZE), hits_of(100, host_pages, turns, PAGE_SIZE)
    assert want.gpu == got.gpu
    longest = max(len(turn.final) for turn in turns) // PAGE_SIZE
    least = lru(100, max(0, host_pages - WINDOW - longest), turns, PAGE_SIZE)
    assert max(share * want.host, least.host) <= got.host <= want.host, f"{got} where LRU hits {want}"


def test_nothing_is_lost_that_has_a_place() -> None:
    """With room for every page in host memory, what the GPU cannot keep comes back, whatever is exchanged for it."""
    turns = sessions(2, 40, 1000)
    want, got = lru(100, 4000, turns, PAGE_SIZE), hits_of(100, 4000, turns, PAGE_SIZE)
    assert want == got


@pytest.mark.parametrize(("pages", "host_pages"), [pytest.param(2048, 8192, marks=pytest.mark.slow), (4096, 4096)])
def test_a_recorded_trace_hits_what_lru_hits(shared_dir: Path, pages: int, host_pages: int) -> None:
    """32 sessions in rotation over pages of 16 tokens, the pool too small for them: within a hundredth of exact LRU."""
    trace = read_trace(shared_dir / "traces" / "tau_retail_200")
    turns = [
        Turn(trace.chains[request.chain][: request.prompt_len], trace.chains[request.chain][: request.final_len])
        for request in Order("rotate", 32).arrivals(trace).requests
    ]
    want, got = lru(pages, host_pages, turns, 16), hits_of(pages, host_pages, turns, 16)
    assert want.gpu == got.gpu
    assert 0.99 * want.host <= got.host <= want.host, f"{got} where LRU hits {want}"


def test_a_hot_chain_is_never_promoted_again() -> None:
    """A chain of 40 pages came up once and is used each round, beside 20 pages used once: it stays where it is."""
    world = Instant(100, 400, PAGE_SIZE)
    hot, rng = [1] * 81, random.Random(3)
    world.serve(Turn(hot, hot))
    world.serve(Turn([2] * 200, [2] * 200))  # pushes it out
    for round_ in range(30):
        world.serve(Turn(hot, hot))
        once = [rng.randrange(10, 1 << 30) for _ in range(40)]
        world.serve(Turn(once, once))
        assert 40 == world.hits.host, f"round {round_}: the hot chain had to be promoted again"
    assert 30 * 40 == sum(world.hits)


def test_a_hotter_page_below_is_not_pushed_out_by_a_colder_one() -> None:
    """Host memory is full of pages used later than the one that leaves the GPU: that one is dropped."""
    rig = Rig(pages=6, tier_pages=2)
    rig.serve([5, 5, 9])  # the coldest, and it stays on the GPU: a request reads it all the time
    reader = rig.admitted([5, 5, 8])
    rig.serve([6, 6, 7, 7, 9])
    request = rig.admitted([9] * 8, reuse=False)  # the later ones go down
    rig.settle()
    assert 2 == rig.host_only
    rig.do("abort", request)
    rig.do("abort", reader)
    rig.do("abort", rig.admitted([8] * 12, reuse=False))
    rig.settle()
    assert [4, 0] == [rig.matched([6, 6, 7, 7, 9]), rig.matched([5, 5, 9])]


def test_a_hot_chain_stays_while_nothing_can_be_copied_ahead() -> None:
    """One copy hangs, so cold pages are not clean: still they leave, and not a hot chain whose copies are below."""
    rig = Rig(pages=48, tier_pages=400, deadline_steps=10**6)
    hot = [1, 2] * 10
    rig.serve([*hot, 9])
    rig.push_out()
    rig.serve([*hot, 9])
    rig.serve_alone([17, 17] * 10 + [9])
    rig.poll()
    rig.backend.stick(rig.jobs("clean")[0])
    for kind in (18, 19):
        rig.serve_alone([kind, kind] * 10 + [9])
    loaded = rig.cache.stats().matched_host_tokens
    for kind in range(20, 40):
        assert 20 == rig.serve([*hot, 9])
        rig.serve([kind, kind] * 10 + [9])
    assert (20, loaded) == (loaded, rig.cache.stats().matched_host_tokens)
