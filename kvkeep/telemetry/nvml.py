"""NVML: the counters of one NVIDIA device, by nvidia-ml-py.  Needs the extra `telemetry`, and a driver.

Must not know when they are read, or what for.  All that the library raises is told apart in `NvmlDevice._ask`: there
is no such counter here (`CounterMissing`), no answer this time (`NoAnswer`), no device any more (`SourceLost`).
"""

import logging
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from kvkeep.config import check_int
from kvkeep.errors import BadInput, KvkeepError
from kvkeep.telemetry.counters import Answer, Counter, CounterMissing, Field, Kind, NoAnswer, SourceLost

log = logging.getLogger(__name__)

SOURCE = "nvml"

#: How long NVML counts bytes on the link, each time it is asked; the caller waits meanwhile.
PCIE_WINDOW_S = 0.02

POWER, ENERGY = "gpu_power_w", "gpu_energy_j"
PCIE_RX, PCIE_TX = "gpu_pcie_rx_kb_s", "gpu_pcie_tx_kb_s"
THROTTLING = "gpu_throttle_reasons"

#: Arguments of the library, and names of its bits, as they are in nvml.h.
CLOCK_SM, CLOCK_MEMORY = 1, 2
TX_BYTES, RX_BYTES = 0, 1
THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


class Code(IntEnum):
    """Results of the library that mean more than "no answer"."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28


GONE = {
    Code.UNINITIALIZED,
    Code.DRIVER_NOT_LOADED,
    Code.GPU_IS_LOST,
    Code.RESET_REQUIRED,
    Code.LIB_RM_VERSION_MISMATCH,
    Code.GPU_NOT_FOUND,
}
MISSING = {
    Code.INVALID_ARGUMENT,
    Code.NOT_SUPPORTED,
    Code.NO_PERMISSION,
    Code.ARGUMENT_VERSION_MISMATCH,
    Code.DEPRECATED,
}
NOT_INSTALLED = "nvidia-ml-py is not installed here (pip install 'kvkeep[telemetry]')"
NO_START = {
    Code.LIBRARY_NOT_FOUND: "there is no NVIDIA driver here: libnvidia-ml.so.1 was not found",
    Code.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded here",
    Code.LIB_RM_VERSION_MISMATCH: "the NVIDIA driver that is loaded is of another version than its libnvidia-ml",
    Code.NO_PERMISSION: "the NVIDIA driver may not be asked from here: no permission",
}


class FunctionMissing(CounterMissing):
    """The library, or the driver's part of it, is too old for this function, or too new."""


class NvmlUnavailable(KvkeepError):
    """There is no device to be read here; the message is one line that says why."""


def open_device(device: int | str = 0, library: Any = None) -> "NvmlDevice":
    """Opens a device, by its number as `nvidia-smi` counts or by its UUID ("GPU-...").

    library: what is used as the module `pynvml`, which is loaded here otherwise.
    Raises `NvmlUnavailable` where there is no library, no driver, no device or not this one.
    """
    if not isinstance(device, str):
        check_int("device", device, at_least=0)
    elif not device:
        raise BadInput("device is '': it must be a number, or a UUID such as GPU-5a7b...")
    nvml = _pynvml() if library is None else library
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(NO_START.get(error.value, f"NVML does not start: {_said(error)}")) from error
    try:
        return NvmlDevice(nvml, _handle(nvml, device))
    except BaseException:
        _shut(nvml)
        raise


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(NOT_INSTALLED) from error
    return pynvml


def _handle(nvml: Any, device: int | str) -> Any:
    try:
        count = int(nvml.nvmlDeviceGetCount())
        if not count:
            raise NvmlUnavailable("the NVIDIA driver finds no device here")
        if isinstance(device, str):
            return nvml.nvmlDeviceGetHandleByUUID(device)
        if device >= count:
            raise NvmlUnavailable(f"there is no NVIDIA device {device} here: {count} of them, counted from 0")
        return nvml.nvmlDeviceGetHandleByIndex(device)
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"the NVIDIA device {device} cannot be opened: {_said(error)}") from error


