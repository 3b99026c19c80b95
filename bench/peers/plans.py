"""What every manager is asked: the requests of each case, the same for all, and a checksum that says so.

Must not know any manager.

    w1      the agent workload: 64 sessions behind one system prompt, 30 turns each in rotation
    match   chains of 1,000 pages, each asked again with one token more: all but that token is cached
    insert  the same chains, never seen before, into a pool with room
    evict   prompts of 1,024 tokens, never seen before, into a pool that is full of such

Each manager serves the requests one at a time.  The first `warm` of a plan are not timed.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from bench._workload import Ids, Turn, agent_workload, distinct_chains

PAGE = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """ids: token ids that requests are prefixes of.   turns: the requests; `Turn.session` is a place in `ids`."""

    ids: list[Ids]
    turns: list[Turn]
    warm: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that are timed."""
        return sum(turn.prompt_len for turn in self.turns[self.warm :])

    def checksum(self) -> str:
        """16 hexadecimal digits of every token id and every request."""
        digest = hashlib.blake2b(digest_size=8)
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, dtype="<i4").tobytes())
        turns = [(turn.session, turn.prompt_len, turn.final_len) for turn in self.turns]
        digest.update(np.array([*turns, (self.warm, 0, 0)], dtype="<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the plans.   sessions, turns: of W1.   chains, pages: of match and insert.   pool_pages, cold: of evict."""

    sessions: int = 64
    turns: int = 30
    chains: int = 8
    pages: int = 1000
    pool_pages: int = 8192
    cold: int = 256


SMOKE = Sizes(sessions=4, turns=3, chains=2, pages=20, pool_pages=128, cold=16)
COLD_PAGES = 8


def plan(case: str, sizes: Sizes) -> Plan:
    """The requests of a case."""
    if case == "w1":
        workload = agent_workload(sessions=sizes.sessions, turns=sizes.turns)
        return Plan(workload.ids, workload.turns)
    if case in ("match", "insert"):
        ids = [np.append(chain, chain[0]) for chain in distinct_chains(sizes.chains, sizes.pages, PAGE, sizes.pages)]
        once = [Turn(number, len(chain), len(chain)) for number, chain in enumerate(ids)]
        return Plan(ids, once * 3, warm=len(once)) if case == "match" else Plan(ids, once)
    if case == "evict":
        filling = sizes.pool_pages // COLD_PAGES
        # One token more than is kept: the last one has no KV.
        chains = distinct_chains(filling + sizes.cold, COLD_PAGES + 1, PAGE, sizes.pool_pages)
        ids = [chain[: COLD_PAGES * PAGE + 1] for chain in chains]
        return Plan(ids, [Turn(number, len(chain), len(chain)) for number, chain in enumerate(ids)], warm=filling)
    raise ValueError(f"no plan for {case!r}")


def room(case: str, sizes: Sizes) -> int:
    """Tokens of the pool that a case has, where the case says it (W1 is run in pools of several sizes)."""
    if case in ("match", "insert"):
        return (sizes.chains + 1) * (sizes.pages + 1) * PAGE
    # A page more than what is cached, for the token that is not: of every request.
    return (sizes.pool_pages + 1) * PAGE
