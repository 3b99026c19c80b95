"""The simulated cases of `bench routing`: which traffic, how many replicas of which size, and what was found.

Must not print, nor know the proxy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._replicas import Outcome, Policy, Replicas, find_rate, visits
from bench._routes import (
    OTHERS,
    SINGLES,
    Traffic,
    at_random,
    behind_hot_prefix,
    least_loaded,
    prefix,
    recorded,
    singles,
)
from kvkeep.report import JsonValue
from kvkeep.routing import RoutingSettings

#: Of the time that replicas prefill, under random choice.
LOAD = 0.7
#: Points that the routed hit share may be below that of one cache; share of pages held in copies.
GAP_POINTS_MAX, COPIES_MAX = 2.0, 0.10

KVKEEP, ONE = "kvkeep", "one cache"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and their traffic.

    make: reads or makes the traffic.   tokens_each: of a replica's cache.   hot: judged by its TTFT as well.
    per_s: sessions a second to begin looking for the rate with.   depths: fixed depths to hold the learned one against.
    """

    make: Callable[[], Traffic]
    replicas: int
    tokens_each: int
    per_s: float
    hot: bool = False
    depths: Sequence[int] = ()


def fleets(folder: Path | None, smoke: bool) -> list[Fleet]:
    """All cases.   folder: where the recorded traces are; None: only those that need none."""
    rates = {"tails": 2.11, "same": 3.09}
    made = [
        Fleet(lambda kind=kind: singles(kind, 600 if smoke else SINGLES), n, 262_144, rate * n, hot=True)  # type: ignore[misc]
        for kind, rate in rates.items()
        for n in ((4,) if smoke else (2, 8, 16))
    ]
    if folder is None:
        return made
    tau = _trace(folder, "tau_retail_200", think_s=10.0)
    if smoke:
        return [*made, Fleet(tau(1, 40), 2, 65_536, 0.4)]
    swe, mooncake = _trace(folder, "mini_swe_500"), _trace(folder, "mooncake_conversation.jsonl.gz", 512, think_s=10.0)
    claude = _trace(folder, "claude_code_355.jsonl.gz")
    return [
        *made,
        Fleet(_hot(tau(4)), 4, 131_072, 1.05, hot=True),
        Fleet(_hot(swe()), 8, 524_288, 0.145, hot=True),
        Fleet(tau(2), 2, 65_536, 0.613),
        Fleet(tau(8), 8, 65_536, 1.7, depths=(1, 2, 11, 16)),
        Fleet(tau(16), 16, 65_536, 3.3),
        Fleet(tau(8), 8, 32_768, 1.6),
        Fleet(swe(), 2, 524_288, 0.06),
        Fleet(swe(), 4, 524_288, 0.094, depths=(1, 2, 16)),
        Fleet(swe(), 8, 524_288, 0.148),
        Fleet(swe(), 16, 524_288, 0.319),
        Fleet(swe(), 4, 262_144, 0.0682),
        Fleet(mooncake(), 4, 1 << 20, 2.55),
        Fleet(mooncake(), 16, 1 << 20, 10.2, depths=(1, 2)),
        Fleet(claude(1, 120), 4, 4 << 20, 0.031),
        Fleet(claude(), 16, 4 << 20, 0.0463),
        Fleet(claude(1, 120), 4, 2 << 20, 0.0193),
    ]


def _trace(
    folder: Path, file: str, page_size: int = 128, think_s: float | None = None
) -> Callable[..., Callable[[], Traffic]]:
    def taken(times: int = 1, sessions: int | None = None) -> Callable[[], Traffic]:
        return lambda: recorded(folder, file, page_size, think_s=think_s, sessions=sessions, times=times)

    return taken


def _hot(make: Callable[[], Traffic]) -> Callable[[], Traffic]:
    return lambda: behind_hot_prefix(make())


@dataclass(frozen=True, slots=True)
class Found:
    """One case: what each policy came to, at one rate."""

    fleet: Fleet
    traffic: str
    longest_tokens: int
    requests: int
    per_s: float
    outcomes: dict[str, Outcome]

    @property
    def gap_points(self) -> float:
        """Hit share of one cache less that of the routed replicas, in points."""
        return 100 * (self.outcomes[ONE].hit_share - self.outcomes[KVKEEP].hit_share)

    def ttft_ratio(self, quantile: float) -> float:
        """To random choice."""
        mine, random = (self.outcomes[name].ttft_quantile_s(quantile) for name in (KVKEEP, "random"))
        return mine / random

    @property
    def reached(self) -> bool:
        """Hits and copies; where a prefix is hot, the times to first token too."""
        hits = self.gap_points <= GAP_POINTS_MAX and self.outcomes[KVKEEP].copies <= COPIES_MAX
        return hits and (not self.fleet.hot or (self.ttft_ratio(0.99) <= 1.0 and self.ttft_ratio(0.5) < 1.0))

    def rows(self) -> Iterator[dict[str, JsonValue]]:
        for name, out in self.outcomes.items():
            row: dict[str, JsonValue] = {
                "metric": "routing",
                "traffic": self.traffic,
                "replicas": self.fleet.replicas,
                "tokens_each": self.fleet.tokens_each,
                "longest_session_tokens": self.longest_tokens,
                "requests": self.requests,
                "sessions_per_s": round(self.per_s, 4),
                "policy": name,
                "hit_share": round(out.hit_share, 4),
                "copies_share": round(out.copies, 4),
                "busy": round(out.busy, 3),
                "ttft_p50_s": round(out.ttft_quantile_s(0.5), 4),
                "ttft_p99_s": round(out.ttft_quantile_s(0.99), 3),
                "fullest_over_mean": round(max(out.by_replica) * len(out.by_replica) / sum(out.by_replica), 2),
                "moves": out.moves,
            }
            if name == KVKEEP:
                row |= {"gap_points": round(self.gap_points, 2), "reached": self.reached}
            yield row


def find(fleet: Fleet) -> Found:
    """Looks for the rate at which random choice keeps the replicas busy for 70 % of the time, then runs all at it."""
    traffic = fleet.make()
    sessions, pages = traffic.sessions, traffic.pages

    def run(per_s: float, policy: Policy, *, one_cache: bool = False) -> Outcome:
        replicas = Replicas(pages, fleet.replicas, fleet.tokens_each, one_cache=one_cache)
        return replicas.run(visits(sessions, per_s, think_s=traffic.think_s), policy)

    per_s, at_that = find_rate(lambda per_s: run(per_s, at_random()), fleet.per_s, LOAD)
    outcomes = {"random": at_that}
    outcomes |= {name: run(per_s, make(fleet.replicas)) for name, make in OTHERS.items() if name != "random"}
    outcomes[KVKEEP] = run(per_s, prefix(pages, fleet.replicas))
    for depth in fleet.depths:
        outcomes[f"depth {depth}"] = run(per_s, prefix(pages, fleet.replicas, RoutingSettings(depth=depth)))
    outcomes[ONE] = run(per_s, least_loaded(), one_cache=True)
    requests = sum(map(len, sessions))
    return Found(fleet, traffic.name, traffic.longest_tokens, requests, per_s, outcomes)
