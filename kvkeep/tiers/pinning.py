"""Pinning: registering a mapping with a device, chunk by chunk, so that the device copies from it directly.

Must not know pages, nor which device.
"""

import threading
from typing import Protocol

from kvkeep.errors import KvkeepError

#: Registrations of half a TiB and more have been seen to fail where several smaller ones succeed.
CHUNK_NBYTES_MAX = 64 * 2**30


class PinFailed(KvkeepError):
    """The device did not take a registration."""


class Registrar(Protocol):
    """What pins host memory for a device; a test's may fail at N bytes."""

    def register(self, address: int, nbytes: int) -> None:
        """Pins the bytes; all of them, or `PinFailed` and none."""

    def unregister(self, address: int) -> None:
        """Unpins what was registered at `address`."""


class Pinning:
    """The registration of `nbytes` bytes at `address`, in chunks of `chunk_nbytes`.

    A chunk is registered whole or not at all; `nbytes_pinned` are from the start on, without a gap.
    """

    def __init__(self, registrar: Registrar, address: int, nbytes: int, chunk_nbytes: int) -> None:
        self._registrar = registrar
        self._address = address
        self._nbytes = nbytes
        self._chunk_nbytes = chunk_nbytes
        self._chunks: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.nbytes_pinned = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Registers chunk after chunk until all are, one fails (`error`), or `release` is called."""
        try:
            while self.nbytes_pinned < self._nbytes and not self._stop.is_set():
                at = self._address + self.nbytes_pinned
                nbytes = min(self._chunk_nbytes, self._nbytes - self.nbytes_pinned)
                self._registrar.register(at, nbytes)
                self._chunks.append(at)
                self.nbytes_pinned += nbytes
        except BaseException as error:  # also on a thread of its own nothing is lost
            self.error = error

    def run_in_background(self) -> None:
        """`run` on a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="kvkeep-pinning", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the background registration; False when it goes on after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def release(self) -> None:
        """Stops after the chunk at hand and unregisters every chunk, the last one first."""
        self._stop.set()
        self.wait()
        self.nbytes_pinned = 0
        while self._chunks:
            self._registrar.unregister(self._chunks.pop())
