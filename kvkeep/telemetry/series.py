"""The samples of one counter, in bounded memory, and what all of them together say.

Must not know what is counted, or when it is read.  What is kept is for a picture: when there is too much of it, every
second sample goes.  Least, most, mean, rise and area are of all samples, whatever is kept.
"""

import math
from array import array
from dataclasses import dataclass, replace
from threading import Lock

from kvkeep.telemetry.counters import Answer, Field


@dataclass(slots=True)
class Sums:
    """What all samples of one field say.

    samples, missing: answers with a number, and without.   total: of the numbers added up.
    falls: how often a number was less than the one before.
    area: of the number over time, in its unit times seconds, by trapezoids; none is laid over a missing answer.
    breaks: how often a missing answer followed a number.
    """

    samples: int = 0
    missing: int = 0
    total: float = 0.0
    least: float | None = None
    most: float | None = None
    first: float | None = None
    last: float | None = None
    falls: int = 0
    area: float = 0.0
    breaks: int = 0

    @property
    def mean(self) -> float | None:
        """Of the samples; None without any."""
        return self.total / self.samples if self.samples else None

    @property
    def rise(self) -> float | None:
        """From the first sample to the last, of something that only rises; None where it has fallen."""
        if self.first is None or self.last is None or self.falls:
            return None
        return self.last - self.first

    def add(self, value: float | None, before: float | None, apart_s: float) -> None:
        """A sample, `apart_s` seconds after the answer `before`."""
        if value is None:
            self.missing += 1
            self.breaks += before is not None
            return
        self.falls += self.last is not None and value < self.last
        if before is not None:
            self.area += apart_s * (before + value) / 2
        self.samples += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)
        self.first = value if self.first is None else self.first
        self.last = value


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of what a series holds.

    times_s: of the samples that were kept, rising.   values: by field; None for a missing answer.
    sums: by field, of all samples.   stride: one in so many samples was kept.
    """

    times_s: list[float]
    values: list[list[float | None]]
    sums: list[Sums]
    stride: int


class Series:
    """The samples of a counter with these fields.   samples_max: so many are kept at most."""

    def __init__(self, fields: tuple[Field, ...], samples_max: int) -> None:
        self._samples_max = samples_max
        self._lock = Lock()
        self._times = array("d")
        self._columns = [array("d") for _ in fields]
        self._sums = [Sums() for _ in fields]
        self._stride = 1
        self._count = 0
        self._before: Answer = [None] * len(fields)
        self._before_s = 0.0

    def add(self, time_s: float, answer: Answer) -> None:
        """An answer; times never go back."""
        with self._lock:
            for sums, value, before in zip(self._sums, answer, self._before, strict=True):
                sums.add(value, before, time_s - self._before_s)
            self._before, self._before_s = answer, time_s
            if self._count % self._stride == 0:
                self._keep(time_s, answer)
            self._count += 1

    def kept(self) -> Kept:
        """A copy of everything."""
        with self._lock:
            values = [[None if math.isnan(value) else value for value in column] for column in self._columns]
            sums = [replace(one) for one in self._sums]
            return Kept(self._times.tolist(), values, sums, self._stride)

    def sums(self, field: int) -> Sums:
        """A copy of what all samples of one field say."""
        with self._lock:
            return replace(self._sums[field])

    def _keep(self, time_s: float, answer: Answer) -> None:
        if len(self._times) == self._samples_max:
            self._times = self._times[::2]
            self._columns = [column[::2] for column in self._columns]
            self._stride *= 2
            if self._count % self._stride:
                return
        self._times.append(time_s)
        for column, value in zip(self._columns, answer, strict=True):
            column.append(math.nan if value is None else value)
