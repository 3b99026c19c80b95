"""Telemetry of the machine while something runs: NVML's counters, the host's, and what our own copies moved.

Must not know what runs.  Where there is no NVIDIA device the result says why, and has the host's side.

    with MachineTelemetry(transfers=manager.stats) as telemetry:     # looks for the counters' pace, then samples
        before = telemetry.energy()
        ...
        after = telemetry.energy()
    joules_per_1k_prompt_tokens(before, after, prompt_tokens)
    telemetry.to_json()                                              # the block "telemetry" of a report
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvkeep.errors import InvariantViolation
from kvkeep.telemetry import result
from kvkeep.telemetry.counters import Answer, Counter, Field
from kvkeep.telemetry.energy import EnergyReading
from kvkeep.telemetry.host import Host
from kvkeep.telemetry.nvml import ENERGY, POWER, NvmlDevice, NvmlUnavailable, open_device
from kvkeep.telemetry.sampling import Sampler, Settings, Stopping
from kvkeep.telemetry.series import Sums
from kvkeep.telemetry.track import Clock
from kvkeep.transfer.tally import TransferStats


class MachineTelemetry:
    """Samples from `start` to `stop`, or as a context; once.

    device: the NVIDIA device, a number as `nvidia-smi` counts or a UUID.
    transfers: counters of copies, as `TransferManager.stats`: set beside what NVML sees on the link.
    library, clock, cpu_clock, stopping: stand-ins for the module pynvml, seconds of the run, seconds of processor time
        of the calling thread, and the event that ends it.
    """

    def __init__(
        self,
        *,
        device: int | str = 0,
        transfers: Callable[[], TransferStats] | None = None,
        settings: Settings | None = None,
        library: Any = None,
        clock: Clock = time.perf_counter,
        cpu_clock: Clock = time.thread_time,
        stopping: Stopping | None = None,
    ) -> None:
        self._name = device
        self._transfers = transfers
        self._settings = settings if settings is not None else Settings()
        self._library = library
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._stopping = stopping
        self._device: NvmlDevice | None = None
        self._no_device: str | None = None
        self._running: Sampler | None = None
        self._first: EnergyReading | None = None
        self._last: EnergyReading | None = None

    # ------------------------------------------------------------------ the run

    def start(self) -> None:
        """Opens the device, looks for the pace of its counters (1.5 s at most), begins."""
        if self._running is not None:
            raise InvariantViolation("a telemetry is started once")
        try:
            self._device = open_device(self._name, self._library)
        except NvmlUnavailable as error:
            self._no_device = str(error)
        counters = [*(self._device.counters() if self._device is not None else []), *Host().counters()]
        if self._transfers is not None:
            counters.append(_own(self._transfers))
        self._running = Sampler(
            counters, self._settings, clock=self._clock, cpu_clock=self._cpu_clock, stopping=self._stopping
        )
        try:
            self._running.look()
            self._first = self.energy()
            self._running.start()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """Ends the sampling; no thread is left."""
        if self._running is None or self._last is not None:
            return
        self._last = self.energy()
        self._end()

    def __enter__(self) -> "MachineTelemetry":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _end(self) -> None:
        try:
            self._sampler.stop()
        finally:
            if self._device is not None and self._sampler.stuck is None:
                self._device.close()

    # ------------------------------------------------------------------ while it runs

    def energy(self) -> EnergyReading:
        """What the device has used so far, read now in the calling thread, which takes as long as two of its calls."""
        sampler = self._sampler
        if self._device is None:
            return EnergyReading(self._clock(), counter_missing=self._no_device, power_missing=self._no_device)
        (counter, no_counter), (power, no_power) = self._read(ENERGY), self._read(POWER)
        return EnergyReading(
            self._clock(),
            counter_j=counter.last,
            counter_falls=counter.falls,
            counter_update_s=sampler[ENERGY].update_s,
            counter_missing=no_counter,
            integrated_j=power.area,
            power_breaks=power.breaks,
            power_update_s=sampler[POWER].update_s,
            power_missing=no_power,
        )

    def _read(self, name: str) -> tuple[Sums, str | None]:
        """All samples of a counter, the last one of now; or why there is none of now."""
        track = self._sampler[name]
        if self._sampler.read_now(name):
            return track.series.sums(0), None
        return track.series.sums(0), track.ended or track.failure or "it does not answer"

    @property
    def _sampler(self) -> Sampler:
        if self._running is None:
            raise InvariantViolation("the telemetry has not been started")
        return self._running

    # ------------------------------------------------------------------ the result

    def to_json(self) -> dict[str, Any]:
        """Everything, for a report: see `kvkeep.telemetry.result`.  Raises before `start`."""
        return result.to_json(self._sampled())

    def figures(self) -> dict[str, tuple[float | None, str]]:
        """The main numbers with their units, by name; None where there is none.  Raises before `start`."""
        return result.figures(self._sampled())

    def _sampled(self) -> result.Sampled:
        sampler, first, last = self._sampler, self._first, self._last
        if first is None:
            raise InvariantViolation("the telemetry has not been started")
        facts, missing = ({}, {}) if self._device is None else (self._device.facts, self._device.missing)
        return result.Sampled(
            facts=facts,
            missing=missing,
            no_device=self._no_device,
            sampler=sampler,
            first=first,
            last=last if last is not None else self.energy(),
            over=last is not None,
            probe_s=self._settings.probe_s,
        )


def _own(transfers: Callable[[], TransferStats]) -> Counter:
    def read() -> Answer:
        moved = {"h2d": 0, "d2h": 0}
        for (direction, _), copied in transfers().by.items():
            moved[direction] += copied.nbytes
        return float(moved["h2d"]), float(moved["d2h"])

    what = "by our copies, counted when a copy is over"
    fields = (
        Field(result.OWN_H2D, "bytes", f"to the device {what}", "total"),
        Field(result.OWN_D2H, "bytes", f"from it {what}", "total"),
    )
    return Counter("own", fields, read, "live")
