"""Whole runs of the telemetry: over recorded answers of NVML, and really on the machine that the tests run on.

Must not know how anything is stored.  Times of recorded runs are those of the test's clock.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pynvml
import pytest

from kvkeep.errors import InvariantViolation
from kvkeep.report import Metric, Report
from kvkeep.telemetry.energy import EnergyReading, energy_between, joules_per_1k_prompt_tokens
from kvkeep.telemetry.machine import MachineTelemetry
from kvkeep.telemetry.sampling import Settings
from kvkeep.transfer.tally import Copied, TransferStats
from tests.telemetry.recorded import Answer, Fails, Recording, TestClock, always, changing, from_then_on, healthy
from tests.telemetry.rigs import PAGE_NBYTES, TwoTiers, prompt

SETTINGS = Settings(interval_s=0.1, probe_s=1.5)


class Run:
    """A run over recorded answers.   marks: energy readings on the way, at seconds from the start."""

    def __init__(
        self,
        answers: Mapping[str, Answer],
        seconds: float = 10.0,
        marks: tuple[float, ...] = (),
        transfers: Callable[[TestClock], Callable[[], TransferStats]] | None = None,
    ) -> None:
        self.clock = clock = TestClock()
        self.library = Recording(clock, answers)
        telemetry = MachineTelemetry(
            library=self.library,
            transfers=None if transfers is None else transfers(clock),
            settings=SETTINGS,
            clock=clock,
            cpu_clock=lambda: 0.0,
            stopping=clock,
        )
        self.readings: list[EnergyReading] = []
        with telemetry:
            self.began_s = clock()
            for at_s in marks:
                clock.run_to(self.began_s + at_s)
                self.readings.append(telemetry.energy())
            clock.run_to(self.began_s + seconds)
        self.figures = telemetry.figures()
        self.told = telemetry.to_json()
        self.series = {one["name"]: one for one in self.told["series"]}


def at(since_s: float, then: Answer, before: Answer) -> Answer:
    return from_then_on((0.0, before), (1000.0 + since_s, then))


# ---------------------------------------------------------------------- a device that works


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(healthy())


def test_everything_is_a_series_with_its_pace(run: Run):
    """Each with samples over the whole run, in order, and how often its counter changes; nothing is missing."""
    gpu = {name: one for name, one in run.series.items() if one["source"] == "nvml"}
    assert 15 == len(gpu)
    for name, one in gpu.items():
        assert (None, 0, 0) == (one["reason"], one["failures"], one["missing_samples"]), name
        assert one["samples"] == len(one["times_s"]) == len(one["values"]) >= 20, name
        assert sorted(one["times_s"]) == one["times_s"], name
        assert one["times_s"][0] < run.began_s + 0.2 and one["times_s"][-1] > run.began_s + 9.5, name
    assert pytest.approx(0.1, abs=0.005) == gpu["gpu_energy_j"]["update_s"]
    assert pytest.approx(0.2, abs=0.005) == gpu["gpu_busy_pct"]["update_s"]
    assert None is gpu["gpu_pcie_width"]["update_s"]
    assert "not found out: 0 changes in 1.5 s before the run" == gpu["gpu_pcie_width"]["update"]
    assert "counted over 0.02 s while it is read" == gpu["gpu_pcie_rx_kb_s"]["update"]


def test_no_counter_is_asked_oftener_than_it_changes(run: Run):
    """As the library saw it: utilisation changes each 0.2 s, the link is counted for 20 ms each 0.2 s at most."""
    slow = [time_s for time_s in run.library.asked["nvmlDeviceGetUtilizationRates"] if time_s > run.began_s]
    assert 40 < len(slow) <= 51
    windows = [time_s for time_s in run.library.asked["nvmlDeviceGetPcieThroughput"] if time_s > run.began_s]
    assert 60 < len(windows) <= 92


def test_energy_of_the_run_is_the_counters(run: Run):
    """Power is beside it, and both agree."""
    energy = run.told["energy"]
    assert ("energy counter", None) == (energy["how"], energy["reason"])
    assert 500.0 * 10 == pytest.approx(energy["joules"], abs=100.0)
    assert 500.0 == pytest.approx(run.series["gpu_power_w"]["mean"], abs=1.0)
    assert (energy["joules"], "J") == run.figures["gpu_energy_j"]


def test_device_is_named_without_its_serial(run: Run):
    """A report is made to be shared: what the device is, not which."""
    assert {
        "present": True,
        "reason": None,
        "lost_s": None,
        "device": "NVIDIA H200",
        "driver": "580.159.03",
        "nvml": "13.580.159.03",
        "memory_total_nbytes": 150 << 30,
        "power_limit_w": 700,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "missing": {},
    } == run.told["nvml"]


def test_throttling_is_told_by_reason(run: Run):
    """Of the samples, the share with each reason; a bit that nobody knows keeps its number."""
    assert {"sw_power_cap"} == set(run.told["throttling"]["shares"])
    assert 0.25 == pytest.approx(run.told["throttling"]["shares"]["sw_power_cap"], abs=0.06)
    odd = Run(healthy(nvmlDeviceGetCurrentClocksEventReasons=always(0x40 | 1 << 40)), 2.0).told["throttling"]
    assert {"hw_thermal_slowdown": 1.0, f"{1 << 40:#x}": 1.0} == odd["shares"]


def test_host_is_told_beside_the_device(run: Run):
    """Its side is there with a device too."""
    assert {"host_rss_nbytes", "host_cpu_s", "children_cpu_s"} <= run.series.keys()
    assert run.series["host_rss_nbytes"]["most"] == run.figures["host_rss_peak_nbytes"][0]


def test_library_is_closed_and_no_thread_left(run: Run):
    """After the run."""
    assert 0 == run.library.opened
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("kvkeep-telemetry")]


# ---------------------------------------------------------------------- energy on the way


def test_joules_of_prompt_tokens_between_two_readings():
    """Those of the device between the moments at which it was asked, not between samples."""
    before, after = Run(healthy(), marks=(2.0, 7.0)).readings
    assert 5.0 == pytest.approx(after.time_s - before.time_s, abs=0.03)
    told = joules_per_1k_prompt_tokens(before, after, 50_000)
    assert ("energy counter", None) == (told.how, told.reason)
    assert 500.0 * 5 / 50 == pytest.approx(told.value, abs=1.0)


def test_reading_is_of_the_moment():
    """Work that ends between two samples takes its energy along: the counter is asked, not the last sample."""
    clock = TestClock()
    moment = always(5_000_000)
    library = Recording(clock, healthy(nvmlDeviceGetTotalEnergyConsumption=lambda now_s: moment(now_s)))
    with MachineTelemetry(library=library, clock=clock, cpu_clock=lambda: 0.0, stopping=clock) as telemetry:
        before = telemetry.energy()
        moment = always(5_777_000)
        assert 777.0 == (telemetry.energy().counter_j or 0.0) - (before.counter_j or 0.0)


def test_without_an_energy_counter_power_is_added_up():
    """Labelled so, with the reason in the counter's series; as before Volta."""
    run = Run(healthy(nvmlDeviceGetTotalEnergyConsumption=Fails(pynvml.NVML_ERROR_NOT_SUPPORTED)), marks=(2.0, 7.0))
    before, after = run.readings
    told = joules_per_1k_prompt_tokens(before, after, 50_000)
    assert "integrated power" == told.how == run.told["energy"]["how"]
    assert 500.0 * 5 / 50 == pytest.approx(told.value, abs=1.0)
    assert "nvmlDeviceGetTotalEnergyConsumption: Not Supported (3)" == run.series["gpu_energy_j"]["reason"]


