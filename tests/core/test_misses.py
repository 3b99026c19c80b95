"""The miss ledger: each cause by a small case, and that every token of every prompt is accounted for."""

import random
from typing import Any

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.lease import Lease
from kvkeep.misses import Cause, MissLedger
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend

SIZE = 4


class Told:
    """A cache with a miss ledger whose clock a test sets."""

    def __init__(self, pages: int = 16, host_pages: int = 0, suspend_pages: int = 0, **settings: Any) -> None:
        self.now_s = 0.0
        self.ledger = MissLedger(SIZE, clock=lambda: self.now_s, names_max=settings.pop("names_max", 1000))
        self.backend = SimulatedBackend(page_nbytes=1)
        manager = TransferManager(self.backend, bytes_in_flight_max=99, queue_pages_max=99, deadline_s=60.0)
        self.cache = TieredCache(
            CacheConfig(**{"page_size": SIZE, "eviction": "lru", **settings}),
            GpuPool.bookkeeping(pages),
            b"f",
            host=CpuPool.bookkeeping(host_pages, suspend_pages) if host_pages else None,
            transfers=manager if host_pages else None,
            misses=self.ledger,
        )

    def admit(self, tokens: list[int], **how: Any) -> Lease:
        lease = self.cache.admit(tokens, **how)
        while lease.read_in_progress:
            self.backend.step()
            self.cache.poll()
        return lease

    def serve(self, tokens: list[int], **how: Any) -> tuple[Cause | None, dict[Cause, int]]:
        """A whole request; why its match stopped, and the pages it missed by cause."""
        lease = self.admit(tokens, **how)
        self.cache.finish(lease, len(tokens))
        miss = self.ledger.recent[-1]
        assert len(tokens) == miss.prompt_tokens == miss.matched_tokens + sum(miss.tokens.values())
        return miss.cause, {cause: n // SIZE for cause, n in miss.tokens.items() if cause is not Cause.REST}


def tokens(kind: int, pages: int) -> list[int]:
    """`pages` full pages and one token more."""
    return [100 * kind + i for i in range(pages * SIZE)] + [99]


def test_new_prompts_and_prompts_that_are_there() -> None:
    """What was never seen is said so; what is found is no miss; one token is always computed."""
    told = Told()
    assert (Cause.NEVER_SEEN, {Cause.NEVER_SEEN: 3}) == told.serve(tokens(1, 3))
    assert (None, {}) == told.serve(tokens(1, 3))
    assert {Cause.REST: 1} == dict(told.ledger.recent[-1].tokens)
    assert (Cause.NEVER_SEEN, {Cause.NEVER_SEEN: 1}) == told.serve(tokens(1, 2)[:-1] + tokens(2, 1))


def test_evicted_and_how_long_ago() -> None:
    """Pages that had to leave are told with their age, and what is new behind them is told apart."""
    told = Told(pages=8)
    told.serve(tokens(1, 3))
    told.now_s = 10.0
    told.serve(tokens(2, 7))
    told.now_s = 52.0
    cause, missed = told.serve(tokens(1, 3)[:-1] + tokens(3, 2))
    assert (Cause.EVICTED, {Cause.EVICTED: 3, Cause.NEVER_SEEN: 2}) == (cause, missed)
    assert 42.0 == told.ledger.recent[-1].age_s
    ages = told.ledger.stats().evicted_age
    assert (1, 42.0) == (ages.counts[ages.bounds.index(100.0)], ages.sum_s)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"salt": b"s"}, Cause.OTHER_SALT),
        ({"adapter": b"a"}, Cause.OTHER_ADAPTER),
        ({"label": b"l"}, Cause.OTHER_LABEL),
        ({"media": [MediaItem(5, 3, b"d" * 16)]}, Cause.OTHER_MEDIA),
    ],
)
def test_the_same_tokens_under_another_identity(how: dict[str, Any], cause: Cause) -> None:
    """The tokens have been seen: the first field that differs is named, or the media digest."""
    told = Told()
    told.serve(tokens(1, 3), media=[MediaItem(5, 3, b"m" * 16)])
    how = {"media": [MediaItem(5, 3, b"m" * 16)], **how}
    stopped, missed = told.serve(tokens(1, 3), **how)
    assert cause is stopped
    assert {cause: 3 if cause is not Cause.OTHER_MEDIA else 2} == missed


def test_new_weights() -> None:
    """After `set_fingerprint` what was there is under another fingerprint; after `reset` it is forgotten."""
    told = Told()
    told.serve(tokens(1, 2))
    told.cache.reset()
    assert (Cause.RESET, {Cause.RESET: 2}) == told.serve(tokens(1, 2))
    told.cache.set_fingerprint(b"g")
    assert (Cause.OTHER_FINGERPRINT, {Cause.OTHER_FINGERPRINT: 2}) == told.serve(tokens(1, 2))


