"""What NVML answers, and what becomes of it: units, old drivers, errors, a device that vanishes.

Must not judge a time.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvkeep.errors import BadInput
from kvkeep.telemetry import nvml
from kvkeep.telemetry.counters import Answer, Counter, CounterMissing, NoAnswer, SourceLost
from kvkeep.telemetry.nvml import NvmlUnavailable, open_device
from tests.telemetry.recorded import Fails, Recording, TestClock, always, healthy, process
from tests.telemetry.stub_nvml import build_library, run_on


def recording(**others: Any) -> Recording:
    """A healthy device, but for these; None: the function is not there."""
    answers = healthy(**{name: answer for name, answer in others.items() if answer is not None})
    return Recording(TestClock(), {name: answer for name, answer in answers.items() if others.get(name, answer)})


def counter(library: Recording, name: str) -> Counter:
    counters = open_device(0, library).counters()
    return next(one for one in counters if any(field.name == name for field in one.fields))


def answers(library: Recording) -> dict[str, float | None]:
    """Every field, once."""
    device = open_device(0, library)
    out: dict[str, float | None] = {}
    for one in device.counters():
        out |= dict(zip([field.name for field in one.fields], one.read(), strict=True))
    return out


def read(library: Recording, name: str) -> Answer:
    return counter(library, name).read()


# ---------------------------------------------------------------------- what a device says


def test_numbers_are_in_the_units_that_their_names_say():
    """Milliwatts and millijoules become watts and joules; everything else is as it is said."""
    library = recording(nvmlDeviceGetTotalEnergyConsumption=always(7_123_456))
    assert {
        "gpu_memory_used_nbytes": 40 << 30,
        "gpu_busy_pct": 90,
        "gpu_memory_busy_pct": 40,
        "gpu_power_w": 499,
        "gpu_energy_j": 7123.456,
        "gpu_sm_clock_mhz": 1980,
        "gpu_memory_clock_mhz": 1980,
        "gpu_throttle_reasons": 4,
        "gpu_pcie_generation": 5,
        "gpu_pcie_width": 16,
        "gpu_pcie_rx_kb_s": 12_000_000,
        "gpu_pcie_tx_kb_s": 12_000_000,
        "gpu_processes": 2,
        "gpu_process_nbytes": 30 << 30,
        "gpu_other_processes_nbytes": 2 << 30,
    } == answers(library)


def test_each_clock_and_direction_is_asked_for_by_its_number():
    """Those of nvidia-ml-py: the multiprocessors' clock and the memory's, received bytes and sent ones."""
    library = recording()
    read(library, "gpu_sm_clock_mhz")
    assert {("handle 0", pynvml.NVML_CLOCK_SM)} == library.arguments.pop("nvmlDeviceGetClockInfo")
    read(library, "gpu_memory_clock_mhz")
    assert {("handle 0", pynvml.NVML_CLOCK_MEM)} == library.arguments.pop("nvmlDeviceGetClockInfo")
    read(library, "gpu_pcie_rx_kb_s")
    assert {("handle 0", pynvml.NVML_PCIE_UTIL_RX_BYTES)} == library.arguments.pop("nvmlDeviceGetPcieThroughput")
    read(library, "gpu_pcie_tx_kb_s")
    assert {("handle 0", pynvml.NVML_PCIE_UTIL_TX_BYTES)} == library.arguments.pop("nvmlDeviceGetPcieThroughput")


def test_numbers_that_are_written_down_are_those_of_the_library():
    """Error codes and the bits of throttling reasons."""
    assert {} == {
        code.name: code.value for code in nvml.Code if code.value != getattr(pynvml, f"NVML_ERROR_{code.name}")
    }
    named = {
        name.removeprefix("nvmlClocksEventReason"): getattr(pynvml, name)
        for name in dir(pynvml)
        if name.startswith("nvmlClocksEventReason") and getattr(pynvml, name) in nvml.THROTTLE_REASONS
    }
    for name, bit in named.items():
        if name != "UserDefinedClocks":  # another name of a bit
            assert name.lower() == nvml.THROTTLE_REASONS[bit].replace("_", "")
    assert set(nvml.THROTTLE_REASONS) == set(named.values())


def test_every_function_that_is_asked_for_is_in_nvidia_ml_py():
    """Of the version that is installed here."""
    source = Path(nvml.__file__).read_text()
    names = set(re.findall(r"\bnvml(?:Init|Shutdown|Device|System)\w*", source))
    assert len(names) > 18
    assert [] == sorted(name for name in names if not hasattr(pynvml, name))


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], (0, None, None)),
        ([process(1, 2 << 30)], (1, None, None)),
        ([process(os.getpid(), 5), process(1, 7), process(2, 8)], (3, 5, 15)),
        ([process(os.getpid(), 5)], (1, 5, 0)),
        ([process(os.getpid(), None), process(1, None)], (2, None, None)),
    ],
    ids=["nobody", "not this one", "this one and others", "this one alone", "without their memory"],
)
def test_memory_of_processes(listed: list[SimpleNamespace], expected: Answer):
    """Of this process, where the driver lists its number: in a container it may list others' numbers, and then
    nothing is known of it, nor of who the others are."""
    library = recording(nvmlDeviceGetComputeRunningProcesses=always(listed))
    assert expected == read(library, "gpu_processes")


def test_facts_of_the_device():
    """What it does not say is None, with the reason."""
    device = open_device(0, recording(nvmlDeviceGetEnforcedPowerLimit=Fails(3), nvmlDeviceGetName=always(b"Old one")))
    assert {
        "device": "Old one",
        "driver": "580.159.03",
        "nvml": "13.580.159.03",
        "memory_total_nbytes": 150 << 30,
        "power_limit_w": None,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
    } == device.facts
    assert {"power_limit_w": "nvmlDeviceGetEnforcedPowerLimit: Not Supported (3)"} == device.missing


# ---------------------------------------------------------------------- old drivers


def test_older_names_of_functions_are_tried():
    """Throttling reasons and processes had other names; the old driver, or the old library, does not have the new."""
    old_driver = recording(
        nvmlDeviceGetCurrentClocksEventReasons=Fails(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        nvmlDeviceGetCurrentClocksThrottleReasons=always(0x40),
    )
    assert (0x40,) == read(old_driver, "gpu_throttle_reasons")
    old_library = recording(
        nvmlDeviceGetCurrentClocksEventReasons=None, nvmlDeviceGetCurrentClocksThrottleReasons=always(0x20)
    )
    assert (0x20,) == read(old_library, "gpu_throttle_reasons")

    def mismatch(_: float) -> Any:
        raise pynvml.NVMLLibraryMismatchError("use a versioned function")

    versioned = recording(
        nvmlDeviceGetComputeRunningProcesses=mismatch,
        nvmlDeviceGetComputeRunningProcesses_v2=always([process(os.getpid(), 5)]),
    )
    assert (1, 5, 0) == read(versioned, "gpu_processes")
    with pytest.raises(CounterMissing, match="_v2: not in this nvidia-ml-py"):
        read(recording(nvmlDeviceGetComputeRunningProcesses=mismatch), "gpu_processes")


def test_new_function_that_a_device_does_not_support_is_not_replaced_by_the_old_one():
    """Then the old one would not know either; the reason is the new one's."""
    library = recording(
        nvmlDeviceGetCurrentClocksEventReasons=Fails(3), nvmlDeviceGetCurrentClocksThrottleReasons=always(0)
    )
    with pytest.raises(CounterMissing, match=r"EventReasons: Not Supported \(3\)"):
        read(library, "gpu_throttle_reasons")


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, CounterMissing, "Not Supported"),
        (pynvml.NVML_ERROR_NO_PERMISSION, CounterMissing, "Insufficient Permissions"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, CounterMissing, "Function Not Found"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, SourceLost, "GPU is lost"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, SourceLost, "GPU requires restart"),
        (pynvml.NVML_ERROR_UNINITIALIZED, SourceLost, "Uninitialized"),
        (pynvml.NVML_ERROR_GPU_NOT_FOUND, SourceLost, "28"),
        (pynvml.NVML_ERROR_UNKNOWN, NoAnswer, "Unknown Error"),
        (pynvml.NVML_ERROR_TIMEOUT, NoAnswer, "Timeout"),
        (pynvml.NVML_ERROR_NOT_READY, NoAnswer, "27"),
    ],
)
def test_errors_of_the_library_are_told_apart(code: int, expected: type[Exception], words: str):
    """There is no such counter, there is no answer now, there is no device; the words are the library's."""
    library = recording(nvmlDeviceGetPowerUsage=Fails(code))
    with pytest.raises(expected, match=f"nvmlDeviceGetPowerUsage: .*{words}"):
        read(library, "gpu_power_w")