def test_energy_counter_that_starts_again_is_no_energy():
    """As when the driver is loaded anew: the span takes the power instead, a later span the counter again."""
    count = changing(0.1, lambda n: n * 50_000)
    reset = at(6.0, lambda now_s: count(now_s) - count(1006.0), count)
    run = Run(healthy(nvmlDeviceGetTotalEnergyConsumption=reset), 12.0, marks=(3.0, 8.0, 11.0))
    first, second, third = run.readings
    across, behind = energy_between(first, second), energy_between(second, third)
    assert ("integrated power", "energy counter") == (across.how, behind.how)
    assert 2500.0 == pytest.approx(across.joules, abs=10.0) and 1500.0 == pytest.approx(behind.joules, abs=100.0)
    row = run.series["gpu_energy_j"]
    assert (None, 1) == (row["rise"], row["falls"])


def test_span_of_few_updates_is_not_told():
    """A counter that changes each 0.7 s says nothing exact about 2 s."""
    slow = changing(0.4, lambda n: n * 200_000)
    before, after = Run(
        healthy(nvmlDeviceGetTotalEnergyConsumption=slow, nvmlDeviceGetPowerUsage=Fails(3)), marks=(2.0, 4.0)
    ).readings
    told = joules_per_1k_prompt_tokens(before, after, 1000)
    assert None is told.value and "are less than 10 of its updates" in str(told.reason)


# ---------------------------------------------------------------------- a device that does not


