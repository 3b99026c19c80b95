"""A toy node for M*'s real engine on a CPU: two layers of attention over its real pages.

Must not know kvkeep.
"""

from typing import Any

import torch
from mstar.communication.tensors import LocalTransferEngine
from mstar.conductor.request_info import CurrentForwardPassInfo
from mstar.distributed.communication import WorkerParallelGroups
from mstar.engine.engine import Engine, ExecutingBatch
from mstar.engine.resources import (
    KVConfig,
    KVSpec,
    KVStep,
    PositionConfig,
    PositionSpec,
    PositionStep,
    Segment,
    StepContext,
    SubmoduleStep,
)
from mstar.engine.resources.kv.transfer import TransferEngineInfo
from mstar.engine.resources.sampler.config import SamplerStep
from mstar.model.submodule_base import ARNodeInputs, ARNodeSubmodule

PAGE, LAYERS, HEADS, DIM, VOCABULARY = 16, 2, 2, 8, 97
WIDTH = HEADS * DIM

_generator = torch.Generator().manual_seed(7)
EMBEDDING = torch.randn(VOCABULARY, WIDTH, generator=_generator)
WEIGHTS = [{n: torch.randn(WIDTH, WIDTH, generator=_generator) / WIDTH**0.5 for n in "qkvo"} for _ in range(LAYERS)]


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = DIM // 2
    angle = positions[:, None].float() / 10000 ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., :half] * sin + x[..., half:] * cos], -1)


class ToyDecoder(ARNodeSubmodule):  # type: ignore[misc]
    """Gives the hidden states of the positions that it computes."""

    disable_autocast = True
    disable_torch_compile = True

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[int] = []
        self.tracked: dict[str, torch.Tensor] = {}
        self.steps: list[Any] = []
        self.extra: dict[str, Any] = {}

    def prepare_inputs(self, graph_walk: str, fwd_info: Any, inputs: Any, **more: Any) -> Any:
        ids = inputs["text_inputs"][0]
        return ARNodeInputs(input_ids=ids, input_seq_len=ids.shape[0], **self.extra)

    def preprocess(self, graph_walk: str, engine_inputs: Any, inputs: Any) -> dict[str, torch.Tensor]:
        return {"text_inputs": torch.cat([i.input_ids for i in inputs])}

    def declare_step(self, graph_walk: str, request_ids: list[str], inputs: list[Any], **more: Any) -> Any:
        label = "main" if graph_walk in ("prefill", "decode") else graph_walk
        segments = [Segment(r, label, i.input_seq_len) for r, i in zip(request_ids, inputs, strict=True)]
        tracked = {r: i.input_ids for r, i in zip(request_ids, inputs, strict=True)}
        steps = {"kv": KVStep(), "rope": PositionStep()}
        self.steps.append(SamplerStep(prefill_tracked_tokens=tracked))
        return SubmoduleStep(segments=segments, steps=steps)

    def forward(self, graph_walk: str, engine_inputs: Any, text_inputs: torch.Tensor, **more: Any) -> Any:
        kv, rope = engine_inputs.resources["kv"], engine_inputs.resources["rope"]
        ((label, plan),) = engine_inputs.step.ctx.plan_results["kv"].items()
        view, positions = plan.views[0], rope.pos_ids(label)
        h, n, total = EMBEDDING[text_inputs], len(text_inputs), view.length
        self.computed.append(n)
        for layer, w in enumerate(WEIGHTS):
            q, k, v = (h @ w[x] for x in "qkv")
            q, k = turned(q.view(n, HEADS, DIM), positions), turned(k.view(n, HEADS, DIM), positions)
            kv.write_kv(k, v.view(n, HEADS, DIM), layer_idx=layer, label=label)
            pages = kv.layer_view(layer)[view.page_idxs]
            keys, values = (pages[:, i].reshape(-1, HEADS, DIM)[:total] for i in (0, 1))
            scores = torch.einsum("qhd,khd->hqk", q, keys) / DIM**0.5
            mask = torch.arange(total)[None] > (torch.arange(n) + total - n)[:, None]
            attention = scores.masked_fill(mask, float("-inf")).softmax(-1)
            h = h + torch.einsum("hqk,khd->qhd", attention, values).reshape(n, WIDTH) @ w["o"]
        return {"hidden": [h]}


def make_engine(pages: int = 64, offload_pages: int = 0, max_seq_len: int = 4096, dtype: Any = torch.float32) -> Any:
    engine = Engine(autocast_dtype=dtype)
    config = KVConfig(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, max_seq_len=max_seq_len, max_num_pages=pages,
        page_size=PAGE, cpu_offload_pages=offload_pages,
    )  # fmt: skip
    engine.load_model(
        {"LLM": ToyDecoder()},
        [KVSpec("kv", {"LLM"}, config), PositionSpec("rope", {"LLM"}, PositionConfig(kv_cache="kv"))],
        WorkerParallelGroups(num_workers=1, global_rank=0),
        torch.device("cpu"),
        TransferEngineInfo("worker_0", "s", LocalTransferEngine("localhost")),
    )
    return engine


def request_info(rid: str, walk: str = "prefill") -> Any:
    return CurrentForwardPassInfo(request_id=rid, graph_walk=walk, fwd_index=0, random_seed=0, max_tokens=8)


def step(engine: Any, rid: str, ids: list[int] | torch.Tensor, walk: str = "prefill") -> tuple[Any, Any]:
    """One step of one request: its hidden states, or None and why it was not admitted."""
    info = request_info(rid, walk)
    batch = ExecutingBatch(
        node_name="LLM",
        per_request_info={rid: info},
        per_request_input_tensors={rid: {"text_inputs": [torch.as_tensor(ids)]}},
        step_context=StepContext(request_ids=(rid,), graph_walk=walk, slot=0, capture=False),
    )
    engine.prepare_inputs(batch)
    out = engine.exec(batch)
    if batch.failed_requests:
        raise RuntimeError(str(batch.failed_requests))
    if batch.admit_error is not None:
        return None, batch.admit_error
    engine.finalize_batch(batch)
    return out[rid]["hidden"][0], None
