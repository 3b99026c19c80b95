"""Energy between two moments: by the device's own counter, or by its power added up.

Must not know how either was read.  Where neither can tell, the answer is None, and why.
"""

from dataclasses import dataclass
from typing import Literal

from kvkeep.config import check_int
from kvkeep.errors import BadInput

How = Literal["energy counter", "integrated power"]

#: A span shorter than so many updates of what it is read from is not told: it could be wrong by more than a tenth.
UPDATES_MIN = 10


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """What was known at one moment.

    time_s: of the clock of the run.
    counter_j: joules by the device's counter; counter_falls: how often it had gone back, as after a reset;
        counter_update_s: time between its changes.   counter_missing: why there is none.
    integrated_j: joules since the sampler's start, from samples of the power; power_breaks: how often they were
        interrupted; power_update_s: time between changes of the power.   power_missing: why there is none.
    """

    time_s: float
    counter_j: float | None = None
    counter_falls: int = 0
    counter_update_s: float | None = None
    counter_missing: str | None = None
    integrated_j: float | None = None
    power_breaks: int = 0
    power_update_s: float | None = None
    power_missing: str | None = None


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of a span.   joules: None where it cannot be told; reason: then, why.
    how: what it was read from.   resolution_s: time between changes of that; None where it was not found out."""

    joules: float | None
    seconds: float
    how: How | None
    resolution_s: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class JoulesPerTokens:
    """Joules of 1,000 prompt tokens, all of the device's energy in the span; None, and why, where it is not known."""

    value: float | None
    how: How | None
    reason: str | None


def energy_between(before: EnergyReading, after: EnergyReading) -> Energy:
    """The energy of a span; raises `BadInput` when it ends before it begins."""
    seconds = after.time_s - before.time_s
    if seconds < 0:
        raise BadInput(f"the second energy reading is {-seconds:g} s before the first: pass the earlier one first")
    counter = _told(
        "energy counter",
        before.counter_j,
        after.counter_j,
        seconds,
        after.counter_update_s,
        after.counter_missing or before.counter_missing,
        "it went back meanwhile" if after.counter_falls != before.counter_falls else None,
    )
    if counter.joules is not None:
        return counter
    power = _told(
        "integrated power",
        before.integrated_j,
        after.integrated_j,
        seconds,
        after.power_update_s,
        after.power_missing or before.power_missing,
        "it was not read throughout" if after.power_breaks != before.power_breaks else None,
    )
    if power.joules is not None:
        return power
    if after.counter_missing is not None and after.counter_missing == after.power_missing:
        return Energy(None, seconds, None, None, after.counter_missing)
    return Energy(None, seconds, None, None, f"{counter.reason}; {power.reason}")


def joules_per_1k_prompt_tokens(before: EnergyReading, after: EnergyReading, prompt_tokens: int) -> JoulesPerTokens:
    """Joules between two readings over the prompt tokens that were answered between them, in thousands.

    prompt_tokens: of all prompts, whether they were computed or found: so it compares with the cache and without.
    """
    check_int("prompt_tokens", prompt_tokens, at_least=0)
    energy = energy_between(before, after)
    if energy.joules is None:
        return JoulesPerTokens(None, None, energy.reason)
    if not prompt_tokens:
        return JoulesPerTokens(None, energy.how, "no prompt tokens between the readings")
    return JoulesPerTokens(energy.joules / prompt_tokens * 1000, energy.how, None)


def _told(
    how: How,
    before: float | None,
    after: float | None,
    seconds: float,
    update_s: float | None,
    missing: str | None,
    broken: str | None,
) -> Energy:
    why = missing or broken
    if why is None and (before is None or after is None):
        why = "not read"
    elif why is None and update_s is not None and seconds < UPDATES_MIN * update_s:
        why = f"{seconds:.3g} s are less than {UPDATES_MIN} of its updates, every {update_s:.3g} s"
    elif why is None and before == after:
        why = f"it did not change in {seconds:.3g} s"
    if why is not None or before is None or after is None:
        return Energy(None, seconds, None, None, f"{how}: {why}")
    return Energy(after - before, seconds, how, update_s, None)
