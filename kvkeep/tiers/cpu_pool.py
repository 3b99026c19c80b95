"""The pool of pages in host memory: where cached pages and preempted requests wait.

Must not know names, runs or requests; who owns a page is the ledger's, which the cache makes.
"""

import logging
import math
import mmap
from typing import Literal

import numpy as np

from kvkeep.config import check_int
from kvkeep.errors import BadInput
from kvkeep.tiers.layout import OpaqueLayout, PageLayout
from kvkeep.tiers.memory import HostMemory
from kvkeep.tiers.memory_limit import memory_limit_nbytes
from kvkeep.tiers.pinning import CHUNK_NBYTES_MAX, PinFailed, Pinning, Registrar

log = logging.getLogger(__name__)


class CpuPool:
    """`tier_pages + suspend_pages` numbered pages of host memory, page-major, in one mapping of exactly that size.

        page id   0 ............ tier_pages ............ pages
                  |  cached pages  |  preempted requests   |      neither takes the other's

    layout: None for a pool without bytes (replays, and engines that keep the bytes themselves).
    tier_pages, suspend_pages: either may be 0; with both 0 there is no memory and the cache works without the tier.
    pin: register the memory with the device, so that it copies from and to it directly.
        True: raises `BadInput` when that is not possible, and leaves nothing registered.
        "auto": where there is a registrar; when it fails, the pool is left unpinned and says so once in the log.
        False: unpinned.  A device still copies, through a buffer of its driver: slower, and it holds up the caller.
    registrar: what registers memory with the device; none on a machine without one.
    background: go on registering after the constructor has returned.  Pages are pinned from id 0 on, `pinned_pages` of
        them; when it fails part-way, the chunks registered so far stay (copies may be using them) and `wait_pinned`
        raises.
    limit_nbytes: memory that may be used; found out when None.

    Memory is taken from the system as pages are first written, or when they are pinned.
    """

    def __init__(
        self,
        layout: PageLayout | OpaqueLayout | None,
        tier_pages: int,
        suspend_pages: int = 0,
        *,
        pin: bool | Literal["auto"] = "auto",
        registrar: Registrar | None = None,
        background: bool = False,
        chunk_nbytes_max: int = CHUNK_NBYTES_MAX,
        limit_nbytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.tier_pages = check_int("tier_pages", tier_pages, at_least=0)
        self.suspend_pages = check_int("suspend_pages", suspend_pages, at_least=0)
        self.pages = tier_pages + suspend_pages
        self.memory: HostMemory | None = None
        self._pinning: Pinning | None = None
        if pin is True and registrar is None:
            raise BadInput("pin=True: there is no device to pin for; use pin='auto' or pin=False")
        if layout is None or not self.pages:
            return
        self._page_nbytes = layout.page_nbytes
        self._check_limit(memory_limit_nbytes() if limit_nbytes is None else limit_nbytes)
        self.memory = HostMemory(self._map(), layout)
        if registrar is not None and pin:
            self._pin(registrar, chunk_nbytes_max, background, must=pin is True)

    @classmethod
    def bookkeeping(cls, tier_pages: int, suspend_pages: int = 0) -> "CpuPool":
        """A pool without bytes."""
        return cls(None, tier_pages, suspend_pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return 0 if self.memory is None else self.pages * self._page_nbytes

    @property
    def pinned_pages(self) -> int:
        """Pages from id 0 on that the device copies from and to directly."""
        return 0 if self._pinning is None else self._pinning.nbytes_pinned // self._page_nbytes

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Waits for registration in the background; False when it goes on after `timeout_s`.

        Raises `BadInput`, with the setting and the bytes, when it has failed.
        """
        if self._pinning is None:
            return True
        over = self._pinning.wait(timeout_s)
        if self._pinning.error is not None:
            raise BadInput(f"{self._failure(self._pinning)}; the rest stays unpinned")
        return over

    def unpin(self) -> None:
        """From now on copies go through a buffer of the device's driver.  No copy may be in flight."""
        if self._pinning is not None:
            self._pinning.release()
            self._pinning = None

    def close(self) -> None:
        """Unpins and lets go of the memory.  No copy may be in flight."""
        self.unpin()
        self.memory = None

    # ------------------------------------------------------------------ inside

    def _check_limit(self, limit_nbytes: int | None) -> None:
        need = self.pages * self._page_nbytes
        if limit_nbytes is not None and need > limit_nbytes:
            raise BadInput(
                f"{self._setting()} need {need} bytes ({need / 2**30:.2f} GiB), and this process may use "
                f"{limit_nbytes} ({limit_nbytes / 2**30:.2f} GiB): at most {limit_nbytes // self._page_nbytes} pages "
                f"fit, less what else it needs"
            )

    def _map(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        nbytes = self.pages * self._page_nbytes
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise BadInput(f"{self._setting()}: {nbytes} bytes cannot be had ({error}); use fewer pages") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:  # a kernel without them: small pages work as well, slower
                log.debug("no huge pages for the CPU pool: %s", error)
        return np.frombuffer(mapping, dtype=np.uint8).reshape(self.pages, self._page_nbytes)

    def _pin(self, registrar: Registrar, chunk_nbytes_max: int, background: bool, *, must: bool) -> None:
        """Chunks end where a page and a page of the system both end: no copy crosses from one to the next."""
        assert self.memory is not None
        step = math.lcm(self._page_nbytes, mmap.PAGESIZE)
        chunk_nbytes = max(step, chunk_nbytes_max // step * step)
        pinning = Pinning(registrar, self.memory.rows.ctypes.data, self.nbytes, chunk_nbytes)
        self._pinning = pinning
        if background:
            pinning.run_in_background()
            return
        pinning.run()
        if pinning.error is None:
            return
        message = self._failure(pinning)
        pinning.release()
        self._pinning = None
        if not isinstance(pinning.error, PinFailed):
            raise pinning.error
        if must:
            raise BadInput(f"{message}; nothing is pinned. Use fewer pages, or pin=False") from pinning.error
        log.warning("%s; the pool stays unpinned, and its copies are slower", message)

    def _failure(self, pinning: Pinning) -> str:
        return (
            f"pinning the CPU pool ({self._setting()}, {self.nbytes} bytes) failed after {pinning.nbytes_pinned} "
            f"bytes: {pinning.error}"
        )

    def _setting(self) -> str:
        return f"tier_pages={self.tier_pages}, suspend_pages={self.suspend_pages} of {self._page_nbytes} bytes"
