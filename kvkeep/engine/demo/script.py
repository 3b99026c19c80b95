"""Script: what is said in the demo's sessions, as token ids that only ever grow.

Must not know engines or pages. The user and tool messages come from a bundled excerpt of real agent sessions;
what the model answers is appended as the very ids it sampled, so each prompt is an exact prefix of the next.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from kvkeep.errors import BadInput

Encode = Callable[[str], list[int]]

START, END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Message:
    """One message of a user or a tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Excerpt:
    """The system prompt that all sessions share, and the messages of each session by its id in the source."""

    system: str
    sessions: dict[str, tuple[Message, ...]]

    @staticmethod
    def bundled() -> "Excerpt":
        """The excerpt of tau-bench retail that ships with kvkeep."""
        file = resources.files("kvkeep.engine") / "data" / "tau_retail.json"
        raw = json.loads(file.read_text(encoding="utf-8"))
        return Excerpt(
            system=raw["system"],
            sessions={
                session["id"]: tuple(Message(m["role"], m["content"]) for m in session["messages"])
                for session in raw["sessions"]
            },
        )


@dataclass(frozen=True)
class ChatFormat:
    """How messages become ids: ChatML where the tokenizer has its marks, else plain lines of text.

    start_ids: what the tokenizer puts in front of any text; it belongs before the first message only.
    end_ids: close an answer that the model did not close itself.
    stop_ids: end an answer.
    """

    encode: Encode
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]

    @staticmethod
    def of(encode: Encode, eos_ids: Sequence[int]) -> "ChatFormat":
        """The format for a tokenizer, seen from whether it reads a ChatML mark as one id."""
        start = encode("")

        @cache  # the sessions share texts, and not every tokenizer is fast
        def encoded(text: str) -> tuple[int, ...]:
            return tuple(encode(text)[len(start) :])

        def continued(text: str) -> list[int]:
            return list(encoded(text))

        end = continued(END)
        if len(end) == 1 and len(continued(START)) == 1:
            return ChatFormat(continued, tuple(start), end_ids=tuple(end), stop_ids=tuple(end))
        return ChatFormat(continued, tuple(start), end_ids=(), stop_ids=tuple(eos_ids))

    def message_ids(self, message: Message, limit: int | None) -> list[int]:
        """Ids of a whole message, its content cut to `limit` ids; None cuts nothing."""
        content = self.encode(message.content)[:limit]
        if not self.end_ids:
            return self.encode(message.role + ":") + content
        return [*self.encode(f"{START}{message.role}\n"), *content, *self.end_ids, *self.encode("\n")]

    def cue_ids(self) -> list[int]:
        """Ids that tell the model to answer now."""
        return self.encode(f"{START}assistant\n") if self.end_ids else self.encode("assistant:")


@dataclass
class Conversation:
    """One session as it is being held. `ids` is everything said so far and is only ever appended to."""

    session: str
    chat: ChatFormat
    messages: tuple[Message, ...]
    message_limit: int | None
    ids: list[int]
    turns_asked: int = field(default=0, init=False)

    def next_prompt(self) -> list[int]:
        """Append the next message and the cue to answer; the prompt of this turn."""
        message = self.messages[self.turns_asked]
        self.turns_asked += 1
        self.ids += self.chat.message_ids(message, self.message_limit) + self.chat.cue_ids()
        return list(self.ids)

    def answered(self, output_ids: Sequence[int]) -> None:
        """Append what the model sampled, closed with the end mark where it did not say it itself."""
        self.ids += output_ids
        if self.chat.end_ids:
            if not output_ids or output_ids[-1] != self.chat.end_ids[-1]:
                self.ids += self.chat.end_ids
            self.ids += self.chat.encode("\n")


@dataclass(frozen=True)
class Script:
    """The sessions to hold.

    tokens_max: no prompt with its answer is longer.   tokens_of: the same for each session.
    shared_tokens: all sessions begin with these.
    cut: texts were shortened because the model takes too few positions.
    """

    conversations: tuple[Conversation, ...]
    tokens_max: int
    tokens_of: tuple[int, ...]
    shared_tokens: int
    cut: bool

    @staticmethod
    def write(
        excerpt: Excerpt, chat: ChatFormat, sessions: int, turns: int, max_new_tokens: int, positions: int
    ) -> "Script":
        """The first `sessions` sessions of the excerpt, `turns` turns each, made to fit `positions`.

        Raises BadInput when the excerpt has fewer sessions or turns, or when so few positions are left that
        nothing could be said in them.
        """
        turns_max = min(len(messages) for messages in excerpt.sessions.values())
        if sessions > len(excerpt.sessions):
            raise BadInput(
                f"--sessions {sessions}: the bundled trace has {len(excerpt.sessions)}; ask for at most that"
            )
        if turns > turns_max:
            raise BadInput(f"--turns {turns}: the bundled sessions have {turns_max} turns; ask for at most that")
        chosen = list(excerpt.sessions.items())[:sessions]
        system = Message("system", excerpt.system)
        marks = len(chat.message_ids(Message("user", ""), 0)) + len(chat.cue_ids()) + len(chat.end_ids) + 1
        room = positions - turns * (marks + max_new_tokens) - marks - len(chat.start_ids)
        needed_of = [_content_length(chat, (system, *messages[:turns])) for _, messages in chosen]
        needed = max(needed_of)
        cut = needed > room
        if cut and room < 2 * (turns + 1):
            raise BadInput(
                f"--turns {turns} --max-new-tokens {max_new_tokens}: does not fit the model's {positions} "
                "positions; ask for fewer"
            )
        system_ids = chat.message_ids(system, room // 2 if cut else None)
        message_limit = room // 2 // turns if cut else None
        return Script(
            tuple(
                Conversation(name, chat, messages[:turns], message_limit, [*chat.start_ids, *system_ids])
                for name, messages in chosen
            ),
            tokens_max=positions if cut else needed + positions - room,
            tokens_of=tuple(min(positions, content + positions - room) for content in needed_of),
            shared_tokens=len(chat.start_ids) + len(system_ids),
            cut=cut,
        )


def _content_length(chat: ChatFormat, messages: Sequence[Message]) -> int:
    return sum(len(chat.encode(message.content)) for message in messages)
