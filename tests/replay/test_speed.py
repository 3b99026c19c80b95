"""A whole trace of 346 million prompt tokens is replayed in seconds, in little memory."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_MAX, NBYTES_MAX = 10.0, 2 << 30


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("accounting", ["engine", "reference"])
def test_a_whole_trace_takes_seconds(shared_dir: Path, repo_root: Path, tmp_path: Path, accounting: str):
    """20,163 requests with names kept from a replay before: at most 10 s from reading to table, at most 2 GiB."""
    command = [
        *(sys.executable, "-m", "kvkeep.cli", "replay", str(shared_dir / "traces/mini_swe_500")),
        *("--gpu-tokens", "131072", "--order", "rotate:8", "--accounting", accounting, "--json", "out.json"),
    ]
    environment = {"PATH": "", "PYTHONPATH": str(repo_root), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for limit in (["--limit", "1"], []):  # the first one makes the names
        subprocess.run([*command, *limit], cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
    metrics = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert 20163 == metrics["requests"]["value"]
    assert metrics["seconds"]["value"] <= SECONDS_MAX
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 <= NBYTES_MAX
