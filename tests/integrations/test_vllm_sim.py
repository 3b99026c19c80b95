"""The connector between vLLM's real scheduler and disordered copies: no wrong byte, nothing lost, no request stuck.

Must not know how the connector decides; see `vllm_sim.py` for what is real.
"""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: run `make test-vllm`")

from bench._vllm_models import tiny_directory
from tests.integrations.vllm_sim import MODEL_LEN, Shape, Sim, make_config

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config(tiny_directory(CACHE))


SHAPES = {
    "plain": Shape(),
    "asynchronous": Shape(asynchronous=True),
    "two-ranks": Shape(ranks=2),
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


def drive(sim: Sim, seed: int, requests: int, aborts: float = 0.08, resets: float = 0.0) -> None:
    traffic = Traffic(sim, seed)
    r = random.Random(seed + 1)
    while len(sim.texts) < requests:
        if len(sim.live) < 12 and r.random() < 0.4:
            traffic.ask()
        sim.step()
        if sim.live and r.random() < aborts:
            sim.abort(r.choice(sim.live))
        if r.random() < resets:
            sim.scheduler.reset_prefix_cache(reset_connector=True)
    sim.run()
    sim.check_idle()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_no_request_reads_another_ones_bytes(config: Any, shape: str, seed: int) -> None:
    sim = Sim(config, seed, SHAPES[shape])
    drive(sim, seed, 60)
    assert sim.numbers["loaded_tokens"] > 0 and sim.numbers["saved_tokens"] > 0
    assert sim.numbers["checked_blocks"] > 0


def test_resets_in_the_middle_of_everything(config: Any) -> None:
    sim = Sim(config, 5, Shape(asynchronous=True))
    drive(sim, 5, 100, resets=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_reads_another_ones_bytes_for_long(config: Any, shape: str) -> None:
    for seed in range(100, 120):
        sim = Sim(config, seed, SHAPES[shape])
        drive(sim, seed, 100, resets=0.01 if seed % 2 else 0.0)
