"""`kvkeep size` from its command line: what it says, what it writes, what it refuses."""

import gzip
import json
import re
from pathlib import Path

import pytest

from kvkeep.cli import main
from kvkeep.errors import BadInput
from kvkeep.sizing.model import token_nbytes

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight sessions of four turns that take turns; each prompt is the one before it and 512 tokens more."""
    lines: list[str] = []
    for turn in range(1, 5):
        for session in range(8):
            ids = [1000 * session + i % 999 for i in range(512 * turn)]
            lines.append(json.dumps({"session": f"s{session}", "time_s": len(lines), "prompt": ids}))
    path = tmp_path / "turns.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def config(folder: Path, **more: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16", **more}))
    return path


def test_a_curve_a_sentence_and_a_picture(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what rotates fits: LRU has nothing, and twice the memory has three quarters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, picture = tmp_path / "size.json", tmp_path / "size.png"
    said = [str(trace), "--gpu", "4096", "--cpu", "4096", "--json", str(out), "--plot", str(picture)]
    assert 0 == main(["size", *said])
    text = capsys.readouterr().out
    assert "of host memory this workload hits" in text and "Twice the GPU tier" in text
    report = json.loads(out.read_text())
    value = {name: metric["value"] for name, metric in report["metrics"].items()}
    # Of 512 + 1024 + 1536 + 2048 prompt tokens a session, 512 + 1024 + 1536 have been there before.
    assert 0.6 == pytest.approx(report["rows"][-1]["lru"])
    assert value["hit_share_gpu"] <= value["hit_share"] <= value["hit_share_cpu_doubled"]
    assert 8 * 4 * 512 >= value["full_tokens"] > value["knee_tokens"] / 2
    assert all(row["lru"] <= row["best"] + 1e-12 for row in report["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    page = tmp_path / "size.html"
    assert 0 == main(["size", str(trace), "--gpu", "4096", "--no-best", "--plot", str(page)])
    assert "<svg" in page.read_text() and "best" not in page.read_text()


def test_other_orders_are_replayed(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of LRU at each size hits what the one pass says."""
    from kvkeep.sizing import sizing

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "size.json"
    assert 0 == main(["size", str(trace), "--gpu", "4096", "--json", str(out)])
    monkeypatch.setattr(sizing, "LRU", "another name")
    again = tmp_path / "again.json"
    assert 0 == main(["size", str(trace), "--gpu", "4096", "--json", str(again)])
    first, second = (json.loads(path.read_text())["rows"] for path in (out, again))
    assert first == second


def test_sizes_are_gib_with_a_model(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token of the model is 32 * 2 * 8 * 128 * 2 bytes; 1 GiB of it is 8,192 tokens."""
    assert 131072 == token_nbytes(config(tmp_path))
    assert 0 == main(["size", str(trace), "--gpu", "1", "--model", str(config(tmp_path))])
    assert "1 GiB" in capsys.readouterr().out
    assert 262144 == token_nbytes(config(tmp_path), "float32")
    assert 131072 // 8 == token_nbytes(config(tmp_path, text_config={"num_key_value_heads": 1}))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "--kv-dtype"),
    ],
)
def test_a_model_that_is_not_understood_is_refused(tmp_path: Path, more: dict[str, object], what: str) -> None:
    """Its KV is not guessed."""
    with pytest.raises(BadInput, match=what):
        token_nbytes(config(tmp_path, **more))


def test_what_was_left_out_of_the_trace_is_said(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad line and a file cut short are refused, and with --skip-bad told of, as `replay` does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = trace.read_bytes().splitlines(keepends=True)
    packed = gzip.compress(b"".join([*lines[:5], b"{}\n", *lines[5:]]), mtime=0)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(packed[:-40])
    said = ["size", str(cut), "--gpu", "4096", "--eviction", "lru", "--json", str(tmp_path / "out.json")]
    assert 2 == main(said)
    error = capsys.readouterr().err
    assert "cut.jsonl.gz is cut short" in error and "--skip-bad" in error and 1 == error.count("\n")
    assert 0 == main([*said, "--skip-bad"])
    text = capsys.readouterr().out
    assert "1 malformed lines were left out" in text and "cut.jsonl.gz is cut short" in text
    report = json.loads((tmp_path / "out.json").read_text())
    assert 1 == report["metrics"]["bad_lines"]["value"] and "cut short" in report["rows"][0]["note"]


def test_the_table_and_the_picture_mark_the_sizes_that_matter(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user has, either tier doubled, and the knee; for rhythm beside LRU, in GiB, told in a sentence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    page = tmp_path / "size.html"
    said = ["size", str(trace), "--gpu", "0.125", "--cpu", "0.5", "--model", str(config(tmp_path)), "--plot", str(page)]
    assert 0 == main(said)
    text, picture = capsys.readouterr().out, page.read_text()
    for mark in ("your GPU tier", "your tiers", "GPU tier doubled", "host tier doubled", "the knee"):
        assert mark in text and mark in picture
    assert "rhythm" in text and "rhythm" in picture and "(order rhythm)" in text
    assert re.search(r"With [0-9.]+ GiB of host memory this workload hits [0-9.]+ %; today [0-9.]+ %\.", text)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (["--gpu", "100"], "a page of 128 tokens"),
        (["--gpu", "4096.5"], "--model"),
        (["--gpu", "4096", "--eviction", "lru,fifo"], "fifo"),
        (["--gpu", "4096", "--plot", "size.pdf"], ".png or .html"),
        (["--gpu", "4096", "--plot", "nowhere/size.png"], "no directory"),
        (["--gpu", "1", "--model", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_line(trace: Path, capsys: pytest.CaptureFixture[str], said: list[str], what: str) -> None:
    """Exit code 2, one line that says what would be right."""
    assert 2 == main(["size", str(trace), *said])
    error = capsys.readouterr().err
    assert what in error and 1 == error.count("\n")
