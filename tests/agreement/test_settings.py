"""What ranks agree on before they begin."""

import logging
import threading
from typing import Any

import pytest

from kvkeep.agreement.channel import Channel
from kvkeep.agreement.follower import Follower
from kvkeep.agreement.group import Group
from kvkeep.agreement.leader import GroupBackend, Leader
from kvkeep.agreement.settings import PIN_PERIOD_S, agree_pinning, agree_settings, all_or_none
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput
from kvkeep.index.names import Fingerprint
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from kvkeep.tiers.pinning import PinFailed
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend
from tests.agreement.rank import Rank
from tests.agreement.threads import outcomes, together

PRINT = Fingerprint("weights", "r1", "float16", "flash", "theta 1e4", 128, "NHD")


def texts(found: list[Any]) -> list[str]:
    """The messages of errors that must be there."""
    assert all(isinstance(one, BadInput) for one in found), found
    return [str(one) for one in found]


def test_settings_are_the_same_on_every_rank_afterwards() -> None:
    """Equal ones stay; the least, the most, or rank 0's value of others holds for all."""

    def start(channel: Channel) -> dict[str, Any]:
        rank = channel.rank
        return agree_settings(
            channel,
            {"page_size": 128, "eviction": "lru", "fingerprint": b"\x01\xff"},
            least={"pages": 100 - rank, "pinned": rank != 1},
            most={"load_s_per_page": 0.5 + rank},
            first={"copy_way": ("kernel", "dma", "batch")[rank]},
        )

    agreed = {"page_size": 128, "eviction": "lru", "fingerprint": "01ff", "pages": 98, "pinned": False}
    agreed |= {"load_s_per_page": 2.5, "copy_way": "kernel"}
    assert [agreed] * 3 == together(3, start)


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([{"pages": 5}, {"pages": 5}, {"pages": 6}], "pages is 6 on rank 2 and 5 on rank 0"),
        ([{"pages": 5}, {"pages": 5, "more": 1}], "more is 1 on rank 1 and missing on rank 0"),
        ([{"dtype": "float16"}, {"dtype": "bfloat16"}], "dtype is 'bfloat16' on rank 1 and 'float16' on rank 0"),
        ([{"pinned": True}, {"pinned": None}], "pinned is None on rank 1 and True on rank 0"),
        ([{"f": b"a"}, {"f": b"b"}], "f is '62' on rank 1 and '61' on rank 0"),
        ([dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)], "and 2 more: they must be equal on every rank"),
    ],
)
def test_a_difference_is_refused_on_every_rank_alike(by_rank: list[dict[str, Any]], message: str) -> None:
    """The message names the setting, a rank, and both values; every rank has the same one."""
    found = texts(outcomes(len(by_rank), lambda channel: agree_settings(channel, by_rank[channel.rank])))
    assert message in found[0] and 1 == len(set(found))


def test_names_under_other_rules_must_be_the_same_ones() -> None:
    """A rank that says nothing of a value that all are to have the least of is a difference too."""
    found = texts(outcomes(2, lambda channel: agree_settings(channel, {}, least={"p": 1} if channel.rank else {})))
    assert ["ranks differ: p is 'there' on rank 1 and missing on rank 0: they must be equal on every rank"] * 2 == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"same": {"pages": [5]}}, "setting pages is list: it must be a number, text, bytes or Fingerprint"),
        ({"same": {}, "least": {"pages": "5"}}, "setting pages is str: where the least counts it must be a number"),
        ({"same": {"pages": 5}, "most": {"pages": 5}}, "setting pages is given twice: a name must be used once"),
    ],
)
def test_what_one_rank_cannot_say_is_refused_on_all(settings: dict[str, Any], message: str) -> None:
    """The others hear of it at once, instead of waiting for a rank that has raised."""
    found = texts(
        outcomes(3, lambda channel: agree_settings(channel, **(settings if channel.rank == 1 else {"same": {}})))
    )
    assert [f"rank 1: {message}"] * 3 == found


