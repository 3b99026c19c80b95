"""Router: from a prompt to a replica.

Must not know HTTP, nor what any replica holds.

    prompt --> names of its first pages --> the page that tells it apart --> order of the replicas --> the first that
               salt, adapter in the root     (`shared.py`, or page k)        (`rank.py`)               is not too busy
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index.names import Identities, TokenIds, as_token_ids, chain_names, hash64
from kvkeep.routing.guard import Reason
from kvkeep.routing.rank import ranked
from kvkeep.routing.settings import RoutingSettings
from kvkeep.routing.shared import DEPTH_MAX, SharedPrefixes


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    replica: its id.   reason: "target" when it is the one that the prefix asks for.
    order: all replicas from the most preferred one, for who finds the first unreachable.
    key: 64 bits; equal keys have equal orders.
    pages: of the prompt's prefix that the key stands for; 0 when the prompt ends before it parts from others, and what
        is left of it is the key.
    """

    replica: str
    reason: Reason
    order: Sequence[str]
    key: int
    pages: int


class Router:
    """Sends prompts with the same beginning to the same replica.

    Holds no cache state: which replicas there are, how many requests wait on each (told by its user, or the loads of a
    call), and what recent prompts have in common.  Not thread-safe: one event loop or one lock around it.
    """

    def __init__(self, replicas: Iterable[str], settings: RoutingSettings | None = None) -> None:
        """replicas: their ids, at least one; `BadInput` when one is there twice."""
        self.settings = RoutingSettings() if settings is None else settings
        self._alive: list[str] = []
        self._waiting: dict[str, int] = {}  # those that left as well, until nobody waits there
        for replica in replicas:
            self.join(replica)
        if not self._alive:
            raise BadInput("no replica is named: one or more are needed to route to")
        self._identities = Identities(hash64)
        self._shared = None if self.settings.depth is not None else SharedPrefixes()

    # ------------------------------------------------------------------ replicas and who waits there

    @property
    def replicas(self) -> Sequence[str]:
        """Those that requests can be sent to."""
        return tuple(self._alive)

    @property
    def loads(self) -> Mapping[str, int]:
        """By replica, the requests that were begun there and have not ended."""
        return {replica: self._waiting.get(replica, 0) for replica in self._alive}

    def join(self, replica: str) -> None:
        """From now on it gets the keys that rank it first; no other key moves."""
        if not replica:
            raise BadInput(f"replica {replica!r}: its id must be a string that is not empty")
        if replica in self._alive:
            raise BadInput(f"replica {replica}: it is there already; each is named once")
        self._alive.append(replica)

    def leave(self, replica: str) -> None:
        """From now on its keys go to the replicas that they rank next; no other key moves."""
        if replica not in self._alive:
            raise BadInput(f"replica {replica}: there is none of that name")
        self._alive.remove(replica)

    def begin(self, replica: str) -> None:
        """A request has gone there, and waits."""
        self._waiting[replica] = self._waiting.get(replica, 0) + 1

    def end(self, replica: str) -> None:
        """It waits no more: its answer has begun, or nobody wants it."""
        waiting = self._waiting.get(replica, 0)
        if waiting < 1:
            raise InvariantViolation(f"a request ends on {replica}, where none had begun")
        if waiting == 1:
            del self._waiting[replica]
        else:
            self._waiting[replica] = waiting - 1

    # ------------------------------------------------------------------ routes

    def route(
        self,
        tokens: TokenIds,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        loads: Mapping[str, float] | None = None,
    ) -> Route:
        """Where a prompt of token ids goes.

        salt, adapter: as the replicas' caches are given them: prompts that differ there share nothing.
        loads: by replica, the length of its queue, where the caller knows better than `begin` and `end`.
        Raises `BadInput` for an empty prompt, and where no replica is left.
        """
        return self.route_bytes(as_token_ids(tokens).data.cast("B"), b"ids", salt=salt, adapter=adapter, loads=loads)

    def route_bytes(
        self,
        raw: Any,
        kind: bytes,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        loads: Mapping[str, float] | None = None,
    ) -> Route:
        """The same for a prompt as bytes: text that is not tokenised yet.   kind: what the bytes are."""
        view = memoryview(raw)
        if not len(view):
            raise BadInput("the prompt is empty: one token or more is needed to route by")
        page_nbytes = self.settings.page_nbytes
        root = self._identities.get(b"", salt, adapter, kind).name
        pages = min(len(view) // page_nbytes, self.settings.depth or DEPTH_MAX)
        names = chain_names(root, view[: pages * page_nbytes], page_nbytes)
        return self.route_names(names, view[pages * page_nbytes : (pages + 1) * page_nbytes], root, loads)

    def route_names(
        self, names: Sequence[int], rest: Any = b"", root: int = 0, loads: Mapping[str, float] | None = None
    ) -> Route:
        """The same for who has the names of a prompt's pages already.

        names: of its first full pages.   rest: bytes of what follows them, as far as it is known.   root: the name of
        their root.
        """
        depth = self.settings.depth
        common, worth = (depth or 1) - 1, 1.0
        if self._shared is not None:
            common, returns = self._shared.learn(names)
            # Not `returns` itself: on a trace of chats, a quarter of whose new prompts came back, that cost 2.3 points
            # of hits against one cache of all, the root 1.4, for 8 % of the time to first token.
            worth = sqrt(returns)
        if common < len(names):
            pages, key = common + 1, names[common]
        else:
            # All of its pages are everybody's, so any replica will do: what is left of it spreads such prompts.  Where
            # a depth was said that it does not reach, only equal prompts meet, and they are worth it.
            pages, key = 0, hash64(rest, names[-1] if names else root)
            worth = 1.0 if names and self._shared is None else 0.0
        order = ranked(key, self._alive)
        replica, reason = self.settings.guard.choose(order, self._waiting if loads is None else loads, worth)
        return Route(replica, reason, order, key, pages)
