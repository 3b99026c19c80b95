"""A request router for Ray Serve: calls of a deployment go to the replica that their prefix asks for.

Must not know how a route is chosen.  Written for Ray 2.60, whose interface for request routers is marked alpha.

    @serve.deployment(request_router_config=RequestRouterConfig(
        request_router_class="kvkeep.integrations.ray_serve.PrefixRouter", request_router_kwargs={"slack": 12}))

A call is routed by its first argument that has a prompt: `{"messages": ...}` or `{"prompt": ...}`, as a mapping or as a
pydantic object, or token ids, or text.  What has none goes to the least loaded replica.  HTTP requests have none at
their ingress: it is the deployment of the model, called by the ingress, that must have this router.

Each handle has a router of its own, which learns from its own calls.  A replica's load is what it last said of itself,
or the calls of this handle that go there, whichever is more.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from kvkeep.errors import BadInput
from kvkeep.index.names import as_token_ids
from kvkeep.proxy.bodies import Prompt, prompt_of
from kvkeep.routing import Guard, Router, RoutingSettings
from kvkeep.routing.shared import DEPTH_MAX

#: Seconds after which a call that was chosen for and never began is forgotten: it was cancelled.
BEGINS_MAX_S = 10.0


class Calls:
    """The calls that go to replicas, from the choice to the end."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, tuple[list[str], float]] = OrderedDict()  # not begun, chosen first first
        self._runs: dict[str, str] = {}
        self.count: Counter[str] = Counter()

    def chosen(self, call: str, order: list[str]) -> None:
        """It shall go to the first of `order`."""
        self._order[call] = order, time.monotonic()
        self.count[order[0]] += 1

    def order(self, call: str) -> list[str] | None:
        """What was chosen for it, if it was; forgets those that never began."""
        while self._order and next(iter(self._order.values()))[1] < time.monotonic() - BEGINS_MAX_S:
            self._forget(next(iter(self._order)))
        return self._order[call][0] if call in self._order else None

    def began(self, call: str, replica: str) -> None:
        """It runs there, which need not be where it was sent first."""
        self._forget(call)
        self._runs[call] = replica
        self.count[replica] += 1

    def ended(self, call: str) -> None:
        """It has ended, or never began."""
        self._forget(call)
        replica = self._runs.pop(call, None)
        if replica is not None:
            self.count[replica] -= 1

    def _forget(self, call: str) -> None:
        if call in self._order:
            self.count[self._order.pop(call)[0][0]] -= 1


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # not checked where Ray is not installed
    """The router of one handle."""

    def initialize_state(self, page_size: int = 128, depth: int | None = None, slack: float = 12.0) -> None:
        """Called by Ray with `request_router_kwargs`: see `RoutingSettings` and `Guard`.  Raises `BadInput`."""
        self._settings = RoutingSettings(page_size, depth, Guard(slack=slack))
        self._router: Router | None = None
        self._calls = Calls()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then each of the others: Ray asks them in turn until one has room."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        if pending_request is not None:
            # Asked again, all of them were full: then Ray has to wait before it asks once more.
            pending_request.routing_context.should_backoff = True
        told = self.replica_queue_len_cache
        loads = {name: max(told.get(one.replica_id) or 0, self._calls.count[name]) for name, one in by_id.items()}
        order = self._order(by_id, loads, pending_request)
        return [[by_id[name]] for name in order if name in by_id]

    def _order(
        self, by_id: Mapping[str, RunningReplica], loads: Mapping[str, int], pending: PendingRequest | None
    ) -> Sequence[str]:
        """A call that is chosen for again keeps its order: it is one request, and is counted once."""
        by_load = sorted(by_id, key=lambda name: loads[name])
        if pending is None:
            return by_load
        call = pending.metadata.internal_request_id
        order = self._calls.order(call)
        if order is not None:
            return [*order, *(name for name in by_load if name not in order)]
        prompt = find_prompt([*pending.args, *pending.kwargs.values()], DEPTH_MAX * self._settings.page_nbytes)
        if prompt is None:
            return by_load
        router = self._with(list(by_id))
        route = router.route_bytes(prompt.raw, prompt.kind, salt=prompt.salt, adapter=prompt.adapter, loads=loads)
        order = [route.replica, *(name for name in route.order if name != route.replica)]
        self._calls.chosen(call, order)
        return order

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Called by Ray when a replica has taken a call."""
        self._calls.began(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a call has ended."""
        self._calls.ended(internal_request_id)

    def _with(self, names: list[str]) -> Router:
        """The router, with just these replicas."""
        if self._router is None:
            self._router = Router(names, self._settings)
        for name in set(names).difference(self._router.replicas):
            self._router.join(name)
        for name in set(self._router.replicas).difference(names):
            self._router.leave(name)
        return self._router


def find_prompt(arguments: Sequence[Any], nbytes_max: int) -> Prompt | None:
    """The prompt of the first argument that has one; None when none has, or when it is empty."""
    for argument in arguments:
        try:
            found = _prompt(argument, nbytes_max)
        except BadInput:
            found = None  # the deployment will say what is wrong with it
        if found is not None:
            return found
    return None


def _prompt(argument: Any, nbytes_max: int) -> Prompt | None:
    if isinstance(argument, str):
        return prompt_of({"prompt": argument}, nbytes_max, chat=False)
    if isinstance(argument, np.ndarray | list | tuple):
        raw = as_token_ids(argument).tobytes()[:nbytes_max]
        return Prompt(b"ids", raw) if raw else None
    if hasattr(argument, "model_dump"):
        argument = argument.model_dump()
    if not isinstance(argument, Mapping):
        return None
    return prompt_of(argument, nbytes_max, chat="messages" in argument)
