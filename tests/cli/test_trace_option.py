"""--trace and `kvkeep report` from the command line."""

import json
from pathlib import Path

import pytest

from kvkeep.telemetry.chrome import check
from tests.cli.conftest import Run

TRACED = ("bench", "sweep", "--smoke", "--trace")


@pytest.mark.slow
def test_trace_of_a_bench_opens_and_becomes_a_page(kvkeep: Run, tmp_path: Path) -> None:
    """Engines and the machine, on one clock; no path of this machine is in it."""
    done = kvkeep(*TRACED, str(tmp_path / "run.trace.json"))
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((tmp_path / "run.trace.json").read_text())
    assert [] == check(found)
    assert "kvkeep bench sweep --smoke" == found["otherData"]["command"]
    assert str(tmp_path) not in json.dumps(found["otherData"])
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert "machine" == names[0]
    assert any(name.startswith("engine: pool") for name in names)
    done = kvkeep("report", str(tmp_path / "run.trace.json"), "-o", str(tmp_path / "page.html"))
    assert 0 == done.returncode, done.stderr
    assert "Timeline of a run" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "absent.json", "-o", "page.html"), "absent.json: there is no such file or folder; name what"),
        (("report", ".", "-o", "page.html", "--point", "much"), "--point much: it must be a size above 0"),
        (("bench", "all", "--trace", "t.json"), "--trace with bench all: each case runs in a process of its own"),
        (("demo", "--trace", "nowhere/t.json"), "--trace nowhere/t.json: there is no directory nowhere"),
    ],
)
def test_bad_input_of_reports_and_traces_is_one_line(kvkeep: Run, words: tuple[str, ...], said: str) -> None:
    """Exit code 2, before anything is measured."""
    done = kvkeep(*words)
    assert (2, "") == (done.returncode, done.stdout)
    assert said in done.stderr
    assert 1 == done.stderr.count("\n")
