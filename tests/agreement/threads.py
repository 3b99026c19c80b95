"""Ranks as threads of one process: the same code as in real processes, over blocks in memory.

Must not be kinder than a real group: blocks of different sizes, which would hang or abort one, stop the test; a rank
that does not come is missed after `patience_s`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvkeep.agreement.channel import Channel
from kvkeep.errors import RankLost

PATIENCE_S = 20.0

_Result = TypeVar("_Result")


class Meeting:
    """Where the ranks of one group meet."""

    def __init__(self, size: int, patience_s: float = PATIENCE_S) -> None:
        self.size = size
        self.patience_s = patience_s
        self.lost: str | None = None
        self._condition = threading.Condition()
        self._blocks: dict[int, bytes] = {}
        self._round = 0
        self._last: list[bytes] = []

    def gather(self, rank: int, block: bytes) -> list[bytes]:
        """See `Transport`."""
        with self._condition:
            if self.lost is not None:
                raise RankLost(self.lost)
            self._blocks[rank] = block
            mine = self._round
            if len(self._blocks) == self.size:
                sizes = {len(b) for b in self._blocks.values()}
                assert len(sizes) == 1, f"a collective of blocks of {sorted(sizes)} bytes"
                self._last = [self._blocks[r] for r in range(self.size)]
                self._blocks = {}
                self._round += 1
                self._condition.notify_all()
                return self._last
            self._condition.wait_for(lambda: self._round > mine or self.lost is not None, self.patience_s)
            if self._round > mine:
                return self._last
            self._lose(f"only ranks {sorted(self._blocks)} of {self.size} came")
            raise RankLost(self.lost)

    def leave(self, rank: int) -> None:
        """A rank is gone: nobody waits for it."""
        with self._condition:
            self._lose(f"rank {rank} has left")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._condition.notify_all()


class Seat:
    """A `Transport`: one rank's place in a meeting.   gathers: how many blocks it has passed."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self.gathers = 0
        self._meeting = meeting

    def gather(self, block: bytes) -> list[bytes]:
        """See `Transport`."""
        self.gathers += 1
        return self._meeting.gather(self.rank, block)

    def close(self) -> None:
        """Nothing to give back."""


def channels(size: int, patience_s: float = PATIENCE_S) -> list[Channel]:
    """The channels of a new group, by rank."""
    meeting = Meeting(size, patience_s)
    return [Channel(Seat(meeting, rank)) for rank in range(size)]


def together(size: int, do: Callable[[Channel], _Result], patience_s: float = PATIENCE_S) -> list[_Result]:
    """What `do` returns on each rank of a new group; raises the first exception that is not of a rank missed."""
    meeting = Meeting(size, patience_s)
    return on_ranks([Channel(Seat(meeting, rank)) for rank in range(size)], do, meeting)


def on_ranks(
    ranks: Sequence[Channel], do: Callable[[Channel], _Result], meeting: Meeting | None = None
) -> list[_Result]:
    """Runs `do` on each rank, in a thread each."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException | None] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = do(ranks[rank])
        except BaseException as error:
            errors[rank] = error
            if meeting is not None:
                meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda error: isinstance(error, RankLost)):
        raise error
    return results


def outcomes(size: int, do: Callable[[Channel], Any], patience_s: float = PATIENCE_S) -> list[Any]:
    """What `do` returns or raises on each rank."""

    def attempt(channel: Channel) -> Any:
        try:
            return do(channel)
        except Exception as error:
            return error

    return together(size, attempt, patience_s)
