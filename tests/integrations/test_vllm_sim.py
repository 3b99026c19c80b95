"""The connector between vLLM's real scheduler and disordered copies: no wrong byte, nothing lost, no request stuck.

Must not know how the connector decides; see `vllm_sim.py` for what is real.
"""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: run `make test-vllm`")

from bench._vllm_models import tiny_directory
from kvkeep.transfer.simulated import When
from tests.integrations.vllm_sim import MODEL_LEN, Shape, Sim, make_config

MODELS = Path(sys.prefix) / "models"


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config(tiny_directory(MODELS))


SHAPES = {
    "plain": Shape(),
    "asynchronous": Shape(asynchronous=True),
    "two-ranks": Shape(ranks=2, part=2),
    "pages-of-two-blocks": Shape(per_page=2, tier_pages=24, block_outermost=True),
    "small-tier": Shape(tier_pages=17, asynchronous=True),
    "failing": Shape(fail_rate=0.1),
    "failing-asynchronous": Shape(fail_rate=0.1, asynchronous=True, ranks=2),
    "lru-one-at-a-time": Shape(eviction="lru", running=1, blocks=20),
}


class Traffic:
    """Conversations that grow, share beginnings, come back, and are aborted."""

    def __init__(self, sim: Sim, seed: int) -> None:
        self.sim = sim
        self.random = random.Random(seed)
        self.system = [[self.random.randrange(1000) for _ in range(n)] for n in (20, 48, 70)]
        self.chats: list[list[int]] = []

    def ask(self) -> None:
        r = self.random
        if not self.chats or r.random() < 0.3:
            self.chats.append(list(r.choice(self.system)))
        chat = r.choice(self.chats[-8:])
        chat += [r.randrange(1000) for _ in range(r.choice((1, 5, 16, 31)))]
        say = r.choice((1, 2, 5, 16, 20))
        if len(chat) + say > MODEL_LEN:
            self.chats.remove(chat)
            return
        salt = "b" if r.random() < 0.1 else None
        name = self.sim.add(chat, say, cache_salt=salt)
        if r.random() < 0.7:
            chat[:] = self.sim.expected[name]


def drive(sim: Sim, seed: int, requests: int, aborts: float = 0.08, resets: float = 0.0) -> int:
    """Serves so many requests; returns how many resets of running requests came while blocks were being stored."""
    traffic, met = Traffic(sim, seed), 0
    r = random.Random(seed + 1)
    while len(sim.texts) < requests:
        if len(sim.live) < 12 and r.random() < 0.4:
            traffic.ask()
        sim.step()
        if sim.live and r.random() < aborts:
            sim.abort(r.choice(sim.live))
        if r.random() < resets:
            held = sim.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
            running = {request.request_id for request in sim.scheduler.running}
            loaded = any(
                blocks for name, blocks in held.items() if name not in running
            )  # vLLM resets over none of these
            waits = bool(sim._pending) or loaded or any(job.load for job in sim.side._jobs.values())
            met += not waits and bool(sim.side._jobs)
            sim.scheduler.reset_prefix_cache(reset_connector=True, reset_running_requests=not waits)
    sim.run()
    sim.check_idle()
    return met


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_request_reads_another_ones_bytes(config: Any, shape: str, seed: int) -> None:
    sim = Sim(config, seed, SHAPES[shape])
    drive(sim, seed, 60)
    assert sim.numbers["loaded_tokens"] > 0 and sim.numbers["saved_tokens"] > 0
    assert sim.numbers["checked_blocks"] > 0


def test_what_another_request_is_storing_is_not_stored_again(config: Any) -> None:
    """Of requests in flight with one beginning, the first stores it; the others find it in vLLM's blocks meanwhile."""
    sim = Sim(config, 3, Shape(blocks=64))
    for backend in sim.backends:
        backend._when = When.LATE
    prompt = list(range(160))
    sim.add(prompt + [7], 40)
    for _ in range(3):
        sim.step()
    for i in range(6):
        sim.add(prompt + [i], 2)
    sim.run()
    sim.check_idle()
    shared, own = (
        10,
        2 + 6,
    )  # blocks of the prompt; those that its first request's text fills, and one of the others' each
    assert sim.numbers["saved_tokens"] / 16 <= shared + own


