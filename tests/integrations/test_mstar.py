"""The adapter over M*'s real KV manager and engine, with a toy node, on a CPU: hits, and who holds pages.

Must not use a stand-in for anything of M*: where it is not installed, these tests are skipped.
"""

import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("mstar", reason="mstar-ai is not installed in this environment: run `make test-mstar`")

from mstar.engine.resources import KVStep, Segment, StepContext

from examples.mstar_toy import EMBEDDING, HEADS, PAGE, VOCABULARY, WEIGHTS, WIDTH, request_info, step, turned
from kvkeep.errors import InvariantViolation
from kvkeep.index.media import MediaItem
from kvkeep.integrations.mstar import KeptKV, KeptReqConfig, Prompt
from tests.integrations.mstar_requests import (
    Gate,
    add,
    ask,
    await_ready,
    cold,
    fill,
    ids_of,
    kept_engine,
    leave,
    pages_to_be_had,
    stream_of,
    streams_of_a_device,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------------- hits


def test_a_hit_gives_what_a_cold_run_gives() -> None:
    """48 of 53 tokens match; the other 5, and what is decoded then, are those of M* alone, to rounding."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    _, want, *decoded = cold(prompt[:48], prompt[48:], [7], [8], [9])
    ask(engine, "warm", ids_of(20, seed=9))
    got = ask(engine, "b", prompt)
    assert (5, WIDTH) == got.shape
    # to rounding: the kept pages were computed in one step of 53
    assert torch.allclose(want, got, atol=1e-5)
    for token, hidden in zip([7, 8, 9], decoded, strict=True):
        assert torch.allclose(hidden, step(engine, "b", [token], "decode")[0], atol=1e-5)
    assert 48 == kept.counts.matched_tokens
    kept.check_invariants()


def test_pages_of_the_same_schedule_give_the_very_bits() -> None:
    """Where the donor was computed in the same steps, hidden states and decoded ones are equal bit by bit."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "donor", prompt[:48])
    got = ask(engine, "b", prompt)
    _, want, decoded = cold(prompt[:48], prompt[48:], [7])
    assert torch.equal(want, got)
    assert torch.equal(decoded, step(engine, "b", [7], "decode")[0])
    assert 53 + 1 == engine._resources["rope"].position("b", "main")


def test_what_was_generated_is_matched_too() -> None:
    """The next turn's prompt finds the pages that decoding filled."""
    engine, kept = kept_engine()
    prompt, answer = ids_of(40, seed=2), ids_of(30, seed=3)
    ask(engine, "a", prompt)
    for token in answer:
        step(engine, "a", [token], "decode")
    engine.remove_request("a")
    turn = prompt + answer + ids_of(9, seed=4)
    assert len(turn) - 64 == len(ask(engine, "b", turn))  # the last generated id has KV as well: it was an input
    kept.check_invariants()


def test_ids_are_noted_as_they_were_when_they_were_computed() -> None:
    """M* may reuse the memory of a step's inputs: what was generated keeps its names."""
    engine, kept = kept_engine()
    prompt, answer, buffer = ids_of(40, seed=2), ids_of(30, seed=3), torch.zeros(1, dtype=torch.long)
    ask(engine, "a", prompt)
    for token in answer:
        buffer[0] = token
        step(engine, "a", buffer, "decode")
    engine.remove_request("a")
    turn = prompt + answer + ids_of(9, seed=4)
    got = ask(engine, "b", turn)
    assert len(turn) - 64 == len(got)
    assert torch.allclose(reference(turn)[64:], got, atol=1e-4)
    kept.check_invariants()


def test_at_least_one_token_is_computed() -> None:
    """A prompt that is there entirely, and ends with a page, computes its last page."""
    engine, kept = kept_engine()
    prompt = ids_of(64, seed=5)
    leave(engine, kept, "a", prompt)
    assert 16 == len(ask(engine, "b", prompt))


def test_a_hit_from_host_memory() -> None:
    """Pages that left the pool come back: not ready meanwhile, and then the same bits."""
    engine, kept = kept_engine(pages=12)
    prompt = ids_of(101, seed=6)
    leave(engine, kept, "a", prompt[:96])
    fill(engine, kept)
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt[:96], prompt[96:])[1], got)
    assert 96 == kept.cache.stats().matched_host_tokens
    kept.check_invariants()


def test_a_request_is_not_ready_while_its_pages_are_on_their_way() -> None:
    """M* sees nothing of a hit from host memory before all of it has arrived."""
    gate = Gate()
    engine, kept = kept_engine(pages=12, wrap_backend=gate)
    prompt = ids_of(101, seed=6)
    leave(engine, kept, "a", prompt)
    fill(engine, kept)
    gate.closed = True
    add(engine, "b", prompt)
    for _ in range(50):
        assert not engine.check_ready("LLM", "b", request_info("b")).ready
    assert "b" not in {rid for rid, labels in engine._resources["kv"]._streams.items() if labels["main"].page_indices}
    gate.closed = False
    await_ready(engine, "b")
    assert 96 == stream_of(engine, "b").stored_len == engine._resources["rope"].position("b", "main")
    kept.check_invariants()


