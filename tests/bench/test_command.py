"""`kvkeep bench CASE|all` over toy cases in a checkout of their own: records, baselines, what is left out.

Must not run a case of the repository.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep import cli
from kvkeep.benching import cases

TOY = """
import argparse
from kvkeep.report import Metric, Report

def run(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--level", type=float, default=10.0)
    options = parser.parse_args(arguments)
    level = options.level
    print("measuring at", level)
    metric = Metric(level, "us", samples=9, interval=(level - 1, level + 1))
    return Report("bench NAME", OK, {"toy_us": metric}, [{"series": "toy", "x": level}], work="abc")
"""
LEFT_OUT = {
    "needy": "import nothing_of_this_name\n",
    "apart": 'APART = "an hour by itself"\n',
    "absent": 'def missing():\n    return "needs a machine that is not here"\n',
    "lengthy": 'LONG = "minutes by itself"\n',
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(repo_root: Path, tmp_path: Path) -> Path:
    """A checkout with two cases that run, one of which misses a limit, and four that may be left out."""
    root = tmp_path / "checkout"
    shutil.copytree(repo_root / "kvkeep", root / "kvkeep", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "bench").mkdir()
    (root / "pyproject.toml").write_text("")
    for name, ok in (("fine", True), ("missed", False), *((name, True) for name in LEFT_OUT)):
        text = LEFT_OUT.get(name, "") + TOY.replace("NAME", name).replace("OK", str(ok))
        (root / "bench" / f"{name}.py").write_text(text)
    return root


@pytest.fixture
def bench(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`kvkeep bench ...` in this process."""
    monkeypatch.setattr(cases, "bench_directory", lambda: checkout / "bench")
    monkeypatch.chdir(checkout)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        code = cli.main(["bench", *words])
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


@pytest.fixture
def bench_all(checkout: Path) -> Run:
    """`kvkeep bench all ...` in a process of its own, whose cases are again."""

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, "-m", "kvkeep.cli", "bench", "all", *words]
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)

    return run


def read(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_a_result_has_its_record(bench: Run, checkout: Path):
    """What was asked for, how noisy it was, and the checksum of the work stand in every result."""
    done = bench("fine", "--level", "20", "--json", "out.json")
    assert (0, "measuring at 20.0\n", "") == (done.returncode, done.stdout, done.stderr)
    record = read(checkout / "out.json")["record"]
    assert isinstance(record, dict)
    assert (["--level", "20"], "abc") == (record["arguments"], record["work"])
    assert {"clocks", "noise", "process"} <= set(record)


def test_an_unknown_case_lists_the_cases(bench: Run):
    """One line, exit code 2; `all` is among what can be named."""
    done = bench("nothing")
    assert 2 == done.returncode and 1 == done.stderr.count("\n")
    assert "known: absent, apart, fine, lengthy, missed, needy" in done.stderr and "all" in done.stderr
    done = bench("all", "--only", "fine,nothing")
    assert 2 == done.returncode and "--only nothing" in done.stderr


@pytest.mark.parametrize(
    ("level", "word"), [("14", "worse"), ("6", "better"), ("11", "within noise"), ("10", "the same")]
)
def test_a_baseline_tells_better_worse_or_within_noise(bench: Run, checkout: Path, level: str, word: str):
    """Per metric, printed and in the result; the exit code is that of the limits."""
    bench("fine", "--json", "before.json")
    spins = json.loads((checkout / "before.json").read_text())
    spins["record"]["noise"]["spin_us"] = None  # two runs of a second: the speed of the machine must not matter here
    (checkout / "before.json").write_text(json.dumps(spins))
    done = bench("fine", "--level", level, "--baseline", "before.json", "--json", "now.json")
    assert 0 == done.returncode, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("toy_us")]
    assert line.endswith(word)
    assert f"1 {word}" in done.stdout.splitlines()[-1]
    record = read(checkout / "now.json")["record"]
    assert isinstance(record, dict)
    assert [word] == [one["verdict"] for one in record["baseline"]["metrics"]]


