"""Forks: two labels over the same pages, counted, inside one pool."""

import pytest
import torch

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.errors import BadInput, NotReady, OutOfPages
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from tests.core.test_cache_cases import make_cache, matched
from tests.sim.rig import Rig

TOKENS = [1, 2, 3, 4, 5, 6, 7]  # three full pages, one token behind them


def test_labels_never_match_each_other() -> None:
    """Nor what the fork of one computes."""
    cache = make_cache(16, forks=True)
    lease = cache.admit(TOKENS, label=b"main")
    fork = cache.fork(lease, 7, label=b"cfg")
    for live in (lease, fork):
        cache.extend(live, [8, 9])
        cache.finish(live, 9)
    cache.check_invariants()
    assert [8, 0, 0] == [matched(cache, [*TOKENS, 8, 9], label=label) for label in (b"main", b"cfg", b"")]


def test_full_pages_are_shared_and_the_tail_is_copied() -> None:
    """What one writes behind the common part the other does not see."""
    layout = PageLayout(layers=1, kv_heads=1, head_dim=2, page_size=2)
    cache = TieredCache(CacheConfig(page_size=2, forks=True), GpuPool.allocate(layout, 8), b"fp")
    memory = cache.pool.memory
    assert memory is not None
    lease = cache.admit(TOKENS)
    for number, page in enumerate(lease.pages):
        memory.kv[page] = float(number + 1)  # type: ignore[attr-defined]
    fork = cache.fork(lease, 7, label=b"cfg")
    assert list(lease.pages[:3]) == list(fork.pages[:3]) and lease.pages[3] != fork.pages[3]
    assert [2, 2, 2, 1, 1] == [cache._ledger.holders(page) for page in [*lease.pages, fork.pages[3]]]
    assert (7, 7, 3) == (fork.length, fork.kv_len, fork.sealed)
    kv = memory.kv  # type: ignore[attr-defined]
    assert torch.equal(kv[lease.pages[3], :, :, :1], kv[fork.pages[3], :, :, :1])
    kv[fork.pages[3], :, :, 1] = 50.0
    assert not (kv[lease.pages[3]] == 50.0).any()
    cache.check_invariants()
    cache.abort(lease)
    assert [1, 1, 1] == [cache._ledger.holders(page) for page in fork.pages[:3]]
    cache.extend(fork, [8], room=4)
    cache.finish(fork, 8)
    assert 8 - cache.stats().pages_cached == cache.stats().pages_free


def test_forks_are_off_unless_they_are_asked_for() -> None:
    """They go beyond what labels promise."""
    cache = make_cache(8)
    lease = cache.admit(TOKENS)
    with pytest.raises(BadInput, match=r"fork: forks are off: CacheConfig\(forks=True\) allows them"):
        cache.fork(lease, 7, label=b"cfg")
    assert 1 == cache.stats().leases


def test_a_fork_without_room_changes_nothing() -> None:
    """It needs a page for its tail."""
    cache = make_cache(4, forks=True)
    lease = cache.admit(TOKENS)
    with pytest.raises(OutOfPages):
        cache.fork(lease, 7, label=b"cfg")
    assert (1, 1, 0) == (cache.stats().leases, cache.stats().refusals, cache.stats().pages_free)
    assert [1] * 4 == [cache._ledger.holders(page) for page in lease.pages]
    cache.check_invariants()
    cache.truncate(lease, 6)
    fork = cache.fork(lease, 6, label=b"cfg")  # nothing to copy
    assert list(fork.pages) == list(lease.pages)
    with pytest.raises(OutOfPages):
        cache.extend(fork, [9, 9, 9])


def test_a_fork_may_be_rolled_back_to_what_it_shares_and_forked_and_windowed() -> None:
    """It is a lease like others, but for what is stored."""
    cache = make_cache(16, forks=True)
    lease = cache.admit(TOKENS)
    fork = cache.fork(lease, 7, label=b"cfg")
    cache.truncate(fork, 6)
    with pytest.raises(BadInput, match="truncate to 5 tokens: the first 6 of Lease 1 stay"):
        cache.truncate(fork, 5)
    cache.extend(fork, [17, 18, 19])
    again = cache.fork(fork, 9, label=b"third")
    assert list(fork.pages[:4]) == list(again.pages[:4])
    cache.protect_prefix(again, 2)
    cache.release_oldest(again, 2)
    assert list(again.pages[1:2]) == list(fork.pages[3:4])
    third = cache.fork(again, 9, label=b"fourth")
    assert (list(again.pages[:2]), 2, 1) == (list(third.pages[:2]), third.released, third.prefix_epoch)
    cache.check_invariants()
    for live in (lease, fork, again, third):
        cache.finish(live, live.kv_len)
    assert 6 == matched(cache, [*TOKENS, 17])
    cache.reset()
    assert 16 == cache.stats().pages_free


def test_idle_pages_of_who_won_the_race_can_be_had_behind_a_fork() -> None:
    """The index has another's page where the fork has its own, and behind it one that the fork holds."""
    cache = make_cache(6, index_at="finish", forks=True)
    winner, loser = cache.admit([1, 2, 3]), cache.admit([1, 2, 3, 4, 5])
    cache.finish(winner, 2)
    fork = cache.fork(loser, 4, label=b"cfg")
    cache.finish(loser, 4)
    assert (2, 1) == (cache.stats().pages_free, cache.stats().pages_cached)
    other = cache.admit([9] * 6)
    assert 3 == len(other.pages)
    cache.check_invariants()
    cache.abort(other)
    cache.finish(fork, 4)
    assert 6 == cache.stats().pages_free


def test_a_fork_of_new_weights_matches_nothing_either() -> None:
    """Its content is of the weights that the first one began with."""
    cache = make_cache(16, forks=True)
    lease = cache.admit(TOKENS)
    cache.seal(lease, 7)
    cache.set_fingerprint(b"new")
    fork = cache.fork(lease, 7, label=b"cfg")
    for live in (lease, fork):
        cache.finish(live, 7)
    assert [0, 0, 16] == [
        *(matched(cache, TOKENS, label=label) for label in (b"", b"cfg")), cache.stats().pages_free
    ]  # fmt: skip


def test_nothing_is_forked_while_pages_are_on_their_way() -> None:
    """A copy writes them."""
    rig = Rig(pages=12)
    tokens = [1, 1, 2, 2, 3, 3, 9]
    rig.serve(tokens)
    rig.push_out()
    request = rig.admitted(tokens)
    with pytest.raises(NotReady, match="cannot be forked: copies of its pages are running"):
        rig.cache.fork(rig.lease(request), 6, label=b"cfg")
    rig.settle()
    rig.compute(request)
    rig.do("fork", request, 77)
    assert list(rig.lease(request).pages[:3]) == list(rig.lease(rig.world.requests[77]).pages[:3])