def test_a_mixed_hit() -> None:
    """The first pages of a prompt from the GPU, where another request holds them, the others from host memory."""
    engine, kept = kept_engine(pages=14)
    prompt = ids_of(101, seed=7)
    leave(engine, kept, "a", prompt[:96])
    ask(engine, "holder", [*prompt[:32], 5])
    fill(engine, kept, pages=10)
    before = kept.cache.stats().matched_host_tokens
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt[:96], prompt[96:])[1], got)
    assert 64 == kept.cache.stats().matched_host_tokens - before
    assert stream_of(engine, "holder").page_indices[:2] == stream_of(engine, "b").page_indices[:2]
    kept.check_invariants()


def test_a_failed_read_is_a_miss() -> None:
    """M* computes the whole prompt, and nothing is wrong or lost."""
    gate = Gate()
    engine, kept = kept_engine(pages=12, wrap_backend=gate)
    prompt = ids_of(101, seed=8)
    leave(engine, kept, "a", prompt)
    fill(engine, kept)
    gate.failing = True
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt)[0], got)
    assert 1 == kept.counts.loads_failed
    kept.check_invariants()
    engine.remove_request("b")
    gate.failing = False
    assert 5 == len(ask(engine, "c", prompt))
    kept.check_invariants()


def test_a_failed_read_that_two_requests_wait_for() -> None:
    """Who shared a load that failed is admitted anew, and computes its prompt."""
    gate = Gate()
    engine, kept = kept_engine(pages=20, wrap_backend=gate)
    prompt = ids_of(101, seed=8)
    leave(engine, kept, "a", prompt)
    fill(engine, kept)
    gate.closed = gate.failing = True
    for rid in ("b", "c"):
        add(engine, rid, [*prompt, ord(rid) - 90])
        assert not engine.check_ready("LLM", rid, request_info(rid)).ready
    gate.closed = False
    for rid in ("b", "c"):
        await_ready(engine, rid)
        assert step(engine, rid, [*prompt, ord(rid) - 90])[1] is None
    assert kept.counts.loads_failed >= 2
    kept.check_invariants()
    hidden, _ = step(engine, "c", [7], "decode")
    assert torch.allclose(reference([*prompt, 9, 7])[-1:], hidden, atol=1e-4)


# ---------------------------------------------------------------------- who holds what


def test_releases_are_counted() -> None:
    """A page that two requests hold is free for others only after the second has let go; a double release raises."""
    engine, _ = kept_engine(pages=12, cpu_tier_gib=0)
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    assert stream_of(engine, "a").page_indices[:3] == stream_of(engine, "b").page_indices[:3]
    assert 11 - 5 == kv._arena.num_free
    engine.remove_request("a")
    assert 11 - 4 == kv._arena.num_free
    engine.add_request("big")
    assert step(engine, "big", [1] * 8 * PAGE)[1].pages_short == 1
    hidden, _ = step(engine, "b", [7], "decode")
    assert torch.allclose(cold(prompt, [7])[1], hidden, atol=1e-5)
    pages = list(stream_of(engine, "b").page_indices)
    engine.remove_request("b")
    with pytest.raises(InvariantViolation, match="released twice"):
        kv._arena.release(pages)


def test_reclaimable_counts_exclusive_pages() -> None:
    """What a victim is said to give is what others can have."""
    engine, _ = kept_engine(pages=32, cpu_tier_gib=0)
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    assert 4 == kv.reclaimable("a") == kv.get_offload_priority("a")
    ask(engine, "b", prompt)
    assert [1, 1, 0] == [kv.reclaimable(rid) for rid in ("a", "b", "nobody")]


def test_offload_while_pages_are_shared() -> None:
    """A request is offloaded whole, says what that gave, and goes on with its bits when all else was evicted."""
    with streams_of_a_device():
        engine, kept = kept_engine(pages=12, offload_pages=16)
        prompt = ids_of(53, seed=1)
        ask(engine, "a", prompt)
        ask(engine, "b", prompt)
        want = cold(prompt, [7], [8])
        assert 1 == engine.offload_request("LLM", "a")
        assert torch.allclose(want[1], step(engine, "b", [7], "decode")[0], atol=1e-5)
        engine.remove_request("b")
        kept.check_invariants()
        fill(engine, kept)
        await_ready(engine, "a")
        kept.check_invariants()
        assert torch.equal(want[1], step(engine, "a", [7], "decode")[0])
        assert torch.equal(want[2], step(engine, "a", [8], "decode")[0])
        more = ids_of(12, seed=3)
        for token in more:
            step(engine, "a", [token], "decode")
        engine.remove_request("a")
        kept.check_invariants()
        assert 11 == pages_to_be_had(kept)
        assert 3 + 1 == len(ask(engine, "c", [*prompt, 7, 8, *more, 9]))  # it kept its names meanwhile


