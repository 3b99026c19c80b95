"""Results files read back, and compared: better, worse or within noise.

Must not measure anything.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep import __version__
from kvkeep.benching.compare import Verdict, compare, judge, table
from kvkeep.benching.record import Watch, work_checksum
from kvkeep.benching.results import Unusable, read_all, read_results
from kvkeep.errors import BadInput
from kvkeep.report import Metric, Report

SAMPLE = Report(
    "bench toy",
    ok=True,
    metrics={"toy_us": Metric(10.0, "us", p99=12.0, samples=9, p90=11.0, spread=0.1, interval=(9.0, 11.0))},
    rows=[{"series": "toy", "x": 1}],
    work="0123456789abcdef",
    record={"arguments": ["--smoke"], "noise": {"spin_us": 300.0}},
)


def us(value: float, low: float, high: float) -> Metric:
    return Metric(value, "us", interval=(low, high))


# ---------------------------------------------------------------------- files


def test_a_result_is_read_as_it_was_written(tmp_path: Path):
    """Metrics with all that is said of them, rows and record; whether it was a smoke run, and how fast the machine."""
    SAMPLE.write(tmp_path / "toy.json")
    found = read_results(tmp_path / "toy.json")
    assert ("bench toy", __version__, True) == (found.command, found.version, found.ok)
    assert SAMPLE.metrics == found.metrics
    assert [{"series": "toy", "x": 1}] == found.rows
    assert (True, 300.0) == (found.smoke, found.spin_us)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: "", "cut short"),
        (lambda text: text.replace(f'"{__version__}"', '"9.1.0"'), "of version 9.1.0, this is"),
        (lambda text: text.replace(f'"{__version__}"', '"0.0.9"'), "of version 0.0.9"),
        (lambda text: text.replace('"metrics"', '"figures"'), "no whole result"),
        (lambda text: text.replace('"value": 10.0', '"value": "ten"'), "no whole result"),
        (lambda text: "[1, 2]", "no version"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_skipped(tmp_path: Path, spoil: Callable[[str], str], words: str):
    """Cut short, of another version, or no result at all: one line with its name and why; the others are read."""
    for name in ("good", "bad"):
        SAMPLE.write(tmp_path / f"{name}.json")
    bad = tmp_path / "bad.json"
    bad.write_text(spoil(bad.read_text()))
    with pytest.raises(Unusable, match=words):
        read_results(bad)
    found, skipped = read_all([bad, tmp_path / "good.json"])
    assert ["bench toy"] == [one.command for one in found]
    assert 1 == len(skipped) and str(bad) in skipped[0] and skipped[0].count("\n") == 0 and "skipped" in skipped[0]


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path):
    """Unlike one that cannot be used, it was named by mistake."""
    with pytest.raises(BadInput, match="no such results file"):
        read_all([tmp_path / "nothing.json"])


def test_every_result_in_the_repository_is_read(repo_root: Path):
    """Nothing under bench/results that a command wrote is left out."""
    written = [file for file in (repo_root / "bench" / "results").glob("*.json") if '"metrics"' in file.read_text()]
    found, skipped = read_all(sorted(written))
    assert [] == skipped and len(found) == len(written) > 3


# ---------------------------------------------------------------------- verdicts


def test_a_difference_counts_only_beyond_both_intervals():
    """Lower is better for a time: below the old interval better, above it worse, else within noise."""
    old = us(10, 9, 11)
    assert Verdict.BETTER is judge(old, us(8, 7.5, 8.5))
    assert Verdict.WORSE is judge(old, us(12, 11.5, 12.5))
    assert Verdict.WITHIN_NOISE is judge(old, us(12, 10.9, 13))
    assert Verdict.WITHIN_NOISE is judge(old, us(9.4, 8, 9.5))
    assert Verdict.SAME is judge(old, us(10, 3, 4))


def test_more_is_better_for_a_rate_and_where_the_metric_says_so():
    """A rate by its unit, a ratio by its own word; of anything else it is only said that it differs."""
    verdicts = {}
    for unit, better in (("GB/s", None), ("ratio", "higher"), ("ratio", "lower"), ("pages", None)):
        old = Metric(10, unit, interval=(9, 11), better=better)  # type: ignore[arg-type]
        new = Metric(20, unit, interval=(19, 21), better=better)  # type: ignore[arg-type]
        verdicts[unit, better] = judge(old, new)
    assert [Verdict.BETTER, Verdict.BETTER, Verdict.WORSE, Verdict.DIFFERENT] == list(verdicts.values())


def test_a_slower_machine_makes_nothing_worse():
    """A time that has grown no more than the spin is within noise, and one that did not grow with it is not better;
    what has grown beyond both is worse.  A ratio has no speed."""
    old = us(10, 9, 11)
    assert Verdict.WITHIN_NOISE is judge(old, us(15, 14, 16), slower=1.5)
    assert Verdict.WITHIN_NOISE is judge(old, us(10.5, 10, 10.9), slower=1.5)
    assert Verdict.WORSE is judge(old, us(20, 19, 21), slower=1.5)
    assert Verdict.WITHIN_NOISE is judge(old, us(8, 7, 8.5), slower=0.7)
    rate, ratio = Metric(9, "GB/s", interval=(8.5, 9.5)), Metric(15, "ratio", interval=(14, 16), better="lower")
    assert Verdict.WITHIN_NOISE is judge(rate, Metric(6, "GB/s", interval=(5.5, 6.5)), slower=1.5)
    assert Verdict.WORSE is judge(Metric(10, "ratio", interval=(9, 11), better="lower"), ratio, slower=1.5)


def test_without_an_interval_nothing_is_claimed():
    """Of a number that has none, or no value, only equality can be said."""
    assert Verdict.UNKNOWN is judge(Metric(1, "us"), us(2, 1.9, 2.1))
    assert Verdict.UNKNOWN is judge(us(2, 1.9, 2.1), Metric(None, "us"))
    assert Verdict.SAME is judge(Metric(3, "pages"), Metric(3, "pages"))


def test_only_what_both_have_in_one_unit_is_compared():
    """In the order of the later result; the spin is no metric of the work."""
    old = {"a": us(1, 1, 1), "b": us(1, 1, 1), "spin_us": us(1, 1, 1), "c": Metric(1, "ms")}
    new = {"c": us(1, 1, 1), "b": us(2, 2, 2), "spin_us": us(2, 2, 2), "a": us(1, 1, 1), "new": us(1, 1, 1)}
    found = compare(old, new)
    assert [("b", Verdict.WORSE), ("a", Verdict.SAME)] == [(one.name, one.verdict) for one in found]
    assert (1.0, 0.0) == (found[0].change, found[1].change)
    assert 3 == len(list(table(found))) and "worse" in list(table(found))[1]


# ---------------------------------------------------------------------- records


def test_equal_work_has_equal_checksums():
    """Order of keys does not count, everything else does."""
    assert work_checksum({"a": 1, "b": [1, 2]}) == work_checksum({"b": (1, 2), "a": 1})
    assert work_checksum({"a": 1}) != work_checksum({"a": 2})
    assert work_checksum([1], [2]) != work_checksum([1, 2])
    with pytest.raises(TypeError, match="a checksum of"):
        work_checksum(object())


def test_a_record_says_how_it_was_measured():
    """Arguments, time, clocks, noise before and after, what the process used, the checksum; it can be written."""
    record = Watch.begin().record(["--smoke"], "abc")
    assert ["arguments", "began", "work", "clocks", "noise", "process"] == list(record)
    assert (["--smoke"], "abc") == (record["arguments"], record["work"])
    noise, process = record["noise"], record["process"]
    assert isinstance(noise, dict) and isinstance(process, dict)
    assert {"spin_us", "spin_us_before", "spin_us_after", "spread", "noisy"} <= set(noise)
    spin = noise["spin_us"]
    assert isinstance(spin, float) and 20 < spin < 20_000
    assert {"wall_s", "cpu_s", "rss_peak_mib", "page_faults", "preempted"} == set(process)
    assert "perf_counter_ns" in json.loads(json.dumps(record))["clocks"]