def _shut(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:  # a device that is lost may take the library along
        log.debug("nvmlShutdown: %s", _said(error))


def _said(error: Any) -> str:
    return f"{error} ({error.value})"


class NvmlDevice:
    """One device.

    facts: what it is; None for what it does not say.   missing: why, by name of the fact.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._pid = os.getpid()
        self.facts: dict[str, str | int | float | None] = {}
        self.missing: dict[str, str] = {}
        self._fact("device", lambda: _text(self._of_device("nvmlDeviceGetName")))
        self._fact("driver", lambda: _text(self._ask("nvmlSystemGetDriverVersion")))
        self._fact("nvml", lambda: _text(self._ask("nvmlSystemGetNVMLVersion")))
        self._fact("memory_total_nbytes", lambda: int(self._of_device("nvmlDeviceGetMemoryInfo").total))
        self._fact("power_limit_w", lambda: self._of_device("nvmlDeviceGetEnforcedPowerLimit") / 1000)
        self._fact("pcie_generation_max", lambda: int(self._of_device("nvmlDeviceGetMaxPcieLinkGeneration")))
        self._fact("pcie_width_max", lambda: int(self._of_device("nvmlDeviceGetMaxPcieLinkWidth")))

    def counters(self) -> list[Counter]:
        """Everything that is sampled of it; the order is that of the result."""
        number = self._number
        return [
            _one("gpu_memory_used_nbytes", "bytes", "memory in use, the driver's own included", self._memory),
            Counter(
                SOURCE,
                (
                    Field("gpu_busy_pct", "%", "of the driver's last sample period, in which a kernel ran"),
                    Field("gpu_memory_busy_pct", "%", "of the same period, in which memory was read or written"),
                ),
                self._utilisation,
            ),
            _one(POWER, "W", "of the whole board; a mean over 1 s on Ampere (but GA100) and newer", self._power),
            _one(ENERGY, "J", "used since the driver was loaded, by its own counter", self._energy, "total"),
            _one("gpu_sm_clock_mhz", "MHz", "of the multiprocessors", number("nvmlDeviceGetClockInfo", CLOCK_SM)),
            _one("gpu_memory_clock_mhz", "MHz", "of the memory", number("nvmlDeviceGetClockInfo", CLOCK_MEMORY)),
            _one(THROTTLING, "bits", "why clocks are not at their highest", self._throttling, "flags"),
            _one(
                "gpu_pcie_generation", "", "of the link, less when idle", number("nvmlDeviceGetCurrPcieLinkGeneration")
            ),
            _one("gpu_pcie_width", "lanes", "of the link", number("nvmlDeviceGetCurrPcieLinkWidth")),
            self._pcie(RX_BYTES, PCIE_RX, "received by the device"),
            self._pcie(TX_BYTES, PCIE_TX, "sent by the device"),
            Counter(
                SOURCE,
                (
                    Field("gpu_processes", "processes", "with a compute context on the device"),
                    Field("gpu_process_nbytes", "bytes", "of this process; unknown unless the driver lists its number"),
                    Field("gpu_other_processes_nbytes", "bytes", "of the others; unknown unless this one is listed"),
                ),
                self._processes,
            ),
        ]

    def close(self) -> None:
        """Lets go of the library."""
        _shut(self._nvml)

    # ------------------------------------------------------------------ counters

    def _memory(self) -> Answer:
        return (float(self._of_device("nvmlDeviceGetMemoryInfo").used),)

    def _utilisation(self) -> Answer:
        rates = self._of_device("nvmlDeviceGetUtilizationRates")
        return float(rates.gpu), float(rates.memory)

    def _power(self) -> Answer:
        return (self._of_device("nvmlDeviceGetPowerUsage") / 1000,)  # mW

    def _energy(self) -> Answer:
        return (self._of_device("nvmlDeviceGetTotalEnergyConsumption") / 1000,)  # mJ

    def _number(self, name: str, *arguments: int) -> Callable[[], Answer]:
        return lambda: (float(self._of_device(name, *arguments)),)

    def _throttling(self) -> Answer:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return (float(self._first_of(*names)),)

    def _pcie(self, which: int, name: str, what: str) -> Counter:
        field = Field(name, "KB/s", f"{what}, counted by NVML over {PCIE_WINDOW_S * 1000:g} ms a sample")
        return Counter(SOURCE, (field,), self._number("nvmlDeviceGetPcieThroughput", which), "window", PCIE_WINDOW_S)

    def _processes(self) -> Answer:
        names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")
        listed = {process.pid: process.usedGpuMemory for process in self._first_of(*names)}
        count, is_listed, own = float(len(listed)), self._pid in listed, listed.pop(self._pid, None)
        if not is_listed or None in listed.values():
            return count, own, None
        return count, own, float(sum(listed.values()))

    # ------------------------------------------------------------------ the one door to the library

    def _of_device(self, name: str, *arguments: Any) -> Any:
        return self._ask(name, self._handle, *arguments)

    def _first_of(self, *names: str) -> Any:
        """The answer of the first of these functions that the driver has: the later ones are of older drivers."""
        for name in names[:-1]:
            try:
                return self._of_device(name)
            except FunctionMissing as missing:
                log.debug("%s", missing)
        return self._of_device(names[-1])

    def _ask(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise FunctionMissing(f"{name}: not in this nvidia-ml-py")
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            why = f"{name}: {_said(error)}"
            if error.value in GONE:
                raise SourceLost(why) from error
            if error.value == Code.FUNCTION_NOT_FOUND:
                raise FunctionMissing(why) from error
            raise (CounterMissing if error.value in MISSING else NoAnswer)(why) from error
        except self._nvml.NVMLLibraryMismatchError as error:  # a structure of another version than the driver's
            raise FunctionMissing(f"{name}: {error}") from error

    def _fact(self, name: str, ask: Callable[[], str | int | float]) -> None:
        self.facts[name] = None
        try:
            self.facts[name] = ask()
        except (CounterMissing, NoAnswer, SourceLost) as error:
            self.missing[name] = str(error)


def _one(name: str, unit: str, what: str, read: Callable[[], Answer], kind: Kind = "gauge") -> Counter:
    return Counter(SOURCE, (Field(name, unit, what, kind),), read)


def _text(value: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
