"""Scenarios: which requests the bit gate sends through a cache, and what each of them is expected to find there.

Must not know how they are run or compared. A scenario is a generator of waves: it yields requests that are submitted
together, and is sent what they generated, so that a session can go on from its own output.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from kvkeep.engine.asking import pages_of
from kvkeep.engine.request import ImageInput
from kvkeep.engine.verify.counts import Counts
from kvkeep.transfer.plan import Cause

CONCURRENCY = 4
PAGES_MIN, PAGES_MAX = 3, 6
PAGE_MIN = 8
TURNS, NEW = 3, 3  # of a session in rotation, and what it generates in each
RANDOM_WAVES = 8

Ids = list[int]
Draw = Callable[[int], Ids]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    matched: what it must find in the cache, in tokens; None where that depends on what was dropped.   from_host: of
        those, the ones that must come from host memory.
    images: in the prompt.   encoded: how often the vision tower must run for it; None where that depends.
    temperature 0 is greedy; above it `seed` draws.
    """

    prompt: Ids
    new: int
    matched: int | None = None
    from_host: int | None = None
    salt: bytes = b""
    temperature: float = 0.0
    seed: int = 0
    images: tuple[ImageInput, ...] = ()
    encoded: int | None = None

    @property
    def tokens(self) -> int:
        """Positions of the prompt and all it may generate."""
        return len(self.prompt) + self.new


Waves = Generator[list[Ask], list[Ids], None]


@dataclass(frozen=True, slots=True)
class Below:
    """The host memory of a scenario, and its faults.

    fails: the cause of copies that are made to fail, and which of them by their number, from 0.
    """

    host_pages: int = 0
    suspend_pages: int = 0
    suspend: Literal["exclusive", "complete"] = "exclusive"
    fails: tuple[Cause, Callable[[int], bool]] | None = None


