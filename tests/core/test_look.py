"""Looking at an admission before it is made, limiting it, and shortening what it took."""

import random
from array import array
from typing import Any

import pytest

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, InvariantViolation, NotReady, OutOfPages
from kvkeep.index.media import MediaItem, cut_before_split_item, place_media
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

    def __init__(
        self, pages: int = 12, host_pages: int = 0, in_flight: int = 1000, index_at: Any = "finish", **more: Any
    ) -> None:
        self.backend = SimulatedBackend(page_nbytes=16, when=When.LATE)
        transfers = TransferManager(
            self.backend,
            bytes_in_flight_max=in_flight * 16,
            queue_pages_max=2,
            deadline_s=1e9,
            clock=self.backend.clock,
        )
        self.cache = TieredCache(
            CacheConfig(page_size=PAGE_SIZE, eviction="lru", index_at=index_at),
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


ITEM = MediaItem(3, 4, b"d" * 16, causal=False)  # on pages 1 to 3


@pytest.mark.parametrize("index_at", ["finish", "seal"])
@pytest.mark.parametrize("host_pages", [0, 6, 20])
def test_what_is_seen_is_what_is_admitted(host_pages: int, index_at: str) -> None:
    """A look tells pages and refusal exactly as the admission finds them at once afterwards, and changes nothing.

    So it does for an admission that is to take less than there is: what is not taken may be room for the rest, or not.
    """
    chance, seen = (
        random.Random(f"look {host_pages} {index_at}"),
        dict.fromkeys(("refused", "less", "loaded", "both"), 0),
    )
    for seed in range(60):
        tiers, live = Tiers(chance.choice((6, 9, 12)), host_pages, index_at=index_at), []
        tiers.cache.prefilled(1, chance.choice((1e-9, 1.0)))
        for _ in range(40):
            document, pages = chance.choice((100, 200, 300)), chance.randint(1, 5)
            tokens = [document + at // PAGE_SIZE for at in range(pages * PAGE_SIZE + chance.randrange(PAGE_SIZE))]
            how: Any = {"reuse": chance.random() < 0.9, "media": [ITEM] * (document == 300 and len(tokens) > 6)}
            before = state(tiers.cache)
            look = tiers.look(tokens, **how)
            assert before == state(tiers.cache), seed
            by_page = place_media(how["media"], PAGE_SIZE, len(tokens)).by_page
            most = cut_before_split_item(chance.randint(0, look.pages), PAGE_SIZE, by_page)
            most = look.pages if chance.random() < 0.5 else most
            try:
                lease = tiers.cache.admit(tokens, **how, pages_max=most)
            except OutOfPages as error:
                assert str(error) == str(look.refusal_at(most)), seed
                seen["refused"] += 1
                seen["both"] += look.refusal is None
            else:
                assert None is look.refusal_at(most), seed
                assert lease.matched_len <= most * PAGE_SIZE, seed
                assert lease.matched_len == most * PAGE_SIZE or look.on_gpu < most < look.pages, seed
                seen["less"] += most < look.pages
                seen["loaded"] += bool(lease.loaded_len)
                live.append(lease)
            if chance.random() < 0.4:
                tiers.settle()
            ready = [one for one in live if not one.read_in_progress]
            if ready and chance.random() < 0.7:
                one = chance.choice(ready)
                if not one.revoked and chance.random() < 0.3:
                    assert one.matched_len is not None
                    tiers.cache.seal(one, one.length)
                    continue
                live.remove(one)
                if not one.revoked:
                    tiers.cache.finish(one, one.length)
    assert seen["refused"] and seen["less"] and bool(host_pages) == bool(seen["loaded"]), seen
    assert index_at == "finish" or seen["both"], seen  # what matched and is not taken is held by somebody else


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
    tiers.cache.shorten(lease, 1)
    assert 2 == len(misses.recent)


def test_a_negative_limit_is_refused() -> None:
    """One line says what it was and what would be right."""
    with pytest.raises(BadInput, match="pages_max -1: it must be 0 or more"):
        Tiers().cache.admit(PROMPT, pages_max=-1)


# ---------------------------------------------------------------------- shortening


@pytest.mark.parametrize("kept", [0, 2, 4, 5])
def test_a_lease_that_is_shortened_is_one_that_took_no_more(kept: int) -> None:
    """It has what it kept, other pages for the rest, and ids to name them by; it is counted as what it is now."""
    tiers = Tiers(pages=12)
    tiers.serve(PROMPT)
    before = tiers.cache.stats()
    lease = tiers.cache.admit(PROMPT)
    took = list(lease.pages)
    tiers.cache.shorten(lease, kept)
    tiers.cache.check_invariants()
    assert took[:kept] == list(lease.pages[:kept]) and took[5:] == list(lease.pages[5:])
    assert not set(took[kept:5]) & set(lease.pages)
    assert (2 * kept, 11, 6) == (lease.matched_len, lease.length, len(lease.pages))
    now = tiers.cache.stats()
    assert (1, 11, 2 * kept, 1) == (
        now.admissions - before.admissions,
        now.prompt_tokens - before.prompt_tokens,
        now.matched_tokens - before.matched_tokens,
        now.gate_wait.count - before.gate_wait.count,
    )
    longer = [*range(11), 50, 51, 52]
    tiers.cache.extend(lease, longer[11:])
    tiers.cache.finish(lease, len(longer))
    tiers.cache.check_invariants()
    assert 7 == tiers.look([*longer, 60]).pages
    assert 5 == tiers.look([*PROMPT, 99, 99]).pages


def test_nothing_of_a_prompt_is_asked_for_again() -> None:
    """A lease knows its own tokens: the caller's buffer may hold something else by then."""
    tiers = Tiers(pages=12)
    tiers.serve(PROMPT)
    buffer = array("i", PROMPT)
    lease = tiers.cache.admit(buffer)
    buffer[:] = array("i", [7] * len(buffer))
    tiers.cache.shorten(lease, 1)
    tiers.serve([9] * 10)  # takes what the lease gave back
    tiers.cache.finish(lease, 11)
    assert (5, 0) == (tiers.look(PROMPT).pages, tiers.look([7] * 11).pages)


def test_pages_that_were_loaded_are_counted_while_they_are_kept() -> None:
    """What came from host memory for an admission came from there, as far as it is still taken."""
    tiers = Tiers(pages=12, host_pages=16)
    tiers.serve(PROMPT)
    tiers.serve([9] * 24)
    lease = tiers.cache.admit(PROMPT)
    with pytest.raises(NotReady, match="cannot be shortened: copies of its pages are running"):
        tiers.cache.shorten(lease, 3)
    tiers.settle()
    assert 10 == lease.loaded_len
    tiers.cache.shorten(lease, 3)
    stats = tiers.cache.stats()
    assert (6, 6, 6) == (lease.loaded_len, stats.matched_tokens, stats.matched_host_tokens)


def test_room_for_a_shortened_lease_may_have_to_be_waited_for() -> None:
    """Cold pages without a host copy go down before the lease has their places; none is lost."""
    tiers = Tiers(pages=12, host_pages=16)
    tiers.serve(PROMPT)
    tiers.settle()
    sharing, lease = tiers.cache.admit(PROMPT), tiers.cache.admit(PROMPT)
    for first in (20, 40):
        tiers.cache.finish(tiers.cache.admit([first] * 4), 4)  # fills the pool; nothing has been copied down
    lost = tiers.cache.stats().pages_lost
    tiers.cache.shorten(lease, 1)
    waited = lease.read_in_progress
    tiers.cache.check_invariants()
    tiers.settle()
    assert waited and not lease.read_in_progress and lost == tiers.cache.stats().pages_lost
    tiers.cache.check_invariants()
    tiers.cache.finish(lease, 11)
    tiers.cache.abort(sharing)
    assert 2 == tiers.look([20] * 5).pages


def test_a_lease_without_room_to_be_shortened_stays_as_it_is() -> None:
    """What others hold too is no room: the refusal changes nothing, and tells how much is short."""
    tiers = Tiers(pages=12)
    tiers.serve(PROMPT)
    lease, sharing = tiers.cache.admit(PROMPT), tiers.cache.admit(PROMPT)
    tiers.cache.admit([1] * 8, reuse=False)
    before, pages = state(tiers.cache), list(lease.pages)
    with pytest.raises(OutOfPages, match="4 pages asked for, 3 short: of 12 pages 11 are held"):
        tiers.cache.shorten(lease, 1)
    after = state(tiers.cache)
    assert (1, before[1:]) == (after[0].refusals - before[0].refusals, after[1:])
    assert (pages, 10) == (list(lease.pages), lease.matched_len)
    tiers.cache.abort(sharing)
    tiers.cache.shorten(lease, 1)
    tiers.cache.check_invariants()


def test_only_what_matched_can_be_given_back() -> None:
    """Not more pages than matched, not a part of an item, not behind KV of its own, not of a lease that has ended."""
    tiers = Tiers()
    media = [ITEM]
    tiers.cache.finish(tiers.cache.admit(PROMPT, media=media), 11)
    lease = tiers.cache.admit(PROMPT, media=media)
    for pages in (-1, 6, 2, 3):
        with pytest.raises(BadInput, match=f"shortened to {pages} pages: it must be 0 to 5"):
            tiers.cache.shorten(lease, pages)
    tiers.cache.shorten(lease, 4)
    assert 8 == lease.matched_len
    tiers.cache.seal(lease, 10)
    with pytest.raises(BadInput, match="it has KV of its own already"):
        tiers.cache.shorten(lease, 1)
    tiers.cache.abort(lease)
    with pytest.raises(InvariantViolation, match="has ended"):
        tiers.cache.shorten(lease, 1)


def test_a_lease_is_shortened_after_a_reset() -> None:
    """It goes on with the pages that it keeps, and stores nothing: neither what it knows nor what it does not."""
    tiers = Tiers()
    tiers.serve(PROMPT)
    lease = tiers.cache.admit(PROMPT)
    tiers.cache.reset()
    tiers.cache.shorten(lease, 2)
    tiers.cache.check_invariants()
    tiers.cache.finish(lease, 11)
    tiers.cache.check_invariants()
    assert (0, 0) == (tiers.look(PROMPT).pages, tiers.look([0] * 11).pages)


# ---------------------------------------------------------------------- a lease of what matched only


def test_a_limit_holds_for_a_lease_that_reserves_nothing() -> None:
    """`reserve=False` with `pages_max`: it ends where the match does, and grows by what is appended."""
    tiers = Tiers()
    tiers.serve(PROMPT)
    lease = tiers.cache.admit(PROMPT, reserve=False, pages_max=3)
    assert (6, 6, 3) == (lease.matched_len, lease.length, len(lease.pages))
    tiers.cache.shorten(lease, 2)
    assert (4, 6, 3) == (lease.matched_len, lease.length, len(lease.pages))
    tiers.cache.extend(lease, PROMPT[6:])
    tiers.cache.finish(lease, 11)
    tiers.cache.check_invariants()
    assert 5 == tiers.look(PROMPT).pages
