"""What load passes find, raw.

Must not know servers or limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench._load import Arrivals
from bench._vllm_load_sending import Outcome

ALONE, KVKEEP = "alone", "kvkeep"


@dataclass(frozen=True, slots=True)
class LoadPass:
    """One case at one server.

    local_tokens, external_tokens: of the prompts, from vLLM's own blocks and through the connector, by /metrics.
    cpu_s: of all of the server's processes.   wall_s: from the first due request to the end of the last.
    computed_tokens, steps, preemptions: what the server computed, in how many steps, and how often it gave up a
        request's blocks, by /metrics.
    """

    case: str
    configuration: str
    repeat: int
    arrivals: Arrivals
    outcomes: Sequence[Outcome]
    local_tokens: float
    external_tokens: float
    cpu_s: float
    wall_s: float
    spin_us: float
    computed_tokens: float = 0.0
    steps: float = 0.0
    preemptions: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt asked without load, twice: cold, and again when it is in vLLM's blocks (alone) or in the tier only.

    Both servers compute it in the same steps, so their tokens have to be the same.
    first, again: tokens, by configuration.   matched: of the second time, in tokens, by configuration.
    external_tokens: of those, through the connector.
    """

    first: dict[str, list[int]]
    again: dict[str, list[int]]
    matched: dict[str, int]
    external_tokens: float

    @property
    def apart(self) -> int:
        """How many of the two answers are not the same in both configurations."""
        return sum(found[ALONE] != found[KVKEEP] for found in (self.first, self.again))


@dataclass(slots=True)
class Found:
    """What a run has found.

    capacities_per_s: prompt tokens a second of requests that match nothing, one at a time, before each case.
    """

    blocks: int
    tier_gib: float
    capacities_per_s: list[float] = field(default_factory=list)
    passes: list[LoadPass] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
