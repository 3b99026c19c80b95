"""What a rank does in a process of its own.

Must not look at other ranks: what they do is compared by the tests.
"""

import os
import time
from typing import Any

from kvkeep.agreement.channel import Channel, Transport
from kvkeep.agreement.distributed import join
from kvkeep.agreement.settings import agree_settings
from kvkeep.errors import RankLost
from tests.agreement.histories import Seen, history
from tests.agreement.processes import DEADLINE_S, die, hang
from tests.agreement.rank import PAGE_SIZE, Rank

#: The gathers of `life`, in order.  "the rest": of a block table that takes more than one block.
STEPS = ("settings", "admit", "the rest", "poll", "extend", "admit another", "poll again")
LONG = 2100  # pages of its prompt: a block table of more than one block


def histories(channel: Channel, mechanism: str, seeds: range) -> list[Seen]:
    """Random histories, one after another."""
    return [history(channel, mechanism, seed) for seed in seeds]


def settings(channel: Channel, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Ranks that come with settings of their own."""
    return agree_settings(channel, by_rank[channel.rank])


class Mortal:
    """A `Transport` whose rank dies, or hangs, before its gather number `at`.   entered: when the last one began."""

    def __init__(self, inner: Transport, at: int, how: str) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.entered = time.monotonic()
        self._inner = inner
        self._at = at
        self._how = how
        self._gathers = 0

    def gather(self, block: bytes) -> list[bytes]:
        """See `Transport`."""
        self.entered = time.monotonic()
        if self._gathers == self._at:
            (die if self._how == "kill" else hang)()
        self._gathers += 1
        return self._inner.gather(block)

    def close(self) -> None:
        """See `Transport`."""
        self._inner.close()


def life(channel: Channel, mechanism: str, victim: int, step: str, how: str) -> tuple[float, bool]:
    """One request, during which `victim` dies before it says anything in `step`.

    Returns after how many seconds in a call this rank has noticed, and whether it then let go of everything.
    """
    at = STEPS.index(step) if channel.rank == victim else -1
    if mechanism == "minimum" and step == "the rest":
        raise ValueError("nothing is that long there")
    if mechanism == "minimum" and at > STEPS.index("the rest"):
        at -= 1
    mortal = Mortal(channel._transport, at, how)
    rank = None
    try:
        rank = Rank(Channel(mortal), mechanism, pages=LONG + 10)
        lease = rank.group.admit(range(LONG * PAGE_SIZE))
        rank.group.poll()
        rank.group.extend(lease, [1], room=PAGE_SIZE)
        rank.group.admit([1, 2, 3])
        rank.group.poll()
    except RankLost:
        noticed_s = time.monotonic() - mortal.entered
        again = False
        if rank is not None:
            try:
                rank.group.admit([1])
            except RankLost:
                again = True
            rank.group.close()
            rank.check_invariants()
        live = rank.cache.stats().pages_live if rank is not None and rank.cache is not None else 0
        return noticed_s, live == 0 and (again or rank is None)
    raise AssertionError("nobody died")


def rejoined(channel: Channel, times: int) -> list[int]:
    """Joins groups of other makeup and the same group again, with as many process groups besides as its number.

    Returns by how many threads and open files this process has grown after all of them but the first.
    """
    import torch.distributed as dist

    me = dist.get_rank()
    for _ in range(me):
        dist.new_group([me], backend="gloo", use_local_synchronization=True)  # which others know nothing of
    before = [0, 0]
    for turn in range(times):
        again = join(deadline_s=DEADLINE_S)
        assert [str(rank).encode() for rank in range(again.size)] == again.exchange("poll", turn, str(me).encode())
        again.close()
        if not turn:
            before = _resources()
    return [now - then for now, then in zip(_resources(), before, strict=True)]


def survivors(channel: Channel, victim: int) -> bool:
    """A rank dies, and those that are left go on as a group of their own, under the numbers that they had."""
    import torch.distributed as dist

    if channel.rank == victim:
        die()
    members = [rank for rank in range(channel.size) if rank != victim]
    try:
        channel.exchange("poll", 0, b"")
    except RankLost:
        channel.close()
    left = join(members, deadline_s=DEADLINE_S)
    heard = left.exchange("poll", 0, str(dist.get_rank()).encode())
    return [str(rank).encode() for rank in members] == heard


def _resources() -> list[int]:
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
