"""What passes between the scheduler's and the workers' side of the vLLM connector.

Must not decide anything: plain values that are pickled.
"""

from array import array
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class Load:
    """Blocks that a request waits for: `slots[i]` of the tier into `blocks[i]`.   job: of the scheduler's numbering."""

    job: int
    request_id: str
    slots: "array[int]"
    blocks: "array[int]"


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to copy in one step.

    loads: one for each request.   store_job: the number of this step's store, of `store_blocks[i]` into
    `store_slots[i]`; -1 where there is none.   forward: whether the step computes anything.
    """

    loads: list[Load] = field(default_factory=list)
    store_job: int = -1
    store_blocks: "array[int]" = field(default_factory=lambda: array("i"))
    store_slots: "array[int]" = field(default_factory=lambda: array("i"))
    forward: bool = False


@dataclass
class Done(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What has become of jobs, of one rank or added up.

    ranks: by job, how many ranks are through with it.   failed: jobs that some rank could not copy.
    dead: some rank copies nothing any more.   numbers: counters of the workers, by name, since the last step.
    """

    ranks: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    dead: bool = False
    numbers: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Done":
        """This and what another rank says of the same step."""
        assert isinstance(other, Done)
        ranks, numbers = dict(self.ranks), dict(self.numbers)
        for job, count in other.ranks.items():
            ranks[job] = ranks.get(job, 0) + count
        for name, value in other.numbers.items():
            numbers[name] = numbers.get(name, 0) + value
        return Done(ranks, self.failed | other.failed, self.dead or other.dead, numbers)


@dataclass
class Ready(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's part of the tier.   slots: blocks it holds.   settings: what must be the same on every rank."""

    slots: int
    block_nbytes: int
    settings: dict[str, str]