def test_fingerprints_differ_in_their_slice_only() -> None:
    """Each rank holds another slice of the model; weights must be the same ones."""

    def start(channel: Channel, revision: str) -> dict[str, Any]:
        mine = Fingerprint("weights", revision, "float16", "flash", "rope", 128, "NHD", f"{channel.rank}/2")
        return agree_settings(channel, {"fingerprint": mine})

    assert "r1" == together(2, lambda channel: start(channel, "r1"))[1]["fingerprint.revision"]
    found = texts(outcomes(2, lambda channel: start(channel, f"r{channel.rank}")))
    assert "fingerprint.revision is 'r1' on rank 1 and 'r0' on rank 0" in found[1]


@pytest.mark.parametrize(
    ("mechanisms", "how", "message"),
    [
        (("minimum", "minimum"), {"pages": (12, 14)}, "pages is 14 on rank 1 and 12 on rank 0"),
        (("minimum", "minimum"), {"host_pages": (4, 0)}, "host_pages is 0 on rank 1 and 4 on rank 0"),
        (("minimum", "minimum"), {"eviction": ("lru", "rhythm")}, "eviction is 'rhythm' on rank 1 and 'lru' on rank 0"),
        (("leader", "leader"), {"pages": (12, 14)}, "pages is 14 on rank 1 and 12 on rank 0"),
        (("leader", "leader"), {"host_pages": (4, 6)}, "host_pages is 6 on rank 1 and 4 on rank 0"),
        (("minimum", "leader"), {}, "mechanism is 'leader' on rank 1 and 'minimum' on rank 0"),
        (("minimum", "minimum"), {"dtype": ("float16", "float32")}, "dtype is 'float32' on rank 1"),
    ],
)
def test_a_group_does_not_start_with_different_settings(
    mechanisms: tuple[str, str], how: dict[str, tuple[Any, Any]], message: str
) -> None:
    """Pools, order, mechanism, and whatever an engine adds: one message, on both ranks."""

    def start(channel: Channel) -> Rank:
        return Rank(channel, mechanisms[channel.rank], **{name: pair[channel.rank] for name, pair in how.items()})

    found = texts(outcomes(2, start))
    assert message in found[0] and found[0] == found[1]


def test_rank_0_leads_and_all_others_follow() -> None:
    """Two leaders would decide on their own, and copies that others are not waited for would be over too soon."""

    def leader(channel: Channel, copied_on: int = 2) -> Leader:
        shared = GroupBackend(SimulatedBackend(page_nbytes=16), copied_on)
        transfers = TransferManager(shared, bytes_in_flight_max=64, queue_pages_max=1, deadline_s=1.0)
        config, host = CacheConfig(page_size=2), CpuPool.bookkeeping(4)
        cache = TieredCache(config, GpuPool.bookkeeping(4), b"f", host=host, transfers=transfers)
        return Leader(cache, shared, 4)

    def follower(channel: Channel) -> Follower:
        return Follower(2, 4, SimulatedBackend(page_nbytes=16), 4)

    for makers, message in (
        ((leader, leader), "leader is 1 on rank 1 and 0 on rank 0"),
        ((follower, follower), "leader is 0 on rank 1 and None on rank 0"),
        ((lambda channel: leader(channel, 1), follower), "copied_on is 2 on rank 1 and 1 on rank 0"),
    ):
        found = texts(outcomes(2, lambda channel, makers=makers: Group(channel, makers[channel.rank](channel), b"f")))  # type: ignore[misc]
        assert message in found[0] and found[0] == found[1]
    assert "it must have a leader" in texts(outcomes(1, lambda channel: Group(channel, follower(channel), b"f")))[0]
    together(2, lambda channel: Group(channel, follower(channel) if channel.rank else leader(channel), b"f"))


