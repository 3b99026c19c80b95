"""`kvkeep bench agent`, `overhead` and `sweep`: smoke runs over the smallest real model, and figures of made-up runs.

Must not judge a time: that is the benches' own business.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench._agent_figures import BOTH, OFF, Loaded, goodput_ratio, lines, load_metrics, run_row, ttft_ratio
from bench._load import Arrivals, Served, Slo
from bench._sessions import hold, recorded_swe
from bench.overhead import AGAIN, GPU, Asked, metrics_of
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report
from kvkeep.telemetry.energy import JoulesPerTokens

SLO = Slo(1.0, 1.0)


@dataclass
class MadeUpRun:
    """What `bench._serving.Run` says, of requests that took `ttft_s` each."""

    name: str
    ttft_s: list[float]
    per_s: float = 2.0
    matched: tuple[int, int] = (40, 20)
    stalls: int = 0
    stall_s: float = 0.0
    looks: list[Any] = field(default_factory=list)
    span_s: float = 10.0
    output_tokens: int = 20
    starved: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.setup = SimpleNamespace(name=self.name, pool_pages=4, host_pages=0)
        self.arrivals = Arrivals(tuple(number / self.per_s for number in range(len(self.ttft_s))), "made up")
        self.served = [
            Served(n, due, 2, due, [due + ttft, due + ttft + 0.1])
            for n, (due, ttft) in enumerate(zip(self.arrivals.due_s, self.ttft_s, strict=True))
        ]
        self.requests = [SimpleNamespace(preemptions=0) for _ in self.ttft_s]
        self.matched_gpu, self.matched_cpu = self.matched
        self.prompt_tokens = 100


def loaded(load: float, off: list[float], both: list[float], per_s: float = 2.0) -> Loaded:
    runs: Any = {OFF: MadeUpRun(OFF, off, per_s), BOTH: MadeUpRun(BOTH, both, per_s)}
    return Loaded("tau", load, 0.25, runs)


# ---------------------------------------------------------------------- figures


def test_ttft_ratio_is_that_of_the_medians_at_the_steady_rate():
    """Cache off over both tiers, from when requests were due; its interval is drawn request by request."""
    found = ttft_ratio(loaded(0.7, [4.0, 8.0, 6.0, 8.0], [1.0, 2.0, 1.5, 2.0]))
    assert (4.0, "higher") == (found.value, found.better)
    assert found.interval == pytest.approx((4.0, 4.0))


def test_goodput_is_compared_each_at_its_best_rate():
    """Without a cache the lower rate is the best, with both tiers the higher one: 4 a second over 1.5."""
    steady = loaded(0.7, [0.5, 0.5, 0.5, 9.0], [0.1] * 4, per_s=2.0)
    crowded = loaded(2.0, [0.5, 9.0, 9.0, 9.0], [0.1] * 4, per_s=4.0)
    found = goodput_ratio([steady, crowded], SLO)
    assert 4 / 1.5 == pytest.approx(found.value or 0, rel=1e-3)
    assert found.interval is not None and found.interval[0] <= 2.667 <= found.interval[1]


def test_goodput_of_nothing_counts_as_one_request():
    """Where nobody was served in time without a cache, the ratio is the least that it can be, and finite."""
    found = goodput_ratio([loaded(0.7, [9.0] * 4, [0.1] * 4, per_s=2.0)], SLO)
    assert 4.0 == pytest.approx(found.value or 0, rel=1e-6)


def test_metrics_of_loads_are_those_that_are_promised():
    """Shares of the steady run, stalls of all runs, goodput and throughput of each configuration."""
    steady, crowded = loaded(0.7, [0.5] * 4, [0.1] * 4), loaded(2.0, [9.0] * 4, [0.2] * 4, per_s=4.0)
    crowded.runs[BOTH].stalls, crowded.runs[BOTH].starved = 3, {1, 2}  # type: ignore[misc]
    told = {OFF: JoulesPerTokens(12.5, "energy counter", None), BOTH: JoulesPerTokens(None, None, "no device")}
    steady = replace(steady, joules=told)
    found = load_metrics(steady, [steady, crowded], SLO)
    assert {"ttft_ratio", "goodput_ratio", "stalls", "matched_share_gpu", "matched_share_cpu"} <= found.keys()
    values = {name: found[name].value for name in ("stalls", "matched_share_gpu", "matched_share_cpu")}
    assert {"stalls": 3, "matched_share_gpu": 0.4, "matched_share_cpu": 0.2} == values
    assert (2, 12.5, None) == tuple(
        found[name].value for name in ("live_stalls", "joules_per_1k_off", "joules_per_1k_both")
    )
    assert "no device" == run_row(steady, steady.runs[BOTH], SLO)["joules_how"]
    assert found["goodput_off_per_s"].value == pytest.approx(2.0, rel=1e-3)
    assert found["goodput_both_per_s"].value == pytest.approx(4.0, rel=1e-3)
    row = run_row(crowded, crowded.runs[BOTH], SLO)
    assert (4, 3, 0.2) == (row["slo_met"], row["stalls"], row["ttft_s"])
    assert "both tiers" in list(lines([row]))[1]


def test_overhead_is_held_against_both_engines_without_a_cache():
    """The geometric mean of the two is the base, so that what one of them was slowed by is half of it; the A/A says
    what equal engines differ by; outputs must be the same ones."""
    plain = [Asked(1.0, 2.0, (1, 2)) for _ in range(5)]
    again = [Asked(1.21, 2.0, (1, 2)) for _ in range(5)]
    slower = [Asked(1.21, 2.2, (1, 2)) for _ in range(5)]
    found = metrics_of({OFF: plain, AGAIN: again, GPU: slower, BOTH: slower})
    assert 0.1 == pytest.approx(found["overhead_share"].value or 0)
    assert 0.21 == pytest.approx(found["aa_share"].value or 0)
    assert 0.1 == pytest.approx(found["overhead_cpu_share"].value or 0)
    assert (0.0, 1) == (found["aa_cpu_share"].value, found["outputs_identical"].value)
    other = [Asked(1.21, 2.2, (1, 3)) for _ in range(5)]
    assert 0 == metrics_of({OFF: plain, AGAIN: again, GPU: other, BOTH: slower})["outputs_identical"].value


# ---------------------------------------------------------------------- sessions


def test_recorded_sessions_are_the_first_turns_of_those_that_began_first(shared_dir: Path):
    """By recorded time; prompts of one session grow; those that are too long are left out; thinned ones too."""
    found = recorded_swe(shared_dir / "traces", 3, 4, 6000, 8, 49_152)
    assert list(found.times_s) == sorted(found.times_s) and len(found.times_s) == len(found.workload.asks) > 6
    last: dict[int, tuple[int, ...]] = {}
    for one in found.workload.asks:
        before = last.get(one.session, ())
        assert one.prompt[: len(before)] == before and len(one.prompt) <= 6000
        last[one.session] = one.prompt
    assert 3 == len(last)
    thin = recorded_swe(shared_dir / "traces", 3, 4, 400, 8, 512, thin=16)
    assert thin.workload.asks[0].prompt == tuple(token % 512 for token in found.workload.asks[0].prompt[::16])
    with pytest.raises(BadInput, match="none of the first turns"):
        recorded_swe(shared_dir / "traces", 3, 4, 10, 8, 49_152)


# ---------------------------------------------------------------------- smoke runs


@pytest.fixture(scope="module")
def agent() -> Report:
    return run_bench("agent", ["--smoke"])


def test_agent_has_the_promised_metrics(agent: Report):
    """Ratios above zero, shares of both tiers, the SLO; each time has its tails and its interval."""
    assert {"ttft_ratio", "goodput_ratio", "stalls", "matched_share_gpu", "matched_share_cpu"} <= agent.metrics.keys()
    values = {name: metric.value for name, metric in agent.metrics.items()}
    assert (values["ttft_ratio"] or 0) > 0 and (values["goodput_ratio"] or 0) > 0
    assert 0.3 < (values["matched_share_gpu"] or 0) + (values["matched_share_cpu"] or 0) < 1
    assert (values["matched_share_cpu"] or 0) > 0.05, "what has left the pool comes back from host memory"
    assert (values["slo_ttft_s"] or 0) > 0 and (values["slo_itl_s"] or 0) > 0
    assert 0.2 < (values["pool_share"] or 0) < 0.35
    for name in ("ttft_off_s", "ttft_gpu_s", "ttft_both_s", "itl_both_ms", "miss_ttft_ms", "hit_cpu_ttft_ms"):
        metric = agent.metrics[name]
        assert metric.p90 is not None and metric.p99 is not None and metric.interval is not None, name


def test_agent_answers_the_same_in_every_configuration(agent: Report):
    """Whatever was cached, queued or computed again: the report is not ok otherwise."""
    assert 1 == agent.metrics["outputs_identical"].value and agent.ok and agent.work is not None


def test_agent_tells_of_every_run_and_request(agent: Report):
    """Rows for each configuration under each load, each request, and the cache meanwhile; all can be written."""
    by_series: dict[object, list[Any]] = {}
    for row in agent.rows:
        by_series.setdefault(row["series"], []).append(row)
    configs = {(row["workload"], row["load"], row["config"]) for row in by_series["load"]}
    assert {("tau", load, name) for load in (0.8, 2.0) for name in ("off", "gpu", "both")} <= configs
    assert {row["config"] for row in by_series["request"]} == {"off", "gpu", "both"}
    assert all(row["due_s"] <= row["sent_s"] <= row["first_s"] <= row["end_s"] for row in by_series["request"])
    assert all(
        row["matched_gpu_tokens"] == row["matched_cpu_tokens"] == 0
        for row in by_series["request"]
        if row["config"] == "off"
    )
    assert by_series["cache"] and by_series["alone"]
    json.dumps(agent.to_json(), allow_nan=False)


def test_overhead_has_the_promised_metrics():
    """The share, beside that of two equal engines, and the time inside the cache's calls."""
    report = run_bench("overhead", ["--smoke", "--rounds", "3"])
    assert {"overhead_share", "overhead_both_share", "aa_share", "own_share"} <= report.metrics.keys()
    own = report.metrics["own_share"].value
    assert own is not None and 0 < own < 0.5
    assert report.ok and 1 == report.metrics["outputs_identical"].value
    rows = {str(row["metric"]): row for row in report.rows}
    assert {"off_ms", "off_again_ms", "gpu_ms", "both_ms"} <= rows.keys()
    assert all(3 == row["samples"] for name, row in rows.items() if name.endswith("_ms"))


