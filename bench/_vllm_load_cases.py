"""Load cases for servers: prefixes that come again, whole prompts that come again, conversations of a timed trace.

Must not know servers or how fast they are: whoever runs a case says at which rate its requests come.

The first two have the idea of vLLM's bench of its prefix caching, the third that of SGLang's replay of Mooncake traces.
Every prompt is token ids from a seed, fixed beforehand: all configurations are asked the same.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench._load import Arrivals, poisson, recorded
from bench._vllm_workloads import SPECIAL_IDS, VOCABULARY, Ask, block_names, ceiling
from kvkeep.errors import BadInput
from kvkeep.replay.formats import BLOCK_MOONCAKE, read_trace
from kvkeep.replay.trace import Request, Trace

MOONCAKE = "mooncake_conversation.jsonl.gz"
SYNTHETIC = "mooncake_synthetic.jsonl"


@dataclass(frozen=True, slots=True)
class LoadCase:
    """Requests in the order in which they are due.

    new_tokens: to generate for each.   times_s: when each came where that was recorded; None: they come by chance.
    what: where they are from, in words.
    """

    name: str
    what: str
    asks: tuple[Ask, ...]
    new_tokens: tuple[int, ...]
    times_s: tuple[float, ...] | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.asks)

    def digest(self) -> str:
        """Of all that is sent, 16 hexadecimal digits."""
        content = hashlib.sha256(str((self.name, self.new_tokens, self.times_s)).encode())
        for ask in self.asks:
            content.update(np.asarray((ask.session, len(ask.prompt), *ask.prompt), dtype=np.int32).tobytes())
        return content.hexdigest()[:16]

    def blocks(self, block_size: int) -> int:
        """The working set: different full blocks of all prompts."""
        return len({name for ask in self.asks for name in block_names(ask.prompt, block_size)})

    def blocks_min(self, block_size: int) -> int:
        """What the longest request needs, and vLLM's null block."""
        lengths = (len(ask.prompt) + new for ask, new in zip(self.asks, self.new_tokens, strict=True))
        return 1 + max(-(-length // block_size) for length in lengths)

    def ceiling_share(self, block_size: int) -> float:
        """Of prompt tokens, what a cache would match that never evicts and has each prompt before the next one."""
        return sum(ceiling(self.asks, block_size)) / self.prompt_tokens

    def arrivals(self, per_s: float, seed: int) -> Arrivals:
        """As recorded, at another speed; else Poisson."""
        return poisson(len(self.asks), per_s, seed) if self.times_s is None else recorded(self.times_s, per_s)


# ---------------------------------------------------------------------- what is asked again


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """`prefixes` of `prefix_tokens` each, each asked `repeats` times, with suffixes of `suffix_min` to `suffix_max`."""

    prefixes: int
    repeats: int
    prefix_tokens: int
    suffix_min: int
    suffix_max: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class SampledShape:
    """`prompts` whose lengths are drawn between `tokens_min` and `tokens_max`, each asked `repeats` times as it is."""

    prompts: int
    repeats: int
    tokens_min: int
    tokens_max: int
    new_tokens: int


def prefix_caching(shape: PrefixShape, seed: int) -> LoadCase:
    """Shared prefixes with suffixes of random lengths, all repeats of all prefixes shuffled."""
    rng = np.random.default_rng([seed, 1])
    prefixes = [_ids(rng, shape.prefix_tokens) for _ in range(shape.prefixes)]
    suffixes = rng.integers(shape.suffix_min, shape.suffix_max + 1, (shape.repeats, shape.prefixes))
    prompts = [
        (number, prefix + _ids(rng, int(suffixes[repeat, number])))
        for repeat in range(shape.repeats)
        for number, prefix in enumerate(prefixes)
    ]
    what = f"{shape.prefixes} prefixes of {shape.prefix_tokens} random tokens, each {shape.repeats} times, shuffled"
    return _shuffled("prefix_caching", what, prompts, shape.new_tokens, rng)


def prefix_sampled(shape: SampledShape, seed: int) -> LoadCase:
    """Prompts of sampled lengths (their logarithms uniform), each asked several times, shuffled."""
    rng = np.random.default_rng([seed, 2])
    lengths = np.exp(rng.uniform(np.log(shape.tokens_min), np.log(shape.tokens_max), shape.prompts)).astype(int)
    different = [_ids(rng, int(length)) for length in lengths]
    prompts = [(number, prompt) for _ in range(shape.repeats) for number, prompt in enumerate(different)]
    what = f"{shape.prompts} prompts of {shape.tokens_min} to {shape.tokens_max} tokens, each {shape.repeats} times"
    return _shuffled("prefix_sampled", f"{what}, shuffled", prompts, shape.new_tokens, rng)


def _shuffled(
    name: str, what: str, prompts: Sequence[tuple[int, tuple[int, ...]]], new_tokens: int, rng: np.random.Generator
) -> LoadCase:
    asks: list[Ask] = []
    turns: dict[int, int] = {}
    for at in rng.permutation(len(prompts)):
        session, prompt = prompts[at]
        asks.append(Ask(session, turns.get(session, 0), prompt))
        turns[session] = turns.get(session, 0) + 1
    return LoadCase(name, what, tuple(asks), (new_tokens,) * len(asks))


# ---------------------------------------------------------------------- conversations of a Mooncake trace


@dataclass(frozen=True, slots=True)
class MooncakeShape:
    """Which conversations of a trace, and how they are made smaller: a model on a CPU cannot serve them as they are.

    conversations: the first that have as many rounds as `rounds` within the first `within_s` seconds.
    prompt_max: tokens as recorded, of those rounds.
    block_tokens: what stands for a block of 512.   output_over: so many recorded output tokens are one.
    """

    conversations: int
    rounds: int
    prompt_max: int
    within_s: float
    block_tokens: int
    output_over: int
    new_tokens_max: int


def mooncake_replay(trace: Trace, shape: MooncakeShape, seed: int) -> LoadCase:
    """The conversations' requests in the order in which they came, equal tokens for equal block ids.

    Requests whose first two blocks are the same are a conversation.  Every round's prompt is the recorded one: the
    model's own answers are not in it.  Raises `BadInput` where the trace has too few such conversations.
    """
    chosen = _conversations(trace, shape)
    numbered = sorted(
        ((request, session, turn) for session, rounds in enumerate(chosen) for turn, request in enumerate(rounds)),
        key=lambda one: (one[0].time_s, one[0].session),
    )
    asks = tuple(Ask(session, turn, _prompt(trace, request, shape, seed)) for request, session, turn in numbered)
    outputs = (request.final_len - request.prompt_len for request, _, _ in numbered)
    new_tokens = tuple(min(max(2, output // shape.output_over), shape.new_tokens_max) for output in outputs)
    what = f"{trace.name}: {shape.conversations} conversations of {shape.rounds} rounds, blocks of 512 tokens as "
    what += f"{shape.block_tokens}, an output token for {shape.output_over}"
    return LoadCase("mooncake_replay", what, asks, new_tokens, tuple(one[0].time_s for one in numbered))


def _conversations(trace: Trace, shape: MooncakeShape) -> list[list[Request]]:
    found: dict[tuple[int, int], list[Request]] = {}
    requests = [request for session in trace.sessions for request in session]
    began = min(request.time_s for request in requests)
    for request in sorted(requests, key=lambda one: one.time_s):
        if request.time_s - began > shape.within_s:
            break
        chain = trace.chains[request.chain]
        if len(chain) >= 2:
            found.setdefault((int(chain[0]), int(chain[1])), []).append(request)
    whole = [rounds[: shape.rounds] for rounds in found.values() if len(rounds) >= shape.rounds]
    fitting = [rounds for rounds in whole if max(request.prompt_len for request in rounds) <= shape.prompt_max]
    if len(fitting) < shape.conversations:
        raise BadInput(
            f"{trace.name}: its first {shape.within_s:g} s have {len(fitting)} conversations of {shape.rounds} rounds "
            f"and at most {shape.prompt_max} tokens; {shape.conversations} are needed"
        )
    return fitting[: shape.conversations]


def _prompt(trace: Trace, request: Request, shape: MooncakeShape, seed: int) -> tuple[int, ...]:
    """Full blocks by their ids; what is left over has tokens of its own."""
    out: tuple[int, ...] = ()
    for block in trace.chains[request.chain]:
        out += _ids(np.random.default_rng([seed, 3, int(block)]), shape.block_tokens)
    left = request.prompt_len % BLOCK_MOONCAKE * shape.block_tokens // BLOCK_MOONCAKE
    return out + _ids(np.random.default_rng([seed, 4, request.session]), max(1, left))


def mooncake_trace(traces: Path | None, scratch: Path, seed: int) -> Trace:
    """The recorded trace where it is there; else one made up in the same form, whose name says so."""
    if traces is not None and (traces / MOONCAKE).is_file():
        return read_trace(traces / MOONCAKE)
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / SYNTHETIC
    path.write_text("".join(json.dumps(line) + "\n" for line in synthetic_lines(40, 4, seed)))
    return read_trace(path)


def synthetic_lines(conversations: int, rounds: int, seed: int) -> Iterator[dict[str, object]]:
    """Requests as a Mooncake trace has them, in order: conversations that begin with one block that all share, come
    every few seconds, and grow by a block or two a round, a minute apart."""
    rng = np.random.default_rng([seed, 5])
    free, out = 1, []
    begins = np.cumsum(rng.exponential(5.0, conversations))
    for begin in begins:
        ids, at = [0], float(begin)
        for _ in range(rounds):
            new = int(rng.integers(1, 3)) + (1 if len(ids) == 1 else 0)
            ids += range(free, free + new)
            tail = int(rng.integers(1, BLOCK_MOONCAKE))
            free += new + 1
            line = {"timestamp": round(1e3 * at), "input_length": BLOCK_MOONCAKE * len(ids) + tail}
            out.append(line | {"output_length": int(rng.integers(50, 600)), "hash_ids": [*ids, free - 1]})
            at += float(rng.exponential(60.0))
    yield from sorted(out, key=lambda line: int(str(line["timestamp"])))


def _ids(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(SPECIAL_IDS, VOCABULARY, count).tolist())
