"""Requests of M*'s engine with a toy node, through the adapter: what its tests share.

Must not test anything itself.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples.mstar_toy import PAGE, VOCABULARY, make_engine, request_info, step
from kvkeep.integrations.mstar import KeptKV, KeptReqConfig, Prompt, attach
from kvkeep.transfer.backend import Outcome

TIER_GIB = 0.002


def kept_engine(pages: int = 64, cpu_tier_gib: float = TIER_GIB, **more: Any) -> tuple[Any, KeptKV]:
    options = {name: more.pop(name) for name in ("wrap_backend",) if name in more}
    engine = make_engine(pages, **more)
    (kept,) = attach(engine, nodes=("LLM",), cpu_tier_gib=cpu_tier_gib, **options)
    return engine, kept


def ids_of(count: int, seed: float) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def add(engine: Any, rid: str, ids: list[int], label: str = "main", **more: Any) -> None:
    engine.add_request(rid, {"kv": KeptReqConfig(prompts={label: Prompt(ids, **more)})})


def await_ready(engine: Any, rid: str, walk: str = "prefill") -> int:
    """How often it was not ready before it was."""
    for asked in range(100_000):
        outcome = engine.check_ready("LLM", rid, request_info(rid, walk))
        assert outcome.ok
        if outcome.ready:
            return asked
    raise AssertionError(f"{rid} never becomes ready")


def ask(engine: Any, rid: str, ids: list[int], **more: Any) -> torch.Tensor:
    """A request up to its prefill: the hidden states that were computed."""
    add(engine, rid, ids, **more)
    await_ready(engine, rid)
    hidden, error = step(engine, rid, ids)
    assert error is None
    assert isinstance(hidden, torch.Tensor)
    return hidden


def leave(engine: Any, kept: KeptKV, rid: str, ids: list[int], **more: Any) -> None:
    """A whole request; its full pages stay."""
    ask(engine, rid, ids, **more)
    engine.remove_request(rid)
    kept.check_invariants()


def cold(*parts: list[int]) -> list[torch.Tensor]:
    """What an engine of M* alone computes, in these steps."""
    engine = make_engine()
    engine.add_request("cold")
    out = []
    for part in parts:
        hidden, error = step(engine, "cold", part)
        assert error is None and hidden is not None
        out.append(hidden)
    return out


def pages_to_be_had(kept: KeptKV) -> int:
    """Free ones, and cached ones that nobody holds, once no copy holds any."""
    transfers = kept.cache.transfers
    while transfers is not None and transfers.busy:
        kept.cache.poll()
    return kept.streams.num_free


def stream_of(engine: Any, rid: str, label: str = "main") -> Any:
    return engine._resources["kv"]._streams[rid][label]


def fill(engine: Any, kept: KeptKV, pages: int | None = None) -> None:
    """Other requests take so many pages of the pool, all by default, one after another, and go."""
    pages = pages or engine._resources["kv"].config.max_num_pages - 1
    for seed in (1001, 1002):
        leave(engine, kept, f"filler {seed}", ids_of(pages * PAGE, seed))


class Gate:
    """Puts itself around the backend: holds loads back, or fails them."""

    def __init__(self) -> None:
        self.closed = False
        self.failing = False

    def __call__(self, inner: Any, device: Any, host: Any) -> Any:
        self._inner = inner
        self._held: list[Outcome] = []
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def completions(self) -> list[Outcome]:
        done = [*self._held, *self._inner.completions()]
        if self.failing:
            done = [Outcome(o.job, "pulled", 0) if o.job.plan.direction == "h2d" else o for o in done]
        self._held = [o for o in done if self.closed and o.job.plan.direction == "h2d"]
        return [o for o in done if o not in self._held]


@contextlib.contextmanager
def streams_of_a_device() -> Iterator[None]:
    """M*'s pool for suspended requests asks for streams and pinned memory, which a CPU does not have."""

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda self, *args, **more: self)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda *args: Stream())
        yield
