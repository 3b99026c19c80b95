"""The running estimate of other sizes: exact where every page is looked at, near where some are, and bounded."""

import random

import numpy as np
import pytest

from kvkeep import ghosts as module
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.ghosts import Ghosts, sizes
from kvkeep.index.runs import Place
from kvkeep.stack import Stack
from kvkeep.tiers.gpu_pool import GpuPool

SIZE = 2


def serve(cache: TieredCache, tokens: list[int]) -> int:
    lease = cache.admit(tokens)
    cache.finish(lease, len(tokens))
    return lease.matched_len


def prompts(count: int, kinds: int, seed: int = 1) -> list[list[int]]:
    """Sessions that go on in random order."""
    rng = random.Random(seed)
    sessions: list[list[int]] = [[kind, kind] for kind in range(kinds)]
    out = []
    for _ in range(count):
        tokens = rng.choice(sessions)
        tokens += [rng.randrange(100) for _ in range(rng.randrange(2, 9))]
        out.append(list(tokens))
        if len(tokens) > 50:
            del tokens[2:]
    return out


def test_it_is_what_caches_of_these_sizes_match() -> None:
    """A cache of half, two and four times the size that serves the same requests one by one matches as many tokens."""
    trace = prompts(400, 9)
    found = {}
    for pages in (32, 64, 128, 256):
        cache = TieredCache(CacheConfig(page_size=SIZE, ghosts=pages == 64), GpuPool.bookkeeping(pages), b"f")
        found[pages] = sum(serve(cache, tokens) for tokens in trace)
        if pages == 64:
            estimate = cache.ghosts()
    assert estimate is not None
    assert sum(map(len, trace)) == estimate.prompt_tokens
    told = estimate.found_tokens
    assert 0 < found[32] < found[64] < found[128] < found[256]
    # A real pool of that size has a tail page more in use; and of a prompt on a page border one page less can match.
    for pages, what in ((32, "gpu x0.5"), (64, "now"), (128, "gpu x2"), (256, "gpu x4")):
        assert told[what] == pytest.approx(found[pages], rel=0.08), what


def test_sizes_of_two_tiers() -> None:
    """Each tier is changed while the other stays; sizes are both together."""
    assert {
        "now": 110, "gpu x0.5": 105, "gpu x2": 120, "gpu x4": 140, "host x0.5": 60, "host x2": 210, "host x4": 410
    } == sizes(10, 100)  # fmt: skip
    assert ["now", "gpu x0.5", "gpu x2", "gpu x4"] == list(sizes(10, 0))


def path(names: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> Place:
    return names  # type: ignore[return-value]


def test_some_of_the_pages_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page in eight of 300 chains of some hundred pages: within two points of all pages at every size."""
    monkeypatch.setattr(module, "path_names", lambda names: names)
    monkeypatch.setattr(module, "IDS_MAX", 8192)
    rng = np.random.default_rng(2)
    chains = [rng.integers(0, 2**63, 400).astype(np.uint64) for _ in range(60)]
    ghosts, ids = Ghosts(1, 8192), dict[int, int]()
    exact, tokens = Stack(60 * 400), 0
    assert 8 == ghosts._every
    for _ in range(1500):
        names = chains[int(rng.zipf(1.3)) % 60][: int(rng.integers(50, 400))]
        prompt = int(rng.integers(1, len(names) + 1))
        ghosts.used(path(names), prompt + 1)
        exact.use(np.array([ids.setdefault(name, len(ids)) for name in names.tolist()], dtype=np.int32), prompt)
        tokens += prompt + 1
    hits = exact.hits()
    for what, pages in sizes(8192, 0).items():
        near = ghosts.stats().found_tokens[what] / tokens
        assert near == pytest.approx(hits[min(pages, len(hits) - 1)] / tokens, abs=0.02), what


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of one page, each once, for ever: no more are remembered than there are places."""
    monkeypatch.setattr(module, "path_names", lambda names: names)
    monkeypatch.setattr(module, "IDS_MAX", 64)
    ghosts = Ghosts(1, 8)
    for name in range(1, 2000):
        ghosts.used(path(np.array([name], dtype=np.uint64)), 2)
    assert len(ghosts._ids) + len(ghosts._free) == 64 and ghosts._stack.pages <= 44
    ghosts.used(path(np.array([1999], dtype=np.uint64)), 2)
    assert 1 == ghosts.stats().found_tokens["gpu x0.5"], "the latest ones are there"


def test_nobody_pays_who_did_not_ask() -> None:
    """Without the setting there is no estimate."""
    cache = TieredCache(CacheConfig(page_size=SIZE), GpuPool.bookkeeping(8), b"f")
    assert cache.ghosts() is None
