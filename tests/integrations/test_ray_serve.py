"""Ray Serve's request router, over a local Ray with three real replicas.

Must not need Ray: without it, it is skipped.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed (kvkeep[ray])")
pytest.importorskip("ray.serve")

from ray import serve  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402

from kvkeep.integrations.ray_serve import PrefixRouter, find_prompt  # noqa: E402

pytestmark = pytest.mark.slow

SYSTEM = "You are careful. " * 80


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray on this machine, as small as it goes."""
    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


class Model:
    """A replica that says which one it is; "wait" keeps it busy, "die" ends it."""

    def __init__(self) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id

    async def __call__(self, request: Any, seconds: float = 0.0) -> str:
        await asyncio.sleep(seconds)
        return str(self.name)


@pytest.fixture(scope="module")
def model(local_ray: None) -> Any:
    """A handle to three of them, one call at a time on each."""
    router = RequestRouterConfig(
        request_router_class="kvkeep.integrations.ray_serve.PrefixRouter", request_router_kwargs={"slack": 3.0}
    )
    deployment = serve.deployment(
        Model,
        name="model",
        num_replicas=3,
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=router,
    )
    return serve.run(deployment.bind(), name="app", route_prefix=None)


def chat(*said: str) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(said)]
    return {"model": "m", "messages": [{"role": r, "content": t} for r, t in zip(roles, said, strict=False)]}


def test_sessions_meet_on_one_replica_each(model: Any):
    """All turns of a session on one replica, sessions behind one system prompt on all three."""
    where: list[set[str]] = []
    for number in range(40):
        turns, replicas = [SYSTEM, f"question {number} " * 60], set()
        for _ in range(3):
            replicas.add(model.remote(chat(*turns)).result(timeout_s=60))
            turns += ["answer " * 80, "and then? "]
        where.append(replicas)
    assert {1} == {len(replicas) for replicas in where[8:]}
    assert 3 == len(set().union(*where[8:]))


def test_a_busy_replica_is_passed_over(model: Any):
    """When its target has more calls than are allowed, a prompt goes elsewhere; afterwards it goes there again."""
    prompt = {"prompt": "one and the same " * 200}
    target = model.remote(prompt).result(timeout_s=60)
    running = [model.remote(prompt, 3.0) for _ in range(12)]
    where = Counter(response.result(timeout_s=60) for response in running)
    assert len(where) == 3 and where[target] < 12, where
    deadline = time.monotonic() + 30  # the router hears of a call's end a little after its caller
    while target != model.remote(prompt).result(timeout_s=60):
        assert time.monotonic() < deadline


def test_only_the_keys_of_a_replica_that_is_gone_move(model: Any):
    """When a replica's actor dies its prompts go elsewhere, and all others stay where they were."""
    prompts = [np.full(300, number, dtype=np.int32) for number in range(30)]

    def places() -> list[str]:
        return [model.remote(ids).result(timeout_s=60) for ids in prompts]

    before = places()
    gone = before[0]
    (actor,) = [one for one in ray.util.list_named_actors(all_namespaces=True) if gone in one["name"]]
    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    deadline = time.monotonic() + 60
    while gone in (during := places()):
        assert time.monotonic() < deadline
    moved = [(a, b) for a, b in zip(before, during, strict=True) if a != b]
    # A replica that Ray has started in its place may have joined meanwhile: it takes its share of all keys.
    assert all(a == gone or b not in before for a, b in moved)


def test_prompts_are_found_in_the_forms_that_calls_have():
    """Mappings, pydantic objects, token ids and text; nothing else is one."""

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return chat("s", "hi")

    first = find_prompt([7, chat("s", "hi")], 4096)
    assert first is not None and first == find_prompt([Dumped()], 4096)
    assert find_prompt([[1, 2, 3]], 4096) == find_prompt([np.array([1, 2, 3])], 4096) is not None
    assert (b"text", b"hi") == ((found := find_prompt(["hi"], 4096)) and (found.kind, found.raw))
    nothings: list[Any] = [None, 3, {}, {"prompt": 7}, [], "", ["a"], b"bytes", {"messages": []}]
    for nothing in nothings:
        assert find_prompt([nothing], 4096) is None


def test_it_is_a_request_router_of_ray():
    """Ray takes it as one, and every method that it must have is there."""
    assert not getattr(PrefixRouter, "__abstractmethods__", None)
