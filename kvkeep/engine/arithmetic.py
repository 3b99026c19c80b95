"""How a step is computed: "strict", where a row's bits do not depend on what it is computed with, or "fast".

Must not know pages, requests or the scheduler.

In strict arithmetic K, V and logits of a position are the same bits whether it was computed in a prefill chunk of any
length, in a decode step, or in a batch with others.  It rests on three facts about the kernels that a CPU runs, each
of them checked by `calibrate` on the machine at hand before an engine may call itself strict:
- a row of a linear layer, a norm, an activation or a rotation does not depend on how many rows there are, as long as
  they are a multiple of a small count;
- in attention a query row does not depend on its companions, again from a small count up, and masked keys behind its
  own change nothing (exp(-inf) is an exact zero), as long as the keys of the last tile are of a good count: the
  product with V splits its sum according to that count;
- none of it depends on the number of threads that share the work.
Shapes that do not hold are padded to shapes that do.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvkeep.errors import BadInput

Mode = Literal["strict", "fast"]

KEY_TILE = 512  # keys that torch's CPU attention kernel takes at a time; its last tile may be shorter
KEY_UNIT = 16  # floats of one vector register: keys are padded to a multiple at least
ROW_QUANTA = (1, 2, 4, 8, 16, 32, 64)
ROWS_WHOLE = 64  # from here up rows are padded to multiples of 16 at least, which costs next to nothing
ROWS_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 20, 24, 27, 32, 33, 40, 48, 49, 56, 63, 64)
ROWS_TRIED_FEW = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 27, 32, 64)  # for the output layer, which is large and sees few rows
ROWS_TRIED_MANY = (*ROWS_TRIED, 65, 96, 128, 176, 192, 256, 272, 384, 512, 1024, 1040, 2048)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The shapes that steps are padded to.

    threads: intra-op threads of torch that a forward uses.
    row_quantum: rows of a forward come in multiples of this.
    query_quantum: query rows of one attention call come in multiples of this.
    key_tails: counts of keys, modulo KEY_TILE, that a call may have; empty when any count may.
    """

    mode: Mode
    threads: int
    row_quantum: int = 1
    query_quantum: int = 1
    key_tails: tuple[int, ...] = ()

    def rows(self, count: int) -> int:
        """Rows that a forward of `count` rows is padded to."""
        if self.mode == "fast":
            return count
        quantum = self.row_quantum if count <= ROWS_WHOLE else max(self.row_quantum, KEY_UNIT)
        return _up(count, quantum)

    def query_rows(self, count: int) -> int:
        """Rows that an attention call of `count` query rows is padded to."""
        return _up(count, self.query_quantum)

    def keys(self, count: int) -> int:
        """Keys that an attention call over `count` keys is padded to."""
        if not self.key_tails:
            return count
        whole, tail = divmod(count, KEY_TILE)
        return whole * KEY_TILE + next(good for good in (0, *self.key_tails, KEY_TILE) if good >= tail)


@contextlib.contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """torch uses this many intra-op threads inside; what it used before afterwards."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calibrate(model: nn.Module, heads: int, kv_heads: int, head_dim: int, threads: int, rows_max: int) -> Arithmetic:
    """The smallest padding for which strict arithmetic holds with this model on this machine.

    threads: most intra-op threads to use; fewer are taken where it does not hold with as many (element-wise kernels
        split their work in as many equal parts, and round the ends of a part differently).
    rows_max: most rows of a forward.
    Raises `BadInput` when it holds with no padding and not with one thread.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise BadInput(f"strict arithmetic has been proved on a CPU only, not on {device.type}: use fast")
    with torch.inference_mode():
        for count in range(threads, 0, -1):
            with threads_set(count):
                row_quantum = _row_quantum(model, rows_max)
                if row_quantum is not None:
                    query_quantum, key_tails = _attention_shapes(model, heads, kv_heads, head_dim)
                    return Arithmetic("strict", count, row_quantum, query_quantum, key_tails)
    raise _refuse("a row of a layer depends on the number of rows")


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _refuse(what: str) -> BadInput:
    return BadInput(f"strict arithmetic does not hold here: {what}, whatever the padding; use fast")


# --- rows ------------------------------------------------------------------------------------------------------------


def _row_quantum(model: nn.Module, rows_max: int) -> int | None:
    """Smallest quantum for which every row-wise part of the model gives the same rows at every padded count."""
    most = min(rows_max, ROWS_TRIED_MANY[-1])
    tried = [count for count in ROWS_TRIED_MANY if count <= most] + [most]
    parts = [_Part(part, tried if many else ROWS_TRIED_FEW) for part, many in _row_parts(model, most)]
    for quantum in ROW_QUANTA:
        candidate = Arithmetic("strict", torch.get_num_threads(), quantum)
        if all(part.holds(candidate) for part in parts):
            return quantum
    return None


def _row_parts(model: nn.Module, rows_max: int) -> Iterator[tuple[Callable[[int, int], torch.Tensor], bool]]:
    """Functions from a range of rows to those rows' results, one for each kind of part.

    False for those that only ever see few rows.  Layers of a model have the same shapes, so the first stands for all.
    """
    generator = torch.Generator().manual_seed(0)
    decoder = model.get_decoder()  # type: ignore[operator]
    layer = decoder.layers[0]
    head = model.get_output_embeddings()  # type: ignore[operator]
    dtype = decoder.norm.weight.dtype

    def on_inputs(module: nn.Module, width: int) -> Callable[[int, int], torch.Tensor]:
        inputs = torch.randn(1, rows_max + 2 * ROWS_WHOLE, width, generator=generator).to(dtype)

        def part(first: int, last: int) -> torch.Tensor:
            result: torch.Tensor = module(inputs[:, first:last].contiguous())
            return result[0]

        return part

    width = decoder.norm.weight.numel()
    yield on_inputs(layer.mlp, width), True
    for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
        yield on_inputs(module, module.in_features), True
    yield on_inputs(layer.input_layernorm, width), True
    for name in ("q_norm", "k_norm"):  # some models norm the queries and keys of each head
        norm = getattr(layer.self_attn, name, None)
        if norm is not None:
            yield on_inputs(norm, norm.weight.numel()), True
    kind = getattr(layer.self_attn, "layer_type", None)

    def rotation(first: int, last: int) -> torch.Tensor:
        positions = torch.arange(first, last)[None]
        cos, sin = decoder.rotary_emb(torch.empty(0, dtype=dtype), positions, *(() if kind is None else (kind,)))
        return torch.cat((cos[0], sin[0]), dim=-1)

    yield rotation, True
    yield on_inputs(head, width), False


