"""`kvkeep replay` as a user runs it: the table, the report, what it keeps, what it refuses."""

import gzip
import json
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

pytest.importorskip("rich")

PAGE = 4
#: Two sessions of two turns: 8 and 16 tokens of prompt, 4 sampled ones each.
LINES: list[dict[str, Any]] = [
    {"session": s, "prompt": ids[:end], "completion": ids[end : end + 4], "time_s": float(end + i)}
    for end in (8, 16)
    for i, (s, ids) in enumerate((("a", list(range(20))), ("b", list(range(100, 120)))))
]
OPTIONS = ("--page-size", str(PAGE), "--json", "out.json")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in LINES).encode()))
    return path


def values(tmp_path: Path) -> dict[str, Any]:
    report = json.loads((tmp_path / "out.json").read_text())
    assert ("replay", True) == (report["command"], report["ok"])
    return {name: metric["value"] for name, metric in report["metrics"].items()}


def test_the_report_has_the_numbers(kvkeep: Run, trace: Path, tmp_path: Path):
    """Every metric is there, and those of a trace this small are what a person counts."""
    done = kvkeep("replay", "t.jsonl.gz", "--gpu-tokens", "100", "--accounting", "reference", *OPTIONS)
    assert 0 == done.returncode, done.stderr
    found = values(tmp_path)
    assert (4, 48, 6, 0, 0.5, 0.5) == tuple(
        found[name]
        for name in (
            "requests",
            "prompt_tokens",
            "matched_pages_gpu",
            "matched_pages_cpu",
            "hit_share",
            "best_hit_share",
        )
    )
    assert (0, None) == (found["stalls"], found["evict_us_per_page"])
    assert found["seconds"] > 0
    for word in ("t.jsonl.gz, recorded", "6 pages", "50.0 %", "best possible"):
        assert word in done.stdout


def test_two_tiers_and_a_tight_pool(kvkeep: Run, trace: Path, tmp_path: Path):
    """What has left a pool of 5 pages is found below, and what is evicted is counted."""
    words = ("--gpu-tokens", "20", "--cpu-tokens", "40", "--order", "rotate:2")
    done = kvkeep("replay", "t.jsonl.gz", *words, *OPTIONS)
    assert 0 == done.returncode, done.stderr
    found = values(tmp_path)
    # (12 - 1) // 4 full pages of each session's first turn: all but what the pool still has is below.
    assert 4 == found["matched_pages_gpu"] + found["matched_pages_cpu"] and 2 <= found["matched_pages_cpu"]
    assert found["pages_evicted"] and found["evict_us_per_page"] > 0
    assert 4 * PAGE / 48 == found["best_hit_share"]
    assert "hits below, 40 tokens" in done.stdout


def test_the_best_possible_has_both_tiers(kvkeep: Run, trace: Path, tmp_path: Path):
    """A page above and 24 below hold all there is: as many hits as a pool that knows the future."""
    words = ("--gpu-tokens", "4", "--cpu-tokens", "96", "--accounting", "reference")
    assert 0 == kvkeep("replay", "t.jsonl.gz", *words, *OPTIONS).returncode
    found = values(tmp_path)
    assert (0.5, 0.5) == (found["hit_share"], found["best_hit_share"])


def test_the_best_possible_can_be_left_out(kvkeep: Run, trace: Path, tmp_path: Path):
    """Then it is null in the report, and not in the table."""
    done = kvkeep("replay", "t.jsonl.gz", "--gpu-tokens", "20", "--no-best", *OPTIONS)
    assert (0, None) == (done.returncode, values(tmp_path)["best_hit_share"])
    assert "best possible" not in done.stdout


def test_bad_lines_are_refused_or_counted(kvkeep: Run, trace: Path, tmp_path: Path):
    """A line that is no request stops the command with its number, or is left out and said."""
    (tmp_path / "bad.jsonl").write_text(json.dumps(LINES[0]) + "\n{}\n" + json.dumps(LINES[2]) + "\n")
    done = kvkeep("replay", "bad.jsonl", "--gpu-tokens", "100", *OPTIONS)
    assert 2 == done.returncode
    assert "kvkeep: bad.jsonl line 2: prompt: is missing; --skip-bad leaves such lines out\n" == done.stderr
    assert not (tmp_path / "out.json").exists()
    done = kvkeep("replay", "bad.jsonl", "--gpu-tokens", "100", "--skip-bad", *OPTIONS)
    assert (0, 1, 2) == (done.returncode, values(tmp_path)["bad_lines"], values(tmp_path)["requests"])
    assert "1 malformed lines were left out" in done.stdout


def test_names_are_kept_where_the_user_says(
    kvkeep: Run, trace: Path, tmp_path: Path, kvkeep_environment: dict[str, str]
):
    """They go to $XDG_CACHE_HOME/kvkeep, or ~/.cache/kvkeep where that is not an absolute path."""
    for home, said, where in (("a", str(tmp_path / "b"), "b"), ("c", "relative", "c/.cache"), ("d", "", "d/.cache")):
        kvkeep_environment.update(HOME=str(tmp_path / home), XDG_CACHE_HOME=said)
        assert 0 == kvkeep("replay", "t.jsonl.gz", "--gpu-tokens", "100", *OPTIONS).returncode
        assert 1 == len(list((tmp_path / where / "kvkeep").glob(f"*-{PAGE}.names")))


@pytest.mark.parametrize(("package", "words"), [("rich", "t.jsonl.gz"), ("tokenizers", "chat.jsonl")])
def test_a_missing_package_names_the_extra(kvkeep: Run, trace: Path, tmp_path: Path, package: str, words: str):
    """Without a package that it needs the command says which extra to install; it needs no model library."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    before = f"import sys; sys.modules[{package!r}] = sys.modules['torch'] = sys.modules['transformers'] = None"
    done = kvkeep("replay", words, "--gpu-tokens", "999", "--tokenizer", "tokenizer.json", before=before)
    assert 2 == done.returncode
    assert f"kvkeep: this command needs {package}" in done.stderr and "kvkeep[replay]" in done.stderr
    assert 1 == done.stderr.count("\n"), done.stderr


def test_a_terminal_sees_progress(kvkeep_environment: dict[str, str], trace: Path, tmp_path: Path):
    """On a terminal a bar goes over the requests; it is gone at the end, and the table stays."""
    import subprocess

    lead, follow = pty.openpty()
    code = "import sys; from kvkeep.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "replay", "t.jsonl.gz", "--gpu-tokens", "100", "--page-size", str(PAGE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=kvkeep_environment, stdout=subprocess.PIPE, stderr=follow, timeout=120
    )
    os.close(follow)
    shown = os.read(lead, 1 << 16).decode()
    os.close(lead)
    assert 0 == done.returncode
    assert "replaying t.jsonl.gz" in shown and "0/4" in shown
    assert "hits on the GPU" in done.stdout.decode()