@pytest.mark.parametrize("media", [(), (MediaItem(3, 30, b"1" * 32, causal=True),)])
def test_offload_of_a_hit_that_has_not_begun(media: tuple[MediaItem, ...]) -> None:
    """A request that was offloaded between its hit and its first step is cut as if nothing had been."""
    with streams_of_a_device():
        engine, kept = kept_engine(pages=12, offload_pages=16)
        prompt = ids_of(53, seed=1)
        leave(engine, kept, "a", prompt[:48], media=media)
        add(engine, "b", prompt, media=media)
        await_ready(engine, "b")
        assert 4 == engine.offload_request("LLM", "b")
        fill(engine, kept)
        await_ready(engine, "b")
        assert torch.equal(cold(prompt[:48], prompt[48:])[1], step(engine, "b", prompt)[0])
        kept.check_invariants()
        engine.remove_request("b")
        matches = {m: kept.cache.admit(prompt, label=b"main", media=m).matched_len for m in ((), media)}
        assert 48 == matches[media] and (not media or 0 == matches[()])


def test_a_reset_stream_does_not_write_over_pages_of_others() -> None:
    """`reset_request` without `free` begins anew in other pages."""
    engine, kept = kept_engine()
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    engine._resources["rope"].reset_request("a")
    kv.reset_request("a", free=False)
    other = ids_of(53, seed=2)
    step(engine, "a", other)
    kept.check_invariants()
    assert torch.allclose(cold(prompt, [7])[1], step(engine, "b", [7], "decode")[0], atol=1e-5)


def test_a_fork_does_not_write_over_pages_of_others() -> None:
    """A label that becomes the target of a fork gets pages of its own, whatever it had matched."""
    engine, kept = kept_engine()
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    ask(engine, "reader", prompt)
    engine.add_request("b", {"kv": KeptReqConfig(prompts={"main": Prompt(prompt)})})
    await_ready(engine, "b")  # matched, not begun
    kv._ensure_label("b", "side")
    assert kv._alloc("b", "side", 40).success
    kv._streams["b"]["side"].stored_len = 40
    ctx = StepContext(request_ids=("b",), graph_walk="prefill", slot=0, capture=False)
    fork = KVStep(segments=(Segment("b", "side", 1),), pre_forks=(("side", "main"),))
    assert kv.admit(fork, ctx).ok
    kv.plan(fork, ctx)
    kv.commit(fork, ctx)
    kept.check_invariants()
    assert not set(stream_of(engine, "b").page_indices) & set(stream_of(engine, "reader").page_indices)
    assert torch.allclose(cold(prompt, [7])[1], step(engine, "reader", [7], "decode")[0], atol=1e-5)


def test_promised_pages_can_be_had_back() -> None:
    """A running request gets the pages of one that was promised some and has not begun; that one begins later."""
    engine, kept = kept_engine(pages=12, cpu_tier_gib=0)
    first, second = ids_of(90, seed=1), ids_of(79, seed=2)
    ask(engine, "a", first)
    add(engine, "b", second)
    await_ready(engine, "b")
    assert 5 == len(stream_of(engine, "b").page_indices)
    for token in ids_of(16, seed=3):
        assert step(engine, "a", [token], "decode")[1] is None
    assert 1 == kept.counts.revoked and [] == stream_of(engine, "b").page_indices
    kept.check_invariants()
    engine.remove_request("a")
    await_ready(engine, "b")
    assert torch.equal(cold(second)[0], step(engine, "b", second)[0])
    kept.check_invariants()


def test_a_prompt_reserves_its_pages() -> None:
    """Ready means that the pages of the prompt are there: of prompts that do not fit together one is refused."""
    engine, kept = kept_engine(pages=12, cpu_tier_gib=0)
    add(engine, "a", ids_of(90, seed=1))
    await_ready(engine, "a")
    assert 6 == len(stream_of(engine, "a").page_indices)
    add(engine, "b", ids_of(90, seed=2))
    await_ready(engine, "b")
    assert 1 == kept.counts.refused and [] == stream_of(engine, "b").page_indices
    assert step(engine, "a", ids_of(90, seed=1))[1] is None
    assert step(engine, "b", ids_of(90, seed=2))[1].pages_short == 1
    kept.check_invariants()


# ---------------------------------------------------------------------- many requests


