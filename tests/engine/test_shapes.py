"""Models of random weights: their sizes, that they are the same each time, and what is said of names that are none.

Must not judge what they write: that means nothing.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvkeep.engine.asking import ask
from kvkeep.engine.engine import Engine, EngineConfig
from kvkeep.engine.loader import load_model
from kvkeep.engine.shapes import SHAPES, shape_of
from kvkeep.errors import BadInput


def test_layers_are_as_large_as_the_real_ones():
    """A page of 128 positions of four layers of Llama 3 8B in 16 bits: 4 x 2 x 128 x 8 x 128 x 2 bytes."""
    shape = shape_of("random-8b:4")
    assert (4, 4096, 14336, 32, 8, 128) == (
        *(shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim),
    )
    assert SHAPES["8b"] == shape_of("random-8b") and 32 == SHAPES["8b"].layers


def test_same_weights_each_time():
    """And the same fingerprint; other sizes have another one."""
    one, two, other = (load_model(name, dtype="bfloat16") for name in ("random-tiny", "random-tiny", "random-tiny:2"))
    states = [model.model.state_dict() for model in (one, two)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(weight.dtype == torch.bfloat16 for weight in one.model.parameters())
    assert one.fingerprint(16, "strict") == two.fingerprint(16, "strict") != other.fingerprint(16, "strict")
    assert (4, 2) == (one.layout(16).layers, other.layout(16).layers)


def test_kept_pages_give_the_same_tokens():
    """It runs in the engine as any other model does."""
    loaded = load_model("random-tiny")
    answers = []
    for keep in (True, False):
        engine = Engine(loaded, EngineConfig(page_size=16, pool_pages=32, reuse=keep, store=keep))
        first = ask(engine, range(100), 4)
        second = ask(engine, [*range(100), *first.output_ids, 7], 4)
        answers.append((first.output_ids, second.output_ids))
        assert (96 if keep else 0) == second.matched_tokens
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["random-9b", "random-", "random-tiny:", "random-tiny:two", "random-tiny:0"])
def test_names_that_are_none_are_bad_input(name: str):
    """One line; nothing behind the colon means all layers."""
    if name.endswith(":"):
        assert SHAPES["tiny"] == shape_of(name)
        return
    with pytest.raises(BadInput, match=name):
        load_model(name)
