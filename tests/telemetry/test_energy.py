"""Energy between two readings, and what it is for 1,000 prompt tokens.

Must not know how readings come about.
"""

from dataclasses import replace

import pytest

from kvkeep.errors import BadInput
from kvkeep.telemetry.energy import EnergyReading, energy_between, joules_per_1k_prompt_tokens

BEFORE = EnergyReading(
    100.0, counter_j=7_000.0, counter_update_s=0.1, integrated_j=500.0, power_update_s=0.1, power_breaks=2
)
AFTER = replace(BEFORE, time_s=110.0, counter_j=12_000.0, integrated_j=5_600.0)


def test_counter_of_the_device_goes_first():
    """What the device has counted, and to which time that is exact."""
    energy = energy_between(BEFORE, AFTER)
    assert (5_000.0, 10.0, "energy counter", 0.1, None) == (
        energy.joules,
        energy.seconds,
        energy.how,
        energy.resolution_s,
        energy.reason,
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"counter_j": 900.0, "counter_falls": 1}, "energy counter: it went back meanwhile"),
        ({"counter_j": 99_000.0, "counter_falls": 1}, "energy counter: it went back meanwhile"),
        ({"counter_missing": "Not Supported"}, "energy counter: Not Supported"),
        ({"counter_j": None}, "energy counter: not read"),
        ({"counter_j": 7_000.0}, "energy counter: it did not change in 10 s"),
        ({"counter_update_s": 1.5}, "energy counter: 10 s are less than 10 of its updates, every 1.5 s"),
    ],
    ids=["reset", "reset and beyond", "missing", "not read", "stands still", "too short"],
)
def test_power_stands_in_where_the_counter_cannot_tell(change: dict[str, object], says: str):
    """Labelled so; and where the power was interrupted too, nothing is told but why."""
    after = replace(AFTER, **change)  # type: ignore[arg-type]
    energy = energy_between(BEFORE, after)
    assert "integrated power" == energy.how and 5_100.0 == energy.joules
    broken = energy_between(BEFORE, replace(after, power_breaks=3))
    assert (None, None) == (broken.joules, broken.how)
    assert f"{says}; integrated power: it was not read throughout" == broken.reason


def test_reset_before_the_span_does_not_matter():
    """Only one between the two readings does."""
    before, after = (replace(one, counter_falls=3) for one in (BEFORE, AFTER))
    assert 5_000.0 == energy_between(before, after).joules


def test_one_reason_for_both_is_said_once():
    """A machine without a device."""
    none = EnergyReading(100.0, counter_missing="no device", power_missing="no device")
    assert "no device" == energy_between(none, replace(none, time_s=101.0)).reason


def test_joules_of_a_thousand_prompt_tokens():
    """All energy of the span over all prompt tokens, found or computed."""
    told = joules_per_1k_prompt_tokens(BEFORE, AFTER, 20_000)
    assert (250.0, "energy counter", None) == (told.value, told.how, told.reason)


def test_joules_without_tokens_or_without_energy_are_none():
    """With the reason, never a number."""
    told = joules_per_1k_prompt_tokens(BEFORE, AFTER, 0)
    assert (None, "no prompt tokens between the readings") == (told.value, told.reason)
    none = EnergyReading(100.0, counter_missing="no device", power_missing="no device")
    told = joules_per_1k_prompt_tokens(none, replace(none, time_s=105.0), 1000)
    assert (None, None, "no device") == (told.value, told.how, told.reason)


def test_bad_input():
    """Readings in the wrong order, tokens that are no number."""
    with pytest.raises(BadInput, match="10 s before the first"):
        energy_between(AFTER, BEFORE)
    with pytest.raises(BadInput, match="prompt_tokens is -1"):
        joules_per_1k_prompt_tokens(BEFORE, AFTER, -1)
