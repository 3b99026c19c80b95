"""What a reset reaches, and what it says of the rest; and two fingerprints alive at once."""

import pytest
import torch

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.encoder import EncoderCache
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout
from tests.core.test_cache_cases import make_cache, matched, run_through
from tests.encoder.test_encoder import digest
from tests.sim.rig import Rig

A = [1, 1, 2, 2, 3, 3]
B = [5, 5, 6, 6, 7]


def test_a_reset_says_what_it_could_not_do_yet() -> None:
    """Live requests, copies on their way and suspended requests, in both tiers; all of it is free in the end."""
    rig = Rig(pages=8, tier_pages=16, suspend_pages=4)
    parked = rig.admitted(B)
    rig.compute(parked)
    rig.do("suspend", parked, True)
    rig.settle()
    rig.serve([*A, 9])
    rig.push_out()
    loading = rig.admitted([*A, 9])
    (load,) = rig.jobs("promote")
    assert rig.backend.step(load)
    report = rig.cache.reset()
    assert (1, 4, 0, 3) == (report.leases, report.pages_held, report.pages_copying, report.host_pages_copying)
    assert (1, 3, 0) == (report.suspended, report.suspended_pages, report.outputs_held)
    assert not report.complete
    rig.do("abort", loading)
    report = rig.cache.reset()
    assert (0, 3, 3, 3) == (report.leases, report.pages_held, report.pages_copying, report.host_pages_copying)
    rig.settle()
    report = rig.cache.reset()
    assert (0, 0, 1) == (report.pages_held, report.host_pages_copying, report.suspended)
    assert not report.complete
    rig.do("discard", parked)
    assert rig.cache.reset().complete
    assert 8 == rig.free


@pytest.mark.parametrize("forget", [("reset",), ("set_fingerprint", 1)])
def test_what_was_suspended_before_a_reset_is_not_stored_after_it(forget: tuple[str, ...]) -> None:
    """It goes on with the pages that it had, and they are its own."""
    rig = Rig(pages=8, suspend_pages=4)
    parked = rig.admitted(B)
    rig.compute(parked)
    rig.do("suspend", parked, True)
    rig.settle()
    rig.world.do(forget)
    rig.do("resume", parked)
    rig.settle()
    rig.compute(parked)
    rig.do("extend", parked, [8, 8, 8], 0)
    rig.compute(parked)
    rig.do("finish", parked)
    assert (0, 8) == (rig.matched([*B, 8, 8, 8]), rig.free)


def test_two_sets_of_weights_serve_side_by_side() -> None:
    """Requests of the old ones go on and store nothing, those of the new ones share among themselves."""
    cache = make_cache(32)
    tokens = list(range(1, 10))
    run_through(cache, tokens)
    old = cache.admit([*tokens, 10])
    assert 8 == old.matched_len
    cache.set_fingerprint(b"new")
    new = cache.admit([*tokens, 10])
    assert 0 == new.matched_len
    for lease in (old, new):
        cache.extend(lease, [11, 12, 13])
        cache.seal(lease, 12)
    assert 12 == matched(cache, [*tokens, 10, 11, 12, 13])
    live = cache.stats().pages_live
    cache.finish(old, 12)
    assert live - len(old.pages) == cache.stats().pages_live, "its pages are free as it ends"
    cache.finish(new, 12)
    assert (12, 26) == (matched(cache, [*tokens, 10, 11, 12, 13]), cache.stats().pages_free)


def test_outputs_in_live_requests_are_told_apart() -> None:
    """Of every kind what is held is said, and what is not is gone."""
    layout = PageLayout(layers=1, kv_heads=2, head_dim=8, page_size=4)
    cache = TieredCache(CacheConfig(page_size=4), GpuPool.allocate(layout, 16), b"fp")
    encoder = EncoderCache(cache, b"tower")
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return torch.full((64,), float(len(calls)))

    with encoder.get_or_compute(digest(1), compute), encoder.get_or_compute(digest(2), compute) as second:
        lease = cache.admit([1, 2, 3])
        report = cache.set_fingerprint(b"new weights")
        assert (1, 2, 2) == (report.leases, report.outputs_held, report.pages_held)  # both are in one page
        assert torch.equal(torch.full((64,), 2.0), second.tensor)
    with encoder.get_or_compute(digest(1), compute) as again:
        assert "computed" == again.source
    assert 3 == len(calls)
    cache.abort(lease)
    cache.reset()
    assert 16 == cache.stats().pages_free