class _Part:
    """A row-wise part of the model over random rows, computed at many counts and compared with the largest one."""

    def __init__(self, compute: Callable[[int, int], torch.Tensor], tried: Sequence[int]) -> None:
        self._compute = compute
        self._tried = tried
        self._reference = compute(0, _up(max(tried), ROWS_WHOLE) + ROWS_WHOLE)

    def holds(self, candidate: Arithmetic) -> bool:
        """Whether the padded counts that `candidate` leads to give the same rows, from the start and from within."""
        counts = {candidate.rows(count) for count in self._tried}
        return all(self._same(0, count) and self._same(7, count) for count in sorted(counts))

    def _same(self, first: int, count: int) -> bool:
        return torch.equal(self._compute(first, first + count), self._reference[first : first + count])


# --- attention -------------------------------------------------------------------------------------------------------


def _attention_shapes(model: nn.Module, heads: int, kv_heads: int, head_dim: int) -> tuple[int, tuple[int, ...]]:
    """Smallest query quantum and the good key tails for torch's CPU attention kernel and the model's heads."""
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    length = 2 * KEY_TILE

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(1, count, length, head_dim, generator=generator).to(dtype)

    probe = _AttentionProbe(drawn(heads), drawn(kv_heads), drawn(kv_heads))
    for quantum in ROW_QUANTA:
        if all(
            probe.holds(at, _up(rows, quantum), KEY_TILE) for at in (0, 200, 490) for rows in (1, 2, 3, 5, 13, 33, 65)
        ):
            break
    else:
        raise _refuse("a row of attention depends on the number of rows")
    if not all(probe.holds(at, rows, length) for at in (0, 200, 490) for rows in (quantum, 64)):
        raise _refuse("masked keys change a row of attention")
    if not all(probe.decode_holds(at, quantum) for at in (0, 200, 490)):
        raise _refuse("a decode row of attention differs from a prefill row")
    tails = tuple(
        tail
        for tail in range(KEY_UNIT, KEY_TILE, KEY_UNIT)
        if all(probe.tail_holds(tail, rows) for rows in (quantum, _up(32, quantum), 64, 256))
    )
    return quantum, tails


class _AttentionProbe:
    """Attention over random keys, computed in many shapes and compared with one: 64 rows at a time, whole key tiles."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._query, self._key, self._value = query, key, value
        length = query.shape[2]
        positions = torch.arange(length)
        hidden = positions[None, :] > positions[:, None]
        self._mask = torch.zeros(length, length, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        blocks = [self._attend(first, 64, _up(first + 64, KEY_TILE)) for first in range(0, length, 64)]
        self._reference = torch.cat(blocks, dim=2)

    def holds(self, first: int, rows: int, keys: int) -> bool:
        """Whether rows [first, first + rows) that fit below `keys` equal the reference."""
        rows = min(rows, keys - first) if rows > 64 else rows
        if first + rows > keys:
            first = keys - rows
        return torch.equal(self._attend(first, rows, keys), self._reference[:, :, first : first + rows])

    def tail_holds(self, tail: int, rows: int) -> bool:
        """Whether the last rows before `tail` keys, and before a whole tile and `tail` keys, equal the reference."""
        fits = [keys for keys in (tail, KEY_TILE + tail) if rows <= keys]
        masked = all(self.holds(keys - rows, rows, keys) for keys in fits)
        return masked and self._causal_holds(tail, rows)

    def decode_holds(self, position: int, quantum: int) -> bool:
        """Whether one position, its query heads folded into rows by KV head, equals the reference."""
        heads, kv_heads, head_dim = self._query.shape[1], self._key.shape[1], self._key.shape[3]
        shared = heads // kv_heads
        query = self._query[:, :, position].reshape(1, kv_heads, shared, head_dim)
        query = functional.pad(query, (0, 0, 0, _up(shared, quantum) - shared))
        mask = self._mask[position][None, None, None, :KEY_TILE]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = functional.scaled_dot_product_attention(
                query, self._key[:, :, :KEY_TILE], self._value[:, :, :KEY_TILE], attn_mask=mask
            )
        return torch.equal(attended[:, :, :shared].reshape(1, heads, head_dim), self._reference[:, :, position])

    def _causal_holds(self, keys: int, rows: int) -> bool:
        """The same without a mask, as a chunk at the start of a prompt is computed."""
        rows = min(rows, keys)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = functional.scaled_dot_product_attention(
                self._query[:, :, :rows],
                self._key[:, :, :keys],
                self._value[:, :, :keys],
                is_causal=True,
                enable_gqa=True,
            )
        return torch.equal(attended, self._reference[:, :, :rows])

    def _attend(self, first: int, rows: int, keys: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(
                self._query[:, :, first : first + rows],
                self._key[:, :, :keys],
                self._value[:, :, :keys],
                attn_mask=self._mask[first : first + rows, :keys],
                enable_gqa=True,
            )
