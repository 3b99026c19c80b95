"""The leader that decides and ships: followers have no index, and the same ids on every rank."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvkeep.agreement import wire
from kvkeep.agreement.channel import Channel
from kvkeep.agreement.follower import Follower
from kvkeep.agreement.group import Group, GroupLease, Request
from kvkeep.agreement.leader import GroupBackend, Leader
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, KvkeepError, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.index.names import as_int32
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.backend import NO_WAIT, Job, JobNumber
from kvkeep.transfer.host import HostBackend
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import SlotCopy
from kvkeep.transfer.simulated import SimulatedBackend, When
from tests.agreement.rank import PAGE_SIZE, Rank
from tests.agreement.threads import outcomes, together
from tests.transfer.pools import Flag, plan

PROMPT = array("i", range(11))  # five full pages, and a token


class Member(Rank):
    """A rank of a group that rank 0 leads."""

    def __init__(self, channel: Channel, **how: Any) -> None:
        super().__init__(channel, "leader", **{"host_pages": 16, **how})

    def serve(self, tokens: "array[int]") -> int:
        """A whole request; how many of its tokens matched."""
        lease = self.ready(self.group.admit(tokens))
        matched = lease.matched_len
        assert [] == self.wrong(lease, tokens, matched)
        self.write(lease, tokens, matched, len(tokens))
        self.group.finish(lease, len(tokens))
        return matched

    def ready(self, lease: GroupLease) -> GroupLease:
        """Polls until it waits no more."""
        for _ in range(50):
            if lease.ready or lease.revoked:
                return lease
            self.turn()
        raise AssertionError(f"{lease} waits for ever")

    def turn(self) -> None:
        """Copies go on, and all say so."""
        self.step_copies(30)
        self.group.poll()

    def push_out(self) -> None:
        """What is cached on the GPU goes down to host memory, on every rank."""
        lease = self.ready(self.group.admit([9] * 12 * PAGE_SIZE, reuse=False, store=False))
        self.group.abort(lease)

    def fail_next(self) -> None:
        """Copies of this rank that begin from now on fail."""
        self.backend._fail_rate = 1.0


def on_members(size: int, do: Any, **how: Any) -> list[Any]:
    """What `do` returns on each member of a new group."""

    def run(channel: Channel) -> Any:
        member = Member(channel, **how)
        out = do(member)
        member.check_invariants()
        return out

    return together(size, run)


# ---------------------------------------------------------------------- what is shipped


def test_followers_have_the_leaders_ids_and_their_own_bytes() -> None:
    """A prefix that came back from host memory lies on the same pages on all ranks, with each rank's own content."""

    def run(member: Member) -> tuple[int, list[int]]:
        member.serve(PROMPT)
        member.push_out()
        lease = member.ready(member.group.admit(PROMPT))
        assert [] == member.wrong(lease, PROMPT, lease.matched_len)
        return lease.matched_len, list(lease.pages)

    found = on_members(3, run)
    assert 10 == found[0][0] and found[0] == found[1] == found[2]


def test_pages_that_are_added_are_the_leaders() -> None:
    """Room and tokens lengthen every rank's table by the same ids; a refusal takes room from before back on all."""

    def run(member: Member) -> tuple[list[int], list[int]]:
        lease = member.ready(member.group.admit(PROMPT))
        member.group.extend(lease, [1, 2, 3], room=2)
        first = list(lease.pages)
        with pytest.raises(OutOfPages, match="of 12 pages"):
            member.group.extend(lease, [4], room=20)
        return first, list(lease.pages)

    found = on_members(3, run)
    assert found[0] == found[1] == found[2]
    assert (8, 7) == tuple(map(len, found[0])) and found[0][0][:7] == found[0][1]


