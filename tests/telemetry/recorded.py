"""The library NVML as recordings of its answers, and a clock that passes only when a test says so.

Must not use anything of the sampler.  The errors are those of nvidia-ml-py itself; the answers are what nvml.h says
that a device gives, each from a time on: no device has been recorded.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pynvml

CALL_S = 30e-6
WINDOW_S = 0.02

Answer = Callable[[float], Any]


class TestClock:
    """Seconds of a test.

    In the thread that made it to wait is to let time pass.  Another thread waits until `run_to` lets time come to it,
    and `run_to` comes back when that thread waits again: one of the two runs at a time.
    """

    __test__ = False

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._maker = threading.get_ident()
        self._moved = threading.Condition()
        self._limit_s = now_s
        self._due_s: float | None = None
        self._stopped = False
        self.waits = 0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, timeout: float | None = None) -> bool:
        if threading.get_ident() == self._maker:
            assert timeout is not None
            self.now_s += timeout
            return self._stopped
        with self._moved:
            self.waits += 1
            due_s = self.now_s + timeout if timeout is not None else float("inf")
            self._due_s = due_s
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._stopped or due_s <= self._limit_s)
            self._due_s = None
            if not self._stopped:
                self.now_s = max(self.now_s, due_s)
            return self._stopped

    def run_to(self, time_s: float) -> None:
        """Lets the other thread do all that it does until then."""
        with self._moved:
            self._limit_s = time_s
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: self._due_s is not None and self._due_s > time_s, 30.0)
            self.now_s = max(self.now_s, time_s)

    def set(self) -> None:
        with self._moved:
            self._stopped = True
            self._moved.notify_all()


class Fails:
    """An answer that is an error."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, _: float) -> Any:
        raise pynvml.NVMLError(self.code)


def always(value: Any) -> Answer:
    return lambda _: value


def changing(every_s: float, value: Callable[[int], Any]) -> Answer:
    """The n-th value, after so many seconds the next one."""
    return lambda now_s: value(int(now_s / every_s))


def from_then_on(*pieces: tuple[float, Any]) -> Answer:
    """Answers by the time since which they hold, the first since ever."""

    def answer(now_s: float) -> Any:
        held = [piece for since_s, piece in pieces if since_s <= now_s]
        return held[-1](now_s)

    return answer


def process(pid: int, nbytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


def healthy(**others: Answer) -> dict[str, Answer]:
    """A device of Hopper's kind under load; energy changes each 0.1 s by 50 J, power each 0.1 s about 500 W."""
    return {
        "nvmlDeviceGetCount": always(1),
        "nvmlDeviceGetName": always("NVIDIA H200"),
        "nvmlSystemGetDriverVersion": always("580.159.03"),
        "nvmlSystemGetNVMLVersion": always("13.580.159.03"),
        "nvmlDeviceGetEnforcedPowerLimit": always(700_000),
        "nvmlDeviceGetMaxPcieLinkGeneration": always(5),
        "nvmlDeviceGetMaxPcieLinkWidth": always(16),
        "nvmlDeviceGetMemoryInfo": always(SimpleNamespace(total=150 << 30, used=40 << 30, free=110 << 30)),
        "nvmlDeviceGetUtilizationRates": changing(0.2, lambda n: SimpleNamespace(gpu=90 + n % 5, memory=40)),
        "nvmlDeviceGetPowerUsage": changing(0.1, lambda n: 499_000 + n % 2 * 2000),
        "nvmlDeviceGetTotalEnergyConsumption": changing(0.1, lambda n: n * 50_000),
        "nvmlDeviceGetClockInfo": always(1980),
        "nvmlDeviceGetCurrentClocksEventReasons": changing(1.0, lambda n: 0x4 if n % 4 == 0 else 0),
        "nvmlDeviceGetCurrPcieLinkGeneration": always(5),
        "nvmlDeviceGetCurrPcieLinkWidth": always(16),
        "nvmlDeviceGetPcieThroughput": always(12_000_000),
        "nvmlDeviceGetComputeRunningProcesses": always([process(os.getpid(), 30 << 30), process(1, 2 << 30)]),
        **others,
    }


class Recording:
    """What stands for the module `pynvml`.

    answers: by function; what is not in them is not in the module.   asked: times at which functions were called.
    opened: how often it was initialised, less how often it was shut down.
    """

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def __init__(self, clock: TestClock, answers: Mapping[str, Answer]) -> None:
        self.clock = clock
        self.answers = dict(answers)
        self.asked: dict[str, list[float]] = {}
        self.arguments: dict[str, set[Sequence[Any]]] = {}
        self.opened = 0

    def nvmlInit(self) -> None:
        self.answers.get("nvmlInit", always(None))(self.clock())
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1
        self.answers.get("nvmlShutdown", always(None))(self.clock())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-here":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle 0"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.__dict__["answers"]:
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            self.asked.setdefault(name, []).append(self.clock())
            self.arguments.setdefault(name, set()).add(arguments)
            self.clock.now_s += WINDOW_S if name == "nvmlDeviceGetPcieThroughput" else CALL_S
            return self.answers[name](self.clock())

        return function
