"""The main job, end to end on the smallest real model."""

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvkeep import cli
from tests.cli.conftest import TINY, Run

torch = pytest.importorskip("torch")

from kvkeep.engine.demo.measure import Turn, metrics_of  # noqa: E402 (needs torch)
from kvkeep.engine.demo.script import ChatFormat, Excerpt, Script  # noqa: E402
from kvkeep.tiers.gpu_pool import GpuPool  # noqa: E402

SMALL = (*TINY, "--sessions", "3", "--turns", "3", "--max-new-tokens", "6")


def test_the_demo_answers_from_kept_pages_and_says_the_same(kvkeep: Run, tmp_path: Path):
    """Sessions in rotation find their own earlier pages, outputs are identical, and every number is in the file."""
    done = kvkeep("demo", *SMALL, "--json", "out.json")
    assert (0, "") == (done.returncode, done.stderr)
    assert "outputs identical: yes" in done.stdout
    got = json.loads((tmp_path / "out.json").read_text())
    assert ("demo", True) == (got["command"], got["ok"])
    assert {"ttft_ratio_median", "matched_share", "outputs_identical", "no_reuse_overhead"} <= set(got["metrics"])
    assert 1 == got["metrics"]["outputs_identical"]["value"]
    assert got["metrics"]["no_reuse_overhead"]["samples"] >= 10
    assert [1, 1, 1, 2, 2, 2, 3, 3, 3] == [row["turn"] for row in got["rows"]]
    assert got["rows"][0]["session"] == got["rows"][3]["session"] != got["rows"][1]["session"]
    matched = {(row["session"], row["turn"]): row["matched_tokens"] for row in got["rows"]}
    for row in got["rows"]:
        assert row["matched_tokens"] % 16 == 0 and row["matched_tokens"] < row["prompt_tokens"]
        assert row["ttft_without_ms"] == min(row["ttft_without_same_arithmetic_ms"], row["ttft_without_fastest_ms"])
        if row["turn"] > 1:
            # The prompt and all but the last token of the answer of the turn before were left in full pages.
            before = next(r for r in got["rows"] if (r["session"], r["turn"]) == (row["session"], row["turn"] - 1))
            stored = before["prompt_tokens"] + before["output_tokens"] - 1
            assert stored // 16 * 16 == matched[row["session"], row["turn"]]


def test_sessions_that_push_each_other_out_come_back_from_host_memory(kvkeep: Run, tmp_path: Path):
    """With a pool too small for the sessions, hits come from a tier in host memory, and outputs stay the same."""
    done = kvkeep("demo", *TINY, "--sessions", "4", "--turns", "3", "--max-new-tokens", "6", "--pool-pages", "36",
                  "--host-pages", "200", "--json", "out.json")  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    got = json.loads((tmp_path / "out.json").read_text())
    assert 1 == got["metrics"]["outputs_identical"]["value"]
    assert got["metrics"]["matched_host_share"]["value"] > 0
    assert {"ttft_ratio_cpu_hit", "ttft_cpu_over_gpu_hit", "stalls"} <= set(got["metrics"])
    assert all(0 <= row["matched_host_tokens"] <= row["matched_tokens"] for row in got["rows"])
    assert all(row["ttft_gpu_hit_ms"] > 0 for row in got["rows"])


@pytest.mark.slow
def test_private_sessions_change_places_whole_and_nobody_waits_for_room(kvkeep: Run, tmp_path: Path):
    """In a pool of a quarter of what they grow to, each turn's hit is all in host memory, and none waits for room."""
    done = kvkeep("demo", *TINY, "--sessions", "4", "--turns", "3", "--max-new-tokens", "6", "--pool-pages", "32",
                  "--host-pages", "160", "--private", "--json", "out.json")  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    assert "a pool of 32 pages, 25% of the 128 that the sessions grow to" in done.stdout
    got = json.loads((tmp_path / "out.json").read_text())
    value = {name: metric["value"] for name, metric in got["metrics"].items()}
    assert (1, 0, 0) == (value["outputs_identical"], value["stalls"], value["stall_s"])
    assert pytest.approx(0.25) == value["pool_share"]
    for row in got["rows"]:
        assert row["matched_tokens"] > 0 or row["turn"] == 1
        if row["matched_tokens"] == row["matched_gpu_hit_tokens"]:  # one that is cheap to compute may be computed
            assert row["matched_tokens"] == row["matched_host_tokens"]


