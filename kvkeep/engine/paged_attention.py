"""Attention of a transformers model over kvkeep's pages: K and V are written to pages and read from pages.

Must not know the scheduler, the cache or which requests there are: it is given page tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from kvkeep.engine.arithmetic import Arithmetic
from kvkeep.errors import InvariantViolation
from kvkeep.tiers.layout import PageLayout

NAME = "kvkeep_paged"

# Query rows that are attended at a time.  Keys behind the last row of a block are not computed at all, so small blocks
# waste less of the causal triangle, and large ones call less often.  1,500 rows of SmolLM2, one layer, one core: 34 ms
# in blocks of 64, 35 of 192, 38 of 256, 42 of 512, 63 at once (38 as torch's causal case).
BLOCK_ROWS = 192
# A decode row joins the rows of longer requests while it has at least this share of their keys: one call instead
# of two, for some masked keys.
GROUP_SHARE = 0.6


def register() -> None:
    """Makes the attention known to transformers under `NAME`."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: "Step",
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim], after RoPE.
    Returns [1, rows, heads, head_dim].  `step` comes through the model's keyword arguments.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    step.write(layer, key, value)
    return step.attend(layer, query, scaling), None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions [start, end) of one request that a forward computes, and the page table that holds them.

    Position p lives in pages[p // page_size]; the K and V of [0, start) are in the pages already.
    units: ranges of positions of the request that see each other whatever their order; none may be split.
    """

    pages: Sequence[int]
    start: int
    end: int
    units: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for first, last in self.units:
            if first < self.start < last or first < self.end < last:
                raise InvariantViolation(f"positions {self.start} to {self.end} split the unit {first} to {last}")

    @property
    def rows(self) -> int:
        """Positions computed."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows [first, last) of the forward against the first `keys` gathered positions; mask [rows, keys]."""

    first: int
    last: int
    keys: int
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which pages are brought together: `table`, as many for each request, and the positions to be blanked afterwards.

    blank: positions of the gathered keys that hold no committed K and V, flat over all requests.  They are masked,
    but 0 * NaN is NaN: what a freed page holds must not reach a live request.
    keys: length that each request's keys are brought to, with zeros behind its pages.
    """

    table: torch.Tensor
    requests: int
    blank: torch.Tensor | None
    keys: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    gather: _Gather
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows [first, last) of the forward, one each of several requests; mask [requests, 1, 1, keys] or None."""

    gather: _Gather
    first: int
    last: int
    mask: torch.Tensor | None


class Workspace:
    """Buffers that live from step to step, so that a decode step allocates nothing large."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, count: int) -> torch.Tensor:
        """`count` elements of the pool's dtype on its device, with whatever is in them."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count + count // 2, dtype=self._kv.dtype, device=self._kv.device)
            self._buffers[name] = buffer
        return buffer[:count]


class Step:
    """What one forward writes and reads: built once, used by every layer.

    kv: the pool [pages, layers, 2, page_size, kv_heads, head_dim].
    segments: in the order of the forward's rows.  Segments of one row are attended together where they stand side
        by side; rows behind the last segment are padding: never written, their result is zero.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        layout: PageLayout,
        segments: Sequence[Segment],
        arithmetic: Arithmetic,
        workspace: Workspace,
    ) -> None:
        self._layout = layout
        self._arithmetic = arithmetic
        self._workspace = workspace
        self._device = kv.device
        self._dtype = kv.dtype
        self.rows = sum(segment.rows for segment in segments)
        # One row of `_halves` is K or V of one layer of one page, one row of `_slots` K or V of one position.
        self._halves = kv.view(-1, layout.page_size * layout.kv_heads * layout.head_dim)
        self._slots = kv.view(-1, layout.kv_heads, layout.head_dim)
        self._targets = self._positions_of(segments)
        self._plans = self._plan(segments)

    # --- writing -------------------------------------------------------------------------------------------------

    def _positions_of(self, segments: Sequence[Segment]) -> torch.Tensor:
        """For each row, where in `_slots` layer 0's K of its position is."""
        page_size = self._layout.page_size
        per_page = self._layout.layers * 2 * page_size
        parts = []
        for segment in segments:
            positions = torch.arange(segment.start, segment.end)
            first = segment.start // page_size
            own = torch.tensor(list(segment.pages[first : (segment.end - 1) // page_size + 1]))
            parts.append(own[positions // page_size - first] * per_page + positions % page_size)
        return torch.cat(parts).to(self._device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts K and V of the step's rows into their pages; padding rows are left out."""
        for half, source in enumerate((key, value)):
            offset = (layer * 2 + half) * self._layout.page_size
            self._slots[offset:].index_copy_(0, self._targets, source[0, :, : self.rows].transpose(0, 1))

    # --- reading -------------------------------------------------------------------------------------------------

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim]."""
        result = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        result[:, self.rows :] = 0
        for plan in self._plans:
            keys, values = self._gathered(layer, plan.gather)
            if isinstance(plan, _Decode):
                self._attend_decode(plan, query, keys, values, scaling, result)
            else:
                for block in plan.blocks:
                    self._attend_block(block, query, keys, values, scaling, result)
        return result

    def _gathered(self, layer: int, gather: _Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `layer`, each [requests, kv_heads, keys, head_dim], brought together from the pages."""
        layout = self._layout
        halves = []
        for half, name in enumerate(("keys", "values")):
            source = self._halves[layer * 2 + half :]
            buffer = self._workspace.take(name, gather.table.numel() * source.shape[1])
            torch.index_select(source, 0, gather.table, out=buffer.view(-1, source.shape[1]))
            found = buffer.view(-1, layout.kv_heads, layout.head_dim)
            if gather.blank is not None:
                found.index_fill_(0, gather.blank, 0)
            found = found.view(gather.requests, -1, layout.kv_heads, layout.head_dim)
            halves.append(found[:, : gather.keys].transpose(1, 2))
        return halves[0], halves[1]

    def _attend_block(
        self,
        block: _Block,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        result: torch.Tensor,
    ) -> None:
        rows = block.last - block.first
        queries = query[:, :, block.first : block.last]
        padding = self._arithmetic.query_rows(rows) - rows
        if padding:
            queries = functional.pad(queries, (0, 0, 0, padding))
        attended = functional.scaled_dot_product_attention(
            queries,
            keys[:, :, : block.keys],
            values[:, :, : block.keys],
            attn_mask=block.mask,
            is_causal=block.causal,
            scale=scaling,
            enable_gqa=True,
        )
        result[:, block.first : block.last] = attended[:, :, :rows].transpose(1, 2)

    def _attend_decode(
        self,
        plan: _Decode,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        result: torch.Tensor,
    ) -> None:
        """The query heads that share a KV head become the rows of one small product: K and V are read once for all."""
        requests, kv_heads = plan.gather.requests, self._layout.kv_heads
        heads, head_dim = query.shape[1], query.shape[3]
        shared = heads // kv_heads
        queries = query[0, :, plan.first : plan.last].transpose(0, 1).reshape(requests, kv_heads, shared, head_dim)
        padding = self._arithmetic.query_rows(shared) - shared
        if padding:
            queries = functional.pad(queries, (0, 0, 0, padding))
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=plan.mask, scale=scaling)
        result[0, plan.first : plan.last] = attended[:, :, :shared].reshape(requests, heads, head_dim)

    # --- planning ------------------------------------------------------------------------------------------------

    def _plan(self, segments: Sequence[Segment]) -> list["_Prefill | _Decode"]:
        plans: list[_Prefill | _Decode] = []
        row = 0
        group: list[Segment] = []
        for segment in segments:
            joins = segment.rows == 1 and (
                not group or min(group[0].end, segment.end) >= GROUP_SHARE * max(group[0].end, segment.end)
            )
            if group and not joins:
                plans.append(self._plan_decode(group, row - len(group)))
                group = []
            if segment.rows == 1:
                group.append(segment)
            else:
                plans.append(self._plan_prefill(segment, row))
            row += segment.rows
        if group:
            plans.append(self._plan_decode(group, row - len(group)))
        return plans

    def _plan_prefill(self, segment: Segment, row: int) -> _Prefill:
        blocks = []
        for start in range(segment.start, segment.end, BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, segment.end)
            units = [unit for unit in segment.units if unit[0] < end and start < unit[1]]
            keys = self._arithmetic.keys(max([end, *(last for _, last in units)]))
            rows = self._arithmetic.query_rows(end - start)
            causal = start == 0 and not units
            mask = None
            if not causal:
                last_seen = torch.arange(start, start + rows, device=self._device)[:, None]
                for first, last in units:
                    last_seen[max(first - start, 0) : last - start] = last - 1
                mask = self._mask(torch.arange(keys, device=self._device)[None, :] > last_seen)
            at = row + start - segment.start
            blocks.append(_Block(at, at + end - start, keys, mask, causal))
        return _Prefill(self._plan_gather([segment]), tuple(blocks))

    def _plan_decode(self, group: Sequence[Segment], first: int) -> _Decode:
        gather = self._plan_gather(group)
        mask = None
        if any(segment.end != gather.keys for segment in group):
            ends = torch.tensor([segment.end for segment in group], device=self._device)
            mask = self._mask(torch.arange(gather.keys, device=self._device)[None, :] >= ends[:, None])
            mask = mask[:, None, None, :]
        return _Decode(gather, first, first + len(group), mask)

    def _plan_gather(self, group: Sequence[Segment]) -> _Gather:
        page_size = self._layout.page_size
        keys = self._arithmetic.keys(max(segment.end for segment in group))
        pages_each = -(-keys // page_size)
        table: list[int] = []
        blanks: list[torch.Tensor] = []
        for number, segment in enumerate(group):
            own = list(segment.pages[: -(-segment.end // page_size)])
            # Short of pages: any page will do, what comes from it is blanked.
            table += own + [own[0]] * (pages_each - len(own))
            if segment.end < keys:
                begin = number * pages_each * page_size
                blanks.append(torch.arange(begin + segment.end, begin + keys))
        return _Gather(
            table=torch.tensor(table, device=self._device) * (self._layout.layers * 2),
            requests=len(group),
            blank=torch.cat(blanks).to(self._device) if blanks else None,
            keys=keys,
        )

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """An additive mask: minus infinity where `hidden`."""
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