def test_function_that_the_library_lacks_is_a_missing_counter():
    """As with an nvidia-ml-py that is older than the function."""
    with pytest.raises(CounterMissing, match="nvmlDeviceGetTotalEnergyConsumption: not in this nvidia-ml-py"):
        read(recording(nvmlDeviceGetTotalEnergyConsumption=None), "gpu_energy_j")


# ---------------------------------------------------------------------- no device


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (recording(nvmlInit=Fails(12)), "there is no NVIDIA driver here: libnvidia-ml.so.1 was not found"),
        (recording(nvmlInit=Fails(9)), "the NVIDIA driver is not loaded here"),
        (recording(nvmlInit=Fails(18)), "of another version than its libnvidia-ml"),
        (recording(nvmlInit=Fails(4)), "no permission"),
        (recording(nvmlInit=Fails(999)), r"NVML does not start: Unknown Error \(999\)"),
        (recording(nvmlDeviceGetCount=always(0)), "the NVIDIA driver finds no device here"),
        (recording(nvmlDeviceGetCount=Fails(999)), r"the NVIDIA device 0 cannot be opened: Unknown Error \(999\)"),
    ],
    ids=["no library", "not loaded", "mismatch", "permission", "unknown", "no device", "no count"],
)
def test_machine_without_a_device_is_told_so_in_one_line(library: Recording, says: str):
    """Which of driver, permission, device it lacks; what was opened is closed again."""
    with pytest.raises(NvmlUnavailable, match=says) as caught:
        open_device(0, library)
    assert 1 == len(str(caught.value).splitlines())
    assert 0 == library.opened


