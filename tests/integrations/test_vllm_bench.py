"""What the serving bench measures with, over a real vLLM server of a tiny model: processes, logs, memory, answers.

Must not judge a time.  Where vLLM is not installed, these tests are skipped.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: run `make test-vllm`")

import psutil

from bench._vllm_client import ask, client
from bench._vllm_concurrent import run_storm
from bench._vllm_models import kv_nbytes_per_token, tiny_directory
from bench._vllm_passes import Store, changes, idle
from bench._vllm_server import Process, Served, ServerFailed, VllmSetup, cpu_s, parse_metrics, pss_nbytes
from bench._vllm_workloads import Ask, Workload, random_prompt

pytestmark = pytest.mark.slow  # real servers: each takes half a minute to start

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_directory(ROOT / ".cache")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    setup = VllmSetup(model, blocks=33, length_max=2048)
    with Served(setup, tmp_path_factory.mktemp("logs"), "tiny") as up:
        yield up
    assert [] == up.bad_lines()
    assert not psutil.pid_exists(up.vllm.pid)


def test_answer_tells_what_the_server_had_at_hand(server: Served):
    """A prompt that goes on from an earlier one is matched in full blocks, the metrics say the same, and the first
    token comes before the last."""
    prompt, talking = random_prompt(700, seed=1), client(server.url)
    before = server.metrics()
    first, second = ask(talking, prompt[:400], 16), ask(talking, prompt, 16)
    found = changes(before, server.metrics())
    assert (0, 384) == (first.cached_tokens, second.cached_tokens)
    assert (384.0, 1100.0) == (found["vllm:prefix_cache_hits_total"], found["vllm:prompt_tokens_total"])
    assert (400, 700) == (first.prompt_tokens, second.prompt_tokens)
    for answer in (first, second):
        assert 16 == len(answer.token_ids) and 0 < answer.ttft_s < answer.total_s and answer.text


def test_tiny_models_text_depends_on_its_whole_prompt(server: Served):
    """The first token of a prompt changes what is generated behind the 300th: wrong KV would show."""
    talking = client(server.url)
    one, other = list(random_prompt(300, seed=2)), list(random_prompt(300, seed=2))
    other[0] += 1
    texts = [ask(talking, prompt, 16).token_ids for prompt in (one, one, other)]
    assert texts[0] == texts[1] != texts[2]


def test_clients_that_go_away_leave_nothing_behind(server: Served):
    """All who stay are served, some went away, and nothing of vLLM's KV space is in use afterwards."""
    asks = tuple(Ask(n, turn, random_prompt(300 + 200 * turn, seed=10 + n)) for turn in range(3) for n in range(8))
    found = asyncio.run(run_storm(server.url, Workload("storm", asks, new_tokens=24), seed=3))
    assert [] == found.failures and 24 == sum(found.ended.values())
    assert found.ended["finished"] >= 8 and found.ended["aborted while decoding"] >= 1
    assert 0.0 == idle(server)["kv_usage"]


def test_kv_of_a_token_is_what_the_model_says(model: Path):
    """2 layers, K and V, 2 heads of 32, 2 bytes."""
    assert 2 * 2 * 2 * 32 * 2 == kv_nbytes_per_token(model)


# ---------------------------------------------------------------------- processes


def test_memory_and_time_of_a_process_include_its_children():
    """A child of a child that holds 200 MiB and computes for a while is counted; one that is gone counts nothing."""
    inner = "held = b'1' * (200 << 20); sum(range(10**7)); print('up', flush=True); input()"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {middle!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and b"up" in process.stdout.readline()
        assert 200 * MIB <= pss_nbytes([process.pid]) <= 300 * MIB
        assert cpu_s([process.pid]) > 0.05
        process.communicate(b"\n")
    assert 0 == pss_nbytes([process.pid])


def test_server_that_does_not_start_says_why(model: Path, tmp_path: Path):
    """With the last lines of its log, and without waiting for an answer that cannot come; nothing of it is left."""
    up = Served(VllmSetup(model, blocks=2, length_max=2048, more=("--no-such-option",)), tmp_path, "broken")
    with pytest.raises(ServerFailed, match="no-such-option"), up:
        pass
    assert not psutil.pid_exists(up.vllm.pid)


def test_log_is_looked_at_up_to_the_stop(tmp_path: Path):
    """Errors while a server serves count; what it says while it is told to end does not, and its children end too."""
    words = "import signal, subprocess, sys, time\n"
    words += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    words += "signal.signal(signal.SIGTERM, lambda *_: (print('ERROR at the end', flush=True), sys.exit(0)))\n"
    words += "print('ERROR meanwhile', child.pid, flush=True)\ntime.sleep(600)\n"
    process = Process("some", [sys.executable, "-c", words], tmp_path / "some.log")
    process.start()
    while "meanwhile" not in process.log.read_text():
        process.check_alive()
        time.sleep(0.05)
    process.stop()
    [line] = process.bad_lines()
    assert line.startswith("ERROR meanwhile") and "at the end" in process.log.read_text()
    child = int(line.split()[-1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ServerFailed, match="some ended"):
        process.check_alive()


def test_metrics_are_summed_over_engines_and_kept_by_source():
    """Labels that say where from are kept beside the sum; histograms' buckets are left out."""
    text = "# TYPE tokens counter\n"
    text += 'tokens_total{engine="0",source="a"} 1\ntokens_total{engine="1",source="a"} 2\n'
    text += 'tokens_total{engine="0",source="b"} 4\n'
    text += '# TYPE wait histogram\nwait_bucket{le="+Inf"} 1\nwait_count 1\nwait_sum 0.5\n'
    expected = {"tokens_total": 7.0, "tokens_total{source=a}": 3.0, "tokens_total{source=b}": 4.0}
    assert expected | {"wait_count": 1.0, "wait_sum": 0.5} == parse_metrics(text)
    before = {"kvkeep_x_total": 1.0, "kvkeep_y": 9.0, "kvkeep_pages_total": 8.0}
    after = {"kvkeep_x_total": 3.0, "kvkeep_y": 5.0, "kvkeep_pages_total": 8.0, "other": 1.0}
    assert {"kvkeep_x_total": 2.0, "kvkeep_y": 5.0, "kvkeep_pages_total": 8.0} == changes(before, after)


def test_pass_that_is_there_is_not_run_again(tmp_path: Path):
    """A file of the same key is read; one of another key, a damaged one and none are made."""
    store, made = Store(tmp_path), []

    def make() -> dict[str, int]:
        made.append(1)
        return {"recipe": 1, "value": len(made)}

    path = store.path("w", "c", 0)
    assert [1, 1] == [store.made(path, {"recipe": 1}, make)["value"] for _ in range(2)]
    assert 2 == store.made(path, {"recipe": 2}, make)["value"]
    path.write_text("{")
    assert 3 == store.made(path, {"recipe": 1}, make)["value"]
