"""`kvkeep bench vllm_load` over real vLLM servers: the smoke run, from the command to its result.

Must not judge a time.  Where vLLM is not installed, this is skipped.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: run `make test-vllm`")

from bench.vllm_load import CASES, main

pytestmark = pytest.mark.slow  # two real servers


def test_a_load_is_served_with_and_without_our_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every request is answered by both, the tier brings what vLLM's own space has lost, prompts without load have
    the same tokens from the tier as from vLLM's blocks, and the logs tell of no error."""
    path = tmp_path / "vllm_load.json"
    code = main(["--smoke", "--json", str(path)])
    made = json.loads(path.read_text())
    assert 0 == code and made["ok"], capsys.readouterr().out
    values = {name: metric["value"] for name, metric in made["metrics"].items()}
    assert [0, 0, 0] == [values[name] for name in ("errors", "log_errors", "probe_texts_apart")]
    assert 0 < values["probe_external_tokens"]
    for case in CASES:
        assert values[f"{case}_alone_hit_share"] < values[f"{case}_kvkeep_hit_share"]
        assert 0.9 <= values[f"{case}_of_ceiling"]
    external = [row["external_share"] for row in made["rows"] if row["series"] == "load" and row["config"] == "kvkeep"]
    assert len(CASES) == len(external) and all(share > 0 for share in external)