def test_sweep_follows_the_curve_that_a_replay_predicts():
    """Larger pools match more, the largest all that there is; a replay of the prompts says the same."""
    report = run_bench("sweep", ["--smoke"])
    assert report.ok, [row for row in report.rows if row.get("reached") is False]
    rows = [row for row in report.rows if row.get("series") == "sweep"]
    shares = [float(str(row["matched_share"])) for row in rows]
    assert shares == sorted(shares) and shares[0] < shares[-1]
    assert [row["pool_pages"] for row in rows] == sorted(int(str(row["pool_pages"])) for row in rows)
    assert all(row["outputs_identical"] for row in rows)
    assert {"knee_of_working_set", "prediction_points", "working_set_pages"} <= report.metrics.keys()


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("agent", ["--slo-ttft", "0"]),
        ("agent", ["--slo-itl", "nan"]),
        ("agent", ["--seed", "-1"]),
        ("agent", ["--traces", "nowhere"]),
        ("overhead", ["--rounds", "0"]),
        ("overhead", ["--seed", "-1"]),
        ("sweep", ["--seed", "-1"]),
        ("sweep", ["--sizes"]),
    ],
)
def test_bad_options_are_refused(case: str, arguments: list[str]):
    """One line, before a model is loaded."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench(case, arguments)


def test_sessions_of_their_own_match_only_themselves():
    """Conversations with salts share nothing, although they begin alike; without salts they share their beginning."""
    from bench._serving import Setup, warmed
    from bench._sessions import random_conversations
    from kvkeep.engine.loader import load_model

    model = load_model("stories260k")
    matched = {}
    for name, salts in (("shared", ()), ("private", (b"a", b"b"))):
        conversations = random_conversations(model, 2, shared=64, growth=16, seed=1)
        engine = warmed(model, Setup("ample", 40), 16)
        held = hold("two", engine, conversations, 2, 4, salts)
        matched[name] = [answer.matched_tokens for answer in held.alone]
        engine.close()
    assert [0, 64, 80, 80] == matched["shared"]
    assert [0, 0, 80, 80] == matched["private"]
