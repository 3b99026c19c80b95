"""Ray Serve's request router, over a local Ray with three real replicas.

Must not need Ray: without it, it is skipped.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

# A replica that does not say within 0.1 s how long its queue is gets no call, and here others use the processors.
os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "20")

ray = pytest.importorskip("ray", reason="Ray is not installed (kvkeep[ray])")
pytest.importorskip("ray.serve")

from ray import serve  # noqa: E402
from ray.serve._private.common import RequestMetadata  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402
from ray.serve.request_router import PendingRequest  # noqa: E402

from kvkeep.integrations.ray_serve import Calls, PrefixRouter, find_prompt  # noqa: E402

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


class Ingress:
    """Calls the model several times for one request, at once or one after the other."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def __call__(self, prompts: list[str], at_once: bool) -> list[str]:
        if at_once:
            return list(await asyncio.gather(*(self.model.remote(prompt) for prompt in prompts)))
        return [await self.model.remote(prompt) for prompt in prompts]


def test_calls_that_one_request_makes_are_routed_each_on_its_own(local_ray: None):
    """Ray gives them one id; each goes where its own prompt asks for, none waits for ever, and none is counted on."""
    router = RequestRouterConfig(
        request_router_class="kvkeep.integrations.ray_serve.PrefixRouter", request_router_kwargs={"slack": 20.0}
    )
    options: dict[str, Any] = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0.1}}
    model = serve.deployment(Model, name="model", num_replicas=3, request_router_config=router, **options)
    ingress = serve.deployment(Ingress, name="ingress", **options)
    handle = serve.run(ingress.bind(model.bind()), name="many", route_prefix=None)
    try:
        prompts = [f"prompt number {number} " * 100 for number in range(24)]
        alone = handle.remote(prompts, False).result(timeout_s=60)
        assert 3 == len(set(alone))
        for _ in range(20):
            assert alone == handle.remote(prompts, True).result(timeout_s=60)
    finally:
        serve.delete("many")


def test_calls_are_counted_from_the_choice_to_the_end():
    """Several of one id, one that is refused and taken elsewhere, one whose end is heard of before its beginning."""

    def call(number: int = 1) -> PendingRequest:
        return PendingRequest([], {}, RequestMetadata(request_id=f"{number}", internal_request_id=f"{number}"))

    calls = Calls()
    first, second, other = call(), call(), call(2)
    calls.chosen(first, ["a", "b"])
    calls.chosen(second, ["b", "a"])
    assert (["a", "b"], ["b", "a"], None) == (calls.order(first), calls.order(second), calls.order(other))
    calls.began(first, "a")
    calls.began(second, "a")
    assert {"a": 2} == calls.count
    calls.ended("1", "a")
    calls.ended("1", "a")
    assert not calls.count
    calls.chosen(other, ["a", "b"])
    calls.ended("2", "a")  # refused
    calls.began(other, "b")
    assert {"b": 1} == calls.count
    for _ in range(4):
        calls.ended("2", "b")
    for _ in range(3):
        calls.began(call(2), "b")
    assert not calls.count
    calls.began(call(2), "b")
    assert {"b": 1} == calls.count


def test_prompts_are_found_in_the_forms_that_calls_have():
    """Mappings, pydantic objects, token ids and text; nothing else is one."""

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return chat("s", "hi")

    first = find_prompt([7, chat("s", "hi")], 4096)
    assert first is not None and first == find_prompt([Dumped()], 4096)
    assert find_prompt([[1, 2, 3]], 4096) == find_prompt([np.array([1, 2, 3])], 4096) is not None
    assert (b"text", b"hi") == ((found := find_prompt(["hi"], 4096)) and (found.kind, found.raw))

    class Broken:
        def model_dump(self) -> dict[str, Any]:
            raise RuntimeError

    nothings: list[Any] = [
        Broken(),
        {"messages": [{1: 2, "a": 3}]},
        None,
        3,
        {},
        {"prompt": 7},
        [],
        "",
        ["a"],
        b"bytes",
        {"messages": []},
    ]
    for nothing in nothings:
        assert find_prompt([nothing], 4096) is None


def test_it_is_a_request_router_of_ray():
    """Ray takes it as one, and every method that it must have is there."""
    assert not getattr(PrefixRouter, "__abstractmethods__", None)