def test_a_groups_own_settings_cannot_be_named_again() -> None:
    """What an engine adds is compared besides them, and hides none."""

    def start(channel: Channel) -> Rank:
        return Rank(channel, "minimum", index_at="seal") if channel.rank else Rank(channel, "minimum")

    found = texts(outcomes(2, start))
    assert ["rank 1: setting index_at is given twice: a name must be used once"] * 2 == found


class Registrar:
    """Pins up to so many bytes, once `begin` is set."""

    def __init__(self, nbytes_max: int) -> None:
        self.nbytes_max = nbytes_max
        self.begin = threading.Event()
        self.begin.set()
        self.registered: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        """See `pinning.Registrar`."""
        self.begin.wait()
        if nbytes > self.nbytes_max:
            raise PinFailed(f"{nbytes} bytes are too many")
        self.registered.add(address)

    def unregister(self, address: int) -> None:
        """See `pinning.Registrar`."""
        self.registered.remove(address)


LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=8, page_size=128)


@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_pin_or_none(background: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where one rank's memory cannot be pinned the others unpin theirs, and say why."""

    def start(channel: Channel, nbytes_max: int) -> tuple[bool, int, int]:
        registrar = Registrar(nbytes_max)
        pool = CpuPool(LAYOUT, 4, pin="auto", registrar=registrar, background=background)
        pinned = agree_pinning(channel, pool)
        return pinned, pool.pinned_pages, len(registrar.registered)

    assert [(True, 4, 1)] * 3 == together(3, lambda channel: start(channel, 1 << 30))
    with caplog.at_level(logging.WARNING):
        assert [(False, 0, 0)] * 3 == together(3, lambda channel: start(channel, 10 if channel.rank == 1 else 1 << 30))
    said = [record.message for record in caplog.records if "no rank's is" in record.message]
    assert 2 == len(said) and all(text.startswith("rank 1 could not pin") for text in said)
    assert not background or "too many" in said[0]


def test_ranks_wait_for_one_that_pins_for_longer_than_the_deadline() -> None:
    """It says that it is still there; nobody is taken for lost, and nothing is unpinned."""
    slow = Registrar(1 << 30)
    slow.begin.clear()

    def start(channel: Channel) -> bool:
        registrar = slow if channel.rank == 1 else Registrar(1 << 30)
        pool = CpuPool(LAYOUT, 4, pin="auto", registrar=registrar, background=True)
        if channel.rank == 0:
            threading.Timer(5 * PIN_PERIOD_S, slow.begin.set).start()
        return agree_pinning(channel, pool)

    assert [True] * 3 == together(3, start, patience_s=3 * PIN_PERIOD_S)


def test_what_one_rank_cannot_make_none_has() -> None:
    """`all_or_none` undoes what the others made, and tells all of them which rank could not, and why."""
    undone: list[int] = []

    def start(channel: Channel) -> CpuPool:
        registrar = Registrar(10 if channel.rank == 2 else 1 << 30)

        def undo(pool: CpuPool) -> None:
            pool.close()
            undone.append(channel.rank)

        return all_or_none(
            channel,
            "the host pool",
            lambda: CpuPool(LAYOUT, 4, pin=True, registrar=registrar),
            undo,
        )

    found = texts(outcomes(3, start))
    assert found[0].startswith("the host pool: rank 2: pinning the CPU pool") and 1 == len(set(found))
    assert [0, 1] == sorted(undone)
    assert [3, 3] == together(2, lambda channel: all_or_none(channel, "it", lambda: 3))


def test_others_hear_whatever_keeps_a_rank_from_making_it() -> None:
    """An error that is not of kvkeep, as of a device without memory, ends it on all; its own rank has it whole."""

    def make(channel: Channel) -> int:
        if channel.rank == 1:
            raise MemoryError("32 GiB\nof which none")
        return 3

    found = outcomes(3, lambda channel: all_or_none(channel, "the pool", lambda: make(channel)))
    assert ["the pool: rank 1: MemoryError: 32 GiB"] * 3 == texts(found)
    assert isinstance(found[1].__cause__, MemoryError)
