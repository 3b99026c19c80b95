"""A manager in a process of its own, and the lines of JSON by which it is asked.  One works at a time: who asks waits.

Must not know any manager, nor what its figures mean.

    {"do": "hello"}                                                     {"version": ..., "variants": [...]}
    {"do": "plan", "case": "w1", "sizes": {...}}                        {"checksum": ..., "requests": ...}
    {"do": "open", "variant": ..., "tokens": ..., "host_tokens": ...}   {} when the untimed requests are served
    {"do": "serve", "variant": ..., "until": 192}                       {"us": [...], "matched": [...], "host": [...]}
    {"do": "close"}                                                     {} when all that are open are closed

What cannot be done is answered with {"reason": "..."}: one line, and the process goes on.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from bench._workload import Ids, Turn
from bench.peers.plans import Plan, Sizes, plan

Answer = dict[str, Any]


class Cannot(Exception):
    """What a manager has no means for, in one line."""


class Manager(Protocol):
    """An empty cache with its pool."""

    def prepare(self, ids: Any, turn: Turn) -> Any:
        """What a request brings, in the form that this manager takes.  Not timed.   ids: made by `Adapter.form`."""

    def serve(self, prepared: Any) -> tuple[int, int]:
        """A whole request, one live at a time: names, match and pin, room for all of it, commit, release.

        Returns the prompt tokens that it matched where the model reads, and those that came from host memory.
        """

    def close(self) -> None:
        """Lets go of everything."""


class Adapter(Protocol):
    """A package's managers."""

    @property
    def version(self) -> str:
        """The package's."""

    @property
    def variants(self) -> Sequence[str]:
        """The managers that it has."""

    def form(self, ids: Ids) -> Any:
        """Token ids in the form that requests of this package have."""

    def open(self, variant: str, tokens: int, host_tokens: int) -> Manager:
        """An empty cache of so many tokens, above one in host memory (0: none).  Raises `Cannot`."""


@dataclass
class Desk:
    """The child's side: one plan, and for each variant that is open its manager and how far it has come."""

    adapter: Adapter
    plan: Plan | None = None
    forms: list[Any] = field(default_factory=list)
    managers: dict[str, Manager] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def answer(self, asked: Mapping[str, Any]) -> Answer:
        """Does what is asked."""
        what = asked["do"]
        if what == "hello":
            return {"version": self.adapter.version, "variants": list(self.adapter.variants)}
        if what == "plan":
            self.plan = plan(str(asked["case"]), Sizes(**asked["sizes"]))
            self.forms = [self.adapter.form(ids) for ids in self.plan.ids]
            return {"checksum": self.plan.checksum(), "requests": len(self.plan.turns) - self.plan.warm}
        if what == "close":
            return self._close()
        assert self.plan is not None
        variant = str(asked["variant"])
        if what == "open":
            self.managers[variant] = self.adapter.open(variant, int(asked["tokens"]), int(asked["host_tokens"]))
            self.done[variant] = 0
            self._serve(self.plan, variant, self.plan.warm)
            return {}
        if what == "serve":
            return self._serve(self.plan, variant, self.plan.warm + int(asked["until"]))
        raise ValueError(f"asked to {what!r}")

    def _close(self) -> Answer:
        for manager in self.managers.values():
            manager.close()
        self.managers.clear()
        self.done.clear()
        gc.unfreeze()
        return {}

    def _serve(self, plan: Plan, variant: str, until: int) -> Answer:
        """The requests up to `until`, each timed.   us: microseconds.   matched, host: tokens."""
        manager, clock = self.managers[variant], time.perf_counter_ns
        us, matched, host = list[float](), list[int](), list[int]()
        gc.collect()
        gc.freeze()  # what stands now is not walked; what a request makes is
        for turn in plan.turns[self.done[variant] : until]:
            prepared = manager.prepare(self.forms[turn.session], turn)
            began = clock()
            found = manager.serve(prepared)
            us.append(round((clock() - began) / 1e3, 3))
            matched.append(found[0])
            host.append(found[1])
        self.done[variant] = until
        return {"us": us, "matched": matched, "host": host}


def serve(adapter: Adapter, answers: IO[str]) -> None:
    """Answers what comes on the standard input, until it ends."""
    desk = Desk(adapter)
    for line in sys.stdin:
        try:
            answer = desk.answer(json.loads(line))
        except Cannot as reason:
            answer = {"reason": str(reason)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answers_apart() -> IO[str]:
    """The standard output, for answers alone: what packages print goes to the standard error from now on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out
