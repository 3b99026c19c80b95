"""`kvkeep bench gpu_check`: all of it that needs no GPU, over the host backend, an emulated device and a driver stub.

Must not judge a time: that is the bench's own business.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import _gpu_children as children
from bench import _gpu_machine, gpu_check
from bench import _gpu_parts as parts
from bench import _gpu_sizes as sizes
from bench._gpu_path import Sizes as PathSizes
from bench._gpu_path import blocking, observed
from bench._gpu_summary import WIDTH, summary
from bench.gpu_check import NEEDED
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.report import Report
from kvkeep.tiers.layout import PageLayout
from tests.bench.gpu_machines import CpuMachine, LossyDevice, WaitingDevice
from tests.transfer.stub_driver import build_driver, run_on

ROOT = Path(__file__).resolve().parents[2]
TINY_LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=8, page_size=32, dtype="float16")
TINY = replace(
    sizes.SMOKE,
    rate_nbytes=4 * sizes.MIB,
    block_nbytes=sizes.MIB,
    page_nbytes=(sizes.MIB,),
    piece_nbytes=(32 * sizes.KIB,),
    rounds=2,
    trip=(TINY_LAYOUT, 6),
    pin_pages=1,
    path=PathSizes(pool=64, host=256, suspend=32, prompt=12),
    path_layout=TINY_LAYOUT,
    hits=(TINY_LAYOUT, 20, 2),
)
ON_DEVICE = parts.PARTS[:5]
NAMES = {parts.name_of(part) for part in parts.PARTS}


def check(machine: CpuMachine, chosen: Any = ON_DEVICE, deadline_s: float = 600.0) -> Report:
    before, parts.PARTS = parts.PARTS, chosen
    try:
        return parts.check(parts.Run(machine, TINY, time.monotonic() + deadline_s))
    finally:
        parts.PARTS = before


def rows_of(report: Report) -> dict[str, Any]:
    return {str(row["metric"]): row for row in report.rows}


@pytest.fixture(scope="module")
def emulated() -> Report:
    return check(CpuMachine())


@pytest.fixture(scope="module", params=["emulated", "host"])
def report(request: pytest.FixtureRequest) -> Report:
    if request.param == "emulated":
        made: Report = request.getfixturevalue("emulated")
        return made
    return check(CpuMachine(host_backend=True))


# ---------------------------------------------------------------------- what is measured


def test_every_row_that_was_asked_for_is_there(report: Report):
    """Floors, pages of one piece in and out and at once, pieces each way, hits, pinning; a number has its unit, and
    the machine is named."""
    metrics = report.metrics
    for name in ("floor_h2d_gbps", "floor_d2h_gbps", "floor_both_gbps", "h2d_1_mib_gbps", "d2h_1_mib_gbps"):
        assert "GB/s" == metrics[name].unit and (metrics[name].value or 0) > 0
    assert metrics.keys() >= {"both_1_mib_gbps", "pin_s_per_gib", "admit_lock_us", "admit_call_us", "hit_ready_us"}
    for way in ("dma", "batch"):
        assert {f"pieces_32_kib_{way}_h2d_gbps", f"pieces_32_kib_{way}_d2h_gbps"} <= metrics.keys()
    assert "none" == rows_of(report)["machine"]["device"]
    json.dumps(report.to_json(), allow_nan=False)


def test_rates_are_held_against_the_best_plain_copy(report: Report):
    """One direction 0.90, both 0.85 of the floor of that direction in the same run."""
    rows = rows_of(report)
    for name, ratio in (("h2d", 0.9), ("d2h", 0.9), ("both", 0.85)):
        floor, row = rows[f"floor_{name}_gbps"]["value"], rows[f"{name}_1_mib_gbps"]
        assert row["bound"] == pytest.approx(ratio * floor, abs=0.011)
        rounding = 0.02 / floor  # rates have two digits behind the point, and are low where others compute
        assert row["of_floor"] == pytest.approx(row["value"] / floor, abs=0.05 + rounding)
        assert row["reached"] == (row["of_floor"] >= ratio) or abs(row["of_floor"] - ratio) < 0.01 + rounding


def test_calibrations_choice_is_said(emulated: Report):
    """Of each size of pieces and direction."""
    rows = rows_of(emulated)
    assert {rows[f"pieces_32_kib_{direction}_chosen"]["note"] for direction in ("h2d", "d2h")} <= {
        "dma",
        "batch",
        "kernel",
    }


def test_limits_of_rates():
    """A rate under its share of the floor's best sample is missed; pieces and floors have no limit."""
    floors = {f"floor_{name}_gbps": [9.0, 10.0] for name in parts.DIRECTIONS}
    samples = floors | {"h2d_1_mib_gbps": [9.1] * 3, "d2h_1_mib_gbps": [8.9] * 3, "both_1_mib_gbps": [8.4, 8.6, 9.9]}
    rows = {row["metric"]: row for row in parts._rate_rows(samples | {"pieces_1_kib_dma_h2d_gbps": [0.1]})}
    judged = {name: row["reached"] for name, row in rows.items() if "reached" in row}
    assert {"h2d_1_mib_gbps": True, "d2h_1_mib_gbps": False, "both_1_mib_gbps": True} == judged
    assert 10.0 == rows["floor_h2d_gbps"]["value"]