def test_tokens_are_taken_back_on_the_same_pages() -> None:
    """Without an exchange every rank's table ends alike, and what follows goes on alike, behind media too."""

    def run(member: Member) -> tuple[list[int], int, int]:
        media = [MediaItem(9, 2, b"d" * 16, causal=False)]
        lease = member.ready(member.group.admit(PROMPT, media=media))
        member.group.extend(lease, [1, 2, 3, 4], room=3)
        member.group.seal(lease, 8)
        before = member.channel.exchanges
        with pytest.raises(BadInput, match="truncate to 10 ends inside the media item"):
            member.group.truncate(lease, 10)
        with pytest.raises(BadInput, match="truncate to 7: it must be 8 to 15"):
            member.group.truncate(lease, 7)
        member.group.truncate(lease, 9)
        assert before == member.channel.exchanges and 5 == lease.page_count == len(lease.pages)
        member.group.extend(lease, [5, 6, 7, 8])
        member.group.seal(lease, 10)
        pages = list(lease.pages)
        member.group.finish(lease, 12)
        return pages, lease.length, lease.page_count

    found = on_members(3, run)
    assert found[0] == found[1] == found[2] and (13, 7) == found[0][1:]


def test_a_group_of_one_tier_says_nothing_while_nobody_waits() -> None:
    """There are no copies to tell of."""

    def run(member: Member) -> int:
        member.ready(member.group.admit(PROMPT))
        before = member.channel.exchanges
        member.group.poll()
        return member.channel.exchanges - before

    assert [0, 0] == on_members(2, run, host_pages=0)
    assert [1, 1] == on_members(2, run, host_pages=16)


def test_a_refusal_of_the_leader_is_one_everywhere() -> None:
    """`OutOfPages` with its numbers, and `BadInput` with its line; the group goes on."""

    def run(member: Member) -> tuple[str, str]:
        said = []
        lease = member.ready(member.group.admit([1] * 20, store=False))
        for error, tokens in ((OutOfPages, [2] * 10), (BadInput, [1] * 99)):
            with pytest.raises(KvkeepError) as refused:
                member.group.admit(tokens)
            assert error is type(refused.value)
            said.append(str(refused.value))
        member.group.abort(lease)
        member.serve(PROMPT)
        return said[0], said[1]

    found = on_members(3, run)
    assert found[0] == found[1] == found[2] and "5 pages asked for" in found[0][0] and "50 pages" in found[0][1]


def test_followers_know_where_a_chunk_may_end() -> None:
    """They have no lease of a cache, and media whose inside looks ahead are split on no rank."""

    def run(member: Member) -> tuple[int, int]:
        with pytest.raises(BadInput, match="11 tokens"):
            member.group.admit(PROMPT, media=[MediaItem(9, 4, b"d" * 16)])
        lease = member.ready(member.group.admit(PROMPT, media=[MediaItem(3, 4, b"d" * 16, causal=False)]))
        return lease.chunk_end(0, 5), lease.chunk_end(3, 5)

    assert [(3, 7)] * 2 == on_members(2, run)


def test_a_wrong_kv_len_is_refused_on_every_rank() -> None:
    """Also on followers, who have nothing to seal: no rank ends a request that another goes on with."""

    def run(member: Member) -> bool:
        item = MediaItem(7, 3, b"d" * 16, causal=False)
        lease = member.ready(member.group.admit(PROMPT, media=[item]))
        member.group.seal(lease, 4)
        for kv_len in (3, 12, 8):
            with pytest.raises(BadInput, match=f"kv_len {kv_len}"):
                member.group.finish(lease, kv_len)
        with pytest.raises(BadInput, match="kv_len 3"):
            member.group.seal(lease, 3)
        member.group.finish(lease, 11)
        return lease.live

    assert [False] * 3 == on_members(3, run)


def test_a_block_table_longer_than_a_block() -> None:
    """Thousands of ids arrive whole."""

    def run(member: Member) -> list[int]:
        return list(member.ready(member.group.admit(range(6001))).pages)

    found = on_members(2, run, pages=3500, host_pages=0)
    assert 3001 == len(found[0]) and found[0] == found[1]


