"""Agent sessions for the embedded engine: conversations that it holds itself, recorded ones, random ones.

Must not know load, configurations or limits.  Every prompt of a workload is fixed before it is measured.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench._vllm_workloads import Ask, Workload
from kvkeep.errors import BadInput
from kvkeep.replay.formats import read_trace

if TYPE_CHECKING:
    from kvkeep.engine.asking import Answer
    from kvkeep.engine.demo.script import Conversation as DemoConversation
    from kvkeep.engine.engine import Engine
    from kvkeep.engine.loader import LoadedModel

SWE = "mini_swe_500"


class Conversation(Protocol):
    """A session as it is being held: `kvkeep demo` has real ones."""

    def next_prompt(self) -> list[int]: ...
    def answered(self, output_ids: Sequence[int]) -> None: ...


@dataclass
class RandomConversation:
    """Random ids behind a beginning that others share; each turn brings `growth` more."""

    ids: list[int]
    growth: int
    vocabulary: int
    rng: random.Random

    def next_prompt(self) -> list[int]:
        """All so far, and what is new."""
        self.ids += [self.rng.randrange(self.vocabulary) for _ in range(self.growth)]
        return list(self.ids)

    def answered(self, output_ids: Sequence[int]) -> None:
        """What the model wrote."""
        self.ids += output_ids


class Grouped:
    """A conversation of `kvkeep demo` in which the model answers every so manieth message only."""

    def __init__(self, conversation: "DemoConversation", messages: int) -> None:
        self._conversation, self._messages = conversation, messages

    def next_prompt(self) -> list[int]:
        """All so far, the next messages, and the cue to answer."""
        one = self._conversation
        for _ in range(self._messages - 1):
            one.ids += one.chat.message_ids(one.messages[one.turns_asked], one.message_limit)
            one.turns_asked += 1
        return one.next_prompt()

    def answered(self, output_ids: Sequence[int]) -> None:
        """What the model wrote."""
        self._conversation.answered(output_ids)


def real_conversations(
    loaded: "LoadedModel", sessions: int, turns: int, messages: int, new_tokens: int
) -> tuple[list[Conversation], int]:
    """Sessions of tau-bench retail, the users' and the tools' side, and the tokens that the longest can have.

    messages: that come between two answers; the model writes those.
    """
    from kvkeep.engine.demo.script import ChatFormat, Excerpt, Script

    if loaded.tokenizer is None:
        raise BadInput(f"--model {loaded.name}: has no tokenizer beside it; sessions need one")
    chat = ChatFormat.of(loaded.tokenizer.encode, loaded.eos_ids)
    script = Script.write(Excerpt.bundled(), chat, sessions, turns * messages, new_tokens, loaded.positions_max)
    return [Grouped(one, messages) for one in script.conversations], script.tokens_max


def random_conversations(
    loaded: "LoadedModel", sessions: int, shared: int, growth: int, seed: int
) -> list[Conversation]:
    """Sessions of random ids behind `shared` ids that all of them have."""
    rng = random.Random(seed)
    begins = [rng.randrange(loaded.vocabulary) for _ in range(shared)]
    return [
        RandomConversation(list(begins), growth, loaded.vocabulary, random.Random(f"{seed}.{session}"))
        for session in range(sessions)
    ]


@dataclass(slots=True)
class Held:
    """Sessions that have been held: the requests in rotation, and what an engine with room for all answered.

    alone: the answers, one request at a time: hits are where the model reads.
    salts: of the sessions, that share nothing then; none: they share what they begin with.
    """

    workload: Workload
    alone: "list[Answer]" = field(default_factory=list)
    salts: Sequence[bytes] = ()

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """By request, what was answered."""
        return [answer.output_ids for answer in self.alone]

    def working_set(self, page_size: int) -> int:
        """Pages that keep all sessions to their ends."""
        if not self.salts:
            return self.workload.blocks(page_size)
        last = {one.session: len(one.prompt) + self.workload.new_tokens for one in self.workload.asks}
        return sum(-(-tokens // page_size) for tokens in last.values())


def hold(
    name: str,
    engine: "Engine",
    conversations: Sequence[Conversation],
    turns: int,
    new_tokens: int,
    salts: Sequence[bytes] = (),
) -> Held:
    """Lets the engine answer turn by turn, the sessions in rotation, so that each next prompt has its own answers.

    salts: see `Held`.
    """
    from kvkeep.engine.asking import ask

    asks, answers = [], []
    for turn in range(turns):
        for session, conversation in enumerate(conversations):
            prompt = tuple(conversation.next_prompt())
            answer = ask(engine, prompt, new_tokens, salt=salts[session] if salts else b"")
            conversation.answered(answer.output_ids)
            asks.append(Ask(session, turn, prompt))
            answers.append(answer)
    return Held(Workload(name, tuple(asks), new_tokens), answers, salts)


@dataclass(slots=True)
class Recorded(Held):
    """Recorded requests in the order of their arrival.   times_s: when each came."""

    times_s: tuple[float, ...] = ()


def recorded_swe(
    traces: Path, sessions: int, turns: int, prompt_max: int, new_tokens: int, vocabulary: int, thin: int = 1
) -> Recorded:
    """The first turns of the sessions of mini_swe that began first, each with its recorded time.

    prompt_max: turns whose prompt is longer are left out.
    thin: only every so manieth token, for a model that takes few; prefixes stay prefixes.
    vocabulary: of the model; ids beyond it are folded into it.
    """
    trace = read_trace(traces / SWE)
    begun = sorted((session for session in trace.sessions if session), key=lambda session: session[0].time_s)
    chosen = []
    for number, session in enumerate(begun[:sessions]):
        for turn, request in enumerate(session[:turns]):
            ids = trace.chains[request.chain][: request.prompt_len : thin] % vocabulary
            if len(ids) <= prompt_max:
                chosen.append((request.time_s, Ask(number, turn, tuple(ids.tolist()))))
    if not chosen:
        raise BadInput(f"{SWE}: none of the first turns has a prompt of {prompt_max} tokens or fewer")
    chosen.sort(key=lambda one: (one[0], one[1].session, one[1].turn))
    asks = tuple(ask for _, ask in chosen)
    return Recorded(Workload("mini_swe", asks, new_tokens), times_s=tuple(time_s for time_s, _ in chosen))


def has_swe(traces: Path | None) -> bool:
    """Whether the recorded sessions are there."""
    return traces is not None and any(traces.glob(f"{SWE}.tokens.u16*"))