def test_device_that_is_not_there():
    """By number or by UUID; the one that is there is found both ways."""
    with pytest.raises(NvmlUnavailable, match="no NVIDIA device 2 here: 1 of them"):
        open_device(2, recording())
    with pytest.raises(NvmlUnavailable, match=r"device GPU-gone cannot be opened: Not Found \(6\)"):
        open_device("GPU-gone", recording())
    library = recording()
    open_device("GPU-here", library).close()
    assert 0 == library.opened


@pytest.mark.parametrize("device", [-1, "", 1.5, True])
def test_device_that_makes_no_sense_is_bad_input(device: Any):
    """One line, before anything is opened."""
    with pytest.raises(BadInput, match="device is"):
        open_device(device, recording())


def test_closing_a_device_that_is_lost_raises_nothing():
    """There is nothing left to do about it."""
    library = recording(nvmlShutdown=Fails(1))
    open_device(0, library).close()


def test_without_nvidia_ml_py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    """How to get it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match=r"not installed here \(pip install 'kvkeep\[telemetry\]'\)"):
        open_device(0)


# ---------------------------------------------------------------------- through the real library


def test_real_library_without_a_driver():
    """The nvidia-ml-py that is installed here says that there is no driver, and can be asked again."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is an NVIDIA driver here")
    for _ in range(2):
        with pytest.raises(NvmlUnavailable, match=r"no NVIDIA driver here: libnvidia-ml\.so\.1"):
            open_device(0)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build_library(tmp_path_factory.mktemp("nvml"))
    if library is None:
        pytest.skip("there is no C compiler here")
    return library


