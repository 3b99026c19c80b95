"""What a caller asks of the engine and what becomes of it.

Must not know models, pages or how the engine schedules.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from kvkeep.config import check_int
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.index.media import MediaItem
from kvkeep.lease import Lease
from kvkeep.traffic import Suspended

if TYPE_CHECKING:
    import torch

SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    max_new_tokens: most tokens that are generated.
    temperature: 0 takes the likeliest token; above 0 draws.
    top_p: draws among the likeliest tokens whose shares sum to this (0 < top_p <= 1).
    top_k: draws among this many of the likeliest tokens; None draws among all.
    seed: together with a token's position it determines the draw, whatever else the engine computes.
    stop_ids: ids that end the request; the one that did is the last of its output.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, at_least=1)
        check_int("seed", self.seed, at_least=0)
        if self.seed > SEED_MAX:
            raise BadInput(f"seed is {self.seed}: it must be at most {SEED_MAX}")
        if self.top_k is not None:
            check_int("top_k", self.top_k, at_least=1)
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature is {self.temperature!r}: it must be a finite number of 0 or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p!r}: it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """An image in a prompt, ready for the model.

    offset: position of its first placeholder; the model says how many there are.
    pixels: [channels, height, width] float32, preprocessed.
    digest: of what the pixels were made of (`kvkeep.media.digest`); None when it has no identity: nothing is kept of
        its features, nor of the pages from it on.
    """

    offset: int
    pixels: "torch.Tensor"
    digest: bytes | None


class State(Enum):
    """Where a request stands; WAITING again after a preemption."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """One request; made by `Engine.submit`, changed by the engine only.

    number: order of submission; a lower number is older.
    ids: prompt and generated token ids.
    kv_len: positions whose K and V are in pages.
    matched_len: prompt tokens taken from the cache before anything was computed.   host_len: of those, the ones that
        came from host memory.
    preemptions: how often its pages were taken.   suspensions: of those, how often they were copied to host memory.
    recomputed_len: tokens computed once more after preemptions.   hole_len: of those, ones before KV that was kept.
    images: of the prompt.   media: the same as the cache knows them.   encoded: times that the vision tower ran for it.
    features_found: times that features of an image of it were in the encoder cache.   features_from_host: of those,
        the ones that were in host memory.
    ticket: what the cache keeps of it while it is suspended.
    holes: ranges of positions below `kv_len` that are to be computed again after a suspension.
    starved: it sits out, since the page for its last token is still being copied.
    gated: it waits for copies that its admission began, and may turn out to have less KV than it was promised.
    finish_reason: "stop" (a stop id) or "length" (max_new_tokens) of a finished request.
    """

    number: int
    ids: "array[int]"
    prompt_len: int
    params: SamplingParams
    salt: bytes = b""
    reuse: bool = True
    store: bool = True
    images: tuple[ImageInput, ...] = ()
    media: tuple[MediaItem, ...] = ()
    on_token: "Callable[[Request, int], None] | None" = None
    state: State = State.WAITING
    lease: Lease | None = None
    ticket: Suspended | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)
    starved: bool = False
    gated: bool = False
    kv_len: int = 0
    matched_len: int = 0
    host_len: int = 0
    recomputed_len: int = 0
    hole_len: int = 0
    preemptions: int = 0
    suspensions: int = 0
    encoded: int = 0
    features_found: int = 0
    features_from_host: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    first_token_ns: int | None = None
    ended_ns: int | None = None

    @property
    def output_ids(self) -> list[int]:
        """Generated token ids so far."""
        return self.ids[self.prompt_len :].tolist()

    @property
    def ended(self) -> bool:
        """Finished or aborted."""
        return self.state in (State.FINISHED, State.ABORTED)

    @property
    def aborted(self) -> bool:
        """Ended by `Engine.abort`."""
        return self.state is State.ABORTED

    @property
    def pending(self) -> int:
        """Tokens known whose K and V are not in pages yet."""
        return len(self.ids) - self.kv_len

    @property
    def ttft_ns(self) -> int:
        """Nanoseconds from submission to the first token, waiting included; an error before there is one."""
        if self.first_token_ns is None:
            raise InvariantViolation(f"request {self.number} has no first token yet")
        return self.first_token_ns - self.submitted_ns

    @property
    def held(self) -> Lease:
        """The lease of a running request."""
        if self.lease is None:
            raise InvariantViolation(f"request {self.number} is {self.state.value} and holds no pages")
        return self.lease

    def start(self, lease: Lease) -> None:
        """Admitted: once copies are over the first `lease.kv_len` positions are there, but for `lease.holes`."""
        self.state, self.lease, self.ticket = State.RUNNING, lease, None
        self.gated = lease.read_in_progress
        if not self.gated:
            self.arrived()

    def arrived(self) -> None:
        """What its admission promised is there, or, where a load failed, as much of it as there will be."""
        lease = self.held
        matched_len = lease.matched_len
        if not self.preemptions:
            self.matched_len, self.host_len = matched_len, lease.loaded_len
        else:
            holes = sum(end - start for start, end in lease.holes)
            self.hole_len += holes
            self.recomputed_len += max(self.kv_len - lease.kv_len, 0) + holes
        self.gated = False
        self.kv_len, self.holes = lease.kv_len, list(lease.holes)

    def fill(self, end: int) -> None:
        """The first hole has been computed up to `end`."""
        hole_end = self.holes[0][1]
        self.holes[:1] = [(end, hole_end)] if end < hole_end else []

    def append(self, token: int) -> None:
        """A token was sampled; sets `finish_reason` when it is the last."""
        if self.first_token_ns is None:
            self.first_token_ns = time.perf_counter_ns()
        self.ids.append(token)
        if token in self.params.stop_ids:
            self.finish_reason = "stop"
        elif len(self.ids) - self.prompt_len >= self.params.max_new_tokens:
            self.finish_reason = "length"

    def wait(self, ticket: Suspended | None) -> None:
        """Its pages were taken; `kv_len` stays to tell what is computed again."""
        self.state, self.lease, self.ticket = State.WAITING, None, ticket
        self.holes, self.starved, self.gated = [], False, False

    def end(self, state: State) -> None:
        """Finished or aborted."""
        self.state, self.lease = state, None
        self.ended_ns = time.perf_counter_ns()

    def __repr__(self) -> str:
        return f"Request({self.number}, {self.state.value}, {self.prompt_len}+{len(self.ids) - self.prompt_len} tokens)"
