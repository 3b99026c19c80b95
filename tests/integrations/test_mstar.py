"""The adapter over M*'s real KV manager and engine, with a toy node, on a CPU; see `make test-mstar`.

Must not use a stand-in for anything of M*: where it is not installed, these tests are skipped.
"""

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("mstar", reason="mstar-ai is not installed in this environment: run `make test-mstar`")

from mstar.distributed.communication import CommGroup, JointGroups
from mstar.engine.engine import SubmoduleManagement
from mstar.engine.resources import KVConfig, KVStep, Segment, StepContext
from mstar.engine.resources.kv.manager import KVManager, KVSequenceInfo, PublishedKVInfo
from mstar.model.submodule_base import NodeSubmodule

from kvkeep.encoder import EncoderFingerprint
from kvkeep.errors import BadInput, InvariantViolation
from kvkeep.integrations.mstar import KeptEncoder, KeptKV, KeptReqConfig, Prompt, attach, check_version
from kvkeep.transfer.backend import Outcome
from tests.integrations.toy_mstar import (
    EMBEDDING,
    HEADS,
    PAGE,
    VOCABULARY,
    WEIGHTS,
    WIDTH,
    make_engine,
    request_info,
    step,
    turned,
)

TIER_GIB = 0.002


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kept_engine(pages: int = 64, cpu_tier_gib: float = TIER_GIB, **more: Any) -> tuple[Any, KeptKV]:
    options = {name: more.pop(name) for name in ("wrap_backend",) if name in more}
    engine = make_engine(pages, **more)
    (kept,) = attach(engine, nodes=("LLM",), cpu_tier_gib=cpu_tier_gib, **options)
    return engine, kept


def ids_of(count: int, seed: int) -> list[int]:
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
    assert error is None and hidden is not None
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


def stream_of(engine: Any, rid: str, label: str = "main") -> Any:
    return engine._resources["kv"]._streams[rid][label]


def evict_all(engine: Any, kept: KeptKV) -> None:
    """Other requests take every page of the pool, and go."""
    size = (engine._resources["kv"].config.max_num_pages - 1) * PAGE
    while kept.cache.stats().pages_cached:
        engine.add_request("filler")
        _, error = step(engine, "filler", [1] * size)
        assert error is None
        engine.remove_request("filler")
        kept.cache.poll()
    kept.check_invariants()


# ---------------------------------------------------------------------- hits


def test_a_hit_is_bit_identical_to_a_cold_run_on_the_same_schedule() -> None:
    """48 of 53 tokens match; the other 5, and what is decoded then, are the bits of M* alone."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    _, want, *decoded = cold(prompt[:48], prompt[48:], [7], [8], [9])
    ask(engine, "warm", ids_of(20, seed=9))
    got = ask(engine, "b", prompt)
    assert (5, WIDTH) == got.shape
    # the kept pages were computed in one step of 53, as one of 48 would: their K and V do not depend on later rows
    assert torch.allclose(want, got, atol=1e-5)
    for token, hidden in zip([7, 8, 9], decoded, strict=True):
        assert torch.allclose(hidden, step(engine, "b", [token], "decode")[0], atol=1e-5)
    assert 48 == kept.counts.matched_tokens
    kept.check_invariants()


def test_pages_of_the_same_schedule_give_the_very_bits() -> None:
    """Where the donor was computed in the same steps, hidden states and decoded ones are equal bit by bit."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "donor", prompt[:48])
    got = ask(engine, "b", prompt)
    _, want, decoded = cold(prompt[:48], prompt[48:], [7])
    assert torch.equal(want, got)
    assert torch.equal(decoded, step(engine, "b", [7], "decode")[0])
    assert 53 + 1 == engine._resources["rope"].position("b", "main")


def test_what_was_generated_is_matched_too() -> None:
    """The next turn's prompt finds the pages that decoding filled."""
    engine, kept = kept_engine()
    prompt, answer = ids_of(40, seed=2), ids_of(30, seed=3)
    ask(engine, "a", prompt)
    for token in answer:
        step(engine, "a", [token], "decode")
    engine.remove_request("a")
    turn = prompt + answer + ids_of(9, seed=4)
    assert len(turn) - 64 == len(ask(engine, "b", turn))  # the last generated id has KV as well: it was an input
    kept.check_invariants()


def test_at_least_one_token_is_computed() -> None:
    """A prompt that is there entirely, and ends with a page, computes its last page."""
    engine, kept = kept_engine()
    prompt = ids_of(64, seed=5)
    leave(engine, kept, "a", prompt)
    assert 16 == len(ask(engine, "b", prompt))


