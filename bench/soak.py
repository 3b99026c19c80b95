"""kvkeep bench soak: an hour of agent sessions through the embedded engine, over two tiers: does anything grow?

Must not know how an engine runs.

    kvkeep bench soak [--smoke] [--minutes N] [--seed N] [--json FILE]

Sessions come and go at random, requests are given up before their first token and while they decode, now and then the
cache is emptied.  Between two stretches the engine runs dry, and then nothing may be held by anybody.  The report is ok
when nothing grows; README.md beside this file says what each figure means.
"""

import argparse
import gc
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench._measure import ENGINE, case_parser, lacking
from kvkeep.benching import median
from kvkeep.benching.record import work_checksum
from kvkeep.report import INTERRUPTED, JsonValue, Metric, Report

if TYPE_CHECKING:
    from kvkeep.engine.engine import Engine, Request

Row = dict[str, JsonValue]

#: Why `bench all` leaves it out.
LONG = "an hour by default: kvkeep bench soak"

MINUTES = 60.0
MODEL, PAGE_SIZE, POOL_PAGES, HOST_PAGES, SUSPEND_PAGES = "stories260k", 16, 48, 160, 32
#: Sessions that are open, requests that run or wait at most; turns of a session; tokens that a turn brings, and gets.
SESSIONS, LIVE_MAX = 24, 8
TURNS, GROWTH, NEW_TOKENS = (1, 6), (8, 48), (1, 12)
SHARED = 64
ABORT_SHARE = 0.05
#: Stretches of this many seconds; every so manieth of them ends with an empty cache, or has a line printed.
STRETCH_S, SMOKE_STRETCH_S, RESET_EVERY, SAID_EVERY = 10.0, 0.5, 7, 6
#: The first share of the stretches is not looked at: memory is being filled.
SETTLED = 0.25
#: MiB by which the resident memory may grow from the first to the last third of the rest, and by how much in an hour.
GROWTH_MIB_MAX = 8.0
DRY_S_MAX = 30.0


@dataclass(slots=True)
class Stretch:
    """What was so when the engine had run dry at the end of a stretch."""

    t_s: float
    requests: int
    aborted: int
    matched_share: float
    rss_mib: float
    objects: int
    threads: int
    files: int
    held: dict[str, int]

    def row(self) -> Row:
        return {
            "series": "soak",
            "t_s": round(self.t_s, 2),
            "requests": self.requests,
            "aborted": self.aborted,
            "matched_share": round(self.matched_share, 4),
            "rss_mib": round(self.rss_mib, 2),
            "objects": self.objects,
            "threads": self.threads,
            "files": self.files,
            **self.held,
        }


@dataclass(slots=True)
class Session:
    """ids: so far.   turns: that are still to come."""

    ids: list[int]
    turns: int
    salt: bytes


@dataclass
class Traffic:
    """Random sessions behind a few prefixes."""

    engine: "Engine"
    seed: int
    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    live: "list[tuple[Session, Request, int | None]]" = field(default_factory=list)
    digest: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.vocabulary = self.engine.loaded.vocabulary
        self.length_max = min(self.engine.loaded.positions_max, POOL_PAGES * PAGE_SIZE) - NEW_TOKENS[1]
        self.prefixes = [self._ids(SHARED) for _ in range(3)]
        self.open = [self._session() for _ in range(SESSIONS)]

    def step(self) -> None:
        """Begins requests where there is room for them, lets the engine work, and sees who has ended."""
        while len(self.live) < LIVE_MAX and self.open:
            self._begin(self.open.pop(self.rng.randrange(len(self.open))))
        self._work()

    def run_dry(self) -> None:
        """Until nothing runs and nothing is being copied."""
        until = time.monotonic() + DRY_S_MAX
        transfers = self.engine.cache.transfers
        while self.live or (transfers is not None and transfers.busy):
            if time.monotonic() > until:
                raise AssertionError(f"{len(self.live)} requests and copies have not ended in {DRY_S_MAX:.0f} s")
            self._work()

    def _work(self) -> None:
        self.engine.step()
        for _, request, abort_at in self.live:
            if abort_at is not None and not request.ended and len(request.output_ids) >= abort_at:
                self.engine.abort(request)
                self.aborted += 1
        ended = [entry for entry in self.live if entry[1].ended]
        self.live = [entry for entry in self.live if not entry[1].ended]
        for session, request, _ in ended:
            self._ended(session, request)

    def _begin(self, session: Session) -> None:
        from kvkeep.engine.engine import SamplingParams

        session.ids += self._ids(self.rng.randint(*GROWTH))
        session.turns -= 1
        new_tokens = self.rng.randint(*NEW_TOKENS)
        params = SamplingParams(max_new_tokens=new_tokens)
        request = self.engine.submit(session.ids, params, salt=session.salt)
        abort_at = self.rng.randint(0, new_tokens - 1) if self.rng.random() < ABORT_SHARE else None
        self.live.append((session, request, abort_at))
        self.requests += 1

    def _ended(self, session: Session, request: "Request") -> None:
        self.prompt_tokens += request.prompt_len
        self.matched_tokens += request.matched_len
        session.ids += request.output_ids
        if session.turns <= 0 or len(session.ids) + GROWTH[1] > self.length_max:
            session = self._session()
        self.open.append(session)

    def _session(self) -> Session:
        salt = b"tenant" if self.rng.random() < 0.2 else b""
        return Session(list(self.rng.choice(self.prefixes)), self.rng.randint(*TURNS), salt)

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]


def missing() -> str | None:
    """What is not installed here."""
    return lacking(ENGINE, "engine")


