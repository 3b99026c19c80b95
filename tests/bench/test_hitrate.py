"""`kvkeep bench hitrate` over recorded traces, and what it says where there are none."""

from pathlib import Path

import pytest

from bench import hitrate
from kvkeep.benching import cases, run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report


@pytest.fixture(scope="module")
def smoke(shared_dir: Path) -> Report:
    return run_bench("hitrate", ["--smoke", "--traces", str(shared_dir / "traces")])


def test_every_order_is_between_nothing_and_the_best_possible(smoke: Report):
    """At each size, of one pool; more room hits no less; the same trace gives the same intervals: none."""
    pools = [row for row in smoke.rows if row["series"] == "pool"]
    by_size: dict[object, dict[object, float]] = {}
    for row in pools:
        by_size.setdefault(row["tokens"], {})[row["eviction"]] = float(str(row["hit_share"]))
    assert 2 == len(by_size)
    for shares in by_size.values():
        assert {"lru", "rhythm", "best"} == set(shares)
        assert 0 < shares["lru"] <= shares["best"] + 1e-9 and 0 < shares["rhythm"] <= shares["best"] + 1e-9
    small, large = (by_size[size] for size in sorted(by_size, key=str))
    assert all(small[name] <= large[name] for name in small)
    assert all(metric.interval == (metric.value, metric.value) for metric in smoke.metrics.values())


def test_two_tiers_are_told_apart(smoke: Report):
    """What came from where, in both orders, and their sum."""
    tiers = [row for row in smoke.rows if row["series"] == "tiers"]
    assert ["lru", "rhythm"] == [row["eviction"] for row in tiers]
    for row in tiers:
        gpu, cpu, both = (float(str(row[key])) for key in ("hit_share_gpu", "hit_share_cpu", "hit_share"))
        assert gpu > 0 and cpu > 0 and both == pytest.approx(gpu + cpu, abs=2e-4)


def test_lru_hits_what_it_is_known_to_hit(shared_dir: Path):
    """The published share of 32 sessions of tau-bench in rotation in a pool of 64k tokens: 50.0 %."""
    one = hitrate.Replayed("tau_retail", "tau_retail_200", "rotate:32", (64 * hitrate.K,))
    rows = {str(row["eviction"]): row["hit_share"] for row in hitrate.replayed(one, shared_dir / "traces")}
    assert 0.500 == pytest.approx(float(str(rows["lru"])), abs=5e-4)
    assert float(str(rows["rhythm"])) > 0.8


def test_without_traces_it_says_so_and_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A trace that is not in the folder has a row with the reason; without any folder the case is left out of `all`."""
    report = run_bench("hitrate", ["--smoke", "--traces", str(tmp_path)])
    assert report.ok and {} == report.metrics
    assert ["tau_retail_200 is not in " + tmp_path.name] == [row["left_out"] for row in report.rows]
    monkeypatch.setattr(hitrate, "beside_checkout", lambda: None)
    assert "no recorded traces" in str(cases.left_out(hitrate, smoke=True))


def test_unknown_options_are_refused():
    """A folder that is not there is bad input."""
    with pytest.raises(BadInput, match="--traces nowhere"):
        run_bench("hitrate", ["--traces", "nowhere"])