def test_a_hit_from_host_memory() -> None:
    """Pages that left the pool come back: not ready meanwhile, and then the same bits."""
    engine, kept = kept_engine(pages=12)
    prompt = ids_of(101, seed=6)
    leave(engine, kept, "a", prompt[:96])
    evict_all(engine, kept)
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt[:96], prompt[96:])[1], got)
    assert 96 == kept.cache.stats().matched_host_tokens
    kept.check_invariants()


def test_a_request_is_not_ready_while_its_pages_are_on_their_way() -> None:
    """M* sees nothing of a hit from host memory before all of it has arrived."""
    gate = Gate()
    engine, kept = kept_engine(pages=12, wrap_backend=gate)
    prompt = ids_of(101, seed=6)
    leave(engine, kept, "a", prompt)
    evict_all(engine, kept)
    gate.closed = True
    add(engine, "b", prompt)
    for _ in range(50):
        assert not engine.check_ready("LLM", "b", request_info("b")).ready
    assert "b" not in {rid for rid, labels in engine._resources["kv"]._streams.items() if labels["main"].page_indices}
    gate.closed = False
    await_ready(engine, "b")
    assert 96 == stream_of(engine, "b").stored_len == engine._resources["rope"].position("b", "main")
    kept.check_invariants()


def test_a_mixed_hit() -> None:
    """The first pages of a prompt from the GPU, where another request holds them, the others from host memory."""
    engine, kept = kept_engine(pages=14)
    prompt = ids_of(101, seed=7)
    leave(engine, kept, "a", prompt[:96])
    ask(engine, "holder", [*prompt[:32], 5])
    for _ in range(3):
        engine.add_request("filler")
        assert step(engine, "filler", [1] * (10 * PAGE))[1] is None
        engine.remove_request("filler")
    before = kept.cache.stats().matched_host_tokens
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt[:96], prompt[96:])[1], got)
    assert 64 == kept.cache.stats().matched_host_tokens - before
    assert stream_of(engine, "holder").page_indices[:2] == stream_of(engine, "b").page_indices[:2]
    kept.check_invariants()


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


def test_a_failed_read_is_a_miss() -> None:
    """M* computes the whole prompt, and nothing is wrong or lost."""
    gate = Gate()
    engine, kept = kept_engine(pages=12, wrap_backend=gate)
    prompt = ids_of(101, seed=8)
    leave(engine, kept, "a", prompt)
    evict_all(engine, kept)
    gate.failing = True
    got = ask(engine, "b", prompt)
    assert torch.equal(cold(prompt)[0], got)
    assert 1 == kept.counts.loads_failed
    kept.check_invariants()
    engine.remove_request("b")
    gate.failing = False
    assert 5 == len(ask(engine, "c", prompt))
    kept.check_invariants()


# ---------------------------------------------------------------------- who holds what


def test_releases_are_counted() -> None:
    """A page that two requests hold is free for others only after the second has let go; a double release raises."""
    engine, kept = kept_engine(pages=12, cpu_tier_gib=0)
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    assert stream_of(engine, "a").page_indices[:3] == stream_of(engine, "b").page_indices[:3]
    assert 11 - 5 == kv._arena.num_free
    engine.remove_request("a")
    assert 11 - 4 == kv._arena.num_free
    engine.add_request("big")
    assert step(engine, "big", [1] * 8 * PAGE)[1].pages_short == 1
    hidden, _ = step(engine, "b", [7], "decode")
    assert torch.allclose(cold(prompt, [7])[1], hidden, atol=1e-5)
    pages = list(stream_of(engine, "b").page_indices)
    engine.remove_request("b")
    with pytest.raises(InvariantViolation, match="released twice"):
        kv._arena.release(pages)


def test_reclaimable_counts_exclusive_pages() -> None:
    """What a victim is said to give is what others can have."""
    engine, kept = kept_engine(pages=32, cpu_tier_gib=0)
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    assert 4 == kv.reclaimable("a") == kv.get_offload_priority("a")
    ask(engine, "b", prompt)
    assert [1, 1, 0] == [kv.reclaimable(rid) for rid in ("a", "b", "nobody")]


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


