"""The miss ledger: for each admission where the match stopped, and why; tokens lost by cause.

Must not change what is matched; must not know pages or copies.  Its callers hold the cache's lock.

It names every page of a prompt that was not found, and remembers names that have been: it costs some microseconds and
about 0.3 us a page of a prompt, and is there only where it is asked for.
"""

import struct
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvkeep.index.eviction import Tier
from kvkeep.index.media import PageMedia
from kvkeep.index.names import TOKEN_NBYTES, Hash64, Identity, chain_names, hash64
from kvkeep.index.watch import Names, Reason
from kvkeep.stats import Histogram

#: Upper bounds of the histogram of how long ago a missed page had been evicted, in seconds.
AGE_BOUNDS_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)

#: How many admissions are remembered one by one.
RECENT = 256

_Entry = TypeVar("_Entry")

_PLAIN = 0x9E3779B97F4A7C15  # where chains of plain token ids start, whatever their root and media


class Cause(StrEnum):
    """Why tokens of a prompt were not taken from the cache."""

    NEVER_SEEN = "never seen"
    IN_FLIGHT = "in flight"  #: a live request has the same page and has not stored it yet
    EVICTED = "evicted"
    NOT_STORED = "not stored"  #: seen before, and its request ended without leaving it
    OTHER_FINGERPRINT = "different fingerprint"
    OTHER_SALT = "different salt"
    OTHER_ADAPTER = "different adapter"
    OTHER_LABEL = "different label"
    OTHER_MEDIA = "different media digest"
    LOAD_FAILED = "load failed"
    RESET = "forgotten by a reset"
    SLOWER = "faster to compute than to load"
    NO_ROOM = "too little room"  #: in host memory, and the load was refused or its bytes are not there yet
    OPTED_OUT = "reuse was declined"
    CAPPED = "no more was to be taken"  #: since another rank of the group has less
    NO_IDENTITY = "media without a digest"
    REST = "no full page"  #: the last token, which is computed always, and the part of a page before it


_LEFT: Mapping[Reason, Cause] = {"evicted": Cause.EVICTED, "failed": Cause.LOAD_FAILED, "reset": Cause.RESET}
_OTHER = {
    b"fingerprint": Cause.OTHER_FINGERPRINT,
    b"salt": Cause.OTHER_SALT,
    b"adapter": Cause.OTHER_ADAPTER,
    b"label": Cause.OTHER_LABEL,
}


@dataclass(frozen=True, slots=True)
class Looked:
    """What an admission looked for.

    matched: pages that it took, the last one called `name`.   limit: pages that it might have taken.
    below: pages behind them that host memory has, and that are not loaded; `declined`: for loading them takes longer.
    reuse: False when it wanted none.   capped: pages behind `limit` that it was not to take.
    """

    matched: int
    limit: int
    name: int
    below: int = 0
    declined: bool = False
    reuse: bool = True
    capped: int = 0


@dataclass(frozen=True, slots=True)
class Miss:
    """One admission.

    matched_tokens: of `prompt_tokens`, those taken from the cache.   cause: why the next page was not; None: all were.
    age_s: seconds since it had been evicted, or forgotten; None for other causes.
    tokens: those not taken, by cause: with `matched_tokens` they are the whole prompt.
    in_flight_tokens: of these, the ones that a live request has or is computing.
    """

    prompt_tokens: int
    matched_tokens: int
    cause: Cause | None
    age_s: float | None
    tokens: Mapping[Cause, int]
    in_flight_tokens: int


@dataclass(frozen=True, slots=True)
class MissStats:
    """All admissions so far.

    order: the eviction order.   tokens: prompt tokens not taken from the cache, by cause.
    stops: how many matches stopped for each cause.
    evicted_age: where one stopped at an evicted page, how long ago that had left.
    """

    order: str
    tokens: Mapping[Cause, int]
    stops: Mapping[Cause, int]
    evicted_age: Histogram


