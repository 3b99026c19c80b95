"""Sampling: a token is a function of logits, parameters and position."""

import math

import pytest
import torch

from kvkeep.engine.request import SamplingParams
from kvkeep.engine.sampling import sample
from kvkeep.errors import BadInput

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


def draws(params: SamplingParams, count: int) -> list[int]:
    return [sample(LOGITS[None], [(params, position)])[0] for position in range(count)]


def test_greedy_takes_the_likeliest():
    """Temperature 0 takes the likeliest token, whatever the seed and position."""
    assert {1} == set(draws(SamplingParams(seed=3), 20))


def test_shares():
    """Drawn tokens have the shares that the logits say, within four standard deviations."""
    count = 4000
    drawn = draws(SamplingParams(temperature=1.0, seed=11), count)
    for token, share in enumerate(LOGITS.exp().tolist()):
        deviation = math.sqrt(share * (1 - share) / count)
        assert share == pytest.approx(drawn.count(token) / count, abs=4 * deviation)


def test_temperature_sharpens():
    """A low temperature draws the likeliest token nearly always, a high one all alike."""
    assert draws(SamplingParams(temperature=0.05), 200).count(1) > 195
    hot = draws(SamplingParams(temperature=100.0), 1000)
    assert all(hot.count(token) > 140 for token in range(5))


def test_top_k_and_top_p_cut():
    """top_k keeps so many tokens, top_p the fewest that reach the share."""
    assert {1, 3} == set(draws(SamplingParams(temperature=1.0, top_k=2), 200))
    assert {1} == set(draws(SamplingParams(temperature=1.0, top_p=0.39), 200))
    assert {1, 3} == set(draws(SamplingParams(temperature=1.0, top_p=0.69), 200))
    assert {1, 3, 4} == set(draws(SamplingParams(temperature=1.0, top_p=0.71), 200))
    assert {1} == set(draws(SamplingParams(temperature=1.0, top_k=1), 50))


def test_a_draw_depends_on_seed_and_position_only():
    """The same seed and position draw the same in any row of any batch; another seed or position draws anew."""
    params = SamplingParams(temperature=1.0, seed=5)
    alone = [sample(LOGITS[None], [(params, position)])[0] for position in range(64)]
    together = sample(LOGITS.expand(64, -1), [(params, position) for position in range(64)])
    backwards = sample(LOGITS.expand(64, -1), [(params, position) for position in reversed(range(64))])
    assert alone == together == backwards[::-1]
    assert alone != draws(SamplingParams(temperature=1.0, seed=6), 64)
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_wrong_parameters(wrong: dict[str, float]):
    """A parameter out of range is refused with its name."""
    with pytest.raises(BadInput, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
