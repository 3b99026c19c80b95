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
from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from typing import NamedTuple

from kvkeep.index.forecast import (
    ANNOUNCED,
    LOW,
    PAUSE,
    PAUSE_BINS,
    PAUSE_LOW,
    PAUSE_PER_OCTAVE,
    PER_OCTAVE,
    YOUNG,
    Forecast,
    Waiting,
    class_of,
)
from kvkeep.index.hints import Discard, Expect, Hint, Pin
from kvkeep.index.remembered import Chain, Remembered
from kvkeep.index.run import Run

#: Remembered after their last page has left: at most this share of the pool's pages, and at least so many.
REMEMBERED_SHARE, REMEMBERED_MIN = 1 / 16, 128
#: The least weight of the newest gap in a chain's smoothed gap, and of a chain's gap in the usual gap of all.
SMOOTH, SMOOTH_ALL = 0.3, 0.02
#: Before any gap is known: half a minute (log of seconds).
LOG_GAP = math.log(30.0)
#: The shortest gap that is told apart from none: in usual times between two requests, and in seconds.
SIMULTANEOUS, GAP_S_MIN = 0.1, 1e-6
#: After so many uses, twice as many that wait are looked at.
LOOK_USES = 16

FOREVER = math.inf
#: More than keeping any page costs that may still be used, in seconds.
GONE_COST = 1e12
#: The stamp of no page.
NO_STAMP = -1


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


class Use(Waiting):
    """One use of a path, from the end of its request on.

    ended_s: when that was.
    typical, last, log_out, turns: what the forecast learns from, see there; `turns` is how often the chain went on.
    start, tail, name: where the chain's own pages begin, the depth behind its last page, and that page's name.
    over: a later use went on, or it is forgotten.
    run: where its pages hang, or hung; None when they have left.   said: None for nothing.
    """

    __slots__ = (
        "ended_s", "last", "log_out", "name", "over", "run", "said", "stamp", "start", "tail", "turns", "typical",
    )  # fmt: skip

    def __init__(self, stamp: int, run: Run | None, start: int, tail: int, name: int, ended_s: float) -> None:
        self.stamp = stamp
        self.run = run
        self.start = start
        self.tail = tail
        self.name = name
        self.ended_s = ended_s
        self.turns = self.group = self.counted = 0
        self.paused = -1
        self.over = False
        self.said: Said | None = None


def pack(use: Use) -> Chain:
    """What is remembered of a use without pages."""
    return Chain(
        use.name, use.ended_s, use.scale, use.typical, use.last, use.log_out, use.start, use.tail, use.turns, use.group,
        use.counted, use.paused,
    )  # fmt: skip


def unpack(chain: Chain) -> Use:
    """The use of which that is remembered."""
    use = Use(NO_STAMP, None, chain.start, chain.tail, chain.name, chain.ended_s)
    use.scale, use.typical, use.last, use.log_out = chain.scale, chain.typical, chain.last, chain.log_out
    use.turns, use.group, use.counted, use.paused = chain.turns, chain.group, chain.counted, chain.paused
    return use