def test_what_the_caller_did_not_want_or_could_not_name() -> None:
    """Reuse that was declined, and media without a digest, are causes of their own."""
    told = Told()
    told.serve(tokens(1, 3))
    assert (Cause.OPTED_OUT, {Cause.OPTED_OUT: 3}) == told.serve(tokens(1, 3), reuse=False)
    nameless = [MediaItem(5, 2, None)]
    cause, missed = told.serve(tokens(1, 3), media=nameless)
    assert {Cause.NO_IDENTITY: 2} == missed and Cause.NO_IDENTITY is cause


def test_a_request_in_flight_has_it_already() -> None:
    """Two equal prompts at once: the second one's pages are being computed by the first."""
    told = Told()
    first = told.admit(tokens(1, 3))
    second = told.admit(tokens(1, 3))
    miss = told.ledger.recent[-1]
    assert (Cause.IN_FLIGHT, 12, 12) == (miss.cause, miss.tokens[Cause.IN_FLIGHT], miss.in_flight_tokens)
    told.cache.abort(first)
    told.cache.abort(second)
    assert (Cause.NOT_STORED, {Cause.NOT_STORED: 3}) == told.serve(tokens(1, 3))
    assert not told.ledger._live and not told.ledger._names_of


def test_pages_that_host_memory_has() -> None:
    """A load that would take longer than computing is declined, one that the queue refuses has too little room."""
    told = Told(pages=8, host_pages=16)
    told.serve(tokens(1, 3))
    told.cache.abort(told.admit(tokens(2, 7), reuse=False))
    assert (None, {}) == told.serve(tokens(1, 3)), "loaded"
    told.cache.abort(told.admit(tokens(2, 7), reuse=False))
    told.cache.prefilled(1000, 1e-9)
    assert (Cause.SLOWER, {Cause.SLOWER: 3}) == told.serve(tokens(1, 3))


def test_a_load_that_the_queue_refuses() -> None:
    """One load runs, one waits, and for a third there is no place in the queue: too little room."""
    told = Told(pages=12, host_pages=32)
    for kind in (1, 2, 3):
        told.serve(tokens(kind, 3))
    told.cache.abort(told.admit(tokens(9, 11), reuse=False))
    assert told.cache.transfers is not None
    told.cache.transfers._in_flight_nbytes_max, told.cache.transfers._queue_pages_max = 1, 2
    leases = [told.cache.admit(tokens(kind, 3)) for kind in (1, 2, 3)]
    assert [None, None, Cause.NO_ROOM] == [miss.cause for miss in list(told.ledger.recent)[-3:]]
    for lease in leases:
        told.cache.abort(lease)


def test_a_load_that_failed() -> None:
    """What a failed load cut out of the index is told so when it is looked for again."""
    told = Told(pages=8, host_pages=16)
    told.serve(tokens(1, 3))
    told.cache.abort(told.admit(tokens(2, 7), reuse=False))
    lease = told.cache.admit(tokens(1, 3))
    told.backend.fail(told.backend.jobs[0])
    while lease.read_in_progress:
        told.backend.step()
        told.cache.poll()
    told.cache.abort(lease)
    assert Cause.LOAD_FAILED is told.serve(tokens(1, 3))[0]


def test_a_resumed_request_is_no_prompt() -> None:
    """A suspended request looks again when it is resumed; its prompt is counted once."""
    told = Told(pages=8, host_pages=16, suspend_pages=8)
    ticket = told.cache.suspend(told.admit(tokens(1, 3)), 13)
    while not ticket.ready:
        told.cache.poll()
        told.backend.step()
    told.cache.abort(told.cache.resume(ticket, tokens(1, 3)))
    assert 1 == len(told.ledger.recent)


def test_names_are_forgotten_the_oldest_first() -> None:
    """What is remembered is bounded: an old eviction is a page never seen."""
    told = Told(pages=8, names_max=14)
    for kind in range(1, 12):
        told.serve(tokens(kind, 7))
    assert 14 == len(told.ledger._left) == len(told.ledger._seen)
    assert Cause.EVICTED is told.serve(tokens(10, 7))[0]
    assert Cause.NEVER_SEEN is told.serve(tokens(1, 7))[0]


def test_every_token_has_its_place_and_listeners_hear_the_same() -> None:
    """Over many requests tokens of all causes and matches add up; who listens beside the ledger misses nothing."""
    rng = random.Random(4)
    told, left = Told(pages=12), list[int]()

    class Listening:
        def stored(self, tier: object, names: Any, parent: int, reason: object) -> None: ...
        def removed(self, tier: object, names: Any, reason: object) -> None:
            left.extend(names.tolist())

        def cleared(self, tier: object) -> None: ...

    told.cache.watch(Listening())
    for _ in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        try:
            told.cache.finish(told.admit(prompt, reuse=rng.random() < 0.9), len(prompt))
        except OutOfPages:
            continue
    stats, misses = told.cache.stats(), told.cache.misses()
    assert misses is not None
    assert stats.prompt_tokens == stats.matched_tokens + sum(misses.tokens.values())
    assert len(left) == stats.pages_lost == len(set(told.ledger._left)) + len(left) - len(set(left))
    told.cache.watch(None)
    told.serve(tokens(9, 11))
    assert Cause.NEVER_SEEN in misses.tokens and Cause.EVICTED in misses.tokens
