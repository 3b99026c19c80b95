"""Replays of small traces: against caches written plainly, against each other, and the rules of an engine by hand."""

import random
from array import array
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.config import IndexAt
from kvkeep.errors import BadInput
from kvkeep.index.check import check_tree
from kvkeep.index.eviction import LruOrder
from kvkeep.index.run import Run
from kvkeep.index.runs import Inserted
from kvkeep.replay.best import best_matches, next_uses
from kvkeep.replay.engine import Engine
from kvkeep.replay.link import IDLE, Link
from kvkeep.replay.orders import Order
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.replaying import best_possible, known_future, replay
from kvkeep.replay.result import Counts, Settings
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Arrivals, Request, Trace
from kvkeep.transfer.backend import NO_WAIT
from kvkeep.transfer.manager import TransferManager
from kvkeep.transfer.plan import Plan
from tests.examples import examples
from tests.replay.naive import Use, best, lru

PAGE = 4


def made(seed: int, sessions: int = 12, turns: int = 12) -> tuple[Trace, list[Request]]:
    """Sessions that append, a few with equal beginnings and equal answers; and an order, some far more often."""
    rng = random.Random(seed)
    chains: list[list[int]] = [[number % 3] * rng.randrange(1, 10) for number in range(sessions)]
    requests: list[list[Request]] = [[] for _ in range(sessions)]
    order = []
    for time_s in range(sessions * turns):
        number = min(int(rng.expovariate(0.3)), sessions - 1)
        chain = chains[number]
        chain += [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
        prompt_len = len(chain)
        chain += [7] * rng.randrange(0, 6)
        known_len = rng.choice([prompt_len, len(chain)])
        order.append(Request(number, number, prompt_len, len(chain), known_len, float(time_s)))
        requests[number].append(order[-1])
    ids = [np.array(chain, dtype=np.int32) for chain in chains]
    return Trace("made", "0", None, ids, requests, "shared"), order


def in_blocks(trace: Trace, block: int) -> Trace:
    """The same as block ids: an id stands for its whole prefix."""
    known: dict[bytes, int] = {}
    chains = []
    for ids in trace.chains:
        ends = range(block, len(ids) + 1, block)
        chains.append(np.array([known.setdefault(ids[:end].tobytes(), len(known)) for end in ends], dtype=np.int32))
    return Trace("blocks", "1", block, chains, trace.sessions, trace.clock)


def as_uses(trace: Trace, requests: list[Request]) -> list[Use]:
    uses = []
    for r in requests:
        ids, stored = trace.chains[r.chain], max(r.prompt_len, min(r.final_len, r.known_len)) // PAGE
        uses.append(Use([ids[: (i + 1) * PAGE].tobytes() for i in range(stored)], r.prompt_len // PAGE))
    return uses


def counted(trace: Trace, requests: list[Request], timed: bool = False, **settings: Any) -> Counts:
    return replay(Pages(trace, PAGE), Arrivals(requests, timed), Settings(**{"eviction": "lru", **settings})).counts


@given(seed=st.integers(0, 10**6), capacity=st.integers(1, 60))
def test_reference_accounting_is_a_page_lru(seed: int, capacity: int):
    """Matched pages are those of a plain page LRU, in both tiers; the bound is a plain page Belady, and no lower."""
    trace, order = made(seed)
    uses = as_uses(trace, order)
    pages, arrivals = Pages(trace, PAGE), Arrivals(order, timed=True)
    settings = Settings(capacity * PAGE, 9 * PAGE, accounting="reference", eviction="lru")
    counts = replay(pages, arrivals, settings).counts
    above, both = lru(uses, capacity), lru(uses, capacity + 9)
    assert (above, both - above) == (counts.matched_pages_gpu, counts.matched_pages_cpu)
    found = best_possible(known_future(pages, arrivals, settings), PAGE, [capacity * PAGE, (capacity + 9) * PAGE])
    assert [best(uses, capacity), best(uses, capacity + 9)] == list(found.values())
    assert above <= best(uses, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_the_bound_with_answers_that_repeat(capacity: int):
    """Pages that several requests generate take one place, and generating a page again is no use of it."""
    requests = [
        ([0, 1], 2),
        ([0, 1], 1),
        ([5], 1),
        ([0, 1], 1),
        ([5], 1),
        ([0, 1], 2),
        ([5], 1),
        ([7, 8], 1),
        ([7, 8], 2),
    ]
    future = next_uses([(np.array(pages, dtype=np.int32), prompt) for pages, prompt in requests], 9)
    assert best([Use(pages, prompt) for pages, prompt in requests], capacity) == best_matches(future, capacity)


@hypothesis.settings(max_examples=examples(30))
@given(seed=st.integers(0, 10**6), capacity=st.integers(8, 60))
def test_blocks_count_as_their_tokens_do(seed: int, capacity: int):
    """Block ids of half a page give the counts of the tokens they stand for, in either accounting, in both tiers."""
    trace, order = made(seed)
    blocks = in_blocks(trace, PAGE // 2)
    order = [request._replace(known_len=request.prompt_len) for request in order]
    for accounting in ("reference", "engine"):
        for concurrency in (1, 3):
            settings: dict[str, Any] = {"gpu_tokens": capacity * PAGE, "cpu_tokens": 40, "accounting": accounting}
            tokens = counted(trace, order, concurrency=concurrency, **settings)
            assert same(tokens) == same(counted(blocks, order, concurrency=concurrency, **settings))
    arrivals = Arrivals(order, timed=True)
    bounds = [
        best_possible(known_future(pages, arrivals, Settings(1, eviction="lru")), PAGE, [capacity * PAGE])
        for pages in (Pages(trace, PAGE), Pages(blocks, PAGE))
    ]
    assert bounds[0] == bounds[1]


def same(counts: Counts) -> Counts:
    """Counts without what a clock measured."""
    counts.evict_ns = 0
    return counts


@given(seed=st.integers(0, 10**6), capacity=st.integers(20, 60))
@hypothesis.example(seed=798264, capacity=20)  # a prompt of one full page that is cached: a token of it is computed
def test_an_engine_with_one_live_request_is_the_reference_with_four_rules(seed: int, capacity: int):
    """One prompt token is computed, the last sampled token has no KV, one page is a tail, one computed twice is two."""
    trace, order = made(seed)
    # A request without a completion whose prompt fills its pages has no tail: a fifth rule, left out here.
    order = [r._replace(known_len=r.final_len) for r in order if r.final_len > r.prompt_len]
    longest = max(request.final_len for request in order)
    capacity = max(capacity, -(-longest // PAGE) + 1)
    pages, clock = Pages(trace, PAGE), TraceClock()
    pool = Reference(pages, capacity - 1, make_order("lru", capacity - 1, clock), clock, unwritten=1)
    insert = pool.tree.insert

    def with_private_twins(*what: Any) -> Inserted:
        """What a request computes though it is cached takes a page of its own while the request lives."""
        done = insert(*what)
        pool.capacity_pages -= done.twins
        return done

    pool.tree.insert = with_private_twins  # type: ignore[method-assign,assignment]
    for request in order:
        pool.capacity_pages = capacity - 1
        pool.serve(request)
    check_tree(pool.tree)
    counts = counted(trace, order, gpu_tokens=capacity * PAGE)
    assert pool.counts.matched_pages_gpu == counts.matched_pages_gpu
    assert counts.requests == len(order) and not counts.stalls


@given(
    seed=st.integers(0, 10**6),
    capacity=st.integers(8, 40),
    cpu=st.integers(0, 30),
    link=st.sampled_from([None, 2.0, 50.0]),
    timed=st.booleans(),
    index_at=st.sampled_from(["seal", "finish"]),
)
@hypothesis.example(seed=228847, capacity=8, cpu=21, link=None, timed=True, index_at="seal")  # two that preempt in turn
def test_whatever_comes_every_request_ends(
    seed: int, capacity: int, cpu: int, link: float | None, timed: bool, index_at: IndexAt
):
    """In tight pools requests wait and are preempted, each is served once, the cache stays sound, nobody is left."""
    trace, order = made(seed)
    settings = Settings(
        capacity * PAGE, cpu * PAGE, index_at=index_at, concurrency=5, link_tokens_per_s=link, decode_tokens_per_s=3.0,
        prefill_tokens_per_s=20.0, eviction="lru")  # fmt: skip
    engine = Engine(Pages(trace, PAGE), settings)
    counts = engine.replay(Arrivals(order, timed))
    engine.cache.check_invariants()
    stats = engine.cache.stats()
    assert (len(order), 0, 0) == (counts.requests, stats.leases, stats.pages_live)
    assert sum(r.prompt_len for r in order) == counts.prompt_tokens
    assert sum(-(-r.final_len // PAGE) > capacity for r in order) == counts.unserved
    assert len(order) - counts.unserved + counts.preemptions == stats.admissions


def chain(*requests: Request) -> Trace:
    """One session, its ids 0, 1, 2, ..., by time."""
    return Trace("chain", "2", None, [np.arange(400, dtype=np.int32)], [list(requests)], "shared")


def test_live_requests_hold_their_pages():
    """A second session's prompt has room only when the first has ended: it stalls, once, and is served."""
    a = Request(0, 0, 8, 16, 16, 0.0)
    b = Request(1, 1, 12, 13, 13, 0.1)
    trace = Trace("t", "3", None, [np.arange(16, dtype=np.int32), 100 + np.arange(16, dtype=np.int32)], [[a], [b]],
                  "shared")  # fmt: skip
    assert 1 == counted(trace, [a, b], timed=True, gpu_tokens=5 * PAGE).stalls
    assert 0 == counted(trace, [a, b], timed=True, gpu_tokens=8 * PAGE).stalls
    assert 0 == counted(trace, [a, b], timed=False, gpu_tokens=5 * PAGE).stalls  # one at a time in a rotation


def test_the_recorded_service_time_is_how_long_pages_are_held():
    """A request that took 10 s holds up one that needs its pages until then, whatever the rates say."""
    a = Request(0, 0, 16, 16, 16, 0.0, 10.0)
    b = Request(1, 1, 16, 16, 16, 1.0, 2.0)
    trace = Trace("t", "3", None, [np.arange(16, dtype=np.int32), 100 + np.arange(16, dtype=np.int32)], [[a], [b]],
                  "shared")  # fmt: skip
    done = replay(
        Pages(trace, PAGE), Arrivals([a, b], True), Settings(4 * PAGE, prefill_tokens_per_s=1.0, eviction="lru")
    )
    assert (1, 12.0) == (done.counts.stalls, done.simulated_s)


def test_a_decode_that_finds_no_page_preempts_the_youngest():
    """Two requests fill the pool and go on decoding: the later one gives way, comes again, and finds its pages."""
    a, b = Request(0, 0, 8, 24, 24, 0.0), Request(1, 1, 8, 24, 24, 0.0)
    ids = [np.arange(24, dtype=np.int32), 100 + np.arange(24, dtype=np.int32)]
    trace = Trace("t", "3", None, ids, [[a], [b]], "shared")
    counts = counted(trace, [a, b], timed=True, gpu_tokens=8 * PAGE)
    assert (1, 1, 0) == (counts.preemptions, counts.stalls, counts.matched_pages_gpu)


def test_a_turn_waits_for_the_turn_before_it():
    """It arrives while its session's turn before decodes, and matches what that leaves behind."""
    first, second = Request(0, 0, 40, 80, 80, 0.0), Request(0, 0, 100, 100, 100, 0.2)
    counts = counted(chain(first, second), [first, second], timed=True, gpu_tokens=400)
    assert 79 // PAGE == counts.matched_pages_gpu


def test_a_burst_shares_at_seal_and_not_at_finish():
    """Of two equal requests in flight the second matches the first one's prompt only where pages show as they fill."""
    twice = [Request(0, 0, 41, 60, 60)] * 2
    for index_at, matched in (("seal", 10), ("finish", 0)):
        counts = counted(chain(*twice), twice, gpu_tokens=400, index_at=index_at, concurrency=2)
        assert matched == counts.matched_pages_gpu


def test_a_slow_link_holds_a_request_up():
    """A hit below takes its pages' time on the link before the prefill can begin."""
    a = [Request(0, 0, 40, 40, 40), Request(1, 1, 40, 40, 40), Request(0, 0, 41, 41, 41)]
    ids = [np.arange(60, dtype=np.int32), 100 + np.arange(60, dtype=np.int32)]
    trace = Trace("t", "3", None, ids, [[a[0], a[2]], [a[1]]], "none")
    pages = Pages(trace, PAGE)
    fast: dict[str, Any] = {"gpu_tokens": 11 * PAGE, "cpu_tokens": 40 * PAGE, "prefill_tokens_per_s": 1e-3}
    free, slow = (
        replay(pages, Arrivals(a, False), Settings(**fast, link_tokens_per_s=link, eviction="lru"))
        for link in (None, 4.0)
    )
    assert (1, 9) == (free.counts.matched_pages_gpu, free.counts.matched_pages_cpu)
    assert (1, 9) == (slow.counts.matched_pages_gpu, slow.counts.matched_pages_cpu)
    assert free.simulated_s + 9 * PAGE / 4.0 <= slow.simulated_s


def test_requests_are_prefilled_one_at_a_time():
    """Of two prompts that load at the same time the second is prefilled after the first, and a third after both."""
    requests = [Request(n, n, 40, 40, 40, 0.0) for n in range(2)]
    ids = [100 * n + np.arange(40, dtype=np.int32) for n in range(2)]
    trace = Trace("t", "3", None, ids, [[requests[0]], [requests[1]]], "shared")
    settings = Settings(21 * PAGE, 40 * PAGE, prefill_tokens_per_s=1.0, link_tokens_per_s=1e6, eviction="lru")
    again = [request._replace(time_s=1000.0) for request in requests]
    other = Request(2, 2, 80, 80, 80, 500.0)
    third = Request(3, 3, 4, 4, 4, 1005.0)
    trace.chains.extend((200 + np.arange(80, dtype=np.int32), 300 + np.arange(4, dtype=np.int32)))
    done = replay(Pages(trace, PAGE), Arrivals([*requests, other, *again, third], True), settings)
    assert 16 <= done.counts.matched_pages_cpu
    assert 1000 + 3 * PAGE <= done.simulated_s  # of each prompt a page is computed, at a token a second


def test_copies_of_one_direction_go_one_after_the_other():
    """Two loads of two pages take four pages' time; a store meanwhile takes its own only."""
    clock = TraceClock()
    link = Link(clock, PAGE, 8.0)
    manager = TransferManager(link, bytes_in_flight_max=1 << 40, queue_pages_max=1 << 40, deadline_s=1e9, clock=clock)
    two, zeros = array("i", (0, 1)), array("q", (0, 0))
    for direction, cause in (("h2d", "promote"), ("h2d", "promote"), ("d2h", "demote")):
        manager.submit(Plan(direction, cause, two, two, zeros, zeros), after=NO_WAIT)  # type: ignore[arg-type]
    manager.start()
    ended = []
    while manager.busy:
        clock.now_s = link.next_end_s
        ended.append((clock.now_s, sorted(done.plan.cause for done in manager.poll())))
    assert [(1.0, ["demote", "promote"]), (2.0, ["promote"])] == ended
    assert IDLE == link.next_end_s


def test_an_order_is_told_the_time_of_the_trace():
    """Whatever an order sees of a request it sees at the request's time."""
    seen = []

    class Spy(LruOrder):
        def offer(self, run: Run) -> None:
            seen.append(clock())
            super().offer(run)

    clock = TraceClock()
    requests = [Request(0, 0, 8, 8, 8, 2.5), Request(0, 0, 12, 12, 12, 7.0)]
    Reference(Pages(chain(*requests), PAGE), 100, Spy(), clock).replay(requests)
    assert [2.5, 7.0] == seen


def test_an_empty_prompt_is_not_served():
    """There is nothing to admit; the requests beside it go on."""
    requests = [Request(0, 0, 0, 5, 0), Request(0, 0, 8, 8, 8)]
    counts = counted(chain(*requests), requests, gpu_tokens=400)
    assert (2, 1, 8) == (counts.requests, counts.unserved, counts.prompt_tokens)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_tokens": 3}, "--gpu-tokens 3: it must be a page of 4"),
        ({"gpu_tokens": 8, "cpu_tokens": 3}, "--cpu-tokens 3"),
        ({"gpu_tokens": 8, "eviction": "fifo"}, "--eviction fifo: it must be one of lru"),
        ({"gpu_tokens": 8, "accounting": "guess"}, "accounting is 'guess'"),
        ({"gpu_tokens": 8, "decode_tokens_per_s": 0.0}, "decode_tokens_per_s is 0.0"),
    ],
)
def test_what_cannot_be_replayed_is_refused(settings: dict[str, Any], words: str):
    """One line that names the setting."""
    request = Request(0, 0, 8, 8, 8)
    with pytest.raises(BadInput, match=words):
        counted(chain(request), [request], **settings)


def test_a_page_that_cuts_a_block_is_refused():
    """The message says which page sizes would do."""
    blocks = in_blocks(made(0)[0], 8)
    with pytest.raises(BadInput, match="blocks of 8 tokens; it must be a multiple of that, such as 16"):
        Pages(blocks, 12)
    Pages(blocks, 16)


# ---------------------------------------------------------------------- names kept in a file


@pytest.mark.parametrize("block", [None, 2])
def test_names_are_kept_and_made_anew(tmp_path: Path, block: int | None):
    """Kept names are used; a damaged, shorter or foreign file is as good as none and is replaced."""
    trace, order = made(5)
    trace = trace if block is None else in_blocks(trace, block)
    folder = tmp_path / "new" / "kvkeep"
    first = Pages(trace, PAGE, folder)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for bad in (b"", whole[:40], whole[:-3], whole[:-8], whole[:50] + b"\xff" + whole[51:], b"x" + whole):
        file.write_bytes(bad)
        again = Pages(trace, PAGE, folder)
        assert [file] == list(folder.iterdir()) and whole == file.read_bytes()
        for request in order:
            count = request.prompt_len // PAGE
            assert first.names(request.chain, 0, count) == again.names(request.chain, 0, count)
    Pages(trace, 2 * PAGE, folder)
    assert 2 == len(list(folder.iterdir()))


def test_kept_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the file there, no page is hashed."""
    trace, _ = made(5)
    first = Pages(trace, PAGE, tmp_path)
    monkeypatch.setattr("kvkeep.replay.pages.chain_names", None)
    assert first.names(0, 0, 3) == Pages(trace, PAGE, tmp_path).names(0, 0, 3)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path):
    """Names are made and not kept."""
    (tmp_path / "file").write_text("")
    assert Pages(made(5)[0], PAGE, tmp_path / "file").distinct


def test_rotation_of_a_trace_hits_what_its_requests_hit():
    """`Order` and `replay` together: two sessions in turn, each turn finds the pages of the one before."""
    sessions = [[Request(n, n, 8, 12, 12), Request(n, n, 16, 20, 20)] for n in range(2)]
    trace = Trace("t", "4", None, [100 * n + np.arange(20, dtype=np.int32) for n in range(2)], sessions, "none")
    done = replay(
        Pages(trace, PAGE), Order("rotate", 2).arrivals(trace), Settings(100, accounting="reference", eviction="lru")
    )
    assert (6, 48, 0.5) == (done.matched_pages, done.counts.prompt_tokens, done.hit_share)
    assert done.evict_us_per_page is None