class Uses:
    """The uses whose pages are cached, and of the others the latest ones.

    pages: how many the cache holds, which bounds what is remembered.   now: a clock, in seconds.
    count: how many requests have ended.
    """

    def __init__(self, pages: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.forecast = Forecast()
        self.of_stamp: dict[int, Use] = {}
        self._of_name: dict[int, Use] = {}
        self._remembered = Remembered(max(REMEMBERED_MIN, int(pages * REMEMBERED_SHARE)))
        self._young: deque[Use] = deque()
        self._old: deque[Use] = deque()
        self._usual: float | None = None
        self.count = 0
        self._between = self._last_s = 0.0

    def clear(self) -> None:
        """No page is cached any more; what was learned stays."""
        for known in (self.of_stamp, self._of_name, self._remembered, self._young, self._old):
            known.clear()

    # ------------------------------------------------------------------ learning

    def used(self, path: PathUse) -> Use:
        """A request has ended."""
        stamp, run, depth, base, name, names, began, out, worth = path
        now_s, forecast = self.now(), self.forecast
        self._pace(began.now_s)
        old, shared = self._before(path)
        if depth > base:
            name = names[depth - base - 1]
        use = Use(stamp, run, shared, depth, name, now_s)
        use.log_out = forecast.log_out(out)
        use.typical = use.last = LOG_GAP if self._usual is None else self._usual
        if old is not None:
            if old.tail - shared <= shared - old.start:
                self._go_on(use, old, shared, began.now_s)
            else:  # a fork: it begins with the rhythm of the chain it left
                old.start = shared
                use.turns = old.turns
                if old.turns:
                    use.typical = use.last = old.typical
            use.group = class_of(use.turns)
        use.scale = forecast.predict(use.typical, use.last, use.log_out)
        if worth != 1.0:
            use.said = Said(worth)
        self.of_stamp[stamp] = self._of_name[name] = use
        self._young.append(use)
        if not self.count % LOOK_USES:
            self._look(self._young, now_s)
            self._look(self._old, now_s)
        if forecast.tick():
            self._remembered.look(forecast, now_s)
        return use

    def _before(self, path: PathUse) -> tuple[Use | None, int]:
        """The use that this one may go on with or branch off, and how deep it shares that one's path."""
        _, _, _, base, base_name, names, began, _, _ = path
        owner = self.of_stamp.get(began.stamp)
        if owner is not None and base <= owner.start:
            owner = None
        if owner is not None:
            behind = owner.tail - base
            if 0 < behind <= len(names) and names[behind - 1] == owner.name or not behind and base_name == owner.name:
                return owner, owner.tail
        whole = self._deepest(names) or (self._whole(base_name) if base else None)
        if whole is not None and whole.start < whole.tail:
            return whole, whole.tail
        return owner, base

    def _deepest(self, names: Sequence[int]) -> Use | None:
        """The use that ends with the last of `names` which any use ends with."""
        if self._of_name.keys().isdisjoint(names) and not self._remembered.any_of(names):
            return None
        return next(filter(None, map(self._whole, reversed(names))), None)

    def _whole(self, name: int) -> Use | None:
        """The use whose path ends with the page of that name."""
        use = self._of_name.get(name)
        if use is not None:
            return use
        chain = self._remembered.get(name)
        return None if chain is None else unpack(chain)

    def _go_on(self, use: Use, old: Use, shared: int, began_s: float) -> None:
        """`use` goes on from `old`, with the first `shared` pages of its path: learns from that, and ends `old`."""
        gap_s = max(began_s - old.ended_s, SIMULTANEOUS * self._between, GAP_S_MIN)
        last = math.log(gap_s)
        self.forecast.learn(old.typical, old.last, old.log_out, last)
        if not old.over:
            self.forecast.used(old, gap_s)
        self._usual = last if self._usual is None else self._usual + SMOOTH_ALL * (last - self._usual)
        use.start, use.turns, use.last = old.start, old.turns + 1, last
        use.typical = old.typical + max(SMOOTH, 1 / use.turns) * (last - old.typical)
        if old.tail == shared:
            old.run = None  # all of its pages are the new use's
        self._forget(old)

    def _pace(self, now_s: float) -> None:
        """Keeps the usual time between two requests."""
        self.count += 1
        if self.count > 1:
            self._between += max(0.01, 1 / self.count) * (now_s - self._last_s - self._between)
        self._last_s = now_s

    def _look(self, waiting: deque[Use], now_s: float) -> None:
        """Looks at some of the waiting uses: how long have they waited, are their pages still there?

        Of those that are gone, a few more: so they never outnumber the others by much.
        """
        todo = LOOK_USES
        for _ in range(min(3 * LOOK_USES, len(waiting))):
            use = waiting.popleft()
            run = use.run
            if run is None:
                continue
            age = now_s - use.ended_s
            if not use.over:
                self.forecast.waited(use, age)
            if not (run.names and use.stamp in run.stamps or self._has_pages(use)):
                self._left(use)
                continue
            (waiting if age <= 2.0 * use.scale else self._old).append(use)
            todo -= 1
            if not todo:
                return

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

    def _left(self, use: Use) -> None:
        """No page of `use` is cached: what may still be gone on with is remembered."""
        use.run = None
        self.of_stamp.pop(use.stamp, None)
        if self._of_name.get(use.name) is not use:
            return
        del self._of_name[use.name]
        forgotten = self._remembered.put(pack(use))
        if forgotten is not None:
            self.forecast.waited(unpack(forgotten), self.now() - forgotten.ended_s)

    def _forget(self, use: Use) -> None:
        """Nothing will go on with `use`; pages that it still owns stay its own."""
        use.over, use.tail = True, -1
        if self._of_name.get(use.name) is use:
            del self._of_name[use.name]
        else:
            self._remembered.take(use.name)
        if use.run is None:
            self.of_stamp.pop(use.stamp, None)

    # ------------------------------------------------------------------ hints

    def hint(self, use: Use, hint: Hint) -> None:
        """What the caller knows of the chain's future counts more than what was learned."""
        match hint:
            case Discard():
                self._said(use).discarded = True
                self._forget(use)
            case Expect(after_s):
                use.scale, use.group, use.counted, use.paused = max(after_s, GAP_S_MIN), ANNOUNCED, 0, -1
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
