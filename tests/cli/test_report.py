"""The result object of every command: its shape, and that a file is written whole or not at all."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep import __version__
from kvkeep.errors import BadInput
from kvkeep.report import Metric, Report, check_writable, checkout_root, interrupted, machine

SAMPLE = Report(
    "demo",
    ok=True,
    metrics={"matched_share": Metric(0.5, "share"), "ttft_ms": Metric(3, "ms", p99=4.5, samples=7)},
    rows=[{"turn": 1, "prompt_tokens": 100}],
)


def test_the_object_has_exactly_the_documented_keys(tmp_path: Path):
    """A written report has the seven keys in order, and a metric only the keys that were given."""
    SAMPLE.write(tmp_path / "out.json")
    got = json.loads((tmp_path / "out.json").read_text())
    assert ["command", "version", "commit", "machine", "ok", "metrics", "rows"] == list(got)
    assert ("demo", __version__, True) == (got["command"], got["version"], got["ok"])
    assert {
        "matched_share": {"value": 0.5, "unit": "share"},
        "ttft_ms": {"value": 3, "unit": "ms", "p99": 4.5, "samples": 7},
    } == got["metrics"]
    assert [{"turn": 1, "prompt_tokens": 100}] == got["rows"]


def test_a_record_is_written_beside_the_machine(tmp_path: Path):
    """Where there is one; a metric says its tails, interval and which way is better, as far as that is known."""
    metric = Metric(3, "ms", p99=4.5, samples=7, p90=4, spread=0.1, interval=(2, 4), better="lower")
    Report("bench toy", True, {"toy": metric}, record={"work": "abc"}).write(tmp_path / "out.json")
    got = json.loads((tmp_path / "out.json").read_text())
    assert ["command", "version", "commit", "machine", "record", "ok", "metrics", "rows"] == list(got)
    assert ({"work": "abc"}, [2, 4], "lower", 4) == (
        got["record"],
        *(got["metrics"]["toy"][key] for key in ("interval", "better", "p90")),
    )


def test_the_commit_is_the_checked_out_one(tmp_path: Path):
    """In a checkout the commit is what git says HEAD is; outside one it is null."""
    commit = SAMPLE.to_json()["commit"]
    root = checkout_root()
    if root is None:
        assert commit is None
    else:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        assert head.stdout.strip() == commit
        assert re.fullmatch("[0-9a-f]{40}", str(commit))


def test_a_copy_outside_a_checkout_has_no_commit(tmp_path: Path):
    """A package imported from a plain folder reports a null commit."""
    package = Path(__file__).parents[2] / "kvkeep"
    shutil.copytree(package, tmp_path / "copy" / "kvkeep")
    code = "from kvkeep.report import commit; print(commit())"
    got = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "copy")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "None\n" == got.stdout


def test_the_machine_names_no_host_and_no_path():
    """The machine's description carries neither the host's name nor a path of it."""
    described = json.dumps(machine())
    assert os.uname().nodename not in described
    assert str(Path.home()) not in described and str(Path(__file__).parents[2]) not in described
    assert {"cpu", "cores", "memory_gib", "platform", "python"} <= set(machine())


def test_a_report_replaces_a_file_and_leaves_nothing_else(tmp_path: Path):
    """Writing over an older report leaves one file, the new one."""
    target = tmp_path / "out.json"
    target.write_text("old")
    check_writable(target)
    assert "old" == target.read_text()
    SAMPLE.write(target)
    assert "demo" == json.loads(target.read_text())["command"]
    assert [target] == list(tmp_path.iterdir())


def test_a_report_that_is_no_json_leaves_the_old_file(tmp_path: Path):
    """A value that JSON has no word for (NaN) raises and leaves the older report as it was."""
    target = tmp_path / "out.json"
    target.write_text("old")
    with pytest.raises(ValueError):
        Report("demo", True, {"x": Metric(float("nan"), "ms")}).write(target)
    assert "old" == target.read_text()
    assert [target] == list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When the bytes cannot be brought to disk the older report stays and no temporary file is left."""

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "out.json"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        SAMPLE.write(target)
    assert "old" == target.read_text()
    assert [target] == list(tmp_path.iterdir())


def test_a_report_goes_through_a_link_to_its_target(tmp_path: Path):
    """Writing to a symbolic link replaces the file it points to, not the link."""
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    SAMPLE.write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert "demo" == json.loads((tmp_path / "real.json").read_text())["command"]


def test_a_device_is_written_to_and_not_replaced():
    """A path such as /dev/null is written to; it is still a device afterwards."""
    check_writable(Path("/dev/null"))
    SAMPLE.write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_paths_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path):
    """A folder, a missing folder and a file used as a folder are refused, each with what would be right."""
    (tmp_path / "file").write_text("x")
    for path, words in [
        (tmp_path, "is a directory"),
        (tmp_path / "missing" / "out.json", "create it"),
        (tmp_path / "file" / "out.json", "Not a directory|no directory"),
        (tmp_path / ("n" * 300), "too long"),
    ]:
        with pytest.raises(BadInput, match=words):
            check_writable(path)
    assert [tmp_path / "file"] == list(tmp_path.iterdir())


def test_a_command_that_was_stopped_early_says_so():
    """The report of an interrupted command is not ok and is marked."""
    report = interrupted("verify")
    assert not report.ok
    assert {"interrupted"} == set(report.metrics)


def test_a_pipe_is_written_to(tmp_path: Path):
    """`/dev/stdout` of a process whose output is a pipe takes the report: it has no place in a folder to replace."""
    code = (
        "from pathlib import Path; from kvkeep.report import check_writable, interrupted\n"
        "check_writable(Path('/dev/stdout')); interrupted('demo').write(Path('/dev/stdout'))"
    )
    root = Path(__file__).parents[2]
    got = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "demo" == json.loads(got.stdout)["command"]
