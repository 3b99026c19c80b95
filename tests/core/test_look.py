"""Looking at an admission before it is made, limiting it, and making it again with less."""

import random
from typing import Any

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.misses import Cause, MissLedger
from kvkeep.tiers.cpu_pool import CpuPool
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.simulated import SimulatedBackend, When

PAGE_SIZE = 2
PROMPT = list(range(11))


class Tiers:
    """A cache without bytes, over two tiers if there are host pages; copies end in `settle`.

    in_flight: pages that may be on their way at once; of loads that wait, two.
    """

    def __init__(self, pages: int = 12, host_pages: int = 0, in_flight: int = 1000, **more: Any) -> None:
        self.backend = SimulatedBackend(page_nbytes=16, when=When.LATE)
        transfers = TransferManager(
            self.backend,
            bytes_in_flight_max=in_flight * 16,
            queue_pages_max=2,
            deadline_s=1e9,
            clock=self.backend.clock,
        )
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE_SIZE, eviction="lru"),
            GpuPool.bookkeeping(pages),
            b"f",
            host=CpuPool.bookkeeping(host_pages) if host_pages else None,
            transfers=transfers if host_pages else None,
            **more,
        )

    def serve(self, tokens: list[int]) -> None:
        """A whole request."""
        lease = self.cache.admit(tokens)
        self.settle()
        if not lease.revoked:
            self.cache.finish(lease, len(tokens))

    def settle(self) -> None:
        """Copies end."""
        self.cache.poll()
        while self.backend.movable:
            self.backend.step()
            self.cache.poll()

    def look(self, tokens: list[int], *, media: Any = (), reuse: bool = True) -> Any:
        """What `admit` would find."""
        return self.cache.look(tokens, b"", b"", b"", media, reuse)


def state(cache: TieredCache) -> Any:
    """All that can be told of a cache."""
    return cache.stats(), [(list(run.pages), run.stamps) for run in cache._tree.runs()], list(cache._leases)