STUBBED = """
import json, os
from kvkeep.telemetry.nvml import NvmlUnavailable, open_device
from kvkeep.telemetry.counters import SourceLost
for name in (0, "GPU-here"):
    device = open_device(name)
    fields = {}
    for counter in device.counters():
        fields |= dict(zip([field.name for field in counter.fields], counter.read()))
    device.close()
print(json.dumps([device.facts, device.missing, fields]))
"""


def test_counters_through_the_real_bindings(stub: Path):
    """With an old driver's library under the real nvidia-ml-py every counter arrives, its structures unpacked."""
    done = run_on(stub, STUBBED)
    assert 0 == done.returncode, done.stderr
    facts, missing, fields = json.loads(done.stdout)
    assert ("NVIDIA Stub", "580.159.03", 80 << 30) == (facts["device"], facts["driver"], facts["memory_total_nbytes"])
    assert {"power_limit_w": "nvmlDeviceGetEnforcedPowerLimit: Not Supported (3)"} == missing
    assert round(fields.pop("gpu_energy_j") * 1000) - (5 << 40) in range(0, 3000, 1500), "more than 32 bits of it"
    assert {
        "gpu_memory_used_nbytes": 30 << 30,
        "gpu_busy_pct": 93,
        "gpu_memory_busy_pct": 41,
        "gpu_power_w": 431.5,
        "gpu_sm_clock_mhz": 1980,
        "gpu_memory_clock_mhz": 3201,
        "gpu_throttle_reasons": 0x24,
        "gpu_pcie_generation": 4,
        "gpu_pcie_width": 8,
        "gpu_pcie_rx_kb_s": 22_000_000,
        "gpu_pcie_tx_kb_s": 1_100_000,
        "gpu_processes": 2,
        "gpu_process_nbytes": 20 << 30,
        "gpu_other_processes_nbytes": 3 << 30,
    } == fields


RUN = """
import json, os, time
from kvkeep.telemetry.machine import MachineTelemetry
from kvkeep.telemetry.sampling import Settings
with MachineTelemetry(settings=Settings(interval_s=0.01, probe_s=0.05)) as telemetry:
    time.sleep(0.5)
    os.environ.update(json.loads(os.environ.get("LATER", "{}")))
    time.sleep(0.2)
print(json.dumps(telemetry.to_json()))
"""


def test_whole_run_through_the_real_bindings(stub: Path):
    """A run with a device; one that vanishes in the middle of it; a driver that is not loaded; no device."""

    def told(**environment: str) -> dict[str, Any]:
        done = run_on(stub, RUN, **environment)
        assert 0 == done.returncode, done.stderr
        out: dict[str, Any] = json.loads(done.stdout)
        return out

    fine = told()
    assert (True, None) == (fine["nvml"]["present"], fine["nvml"]["lost_s"])
    assert "energy counter" == fine["energy"]["how"] and fine["energy"]["joules"] > 0
    assert 22_000_000 == fine["pcie"][0]["nvml_kb_s"] and 0 < fine["pcie"][0]["windows"] <= 4
    assert {"sw_power_cap": 1.0, "sw_thermal_slowdown": 1.0} == fine["throttling"]["shares"]
    lost = told(LATER='{"LOST": "1"}')
    assert lost["began_s"] < lost["nvml"]["lost_s"] <= lost["ended_s"]
    assert "GPU is lost (15)" in lost["nvml"]["reason"] and None is lost["energy"]["joules"]
    unloaded = told(UNLOADED="1")["nvml"]
    assert (False, "the NVIDIA driver is not loaded here") == (unloaded["present"], unloaded["reason"])
    assert "the NVIDIA driver finds no device here" == told(DEVICES="0")["nvml"]["reason"]
