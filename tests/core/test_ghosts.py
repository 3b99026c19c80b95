"""The running estimate of other sizes: exact where every page is looked at, near where some are, and bounded."""

import random
from array import array

import numpy as np
import pytest

from kvkeep import ghosts as module
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.ghosts import Ghosts, sizes
from kvkeep.index.run import Root, Run
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
        cache = TieredCache(
            CacheConfig(page_size=SIZE, ghosts=pages == 64, eviction="lru"), GpuPool.bookkeeping(pages), b"f"
        )
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


def chain(names: "np.ndarray[tuple[int], np.dtype[np.uint64]]", serial: int = 1) -> Run:
    """One run of pages of these names, as a tree has them."""
    run = Run(Root(b"", 0, 0), 0, int(names[0]), serial)
    run.names = array("Q", names.tolist())
    return run


def test_some_of_the_pages_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page in eight of 300 chains of some hundred pages: within two points of all pages at every size."""
    monkeypatch.setattr(module, "IDS_MAX", 8192)
    rng = np.random.default_rng(2)
    chains = [rng.integers(0, 2**63, 400).astype(np.uint64) for _ in range(60)]
    runs = [chain(names, serial) for serial, names in enumerate(chains)]
    ghosts, ids = Ghosts(1, 8192), dict[int, int]()
    exact, tokens = Stack(60 * 400), 0
    assert 8 == ghosts._every
    for _ in range(1500):
        which, depth = int(rng.zipf(1.3)) % 60, int(rng.integers(50, 400))
        prompt = int(rng.integers(1, depth + 1))
        ghosts.used(Place(runs[which], depth), prompt + 1)
        names = chains[which][:depth].tolist()
        exact.use(np.array([ids.setdefault(name, len(ids)) for name in names], dtype=np.int32), prompt)
        tokens += prompt + 1
    hits = exact.hits()
    for what, pages in sizes(8192, 0).items():
        near = ghosts.stats().found_tokens[what] / tokens
        assert near == pytest.approx(hits[min(pages, len(hits) - 1)] / tokens, abs=0.02), what


def test_a_path_is_looked_at_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run grew, lost its end and got another, or was split: the pages looked at are those of its names."""
    monkeypatch.setattr(module, "IDS_MAX", 64)
    rng = np.random.default_rng(3)
    ghosts = Ghosts(1, 4096)
    run = chain(rng.integers(0, 2**16, 9).astype(np.uint64))
    for _ in range(300):
        new = rng.integers(0, 2**16, int(rng.integers(1, 80))).astype(np.uint64).tolist()
        del run.names[int(rng.integers(1, len(run.names) + 1)) :]
        run.names.extend(new)
        place = Place(run, int(rng.integers(1, len(run.names) + 1)))
        looked_at = [d for d, name in enumerate(run.names[: place.depth]) if not d or not name % ghosts._every]
        assert (looked_at, [run.names[d] for d in looked_at]) == ghosts._path(place)
    head, tail = chain(np.array(run.names[:5])), run
    tail.parent, tail.start, tail.names = head, 5, run.names[5:]
    whole = [*head.names, *tail.names]
    looked_at = [d for d, name in enumerate(whole) if not d or not name % ghosts._every]
    assert looked_at == ghosts._path(Place(tail, tail.end))[0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of one page, each once, for ever: no more are remembered than there are places."""
    monkeypatch.setattr(module, "IDS_MAX", 64)
    monkeypatch.setattr(module, "RUNS_MAX", 16)
    ghosts = Ghosts(1, 8)
    for name in range(1, 2000):
        last = Place(chain(np.array([name], dtype=np.uint64), name), 1)
        ghosts.used(last, 2)
    assert len(ghosts._ids) + len(ghosts._free) == 64 and ghosts._stack.pages <= 44 and 16 == len(ghosts._looked)
    ghosts.used(last, 2)
    assert 1 == ghosts.stats().found_tokens["gpu x0.5"], "the latest ones are there"


def test_nobody_pays_who_does_not_want_it() -> None:
    """Without the setting there is no estimate."""
    cache = TieredCache(CacheConfig(page_size=SIZE, ghosts=False, eviction="lru"), GpuPool.bookkeeping(8), b"f")
    assert cache.ghosts() is None
