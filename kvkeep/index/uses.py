"""Which request used which pages last, and what its chain's rhythm says about their next use.

Must not know tiers or how pages leave; of the run tree it reads only where a use's pages hang.

A use is one request's path, stamped as a whole when the request ends.  The tree stamps with a growing number, so the
stamp of a stretch of pages names the use that touched it last, its owner, with no work per page.  A chain that comes
back is known by the name of its last page, also when its pages have left; a use goes on with

    the use whose whole path it has in it, the deepest such one, or else
    the owner of the deepest page that its admission matched, if it keeps at least what it loses of that one's own
        pages; otherwise it is a fork, and what both share becomes trunk: nobody's own.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from typing import NamedTuple

from kvkeep.index.forecast import (
    ANNOUNCED,
    BINS,
    LOW,
    PAUSE,
    PAUSE_BINS,
    PAUSE_LOW,
    PAUSE_PER_OCTAVE,
    PER_OCTAVE,
    YOUNG,
    Forecast,
    class_of,
)
from kvkeep.index.hints import Discard, Expect, Hint, Pin
from kvkeep.index.records import Record, Records
from kvkeep.index.run import Run

#: Remembered after their last page has left: at most this share of the pool's pages, and at least so many.
REMEMBERED_SHARE, REMEMBERED_MIN = 1 / 16, 128
#: The least weight of the newest gap in a chain's smoothed gap, and of a chain's gap in the usual gap of all.
SMOOTH, SMOOTH_ALL = 0.25, 0.02
#: Before any gap is known: half a minute (log of seconds).
LOG_GAP = math.log(30.0)
#: The shortest gap that is told apart from none: in usual times between two requests, and in seconds.
SIMULTANEOUS, GAP_S_MIN = 0.1, 1e-6
#: After so many uses, half as many with pages are looked at.
LOOK_USES = 16

FOREVER = math.inf
#: More than keeping any page costs that may still be used, in seconds.
GONE_COST = 1e12
#: The stamp of no page, and the row of no record.
NO_STAMP = NO_ROW = -1


class Began(NamedTuple):
    """An admission.

    now_s: when.   stamp: of the deepest page that it matched, or NO_STAMP.   length: tokens of the prompt.
    """

    now_s: float
    stamp: int
    length: int


class PathUse(NamedTuple):
    """A request's use of a path of the tree, when it ends.

    stamp, run, depth: what the tree stamped it with, the run of its last page, and the depth behind that.
    base, base_name: how many pages its admission matched, and the name of the last one.
    names: of the pages behind them, as far as they are known.   out: how many tokens it generated.
    worth: seconds of recomputation that a byte of it saves, in those of a byte of KV.
    """

    stamp: int
    run: Run
    depth: int
    base: int
    base_name: int
    names: Sequence[int]
    began: Began
    out: int
    worth: float = 1.0


class Said:
    """What is not so of most uses.

    discarded: the chain will not come back.   until_s: it is pinned until then.   worth: see `PathUse`.
    """

    __slots__ = ("discarded", "until_s", "worth")

    def __init__(self, worth: float = 1.0) -> None:
        self.discarded = False
        self.until_s = -FOREVER
        self.worth = worth


class Use:
    """One use of a path, from the end of its request on.

    stamp, run: what the tree stamped it with, and where its pages hang, or hung; None when they have left.
    start, tail, name: where the chain's own pages begin, the depth behind its last page, and that page's name; the
        depth is -1 when another went on or nothing will.
    ended_s, scale, group: when that was, in how many seconds the next use is expected, and its class in the forecast.
    row: its record, or NO_ROW when it has no pages any more.   said: None for nothing.
    """

    __slots__ = ("ended_s", "group", "name", "row", "run", "said", "scale", "stamp", "start", "tail")

    def __init__(
        self, stamp: int, run: Run | None, row: int, start: int, tail: int, name: int, ended_s: float, scale: float,
        group: int,
    ) -> None:  # fmt: skip
        self.stamp = stamp
        self.run = run
        self.row = row
        self.start = start
        self.tail = tail
        self.name = name
        self.ended_s = ended_s
        self.scale = scale
        self.group = group
        self.said: Said | None = None


class Uses:
    """The uses whose pages are cached, and of the others the latest ones.

    pages: how many the cache holds, which bounds what is remembered.   now: a clock, in seconds.
    count: how many requests have ended.   let_go: stamps of pages that an order has chosen to leave.
    """

    def __init__(self, pages: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.forecast = Forecast()
        self.records = Records()
        self.of_stamp: dict[int, Use] = {}
        self._of_name: dict[int, Use | int] = {}  # without pages: the row
        self._left: deque[int] = deque()  # names of uses without pages, and of some that have been gone on with
        self._remembered = 0
        self._remembered_max = max(REMEMBERED_MIN, int(pages * REMEMBERED_SHARE))
        self._forgotten = array("i")  # rows, until their waits are counted
        self.let_go: list[int] = []
        self._cached: deque[Use] = deque()
        self._usual: float | None = None
        self._between = self._last_s = 0.0
        self.count = 0

    def clear(self) -> None:
        """No page is cached any more; what was learned stays."""
        for known in (
            self.of_stamp, self._of_name, self._left, self.let_go, self._cached, self.records
        ):  # fmt: skip
            known.clear()
        del self._forgotten[:]
        self._remembered = 0

    # ------------------------------------------------------------------ learning

    def used(self, path: PathUse) -> Use:
        """A request has ended."""
        stamp, run, depth, base, name, names, began, out, worth = path
        now_s, forecast = self.now(), self.forecast
        self._pace(began.now_s)
        if self.let_go:
            self._look_after(self.let_go)
        old, shared = self._before(path)
        if depth > base:
            name = names[depth - base - 1]
        typical = last = LOG_GAP if self._usual is None else self._usual
        start, turns = shared, 0
        if old is not None:
            before = self.records[old.row]
            if old.tail - shared <= shared - old.start:
                last = self._went_on(before, began.now_s, old.tail >= 0)
                start, turns = old.start, before.turns + 1
                typical = before.typical + max(SMOOTH, 1 / turns) * (last - before.typical)
                if old.tail == shared:
                    old.run = None  # all of its pages are the new use's
                self._forget(old)
            else:  # a fork: it begins with the rhythm of the chain it left
                old.start, turns = shared, before.turns
                self.records[old.row] = before._replace(start=shared)
                if turns:
                    typical = last = before.typical
        log_out = forecast.log_out(out)
        scale = forecast.predict(typical, last, log_out)
        group = class_of(turns)
        row = self.records.add(name, now_s, scale, typical, last, log_out, start, depth, turns, group, 0, -1)
        use = Use(stamp, run, row, start, depth, name, now_s, scale, group)
        if worth != 1.0:
            use.said = Said(worth)
        self.of_stamp[stamp] = use
        if name in self._of_name:
            self._forget(self._ends_with(name))
        self._of_name[name] = use
        self._cached.append(use)
        if not self.count % LOOK_USES:
            self._look()
        if forecast.tick():
            self._refresh(now_s)
        return use

    def _before(self, path: PathUse) -> tuple[Use | None, int]:
        """The use that this one may go on with or branch off, and how deep it shares that one's path."""
        _, _, _, base, base_name, names, began, _, _ = path
        owner = self.of_stamp.get(began.stamp)
        if owner is not None and base <= owner.start:
            owner = None
        if owner is not None:
            behind = owner.tail - base
            if (names[behind - 1] if 0 < behind <= len(names) else base_name if not behind else None) == owner.name:
                return owner, owner.tail
        of_name = self._of_name
        name = next(filter(of_name.__contains__, reversed(names)), None)
        if name is None and base and base_name in of_name:
            name = base_name
        if name is not None:
            whole = self._ends_with(name)
            if whole.start < whole.tail:
                return whole, whole.tail
        return owner, base

    def _ends_with(self, name: int) -> Use:
        """The use whose path ends with that page, also when it has no page any more."""
        known = self._of_name[name]
        if not isinstance(known, int):
            return known
        was = self.records[known]
        return Use(NO_STAMP, None, known, was.start, was.tail, name, was.ended_s, was.scale, was.group)

    def _went_on(self, before: Record, began_s: float, first: bool) -> float:
        """Learns from the gap between a use and one that goes on; returns its logarithm.   first: none did before."""
        gap_s = max(began_s - before.ended_s, SIMULTANEOUS * self._between, GAP_S_MIN)
        last = math.log(gap_s)
        self.forecast.learn(before.typical, before.last, before.log_out, last)
        if first:
            self.forecast.used(before, gap_s)
        self._usual = last if self._usual is None else self._usual + SMOOTH_ALL * (last - self._usual)
        return last

    def _pace(self, now_s: float) -> None:
        """Keeps the usual time between two requests."""
        self.count = count = self.count + 1
        if count > 1:
            self._between += (0.01 if count > 100 else 1 / count) * (now_s - self._last_s - self._between)
        self._last_s = now_s

    def _refresh(self, now_s: float) -> None:
        """Tells the forecast how long chains have waited: some of them, and all that are forgotten now."""
        self.forecast.waited(self.records.columns, self.records.look(self._forgotten), now_s)
        for row in self._forgotten:
            self.records.drop(row)
        del self._forgotten[:]

    # ------------------------------------------------------------------ what is known

    def _look_after(self, stamps: list[int]) -> None:
        """Of these uses pages may have left."""
        for stamp in stamps:
            use = self.of_stamp.get(stamp)
            if use is not None and not self._has_pages(use):
                self._lost(use)
        stamps.clear()

    def _look(self) -> None:
        """The same of a few in turn: pages leave in other ways too.  Those that are gone are cheap, and done first."""
        cached, kept = self._cached, 0
        for _ in range(min(3 * LOOK_USES, len(cached))):
            use = cached.popleft()
            if use.run is not None and self._has_pages(use):
                cached.append(use)
                kept += 1
                if kept == LOOK_USES // 2:
                    return
            elif use.run is not None:
                self._lost(use)

    @staticmethod
    def _has_pages(use: Use) -> bool:
        """Follows the pages of `use` towards the root, as they leave from the end or are used by others."""
        run, stamp = use.run, use.stamp
        while run is not None:
            if run.names and run.stamps[-1] >= stamp:
                use.run = run
                return stamp in run.stamps
            run = run.parent
        return False

    def _lost(self, use: Use) -> None:
        """No page of `use` is cached: what may still be gone on with is remembered."""
        use.run = None
        self.of_stamp.pop(use.stamp, None)
        row, use.row = use.row, NO_ROW
        if use.tail < 0:
            self.records.drop(row)
            return
        self._of_name[use.name] = row
        self._remembered += 1
        self._left.append(use.name)
        while self._remembered > self._remembered_max or len(self._left) > 2 * self._remembered_max:
            name = self._left.popleft()
            known = self._of_name.get(name)
            if isinstance(known, int):
                del self._of_name[name]
                self._remembered -= 1
                self._forgotten.append(known)

    def _forget(self, use: Use) -> None:
        """Nothing will go on with the whole of `use`, which waits no more; pages that it still owns stay its own."""
        if use.tail < 0:
            return
        self._remembered -= isinstance(self._of_name.pop(use.name), int)
        use.tail = -1
        if use.run is None:
            self.of_stamp.pop(use.stamp, None)
            self.records.drop(use.row)
            use.row = NO_ROW
        else:
            self.records[use.row] = self.records[use.row]._replace(tail=-1, counted=BINS, paused=PAUSE_BINS - 1)

    # ------------------------------------------------------------------ hints

    def hint(self, use: Use, hint: Hint) -> None:
        """What the caller knows of the chain's future counts more than what was learned."""
        match hint:
            case _ if use.row == NO_ROW:
                pass  # its pages have left, or are another's
            case Discard():
                self._said(use).discarded = True
                self._forget(use)
            case Expect(after_s):
                use.scale, use.group = max(after_s, GAP_S_MIN), ANNOUNCED
                record = self.records[use.row]
                self.records[use.row] = record._replace(scale=use.scale, group=ANNOUNCED, counted=0, paused=-1)
            case Pin(for_s):
                self._said(use).until_s = self.now() + for_s

    @staticmethod
    def _said(use: Use) -> Said:
        if use.said is None:
            use.said = Said()
        return use.said

    # ------------------------------------------------------------------ what keeping a page costs

    def cost(self, stamp: int, run: Run | None, now_s: float) -> float:
        """What keeping a page of `run`, last used at `stamp`, costs for each hit: seconds of a page's place."""
        use = self.of_stamp.get(stamp)
        if use is None:
            return FOREVER
        said = use.said
        if said is None:
            return self._cost(use, now_s)
        if now_s < said.until_s:
            return -FOREVER
        if said.discarded and (run is None or run.end > use.start):
            return FOREVER
        return self._cost(use, now_s) / said.worth

    def _cost(self, use: Use, now_s: float) -> float:
        age, scale = now_s - use.ended_s, use.scale
        ratio = age / scale
        if ratio <= PAUSE:
            row = self.forecast.table[use.group]
            if ratio <= YOUNG:
                return scale * row[0]
            u = (log2(ratio) - LOW) * PER_OCTAVE
            b = int(u)
            low = row[b]
            return scale * (low + (u - b) * (row[b + 1] - low))
        row, u = self.forecast.pause, (log2(age) - PAUSE_LOW) * PAUSE_PER_OCTAVE
        if u <= 0.0:
            return row[0]
        b = int(u)
        if b >= PAUSE_BINS:  # oldest first
            return GONE_COST + age
        return row[b] + (u - b) * (row[b + 1] - row[b])
