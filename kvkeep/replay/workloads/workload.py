"""What a synthetic workload is: requests with prompts, media items and the encoder outputs that they need.

Must not know caches, nor any modality.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvkeep.index.media import MediaItem
from kvkeep.index.names import Int32s

#: A model of 7 B parameters, stated since no trace has one: 28 layers, 4 KV heads of 128, 16 bits.  The seconds that
#: encoders take are meant for a machine that prefills 50,000 tokens a second with it.
KV_NBYTES_PER_TOKEN = 57_344

#: Stands for what is not text; the same for all media, as in real vocabularies.
PLACEHOLDER = 151_655
VOCABULARY = 150_000


class Encoded(NamedTuple):
    """An encoder output that a request needs.

    encoder: which one.   key: digest of its input, or of the prompt's token ids.   nbytes: of the output.
    seconds: what computing it takes.
    end: where its media item ends in the prompt: KV that matches as far makes it unnecessary; None: always needed.
    """

    encoder: str
    key: bytes
    nbytes: int
    seconds: float
    end: int | None = None


class MediaRequest(NamedTuple):
    """One request.

    time_s: of its arrival.   prompt, answer: token ids; both empty where a model keeps no KV.
    answer_s: what making the answer takes; None: as long as text of that length.
    """

    time_s: float
    prompt: Int32s
    answer: Int32s
    media: tuple[MediaItem, ...]
    encoded: tuple[Encoded, ...]
    answer_s: float | None = None


class Workload(NamedTuple):
    """Requests in the order of their arrival.

    note: what is synthetic, in words.   kv_nbytes_per_token: of the model that it is for.
    """

    name: str
    note: str
    requests: tuple[MediaRequest, ...]
    kv_nbytes_per_token: int = KV_NBYTES_PER_TOKEN


class Prompt:
    """A prompt that is put together: text, and placeholders for media."""

    def __init__(self) -> None:
        self._parts: list[Int32s] = []
        self._media: list[MediaItem] = []
        self._encoded: list[Encoded] = []
        self._length = 0

    def text(self, ids: Int32s) -> None:
        """Token ids follow."""
        self._parts.append(ids)
        self._length += len(ids)

    def item(self, media: "Media") -> None:
        """The placeholders of a media item follow."""
        self._media.append(MediaItem(self._length, media.tokens, media.key))
        self.text(np.full(media.tokens, PLACEHOLDER, dtype=np.int32))
        self._encoded.append(Encoded(media.encoder, media.key, media.nbytes, media.seconds, self._length))

    def add(self, part: "Media | Int32s") -> None:
        """A media item, or text, follows."""
        if isinstance(part, Media):
            self.item(part)
        else:
            self.text(part)

    def need(self, media: "Media") -> None:
        """An encoder output that has no place in the prompt."""
        self._encoded.append(Encoded(media.encoder, media.key, media.nbytes, media.seconds))

    def request(self, time_s: float, answer: Int32s, answer_s: float | None = None) -> MediaRequest:
        """The prompt as a request."""
        ids = np.concatenate(self._parts) if self._parts else NOTHING
        return MediaRequest(time_s, ids, answer, tuple(self._media), tuple(self._encoded), answer_s)


class Media(NamedTuple):
    """A picture, a clip or a prompt.   tokens: placeholders it takes.   The rest: see `Encoded`."""

    encoder: str
    key: bytes
    tokens: int
    nbytes: int
    seconds: float


NOTHING: Int32s = np.zeros(0, dtype=np.int32)


def key_of(*what: object) -> bytes:
    """A digest in the place of one over bytes, of media that do not exist."""
    return hashlib.blake2b(repr(what).encode(), digest_size=32).digest()


def text_of(count: int, *what: object) -> Int32s:
    """`count` token ids that stand for a text called `what`."""
    seed = int.from_bytes(key_of("text", *what)[:8], "little")
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def arrivals(rng: random.Random, count: int, per_s: float) -> list[float]:
    """`count` times of arrival, on average so many a second, with exponential gaps."""
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(per_s)
        times.append(now_s)
    return times


def zipf(rng: random.Random, count: int) -> int:
    """One of `count`, the k-th with weight 1/k."""
    weights = [1 / (k + 1) for k in range(count)]
    return rng.choices(range(count), weights)[0]


def in_order(requests: Sequence[MediaRequest]) -> tuple[MediaRequest, ...]:
    """By arrival."""
    return tuple(sorted(requests, key=lambda request: request.time_s))
