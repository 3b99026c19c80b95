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

from kvkeep.index.forecast import ANNOUNCED, GONE, LOW, PER_OCTAVE, Forecast, bin_of, class_of
from kvkeep.index.hints import Discard, Expect, Hint, Pin
from kvkeep.index.run import Run

#: Remembered after their last page has left: at most this share of the pool's pages, and at least so many.
REMEMBERED_SHARE, REMEMBERED_MIN = 1 / 64, 64
#: The least weight of the newest gap in a chain's smoothed gap, and of a chain's gap in the usual gap of all.
SMOOTH, SMOOTH_ALL = 0.3, 0.02
#: Before any gap is known: half a minute (log of seconds).
LOG_GAP = math.log(30.0)
#: The shortest gap that is told apart from none, in seconds.
GAP_S_MIN = 1e-6

FOREVER = math.inf
#: More than keeping any page costs that may still be used, in seconds.
GONE_COST = 1e12
#: Below this age over scale the forecast has one bin.
YOUNG = 2.0**LOW
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
    """

    stamp: int
    run: Run
    depth: int
    base: int
    base_name: int
    names: Sequence[int]
    began: Began
    out: int


class Use:
    """One use of a path, from the end of its request on.

    ended_s, scale: when that was, and in how many seconds the next one is expected.   group: its class in the forecast.
    typical, last, out, turns: what the forecast learns from, see there; `turns` is how often the chain went on.
    start, tail, name: where the chain's own pages begin, the depth behind its last page, and that page's name.
    counted: up to which bin the forecast knows that it waited.   over: a later use went on, or it is gone.
    run: where its pages hang, or hung; None when they have left.   hinted: `discarded`, or pinned until `leave_s`.
    worth: seconds of recomputation that a page saves, in those of a KV page.
    """

    __slots__ = (
        "counted", "discarded", "ended_s", "group", "hinted", "last", "leave_s", "name", "out", "over", "run", "scale",
        "stamp", "start", "tail", "turns", "typical", "worth",
    )  # fmt: skip

    def __init__(self, stamp: int, run: Run, start: int, tail: int, name: int, ended_s: float) -> None:
        self.stamp = stamp
        self.run: Run | None = run
        self.start = start
        self.tail = tail
        self.name = name
        self.ended_s = ended_s
        self.typical = self.last = 0.0
        self.out = self.turns = self.group = 0
        self.scale = 1.0
        self.counted = 0
        self.over = self.hinted = self.discarded = False
        self.leave_s = -FOREVER
        self.worth = 1.0


class Uses:
    """The uses whose pages are cached, and of the others the latest ones.

    pages: how many the cache holds, which bounds what is remembered.   now: a clock, in seconds.
    """

    def __init__(self, pages: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.forecast = Forecast()
        self.of_stamp: dict[int, Use] = {}
        self._of_name: dict[int, Use] = {}
        self._remembered: dict[Use, None] = {}
        self._remembered_max = max(REMEMBERED_MIN, int(pages * REMEMBERED_SHARE))
        self._young: deque[Use] = deque()
        self._old: deque[Use] = deque()
        self._usual: float | None = None
        self._between = 1.0
        self.count = 0
        self._last_s = 0.0

    def clear(self) -> None:
        """No page is cached any more; what was learned stays."""
        for known in (self.of_stamp, self._of_name, self._remembered):
            known.clear()
        self._young.clear()
        self._old.clear()

    # ------------------------------------------------------------------ learning

    def used(self, path: PathUse) -> Use:
        """A request has ended."""
        now_s, began_s, forecast = self.now(), path.began.now_s, self.forecast
        self._pace(began_s)
        old, depth = self._before(path)
        last = path.depth - path.base
        name = path.names[last - 1] if last > 0 else path.base_name
        use = Use(path.stamp, path.run, depth, path.depth, name, now_s)
        use.out = path.out
        use.typical = use.last = self._usual if self._usual is not None else LOG_GAP
        if old is not None:
            if old.tail - depth <= depth - old.start:
                self._go_on(use, old, depth, began_s)
            else:  # a fork: it begins with the rhythm of the chain it left
                old.start = depth
                use.turns = old.turns
                if old.turns:
                    use.typical = use.last = old.typical
        use.group = class_of(use.turns)
        use.scale = forecast.predict(use.typical, use.last, use.out)
        self.of_stamp[path.stamp] = use
        self._of_name[name] = use
        self._young.append(use)
        self._look(now_s)
        forecast.tick()
        return use

    def _before(self, path: PathUse) -> tuple[Use | None, int]:
        """The use that this one may go on with or branch off, and how deep it shares that one's path."""
        of_name, names = self._of_name, path.names
        known = next(filter(of_name.__contains__, reversed(names)), None)
        if known is None and path.base_name in of_name and path.base:
            known = path.base_name
        if known is not None:
            old = of_name[known]
            if old.start < old.tail:
                return old, old.tail
        owner = self.of_stamp.get(path.began.stamp)
        if owner is None or path.base <= owner.start:
            return None, path.base
        return owner, path.base

    def _go_on(self, use: Use, old: Use, depth: int, began_s: float) -> None:
        """`use` goes on from `old`, with the first `depth` pages of its path: learns from that, and ends `old`."""
        gap_s = max(began_s - old.ended_s, 0.1 * self._between, GAP_S_MIN)
        last = math.log(gap_s)
        self.forecast.learn(old.typical, old.last, old.out, last)
        if not old.over:
            self.forecast.used(old.group, old.counted, int(bin_of(gap_s / old.scale)))
        self._usual = last if self._usual is None else self._usual + SMOOTH_ALL * (last - self._usual)
        use.start, use.turns, use.last = old.start, old.turns + 1, last
        use.typical = old.typical + max(SMOOTH, 1 / use.turns) * (last - old.typical)
        if old.tail == depth:
            old.run = None  # all of its pages are the new use's
        self._forget(old)

    def _pace(self, now_s: float) -> None:
        """Keeps the usual time between two requests."""
        self.count += 1
        if self.count == 1:
            self._between = GAP_S_MIN
        else:
            self._between += max(0.01, 1 / self.count) * (now_s - self._last_s - self._between)
        self._last_s = now_s

    def _look(self, now_s: float) -> None:
        """Looks at a few of the waiting uses: how long have they waited, are their pages still there?

        One more where one was gone: so those that are gone never outnumber the others by much.
        """
        for waiting in (self._young, self._old):
            if self._look_at_next(waiting, now_s):
                self._look_at_next(waiting, now_s)
        while len(self._remembered) > self._remembered_max:
            self._forget(next(iter(self._remembered)))

    def _look_at_next(self, waiting: deque[Use], now_s: float) -> bool:
        """Whether the next one that had not been ended is gone."""
        while waiting:
            use = waiting.popleft()
            if use.over and use.run is None:
                continue
            if not self._is_alive(use):
                return True
            age = now_s - use.ended_s
            if not use.over and self._count_waits(use, age) >= GONE:
                use.over = True
            (self._old if age > 2.0 * use.scale else waiting).append(use)
            return False
        return False

    def _count_waits(self, use: Use, age: float) -> int:
        """Tells the forecast how long `use` has waited by now, and returns that as a bin."""
        at = int(bin_of(age / use.scale))
        if at > use.counted:
            self.forecast.waited(use.group, use.counted, at)
            use.counted = at
        return at

    def _is_alive(self, use: Use) -> bool:
        """Whether anything of `use` is cached, or it may still be gone on with."""
        if use.run is None:
            return use in self._remembered
        if self._has_pages(use):
            return True
        use.run = None
        self.of_stamp.pop(use.stamp, None)
        if self._of_name.get(use.name) is use and not use.discarded:
            self._remembered[use] = None
            return True
        return False

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

    def _forget(self, use: Use) -> None:
        """Nothing will go on with `use`; pages that it still owns stay its own."""
        use.over, use.tail = True, -1
        if self._of_name.get(use.name) is use:
            del self._of_name[use.name]
        self._remembered.pop(use, None)
        if use.run is None:
            self.of_stamp.pop(use.stamp, None)

    # ------------------------------------------------------------------ hints

    def hint(self, use: Use, hint: Hint) -> None:
        """What the caller knows of the chain's future counts more than what was learned."""
        match hint:
            case Discard():
                use.discarded = use.hinted = True
                self._forget(use)
            case Expect(after_s):
                use.scale, use.group, use.counted = max(after_s, GAP_S_MIN), ANNOUNCED, 0
            case Pin(for_s):
                use.leave_s, use.hinted = self.now() + for_s, True

    # ------------------------------------------------------------------ what keeping a page costs

    def cost(self, stamp: int, run: Run | None, now_s: float) -> float:
        """What keeping a page of `run`, last used at `stamp`, costs for each hit: seconds of a page's place."""
        use = self.of_stamp.get(stamp)
        if use is None:
            return FOREVER
        age = now_s - use.ended_s
        if use.hinted:
            if now_s < use.leave_s:
                return -FOREVER
            if use.discarded and (run is None or run.end > use.start):
                return FOREVER
        scale = use.scale
        row = self.forecast.table[use.group]
        if age <= scale * YOUNG:
            return scale * row[0] / use.worth
        u = (log2(age / scale) - LOW) * PER_OCTAVE
        b = int(u)
        if b >= GONE:  # oldest first
            return GONE_COST + age
        low = row[b]
        return scale * (low + (u - b) * (row[b + 1] - low)) / use.worth