def test_offload_while_pages_are_shared() -> None:
    """A request is offloaded whole, says what that gave, and goes on with its bits when all else was evicted."""
    with streams_of_a_device():
        engine, kept = kept_engine(pages=12, offload_pages=16)
        prompt = ids_of(53, seed=1)
        ask(engine, "a", prompt)
        ask(engine, "b", prompt)
        want = cold(prompt, [7], [8])
        assert 1 == engine.offload_request("LLM", "a")
        assert torch.allclose(want[1], step(engine, "b", [7], "decode")[0], atol=1e-5)
        engine.remove_request("b")
        kept.check_invariants()
        evict_all(engine, kept)
        await_ready(engine, "a")
        kept.check_invariants()
        assert torch.equal(want[1], step(engine, "a", [7], "decode")[0])
        assert torch.equal(want[2], step(engine, "a", [8], "decode")[0])
        engine.remove_request("a")
        kept.check_invariants()
        assert 11 == kept.streams.num_free
        assert 53 + 2 - 48 == len(ask(engine, "c", [*prompt, 7, 9]))


def test_a_reset_stream_does_not_write_over_pages_of_others() -> None:
    """`reset_request` without `free` begins anew in other pages."""
    engine, kept = kept_engine()
    kv, prompt = engine._resources["kv"], ids_of(53, seed=1)
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    engine._resources["rope"].reset_request("a")
    kv.reset_request("a", free=False)
    other = ids_of(53, seed=2)
    step(engine, "a", other)
    kept.check_invariants()
    assert torch.allclose(cold(prompt, [7])[1], step(engine, "b", [7], "decode")[0], atol=1e-5)


def test_a_fork_does_not_write_over_pages_of_others() -> None:
    """A label that becomes the target of a fork gets pages of its own, whatever it had matched."""
    engine, kept = kept_engine()
    kv, prompt, other = engine._resources["kv"], ids_of(53, seed=1), ids_of(40, seed=2)
    leave(engine, kept, "a", prompt, label="main")
    ask(engine, "reader", prompt)
    engine.add_request("b", {"kv": KeptReqConfig(prompts={"main": Prompt(prompt)})})
    await_ready(engine, "b")  # matched, not begun
    kv._ensure_label("b", "side")
    assert kv._alloc("b", "side", 40).success
    kv._streams["b"]["side"].stored_len = 40
    ctx = StepContext(request_ids=("b",), graph_walk="prefill", slot=0, capture=False)
    fork = KVStep(segments=(Segment("b", "side", 1),), pre_forks=(("side", "main"),))
    assert kv.admit(fork, ctx).ok
    kv.plan(fork, ctx)
    kv.commit(fork, ctx)
    kept.check_invariants()
    assert not set(stream_of(engine, "b").page_indices) & set(stream_of(engine, "reader").page_indices)
    assert torch.allclose(cold(prompt, [7])[1], step(engine, "reader", [7], "decode")[0], atol=1e-5)
    del other


def test_promised_pages_can_be_had_back() -> None:
    """A running request gets the pages of one that was promised some and has not begun; that one begins later."""
    engine, kept = kept_engine(pages=12, cpu_tier_gib=0)
    first, second = ids_of(90, seed=1), ids_of(79, seed=2)
    ask(engine, "a", first)
    add(engine, "b", second)
    await_ready(engine, "b")
    assert 5 == len(stream_of(engine, "b").page_indices)
    for token in ids_of(16, seed=3):
        assert step(engine, "a", [token], "decode")[1] is None
    assert 1 == kept.counts.revoked and [] == stream_of(engine, "b").page_indices
    kept.check_invariants()
    engine.remove_request("a")
    await_ready(engine, "b")
    assert torch.equal(cold(second)[0], step(engine, "b", second)[0])
    kept.check_invariants()


def test_a_prompt_reserves_its_pages() -> None:
    """Ready means that the pages of the prompt are there: of prompts that do not fit together one is refused."""
    engine, kept = kept_engine(pages=12, cpu_tier_gib=0)
    add(engine, "a", ids_of(90, seed=1))
    await_ready(engine, "a")
    assert 6 == len(stream_of(engine, "a").page_indices)
    add(engine, "b", ids_of(90, seed=2))
    await_ready(engine, "b")
    assert 1 == kept.counts.refused and [] == stream_of(engine, "b").page_indices
    assert step(engine, "a", ids_of(90, seed=1))[1] is None
    assert step(engine, "b", ids_of(90, seed=2))[1].pages_short == 1
    kept.check_invariants()


# ---------------------------------------------------------------------- what is not matched, or not kept


