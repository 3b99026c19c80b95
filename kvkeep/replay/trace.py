"""A trace in memory: sessions, their requests, and the content of each.

Must not know pages, files or caches.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvkeep.index.names import Int32s

#: What the times of a trace count from: one start for all sessions, each session's own start, or there are none.
Clock = Literal["shared", "session", "none"]


class Request(NamedTuple):
    """One request.

    session, chain: indices into the trace's sessions and chains.
    prompt_len, final_len: tokens of the prompt, and of prompt and completion together; a prompt may be empty.
    known_len: how many of these, from the first one on, the chain has content for: `prompt_len` or more.
    time_s: arrival by the trace's clock; 0 without one.
    service_s, first_token_s: what the recorded engine took to the last and to the first token; None where unknown.
    """

    session: int
    chain: int
    prompt_len: int
    final_len: int
    known_len: int
    time_s: float = 0.0
    service_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests, read whole.

    name: what it is called in tables.   digest: of everything that the content depends on, hexadecimal.
    block: None when chains hold token ids; else the tokens of a block, and chains hold block ids, one a full block.  A
        block id stands for its whole prefix.
    chains: int32 arrays.  Several requests may begin a chain, each with a prefix of it.
    sessions: requests by session, each in the order of the file.
    clock: what `time_s` of the requests counts from.
    bad: malformed lines that were left out.   note: what else was not read, in words.
    """

    name: str
    digest: str
    block: int | None
    chains: list[Int32s]
    sessions: list[list[Request]]
    clock: Clock
    bad: int = 0
    note: str = ""
    requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", sum(map(len, self.sessions)))

    @property
    def remarks(self) -> list[str]:
        """What of its file is not in it, in words."""
        left_out = [f"{self.bad} malformed lines were left out"] if self.bad else []
        return [*left_out, self.note] if self.note else left_out


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order in which they are served or arrive.

    timed: they arrive at their `time_s`; otherwise each arrives when the one before it has been let in, and `time_s`
        counts the requests before it.
    """

    requests: list[Request]
    timed: bool

    def prompts_only(self) -> "Arrivals":
        """The same where nobody stores generated pages."""
        return Arrivals([request._replace(known_len=request.prompt_len) for request in self.requests], self.timed)

    def limited(self, count: int | None) -> "Arrivals":
        """The first `count` of them; all for None."""
        return self if count is None else Arrivals(self.requests[:count], self.timed)


def prompt_tokens(requests: Iterable[Request]) -> int:
    """Tokens of all prompts together."""
    return sum(request.prompt_len for request in requests)
