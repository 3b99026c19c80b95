"""Exchanges between ranks: messages of any length in blocks of one size, and steps that must be the same."""

import pytest

from kvkeep.agreement import wire
from kvkeep.agreement.channel import BLOCK_NBYTES, Channel
from kvkeep.agreement.distributed import Distributed
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages, RankLost
from kvkeep.transfer.backend import NO_WAIT, Job, JobNumber
from kvkeep.transfer.plan import SlotCopy
from tests.agreement.threads import Meeting, Seat, channels, on_ranks, together
from tests.transfer.pools import plan


@pytest.mark.parametrize("longest", [0, 1, BLOCK_NBYTES - 24, BLOCK_NBYTES - 23, 3 * BLOCK_NBYTES])
def test_every_rank_hears_what_every_rank_says(longest: int) -> None:
    """Messages arrive whole whatever their lengths, which differ by rank, and a block's size is none of them."""
    said = [b"a" * longest, b"", b"ccc"]
    assert [said] * 3 == together(3, lambda channel: channel.exchange("poll", 7, said[channel.rank]))


def test_what_fits_a_block_takes_one_collective_and_what_does_not_takes_two() -> None:
    """The second one is made on every rank, or on none."""
    meeting = Meeting(2)
    seats = [Seat(meeting, rank) for rank in range(2)]
    ranks = [Channel(seat) for seat in seats]
    on_ranks(ranks, lambda channel: channel.exchange("admit", 0, b"short"))
    assert [1, 1] == [seat.gathers for seat in seats]
    on_ranks(ranks, lambda channel: channel.exchange("admit", 0, bytes(BLOCK_NBYTES * channel.rank)))
    assert [3, 3] == [seat.gathers for seat in seats]


@pytest.mark.parametrize("different", ["kind", "digest", "number"])
def test_ranks_in_different_steps_stop_all_of_them(different: str) -> None:
    """Another kind, another argument, or a step too many on one rank: every rank raises, and goes on raising."""
    ranks = channels(3)
    ranks[1].exchanges += different == "number"

    def step(channel: Channel) -> list[BaseException]:
        odd = channel.rank == 1
        caught: list[BaseException] = []
        for _ in range(2):
            try:
                kind = "poll" if odd and different == "kind" else "admit"
                channel.exchange(kind, 5 + (odd and different == "digest"), b"")  # type: ignore[arg-type]
            except (InvariantViolation, RankLost) as error:
                caught.append(error)
        return caught

    for first, second in on_ranks(ranks, step):
        assert isinstance(first, InvariantViolation) and "rank 1 is at" in str(first)
        assert isinstance(second, RankLost) and "has ended before" in str(second)


def test_a_channel_that_was_closed_says_so() -> None:
    """Nothing is sent after `close`."""
    (channel,) = channels(1)
    channel.close()
    with pytest.raises(RankLost, match="the channel was closed"):
        channel.exchange("poll", 0, b"")


@pytest.mark.parametrize("error", [SystemExit("stop"), MemoryError("no room"), ValueError()])
def test_an_exchange_that_ended_half_way_ends_the_channel(error: BaseException) -> None:
    """Whatever broke in: nobody knows what others have heard by then, so nothing is sent after it."""

    class Breaking(Seat):
        def gather(self, block: bytes) -> list[bytes]:
            """See `Transport`."""
            if self.gathers:
                raise error
            return super().gather(block)

    channel = Channel(Breaking(Meeting(1), 0))
    channel.exchange("poll", 0, b"")
    with pytest.raises(type(error)):
        channel.exchange("poll", 0, b"")
    with pytest.raises(RankLost, match=f"has ended before: {str(error) or type(error).__name__}"):
        channel.exchange("poll", 0, b"")


def test_a_group_needs_an_initialised_world() -> None:
    """Without torch.distributed, with another backend or deadline, one line says what is wrong."""
    with pytest.raises(BadInput, match="call init_process_group"):
        Distributed(None, deadline_s=1.0, backend="gloo")
    with pytest.raises(BadInput, match="backend is 'mpi'"):
        Distributed(None, deadline_s=1.0, backend="mpi")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="deadline_s is 0"):
        Distributed(None, deadline_s=0, backend="gloo")


def test_plans_come_out_as_they_went_in() -> None:
    """Numbers, causes, ids and slots of any number of plans; generations stay behind."""
    plans = [
        plan("demote", [3, 1], [7, 8]),
        plan("promote", [5], [0], SlotCopy(9, 8, 4, 24, 8)),
        plan("clean", [], [], SlotCopy(1, 0, 2, 3, 4), SlotCopy(1, 4, 2, 7, 4)),
    ]
    jobs = [Job(JobNumber(40 + i), one, NO_WAIT, 0, 0.0) for i, one in enumerate(plans)]
    message = wire.plans(jobs) + wire.ids([1, -2])
    reader = wire.Reader(message)
    assert [(40 + i, one) for i, one in enumerate(plans)] == wire.read_plans(reader)
    assert [1, -2] == list(reader.ids())


def test_reports_and_refusals_come_out_as_they_went_in() -> None:
    """A failure stays one, even without words; a refusal keeps its numbers."""
    ended = [wire.Report(1, None, 5), wire.Report(2**40, "zu spät", 0)]
    assert (ended, None) == wire.read_reports(wire.Reader(wire.reports(ended, None)))
    silent, death = wire.read_reports(wire.Reader(wire.reports([wire.Report(3, "", 0)], "gone")))
    assert (True, "gone") == (bool(silent[0].error), death)
    error = OutOfPages(asked=5, short=2, in_flight=1, held=3, total=9)
    assert str(error) == str(wire.read_refusal(wire.Reader(wire.refusal(error))))
    assert wire.read_refusal(wire.Reader(wire.refusal(None))) is None