def test_full_sizes_are_those_of_the_limits():
    """Pages of 1, 4 and 16 MiB; 64 pieces of 32, 64 and 256 KiB; every layout gives pages of its size."""
    assert (1, 4, 16) == tuple(nbytes // sizes.MIB for nbytes in sizes.FULL.page_nbytes)
    assert (32, 64, 256) == tuple(nbytes // sizes.KIB for nbytes in sizes.FULL.piece_nbytes)
    for nbytes in (*sizes.FULL.page_nbytes, *(64 * piece for piece in sizes.FULL.piece_nbytes)):
        assert nbytes == sizes.layout_of(nbytes // 64).page_nbytes
    assert sizes.FULL.device_tests and 1000 == sizes.FULL.hits[1]


# ---------------------------------------------------------------------- bytes


def test_pages_come_back(report: Report):
    """Each layout, way and kind of pinning is tried, and no page differs."""
    trips = {name: row for name, row in rows_of(report).items() if name.startswith("round_trip")}
    assert 27 == len(trips)
    assert {(0, True, None)} == {(row["value"], row["reached"], row.get("note")) for row in trips.values()}


def test_byte_that_does_not_arrive_is_seen():
    """A copy that loses one byte of each piece is a row with its pages, and the check fails."""
    lossy = check(CpuMachine(LossyDevice()), [parts._bytes, parts._hits])
    row = rows_of(lossy)["round_trip_page-major_dma_pinned"]
    assert not lossy.ok and (6, False) == (row["value"], row["reached"])
    assert False is rows_of(lossy)["hit_wrong_pages"]["reached"]


# ---------------------------------------------------------------------- the admit path


def test_admit_path_does_not_block(emulated: Report):
    """The path that is walked queues copies of both directions, and none of its calls waits or blocks."""
    rows = rows_of(emulated)
    assert (True, 2) == (rows["control_seen"]["reached"], rows["control_seen"]["value"])
    assert (True, []) == (rows["blocking_calls"]["reached"], rows["blocking_calls"]["blocking"])
    assert rows["blocking_calls"]["seen"]["cuMemcpyAsync"] > 20, "a hit and a suspension were copied"
    assert (True, []) == (rows["calls_that_waited"]["reached"], rows["calls_that_waited"]["waited"])


def test_calls_that_block_are_seen():
    """A copy that waits for the model's stream shows twice: by its name, and because the stream was done after it."""
    machine = CpuMachine(WaitingDevice())
    machine.api.machine = machine
    rows = rows_of(check(machine, [parts._admit_path]))
    assert (False, ["cuMemcpy_v2"]) == (rows["blocking_calls"]["reached"], rows["blocking_calls"]["blocking"])
    assert False is rows["calls_that_waited"]["reached"]
    assert "admit a hit in host memory" in rows["calls_that_waited"]["waited"]


def test_stream_that_is_idle_is_no_proof(monkeypatch: pytest.MonkeyPatch):
    """Where the model's stream has nothing to do a call that waits for it would not show, and the check fails."""
    machine = CpuMachine()
    busy = machine.busy

    def done_at_once() -> Any:
        event = busy()
        machine.end_busy(event)
        return event

    monkeypatch.setattr(machine, "busy", done_at_once)
    row = rows_of(check(machine, [parts._admit_path]))["calls_that_waited"]
    assert (False, []) == (row["reached"], row["waited"])


def test_observer_that_sees_nothing_is_no_proof(monkeypatch: pytest.MonkeyPatch):
    """Where a blocking call made on purpose is not seen, the check fails."""
    machine = CpuMachine()
    monkeypatch.setattr(machine, "block", lambda: None)
    report = check(machine, [parts._admit_path])
    assert not report.ok and False is rows_of(report)["control_seen"]["reached"]


def test_names_of_calls_that_block():
    """Waiting, synchronous copies and taking memory; not queueing, asking or launching. Versions are one call."""
    fine = [
        "cudaMemcpyAsync",
        "cuMemcpyHtoDAsync_v2",
        "cudaEventQuery",
        "cuLaunchKernel",
        "aten::copy_",
        "cuEventRecord",
    ]
    bad = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc"]
    bad += [
        "cudaFree",
        "cudaHostAlloc",
        "cudaHostRegister",
        "cuMemHostRegister_v2",
        "cuCtxSynchronize",
        "cuMemAlloc_v2",
    ]
    assert sorted(bad) == blocking([*fine, *bad, *bad])
    assert [] == blocking(fine)


def test_stretch_ends_where_it_should():
    """What is called in it is named; what is called beside it while the profiler runs is not: a profiler waits for its
    device when it ends."""
    import torch

    machine = CpuMachine()
    with observed(machine) as seen:
        torch.ones(3).cumsum(0)
        machine.api.note("cuBefore")
        with seen.stretch():
            torch.ones(3).flip(0)
            machine.api.note("cuWithin")
        machine.block()
        machine.api.note("cuAfter")
    assert seen.names["aten::flip"] and not seen.names["aten::cumsum"] and not blocking(seen.names)
    assert {"cuWithin": 1} == seen.cuda
    assert None is machine.calls


# ---------------------------------------------------------------------- parts that fail


def test_part_that_fails_does_not_take_the_others_along(capsys: pytest.CaptureFixture[str]):
    """It is a row that says why; the report is not ok."""

    def broken(*_: object) -> Iterator[parts.Row]:
        yield {"metric": "before", "value": 1, "unit": "calls"}
        raise RuntimeError("the device\nfell off")

    report = check(CpuMachine(), [broken, parts._pinning])
    assert "RuntimeError: the device fell off" == rows_of(report)["broken"]["note"]
    assert {"before", "pin_s_per_gib"} <= report.metrics.keys() and not report.ok
    assert "limits missed: broken" in capsys.readouterr().out


def test_parts_beyond_the_time_are_missed():
    """Nothing is measured after the deadline, and what was not measured is not reached."""
    report = check(CpuMachine(), deadline_s=-1.0)
    assert not report.ok and {} == report.metrics
    assert {"not run: the time was over"} == {row["note"] for row in report.rows[1:]}


@pytest.mark.parametrize("words", ["nothing", "rates,nothing"])
def test_part_to_skip_that_is_not_there_lists_the_parts(words: str):
    """One line, before anything is measured."""
    with pytest.raises(BadInput, match="no part 'nothing'; the parts are admit_path, bytes, rates"):
        parts.chosen(words)


def test_skipped_part_says_so_and_is_no_failure():
    """It has a row and no verdict."""
    report = parts.check(parts.Run(CpuMachine(), TINY, time.monotonic() + 600), skip=NAMES - {"pinning"})
    skipped = {name for name, row in rows_of(report).items() if row.get("note") == "skipped: --skip"}
    assert report.ok and NAMES - {"pinning"} == skipped and "pin_s_per_gib" in report.metrics
    assert "  rates        skipped  --skip" in list(summary(report))


# ---------------------------------------------------------------------- the model


def test_sessions_are_measured_with_each_tier():
    """A pool of a quarter of what they grow to: it hits less than both tiers do, which find all that was kept."""
    report = check(CpuMachine(), [parts._model])
    values = {name: metric.value or 0 for name, metric in report.metrics.items()}
    assert 0.25 == pytest.approx(values["model_pool_share"], abs=0.01)
    assert values["model_both_matched_share_cpu"] > 2 * values["model_gpu_matched_share_gpu"]
    assert all(values[f"model_ttft_{name}_ms"] > 0 for name in sizes.NAMES)
    wrong = rows_of(report)["model_wrong_positions"]
    assert (0, True) == (wrong["value"], wrong["reached"]) and wrong["compared"] > 300
    assert "not watched" == rows_of(report)["model_off_joules_per_1k"]["note"]


def test_bits_that_changed_between_two_turns_are_seen(monkeypatch: pytest.MonkeyPatch):
    """One bit of each page in the pool, after each request."""
    from bench import _gpu_model
    from kvkeep.engine.asking import ask as real

    def damaging(engine: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = real(engine, *arguments, **keywords)
        engine.pool.kv.view(torch.uint8)[..., 0] ^= 1
        return answer

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_gpu_model, "ask", damaging)
    report = check(CpuMachine(), [parts._model])
    row = rows_of(report)["model_wrong_positions"]
    assert not report.ok and row["value"] > 0 and False is row["reached"]


# ---------------------------------------------------------------------- telemetry beside it


def test_telemetry_lies_beside_the_parts(capsys: pytest.CaptureFixture[str]):
    """The device or why there is none, and the host's side; a part's beginning lies on the clock of the series."""
    before, parts.PARTS = parts.PARTS, (parts._pinning,)
    try:
        report = parts.watched(CpuMachine(), TINY, time.monotonic() + 600)
    finally:
        parts.PARTS = before
    row = rows_of(report)["telemetry"]
    told = row["telemetry"]
    assert report.ok and row["note"] in capsys.readouterr().out
    assert told["began_s"] <= rows_of(report)["pinning_s"]["began_s"] <= told["ended_s"]
    assert {"host_rss_nbytes", "host_cpu_s"} <= {one["name"] for one in told["series"]}
    assert "s" == report.metrics["telemetry_host_cpu_s"].unit and report.metrics["telemetry_host_cpu_s"].value
    assert "pin_s_per_gib" in report.metrics
    if not told["nvml"]["present"]:
        assert None is report.metrics["telemetry_gpu_energy_j"].value and "here" in row["note"]
    json.dumps(report.to_json(), allow_nan=False)


# ---------------------------------------------------------------------- the whole script


def test_script_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """All parts, on a processor instead of a device: a result, a page to look at, and a summary of one screen."""
    commands = {"engine_demo": "demo --model stories260k --sessions 2 --turns 2 --page-size 16 --host-pages 200"}
    torch = pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_gpu_machine, "CudaMachine", CpuMachine)
    monkeypatch.setattr(sizes, "SMOKE", replace(TINY, commands=commands))
    file = tmp_path / "gpu.json"
    assert gpu_check.main(["--smoke", "--skip", "rates,bytes", "--json", str(file)]) in (0, 1)
    result = json.loads(file.read_text())
    assert {row["part"] for row in result["rows"] if "part" in row} == NAMES
    assert {"model_ttft_ratio", "admit_lock_us", "telemetry_host_cpu_s"} <= result["metrics"].keys()
    assert result["metrics"]["model_ttft_ratio"]["value"] > 0
    page = file.with_suffix(".html").read_text()
    assert "<html" in page and "gpu_check" in page
    engine = next(row for row in result["rows"] if row["metric"] == "engine_demo")
    assert engine["reached"], engine
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("gpu_check on "))
    screen = lines[start : start + len(NAMES) + 2]
    assert max(map(len, screen)) <= WIDTH
    assert sorted(line.split()[0] for line in screen[1:]) == sorted([*NAMES, "telemetry"])


# ---------------------------------------------------------------------- commands of their own


def test_tests_are_counted(tmp_path: Path):
    """Passed, failed, skipped; without a device none of the device's tests counts as passed."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_cuda_fine(): pass\n"
        "def test_cuda_bad(): assert False\n"
        "def test_cuda_elsewhere(): pytest.skip('there is no CUDA device here')\n"
        "def test_other(): assert False\n"
    )
    found = children.run_tests(60.0, [str(file)])
    assert (1, 1, 1, 1, None) == (found.passed, found.failed, found.skipped, found.without_device, found.error)
    assert ("test_cuda_bad",) == found.failures
    assert "no test was chosen" == children.run_tests(60.0, [str(file)], "nothing of this name").error
    file.write_text("import time\ndef test_cuda_slow(): time.sleep(60)\n")
    assert "not over after 1 s" in str(children.run_tests(1.0, [str(file)]).error)


@pytest.mark.slow
def test_tests_of_the_device_are_found():
    """Here they are skipped for want of it; on a machine that has one they would run."""
    torch = pytest.importorskip("torch")
    found = children.run_tests(120.0)
    assert 0 == found.failed and None is found.error
    if not torch.cuda.is_available():
        assert (0, found.skipped) == (found.passed, found.without_device) and found.skipped > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine_demo", "engine_verify"])
def test_commands_of_the_engine_run(name: str):
    """What is started on a device runs on a processor too, and what it measured is in the row."""
    assert {"engine_demo", "engine_verify"} == sizes.COMMANDS.keys()
    done = children.run_command([*sizes.COMMANDS[name].split(), "--device", "cpu"], 200.0)
    assert (True, None) == (done.ok, done.error)
    assert done.metrics


@pytest.mark.slow
def test_command_that_cannot_run_says_why():
    """Its last words, and no metrics."""
    done = children.run_command(["demo", "--model", "nothing"], 60.0)
    assert not done.ok and "nothing" in str(done.error) and {} == done.metrics


# ---------------------------------------------------------------------- through the real bindings


STUBBED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from bench import _gpu_parts as parts
from bench._gpu_machine import RecordingApi
from kvkeep.transfer import cuda_api
from tests.bench.gpu_machines import CpuMachine
from tests.bench.test_gpu_check import TINY, ON_DEVICE

cuda_api.compile_kernel = lambda arch: Path(sys.argv[1]).read_bytes()

class Behind:
    done = False
    def __init__(self, api):
        with api.on_device():
            event = api.new_event()
            api.record(event, api.new_stream())
        self.cuda_event = int(event)
    def query(self):
        return self.done

class Stubbed(CpuMachine):
    def busy(self):
        return Behind(self.api)
    def end_busy(self, event):
        event.done = True

parts.PARTS = ON_DEVICE
report = parts.check(parts.Run(Stubbed(RecordingApi(0)), TINY, time.monotonic() + 600))
rows = {row["metric"]: row for row in report.rows}
print("admit path:", rows["blocking_calls"]["reached"], rows["calls_that_waited"]["reached"], rows["control_seen"])
print("seen:", sorted(rows["blocking_calls"]["seen"]))
print("trips:", sum(row["reached"] for name, row in rows.items() if name.startswith("round_trip")))
print("kernel:", rows["pieces_32_kib_kernel_d2h_gbps"]["value"] > 0)
"""


def test_check_runs_through_the_real_bindings(tmp_path: Path):
    """With a driver that does at once what it is told, every part that needs a device runs, each way copies, and the
    calls of the api are seen by their names."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    from kvkeep.transfer.kernel import CompilerMissing, compile_kernel

    driver = build_driver(tmp_path)
    if driver is None:
        pytest.skip("there is no C compiler here")
    try:
        (tmp_path / "kernel").write_bytes(compile_kernel("sm_90"))
    except CompilerMissing as missing:
        pytest.skip(f"NVRTC is not installed: {missing}")
    done = run_on(driver, STUBBED, str(tmp_path / "kernel"))
    assert 0 == done.returncode, done.stderr
    assert "admit path: True True" in done.stdout, done.stdout
    assert "'reached': True, 'seen': ['cudaDeviceSynchronize', 'cuMemAlloc', 'cuMemFree']" in done.stdout
    assert "trips: 27\n" in done.stdout and "kernel: True\n" in done.stdout
    for name in ("cuMemcpyAsync", "cuEventQuery", "cuEventRecord", "cuStreamWaitEvent"):
        assert name in done.stdout.partition("seen: [")[2]


# ---------------------------------------------------------------------- a machine without one


def test_machine_without_a_device_is_told_so():
    """One line and exit code 2, from the command and from the bare checkout; nothing is written."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(BadInput, match=r"no CUDA device here|not installed here"):
        run_bench("gpu_check", [])
    done = bare(sys.executable)
    assert (2, 1, "") == (done.returncode, len(done.stderr.splitlines()), done.stdout)
    assert "gpu_check" in done.stderr


def test_machine_without_packages_is_told_which():
    """Where nothing is installed the line names all that is missing and how to get it."""
    done = bare(sys.executable, "-S")
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines())), done.stderr
    assert [] == [name for name in NEEDED if name not in done.stderr]


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--minutes", "many"], ["--nonsense"]])
def test_bad_arguments_are_bad_input(arguments: list[str]):
    """They end in one line, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[0]):
        run_bench("gpu_check", arguments)


def bare(*python: str) -> "subprocess.CompletedProcess[str]":
    command = [*python, "-m", "bench.gpu_check"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={})