def test_a_store_that_fails_is_not_found_and_one_before_it_is(config: Any) -> None:
    """A prompt is stored by two steps; the first arrives, the second does not, while the first is over."""
    sim = Sim(config, 8, Shape(blocks=14))
    backend = sim.backends[0]
    sim.moving = False
    prompt = list(range(170))
    sim.add(prompt, 1)
    while len(backend.jobs) < 2:
        sim.step()
    before, behind = backend.jobs
    while before in backend.jobs:
        backend.step(before)
    sim.step()
    backend.fail(behind)
    sim.moving = True
    sim.run()
    sim.add(list(range(500, 670)), 2)  # vLLM's blocks hold another prompt now
    sim.run()
    again = sim.add(prompt, 2)
    sim.run()
    assert sim.cached[again] == len(before.plan) * 16 == 96
    sim.check_idle()


def test_another_salt_finds_nothing(config: Any) -> None:
    sim = Sim(config, 9, Shape(blocks=14))
    found = []
    for salt in ("one", "one", "other", None, None):
        name = sim.add(list(range(170)), 2, cache_salt=salt)
        sim.run()
        found.append(sim.cached[name])
        sim.add(list(range(500, 670)), 2)
        sim.run()
    assert found == [0, 160, 0, 0, 160]


def test_an_abort_while_its_load_runs_leaves_the_pages_to_the_load(config: Any) -> None:
    sim = Sim(config, 4, Shape(blocks=14))
    first = sim.add(list(range(180)), 2)
    sim.run()
    sim.add(list(range(500, 680)), 2)  # vLLM's blocks hold another prompt now
    sim.run()
    assert sim.finished[first] == "length" or sim.finished[first]
    again = sim.add(list(range(180)), 2)
    sim.step()
    assert any(job.load for job in sim.side._jobs.values())
    sim.abort(again)
    for i in range(30):  # others want pages of the tier, and blocks
        sim.add([i * 37 % 1000, *range(100)], 1)
    sim.run()
    sim.check_idle()


def test_requests_that_are_preempted_find_their_pages(config: Any) -> None:
    """vLLM takes blocks from requests in the middle: what they had stored is loaded when they go on."""
    sim = Sim(config, 6, Shape(blocks=26, tier_pages=200))
    names = [sim.add([i, *range(90)], 60) for i in range(5)]
    sim.run()
    assert sum(sim.preempted.values()) > 0
    assert sim.numbers["loaded_tokens"] > 0
    assert all(len(sim.texts[name]) == 60 for name in names)
    sim.check_idle()


def test_a_worker_that_dies_ends_the_tier_and_no_request(config: Any) -> None:
    sim = Sim(config, 7, Shape(blocks=30))
    traffic = Traffic(sim, 7)
    for _ in range(20):
        traffic.ask()
        sim.step()
    sim.backends[0].die()
    for _ in range(10):
        traffic.ask()
        sim.step()
    sim.run()
    assert sim.side.cache is None and not sim.side.busy
    assert not sim.scheduler.requests and sim.scheduler.kv_cache_manager.usage == 0.0
    sim.check_texts()


@pytest.mark.parametrize("shape", ["plain", "two-ranks", "asynchronous"])
def test_resets_in_the_middle_of_everything(config: Any, shape: str) -> None:
    sim = Sim(config, 5, SHAPES[shape])
    met = drive(sim, 5, 100, resets=0.05)
    assert met or SHAPES[shape].asynchronous, "no reset came while blocks were being stored"


def test_what_was_given_up_is_not_kept(config: Any) -> None:
    """Its blocks are somebody else's while it is still being copied."""
    sim = Sim(config, 3, SHAPES["plain"])
    traffic = Traffic(sim, 3)
    while not any(not job.load for job in sim.side._jobs.values()):
        if not sim.live:
            traffic.ask()
        sim.step()
    assert sim.side.cache is not None
    before = sim.side.cache.stats().pages_stored
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    for name in list(sim.live):
        sim.abort(name)
    sim.run()
    assert before == sim.side.cache.stats().pages_stored


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_reads_another_ones_bytes_for_long(config: Any, shape: str) -> None:
    for seed in range(100, 120):
        sim = Sim(config, seed, SHAPES[shape])
        drive(sim, seed, 100, resets=0.01 if seed % 2 else 0.0)
