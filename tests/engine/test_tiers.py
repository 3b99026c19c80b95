"""The engine over two tiers: what comes back from host memory, or from a suspension, is what was computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkeep.engine.engine import Engine, EngineConfig, SamplingParams, State
from kvkeep.engine.host_tier import WrapBackend
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.verify.faults import FailingBackend
from kvkeep.tiers.memory import PageMemory
from kvkeep.transfer.backend import Backend
from kvkeep.transfer.plan import Cause

PAGE = 16


def prompts(count: int, length: int) -> list[list[int]]:
    """Distinct prompts that share their first half."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 500, length // 2).tolist()
    return [shared + rng.integers(3, 500, length - length // 2).tolist() for _ in range(count)]


def answers(
    loaded: LoadedModel,
    rounds: list[list[list[int]]],
    new_tokens: int,
    wrap: WrapBackend | None = None,
    **settings: Any,
) -> tuple[Engine, list[list[int]]]:
    """Runs each round's prompts together and returns all outputs."""
    engine = Engine(loaded, EngineConfig(page_size=PAGE, chunk_tokens=64, **settings), wrap_backend=wrap)
    out = []
    for one in rounds:
        requests = [engine.submit(ids, SamplingParams(max_new_tokens=new_tokens)) for ids in one]
        engine.run()
        assert all(request.state is State.FINISHED for request in requests)
        out += [request.output_ids for request in requests]
        engine.cache.check_invariants()
    return engine, out


def test_a_session_that_was_pushed_out_comes_back_from_host_memory(stories: LoadedModel):
    """Sessions that push each other out of a small pool answer as in an ample one, and their prefixes are loaded."""
    turns = [[ids] for ids in prompts(6, 160)] * 3
    _, expected = answers(stories, turns, 8, pool_pages=128)
    engine, got = answers(stories, turns, 8, pool_pages=16, host_pages=128)
    stats = engine.cache.stats()
    engine.close()
    assert expected == got
    assert stats.matched_host_tokens > 0  # not all: a model this small is often computed faster than loaded


@pytest.mark.parametrize("suspend_pages", [4, 64])
def test_a_suspended_request_goes_on_where_it_stood(stories: LoadedModel, suspend_pages: int):
    """Requests preempted for want of pages give the same output, suspended or, where that has no room, recomputed."""
    crowd = [prompts(6, 64)]
    _, expected = answers(stories, crowd, 64, pool_pages=128)
    engine, got = answers(stories, crowd, 64, pool_pages=24, suspend_pages=suspend_pages, host_pages=0)
    assert engine.cache.transfers is not None
    suspended = engine.cache.transfers.stats()
    engine.close()
    assert expected == got
    assert suspended.by["d2h", "suspend"].copies > 0
    assert suspended.by["h2d", "resume"].copies > 0


def failing(cause: Cause, fails: Callable[[int], bool], made: list[FailingBackend]) -> WrapBackend:
    """Wraps an engine's backend so that chosen copies fail; `made` gets the wrapper."""

    def wrap(inner: Backend, gpu: PageMemory, host: PageMemory) -> Backend:
        made.append(FailingBackend(inner, gpu, host, cause, fails))
        return made[0]

    return wrap


@pytest.mark.parametrize("together", [1, 3])
def test_pages_that_fail_to_arrive_are_computed(stories: LoadedModel, together: int):
    """A load that fails costs time and changes no token, for the one who inherits it and for those who joined it."""
    asked = prompts(3, 160)
    turns = [asked[:1]] + [[ids] for ids in prompts(9, 160)[3:]] + [[ids[:150] for ids in asked[:1] * together]]
    _, expected = answers(stories, turns, 8, pool_pages=128)
    made: list[FailingBackend] = []
    wrap = failing("promote", lambda number: True, made)
    engine, got = answers(stories, turns, 8, pool_pages=24 if together > 1 else 14, host_pages=128, wrap=wrap)
    engine.close()
    assert expected == got
    assert made[0].failed > 0
