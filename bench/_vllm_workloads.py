"""Workloads for servers: recorded agent sessions in rotation, random prompts, and what a perfect cache would match.

Must not know servers.  Every prompt is fixed beforehand, so that all configurations are asked the same.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkeep.errors import BadInput
from kvkeep.replay.formats import read_trace
from kvkeep.replay.trace import Request, Trace

TRACE = "tau_retail_200"
VOCABULARY = 49_152
SPECIAL_IDS = 20  # the tokenizer's special tokens come first: random prompts leave them out


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its session, the number of its turn there, its prompt as token ids."""

    session: int
    turn: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are sent, one at a time, `new_tokens` generated for each."""

    name: str
    asks: tuple[Ask, ...]
    new_tokens: int = 16

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.asks)

    def digest(self) -> str:
        """Of all that is sent, 16 hexadecimal digits."""
        content = hashlib.sha256(str((self.name, self.new_tokens)).encode())
        for ask in self.asks:
            content.update(np.asarray((ask.session, len(ask.prompt), *ask.prompt), dtype=np.int32).tobytes())
        return content.hexdigest()[:16]

    def blocks(self, block_size: int) -> int:
        """The working set: different full blocks of all final sequences, and a partial one a session."""
        last = {ask.session: ask for ask in self.asks}
        whole = {name for ask in last.values() for name in block_names(ask.prompt, block_size)}
        return len(whole) + len(last)

    def blocks_min(self, block_size: int) -> int:
        """What the longest request needs, and vLLM's null block."""
        return 1 + max(-(-(len(ask.prompt) + self.new_tokens) // block_size) for ask in self.asks)


def block_names(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """A name of each full block that stands for everything up to its end."""
    ids, running, names = np.asarray(tokens, dtype=np.int32), hashlib.sha256(), []
    for end in range(block_size, len(ids) + 1, block_size):
        running.update(ids[end - block_size : end].tobytes())
        names.append(running.digest())
    return names


def ceiling(asks: Iterable[Ask], block_size: int) -> list[int]:
    """Prompt tokens of each request that a cache which never evicts would match, in the order given.

    Full blocks of earlier prompts; at least one token is computed always, as vLLM does.  What was generated is not
    counted: the next turn's prompt is the recorded one, so it goes on otherwise.
    """
    seen: set[bytes] = set()
    out = []
    for ask in asks:
        names = block_names(ask.prompt, block_size)
        matched = 0
        for name in names[: (len(ask.prompt) - 1) // block_size]:
            if name not in seen:
                break
            matched += block_size
        seen.update(names)
        out.append(matched)
    return out


@dataclass(frozen=True, slots=True)
class Shape:
    """Which turns of which sessions: the first so many sessions that have `turns` turns, `stride` apart, whose last
    prompt has at most `prompt_max` tokens and at least `prompt_min`."""

    sessions: int
    turns: int
    stride: int
    prompt_min: int
    prompt_max: int


SHAPES = {
    "8x4": Shape(sessions=8, turns=4, stride=4, prompt_min=4000, prompt_max=6000),
    "6x8": Shape(sessions=6, turns=8, stride=2, prompt_min=5000, prompt_max=6500),
}
CLIENTS_SHAPE = Shape(sessions=20, turns=3, stride=3, prompt_min=1400, prompt_max=2600)
SMOKE = "smoke"
SMOKE_SHAPE = Shape(sessions=2, turns=2, stride=1, prompt_min=0, prompt_max=2000)
SMOKE_PROMPT, SMOKE_GROWTH = 600, 300


def rotation(name: str, traces: Path) -> Workload:
    """A named rotation; `smoke` needs no trace.   Raises `BadInput` where the name or the trace is not there."""
    if name == SMOKE:
        return Workload(SMOKE, tuple(_rotated(_made_up(SMOKE_SHAPE))))
    if name not in SHAPES:
        raise BadInput(f"--workload {name}: there is no such rotation; known: {', '.join((*SHAPES, SMOKE))}")
    source = traces / f"{TRACE}.tokens.u16.xz"
    if not source.is_file():
        raise BadInput(f"--traces {traces}: there is no {source.name}; name the folder of recorded traces")
    return Workload(name, tuple(_rotated(_recorded(read_trace(source), SHAPES[name]))))


def clients(traces: Path) -> Workload:
    """20 sessions of 3 turns, for 20 clients at once; made up where there is no trace."""
    source = traces / f"{TRACE}.tokens.u16.xz"
    made = _recorded(read_trace(source), CLIENTS_SHAPE) if source.is_file() else _made_up(CLIENTS_SHAPE)
    return Workload("concurrent", tuple(_rotated(made)))


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Ids that no other seed has in this order."""
    rng = np.random.default_rng(seed)
    return tuple(int(token) for token in rng.integers(SPECIAL_IDS, VOCABULARY, length))


def _recorded(trace: Trace, shape: Shape) -> list[list[tuple[int, ...]]]:
    """Prompts by session and turn, as they were recorded: all sessions begin with the same 1,250 tokens."""
    out: list[list[tuple[int, ...]]] = []
    for requests in trace.sessions:
        chosen: list[Request] = requests[:: shape.stride][: shape.turns]
        if len(chosen) < shape.turns or not shape.prompt_min <= chosen[-1].prompt_len <= shape.prompt_max:
            continue
        out.append([tuple(trace.chains[r.chain][: r.prompt_len].tolist()) for r in chosen])
        if len(out) == shape.sessions:
            return out
    raise BadInput(f"{trace.name} has {len(out)} sessions of this shape, not {shape.sessions}")


def _made_up(shape: Shape) -> list[list[tuple[int, ...]]]:
    """Random sessions of a few hundred tokens that grow."""
    longest = SMOKE_PROMPT + SMOKE_GROWTH * (shape.turns - 1)
    sessions = [random_prompt(longest, seed=1000 + session) for session in range(shape.sessions)]
    return [[ids[: SMOKE_PROMPT + SMOKE_GROWTH * turn] for turn in range(shape.turns)] for ids in sessions]


def _rotated(sessions: Sequence[Sequence[tuple[int, ...]]]) -> Iterable[Ask]:
    """A turn of each session, then the next turn of each."""
    for turn in range(len(sessions[0])):
        for session, prompts in enumerate(sessions):
            yield Ask(session, turn, prompts[turn])