def test_a_baseline_that_cannot_be_used_is_named_and_skipped(bench: Run, checkout: Path):
    """The case runs; a baseline that is not there is bad input, before it does."""
    bench("fine", "--json", "before.json")
    cut = (checkout / "before.json").read_text()[:200]
    (checkout / "before.json").write_text(cut)
    done = bench("fine", "--baseline", "before.json")
    assert 0 == done.returncode
    assert "before.json: cut short" in done.stdout and "nothing is compared" in done.stdout
    done = bench("fine", "--baseline", "nowhere.json")
    assert (2, "") == (done.returncode, done.stdout)
    assert "nowhere.json: there is no such results file" in done.stderr
    done = bench("fine", "--baseline", "bench")
    assert 2 == done.returncode and "no *.json in that folder" in done.stderr


def test_all_runs_what_can_run_and_says_the_rest(bench_all: Run, checkout: Path):
    """Each case once, those that are left out with their reason; a limit that is missed makes the exit code 1."""
    (checkout / "results").mkdir()
    done = bench_all("--json", "all.json", "--results", "results")
    assert 1 == done.returncode, done.stderr
    said = done.stdout
    assert 2 == said.count("measuring at")
    reasons = {line.split()[0]: line.partition("left out: ")[2] for line in said.splitlines() if "left out:" in line}
    assert {
        "needy": "it needs nothing_of_this_name, which is not installed",
        "apart": "an hour by itself",
        "absent": "needs a machine that is not here",
        "lengthy": "minutes by itself",
    } == reasons
    found = read(checkout / "all.json")
    assert "bench all" == found["command"] and isinstance(found["metrics"], dict) and isinstance(found["record"], dict)
    assert {"fine.toy_us", "missed.toy_us", "seconds"} == set(found["metrics"])
    assert {"fine", "missed"} == set(found["record"]["cases"]) and "abc" == found["record"]["cases"]["fine"]["work"]
    rows = found["rows"]
    assert isinstance(rows, list)
    assert {"case": "fine", "series": "toy", "x": 10.0} in rows
    assert {"fine.json", "missed.json"} == {file.name for file in (checkout / "results").iterdir()}
    assert "bench fine" == read(checkout / "results" / "fine.json")["command"]


def test_a_smoke_run_of_all_is_fine_when_everything_ran(bench_all: Run, checkout: Path):
    """Limits are not judged there, cases that are long otherwise run too; one that fails is still a failure."""
    done = bench_all("--smoke")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert 3 == done.stdout.count("measuring at")
    assert "missed" in done.stdout and "not judged" in done.stdout
    (checkout / "bench" / "fine.py").write_text("def run(arguments):\n    raise RuntimeError('rotten')\n")
    done = bench_all("--smoke")
    assert 1 == done.returncode and "failed, exit code 1" in done.stdout and "rotten" in done.stderr


def test_all_is_compared_with_a_file_or_a_folder(bench_all: Run, checkout: Path):
    """An earlier `all`, or a folder of results of cases: each case finds its own."""
    (checkout / "results").mkdir()
    bench_all("--only", "fine", "--json", "all.json", "--results", "results")
    for baseline in ("all.json", "results"):
        done = bench_all("--only", "fine,missed", "--baseline", baseline)
        assert 1 == done.stdout.count("1 the same"), done.stdout
        assert "no result of bench missed" in done.stdout


def test_smoke_figures_are_not_kept_as_results(bench_all: Run, checkout: Path):
    """Asking for both is a mistake, and so is a folder that is not there."""
    (checkout / "results").mkdir()
    for words in (["--smoke", "--results", "results"], ["--results", "nowhere"]):
        done = bench_all(*words)
        assert (2, "") == (done.returncode, done.stdout) and words[-2] in done.stderr
