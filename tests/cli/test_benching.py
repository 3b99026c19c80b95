"""The contract between `kvkeep bench` and the files in bench/: one case, all of them, a baseline."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep import cli
from kvkeep.benching import bench_names, cases, run_bench, spin_us
from kvkeep.errors import BadInput
from kvkeep.report import Metric, Report

CASE = """
from dataclasses import dataclass
from kvkeep.report import Metric, Report

@dataclass
class Seen:
    arguments: "list[str]"

def run(arguments):
    seen = Seen(arguments)
    return Report("bench echo", True, {"arguments": Metric(len(seen.arguments), "count")})
"""


WORDY = """
import argparse

def run(arguments):
    parser = argparse.ArgumentParser(prog="kvkeep bench wordy")
    parser.add_argument("--of-its-own")
    parser.parse_args(arguments)
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of cases that holds one, `echo`, and a helper."""
    (tmp_path / "echo.py").write_text(CASE)
    (tmp_path / "_helper.py").write_text("")
    monkeypatch.setattr(cases, "bench_directory", lambda: tmp_path)
    return tmp_path


def test_a_case_is_found_by_its_file_name_and_gets_its_arguments(bench: Path):
    """`run_bench` runs the file of that name with the arguments that follow it."""
    assert ["echo"] == bench_names(bench)
    assert Report("bench echo", True, {"arguments": Metric(2, "count")}) == run_bench("echo", ["--size", "9"])


def test_a_case_that_is_not_there_is_refused_with_the_known_ones(bench: Path):
    """An unknown case, and a path instead of a name, are refused and the known cases are listed."""
    for name in ("nothing", "../echo", "_helper", ""):
        with pytest.raises(BadInput, match="known: echo"):
            run_bench(name, [])


def test_the_command_line_hands_over_what_is_not_its_own(bench: Path, tmp_path: Path):
    """`bench echo --json FILE --size 9` writes FILE and gives the case the rest."""
    assert 0 == cli.main(["bench", "echo", "--size", "9", "--json", str(tmp_path / "out.json")])
    assert '"value": 2' in (tmp_path / "out.json").read_text()


def test_every_case_lists_its_own_options(bench: Path, capsys: pytest.CaptureFixture[str]):
    """`bench CASE --help`, in either order and spelling, is the case's to answer; without a case it is bench's."""
    (bench / "wordy.py").write_text(WORDY)
    for words in (["wordy", "--help"], ["wordy", "-h"], ["--help", "wordy"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", *words])
        assert (0, True) == (end.value.code, "--of-its-own" in capsys.readouterr().out)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--help"])
    said = capsys.readouterr().out
    assert (0, True, False) == (end.value.code, "--json" in said, "--of-its-own" in said)


@pytest.mark.parametrize("case", bench_names(Path(__file__).parents[2] / "bench"))
def test_the_cases_of_the_repository_list_theirs(case: str, capsys: pytest.CaptureFixture[str]):
    """Each says its own name, its options, and that --json is understood before it."""
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", case, "--help"])
    said = capsys.readouterr().out
    assert not end.value.code
    assert f"kvkeep bench {case}" in said and "--smoke" in said and "--json" in said


def test_outside_a_checkout_bench_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In an installed copy `kvkeep bench` says that the cases are in the repository, exit code 2."""
    monkeypatch.setattr(cases, "checkout_root", lambda: None)
    assert 2 == cli.main(["bench", "index"])
    assert "from a checkout of the repository" in capsys.readouterr().err


def test_the_spin_is_a_time():
    """The calibration returns microseconds of the order that a loop of 10,000 additions takes anywhere."""
    spin = spin_us(rounds=5)
    assert spin.value is not None and 20 < spin.value < 20_000
    assert 5 == spin.samples


def test_help_and_version_need_no_engine():
    """`import kvkeep`, `--help` and `--version` work where torch, transformers and rich cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'rich', 'tokenizers', 'gguf'): sys.modules[name] = None\n"
        "import kvkeep\n"
        "from kvkeep.cli import main\n"
        "for words in ('--help', '--version', 'demo --help', 'verify --help', 'bench --help'):\n"
        "    try: main(words.split())\n"
        "    except SystemExit as end: assert not end.code, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)
    assert "--pool-pages" in done.stdout
