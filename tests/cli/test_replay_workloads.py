"""`kvkeep replay workload:NAME` as a user runs it: the table, the report, what it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytest.importorskip("rich")


def test_the_report_has_hits_of_both_kinds(kvkeep: Run, tmp_path: Path):
    """Counts add up; what is synthetic and that no model runs is said."""
    workload = "workload:image-chat?sessions=8&turns=4&seed=3"
    done = kvkeep("replay", workload, "--gpu-tokens", "65536", "--json", "out.json")
    assert 0 == done.returncode, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    found = {name: metric["value"] for name, metric in report["metrics"].items()}
    assert (32, 0) == (found["requests"], found["unserved"])
    hits = found["encoder_unneeded"] + found["encoder_gpu_hits"] + found["encoder_host_hits"]
    assert found["encoder_asked"] == hits + found["encoder_computed"]
    assert found["saved_s"] == pytest.approx(found["kv_saved_s"] + found["encoder_saved_s"])
    assert 0 < found["duplicate_media_rate"] < 1
    assert (workload, 57_344 * 128) == (report["rows"][0]["trace"], report["rows"][0]["page_nbytes"])
    for words in ("image-chat", "3.5 GiB on the GPU", "duplicates", "encoding saved", "synthetic", "no model runs"):
        assert words in done.stdout


def test_a_limit_and_two_tiers(kvkeep: Run, tmp_path: Path):
    """The first requests only, over a tier in host memory as well."""
    tiers = ("--gpu-tokens", "16384", "--cpu-tokens", "65536", "--link-rate", "400000", "--eviction", "rhythm")
    done = kvkeep("replay", "workload:audio", "--limit", "100", *tiers, "--json", "out.json")
    assert 0 == done.returncode, done.stderr
    assert 100 == json.loads((tmp_path / "out.json").read_text())["metrics"]["requests"]["value"]
    assert "3.5 below" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("workload:pictures", ["pictures", "image-chat", "mixed"]),
        ("workload:video?clips=0", ["clips=0", "1 or more"]),
        ("workload:video --order rotate:4", ["--order", "recorded traces"]),
        ("workload:video --accounting reference", ["--accounting reference"]),
        ("workload:video --eviction random", ["random", "lru"]),
        ("workload:video --cpu-tokens 5", ["--cpu-tokens 5", "128"]),
    ],
)
def test_bad_input(kvkeep: Run, options: str, words: list[str]):
    """One line that says what was wrong, exit code 2."""
    done = kvkeep("replay", *options.split(), "--gpu-tokens", "65536")
    assert 2 == done.returncode
    assert 1 == len(done.stderr.splitlines())
    assert [word for word in words if word not in done.stderr] == []


def test_a_tier_without_a_page(kvkeep: Run):
    """A GPU tier smaller than a page is refused."""
    done = kvkeep("replay", "workload:video", "--gpu-tokens", "100")
    assert (2, True) == (done.returncode, "--gpu-tokens 100" in done.stderr)
