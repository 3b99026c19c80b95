"""Channel: one exchange after another between the ranks of a group, the same one on every rank.

Must not know what is said, or what carries it.

    block 0   | length, kind, number, digest | body ........... |   of one size on every rank, always
    the rest                                 | ... of the longest |  only if block 0 of somebody says that there is one

No rank's own lengths size a collective: the first block has a fixed size, and says how large the second one is.
"""

import struct
from typing import Final, Literal, Protocol, get_args

from kvkeep.errors import InvariantViolation, RankLost

#: What a first block holds covers a match of about 2,000 pages; on a loopback it takes as long as 64 bytes do.
BLOCK_NBYTES: Final = 8192

Kind = Literal["settings", "made", "admit", "poll", "extend"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HEAD = struct.Struct("<IIQQ")


class Transport(Protocol):
    """What carries blocks between ranks 0 to `size - 1`; this one is `rank`."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, block: bytes) -> list[bytes]:
        """What every rank has passed, by rank; they are all of one size.

        Raises `RankLost`, within a deadline, when a rank does not come.
        """

    def close(self) -> None:
        """Nothing is exchanged any more."""


class Channel:
    """Exchanges of one group, over one transport.

    exchanges: how many there have been.
    What a rank says belongs to one step of all of them: the kind of the exchange, its number, and a digest of what it
    is about are compared on every rank.  Where they differ, ranks have been asked different things: the program is
    wrong, and every rank stops.
    """

    def __init__(self, transport: Transport) -> None:
        self.exchanges = 0
        self._transport = transport
        self._broken: str | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    def exchange(self, kind: Kind, digest: int, body: bytes) -> list[bytes]:
        """What every rank says, by rank.

        digest: 64 bits of what must be equal on all of them.   body: what this rank says, of any length.
        Raises `RankLost` when a rank does not answer within the deadline; `InvariantViolation` when ranks are
        not in the same step.  Whatever has been raised, it is `RankLost` for ever after.
        """
        if self._broken is not None:
            raise RankLost(f"the group has ended before: {self._broken}")
        step = (KINDS.index(kind), self.exchanges, digest)
        self.exchanges += 1
        message = _HEAD.pack(len(body), *step) + body
        try:
            blocks = self._transport.gather(message[:BLOCK_NBYTES].ljust(BLOCK_NBYTES, b"\0"))
            heads = [_HEAD.unpack_from(block) for block in blocks]
            self._check(step, [(head[1], head[2], head[3]) for head in heads])
            longest = _HEAD.size + max(head[0] for head in heads)
            if longest > BLOCK_NBYTES:
                rest = self._transport.gather(message[BLOCK_NBYTES:].ljust(longest - BLOCK_NBYTES, b"\0"))
                blocks = [first + more for first, more in zip(blocks, rest, strict=True)]
        except BaseException as error:  # also one of the interpreter: half an exchange cannot be gone on with
            self._broken = str(error) or type(error).__name__
            raise
        return [block[_HEAD.size : _HEAD.size + head[0]] for block, head in zip(blocks, heads, strict=True)]

    def close(self) -> None:
        """Ends it on this rank."""
        self._broken = self._broken or "the channel was closed"
        self._transport.close()

    def _check(self, mine: tuple[int, int, int], steps: list[tuple[int, int, int]]) -> None:
        for rank, step in enumerate(steps):
            if step != steps[0]:
                raise InvariantViolation(
                    f"ranks are not in the same step: rank {rank} is at {_story(step)}, rank 0 at {_story(steps[0])}: "
                    f"every rank must make the same calls, in the same order, with the same arguments"
                )
        if steps[self.rank] != mine:
            raise InvariantViolation(f"rank {self.rank} has heard itself say {_story(steps[self.rank])}")


def _story(step: tuple[int, int, int]) -> str:
    kind, number, digest = step
    return f"{KINDS[kind] if kind < len(KINDS) else kind} {number} of {digest:016x}"
