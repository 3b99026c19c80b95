"""Scenarios with images: what of a prompt with photographs in it the cache must find, and what it must not.

Must not know how they are run or compared; see `scenarios` for what a scenario is.  What must be found is computed here
by a naive model of prompts, in which the position of an image is its pixels and their place, never a digest.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from kvkeep.engine.request import ImageInput
from kvkeep.engine.verify.counts import Counts
from kvkeep.engine.verify.scenarios import CONCURRENCY, Ask, Below, Draw, Ids, Scenario, Sizes, Waves
from kvkeep.engine.verify.tiers import always, every_other, random_below
from kvkeep.engine.vision.tower import Vision

PAGE_MIN = 48  # two images and some text
TURNS, RANDOM_WAVES = 4, 6

#: Text, or an image, wherever it stands.
Part = Ids | ImageInput


@dataclass(frozen=True, slots=True)
class Album:
    """What prompts are made of.

    photos: photographs of one preprocessing.   again: the same ones of another.
    """

    vision: Vision
    photos: tuple[ImageInput, ...]
    again: tuple[ImageInput, ...]

    def ask(self, parts: Sequence[Part], new: int = 2) -> Ask:
        """The request for a prompt of these parts."""
        ids: Ids = []
        images = []
        for part in parts:
            if isinstance(part, ImageInput):
                images.append(replace(part, offset=len(ids)))
                ids += [self.vision.placeholder] * self.vision.tokens
            else:
                ids += part
        return Ask(ids, new, images=tuple(images))


@dataclass(slots=True)
class Naive:
    """What a cache with room for everything must find, one request after the other."""

    page: int
    vision: Vision
    told: list[list[object]] = field(default_factory=list)
    encoded: set[bytes] = field(default_factory=set)

    def expect(self, ask: Ask) -> Ask:
        """The request with what it must find."""
        content = self._content(ask, ask.prompt)
        pages = max((self._common(content, other) for other in self.told), default=0) // self.page
        pages = min(pages, (len(ask.prompt) - 1) // self.page)
        if not self.vision.causal:
            for image in reversed(ask.images):
                if image.offset < pages * self.page < image.offset + self.vision.tokens:
                    pages = image.offset // self.page
        new = {image.pixels.numpy().tobytes() for image in ask.images} - self.encoded
        self.encoded |= new
        return replace(ask, matched=pages * self.page, encoded=len(new))

    def answered(self, ask: Ask, output: Ids) -> None:
        """The request has ended: all but its last token is kept, as far as it fills pages."""
        kept = self._content(ask, [*ask.prompt, *output[:-1]])
        self.told.append(kept[: len(kept) // self.page * self.page])

    def _content(self, ask: Ask, ids: Ids) -> list[object]:
        content: list[object] = list(ids)
        for image in ask.images:
            pixels = image.pixels.numpy().tobytes()
            content[image.offset : image.offset + self.vision.tokens] = [
                (pixels, place) for place in range(self.vision.tokens)
            ]
        return content

    @staticmethod
    def _common(left: list[object], right: list[object]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def one_by_one(page: int, album: Album, prompts: Sequence[Sequence[Part]]) -> Waves:
    """Prompts in turn, each of which must find what the naive model says."""
    naive = Naive(page, album.vision)
    for parts in prompts:
        ask = naive.expect(album.ask(parts))
        outputs = yield [ask]
        naive.answered(ask, outputs[0])


def image_scenarios(sizes: Sizes, album: Album, draw: Draw) -> Iterator[Scenario]:
    """Pools with room for everything: what must be found, and what must not, is known."""
    for name, prompts in _prompts(sizes, album, draw).items():
        yield Scenario(name, 16 * sizes.pages, partial(one_by_one, sizes.page, album, prompts))
    sessions = partial(_sessions, sizes, album, draw)
    yield Scenario("sessions that look at more and more", 16 * sizes.pages, sessions)
    yield Scenario("the same image four at a time", 16 * sizes.pages, partial(_together, sizes, album, draw))


def _prompts(sizes: Sizes, album: Album, draw: Draw) -> dict[str, list[list[Part]]]:
    page, tokens = sizes.page, album.vision.tokens
    a, b, c = album.photos[:3]
    text, more, tail = draw(2 * page + 3), draw(page + 5), draw(page + 1)
    over_boundary = text[: page - tokens // 2]
    two: list[Part] = [text[: page + 2], a, more[:1], b, more]
    return {
        "same image": [[text, a, more], [text, a, more], [text, a, more, tail], [text, a, tail], [text, a], [text]],
        "image over a page boundary": [
            [over_boundary, a, more],
            [over_boundary, a, tail],
            [over_boundary, b, more],
            [over_boundary, a, more, tail],
        ],
        "another image": [
            [text_before, image, more]
            for start in (page + 3, 2 * page - 5, page, 2 * page - tokens)
            for text_before in [draw(start)]
            for image in (a, b, c, a)
        ],
        "image twice": [
            [text, a, more, a, tail],
            [text, a, more, b, tail],
            [text, b, more, a, tail],
            [text, a, more, a, tail],
            [text, a, more[:1], a, more],
            [text, a, more[:1], b, more],
        ],
        "image moved by one token": [
            [text, a, more],
            [text[:-1], a, more],
            [[*text, 5], a, more],
            [over_boundary, a, more],
            [over_boundary[:-1], a, more],
            [[*over_boundary, 5], a, more],
        ],
        "other preprocessing": [
            [text, a, more],
            [text, album.again[0], more],
            [text, a, more, tail],
            [over_boundary, album.again[0], more],
            [over_boundary, a, more],
        ],
        "two images on one page": [
            two,
            [text[: page + 2], b, more[:1], a, more],
            [text[: page + 2], a, more[:1], c, more],
            two,
            [text[: page + 2], c, more[:1], b, more],
        ],
        "image in a page that ends before it": [
            [text[:3], a, more],
            [text[:3], a, more[:5], tail],
            [text[:3], b, more],
        ],
    }


def _sessions(sizes: Sizes, album: Album, draw: Draw) -> Waves:
    """Two sessions in turn, which go on from their own outputs and are shown another photograph each time."""
    naive, page = Naive(sizes.page, album.vision), sizes.page
    told: list[list[Part]] = [[draw(page // 2)], [draw(page // 3)]]
    for turn in range(TURNS):
        for number, parts in enumerate(told):
            parts += [album.photos[(turn * 2 + number) % len(album.photos)], draw(page // 3)]
            ask = naive.expect(album.ask(parts, new=3))
            outputs = yield [ask]
            naive.answered(ask, outputs[0])
            parts.append(outputs[0])


def _together(sizes: Sizes, album: Album, draw: Draw) -> Waves:
    """Four requests in one batch: twins, another image behind the same text, the same image behind another."""
    page = sizes.page
    a, b = album.photos[:2]
    text, more = draw(page + 7), draw(page)
    for _ in range(2):
        yield [
            album.ask([text, a, more], new=6),
            album.ask([text, a, more], new=4),
            album.ask([text, b, more], new=6),
            album.ask([more, a, text, a], new=6),
        ]


def tier_scenarios(sizes: Sizes, album: Album, draw: Draw) -> Iterator[Scenario]:
    """Pools that hold little more than one request, over host memory: pages and features go down and come back."""
    page, pages = sizes.page, sizes.pages
    rotation = partial(_rotation, sizes, album, draw)
    ample = Below(host_pages=8 * pages)
    back = Counts(host_hit_pages=2 * pages, features_from_host=1)
    yield Scenario("images from host memory", pages + 2, rotation, back, ample)
    yield Scenario("images in a pool of one request", pages + 1, rotation, Counts(pages_evicted=pages))
    loads = replace(ample, fails=("promote", every_other))
    lost = Counts(host_hit_pages=1, failed_copies=2, lost_tokens=page)
    yield Scenario("loads of images fail", pages + 2, rotation, lost, loads)
    stores = Below(host_pages=3 * pages + 2, fails=("demote", every_other))
    yield Scenario("images that do not get down", pages + 1, rotation, Counts(failed_copies=1), stores)
    held = 5
    holes = Counts(suspensions=1, hole_tokens=page, images_encoded=2)
    suspended = partial(_suspended, page, album, draw)
    yield Scenario("suspended with images", 7, suspended, holes, Below(suspend_pages=held))
    lossy = Below(suspend_pages=held, fails=("resume", always))
    yield Scenario("suspended with images, lost", 7, suspended, Counts(suspensions=1, failed_copies=1), lossy)


def random_image_scenarios(sizes: Sizes, album: Album, draw: Draw, rng: random.Random) -> Iterator[Scenario]:
    """Endless scenarios drawn at random, in small pools over host tiers of any size, with copies that fail or not."""
    number = 0
    while True:
        number += 1
        own = random.Random(rng.getrandbits(32))
        below = random_below(sizes, rng)
        waves = partial(_random_waves, sizes, album, draw, own)
        yield Scenario(f"random images {number}", sizes.pages + rng.randint(1, 4), waves, below=below)


def _rotation(sizes: Sizes, album: Album, draw: Draw) -> Waves:
    """Three sessions, each as large as the pool, push each other out and come back; their images are shared."""
    page, pages, photos = sizes.page, sizes.pages, album.photos
    room = (pages - 2) * page - 2 * album.vision.tokens
    told: list[list[Part]] = [
        [draw(page - 5), photos[n], draw(room // 2), photos[n + 1], draw(room // 2)] for n in range(3)
    ]
    for _turn in range(TURNS):
        for parts in told:
            yield [album.ask([*parts, draw(page // 2)])]


def _suspended(page: int, album: Album, draw: Draw) -> Waves:
    """The last of four requests is suspended and stays so until a page that it shared, with an image, has been dropped.

    As `tiers` has it: the first shares two pages with the last and ends before the middle two, which take the room.
    """
    tokens, (a, b) = album.vision.tokens, album.photos[:2]
    shared: list[Part] = [draw(page - 3), a, draw(page + 3 - tokens)]
    one = draw(3)
    yield [album.ask([*shared, one])]
    yield [
        album.ask([*shared, one[:1]], new=page - 4),
        Ask(draw(page - 2), new=page + 8),
        Ask(draw(page - 2), new=page + 8),
        album.ask([*shared, draw(page - 3), b, draw(page - tokens)], new=8),
    ]


def _random_waves(sizes: Sizes, album: Album, draw: Draw, rng: random.Random) -> Waves:
    """Sessions that grow and branch, up to `CONCURRENCY` requests at a time, any photograph anywhere."""
    longest = sizes.pages * sizes.page
    told: list[list[Part]] = [[draw(rng.randint(1, sizes.page))]]
    for _wave in range(RANDOM_WAVES):
        prompts = [
            _cut(_grown(sizes, album, draw, rng, rng.choice(told)), longest, album.vision.tokens)
            for _ in range(rng.randint(1, CONCURRENCY))
        ]
        outputs = yield [album.ask(parts, new=rng.randint(1, 6)) for parts in prompts]
        told += [[*parts, output] for parts, output in zip(prompts, outputs, strict=True)]


def _grown(sizes: Sizes, album: Album, draw: Draw, rng: random.Random, told: list[Part]) -> list[Part]:
    parts = [*told[: rng.randint(1, len(told))], draw(1)]
    for _ in range(rng.randint(1, 3)):
        parts += [rng.choice((*album.photos, album.again[0])), draw(rng.randint(1, sizes.page))]
    return parts


def _cut(parts: list[Part], longest: int, tokens: int) -> list[Part]:
    """As many leading parts as fit."""
    length = 0
    for number, part in enumerate(parts):
        length += tokens if isinstance(part, ImageInput) else len(part)
        if length > longest:
            return parts[:number]
    return parts
