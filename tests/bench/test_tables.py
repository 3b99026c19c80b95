"""Tables of bench figures: they are those of the results, in every document; and whether two runs agree.

Must not measure anything.
"""

from pathlib import Path

import pytest

from kvkeep.benching.results import read_results
from kvkeep.report import Metric, Report
from tools.bench_repeat import overlaps
from tools.bench_tables import DOCUMENTS, RESULTS, main, renewed

TOY = Report(
    "bench toy",
    ok=False,
    metrics={
        "toy_us": Metric(12.3456, "us", p99=1234.5, samples=2400, interval=(12.0, 12.75)),
        "toy_count": Metric(3, "pages"),
        "toy_none": Metric(None, "s"),
    },
    rows=[{"metric": "toy_us", "limit": "at most 10", "reached": False}],
    record={"arguments": ["--rounds", "7"], "noise": {"spin_us": 301.2, "noisy": True}},
)
DOCUMENT = "# Toy\n\n<!-- bench toy: toy_us toy_none toy_gone -->\nold\n<!-- end -->\n\ntail\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with one result and its documents."""
    (tmp_path / RESULTS).mkdir(parents=True)
    TOY.write(tmp_path / RESULTS / "toy.json")
    for name in DOCUMENTS:
        (tmp_path / name).write_text(DOCUMENT)
    return tmp_path


def test_tables_of_the_repository_are_those_of_its_results(repo_root: Path):
    """No figure was typed, and none is behind: `python -m tools.bench_tables` brings them up to date."""
    assert 0 == main(["--check"], repo_root)
    assert all("<!-- bench " in (repo_root / name).read_text() for name in DOCUMENTS)


def test_a_table_is_made_from_the_result(root: Path):
    """The named metrics in their order, with interval, tail, count and limit; below it what was run, and where."""
    made = renewed(DOCUMENT, root / RESULTS)
    assert made.startswith("# Toy\n\n<!-- bench toy: toy_us toy_none toy_gone -->\n| figure |")
    assert made.endswith(".\n<!-- end -->\n\ntail\n") and "old" not in made
    assert "| `toy_us` | 12.35 us | 12 to 12.75 | 1,234 | 2,400 | at most 10, missed |\n" in made
    assert "| `toy_none` | none | | | | |" in made.replace("|  |", "| | |").replace("  ", " ")
    assert "| `toy_gone` | not in this result |" in made
    assert "`kvkeep bench toy --rounds 7 --json bench/results/toy.json`" in made
    assert "spin 301 us; other programs kept the machine busy." in made
    everything = renewed("<!-- bench toy -->\n<!-- end -->", root / RESULTS)
    assert all(f"`{name}`" in everything for name in TOY.metrics)


def test_documents_behind_the_results_are_found_and_renewed(root: Path, capsys: pytest.CaptureFixture[str]):
    """--check only says so, with exit code 1; without it they are written, and then nothing is behind."""
    assert 1 == main(["--check"], root)
    assert DOCUMENT == (root / DOCUMENTS[0]).read_text() and DOCUMENTS[0] in capsys.readouterr().out
    assert 0 == main([], root)
    assert 0 == main(["--check"], root)
    other = Report(TOY.command, True, {"toy_us": Metric(1.0, "us")}, record=TOY.record)
    other.write(root / RESULTS / "toy.json")
    assert 1 == main(["--check"], root)


def test_what_is_not_measured_is_said(root: Path):
    """Without a result there is the command that makes one; of a file that cannot be used, its name and why."""
    (root / RESULTS / "toy.json").unlink()
    assert "Not measured yet: `kvkeep bench toy --json bench/results/toy.json`." in renewed(DOCUMENT, root / RESULTS)
    (root / RESULTS / "toy.json").write_text('{"command": "bench')
    made = renewed(DOCUMENT, root / RESULTS)
    assert "There is no table: toy.json: cut short" in made and str(root) not in made


def test_pairs_of_runs_agree_where_their_intervals_overlap(tmp_path: Path):
    """Counted metric by metric, where both have an interval."""

    def result(name: str, low: float, high: float) -> Path:
        metrics = {"toy_us": Metric(low, "us", interval=(low, high)), "toy_count": Metric(1, "pages")}
        Report("bench toy", True, metrics).write(tmp_path / name)
        return tmp_path / name

    a, b, c = (read_results(result(*one)) for one in (("a", 1, 2), ("b", 2, 3), ("c", 2.5, 4)))
    assert {"toy_us": (2, 3)} == overlaps([(a, b), (b, c), (a, c)])