def test_labels_are_kept_apart() -> None:
    """Two labels over one arena share no page, though their prompts are equal."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    walks = {("LLM", "cfg"): ["cfg"], ("LLM", "prefill"): ["main"]}
    config = KeptReqConfig(needed_labels_per_node_walk=walks, prompts={"main": Prompt(prompt), "cfg": Prompt(prompt)})
    engine.add_request("b", {"kv": config})
    await_ready(engine, "b", "cfg")
    hidden, _ = step(engine, "b", prompt, "cfg")
    assert 53 == len(hidden)
    await_ready(engine, "b")
    assert 5 == len(step(engine, "b", prompt)[0])
    pages = [set(stream_of(engine, "b", label).page_indices) for label in ("main", "cfg")]
    assert not pages[0] & pages[1]
    engine.remove_request("b")
    kept.check_invariants()
    engine.add_request("c", {"kv": config})
    await_ready(engine, "c", "cfg")
    assert torch.allclose(cold(prompt)[0][48:], step(engine, "c", prompt, "cfg")[0], atol=1e-5)


def test_salts_and_adapters_share_nothing() -> None:
    """A prompt of another salt or adapter is computed whole."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt, salt=b"a")
    assert 53 == len(ask(engine, "b", prompt))
    assert 53 == len(ask(engine, "c", prompt, salt=b"a", adapter=b"lora"))
    assert 5 == len(ask(engine, "d", prompt, salt=b"a"))


@pytest.mark.parametrize("extra", [{"custom_pos_ids": torch.arange(53)}, {"kwargs": {"speed": 2}}])
def test_inputs_that_are_more_than_ids_are_computed_whole(extra: dict[str, Any]) -> None:
    """Custom positions and extra arguments: nothing is trimmed, and nothing of it is kept."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    node = engine._submodules["LLM"].submodule
    node.extra = extra
    assert 53 == len(ask(engine, "b", prompt))
    assert 1 == kept.counts.not_trimmed
    kept.check_invariants()
    other = ids_of(60, seed=2)
    ask(engine, "c", other)
    engine.remove_request("c")
    node.extra = {}
    assert 60 == len(ask(engine, "d", other))


def test_ids_that_are_not_the_prompt_are_computed_whole() -> None:
    """Inputs that differ from what was announced are neither trimmed nor kept under the wrong name."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    add(engine, "b", prompt)
    await_ready(engine, "b")
    other = [*prompt[:20], *ids_of(33, seed=2)]
    assert torch.equal(cold(other)[0], step(engine, "b", other)[0])
    engine.remove_request("b")
    kept.check_invariants()
    assert torch.allclose(cold(prompt)[0][48:], ask(engine, "c", prompt), atol=1e-5)


def test_a_request_without_a_prompt_is_m_stars_own() -> None:
    """Padding rows, warm-up and requests of nodes that are not named leave nothing behind."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    engine.add_request("dummy")
    await_ready(engine, "dummy")
    step(engine, "dummy", prompt)
    engine.remove_request("dummy")
    assert 0 == kept.cache.stats().pages_cached
    assert 53 == len(ask(engine, "a", prompt))
    kept.check_invariants()


def test_what_another_worker_has_computed_is_not_matched() -> None:
    """A prompt whose KV was published is M*'s to read in."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    leave(engine, kept, "a", prompt)
    add(engine, "b", prompt)
    info = request_info("b")
    elsewhere = {"main": KVSequenceInfo(0, "elsewhere", [])}
    info.resource_publish_info["kv"] = PublishedKVInfo.build_for_rank(0, 1, elsewhere)
    assert engine.check_ready("LLM", "b", info).ready
    assert 1 == kept.counts.prompts


def test_the_sampler_sees_what_was_trimmed() -> None:
    """Tokens that a penalty counts are those of the whole prompt, after a hit as well."""
    engine, kept = kept_engine()
    prompt = ids_of(53, seed=1)
    node = engine._submodules["LLM"].submodule
    declare = node.declare_step

    def with_sampler(*args: Any, **more: Any) -> Any:
        out = inner(*args, **more)
        out.steps["sampler"] = node.steps[-1]
        return out

    del declare
    engine = make_engine()
    node = engine._submodules["LLM"].submodule
    inner = node.declare_step
    node.declare_step = with_sampler
    (kept,) = attach(engine, nodes=("LLM",))
    admit = engine._runner.admit
    engine._runner.admit = lambda declared: (declared.steps.pop("sampler"), admit(declared))[1]
    for rid in ("a", "b"):
        ask(engine, rid, prompt)
        assert prompt == node.steps[-1].prefill_tracked_tokens[rid].tolist()
        engine.remove_request(rid)
    assert 48 == kept.counts.matched_tokens


