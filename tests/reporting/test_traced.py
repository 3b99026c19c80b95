"""A command that is recorded: what becomes of its trace."""

import json
from pathlib import Path

import pytest

from kvkeep.errors import BadInput
from kvkeep.reporting.traced import traced
from kvkeep.telemetry.chrome import check
from kvkeep.telemetry.trace import current


def test_interrupted_command_leaves_a_trace_with_the_machine_and_no_path(tmp_path: Path) -> None:
    """What was recorded until then, with the host's counters on the same clock."""
    path, words = (
        tmp_path / "t.json",
        ["demo", "--json", str(tmp_path / "r"), "--turns", "2", f"--trace={tmp_path}/t.json"],
    )
    with pytest.raises(KeyboardInterrupt), traced(path, words):
        recorder = current()
        assert recorder is not None
        recorder.begin(recorder.process("engine"), "request", "0", "request 0", recorder.now())
        raise KeyboardInterrupt
    found = json.loads(path.read_text())
    assert [] == check(found)
    assert "kvkeep demo --turns 2" == found["otherData"]["command"]
    assert str(tmp_path) not in path.read_text()
    assert any(event["name"].startswith("host_rss") for event in found["traceEvents"] if event["ph"] == "C")


def test_command_with_bad_input_leaves_no_trace(tmp_path: Path) -> None:
    """It has not begun."""
    with pytest.raises(BadInput), traced(tmp_path / "t.json", ["demo"]):
        raise BadInput("no")
    assert [] == list(tmp_path.iterdir())
