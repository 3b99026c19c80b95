"""What a sampler reads: counters, what an answer of theirs holds, and the ways in which they do not answer.

Must not know what is counted, or when it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.errors import KvkeepError

#: gauge: a number of now.   total: rises from some start on.   flags: bits.
Kind = Literal["gauge", "total", "flags"]
#: live: an answer is of the moment it is asked for.   paced: it changes at a pace of its own, to be found out.
#: window: asking takes a while, and the answer is of that while.
Updates = Literal["live", "paced", "window"]

#: The numbers of an answer, in the order of the counter's fields; None for one that is not known now.
Answer = Sequence[float | None]


class CounterMissing(KvkeepError):
    """There is no such counter here, and there will be none; the message says why."""


class NoAnswer(KvkeepError):
    """The counter did not answer this time; the next time it may."""


class SourceLost(KvkeepError):
    """What the counters of one source belong to is gone: none of them answers any more."""


@dataclass(frozen=True, slots=True)
class Field:
    """One number of an answer.   name: ends in its unit where it has one.   what: for a reader of the result."""

    name: str
    unit: str
    what: str
    kind: Kind = "gauge"


@dataclass(frozen=True, slots=True)
class Counter:
    """What one call reads.

    source: whose counter it is; all of a source are lost together.
    read: raises `CounterMissing`, `NoAnswer` or `SourceLost`, nothing else; called by one thread at a time.
    window_s: how long a call of a window takes, and what it is an answer of; 0 for the others.
    """

    source: str
    fields: tuple[Field, ...]
    read: Callable[[], Answer]
    updates: Updates = "paced"
    window_s: float = 0.0

    @property
    def name(self) -> str:
        """That of its first field."""
        return self.fields[0].name
