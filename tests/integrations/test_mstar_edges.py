"""The adapter over M*: what is not matched or not kept, encoders, and what is refused at the start.

Must not use a stand-in for anything of M*: where it is not installed, these tests are skipped.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("mstar", reason="mstar-ai is not installed in this environment: run `make test-mstar`")

from mstar.communication.tensors import LocalTransferEngine
from mstar.distributed.communication import CommGroup, JointGroups
from mstar.engine.engine import SubmoduleManagement
from mstar.engine.resources import KVConfig, KVStep, Segment, StepContext
from mstar.engine.resources.kv.manager import KVManager, KVSequenceInfo, PublishedKVInfo
from mstar.engine.resources.kv.transfer import TransferEngineInfo
from mstar.engine.resources.step import AdmitOutcome, AllocationFailed
from mstar.model.submodule_base import NodeSubmodule

from examples.mstar_toy import PAGE, make_engine, request_info, step
from kvkeep.encoder import EncoderFingerprint
from kvkeep.errors import BadInput
from kvkeep.index.media import MediaItem
from kvkeep.integrations.mstar import KeptEncoder, KeptReqConfig, Prompt, attach, check_version
from tests.integrations.mstar_requests import (
    TIER_GIB,
    add,
    ask,
    await_ready,
    cold,
    ids_of,
    kept_engine,
    leave,
    pages_to_be_had,
    stream_of,
    streams_of_a_device,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_media_are_told_apart_by_their_digests() -> None:
    """Equal placeholders of another image match up to the page before it, those of the same image all the way."""
    engine, kept = kept_engine()
    prompt = [*ids_of(20, seed=1), *[9] * 20, *ids_of(20, seed=2)]
    images = [(MediaItem(20, 20, digest, causal=True),) for digest in (b"1" * 32, b"2" * 32)]
    leave(engine, kept, "a", prompt, media=images[0])
    assert 60 - 16 == len(ask(engine, "b", prompt, media=images[1]))
    assert 60 - 48 == len(ask(engine, "c", prompt, media=images[0]))


def test_a_prompt_that_cannot_be_admitted_is_m_stars_own() -> None:
    """A prompt larger than the pool, an empty one, ids below 0: said in the log, and M* deals with them."""
    engine, kept = kept_engine(pages=12)
    for rid, ids in (("long", [1] * 500), ("empty", []), ("negative", [-1, 2])):
        add(engine, rid, ids)
        assert 0 == await_ready(engine, rid)
    assert 3 == kept.counts.refused
    assert 21 == step(engine, "long", [1] * 500)[1].pages_short
    kept.check_invariants()


def test_a_plan_that_is_abandoned_gives_its_pages_back() -> None:
    """A step that M* staged and dropped leaves no page with the label that it invented."""
    engine, kept = kept_engine()
    kv = engine._resources["kv"]
    ask(engine, "a", ids_of(53, seed=1))
    ctx = StepContext(request_ids=("a",), graph_walk="decode", slot=0, capture=False)
    ctx.is_preplan = True
    fork = KVStep(segments=(Segment("a", "side", 1),), pre_forks=(("main", "side"),))
    assert kv.admit(fork, ctx).ok
    assert 4 == len(stream_of(engine, "a", "side").page_indices)
    kv.clear_preplan()
    kept.check_invariants()
    assert 63 - 4 == pages_to_be_had(kept)


def test_a_step_that_was_not_admitted_is_prepared_again() -> None:
    """A prefill that found no room is cut once more when M* tries it again, and then gives what it should."""
    engine, kept = kept_engine()
    kv, prompt = engine._resources["kv"], ids_of(80, seed=1)
    leave(engine, kept, "a", prompt[:64])
    add(engine, "b", prompt)
    await_ready(engine, "b")
    admit, full = kv.admit, AllocationFailed(message="full", pages_short=1, label="main", request_id="b")
    kv.admit = lambda step, ctx: AdmitOutcome(ok=False, reason=full)
    assert full == step(engine, "b", prompt)[1]
    kv.admit = admit
    assert torch.equal(cold(prompt[:64], prompt[64:])[1], step(engine, "b", prompt)[0])
    kept.check_invariants()


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
    prompt, engine = ids_of(53, seed=1), make_engine()
    node = engine._submodules["LLM"].submodule
    declare = node.declare_step

    def with_sampler(*args: Any, **more: Any) -> Any:
        out = declare(*args, **more)
        out.steps["sampler"] = node.steps[-1]
        return out

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
    digests["large"] = b"3" * 32
    large = torch.randn(70_000, 16)  # more than the pool
    got = management.forward("encode", engine_inputs=inputs("large"), pixels=large)
    assert same(tower.forward("encode", inputs("large"), large), got)
    kept.check_invariants()


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


def test_the_split_of_host_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the pages of both pools in host memory, and neither takes the other's."""
    with streams_of_a_device(), caplog.at_level("INFO"):
        engine = make_engine(pages=12, offload_pages=7)
        (kept,) = attach(engine, nodes=("LLM",), cpu_tier_gib=TIER_GIB)
    assert "524 host pages for cached prefixes, 7 of M*'s for suspended requests" in caplog.text
    assert 524 == kept.cache.stats().host_pages_total and 7 == engine._resources["kv"]._cpu_pool.num_free_pages


def test_nodes_whose_prompts_cannot_be_cut_are_refused() -> None:
    """A node with two KV caches, or with none: what it computes of a prompt is not in one place."""
    engine = make_engine()
    resources = engine._submodules["LLM"].resources
    resources["second"] = resources["kv"]
    with pytest.raises(BadInput, match="node LLM has 2 KV caches: prompts can be cut where there is exactly one"):
        attach(engine, nodes=("LLM",))
    resources.clear()
    with pytest.raises(BadInput, match="node LLM has 0 KV caches"):
        attach(engine, nodes=("LLM",))


def test_with_more_than_one_rank_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks: M* stays as it was, and the log says so once."""
    groups = JointGroups(tp_group=CommGroup(0, 0, [0, 1]), sp_group=CommGroup.trivial())
    config = KVConfig(num_layers=1, num_kv_heads=2, head_dim=8, max_seq_len=64, max_num_pages=8, page_size=PAGE)
    info = TransferEngineInfo("worker_0", "s", LocalTransferEngine("localhost"))
    kv = KVManager(
        cfg=config, name="kv", joint_comm_group=groups, transfer_engine_info=info,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    arena = kv._arena
    assert [] == attach(SimpleNamespace(_resources={"kv": kv}, _submodules={}))
    assert kv._arena is arena
    assert 1 == sum("2 ranks" in record.message for record in caplog.records)


def test_the_example_runs(repo_root: Path) -> None:
    """`python -m examples.mstar_adapter` ends well and tells of a hit."""
    command = [sys.executable, "-m", "examples.mstar_adapter"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True)
    assert "computed 9 of 153" in done.stdout