def test_pages_that_went_bad_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None):
    """When kept pages are zeroed between requests, the outputs differ, the demo says so and ends with exit code 1."""
    from kvkeep.cache import TieredCache

    right = TieredCache.finish

    def finish_and_lose(cache: TieredCache, lease: object, kv_len: int) -> None:
        right(cache, lease, kv_len)  # type: ignore[arg-type]
        cache.pool.kv.zero_()

    monkeypatch.setattr(TieredCache, "finish", finish_and_lose)
    assert 1 == cli.main(["demo", *SMALL, "--json", str(tmp_path / "out.json")])
    got = json.loads((tmp_path / "out.json").read_text())
    assert not got["ok"]
    assert 0 == got["metrics"]["outputs_identical"]["value"]


@pytest.mark.slow
def test_ctrl_c_leaves_a_clean_terminal_and_what_was_measured(kvkeep_environment: dict[str, str], tmp_path: Path):
    """Interrupted on a terminal: the cursor is back, the turns so far are shown and written, exit code 130."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvkeep.cli", "demo", *TINY, "--turns", "12", "--json", "out.json"],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        cwd=tmp_path,
        env={**kvkeep_environment, "TERM": "xterm"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    os.close(theirs)
    raw, deadline_s = b"", time.monotonic() + 200
    while b"task12" not in raw:  # the second turn is in the table
        assert time.monotonic() < deadline_s and process.poll() is None, raw.decode(errors="replace")
        raw += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(ours, 65536):
            raw += chunk
    except OSError:  # the other end has closed
        pass
    shown = raw.decode()
    os.close(ours)
    assert 130 == process.wait(timeout=60)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor stayed hidden"
    assert "interrupted: this is what was measured so far" in shown
    assert "Traceback" not in shown
    got = json.loads((tmp_path / "out.json").read_text())
    assert not got["ok"]
    assert 1 == got["metrics"]["interrupted"]["value"]
    assert 1 <= len(got["rows"]) < 36


def test_an_interrupt_before_the_first_turn_still_writes_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C while the model loads: exit code 130, a report without rows that is marked as interrupted."""

    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeep.engine.loader.load_model", interrupted)
    for command in ("demo", "verify"):
        target = tmp_path / f"{command}.json"
        assert 130 == cli.main([command, *TINY, "--json", str(target)])
        got = json.loads(target.read_text())
        assert ([], False) == (got["rows"], got["ok"])
        assert 1 == got["metrics"]["interrupted"]["value"]


def turn(prompt_tokens: int, matched: int, kept: float, exact: float, fastest: float) -> Turn:
    return Turn("s", 1, prompt_tokens, matched, 8, True, kept, exact, fastest)


def test_ratios_are_against_the_faster_baseline_and_over_long_cached_turns_only():
    """`ttft_ratio_median` takes turns of 1,500 tokens and more that matched, each against its faster baseline."""
    turns = [
        turn(1_499, 1_408, kept=1, exact=90, fastest=80),  # too short
        turn(1_600, 0, kept=80, exact=90, fastest=80),  # nothing matched
        turn(1_500, 1_408, kept=10, exact=90, fastest=60),  # 6
        turn(1_700, 1_408, kept=10, exact=70, fastest=80),  # 7
        turn(1_800, 1_408, kept=10, exact=90, fastest=90),  # 9
    ]
    metrics = metrics_of(turns, no_reuse=[1.0, 1.02, 1.01])
    assert (7, 3) == (metrics["ttft_ratio_median"].value, metrics["ttft_ratio_median"].samples)
    assert pytest.approx(0.01) == metrics["no_reuse_overhead"].value
    assert pytest.approx(4 * 1_408 / 8_099) == metrics["matched_share"].value
    assert pytest.approx((80 + 80 + 60 + 70 + 90 - 111) / 1000) == metrics["time_saved_s"].value


def test_what_was_not_measured_has_no_value():
    """Without turns the metrics are there and null; outputs nobody compared are not called identical."""
    metrics = metrics_of([], [])
    for name in ("ttft_ratio_median", "matched_share", "no_reuse_overhead"):
        assert metrics[name].value is None
    assert 0 == metrics["outputs_identical"].value


