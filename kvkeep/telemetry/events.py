"""The events of one cache's index: which names each tier holds, told as it changes, to whoever follows.

Must not know what is done with them.  Under the cache's lock whole arrays are put aside (`Feed`); what follows from
them (is it the first copy of a name, the last?) is found out when somebody reads.

    event     stored   names entered a tier     removed, demoted   they left it     cleared   all left it
    follow    snapshot() -> names and a number;   read(number) -> the events after it, or `EventsLost`: begin again
"""

import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from threading import Lock
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvkeep.cache import TieredCache
from kvkeep.config import check_int
from kvkeep.errors import EventsLost
from kvkeep.index.eviction import Tier
from kvkeep.index.watch import Names, Reason

Kind = Literal["stored", "removed", "demoted", "cleared"]

#: What an event takes besides its names, about.
EVENT_NBYTES = 256


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the names that a tier holds.

    sequence: rises by 1 from event to event.
    kind: "stored": the first copy of each name has entered the tier; "removed": the last one has left it; "demoted":
        the same, and the name stays in the tier below; "cleared": no name is left in the tier.
    reason: why, see `kvkeep.index.watch.Reason`; None for pages that a request computed.
    names: 64-bit names; those of a "stored" event are consecutive pages of one chain, behind the name `parent`.
    parent: the name before the first, or that of the chain's root; None unless something was stored.
    page_size: token positions of a page.
    """

    sequence: int
    kind: Kind
    tier: Tier
    reason: Reason | None
    names: "array[int]"
    parent: int | None
    page_size: int


@dataclass(frozen=True, slots=True)
class NamesNow:
    """The names that each tier holds after the event `sequence`, in no order."""

    sequence: int
    page_size: int
    names: "Mapping[Tier, array[int]]"


#: kind, tier, names, parent, reason; as the tree tells it, copy for copy.
_Record = tuple[Kind, Tier, Names, int | None, Reason | None]

Mask = npt.NDArray[np.bool_]

_NO_NAMES: Names = np.empty(0, dtype=np.uint64)


class Feed:
    """What the tree has told since the feed began.   nbytes_max: beyond it everything is dropped, and `lost` is True.

    One thread at a time writes (with the cache's lock), another one takes.
    """

    def __init__(self, nbytes_max: int) -> None:
        self.lost = False
        self._records: deque[_Record] = deque()
        self._nbytes_max = nbytes_max
        self._nbytes_in = 0  # the writer's
        self._nbytes_out = 0  # the taker's

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """Copies entered a tier."""
        self._put(("stored", tier, names, parent, reason))

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """Copies left a tier."""
        self._put(("demoted" if reason == "demoted" else "removed", tier, names, None, reason))

    def cleared(self, tier: Tier) -> None:
        """All copies left a tier."""
        self._put(("cleared", tier, _NO_NAMES, None, "reset"))

    def _put(self, record: _Record) -> None:
        if self.lost:
            return
        self._nbytes_in += record_nbytes(len(record[2]))
        if self._nbytes_in - self._nbytes_out > self._nbytes_max:
            self.lost = True
            self._records.clear()
        else:
            self._records.append(record)

    def take(self) -> list[_Record]:
        """What has come, once."""
        out = []
        try:
            while True:
                out.append(self._records.popleft())
                self._nbytes_out += record_nbytes(len(out[-1][2]))
        except IndexError:
            return out


class Copies:
    """How many copies of each name a tier holds: mostly one, and more where names collide."""

    def __init__(self, names: Names) -> None:
        self.names: set[int] = set()
        self._more: dict[int, int] = {}
        self.add(names)

    def add(self, names: Names) -> Mask:
        """Adds a copy of each; returns a mask: which of them are first copies."""
        values = names.tolist()
        fresh = set(values)
        if len(fresh) == len(values) and self.names.isdisjoint(fresh):
            self.names |= fresh
            return np.ones(len(values), dtype=bool)
        first = []
        for name in values:
            first.append(name not in self.names)
            if first[-1]:
                self.names.add(name)
            else:
                self._more[name] = self._more.get(name, 0) + 1
        return np.array(first, dtype=bool)

    def drop(self, names: Names) -> Mask:
        """Drops a copy of each; returns a mask: which of them were last copies."""
        values = names.tolist()
        if not self._more:
            self.names.difference_update(values)
            return np.ones(len(values), dtype=bool)
        last = []
        for name in values:
            more = self._more.pop(name, 0)
            last.append(not more)
            if last[-1]:
                self.names.discard(name)
            elif more > 1:
                self._more[name] = more - 1
        return np.array(last, dtype=bool)

    def clear(self) -> None:
        """Drops every copy."""
        self.names.clear()
        self._more.clear()


class EventLog:
    """Follows a cache from now on and keeps its last events; `close` ends that.  One a cache, any number of readers.

    nbytes_max: bytes of the events that are kept, about, and of those that were not read yet.
    first: the number before the first event.  By default microseconds of the wall clock, so that a number which a
        reader has kept from an earlier process is not taken for one of this log's.

    Reading may be done from any thread.
    """

    def __init__(self, cache: TieredCache, *, nbytes_max: int = 16 * 2**20, first: int | None = None) -> None:
        check_int("nbytes_max", nbytes_max, at_least=1)
        self._cache = cache
        self._page_size = cache.config.page_size
        self._nbytes_max = nbytes_max
        self._lock = Lock()  # taken before the cache's, never with it held
        self._sequence = first if first is not None else time.time_ns() // 1000
        self._events: deque[Event] = deque()
        self._nbytes = 0
        self._begin()

    def close(self) -> None:
        """Stops to follow; what has been kept can still be read."""
        with self._lock:
            self._settle()
            self._cache.watch(None)

    # ------------------------------------------------------------------ reading

    def snapshot(self) -> NamesNow:
        """The names that each tier holds, and the number to go on from."""
        with self._lock:
            self._settle()
            names = {tier: array("Q", copies.names) for tier, copies in self._copies.items()}
            return NamesNow(self._sequence, self._page_size, names)

    def read(self, after: int) -> list[Event]:
        """The events after number `after`, which may be none.

        Raises `EventsLost` when some of them are not kept any more, or `after` is not a number of this log.
        """
        with self._lock:
            self._settle()
            if not self._complete_after <= after <= self._sequence:
                raise EventsLost(
                    f"events after {after} were asked for, and those after {self._complete_after} are kept, up to "
                    f"{self._sequence}: take a snapshot"
                )
            count = self._sequence - after
            return list(islice(reversed(self._events), count))[::-1]

    # ------------------------------------------------------------------ inside, with the log's lock held

    def _begin(self) -> None:
        """Follows anew: the events so far do not lead to what the tiers hold now."""
        self._feed = Feed(self._nbytes_max)
        self._copies = {tier: Copies(names) for tier, names in self._cache.watch(self._feed).items()}
        self._events.clear()
        self._nbytes = 0
        self._complete_after = self._sequence

    def _settle(self) -> None:
        """Makes events of what the tree has told."""
        if self._feed.lost:
            self._sequence += 1  # a number without an event, so that no reader goes on across the gap
            self._begin()
        for kind, tier, names, parent, reason in joined(self._feed.take()):
            copies = self._copies[tier]
            if kind == "cleared":
                copies.clear()
                self._append(kind, tier, reason, names, None)
            elif kind == "stored":
                assert parent is not None
                self._stored(tier, reason, names, parent, copies.add(names))
            else:
                left = names[copies.drop(names)]
                if len(left):
                    self._append(kind, tier, reason, left, None)

    def _stored(self, tier: Tier, reason: Reason | None, names: Names, parent: int, first: Mask) -> None:
        """One event for each stretch of first copies."""
        edges = np.flatnonzero(np.diff(np.concatenate(([0], first.astype(np.int8), [0]))))
        for start, end in edges.reshape(-1, 2).tolist():
            before = int(names[start - 1]) if start else parent
            self._append("stored", tier, reason, names[start:end], before)

    def _append(self, kind: Kind, tier: Tier, reason: Reason | None, names: Names, parent: int | None) -> None:
        self._sequence += 1
        event = Event(self._sequence, kind, tier, reason, array("Q", names.tobytes()), parent, self._page_size)
        self._events.append(event)
        self._nbytes += record_nbytes(len(names))
        while self._nbytes > self._nbytes_max:
            oldest = self._events.popleft()
            self._nbytes -= record_nbytes(len(oldest.names))
            self._complete_after = oldest.sequence


def joined(records: list[_Record]) -> Iterator[_Record]:
    """Records of one kind that follow each other as one: what left a tier page by page, what goes on with a chain."""
    for (kind, tier, reason), group in groupby(records, key=lambda record: (record[0], record[1], record[4])):
        names: list[Names] = []
        parent: int | None = None
        for _, _, more, before, _ in group:
            if kind == "stored" and names and before != int(names[-1][-1]):
                yield kind, tier, np.concatenate(names), parent, reason
                names = []
            if not names:
                parent = before
            names.append(more)
        yield kind, tier, np.concatenate(names), parent, reason


def record_nbytes(names: int) -> int:
    """What an event with that many names takes, about."""
    return EVENT_NBYTES + 8 * names