def test_what_a_device_does_not_support_is_none_with_the_reason():
    """A workstation card in a virtual machine, say; the rest is there."""
    gone = {
        name: Fails(pynvml.NVML_ERROR_NOT_SUPPORTED)
        for name in (
            "nvmlDeviceGetPcieThroughput",
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetComputeRunningProcesses",
        )
    }
    run = Run(healthy(**gone), 5.0)
    for name in ("gpu_pcie_rx_kb_s", "gpu_power_w", "gpu_energy_j", "gpu_throttle_reasons", "gpu_process_nbytes"):
        row = run.series[name]
        assert (0, [], None, None) == (row["samples"], row["values"], row["first"], row["last"]), name
        assert row["reason"].endswith(": Not Supported (3)"), name
    assert None is run.told["energy"]["joules"] and "Not Supported" in run.told["energy"]["reason"]
    assert None is run.told["throttling"]["shares"] and "Not Supported" in run.told["throttling"]["reason"]
    for link in run.told["pcie"]:
        assert (None, 0) == (link["nvml_kb_s"], link["windows"]) and "Not Supported" in link["nvml_reason"]
    assert run.series["gpu_memory_used_nbytes"]["most"] == 40 << 30
    assert (None, "W") == run.figures["gpu_power_w"]


def test_device_that_vanishes_in_the_middle():
    """What was sampled before stays; when and why is told; the host goes on; no energy is made up."""
    lost = Fails(pynvml.NVML_ERROR_GPU_IS_LOST)
    run = Run({name: at(6.0, lost, answer) for name, answer in healthy().items()}, 10.0, marks=(3.0, 8.0))
    assert "GPU is lost (15)" in run.told["nvml"]["reason"] and run.told["nvml"]["present"]
    assert 1006.0 <= run.told["nvml"]["lost_s"] < 1006.3
    power = run.series["gpu_power_w"]
    assert "GPU is lost" in power["reason"] and power["samples"] > 30
    assert power["times_s"][-1] < 1006.0 and None not in power["values"]
    assert run.series["host_rss_nbytes"]["times_s"][-1] > run.began_s + 9.9
    before, after = run.readings
    told = joules_per_1k_prompt_tokens(before, after, 1000)
    assert None is told.value and "GPU is lost" in str(told.reason)
    assert None is run.told["energy"]["joules"]
    for name, times in run.library.asked.items():
        assert not name.startswith("nvmlDevice") or max(times) < 1006.3, f"{name} of a device that is gone"


def test_errors_that_pass_are_gaps():
    """The samples around them stay; over the gap no power is added up."""
    unknown, power = Fails(pynvml.NVML_ERROR_UNKNOWN), healthy()["nvmlDeviceGetPowerUsage"]
    sometimes = from_then_on((0.0, power), (1004.0, unknown), (1005.0, power))
    run = Run(healthy(nvmlDeviceGetPowerUsage=sometimes))
    row = run.series["gpu_power_w"]
    assert 8 <= row["failures"] == row["missing_samples"] == row["values"].count(None) <= 11
    assert "nvmlDeviceGetPowerUsage: Unknown Error (999)" == row["failure"] and None is row["reason"]
    assert row["values"][-1] is not None


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"nvmlInit": Fails(12)}, "there is no NVIDIA driver here: libnvidia-ml.so.1 was not found"),
        ({"nvmlDeviceGetCount": always(0)}, "the NVIDIA driver finds no device here"),
    ],
)
def test_machine_without_a_device_has_the_hosts_side(answers: dict[str, Answer], says: str):
    """The reason stands wherever a number of the device would."""
    run = Run(healthy(**answers), 5.0)
    assert {"present": False, "reason": says, "lost_s": None} == run.told["nvml"]
    assert {"host"} == {one["source"] for one in run.told["series"]}
    assert (None, says) == (run.told["energy"]["joules"], run.told["energy"]["reason"])
    assert {"shares": None, "reason": says} == run.told["throttling"]
    assert {(None, says)} == {(link["nvml_kb_s"], link["nvml_reason"]) for link in run.told["pcie"]}
    assert (None, "J") == run.figures["gpu_energy_j"] and run.figures["host_cpu_s"][0] is not None


# ---------------------------------------------------------------------- beside our own copies


def steady(clock: TestClock) -> Callable[[], TransferStats]:
    """Copies of 10 GB/s up, for two reasons, and of 1 GB/s down."""
    empty = TwoTiers().manager.stats()

    def stats() -> TransferStats:
        moved = round((clock() - 1000.0) * 1e9)
        by = {
            ("h2d", "promote"): Copied(nbytes=9 * moved),
            ("h2d", "resume"): Copied(nbytes=moved),
            ("d2h", "demote"): Copied(nbytes=moved),
        }
        return TransferStats(by, *(getattr(empty, name) for name in TransferStats.__slots__[1:]))  # type: ignore[arg-type]

    return stats