def reference(ids: list[int]) -> torch.Tensor:
    """The toy's hidden states of all positions, without pages."""
    h, n = EMBEDDING[torch.tensor(ids)], len(ids)
    positions, mask = torch.arange(n), torch.ones(n, n, dtype=torch.bool).triu(1)
    for w in WEIGHTS:
        q, k, v = ((h @ w[x]).view(n, HEADS, -1) for x in "qkv")
        q, k = turned(q, positions), turned(k, positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        attention = scores.masked_fill(mask, float("-inf")).softmax(-1)
        h = h + torch.einsum("hqk,khd->qhd", attention, v).reshape(n, WIDTH) @ w["o"]
    return h


def run_random(requests: int, seed: int) -> KeptKV:
    """Sessions that come back, share beginnings, decode, are offloaded, removed early; each output is checked."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    engine, kept = kept_engine(pages=40, offload_pages=64)
    sessions: list[list[int]] = []
    live: dict[str, list[int]] = {}
    for number in range(requests):
        rid = f"r{number}"
        if sessions and draw.random() < 0.7:
            ids = [*draw.choice(sessions)[: draw.randrange(1, 200)], *ids_of(draw.randrange(1, 30), draw.random())]
        else:
            ids = ids_of(draw.randrange(1, 120), draw.random())
        add(engine, rid, ids)
        if draw.random() < 0.05:
            engine.remove_request(rid)
            continue
        if draw.random() < 0.5:
            await_ready(engine, rid)
            if draw.random() < 0.1 and engine.offload_request("LLM", rid):
                kept.check_invariants()
        hidden, error = step_with_room(engine, rid, ids, live, draw)
        if error is None:
            assert torch.allclose(reference(ids)[-len(hidden) :], hidden, atol=1e-4)
            live[rid] = ids
        else:
            engine.remove_request(rid)
        for other in draw.sample(sorted(live), min(len(live), 3)):
            for _ in range(draw.randrange(4)):
                token = draw.randrange(VOCABULARY)
                hidden, error = step_with_room(engine, other, [token], live, draw, walk="decode")
                if error is None:
                    live[other].append(token)
                    assert torch.allclose(reference(live[other])[-1:], hidden, atol=1e-4)
        while len(live) > 5 or (live and draw.random() < 0.3):
            gone = draw.choice(sorted(live))
            sessions.append(live.pop(gone))
            engine.remove_request(gone)
        kept.check_invariants()
    for rid in live:
        engine.remove_request(rid)
    kept.check_invariants()
    return kept


def step_with_room(engine: Any, rid: str, ids: list[int], live: Any, draw: random.Random, walk: str = "prefill") -> Any:
    """A step; requests are offloaded, as M*'s worker does it, until there is room, or nobody is left."""
    others = [other for other in live if other != rid]
    while True:
        if not engine.is_offloaded("LLM", rid) or engine.reload_request("LLM", rid):
            hidden, error = step(engine, rid, ids, walk)
            if error is None:
                return hidden, None
        if not others:
            return None, "no room"
        engine.offload_request("LLM", others.pop(draw.randrange(len(others))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_thousand_random_requests(seed: int) -> None:
    """The same with other seeds."""
    with streams_of_a_device():
        run_random(1000, seed)


def test_questions_from_another_thread() -> None:
    """M*'s scheduler asks and removes in one thread while the steps run in another: nothing is lost or wrong."""
    engine, kept = kept_engine(pages=40)
    prompts = {f"r{i}": [*ids_of(60, seed=i % 4), *ids_of(20, seed=100 + i)] for i in range(120)}
    ready: queue.Queue[str | None] = queue.Queue(maxsize=4)
    wrong: list[str] = []

    def run_steps() -> None:
        while (rid := ready.get()) is not None:
            hidden, error = step(engine, rid, prompts[rid])
            if hidden is not None and not torch.allclose(reference(prompts[rid])[-len(hidden) :], hidden, atol=1e-4):
                wrong.append(rid)
            if error is None:
                step(engine, rid, [3], "decode")
            engine.remove_request(rid)

    worker = threading.Thread(target=run_steps)
    worker.start()
    for rid, ids in prompts.items():
        add(engine, rid, ids)
        await_ready(engine, rid)
        ready.put(rid)
    ready.put(None)
    worker.join()
    kept.check_invariants()
    assert [] == wrong and 39 == pages_to_be_had(kept)
    assert kept.counts.matched_tokens > 48 * 50


def test_a_thousand_random_requests() -> None:
    """Each output is right to rounding, and pages are conserved after every request."""
    with streams_of_a_device():
        kept = run_random(1000, seed=1)
    assert 39 == pages_to_be_had(kept)
    stats = kept.cache.stats()
    assert 1 == stats.leases  # that of page 0
    assert kept.counts.matched_tokens > 5000 and stats.matched_host_tokens > 1000
