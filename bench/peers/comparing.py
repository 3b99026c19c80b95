"""Asking every manager the same, in turn: rounds, the samples of each, and what was matched.

Must not know limits or reports.

A round is a whole pass of a case on each manager, in parts: the first part on each, then the second, so that all of
them have the machine as it is in the same seconds.  Who begins turns from part to part.  One process works at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bench.peers.plans import PAGE, Plan, Sizes, plan, room
from bench.peers.processes import OURS, Absent, Peer, Place
from kvkeep.replay.best import best_matches, next_uses

#: Parts of a pass, and the least requests in one: the first ones find the processor's caches as another left them.
PARTS, PART_REQUESTS_MIN = 8, 30


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked.   plan: of `plans`.   tokens, host_tokens: of the pools; no tokens: as many as the plan needs.

    variants: who is asked.   per: what times are divided by.   unit: of the result.
    """

    name: str
    plan: str
    rounds: int
    variants: tuple[str, ...]
    tokens: int = 0
    host_tokens: int = 0
    per: int = 1
    unit: str = "us"


@dataclass(slots=True)
class Found:
    """Of one manager and case.   us: by round.   matched, host: prompt tokens of a whole pass, the last one."""

    us: list[list[float]] = field(default_factory=list)
    matched: int = 0
    host: int = 0


@dataclass
class Results:
    """found, reasons: by case and variant; a reason says why there is nothing.   absent: by peer, the same.

    checksums, prompt_tokens, best: by case; best: tokens that pools of that size could match at most.
    """

    found: dict[str, dict[str, Found]] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    best: dict[str, int] = field(default_factory=dict)


class Round:
    """The managers around a table.  A peer that turns out to be absent leaves, and the others go on."""

    def __init__(
        self, places: Sequence[Place], say: Callable[[str], None], start: Callable[[Place], Peer] = Peer
    ) -> None:
        self._say = say
        self._peers: dict[str, Peer] = {}
        self._seat = {variant: place.name for place in (OURS, *places) for variant in place.variants}
        self.results = Results()
        for place in (OURS, *places):  # they load together
            try:
                self._peers[place.name] = start(place)
            except Absent as reason:
                self._leave(place.name, str(reason))
        for name in list(self._peers):
            answer = self._ask(name, do="hello")
            if answer is not None:
                self.results.versions[name] = str(answer["version"])
                say(f"{name} {answer['version']}")

    def run(self, case: Case, sizes: Sizes) -> None:
        """All rounds of a case."""
        results, work = self.results, plan(case.plan, sizes)
        tokens = case.tokens or room(case.plan, sizes)
        checksum = results.checksums[case.name] = work.checksum()
        results.prompt_tokens[case.name] = work.prompt_tokens
        results.found[case.name] = {}
        if case.plan == "w1":
            results.best[case.name] = best_possible(work, tokens + case.host_tokens)
        for name in list(self._peers):
            answer = self._ask(name, do="plan", case=case.plan, sizes=asdict(sizes))
            if answer is not None and answer["checksum"] != checksum:
                self._leave(name, f"it has other requests: their checksum is {answer['checksum']}, ours {checksum}")
        for number in range(case.rounds):
            self._pass(case, number, tokens, len(work.turns) - work.warm)

    def _pass(self, case: Case, number: int, tokens: int, requests: int) -> None:
        opened = [variant for variant in case.variants if self._open(case, variant, tokens)]
        passes = {variant: Found([[]]) for variant in opened}
        parts = max(1, min(PARTS, requests // PART_REQUESTS_MIN))
        for part in range(parts):
            first = (part + number) % max(len(opened), 1)
            for variant in opened[first:] + opened[:first]:
                until = requests * (part + 1) // parts
                answer = self._ask(self._seat[variant], do="serve", variant=variant, until=until)
                if answer is not None:
                    one = passes[variant]
                    one.us[0] += [us / case.per for us in answer["us"]]
                    one.matched += sum(answer["matched"])
                    one.host += sum(answer["host"])
        for name in list(self._peers):
            self._ask(name, do="close")
        for variant, one in passes.items():
            if self._seat[variant] in self._peers:  # else it left on the way
                found = self.results.found[case.name].setdefault(variant, Found())
                found.us += one.us
                found.matched, found.host = one.matched, one.host

    def _open(self, case: Case, variant: str, tokens: int) -> bool:
        """Whether the manager is ready; a reason is kept."""
        name = self._seat.get(variant)
        if name is None:  # not asked in this run
            return False
        answer = self._ask(name, do="open", variant=variant, tokens=tokens, host_tokens=case.host_tokens)
        if answer is None:
            return False
        if "reason" in answer:
            self.results.reasons[case.name, variant] = str(answer["reason"])
            return False
        return True

    def _ask(self, name: str, **what: Any) -> Mapping[str, Any] | None:
        """The answer; None of a peer that is not there, or leaves now."""
        peer = self._peers.get(name)
        try:
            return None if peer is None else peer.ask(what)
        except Absent as reason:
            self._leave(name, str(reason))
            return None

    def _leave(self, name: str, reason: str) -> None:
        self.results.absent[name] = reason
        self._say(f"{name} is left out: {reason}")
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.end()

    def end(self) -> None:
        """All processes end."""
        for peer in self._peers.values():
            peer.end()
        self._peers.clear()


def best_possible(work: Plan, tokens: int) -> int:
    """Prompt tokens that a pool of `tokens` could match at most, if it knew which request comes next."""
    shared = next((at for at in range(min(map(len, work.ids))) if len({int(ids[at]) for ids in work.ids}) > 1), 0)
    shared_pages = shared // PAGE
    pages, distinct = [], shared_pages
    for ids in work.ids:
        own = len(ids) // PAGE - shared_pages
        pages.append(np.concatenate([np.arange(shared_pages), np.arange(distinct, distinct + own)]).astype(np.int32))
        distinct += own
    requests = ((pages[turn.session][: turn.kv_len // PAGE], (turn.prompt_len - 1) // PAGE) for turn in work.turns)
    return best_matches(next_uses(requests, distinct), tokens // PAGE) * PAGE