def words(text: str) -> list[int]:
    """A toy tokenizer: an id a character, the ChatML marks one id each."""
    ids = []
    for part in text.replace("<|im_start|>", "\0S\0").replace("<|im_end|>", "\0E\0").split("\0"):
        ids += [1] if part == "S" else [2] if part == "E" else [ord(c) for c in part]
    return ids


def test_a_prompt_is_an_exact_prefix_of_the_next():
    """Each prompt begins with the prompt and the very output ids of the turn before, whatever the model said."""
    chat = ChatFormat.of(words, eos_ids=(2,))
    script = Script.write(Excerpt.bundled(), chat, sessions=2, turns=4, max_new_tokens=8, positions=10**6)
    assert not script.cut
    rng = random.Random(5)
    for conversation in script.conversations:
        before: list[int] = []
        for _ in range(4):
            prompt = conversation.next_prompt()
            assert before == prompt[: len(before)]
            output = [rng.randrange(3, 500) for _ in range(rng.randrange(8))] + rng.choice([[], [2]])
            conversation.answered(output)
            before = prompt + output
        assert 5 == conversation.ids.count(2) - 4, "system, four messages and four answers end with one mark each"
        assert len(conversation.ids) <= script.tokens_max


@pytest.mark.parametrize("positions", [400, 512, 1024])
def test_texts_are_cut_to_fit_a_small_model(positions: int):
    """No session outgrows the model's positions, and every message keeps something."""
    chat = ChatFormat.of(words, eos_ids=(2,))
    script = Script.write(Excerpt.bundled(), chat, sessions=3, turns=5, max_new_tokens=8, positions=positions)
    assert script.cut and script.tokens_max <= positions
    for conversation in script.conversations:
        for _ in range(5):
            assert len(conversation.next_prompt()) + 8 <= positions
            conversation.answered([5] * 8)


def test_the_bundled_trace_is_what_its_source_says(shared_dir: Path, repo_root: Path):
    """Every message of the excerpt is in its source's session, in order; its licence lies beside it."""
    import gzip
    import lzma

    import numpy as np
    from tokenizers import Tokenizer

    data = repo_root / "kvkeep" / "engine" / "data"
    assert (data / "tau_retail.json").stat().st_size < 300_000
    assert "Copyright (c) 2024 Sierra" in (data / "LICENSE.tau-bench.txt").read_text()
    packed = (shared_dir / "models" / "smollm2_tokenizer.json.gz").read_bytes()
    tokenizer = Tokenizer.from_str(gzip.decompress(packed).decode())
    traces = shared_dir / "traces"
    stream = np.frombuffer(lzma.decompress((traces / "tau_retail_200.tokens.u16.xz").read_bytes()), "<u2")
    lines = gzip.decompress((traces / "tau_retail_200.sessions.jsonl.gz").read_bytes()).splitlines()
    sources = {line["id"]: line for line in map(json.loads, lines)}
    excerpt = Excerpt.bundled()
    assert 24 == len(excerpt.sessions)
    for name, messages in excerpt.sessions.items():
        assert 12 == len(messages)
        at, length = sources[name]["off"], sources[name]["len"]
        text = tokenizer.decode(stream[at : at + length].tolist(), skip_special_tokens=False)
        assert text.startswith(f"<|im_start|>system\n{excerpt.system}<|im_end|>")
        place = 0
        for message in messages:
            place = text.index(f"<|im_start|>{message.role}\n{message.content}<|im_end|>", place) + 1


def test_the_pool_of_the_demo_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, one_thread: None):
    """`--pool-pages` sizes the pool of the cached run, and no pool of another engine is larger than a request."""
    pages: list[int] = []
    right = GpuPool.allocate.__func__  # type: ignore[attr-defined]

    def allocate(cls: type[GpuPool], layout: object, count: int, device: str = "cpu") -> GpuPool:
        pages.append(count)
        pool: GpuPool = right(cls, layout, count, device)
        return pool

    monkeypatch.setattr(GpuPool, "allocate", classmethod(allocate))
    assert 0 == cli.main(["demo", *SMALL, "--pool-pages", "77"])
    assert [77] == [count for count in pages if count > 32]
