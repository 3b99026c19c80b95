"""Counts: what happened in an engine while it ran a scenario, beside the bits that it computed.

Must not know what a scenario is for, nor how bits are compared.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from kvkeep.engine.engine import Engine, Request
from kvkeep.engine.verify.faults import FailingBackend


@dataclass(frozen=True, slots=True)
class Counts:
    """How often something happened; as what a scenario must come to, how often at least.

    pages_evicted: cached pages that left the pool.   preemptions: of requests.
    host_hit_pages: matched pages that came from host memory.   mixed_hits: requests with such pages behind pages that
        were in the pool.
    room_waits: admissions whose pages were still being copied down for those who had them before.
    suspensions: preempted requests whose pages went to host memory.   hole_tokens: positions of theirs that were
        computed again before others that were kept.
    failed_copies: between the tiers.   lost_tokens: of matched pages that such a copy did not bring, computed by the
        request that they were for.   revocations: admissions that ended since they waited for one.
    images_encoded: runs of the vision tower.   features_found: times that a forward found features of an image in the
        encoder cache.   features_from_host: of those, the ones that were in host memory.
    """

    pages_evicted: int = 0
    preemptions: int = 0
    host_hit_pages: int = 0
    mixed_hits: int = 0
    room_waits: int = 0
    suspensions: int = 0
    hole_tokens: int = 0
    failed_copies: int = 0
    lost_tokens: int = 0
    revocations: int = 0
    images_encoded: int = 0
    features_found: int = 0
    features_from_host: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(value + getattr(other, name) for name, value in self.items()))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(value - getattr(other, name) for name, value in self.items()))

    def items(self) -> Iterator[tuple[str, int]]:
        """Name and number of each."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    def __str__(self) -> str:
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in self.items() if value)


def counted(engine: Engine, requests: Iterable[Request], faults: FailingBackend | None) -> Counts:
    """What happened in an engine that ran these requests and nothing else."""
    requests = list(requests)
    stats, transfers = engine.cache.stats(), engine.cache.transfers
    return Counts(
        pages_evicted=stats.pages_evicted,
        preemptions=sum(request.preemptions for request in requests),
        host_hit_pages=transfers.stats().by["h2d", "promote"].pages if transfers is not None else 0,
        mixed_hits=sum(0 < request.host_len < request.matched_len for request in requests),
        room_waits=stats.room_wait.count,
        suspensions=sum(request.suspensions for request in requests),
        hole_tokens=sum(request.hole_len for request in requests),
        failed_copies=faults.failed if faults is not None else 0,
        lost_tokens=stats.lost_tokens,
        revocations=stats.revocations,
        images_encoded=sum(request.encoded for request in requests),
        features_found=sum(request.features_found for request in requests),
        features_from_host=sum(request.features_from_host for request in requests),
    )
