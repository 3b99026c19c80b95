"""Load or compute again."""

import pytest

from kvkeep.costs import Costs
from kvkeep.errors import BadInput


def test_pages_are_loaded_while_one_of_the_speeds_is_unknown():
    """Without both measurements a page in host memory is loaded."""
    costs = Costs(128)
    assert costs.worth_loading(1000, 10**6)
    costs.loaded(1, 100.0)
    assert costs.worth_loading(1000, 10**6)


def test_the_faster_way_is_taken():
    """Loading 10 pages at 2 ms a page beats computing them at 20 us a token, and not behind a queue of 3 more."""
    costs = Costs(128)
    costs.loaded(4, 0.008)
    costs.prefilled(1000, 0.020)
    assert costs.worth_loading(10, 0)  # 20 ms against 25.6 ms
    assert not costs.worth_loading(10, 3)  # 26 ms


def test_the_newest_measurement_moves_the_mean_by_a_tenth():
    """A mean follows a change of speed without jumping at one slow copy."""
    costs = Costs(1)
    costs.loaded(1, 1.0)
    costs.loaded(1, 11.0)
    assert pytest.approx(2.0) == costs.load_s_per_page


def test_what_a_byte_of_an_output_saves():
    """KV of 10 tokens a page, 1 ms a token: 10 ms a page of 1,000 bytes.  An output of 500 bytes took 20 ms."""
    costs = Costs(10)
    assert costs.worth(0.020, 500, 1000) == 1.0  # nothing is known of KV
    costs.prefilled(100, 0.100)
    assert pytest.approx(4.0) == costs.worth(0.020, 500, 1000)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (5, -1.0), (5, float("inf"))])
def test_a_prefill_that_cannot_be_is_refused(tokens: int, seconds: float):
    """Zero tokens, a negative or an endless time are bad input."""
    with pytest.raises(BadInput):
        Costs(1).prefilled(tokens, seconds)
