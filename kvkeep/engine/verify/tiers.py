"""Scenarios over two tiers: hits that come from host memory, suspended requests, and copies that fail.

Must not know how they are run or compared; see `scenarios` for what a scenario is.
"""

import random
from collections.abc import Iterator
from functools import partial

from kvkeep.engine.verify.counts import Counts
from kvkeep.engine.verify.scenarios import (
    NEW,
    TURNS,
    Ask,
    Below,
    Draw,
    Ids,
    Scenario,
    Sizes,
    Waves,
    random_waves,
    rotation_scenario,
)
from kvkeep.transfer.plan import Cause

JOINING = 3  # requests that wait for one load
SHARED, OWN = 2, 2  # pages of a request that is suspended: those that another holds too, and its own


def host_scenarios(sizes: Sizes, draw: Draw) -> Iterator[Scenario]:
    """Pools that hold little more than one request, above a host tier."""
    page, pages = sizes.page, sizes.pages
    ample = Below(host_pages=8 * pages)
    hits = Counts(host_hit_pages=pages * pages)
    yield Scenario("hits in host memory", pages + 1, partial(_hit_lengths, sizes, draw), hits, ample)
    mixed = Counts(host_hit_pages=pages, mixed_hits=pages - 2)
    yield Scenario("hits in both tiers", pages + 1, partial(_mixed, sizes, draw), mixed, ample)
    full = Counts(host_hit_pages=4 * pages)
    yield Scenario("pages change places", pages + 1, partial(_change_places, sizes, draw), full, ample)
    waves = partial(_change_places, sizes, draw, lossless=False)
    moving = Counts(host_hit_pages=pages, room_waits=2)
    yield Scenario("admitted while pages move down", pages + 1, waves, moving, Below(host_pages=_few(sizes)))
    loads = Counts(pages_evicted=3 * TURNS // 2, host_hit_pages=TURNS)
    name = "pool of one request above a host tier"
    yield rotation_scenario(name, 1, page, draw, sessions=3, together=1, at_least=loads, below=ample)
    name = "pool of two requests above a small host tier"
    few = Below(host_pages=2 * pages)
    yield rotation_scenario(name, 2, page, draw, sessions=4, together=4, at_least=loads, below=few)


def suspension_scenarios(sizes: Sizes, draw: Draw) -> Iterator[Scenario]:
    """One run of four requests, of which one is suspended and loses a page that it shared, five times over."""
    page = sizes.page
    pool_pages = SHARED + 1 + 2 + OWN
    waves = partial(_suspended, page, draw(SHARED * page), [draw(3), draw(page - 2), draw(page - 2), draw(OWN * page)])
    held = SHARED + OWN + 1
    suspended, holes = Counts(suspensions=1), Counts(suspensions=1, hole_tokens=page)
    yield Scenario("suspended", pool_pages, waves, holes, Below(suspend_pages=held))
    complete = Below(suspend_pages=held, suspend="complete")
    yield Scenario("suspended completely", pool_pages, waves, suspended, complete, never=("hole_tokens",))
    two_tiers = Below(host_pages=4 * pool_pages, suspend_pages=held)
    loaded = Counts(suspensions=1, host_hit_pages=1)
    yield Scenario("suspended, its prefix in host memory", pool_pages, waves, loaded, two_tiers, never=("hole_tokens",))
    lost = Counts(suspensions=1, failed_copies=1)
    on_the_way_down = Below(suspend_pages=held, fails=("suspend", always))
    yield Scenario("suspended, lost on the way down", pool_pages, waves, lost, on_the_way_down)
    on_the_way_up = Below(suspend_pages=held, fails=("resume", always))
    yield Scenario("suspended, lost on the way up", pool_pages, waves, lost, on_the_way_up)


def failing_scenarios(sizes: Sizes, draw: Draw) -> Iterator[Scenario]:
    """Every other copy of a kind fails."""
    pages = sizes.pages
    loads = Below(host_pages=8 * pages, fails=("promote", every_other))
    lost = Counts(host_hit_pages=1, failed_copies=2, lost_tokens=sizes.page)
    yield Scenario("loads fail", pages + 1, partial(_pushed_out, sizes, draw), lost, loads)
    revoked = Counts(failed_copies=2, revocations=2)
    yield Scenario("loads fail that others wait for", 2 * pages + 2, partial(_joined, sizes, draw), revoked, loads)
    stores = Below(host_pages=_few(sizes), fails=("demote", every_other))
    down = Counts(failed_copies=2)
    yield Scenario("copies down fail", pages + 1, partial(_change_places, sizes, draw, lossless=False), down, stores)


def random_tier_scenarios(sizes: Sizes, draw: Draw, rng: random.Random) -> Iterator[Scenario]:
    """Endless scenarios drawn at random, in small pools over host tiers of any size, with copies that fail or not."""
    number = 0
    while True:
        number += 1
        own = random.Random(rng.getrandbits(32))
        below = random_below(sizes, rng)
        pool_pages = rng.randint(sizes.pages + 1, sizes.pages + 4)
        yield Scenario(
            f"random over two tiers {number}", pool_pages, partial(random_waves, sizes, draw, own), Counts(), below
        )


def random_below(sizes: Sizes, rng: random.Random) -> Below:
    """A host tier of any size, where copies of a cause fail or do not."""
    cause: Cause = rng.choice(("promote", "demote", "clean", "suspend", "resume"))
    return Below(
        host_pages=rng.choice((0, 2, sizes.pages, 4 * sizes.pages)),
        suspend_pages=rng.choice((1, sizes.pages, 4 * sizes.pages)),
        suspend=rng.choice(("exclusive", "complete")),
        fails=rng.choice((None, (cause, every_other))),
    )


def _few(sizes: Sizes) -> int:
    """So few host pages that not all pages of a request are copied down ahead of need: the rest go when they must."""
    return 3 * sizes.pages + 2


def always(number: int) -> bool:
    return True


def every_other(number: int) -> bool:
    return number % 2 == 0


def _hit_lengths(sizes: Sizes, draw: Draw) -> Waves:
    """Between any two requests another one takes the whole pool, so all that the next one matches is below.

    Prompts that share 0 ... all pages of one; then prompts that end on, and one token after, a page boundary.
    """
    page, pages = sizes.page, sizes.pages
    base, other = draw(pages * page + 3), draw(pages * page + 3)
    yield [Ask(base, new=2, matched=0)]
    yield [Ask(other, new=2, matched=0)]
    asks = [_below(base[: hit * page] + draw(page // 2 + 1), hit * page) for hit in reversed(range(pages + 1))]
    for end in range(1, pages + 1):
        asks.append(_below(base[: end * page], (end - 1) * page))
        asks.append(_below(base[: end * page + 1], end * page))
    for ask in asks:
        yield [ask]
        yield [Ask(other, new=2, matched=pages * page)]


def _below(prompt: Ids, matched: int) -> Ask:
    return Ask(prompt, new=2, matched=matched, from_host=matched)


def _mixed(sizes: Sizes, draw: Draw) -> Waves:
    """Another request pushes out the last 1, 2, ... pages of one, which then finds the others where it left them."""
    page, pages = sizes.page, sizes.pages
    base, other = draw(pages * page), draw(pages * page)
    yield [Ask([*base, *draw(3)], new=2, matched=0)]
    for count in range(2, pages + 1):
        yield [Ask(other[: count * page - 3], new=2)]
        yield [Ask([*base, *draw(3)], new=2, matched=pages * page, from_host=(count - 1) * page)]


def _change_places(sizes: Sizes, draw: Draw, lossless: bool = True) -> Waves:
    """Four requests at a time, each as large as the pool: the next one begins while the last one's pages move down."""
    page, pages = sizes.page, sizes.pages
    asks = [Ask(draw(pages * page + 3), new=2, matched=0) for _ in range(4)]
    outputs = yield asks
    yield [
        Ask(ask.prompt + output + draw(5), new=NEW, matched=pages * page if lossless else None)
        for ask, output in zip(asks, outputs, strict=True)
    ]


def _suspended(page: int, shared: Ids, own: list[Ids]) -> Waves:
    """The last of four requests is suspended and stays so until one of the two pages it shared has been dropped.

    The pool just holds all four prompts.  The first shares two pages with the last and ends before the middle two,
    which take a page each soon after the start, for which the last is suspended, and another one after the first has
    ended: its tail, and a page that it shared.
    """
    yield [Ask([*shared, *own[0]], new=2, matched=0)]
    yield [
        Ask([*shared, own[0][0]], new=page - 4, matched=SHARED * page),
        Ask(own[1], new=page + 8),
        Ask(own[2], new=page + 8),
        Ask([*shared, *own[3][:-3]], new=8, matched=SHARED * page),
    ]


def _pushed_out(sizes: Sizes, draw: Draw) -> Waves:
    """Two prompts that push each other out, each time with other tokens behind them."""
    page, pages = sizes.page, sizes.pages
    prompts = [draw(pages * page) for _ in range(2)]
    for _ in range(4):
        for prompt in prompts:
            yield [Ask([*prompt, *draw(3)], new=2)]


def _joined(sizes: Sizes, draw: Draw) -> Waves:
    """Requests that share pages which two others have pushed out: the first one's load is waited for by all."""
    page, pages = sizes.page, sizes.pages
    base = draw((pages - 1) * page)
    others = [draw(pages * page + 3) for _ in range(2)]
    for _ in range(3):
        yield [Ask([*base, *draw(3)], new=2) for _ in range(JOINING)]
        yield [Ask(other, new=2) for other in others]
