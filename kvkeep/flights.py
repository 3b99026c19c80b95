"""Flights: computations under way, who waits for them, and which of those would wait for themselves.

Must not know outputs, caches or what is computed: `encoder.py` does.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Flight(Future[tuple[Any, ...]]):
    """A computation of a record that is under way.

    epoch: how often the cache had been reset when it began.   thread: where, or where the event loop that does it runs.
    waits_for: what calls inside its `compute` wait for.
    """

    def __init__(self, record: bytes, epoch: int) -> None:
        super().__init__()
        self.record = record
        self.epoch = epoch
        self.thread = threading.get_ident()
        self.waits_for: list[Flight] = []  # guarded by `_WAITS`

    def needs(self, other: "Flight") -> bool:
        """Whether it ends only after `other`.  Under `_WAITS`."""
        return self is other or any(flight.needs(other) for flight in self.waits_for)


#: The innermost computation that the caller is part of; of any encoder.
_COMPUTING: ContextVar[Flight | None] = ContextVar("kvkeep computing", default=None)
_WAITS = threading.Lock()


class Abandoned(Exception):
    """Who computed was stopped; another one has to."""


class Circular(Exception):
    """Who waits is who would have to compute."""


@contextmanager
def waiting(flight: Flight, *, blocks: bool) -> Iterator[None]:
    """Notes that the caller waits for `flight`.   blocks: its thread does nothing else.   Raises `Circular`."""
    if blocks and flight.thread == threading.get_ident() and not flight.done():
        raise Circular
    outer = _COMPUTING.get()
    if outer is None or outer.done():
        yield
        return
    with _WAITS:
        if flight.needs(outer):
            raise Circular
        outer.waits_for.append(flight)
    try:
        yield
    finally:
        with _WAITS:
            outer.waits_for.remove(flight)


@contextmanager
def computing(flight: Flight) -> Iterator[None]:
    """What the caller does now is part of `flight`, which what it was part of before waits for."""
    outer = _COMPUTING.get()
    with waiting(flight, blocks=False):
        _COMPUTING.set(flight)
        try:
            yield
        finally:
            _COMPUTING.set(outer)


def run_compute(compute: Callable[[], Any]) -> Any:
    """What `compute` gives."""
    try:
        return compute()
    except StopIteration as error:  # no future takes it
        raise RuntimeError("the encoder raised StopIteration") from error


def heard(future: "asyncio.Future[Any]") -> None:
    """Its error is no news, even when who waited for it has been cancelled."""
    if not future.cancelled():
        future.exception()