@pytest.mark.parametrize("host_pages", [0, 6, 20])
def test_what_is_seen_is_what_is_admitted(host_pages: int) -> None:
    """A look tells pages and refusal exactly as the admission finds them at once afterwards, and changes nothing."""
    chance, seen = random.Random(f"look {host_pages}"), {"refused": 0, "matched": 0, "on the way": 0}
    for seed in range(60):
        tiers, live = Tiers(chance.choice((6, 9, 12)), host_pages), []
        tiers.cache.prefilled(1, chance.choice((1e-9, 1.0)))
        for _ in range(40):
            document, pages = chance.choice((100, 200, 300)), chance.randint(1, 5)
            tokens = [document + at // PAGE_SIZE for at in range(pages * PAGE_SIZE + chance.randrange(PAGE_SIZE))]
            reuse = chance.random() < 0.9
            before = state(tiers.cache)
            look = tiers.look(tokens, reuse=reuse)
            assert before == state(tiers.cache), seed
            try:
                lease = tiers.cache.admit(tokens, reuse=reuse)
            except OutOfPages as error:
                assert str(error) == str(look.refusal), seed
                seen["refused"] += 1
            else:
                assert (None, lease.matched_len) == (look.refusal, look.pages * PAGE_SIZE), seed
                seen["matched"] += bool(look.pages)
                seen["on the way"] += bool(lease.loaded_len)
                live.append(lease)
            if chance.random() < 0.4:
                tiers.settle()
            ready = [one for one in live if not one.read_in_progress]
            if ready and chance.random() < 0.7:
                one = chance.choice(ready)
                live.remove(one)
                if not one.revoked:
                    tiers.cache.finish(one, one.length)
    assert seen["refused"] and seen["matched"] and bool(host_pages) == bool(seen["on the way"]), seen


def test_a_load_that_would_be_refused_is_no_match() -> None:
    """While the queue of loads is full, pages in host memory are computed: that is what a look says."""
    tiers = Tiers(pages=30, host_pages=30, in_flight=4)
    documents = [[first + at for at in range(9)] for first in (100, 200, 300)]
    for document in documents:
        tiers.serve(document)
    fill = []
    for at in range(15):
        fill.append(tiers.cache.admit([at] * 4, reuse=False, store=False))
        tiers.settle()
    for lease in fill:
        tiers.cache.abort(lease)
    found = []
    for document in documents:
        look = tiers.look(document)
        found.append((look.pages, tiers.cache.admit(document).matched_len // PAGE_SIZE))
    assert [(4, 4), (4, 4), (0, 0)] == found


def test_a_look_is_refused_what_could_never_be_admitted() -> None:
    """The same lines as `admit` has."""
    tiers = Tiers()
    for tokens, message in (([], "0 tokens"), ([1] * 99, "needs 50 pages, the pool has 12")):
        with pytest.raises(BadInput, match=message):
            tiers.look(tokens)
        with pytest.raises(BadInput, match=message):
            tiers.cache.admit(tokens)


def test_a_look_ends_inside_no_item_and_behind_none_without_a_name() -> None:
    """As a match does."""
    tiers = Tiers()
    tiers.serve(PROMPT)
    assert 5 == tiers.look(PROMPT).pages
    assert 1 == tiers.look(PROMPT, media=[MediaItem(3, 2, None)]).pages
    assert 0 == tiers.look(PROMPT, reuse=False).pages


def test_an_admission_takes_no_more_than_it_may() -> None:
    """`pages_max` cuts the match, and what is behind it is computed; more than there is changes nothing."""
    for pages_max, matched in ((None, 10), (3, 6), (0, 0), (99, 10)):
        tiers = Tiers()
        tiers.serve(PROMPT)
        lease = tiers.cache.admit(PROMPT, pages_max=pages_max)
        assert (matched, 6, 11) == (lease.matched_len, len(lease.pages), lease.length)
        tiers.cache.finish(lease, 11)
        tiers.cache.check_invariants()
        assert 5 == tiers.look(PROMPT).pages


def test_what_was_not_to_be_taken_is_a_cause_of_its_own() -> None:
    """The miss ledger counts pages behind `pages_max` as such, and tells of an admission once."""
    misses = MissLedger(PAGE_SIZE)
    tiers = Tiers(misses=misses)
    tiers.serve(PROMPT)
    lease = tiers.cache.admit(PROMPT, pages_max=2)
    miss = misses.recent[-1]
    assert (Cause.CAPPED, 4, {Cause.CAPPED: 6, Cause.REST: 1}) == (miss.cause, miss.matched_tokens, dict(miss.tokens))
    tiers.cache.admit(PROMPT, pages_max=1, instead_of=lease)
    assert 2 == len(misses.recent)


def test_an_admission_in_place_of_another_is_counted_once() -> None:
    """The one before ends first, so its pages are there for the second; counts are those of the second."""
    tiers = Tiers(pages=6)
    tiers.serve(PROMPT)
    before = tiers.cache.stats()
    first = tiers.cache.admit(PROMPT)
    second = tiers.cache.admit(PROMPT, pages_max=2, instead_of=first)
    now = tiers.cache.stats()
    assert (1, 11, 4) == (
        now.admissions - before.admissions,
        now.prompt_tokens - before.prompt_tokens,
        now.matched_tokens - before.matched_tokens,
    )
    assert 1 == now.gate_wait.count - before.gate_wait.count
    assert not first.live and 4 == second.matched_len
    with pytest.raises(InvariantViolation, match="has ended"):
        tiers.cache.admit(PROMPT, instead_of=first)
    tiers.cache.abort(second)
    tiers.cache.check_invariants()


def test_pages_that_the_one_before_has_loaded_stay_counted_as_such() -> None:
    """What came from host memory for an admission came from there, also when it is made again with less."""
    tiers = Tiers(pages=12, host_pages=16)
    tiers.serve(PROMPT)
    tiers.serve([9] * 24)
    first = tiers.cache.admit(PROMPT)
    tiers.settle()
    assert 10 == first.loaded_len
    tiers.cache.admit(PROMPT, pages_max=3, instead_of=first)
    stats = tiers.cache.stats()
    assert (6, 6) == (stats.matched_tokens, stats.matched_host_tokens)


def test_an_admission_in_place_of_another_that_finds_no_room_leaves_none() -> None:
    """The first has ended and the second is refused."""
    tiers = Tiers(pages=12)
    tiers.serve(PROMPT)
    first = tiers.cache.admit(PROMPT)
    sharing = tiers.cache.admit(PROMPT)
    tiers.cache.admit([1] * 8, reuse=False)
    with pytest.raises(OutOfPages):
        tiers.cache.admit(PROMPT, pages_max=0, instead_of=first)
    assert not first.live and sharing.live
    tiers.cache.check_invariants()