def test_encoder_outputs_of_the_leader_are_copied_with_the_rest() -> None:
    """Slots, parts of pages, are shipped and copied like pages."""
    device, host = bytes(range(16)) * 2, bytes(32)

    def run(channel: Channel) -> bytes:
        import numpy as np

        from kvkeep.tiers.memory import HostMemory
        from tests.agreement.rank import LAYOUT

        above = HostMemory(np.frombuffer(bytearray(device), np.uint8).reshape(2, 16), LAYOUT)
        below = HostMemory(np.frombuffer(bytearray(host), np.uint8).reshape(2, 16), LAYOUT)
        backend = SimulatedBackend(above, below, when=When.EARLY)
        if not channel.rank:
            shared = GroupBackend(backend, 2)
            shared.launch(Job(JobNumber(0), plan("clean", [1], [0], SlotCopy(0, 4, 1, 8, 4)), NO_WAIT, 20, 0.0))
            channel.exchange("poll", 0, wire.plans(shared.take()) + wire.ids([]))
        else:
            follower = Follower(PAGE_SIZE, 2, backend, 2)
            follower.settle([], channel.exchange("poll", 0, follower.report([], None)))
        return bytes(below.rows.tobytes())

    expected = bytes(range(16)) + bytes(8) + bytes(range(4, 8)) + bytes(4)
    assert [expected] * 2 == together(2, run)


# ---------------------------------------------------------------------- all or none


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_load_that_fails_on_one_rank_is_computed_by_all(failing: int) -> None:
    """The leader hears of it and shortens; every rank computes the same positions."""

    def run(member: Member) -> tuple[int, list[Job]]:
        member.serve(PROMPT)
        member.push_out()
        if member.number == failing:
            member.fail_next()
        lease = member.ready(member.group.admit(PROMPT))
        matched = lease.matched_len
        member.write(lease, PROMPT, matched, len(PROMPT))
        member.group.finish(lease, len(PROMPT))
        member.backend._fail_rate = 0.0
        assert 10 == member.serve(PROMPT)
        return matched, list(member.backend.jobs)

    assert [(0, [])] * 3 == on_members(3, run)


def test_a_request_waits_for_the_slowest_rank() -> None:
    """Loads that are over on the leader and not on a follower keep the request from running anywhere."""

    def run(member: Member) -> list[bool]:
        member.serve(PROMPT)
        member.push_out()
        lease = member.group.admit(PROMPT)
        seen = []
        for turn in range(5):
            if member.number != 2 or turn == 2:
                member.step_copies(40)
            member.group.poll()
            seen.append(lease.ready)
        return seen

    found = on_members(3, run)
    assert found[0] == found[1] == found[2]
    assert [False] * 3 == found[0][:3] and found[0][4]


def test_a_page_is_not_handed_on_while_a_follower_still_reads_it() -> None:
    """What goes down to host memory arrives whole on every rank, however late a follower copies."""

    def run(member: Member) -> int:
        member.serve(PROMPT)
        lease = member.group.admit([9] * 12 * PAGE_SIZE, reuse=False, store=False)  # takes the pages of the first
        tokens = array("i", [9] * 12 * PAGE_SIZE)
        for _ in range(20):
            member.step_copies(30 * (member.number == 0))
            member.group.poll()
            assert not lease.ready
        member.ready(lease)
        member.write(lease, tokens, 0, len(tokens))
        member.group.abort(lease)
        return member.serve(PROMPT)

    assert [10, 10] == on_members(2, run)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_whose_copies_have_ended_for_good_ends_them_for_all(dying: int) -> None:
    """The cache goes on without its host tier, and what had to be loaded is computed, on every rank."""

    def run(member: Member) -> tuple[int, str | None]:
        member.serve(PROMPT)
        member.push_out()
        lease = member.group.admit(PROMPT)
        if member.number == dying:
            member.backend.die("cable cut")
        for _ in range(10):
            member.turn()
        assert lease.ready or lease.revoked
        if lease.ready:
            member.group.abort(lease)
        matched = member.serve(PROMPT)
        member.push_out()
        assert 0 == member.serve(PROMPT)
        assert 10 == member.serve(PROMPT)
        transfers = member.cache.transfers if member.cache is not None else None
        return matched, transfers.dead if transfers is not None else None

    (matched, dead), other = on_members(2, run)
    assert (0, f"rank {dying}: cable cut") == (matched, dead)
    assert (0, None) == other


