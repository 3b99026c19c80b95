"""Calibration: strict arithmetic is claimed where it was seen to hold, and nowhere else."""

import pytest
import torch
from torch import nn

from kvkeep.engine.arithmetic import KEY_TILE, Arithmetic, calibrate
from kvkeep.engine.linear import PackedLinear
from kvkeep.engine.loader import LoadedModel
from kvkeep.errors import BadInput

HEADS = (8, 4, 8)


class CountsRows(nn.Module):
    """A layer with a flaw: its result depends on how many rows there are, below `below` or with several threads."""

    def __init__(self, inner: nn.Module, below: int = 0, threaded: bool = False) -> None:
        super().__init__()
        self.inner, self.below, self.threaded = inner, below, threaded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        rows = x.shape[1]
        if rows < self.below or (self.threaded and torch.get_num_threads() > 1):
            result = result + 1e-4 * rows
        return result


def calibrated(loaded: LoadedModel, flawed: nn.Module | None = None, threads: int = 1) -> Arithmetic:
    layer = loaded.model.model.layers[0]
    whole = layer.mlp
    if flawed is not None:
        layer.mlp = flawed
    try:
        return calibrate(loaded.model, *HEADS, threads=threads, rows_max=256)
    finally:
        layer.mlp = whole


def test_rows_are_padded_as_far_as_needed(stories: LoadedModel):
    """A layer that is sound from 13 rows up needs 16; nothing smaller will do."""
    sound = calibrated(stories)
    mlp = stories.model.model.layers[0].mlp
    assert sound.row_quantum < 16
    assert calibrated(stories, CountsRows(mlp, below=13)).row_quantum == 16


def test_a_layer_that_never_holds_is_refused(stories: LoadedModel):
    """Where no padding helps, strict arithmetic is refused in one line that says what would be right."""
    mlp = stories.model.model.layers[0].mlp
    with pytest.raises(BadInput, match="use fast") as caught:
        calibrated(stories, CountsRows(mlp, below=10_000))
    assert "\n" not in str(caught.value)


def test_fewer_threads_where_more_do_not_hold(stories: LoadedModel):
    """A layer that is sound with one thread only gets one thread, and the process keeps its setting."""
    mlp = stories.model.model.layers[0].mlp
    before = torch.get_num_threads()
    assert calibrated(stories, CountsRows(mlp, threaded=True), threads=3).threads == 1
    assert before == torch.get_num_threads()


def test_calibrated_once(stories: LoadedModel):
    """A model is calibrated once for a number of threads and rows; fast arithmetic needs none."""
    first = stories.arithmetic("strict", 1, 100)
    assert first is stories.arithmetic("strict", 1, 100)
    assert Arithmetic("fast", 1) == stories.arithmetic("fast", 1, 100)


def test_padding():
    """Counts are padded up, never down, to counts that are allowed; fast arithmetic pads nothing."""
    strict = Arithmetic("strict", 1, row_quantum=4, query_quantum=8, key_tails=(16, 32, 384, 400))
    fast = Arithmetic("fast", 1)
    for count in range(1, 3 * KEY_TILE):
        assert strict.rows(count) >= count
        assert strict.rows(count) % 4 == 0
        assert strict.query_rows(count) % 8 == 0
        keys = strict.keys(count)
        assert count <= keys < count + KEY_TILE
        assert keys % KEY_TILE in (0, 16, 32, 384, 400)
        assert (count, count, count) == (fast.rows(count), fast.query_rows(count), fast.keys(count))
    assert [16, 384, 512, 528] == [strict.keys(count) for count in (16, 33, 401, 513)]


def test_packed_linear_is_linear():
    """A packed linear layer computes what torch's computes, with and without a bias."""
    generator = torch.Generator().manual_seed(1)
    for bias in (False, True):
        plain = nn.Linear(96, 40, bias=bias)
        x = torch.randn(1, 7, 96, generator=generator)
        with torch.inference_mode():
            assert torch.allclose(plain(x), PackedLinear(plain)(x), atol=1e-5)
