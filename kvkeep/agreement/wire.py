"""Plans, refusals and states of requests as bytes, and back.

Must not know who says them, nor what follows.  Ranks run the same release: there is one format, little-endian.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from kvkeep.admission import Look
from kvkeep.errors import OutOfPages
from kvkeep.transfer.backend import Job
from kvkeep.transfer.plan import DIRECTION_OF, Cause, Plan, SlotCopy

CAUSES: tuple[Cause, ...] = get_args(Cause)

# What has become of a request that waits; otherwise, the pages that it has matched.
PENDING = -1  # its copies run
GONE = -2  # it has ended: a load failed, or there was no room after all

_REFUSAL = struct.Struct("<5q")
_LOOK = struct.Struct("<7q")
_PLAN = struct.Struct("<QBxxxII")
_REPORT = struct.Struct("<QqI")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a job of that number: see `Outcome`."""

    number: int
    error: str | None
    copy_ns: int


class Reader:
    """Takes parts off the front of a message."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def parts(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next fields."""
        self._at += layout.size
        return layout.unpack_from(self._message, self._at - layout.size)

    def count(self) -> int:
        """How many follow."""
        return self.parts(_COUNT)[0]

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        self._at += nbytes
        return self._message[self._at - nbytes : self._at]

    def text(self) -> bytes:
        """The next bytes, which their number precedes."""
        return self.take(self.count())

    def ids(self) -> "array[int]":
        """The next page ids, or other int32."""
        out = array("i")
        out.frombytes(self.text())
        return out


def text(value: bytes) -> bytes:
    """Bytes behind their number."""
    return _COUNT.pack(len(value)) + value


def ids(pages: "array[int] | Sequence[int]") -> bytes:
    """Page ids, or other int32."""
    return text(array("i", pages).tobytes())


def refusal(error: OutOfPages | None) -> bytes:
    """Why there is no room; None: there is."""
    if error is None:
        return _REFUSAL.pack(0, 0, 0, 0, 0)
    return _REFUSAL.pack(error.asked, error.short, error.in_flight, error.held, error.total)


def read_refusal(reader: Reader) -> OutOfPages | None:
    """The opposite of `refusal`."""
    asked, short, in_flight, held, total = reader.parts(_REFUSAL)
    if not total:
        return None
    return OutOfPages(asked=asked, short=short, in_flight=in_flight, held=held, total=total)


def look(found: Look) -> bytes:
    """What a rank has of a prompt, and what room."""
    numbers = (found.pages, found.on_gpu, found.asked, found.short, found.in_flight, found.held, found.total)
    return _LOOK.pack(*numbers) + text(found.busy)


def read_look(message: bytes) -> Look:
    """The opposite of `look`."""
    reader = Reader(message)
    pages, on_gpu, asked, short, in_flight, held, total = reader.parts(_LOOK)
    return Look(pages, on_gpu, asked, short, in_flight, held, total, reader.text())


def plans(jobs: Sequence[Job]) -> bytes:
    """What copies are to be made, in order.  Generations stay: those who apply them have no index."""
    out = [_COUNT.pack(len(jobs))]
    for job in jobs:
        plan = job.plan
        out.append(_PLAN.pack(job.number, CAUSES.index(plan.cause), len(plan), len(plan.slots)))
        parts = array("q", (part for slot in plan.slots for part in slot))
        out += [plan.sources.tobytes(), plan.targets.tobytes(), parts.tobytes()]
    return text(b"".join(out))


def read_plans(reader: Reader) -> list[tuple[int, Plan]]:
    """The opposite of `plans`: numbers and plans, whose generations are all 0."""
    inner = Reader(reader.text())
    out = []
    for _ in range(inner.count()):
        number, cause, pages, slots = inner.parts(_PLAN)
        sources, targets, parts = array("i"), array("i"), array("q")
        for part, nbytes in ((sources, 4 * pages), (targets, 4 * pages), (parts, 8 * 5 * slots)):
            part.frombytes(inner.take(nbytes))
        zeros = array("q", bytes(8 * pages))
        made = tuple(SlotCopy(*parts[i : i + 5]) for i in range(0, len(parts), 5))
        why = CAUSES[cause]
        out.append((number, Plan(DIRECTION_OF[why], why, sources, targets, zeros, zeros, made)))
    return out


def reports(ended: Sequence[Report], death: str | None) -> bytes:
    """What became of copies here.   death: why no more are made here; None: they are."""
    out = [text((death or "").encode()), _COUNT.pack(len(ended))]
    for report in ended:
        error = b"" if report.error is None else (report.error or "failed").encode()
        out += [_REPORT.pack(report.number, report.copy_ns, len(error)), error]
    return text(b"".join(out))


def read_reports(reader: Reader) -> tuple[list[Report], str | None]:
    """The opposite of `reports`."""
    inner = Reader(reader.text())
    death = inner.text().decode()
    out = []
    for _ in range(inner.count()):
        number, copy_ns, nbytes = inner.parts(_REPORT)
        error = inner.take(nbytes).decode()
        out.append(Report(number, error or None, copy_ns))
    return out, death or None
