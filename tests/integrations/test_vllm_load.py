"""`kvkeep bench vllm_load` over real vLLM servers: the smoke run, from its options to its report.

Must not judge a time.  Where vLLM is not installed, this is skipped.
"""

from collections.abc import Mapping

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: run `make test-vllm`")

from bench.vllm_load import CASES
from kvkeep.benching import run_bench
from kvkeep.report import JsonValue

pytestmark = pytest.mark.slow  # two real servers


def test_a_load_is_served_with_and_without_our_tier(capsys: pytest.CaptureFixture[str]):
    """Every request is answered by both, the tier brings what vLLM's own space has lost, prompts without load have
    the same tokens from the tier as from vLLM's blocks, and the logs tell of no error."""
    made = run_bench("vllm_load", ["--smoke"])
    assert made.ok, capsys.readouterr().out
    values = {name: metric.value for name, metric in made.metrics.items()}
    assert [0, 0, 0] == [values[name] for name in ("errors", "log_errors", "probe_texts_apart")]
    loads = [row for row in made.rows if row["series"] == "load"]
    assert [(case, config) for case in CASES for config in ("alone", "kvkeep")] == [
        (row["case"], row["config"]) for row in loads
    ]
    shares = {(row["case"], row["config"]): _numbers(row, "hit_share", "external_share") for row in loads}
    for case in CASES:
        (alone, none), (kept, from_tier) = shares[case, "alone"], shares[case, "kvkeep"]
        assert 0.0 == none < from_tier and alone < kept
    probes = [row for row in made.rows if row["series"] == "probe"]
    assert 3 == len(probes)
    for row in probes:
        assert row["matched_alone_tokens"] == row["matched_kvkeep_tokens"] == row["external_tokens"] == 896


def _numbers(row: Mapping[str, JsonValue], *names: str) -> tuple[float, ...]:
    return tuple(float(str(row[name])) for name in names)