# ---------------------------------------------------------------------- encoders


class Tower(NodeSubmodule):  # type: ignore[misc]
    """Two outputs, one of them a list."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def prepare_inputs(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    def preprocess(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    def forward(self, graph_walk: str, engine_inputs: Any, pixels: torch.Tensor) -> dict[str, Any]:
        self.runs += 1
        return {"image": [pixels * 2, pixels[:1] + 1], "pooled": pixels.mean(0, keepdim=True)}

    def forward_batched(self, graph_walk: str, engine_inputs: Any, pixels: torch.Tensor) -> dict[str, Any]:
        self.runs += 1
        rids = engine_inputs.request_ids
        return {rid: {"image": [part * 2], "pooled": part.mean(0)} for rid, part in zip(rids, pixels, strict=True)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b)


def test_encoder_outputs_are_computed_once() -> None:
    """One request after another, and a batch: what is there is not computed again, and has the same names and bits."""
    engine, tower = make_engine(), Tower()
    engine._submodules["tower"] = SubmoduleManagement(tower, tower.forward, tower.forward_batched, None, {})
    digests = {"a": b"1" * 32, "b": b"2" * 32, "a again": b"1" * 32, "none": None}
    encoder = KeptEncoder(EncoderFingerprint("tower"), lambda info: digests[info.request_id])
    (kept,) = attach(engine, nodes=("LLM",), encoders={"tower": encoder})
    management, pixels = engine._submodules["tower"], torch.randn(40, 16)

    def inputs(*rids: str) -> Any:
        return SimpleNamespace(request_ids=list(rids), per_request_info={rid: request_info(rid) for rid in rids})

    first = management.forward("encode", engine_inputs=inputs("a"), pixels=pixels)
    assert same(first, tower.forward("encode", inputs("a"), pixels)) and 2 == tower.runs
    assert same(first, management.forward("encode", engine_inputs=inputs("a again"), pixels=pixels * 0))
    assert 2 == tower.runs
    management.forward("other walk", engine_inputs=inputs("a"), pixels=pixels)
    management.forward("encode", engine_inputs=inputs("none"), pixels=pixels)
    management.forward("encode", engine_inputs=inputs("none"), pixels=pixels)
    assert 5 == tower.runs
    batch = torch.randn(2, 40, 16)
    want = management.forward_batched("batch", engine_inputs=inputs("a", "b"), pixels=batch)
    assert same(want, management.forward_batched("batch", engine_inputs=inputs("a", "b"), pixels=batch * 0))
    assert 6 == tower.runs
    kept.check_invariants()
    leave(engine, kept, "r", ids_of(53, seed=1))


# ---------------------------------------------------------------------- many requests


def reference(ids: list[int]) -> torch.Tensor:
    """The toy's hidden states of all positions, without pages."""
    h, n = EMBEDDING[torch.tensor(ids)], len(ids)
    positions, mask = torch.arange(n), torch.ones(n, n, dtype=torch.bool).triu(1)
    for w in WEIGHTS:
        q, k, v = ((h @ w[x]).view(n, HEADS, -1) for x in "qkv")
        q, k = turned(q, positions), turned(k, positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        attention = scores.masked_fill(mask, float("-inf")).softmax(-1)
        h = h + torch.einsum("hqk,khd->qhd", attention, v).reshape(n, WIDTH) @ w["o"]
    return h


def run_random(requests: int, seed: int) -> KeptKV:
    """Sessions that come back, share beginnings, decode, are offloaded, removed early; each output is checked."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    engine, kept = kept_engine(pages=40, offload_pages=64)
    sessions: list[list[int]] = []
    live: dict[str, list[int]] = {}
    for number in range(requests):
        rid = f"r{number}"
        if sessions and draw.random() < 0.7:
            ids = [*draw.choice(sessions)[: draw.randrange(1, 200)], *ids_of(draw.randrange(1, 30), draw.random())]
        else:
            ids = ids_of(draw.randrange(1, 120), draw.random())
        add(engine, rid, ids)
        if draw.random() < 0.05:
            engine.remove_request(rid)
            continue
        if draw.random() < 0.5:
            await_ready(engine, rid)
        hidden, error = step_with_room(engine, rid, ids, live, draw)
        if error is None:
            assert torch.allclose(reference(ids)[-len(hidden) :], hidden, atol=1e-4)
            live[rid] = ids
        else:
            engine.remove_request(rid)
        for other in draw.sample(sorted(live), min(len(live), 3)):
            for _ in range(draw.randrange(4)):
                token = draw.randrange(VOCABULARY)
                hidden, error = step_with_room(engine, other, [token], live, draw, walk="decode")
                if error is None:
                    live[other].append(token)
                    assert torch.allclose(reference(live[other])[-1:], hidden, atol=1e-4)
        while len(live) > 5 or (live and draw.random() < 0.3):
            gone = draw.choice(sorted(live))
            sessions.append(live.pop(gone))
            engine.remove_request(gone)
        kept.check_invariants()
    for rid in live:
        engine.remove_request(rid)
    kept.check_invariants()
    return kept


def step_with_room(engine: Any, rid: str, ids: list[int], live: Any, draw: random.Random, walk: str = "prefill") -> Any:
    """A step; requests are offloaded, as M*'s worker does it, until there is room, or nobody is left."""
    others = [other for other in live if other != rid]
    while True:
        if not engine.is_offloaded("LLM", rid) or engine.reload_request("LLM", rid):
            hidden, error = step(engine, rid, ids, walk)
            if error is None:
                return hidden, None
        if not others:
            return None, "no room"
        engine.offload_request("LLM", others.pop(draw.randrange(len(others))))


def test_a_thousand_random_requests() -> None:
    """Each output is right to rounding, and pages are conserved after every request."""
    with streams_of_a_device():
        kept = run_random(1000, seed=1)
    stats = kept.cache.stats()
    assert 40 == stats.pages_free + stats.pages_cached + 1 and 1 == stats.leases
    assert kept.counts.matched_tokens > 5000 and stats.matched_host_tokens > 1000


# ---------------------------------------------------------------------- at the start


def test_another_release_is_refused() -> None:
    """What is wrapped are not public names, so other releases are refused by number."""
    check_version("0.2.1")
    with pytest.raises(BadInput, match=r"mstar-ai 0\.3\.0: kvkeep knows 0\.2\.1"):
        check_version("0.3.0")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cpu_teir_gib": 1}, "unknown option cpu_teir_gib: there are nodes, cpu_tier_gib, encoders, eviction"),
        ({"nodes": ("LLM", "ViT")}, "no node ViT in this engine: there are LLM"),
        ({"cpu_tier_gib": 1e-5}, "cpu_tier_gib=1e-05 holds 2 pages, and one request of 'kv' may have 63: use 0.0002"),
        ({"cpu_tier_gib": -1}, "cpu_tier_gib is -1"),
        ({"eviction": "fifo"}, "eviction is 'fifo': it must be one of lru, rhythm"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    """An option that is unknown or cannot be is named at the start, with what would be right."""
    with pytest.raises(BadInput) as error:
        attach(make_engine(), **options)
    assert words in str(error.value)


def test_engines_that_cannot_be_served_are_refused() -> None:
    """A KV dtype or layout that is not understood, requests that are there already, no KV cache."""
    with pytest.raises(BadInput, match="KV dtype float64"):
        attach(make_engine(dtype=torch.float64))
    engine = make_engine()
    engine._resources["kv"].config.layout = "HND"
    with pytest.raises(BadInput, match="KV layout HND: kvkeep knows NHD"):
        attach(engine)
    engine = make_engine()
    engine.add_request("early")
    step(engine, "early", [1, 2, 3])
    with pytest.raises(BadInput, match="has requests already"):
        attach(engine)
    with pytest.raises(BadInput, match="no KV cache"):
        attach(SimpleNamespace(_resources={}, _submodules={}))


def test_with_more_than_one_rank_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks: M* stays as it was, and the log says so once."""
    groups = JointGroups(tp_group=CommGroup(0, 0, [0, 1]), sp_group=CommGroup.trivial())
    config = KVConfig(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64, max_num_pages=8, page_size=PAGE)
    kv = KVManager(
        cfg=config, name="kv", joint_comm_group=groups, transfer_engine_info=make_engine_info(),
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    arena = kv._arena
    assert [] == attach(SimpleNamespace(_resources={"kv": kv}, _submodules={}))
    assert kv._arena is arena
    assert 1 == sum("2 ranks" in record.message for record in caplog.records)


def make_engine_info() -> Any:
    from mstar.communication.tensors import LocalTransferEngine
    from mstar.engine.resources.kv.transfer import TransferEngineInfo

    return TransferEngineInfo("worker_0", "s", LocalTransferEngine("localhost"))