def test_link_is_set_beside_what_our_copies_moved():
    """Received by the device against all copies to it, sent by it against all copies from it, over the same run."""

    class Directions(Recording):
        """22 GB/s are received, 1.1 are sent."""

        def nvmlDeviceGetPcieThroughput(self, _: str, which: int) -> int:
            self.clock.now_s += 0.02
            return 11_000_000 if which == pynvml.NVML_PCIE_UTIL_RX_BYTES else 1_100_000

    clock = TestClock()
    telemetry = MachineTelemetry(
        library=Directions(clock, healthy()),
        transfers=steady(clock),
        clock=clock,
        cpu_clock=lambda: 0.0,
        stopping=clock,
    )
    with telemetry:
        clock.run_to(clock() + 10.0)
    up, down = telemetry.to_json()["pcie"]
    assert ("h2d", 11_000_000) == (up["direction"], up["nvml_kb_s"])
    assert ("d2h", 1_100_000) == (down["direction"], down["nvml_kb_s"])
    assert 10e6 == pytest.approx(up["own_kb_s"], rel=0.01) and 1e6 == pytest.approx(down["own_kb_s"], rel=0.01)
    assert [1.1, 1.1] == pytest.approx([up["nvml_over_own"], down["nvml_over_own"]], rel=0.01)
    assert 0.05 < up["window_share"] <= 0.1 and up["windows"] * 0.02 == pytest.approx(
        up["window_share"] * 10.0, rel=0.01
    )
    assert "20 ms" in up["note"]


def test_bytes_of_a_real_manager_arrive():
    """Those of copies that ended, by direction."""
    tiers = TwoTiers(8, 32)
    clock = TestClock()
    with MachineTelemetry(
        library=Recording(clock, healthy()),
        transfers=tiers.manager.stats,
        clock=clock,
        cpu_clock=lambda: 0.0,
        stopping=clock,
    ) as telemetry:
        for one in (prompt(1, 4), prompt(99, 7)):
            tiers.store(one)
            tiers.settle()
        clock.run_to(clock() + 1.0)
    moved = sum(copied.nbytes for (direction, _), copied in tiers.manager.stats().by.items() if direction == "d2h")
    up, down = telemetry.to_json()["pcie"]
    assert moved >= 4 * PAGE_NBYTES
    assert (0, moved) == (up["own_nbytes"], down["own_nbytes"])


def test_without_transfers_that_is_said(run: Run):
    """And no rate is made up."""
    for link in run.told["pcie"]:
        assert (None, None, None, "no transfers were given") == (
            link["own_nbytes"],
            link["own_kb_s"],
            link["nvml_over_own"],
            link["own_reason"],
        )


# ---------------------------------------------------------------------- really, here


def test_run_on_this_machine_is_a_report():
    """With whatever there is: the block goes into a report, numbers are finite, a reason stands beside each None."""
    began_s = time.perf_counter()
    with MachineTelemetry(settings=Settings(interval_s=0.005, probe_s=0.1)) as telemetry:
        running: dict[str, Any] = telemetry.to_json()
        time.sleep(0.1)
    ended_s = time.perf_counter()
    told = telemetry.to_json()
    metrics = {name: Metric(value, unit) for name, (value, unit) in telemetry.figures().items()}
    report = Report("bench some", True, metrics, [{"metric": "telemetry", "telemetry": told}])
    json.dumps(report.to_json(), allow_nan=False)
    assert (None, "its thread has not ended") == (running["ended_s"], running["cost"]["reason"])
    assert began_s < told["began_s"] + 1e-6 and told["ended_s"] - 1e-6 < ended_s, "on the clock of the rest of the run"
    assert told["cost"]["thread_cpu_s"] > 0 and 0 < told["cost"]["core_share"] < 1.5 and told["cost"]["samples"] > 10
    rows = {row["name"]: row for row in told["series"]}
    assert rows["host_cpu_s"]["rise"] > 0 and rows["host_cpu_s"]["samples"] >= 2
    for row in rows.values():
        assert row["samples"] or row["reason"], row["name"]
    if not told["nvml"]["present"]:
        assert len(told["nvml"]["reason"].splitlines()) == 1 and None is told["energy"]["joules"]


def test_nothing_is_told_before_the_start():
    """Neither energy nor a result; and a telemetry is started once."""
    telemetry = MachineTelemetry()
    telemetry.stop()
    for ask in (telemetry.to_json, telemetry.figures, telemetry.energy):
        with pytest.raises(InvariantViolation, match="has not been started"):
            ask()
    with telemetry, pytest.raises(InvariantViolation, match="once"):
        telemetry.start()


def test_run_that_fails_ends_the_sampling():
    """Its error is what the caller sees."""
    with pytest.raises(RuntimeError, match="of the run"), MachineTelemetry():
        raise RuntimeError("of the run")
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("kvkeep-telemetry")]