def test_closing_a_group_ends_its_copies_and_leases_on_each_rank() -> None:
    """No exchange is needed for it, so it works when others are gone."""

    def run(member: Member) -> tuple[int, int]:
        member.serve(PROMPT)
        member.push_out()
        member.group.admit(PROMPT)
        before = member.channel.exchanges
        member.group.close()
        stats = member.cache.stats() if member.cache is not None else None
        return member.channel.exchanges - before, stats.leases + stats.pages_live if stats is not None else 0

    assert [(0, 0)] * 2 == on_members(2, run)


def test_real_threads_copy_on_every_rank() -> None:
    """The same over the backend of threads, whose copies are really asynchronous."""

    def run(channel: Channel) -> tuple[int, list[int]]:
        import numpy as np

        from kvkeep.tiers.memory import HostMemory
        from tests.agreement.rank import LAYOUT

        above = HostMemory(np.zeros((12, 16), np.uint8), LAYOUT)
        below = HostMemory(np.zeros((16, 16), np.uint8), LAYOUT)
        with_threads = HostBackend(above, below, threads=1)
        how: Leader | Follower = Follower(PAGE_SIZE, 12, with_threads, 16)
        if not channel.rank:
            shared = GroupBackend(with_threads, channel.size)
            transfers = TransferManager(shared, bytes_in_flight_max=1 << 20, queue_pages_max=100, deadline_s=30.0)
            config = CacheConfig(page_size=PAGE_SIZE)
            host = CpuPool.bookkeeping(16)
            cache = TieredCache(config, GpuPool.bookkeeping(12), b"f", host=host, transfers=transfers)
            how = Leader(cache, shared, 16)
        group = Group(channel, how, b"f")

        def run_until_ready(tokens: Sequence[int]) -> GroupLease:
            lease = group.admit(tokens)
            while not lease.ready:
                with_threads.wait(0.001)
                group.poll()
            return lease

        for tokens in (PROMPT, [9] * 24):
            lease = run_until_ready(tokens)
            above.rows[list(lease.pages)] = np.array(
                [[channel.rank + 1 + page] * 16 for page in range(len(lease.pages))]
            )
            group.finish(lease, len(tokens))
        lease = run_until_ready(PROMPT)
        content = above.rows[list(lease.pages), 0].tolist()[:5]
        matched = lease.matched_len
        group.close()
        return matched, content

    assert [(10, [1, 2, 3, 4, 5]), (10, [2, 3, 4, 5, 6])] == together(2, run)


# ---------------------------------------------------------------------- a follower checks what it is told


def follower_hears(message: bytes, *, pages: int = 4, host_pages: int = 6) -> GroupLease:
    """What a follower makes of a leader's admission of three pages."""
    follower = Follower(PAGE_SIZE, pages, SimulatedBackend(page_nbytes=16), host_pages)
    lease = GroupLease(0, Request(as_int32([1] * 6), b"", b"", b"", (), True, True), PAGE_SIZE)
    follower.open(lease, [message, b""])
    return lease


def message(table: Sequence[int], *jobs: Any) -> bytes:
    made = [Job(JobNumber(i), one, NO_WAIT, 0, 0.0) for i, one in enumerate(jobs)]
    return wire.plans(made) + wire.refusal(None) + wire.text(b"") + wire.ids(table)


