"""The group minimum: ranks with caches of their own take what all of them have, or none takes anything."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.agreement.channel import Channel
from kvkeep.agreement.group import GroupLease
from kvkeep.agreement.leader import Leader
from kvkeep.agreement.minimum import Minimum
from kvkeep.agreement.wire import GONE
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, LeaseRevoked, NotReady, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.index.names import make_identity
from kvkeep.lease import Lease
from kvkeep.stats import CacheStats
from kvkeep.tiers.gpu_pool import GpuPool
from tests.agreement.rank import PAGE_SIZE, Rank
from tests.agreement.threads import outcomes, together

PROMPT = array("i", range(11))  # five full pages, and a token


class Member(Rank):
    """A rank that also uses its cache alone."""

    def __init__(self, channel: Channel, **how: Any) -> None:
        super().__init__(channel, "minimum", **how)
        assert self.cache is not None
        self.own = self.cache

    @property
    def stats(self) -> CacheStats:
        """Of its cache."""
        return self.own.stats()

    def store(self, pages: int) -> None:
        """The first pages of the prompt are in this rank's cache, with their bytes."""
        if not pages:
            return
        lease = self.own.admit(PROMPT[: pages * PAGE_SIZE])
        for at in range(pages * PAGE_SIZE):
            row = self.memory.rows[lease.pages[at // PAGE_SIZE]].view("u8")
            row[at % PAGE_SIZE] = self.expected(PROMPT, at)
        self.own.finish(lease, pages * PAGE_SIZE)

    def fill(self, pages: int) -> None:
        """Others of this rank hold so many pages."""
        self.others.append(self.own.admit([1] * pages * PAGE_SIZE, reuse=False, store=False))

    def push_out(self) -> None:
        """What is cached on the GPU goes down to host memory."""
        lease = self.own.admit([9] * self.own.pool.pages * PAGE_SIZE, reuse=False, store=False)
        self.settle()
        self.own.abort(lease)
        self.settle()

    def settle(self) -> None:
        """Copies of this rank end."""
        for _ in range(20):
            self.step_copies(30)
            self.own.poll()

    def ready(self, lease: GroupLease) -> GroupLease:
        """Polls until it waits no more."""
        for _ in range(50):
            if lease.ready or lease.revoked:
                return lease
            self.step_copies(30)
            self.group.poll()
        raise AssertionError(f"{lease} waits for ever")


def on_members(size: int, do: Callable[[Member], Any], **how: Any) -> list[Any]:
    """What `do` returns on each member of a new group, whose caches are sound afterwards."""

    def run(channel: Channel) -> Any:
        member = Member(channel, **how)
        out = do(member)
        member.check_invariants()
        return out

    return together(size, run)


# ---------------------------------------------------------------------- length


@pytest.mark.parametrize("stored", [(5, 5, 5), (5, 2, 4), (0, 5, 5), (5, 5, 0)])
def test_the_shortest_match_is_taken_by_all(stored: tuple[int, ...]) -> None:
    """A rank that has more leaves it alone; what all have is not computed again."""

    def run(member: Member) -> tuple[int, int, list[int], int]:
        member.store(stored[member.number])
        lease = member.ready(member.group.admit(PROMPT))
        wrong = member.wrong(lease, PROMPT, lease.matched_len)
        return lease.matched_len, len(lease.pages), wrong, member.minimum.yielded_pages

    least = min(stored)
    assert [(least * PAGE_SIZE, 6, [], have - least) for have in stored] == on_members(3, run)


def test_nothing_is_loaded_before_the_length_is_agreed() -> None:
    """A rank whose pages are in host memory loads those that all have, and no other."""

    def run(member: Member) -> tuple[int, int, int]:
        member.store(5 if not member.number else 2)
        if not member.number:
            member.push_out()
        lease = member.ready(member.group.admit(PROMPT))
        assert member.own.transfers is not None
        loaded = member.own.transfers.stats().by["h2d", "promote"].pages
        return lease.matched_len, loaded, member.minimum.shortened

    assert [(4, 2, 0), (4, 0, 0)] == on_members(2, run, host_pages=16)


def test_a_request_runs_nowhere_before_all_have_their_pages() -> None:
    """While one rank's copies run the request waits on all of them."""

    def run(member: Member) -> list[bool]:
        member.store(4)
        if member.number == 1:
            member.push_out()
        lease = member.group.admit(PROMPT)
        seen = []
        for turn in range(3):
            if turn == 2:
                member.step_copies(50)
            over = member.group.poll()
            seen.append(lease.ready)
            assert over == ([lease] if lease.ready else [])
            if not lease.ready:
                for use in (lambda: lease.pages, lambda: lease.matched_len, lambda: member.group.seal(lease, 0)):
                    with pytest.raises(NotReady):
                        use()
        assert 8 == lease.matched_len
        return seen

    assert [[False, False, True]] * 2 == on_members(2, run, host_pages=16)


def test_a_load_that_fails_on_one_rank_shortens_all() -> None:
    """The others give back what is behind it and compute it too; the admission is counted once, and what it kept."""

    def run(member: Member) -> tuple[int, list[int], int, int, int]:
        member.store(5)
        member.push_out()
        member.group.finish(member.ready(member.group.admit(PROMPT[:5])), 4)  # its two pages come up again
        before = member.stats
        member.backend._fail_rate = 1.0 if member.number == 1 else 0.0
        lease = member.ready(member.group.admit(PROMPT))
        matched, wrong = lease.matched_len, member.wrong(lease, PROMPT, lease.matched_len)
        member.write(lease, PROMPT, matched, len(PROMPT))
        member.group.finish(lease, len(PROMPT))
        assert (member.number != 1) == member.minimum.shortened
        now = member.stats
        kept = now.matched_tokens - now.lost_tokens - before.matched_tokens
        on_gpu = now.matched_gpu_tokens - before.matched_gpu_tokens
        return matched, wrong, now.admissions - before.admissions, kept, on_gpu

    found = on_members(3, run, host_pages=16)
    assert [(4, [], 1, 4, 4)] * 3 == found


def test_a_request_that_one_rank_loses_is_revoked_on_all() -> None:
    """Where a rank's lease ends while it waits, every rank is told to admit again, and nobody holds pages."""

    def run(member: Member) -> tuple[bool, int, int]:
        member.store(5)
        member.push_out()
        lease = member.group.admit(PROMPT)
        if member.number == 1:
            assert lease.local is not None and member.own._traffic is not None
            member.own._traffic.copies.revoke(lease.local)
        member.ready(lease)
        with pytest.raises(LeaseRevoked):
            member.group.extend(lease, [1])
        member.group.abort(lease)  # as is done for those that end by themselves
        member.settle()
        return lease.revoked, member.stats.leases, member.group.stats.revocations

    assert [(True, 0, 1)] * 2 == on_members(2, run, host_pages=16)


class Meanwhile(Lease):
    """One that another thread revokes while somebody looks whether its copies are over."""

    @property
    def copies(self) -> set[Any]:
        """None any more."""
        self.revoked = True
        return set()

    @copies.setter
    def copies(self, value: set[Any]) -> None:
        """They are never there."""


def test_a_lease_that_is_revoked_meanwhile_is_not_ready() -> None:
    """The cache may be polled by another thread: a lease whose copies are over by then may have ended with them."""
    cache = TieredCache(CacheConfig(page_size=PAGE_SIZE), GpuPool.bookkeeping(4), b"f")
    for state in (Leader(cache)._state, lambda lease: Minimum(cache)._state(lease, None)):
        assert GONE == state(Meanwhile(0, make_identity(b"f"), array("i"), 0, 0, bytearray(), 0, 0))


def test_media_whose_inside_looks_ahead_are_not_split_by_the_minimum() -> None:
    """A length that one rank has can be taken by all: matches end inside no such item on any of them."""
    media = [MediaItem(3, 4, b"d" * 16, causal=False)]  # on pages 1 to 3

    def run(member: Member) -> tuple[int, int]:
        have = PROMPT[: (10, 10, 2)[member.number]]
        own = member.own.admit(have, media=media if len(have) > 7 else ())
        member.own.finish(own, len(have))
        lease = member.ready(member.group.admit(PROMPT, media=media))
        return lease.matched_len, lease.chunk_end(lease.matched_len, 5)

    assert [(2, 3)] * 3 == on_members(3, run)


# ---------------------------------------------------------------------- room


def test_a_rank_without_room_refuses_for_all() -> None:
    """All raise the numbers of that rank; nothing is held, evicted or counted as admitted anywhere."""

    def run(member: Member) -> tuple[str, int, int, int]:
        member.store(3)
        if member.number == 2:
            member.fill(8)
        before = member.stats
        with pytest.raises(OutOfPages) as refused:
            member.group.admit([7] * 10)
        stats = member.stats
        return (
            str(refused.value),
            stats.pages_evicted + stats.leases - before.leases,
            stats.admissions - before.admissions,
            member.group.stats.refusals,
        )

    found = on_members(3, run, pages=12)
    assert [
        ("5 pages asked for, 1 short: of 12 pages 8 are held by live requests and 0 by copies in flight", 0, 0, 1)
    ] * 3 == found


def test_what_is_not_taken_is_no_room_where_others_hold_it() -> None:
    """A rank whose room depends on a match that another rank lacks refuses for all, at once, with what it is short of.

    It is no revocation, after which the same would be found again for ever; when the others have ended all have it.
    """

    def run(member: Member) -> tuple[str, int, int]:
        if member.number == 1:
            member.store(5)
            member.others.append(member.own.admit(PROMPT))  # six pages
            member.fill(5)
        before = member.stats.leases
        with pytest.raises(OutOfPages) as refused:
            member.group.admit(PROMPT)
        held = member.stats.leases - before
        for lease in member.others:
            member.own.abort(lease)
        member.ready(member.group.admit(PROMPT))
        return str(refused.value), held, member.group.stats.revocations

    numbers = "6 pages asked for, 5 short: of 12 pages 11 are held by live requests and 0 by copies in flight"
    assert [(numbers, 0, 0)] * 3 == on_members(3, run, pages=12)


def test_a_rank_without_room_to_give_pages_back_revokes_on_all_once() -> None:
    """Where it can keep neither its own match nor the shorter one, all admit again, and hear then what is short."""

    def run(member: Member) -> tuple[bool, int, str, int]:
        member.store(5)
        if member.number == 1:
            member.push_out()
            member.backend._fail_rate = 1.0
        else:
            member.others.append(member.own.admit(PROMPT))
            member.fill(5)
        lease = member.ready(member.group.admit(PROMPT))
        with pytest.raises(OutOfPages) as refused:
            member.group.admit(PROMPT)
        member.backend._fail_rate = 0.0
        member.settle()
        return (
            lease.revoked,
            member.stats.leases - len(member.others),
            str(refused.value),
            member.group.stats.revocations,
        )

    found = on_members(2, run, pages=12, host_pages=16)
    assert found[0] == found[1] and (True, 0) == found[0][:2] and 1 == found[0][3]
    assert "6 pages asked for, 5 short: of 12 pages 11 are held" in found[0][2]


def test_room_that_is_gone_after_all_revokes_the_request_on_all() -> None:
    """Another user of one rank's cache may take the room between the agreement and the pages."""

    def run(member: Member) -> tuple[bool, int]:
        admit = member.own.admit
        if member.number == 1:

            def late(*args: Any, **how: Any) -> Any:
                member.others.append(admit([1] * 20, reuse=False, store=False))
                return admit(*args, **how)

            member.own.admit = late  # type: ignore[method-assign]
        lease = member.ready(member.group.admit(PROMPT))
        return lease.revoked, member.stats.leases

    assert [(True, 0), (True, 1)] == on_members(2, run, pages=12)


def test_more_pages_for_all_or_for_none() -> None:
    """A rank that has none for the next tokens keeps them from all; page counts stay equal, and it can go on later."""

    def run(member: Member) -> tuple[int, int, int, int]:
        lease = member.ready(member.group.admit(PROMPT, reuse=False))
        member.group.extend(lease, [1], room=1)  # twelve tokens, and room for one more: seven pages
        if member.number == 0:
            member.fill(5)
        with pytest.raises(OutOfPages):
            member.group.extend(lease, [2, 3, 4])
        assert lease.local is not None
        counts = lease.page_count, len(lease.pages), lease.length, lease.local.length
        if member.number == 0:
            member.own.abort(member.others.pop())
        member.group.extend(lease, [2, 3, 4])
        assert (15, 8) == (lease.length, len(lease.pages))
        return counts

    assert [(6, 6, 12, 12)] * 2 == on_members(2, run, pages=12)


def test_tokens_are_taken_back_on_all_without_an_exchange() -> None:
    """Lengths and page counts stay equal, pages go back to the pool, and what is sealed stays."""

    def run(member: Member) -> tuple[int, int, int, int, int]:
        lease = member.ready(member.group.admit(PROMPT))
        member.group.extend(lease, [1, 2, 3, 4], room=3)
        member.group.seal(lease, 8)
        before = member.channel.exchanges
        for length in (7, 16):
            with pytest.raises(BadInput, match=f"truncate to {length}: it must be 8 to 15"):
                member.group.truncate(lease, length)
        member.group.truncate(lease, 9)
        assert lease.local is not None
        counts = lease.length, lease.local.length, lease.page_count, len(lease.pages), member.stats.pages_free
        assert before == member.channel.exchanges
        member.group.extend(lease, [5, 6])
        member.group.finish(lease, 11)
        assert 5 == member.own.look([*PROMPT[:9], 5, 6], b"", b"", b"", (), True).pages
        return counts

    assert [(9, 9, 5, 5, 7)] * 2 == on_members(2, run, pages=12)


def test_tokens_that_have_pages_cost_no_exchange() -> None:
    """Ranks talk where pages are needed, and when somebody waits."""

    def run(member: Member) -> int:
        lease = member.ready(member.group.admit(PROMPT))
        before = member.channel.exchanges
        member.group.poll()
        member.group.extend(lease, [1])
        member.group.seal(lease, 11)
        member.group.finish(lease, 11)
        return member.channel.exchanges - before

    assert [0, 0] == on_members(2, run)


# ---------------------------------------------------------------------- input


def test_ranks_that_are_asked_different_things_stop() -> None:
    """Another prompt, another salt or another order on one rank is no agreement: all ranks raise."""
    for how in ({"salt": b"x"}, {"store": False}, {"label": b"cfg"}, {"media": [MediaItem(0, 1, b"m" * 16)]}):

        def run(channel: Channel, how: dict[str, Any] = how) -> None:
            Member(channel).group.admit(PROMPT, **(how if channel.rank else {}))

        assert [InvariantViolation] * 2 == [type(error) for error in outcomes(2, run)]
    found = outcomes(2, lambda channel: Member(channel).group.admit([5 + channel.rank]))
    assert all("ranks are not in the same step" in str(error) for error in found)


@pytest.mark.parametrize(
    ("tokens", "how", "message"),
    [
        ([], {}, "a prompt of 0 tokens"),
        ([1, -2, 3], {}, "token id -2 at position 1"),
        ([1] * 99, {}, "needs 50 pages, the pool has 12"),
        ([1], {"media": [MediaItem(0, 9, b"d" * 16)]}, "1 token"),
        ([1], {"salt": "text"}, "salt is str"),
    ],
)
def test_bad_input_is_refused_on_every_rank_and_the_group_goes_on(
    tokens: list[int], how: dict[str, Any], message: str
) -> None:
    """What could never be admitted is said in one line, and nothing is held."""

    def run(member: Member) -> int:
        with pytest.raises(BadInput, match=message):
            member.group.admit(tokens, **how)
        lease = member.ready(member.group.admit(PROMPT))
        with pytest.raises(BadInput, match="room -1"):
            member.group.extend(lease, room=-1)
        with pytest.raises(BadInput, match="kv_len 40"):
            member.group.finish(lease, 40)
        member.group.finish(lease, 0)
        with pytest.raises(InvariantViolation, match="has ended"):
            member.group.abort(lease)
        return member.stats.leases

    assert [0, 0] == on_members(2, run)


def test_the_prompts_buffer_may_be_used_again_at_once() -> None:
    """A request that has to be admitted once more is the one that was asked for."""

    def run(member: Member) -> tuple[int, int, int]:
        member.store(5)
        member.push_out()
        member.backend._fail_rate = 1.0 if member.number == 1 else 0.0
        buffer = array("i", PROMPT)
        lease = member.group.admit(buffer)
        buffer[:] = array("i", [0] * len(buffer))
        member.ready(lease)
        member.write(lease, PROMPT, lease.matched_len, len(PROMPT))
        member.group.finish(lease, len(PROMPT))
        member.backend._fail_rate = 0.0
        member.settle()
        again = member.ready(member.group.admit(PROMPT))
        written_over = member.own.look(buffer, b"", b"", b"", (), True).pages
        return again.matched_len, len(member.wrong(again, PROMPT, again.matched_len)), written_over

    assert [(10, 0, 0)] * 3 == on_members(3, run, host_pages=16)
