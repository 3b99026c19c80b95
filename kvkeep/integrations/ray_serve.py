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
from typing import Any, NamedTuple

import numpy as np
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from kvkeep.index.names import as_token_ids
from kvkeep.proxy.bodies import Prompt, prompt_of
from kvkeep.routing import Guard, Router, RoutingSettings
from kvkeep.routing.shared import DEPTH_MAX

#: Seconds after which a call that was chosen for and never began is forgotten: it was cancelled.
BEGINS_MAX_S = 10.0


class Chosen(NamedTuple):
    """A call that has been chosen for and has not begun.

    pending: kept, so that no other object gets its `id` meanwhile.   order: of replicas, the chosen one first.
    """

    pending: PendingRequest
    order: list[str]
    since_s: float


class Calls:
    """The calls that go to replicas, from the choice to the end.

    Ray gives all calls that are made while one request is served that request's id: a call is known by its object until
    it has begun; from then on those of one id on one replica are counted, since nobody can tell them apart.
    """

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, Chosen] = OrderedDict()  # by the object's `id`, chosen first first
        self._runs: Counter[tuple[str, str]] = Counter()  # by id and replica
        # How many were said to have ended before they were said to have begun, and when that was last heard.
        self._early: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self.count: Counter[str] = Counter()

    def chosen(self, pending: PendingRequest, order: list[str]) -> None:
        """It shall go to the first of `order`."""
        self._chosen[id(pending)] = Chosen(pending, order, time.monotonic())
        self.count[order[0]] += 1

    def order(self, pending: PendingRequest) -> list[str] | None:
        """What was chosen for it, if it was; forgets those that never began."""
        long_ago_s = time.monotonic() - BEGINS_MAX_S
        while self._chosen and next(iter(self._chosen.values())).since_s < long_ago_s:
            self._forget(next(iter(self._chosen)))
        while self._early and next(iter(self._early.values()))[1] < long_ago_s:
            self._early.popitem(last=False)
        found = self._chosen.get(id(pending))
        return None if found is None else found.order

    def began(self, pending: PendingRequest, replica: str) -> None:
        """It runs there, which need not be where it was sent first."""
        self._forget(id(pending))
        run = pending.metadata.internal_request_id, replica
        early, heard_s = self._early.pop(run, (0, 0.0))
        if early > 1:
            self._early[run] = early - 1, heard_s
        if not early:
            self._runs[run] += 1
            self.count[replica] += 1

    def ended(self, call: str, replica: str) -> None:
        """One of this id has ended there, or was refused."""
        run = call, replica
        if self._runs[run]:
            _lessen(self._runs, run)
            _lessen(self.count, replica)
        else:
            for key, one in self._chosen.items():
                if one.pending.metadata.internal_request_id == call:
                    self._forget(key)
                    break
            self._early[run] = self._early.pop(run, (0, 0.0))[0] + 1, time.monotonic()

    def _forget(self, key: int) -> None:
        if key in self._chosen:
            _lessen(self.count, self._chosen.pop(key).order[0])


def _lessen(count: Counter[Any], key: Any) -> None:
    count[key] -= 1
    if not count[key]:
        del count[key]


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
        order = self._calls.order(pending)
        if order is not None:
            return [*order, *(name for name in by_load if name not in order)]
        prompt = find_prompt([*pending.args, *pending.kwargs.values()], DEPTH_MAX * self._settings.page_nbytes)
        if prompt is None:
            return by_load
        router = self._with(list(by_id))
        route = router.route_bytes(prompt.raw, prompt.kind, salt=prompt.salt, adapter=prompt.adapter, loads=loads)
        order = [route.replica, *(name for name in route.order if name != route.replica)]
        self._calls.chosen(pending, order)
        return order

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Called by Ray when a replica has taken a call."""
        self._calls.began(pending_request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a call has ended."""
        self._calls.ended(internal_request_id, replica_id.unique_id)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Ray knows only one waiting call of an id, and those that are made beside it would wait for ever."""
        for waiting in self._pending_requests_to_fulfill:
            if waiting.metadata is request_metadata and not waiting.future.done():
                return waiting
        return None

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
        except Exception:  # it may be any object, and a router that raises leaves its call waiting for ever
            found = None
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
