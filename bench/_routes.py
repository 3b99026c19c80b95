"""What is routed, and by which policy: recorded traces, the same behind a hot prefix, and prompts that never come back.

Must not simulate, nor judge.

Traces are those of the reference material.  Where a run of many replicas needs more sessions than a trace has, it is
taken several times over: what all of its sessions share stays, and behind it each copy has token ids of its own.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from bench._replicas import Policy
from kvkeep.index.names import Int32s, hash64
from kvkeep.replay.formats import read_trace
from kvkeep.replay.pages import Pages
from kvkeep.replay.trace import Request, Trace
from kvkeep.routing import Router, RoutingSettings
from kvkeep.routing.rank import ranked
from kvkeep.routing.shared import DEPTH_MAX

HOT_TOKENS = 8_192
VOCABULARY = 40_000
#: Of prompts that never come back: how many, tokens behind the hot prefix or without it, tokens that are answered.
SINGLES, TAILS, LONE, ANSWER = 8_000, (256, 4_096), (256, 8_192), 200


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sessions to be routed.

    think_s: mean of the seconds between a session's turns where they are drawn; None: as recorded.
    """

    name: str
    pages: Pages
    think_s: float | None

    @property
    def sessions(self) -> Sequence[Sequence[Request]]:
        return [session for session in self.pages.trace.sessions if session]

    @property
    def longest_tokens(self) -> int:
        """Of its sessions."""
        return max(request.final_len for session in self.sessions for request in session)


def recorded(
    folder: Path, file: str, page_size: int, *, think_s: float | None, sessions: int | None = None, times: int = 1
) -> Traffic:
    """A trace, its first `sessions` sessions, `times` times over."""
    trace = _first(read_trace(folder / file), sessions)
    return Traffic(file.partition(".")[0], Pages(_times(trace, times) if times > 1 else trace, page_size), think_s)