@pytest.mark.parametrize(
    ("told", "what"),
    [
        (message([0, 1, 4]), "GroupLease 0: page 4, and this rank has pages 0 to 3"),
        (message([0, 1, -1]), "page -1"),
        (message([0, 1, 1]), "a page is listed twice"),
        (message([0, 1]), "2 pages from the leader, 3 are needed"),
        (message([0, 1, 2], plan("demote", [4], [0])), "sources of demote 1 pages: page 4"),
        (message([0, 1, 2], plan("demote", [0], [9])), "targets of demote 1 pages: page 9"),
        (message([0, 1, 2], plan("promote", [9], [0])), "sources of promote 1 pages: page 9"),
        (message([0, 1, 2], plan("promote", [0, 1], [3, 3])), "targets of promote 2 pages: a page is listed twice"),
        (message([0, 1, 2], plan("clean", [], [], SlotCopy(0, 0, 7, 0, 4))), "page 7, and this rank has pages 0 to 5"),
        (message([0, 1, 2], plan("promote", [5], [5])), "targets of promote 1 pages: page 5"),
    ],
)
def test_ids_that_do_not_fit_the_pools_are_refused(told: bytes, what: str) -> None:
    """A follower touches no page that it has not, and lists none twice."""
    with pytest.raises(InvariantViolation, match=what):
        follower_hears(told)
    assert [0, 1, 2] == list(follower_hears(message([0, 1, 2], plan("promote", [5], [3]))).table)


def test_copies_for_a_follower_without_host_pages_are_refused() -> None:
    """It has nowhere to copy to."""
    follower = Follower(PAGE_SIZE, 4)
    with pytest.raises(InvariantViolation, match="has no host pool"):
        follower.settle([], [wire.plans([Job(JobNumber(0), plan("demote", [0], [0]), NO_WAIT, 0, 0.0)]) + wire.ids([])])


def test_copies_of_a_follower_come_after_its_own_event() -> None:
    """The writes that a copy waits for are this rank's, not the leader's."""
    backend = SimulatedBackend(page_nbytes=16, when=When.EARLY)
    follower = Follower(PAGE_SIZE, 4, backend, 4)
    event = Flag()
    follower.fence(event)
    job = Job(JobNumber(3), plan("demote", [0], [0]), NO_WAIT, 0, 0.0)
    follower.settle([], [wire.plans([job]) + wire.ids([])])
    for _ in range(20):
        backend.step()
    assert ([], None) == wire.read_reports(wire.Reader(follower.report([], None)))
    event.done = True
    for _ in range(20):
        backend.step()
    (report,), _ = wire.read_reports(wire.Reader(follower.report([], None)))
    assert (3, None) == (report.number, report.error)


def test_a_leader_must_copy_by_the_groups_backend() -> None:
    """Otherwise its copies would be made on one rank only; a follower with host pages needs a backend."""
    backend = SimulatedBackend(page_nbytes=16)
    transfers = TransferManager(backend, bytes_in_flight_max=64, queue_pages_max=1, deadline_s=1.0)
    host = CpuPool.bookkeeping(4)
    cache = TieredCache(CacheConfig(page_size=2), GpuPool.bookkeeping(4), b"f", host=host, transfers=transfers)
    for other in (None, GroupBackend(backend, 2)):
        with pytest.raises(BadInput, match="must copy by a GroupBackend"):
            Leader(cache, other, 4)
    with pytest.raises(BadInput, match="needs a backend"):
        Follower(2, 4, host_pages=4)


def test_a_leader_that_is_wrong_stops_its_followers() -> None:
    """A follower raises at once, and the leader misses it."""

    def run(channel: Channel) -> None:
        member = Member(channel, pages=12)
        if channel.rank:
            member.group._how._pages = 3  # type: ignore[attr-defined]
        member.ready(member.group.admit(PROMPT))

    found = outcomes(2, run, patience_s=0.5)
    assert isinstance(found[1], InvariantViolation) and "page" in str(found[1])