NOTHING_BELOW = Below()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Waves of requests over one pool.

    at_least: a run in which less happened did not test what this scenario is for; that counts as a failure.
    never: names of counts that have to stay at 0.
    """

    name: str
    pool_pages: int
    waves: Callable[[], Waves]
    at_least: Counts = field(default_factory=Counts)
    below: Below = NOTHING_BELOW
    never: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """page: positions in a page; pages: pages of the longest prompt."""

    page: int
    pages: int

    @staticmethod
    def fitting(page: int, positions: int) -> "Sizes | None":
        """The largest sizes for a model of `positions` positions; None where the scenarios do not fit."""
        pages = min(PAGES_MAX, positions // page - 1)
        return Sizes(page, pages) if page >= PAGE_MIN and pages >= PAGES_MIN else None


def fixed_scenarios(sizes: Sizes, draw: Draw) -> Iterator[Scenario]:
    """The scenarios that every run of the gate begins with."""
    page, ample = sizes.page, 16 * sizes.pages
    yield Scenario("every hit length", ample, partial(_hit_lengths, sizes, draw))
    yield Scenario("generated pages", ample, partial(_generated_pages, page, draw))
    yield Scenario("four at a time", ample, partial(_four_at_a_time, page, draw))
    yield rotation_scenario("pool of one request", 1, page, draw, sessions=3, together=1)
    yield rotation_scenario("pool of two requests", 2, page, draw, sessions=4, together=4)
    yield Scenario("preempted", 9, partial(_preempted, page, draw), Counts(pages_evicted=1, preemptions=1))


def random_scenarios(sizes: Sizes, draw: Draw, rng: random.Random) -> Iterator[Scenario]:
    """Endless scenarios drawn at random: sessions that grow and branch, in pools of one to two of the longest."""
    number = 0
    while True:
        number += 1
        pool_pages = rng.randint(sizes.pages + 1, sizes.pages + 4)
        own = random.Random(rng.getrandbits(32))
        yield Scenario(f"random {number}", pool_pages, partial(random_waves, sizes, draw, own))


def _hit_lengths(sizes: Sizes, draw: Draw) -> Waves:
    """Prompts that share 0 ... all pages of one; then prompts that end on, and one token after, a page boundary."""
    page, pages = sizes.page, sizes.pages
    base = draw(pages * page + 3)
    yield [Ask(base, new=2, matched=0)]
    for hit in reversed(range(pages + 1)):
        yield [Ask(base[: hit * page] + draw(page // 2 + 1), new=2, matched=hit * page)]
    for end in range(1, pages + 1):
        # One token stays to be computed, so a prompt that ends on a boundary computes its last page again.
        yield [Ask(base[: end * page], new=2, matched=(end - 1) * page)]
        yield [Ask(base[: end * page + 1], new=2, matched=end * page)]


def _generated_pages(page: int, draw: Draw) -> Waves:
    """A page half prompt and half generated, and one that is all generated, come back in the next prompt."""
    prompt = draw(page // 2)
    outputs = yield [Ask(prompt, new=page + page // 2 + 4, matched=0)]
    told = prompt + outputs[0]
    outputs = yield [Ask(told + draw(5), new=3, matched=2 * page)]
    # Ends exactly on a boundary: its last token has no KV, so its last page is not stored.
    prompt = draw(2 * page - 3)
    outputs = yield [Ask(prompt, new=3, matched=0)]
    outputs = yield [Ask(prompt + outputs[0] + draw(4), new=3, matched=page)]
    # The same prompt once more, drawn instead of greedy.
    yield [Ask(prompt, new=6, matched=page, temperature=0.8, seed=7)]


def _four_at_a_time(page: int, draw: Draw) -> Waves:
    """Shared beginnings, twins and another salt in one batch; then all four sessions go on."""
    shared = draw(2 * page)
    yield [Ask(shared + draw(2), new=2, matched=0)]
    twin = shared[:page] + draw(page // 2)
    asks = [
        Ask(shared + draw(page // 3 + 1), new=8, matched=2 * page),
        Ask(twin, new=8, matched=page),
        Ask(twin, new=8, matched=page, temperature=1.0, seed=3),
        Ask(shared + draw(3), new=8, matched=0, salt=b"other"),
    ]
    outputs = yield asks
    yield [
        Ask(ask.prompt + output + draw(page), new=5, salt=ask.salt) for ask, output in zip(asks, outputs, strict=True)
    ]


def rotation_scenario(
    name: str,
    requests: int,
    page: int,
    draw: Draw,
    *,
    sessions: int,
    together: int,
    at_least: Counts | None = None,
    below: Below = NOTHING_BELOW,
) -> Scenario:
    """`_rotation` in a pool that just holds `requests` of its longest requests, which share a page."""
    pages_each = pages_of(3 * page + page // 4 + TURNS * (NEW + page // 8), page)
    waves = partial(_rotation, page, draw, sessions, together)
    at_least = at_least or Counts(pages_evicted=sessions * TURNS // 2)
    return Scenario(name, requests * (pages_each - 1) + 1, waves, at_least, below)


def _rotation(page: int, draw: Draw, sessions: int, together: int) -> Waves:
    """Sessions of a common first page take turns, `together` at a time, each dropping what the others left."""
    common = draw(page)
    told = [common + draw(2 * page + page // 4) for _ in range(sessions)]
    for _turn in range(TURNS):
        for first in range(0, sessions, together):
            asks = [Ask(ids, new=NEW) for ids in told[first : first + together]]
            outputs = yield asks
            for offset, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
                told[first + offset] = ask.prompt + output + draw(page // 8)


def _preempted(page: int, draw: Draw) -> Waves:
    """Four requests of two pages fill a pool of nine; each decodes into a third page, so some are preempted."""
    asks = [Ask(draw(2 * page - 2), new=6) for _ in range(4)]
    outputs = yield asks
    yield [Ask(ask.prompt + output, new=2) for ask, output in zip(asks, outputs, strict=True)]


def random_waves(sizes: Sizes, draw: Draw, rng: random.Random) -> Waves:
    """Sessions that grow and branch, up to `CONCURRENCY` requests at a time."""
    longest = sizes.pages * sizes.page
    told: list[Ids] = [draw(rng.randint(1, longest))]
    for _wave in range(RANDOM_WAVES):
        asks = [_random_ask(sizes, draw, rng, rng.choice(told)) for _ in range(rng.randint(1, CONCURRENCY))]
        outputs = yield asks
        told += [ask.prompt + output for ask, output in zip(asks, outputs, strict=True)]


def _random_ask(sizes: Sizes, draw: Draw, rng: random.Random, told: Sequence[int]) -> Ask:
    """Goes on from a session, from a place inside it, or from one of its page boundaries."""
    longest = sizes.pages * sizes.page
    keep = rng.choice((len(told), rng.randint(0, len(told)), rng.randint(0, len(told) // sizes.page) * sizes.page))
    prompt = list(told[: min(keep, longest - 1)])
    prompt += draw(rng.choice((1, 2, rng.randint(1, sizes.page))))
    return Ask(
        prompt[:longest],
        new=rng.randint(1, 6),
        salt=rng.choice((b"", b"", b"", b"other")),
        temperature=rng.choice((0.0, 0.0, 0.7)),
        seed=rng.getrandbits(16),
    )