def behind_hot_prefix(traffic: Traffic, seed: int = 1) -> Traffic:
    """The same where every second session, drawn at random, begins with one more prefix of 8,192 tokens."""
    trace, hot = traffic.pages.trace, _ids(np.random.default_rng(seed), HOT_TOKENS)
    chains, sessions = list(trace.chains), []
    chosen = set(random.Random(seed).sample(range(len(trace.sessions)), len(trace.sessions) // 2))
    for number, session in enumerate(trace.sessions):
        if number in chosen:
            for chain in {request.chain for request in session}:
                chains[chain] = np.concatenate([hot, chains[chain]])
            session = [_longer(request) for request in session]
        sessions.append(session)
    made = Trace(f"{trace.name}, hot", trace.digest, None, chains, sessions, trace.clock)
    return Traffic(f"{traffic.name} behind a hot prefix", Pages(made, traffic.pages.page_size), traffic.think_s)


def singles(kind: str, requests: int = SINGLES, seed: int = 3) -> Traffic:
    """Prompts of one turn: half of them, drawn at random, begin with a prefix of 8,192 tokens; the rest share nothing.

    kind: what follows the prefix: "tails" of their own; "same" tokens, so that all of these prompts are equal.
    """
    rng = np.random.default_rng(seed)
    hot, same = _ids(rng, HOT_TOKENS), _ids(rng, 100)
    chains: list[Int32s] = []
    for lone in rng.permutation(requests) % 2:
        if lone:
            chains.append(_ids(rng, int(rng.integers(*LONE))))
        else:
            chains.append(np.concatenate([hot, _ids(rng, int(rng.integers(*TAILS))) if kind == "tails" else same]))
    sessions = [[Request(n, n, len(ids), len(ids) + ANSWER, len(ids))] for n, ids in enumerate(chains)]
    name = {"tails": "one hot prefix, single turns", "same": "one hot prompt, single turns"}[kind]
    return Traffic(name, Pages(Trace(name, name, None, chains, sessions, "none"), 128), 1.0)


def _ids(rng: np.random.Generator, length: int) -> Int32s:
    return rng.integers(0, VOCABULARY, length).astype(np.int32)


def _longer(request: Request) -> Request:
    more = HOT_TOKENS
    return request._replace(
        prompt_len=request.prompt_len + more, final_len=request.final_len + more, known_len=request.known_len + more
    )


def _first(trace: Trace, sessions: int | None) -> Trace:
    chosen = [session for session in trace.sessions if session][:sessions]
    used = {chain: number for number, chain in enumerate(sorted({r.chain for one in chosen for r in one}))}
    kept = [[r._replace(session=n, chain=used[r.chain]) for r in session] for n, session in enumerate(chosen)]
    return Trace(trace.name, trace.digest, trace.block, [trace.chains[c] for c in used], kept, trace.clock)


def _times(trace: Trace, times: int) -> Trace:
    shortest = min(map(len, trace.chains))
    equal = np.all([chain[:shortest] == trace.chains[0][:shortest] for chain in trace.chains], axis=0)
    shared = shortest if equal.all() else int(equal.argmin())
    top = 1 + max(int(chain.max()) for chain in trace.chains if len(chain))
    chains, sessions = list[Int32s](), list[list[Request]]()
    for number in range(times):
        base = len(chains)
        for chain in trace.chains:
            own = chain.copy()
            own[shared:] += number * top
            chains.append(own)
        for session in trace.sessions:
            sessions.append([r._replace(session=len(sessions), chain=r.chain + base) for r in session])
    return Trace(trace.name, f"{trace.digest} {times}", trace.block, chains, sessions, trace.clock)


# ---------------------------------------------------------------------- policies


def prefix(pages: Pages, replicas: int, settings: RoutingSettings | None = None) -> Policy:
    """kvkeep's router."""
    names = [f"http://10.0.0.{number}:8000" for number in range(replicas)]
    router, number_of = Router(names, settings), {name: number for number, name in enumerate(names)}
    size, root = pages.page_size, pages.identity.name

    def choose(request: Request, queues: Sequence[int]) -> int:
        full = request.prompt_len // size
        known = pages.names(request.chain, 0, min(full, DEPTH_MAX))
        route = router.route_names(known, _rest(pages, request, full), root, dict(zip(names, queues, strict=True)))
        return number_of[route.replica]

    return choose


def _rest(pages: Pages, request: Request, full: int) -> bytes:
    """What of a prompt is behind its full pages.  Block traces do not say: there every session has its own."""
    if pages.trace.block is not None:
        return request.session.to_bytes(4, "little")
    return pages.trace.chains[request.chain][full * pages.page_size : request.prompt_len].tobytes()


def at_random(seed: int = 1) -> Policy:
    """A replica drawn for each request: what the engine of the RFC does today."""
    rng = random.Random(seed)
    return lambda request, queues: rng.randrange(len(queues))


def round_robin() -> Policy:
    """One after the other."""
    turn = count()
    return lambda request, queues: next(turn) % len(queues)


def least_loaded(seed: int = 5) -> Policy:
    """Where the fewest wait; of equal ones one at random."""
    rng = random.Random(seed)

    def choose(request: Request, queues: Sequence[int]) -> int:
        fewest = min(queues)
        return rng.choice([number for number, queue in enumerate(queues) if queue == fewest])

    return choose


def by_session(replicas: int) -> Policy:
    """Consistent hashing of a session id, which the client would have to send."""
    names = [f"http://10.0.0.{number}:8000" for number in range(replicas)]
    number_of = {name: number for number, name in enumerate(names)}
    return lambda request, queues: number_of[ranked(hash64(request.session.to_bytes(8, "little"), 0), names)[0]]


#: Without kvkeep's, which needs the pages.
OTHERS: dict[str, Callable[[int], Policy]] = {
    "random": lambda replicas: at_random(),
    "round robin": lambda replicas: round_robin(),
    "least loaded": lambda replicas: least_loaded(),
    "session id": by_session,
}