def run(arguments: list[str]) -> Report:
    """Soak, print a line a minute, return the report; Ctrl-C ends it early, with what there is."""
    from kvkeep.engine.engine import Engine, EngineConfig
    from kvkeep.engine.loader import load_model

    options = _parse(arguments)
    stretch_s = SMOKE_STRETCH_S if options.smoke else STRETCH_S
    config = EngineConfig(
        page_size=PAGE_SIZE, pool_pages=POOL_PAGES, host_pages=HOST_PAGES, suspend_pages=SUSPEND_PAGES, threads=1
    )
    engine = Engine(load_model(MODEL), config)
    traffic = Traffic(engine, options.seed)
    stretches: list[Stretch] = []
    interrupted = False
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    try:
        for stretch in soak(traffic, 60 * options.minutes, stretch_s):
            stretches.append(stretch)
            if len(stretches) % SAID_EVERY == 1:
                print(_line(stretch), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    engine.close()
    rows = [*_judge(stretches, smoke=options.smoke), *(stretch.row() for stretch in stretches)]
    for row in rows:
        if "reached" in row:
            print(f"{row['metric']} {row['median']}, {row['limit']}: {'reached' if row['reached'] else 'NOT REACHED'}")
    metrics = {str(row["metric"]): Metric(_number(row["median"]), str(row["unit"])) for row in rows if "metric" in row}
    metrics["minutes"] = Metric(round(stretches[-1].t_s / 60, 2) if stretches else 0, "minutes")
    if interrupted:
        metrics[INTERRUPTED] = Metric(1, "bool")
    ok = not interrupted and all(row.get("reached", True) for row in rows)
    return Report("bench soak", ok, metrics, rows, work_checksum("soak", options.seed, options.minutes))


def soak(traffic: Traffic, seconds: float, stretch_s: float) -> Iterator[Stretch]:
    """Stretches of traffic; after each the engine has run dry and its invariants hold."""
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        until = min(time.monotonic() + stretch_s, began + seconds)
        while time.monotonic() < until:
            traffic.step()
        traffic.run_dry()
        number += 1
        traffic.engine.cache.check_invariants()
        yield _look(traffic, time.monotonic() - began)
        if number % RESET_EVERY == 0:
            traffic.engine.cache.reset()


def _look(traffic: Traffic, t_s: float) -> Stretch:
    """held: what must be 0 when nobody runs."""
    gc.collect()
    stats = traffic.engine.cache.stats()
    gone = stats.pages_total - stats.pages_free - stats.pages_cached
    held = {
        "leases": stats.leases,
        "pages_live": stats.pages_live,
        "pages_gone": gone,
        "host_pages_gone": stats.host_pages_total - stats.host_pages_free - stats.host_pages_cached,
        "waiting": traffic.engine.waiting,
        "running": traffic.engine.running,
    }
    share = traffic.matched_tokens / traffic.prompt_tokens if traffic.prompt_tokens else 0.0
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    return Stretch(
        t_s, traffic.requests, traffic.aborted, share, _rss_mib(), len(gc.get_objects()), threads, files, held
    )


def _judge(stretches: Sequence[Stretch], *, smoke: bool) -> Iterator[Row]:
    """What may not be held, and what may not grow; a smoke run is too short for the latter."""
    held = sum(sum(map(abs, stretch.held.values())) for stretch in stretches)
    yield _limit("held_when_idle", held, "pages, leases and requests", 0, judged=True)
    settled = stretches[int(SETTLED * len(stretches)) :]
    third = max(1, len(settled) // 3)
    for name, what, most, unit in (
        ("rss_growth_mib", lambda one: one.rss_mib, GROWTH_MIB_MAX, "MiB"),
        ("objects_growth", lambda one: one.objects, 2000, "objects"),
        ("threads_growth", lambda one: one.threads, 0, "threads"),
        ("files_growth", lambda one: one.files, 0, "files"),
    ):
        grown = growth(settled[:third], settled[-third:], what)
        yield _limit(name, grown, unit, most, judged=not smoke and len(settled) >= 6)
    last = stretches[-1] if stretches else None
    for name, value, unit in (
        ("requests", last.requests if last else 0, "requests"),
        ("aborted", last.aborted if last else 0, "requests"),
        ("matched_share", round(last.matched_share, 4) if last else None, "of prompt tokens"),
    ):
        yield {"metric": name, "median": value, "unit": unit}


def growth(before: Sequence[Stretch], after: Sequence[Stretch], what: Callable[[Stretch], float]) -> float | None:
    """From the median of the first to that of the last; None without any."""
    if not before or not after:
        return None
    return round(median([what(one) for one in after]) - median([what(one) for one in before]), 2)


def _limit(name: str, value: float | None, unit: str, most: float, *, judged: bool) -> Row:
    row: Row = {"metric": name, "series": "limit", "median": value, "unit": unit, "limit": f"at most {most:g}"}
    return row | {"reached": value is not None and value <= most} if judged else row


def _number(value: JsonValue) -> int | float | None:
    return value if isinstance(value, int | float) else None


def _line(one: Stretch) -> str:
    return (
        f"{one.t_s / 60:7.1f} min  {one.requests:>9,} requests, {one.aborted:,} given up  "
        f"matched {one.matched_share:.1%}  {one.rss_mib:.1f} MiB  {one.objects:,} objects  "
        f"{one.threads} threads  {one.files} files"
    )


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = case_parser("soak")
    parser.add_argument("--minutes", type=float, metavar="N", help=f"how long ({MINUTES:g}; a smoke run 3 seconds)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sessions (0)")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = 0.05 if options.smoke else MINUTES
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes {options.minutes}: it must be a number above 0")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: it must be 0 or more")
    return options