class MissLedger:
    """Hears which names leave the cache (a `Listener`), and what each prompt looked for and found.

    page_size: tokens a page.   order: what the eviction order is called.
    names_max: how many names that have left, and how many that were looked for, are remembered: about 200 bytes each.
    clock: seconds that never go back.
    """

    def __init__(
        self,
        page_size: int,
        *,
        order: str = "lru",
        names_max: int = 1 << 18,
        clock: Callable[[], float] = time.monotonic,
        hash_fn: Hash64 = hash64,
    ) -> None:
        self.recent: deque[Miss] = deque(maxlen=RECENT)
        self._page_size = page_size
        self._order = order
        self._names_max = names_max
        self._clock = clock
        self._hash = hash_fn
        self._left: dict[int, tuple[Cause, float]] = {}  # by name, oldest first
        self._seen: dict[int, tuple[bytes, int]] = {}  # by plain name: root record and name, oldest first
        self._live: Counter[int] = Counter()  # names that live requests have looked for and not found
        self._names_of: dict[int, list[int]] = {}  # by number of the lease
        self._tokens: Counter[Cause] = Counter()
        self._stops: Counter[Cause] = Counter()
        self._ages = [0] * (len(AGE_BOUNDS_S) + 1)
        self._age_sum_s = 0.0

    def stats(self) -> MissStats:
        """What there is so far."""
        ages = Histogram(AGE_BOUNDS_S, tuple(self._ages), self._age_sum_s)
        return MissStats(self._order, dict(self._tokens), dict(self._stops), ages)

    # ------------------------------------------------------------------ names that leave

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """Nothing to remember: what is there is found."""

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """Copies that left for another tier are no loss; of the others the time is kept."""
        if reason in _LEFT:
            self._leave(names.tolist(), _LEFT[reason])

    def cleared(self, tier: Tier) -> None:
        """See `forgotten`."""

    def forgotten(self, names: Iterable[Names]) -> None:
        """Every name there is leaves at once."""
        for part in names:
            self._leave(part.tolist(), Cause.RESET)

    def _leave(self, names: list[int], cause: Cause) -> None:
        left, entry = self._left, (cause, self._clock())
        for name in names:
            left.pop(name, None)
            left[name] = entry
        _trim(left, self._names_max)

    # ------------------------------------------------------------------ admissions

    def admitted(self, number: int, identity: Identity, raw: memoryview, media: PageMedia, looked: "Looked") -> None:
        """A prompt was admitted as lease `number`.   raw: its token ids as bytes."""
        size, matched, limit, name = self._page_size, looked.matched, looked.limit, looked.name
        nbytes, prompt_tokens = size * TOKEN_NBYTES, len(raw) // TOKEN_NBYTES
        whole = (prompt_tokens - 1) // size
        causes: Counter[Cause] = Counter()
        if looked.capped:
            causes[Cause.CAPPED] += looked.capped
        if limit + looked.capped < whole:
            causes[Cause.NO_IDENTITY if looked.reuse else Cause.OPTED_OUT] += whole - limit - looked.capped
        names = chain_names(name, raw[matched * nbytes : limit * nbytes], nbytes, matched, media, self._hash)
        plain = chain_names(_PLAIN, raw[: limit * nbytes], nbytes, hash_fn=self._hash)
        why = [
            self._why(i < looked.below, looked.declined, name, known, identity)
            for i, (name, known) in enumerate(zip(names, plain[matched:], strict=True))
        ]
        causes.update(why)
        in_flight = sum(name in self._live for name in names)
        self._remember(number, identity, names, plain[matched:])
        stop = why[0] if why else next(iter(causes), None)
        age_s = self._clock() - self._left[names[0]][1] if why and names[0] in self._left else None
        tokens = {cause: pages * size for cause, pages in causes.items()}
        tokens[Cause.REST] = prompt_tokens - whole * size
        self._count(Miss(prompt_tokens, matched * size, stop, age_s, tokens, in_flight * size))

    def ended(self, number: int) -> None:
        """The lease is over."""
        for name in self._names_of.pop(number, ()):
            self._live[name] -= 1
            if not self._live[name]:
                del self._live[name]

    def _why(self, below: bool, declined: bool, name: int, plain: int, identity: Identity) -> Cause:
        if below:
            return Cause.SLOWER if declined else Cause.NO_ROOM
        if name in self._live:
            return Cause.IN_FLIGHT
        if name in self._left:
            return self._left[name][0]
        record, known = self._seen.get(plain, (b"", 0))
        if not record:
            return Cause.NEVER_SEEN
        if record != identity.record:
            return _first_difference(record, identity.record)
        return Cause.NOT_STORED if known == name else Cause.OTHER_MEDIA

    def _remember(self, number: int, identity: Identity, names: list[int], plain: list[int]) -> None:
        if names:
            self._names_of[number] = names
            self._live.update(names)
            record, seen = identity.record, self._seen
            for key, name in zip(plain, names, strict=True):
                seen.pop(key, None)
                seen[key] = (record, name)
            _trim(seen, self._names_max)

    def _count(self, miss: Miss) -> None:
        self.recent.append(miss)
        self._tokens.update(miss.tokens)
        if miss.cause is not None:
            self._stops[miss.cause] += 1
        if miss.age_s is not None and miss.cause is Cause.EVICTED:
            self._ages[bisect_left(AGE_BOUNDS_S, miss.age_s)] += 1
            self._age_sum_s += miss.age_s


def _trim(names: dict[int, _Entry], count: int) -> None:
    """Forgets the oldest names."""
    for name in list(names)[: len(names) - count] if len(names) > count + count // 16 else ():
        del names[name]


def _first_difference(one: bytes, other: bytes) -> Cause:
    """The first field in which two root records differ."""
    for (tag, value), (_, now) in zip(_fields(one), _fields(other), strict=True):
        if value != now:
            return _OTHER[tag]
    return Cause.NEVER_SEEN


def _fields(record: bytes) -> list[tuple[bytes, bytes]]:
    """What `names.frame` has put together."""
    out, at = [], 0
    while at < len(record):
        (length,) = struct.unpack_from("<I", record, at)
        tag = record[at + 4 : at + 4 + length]
        at += 4 + length
        (length,) = struct.unpack_from("<Q", record, at)
        out.append((tag, record[at + 8 : at + 8 + length]))
        at += 8 + length
    return out
