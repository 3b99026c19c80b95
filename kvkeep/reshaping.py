"""How the pages of a live lease change other than by growing: rolled back, a window that slides, a fork.

Must not know prompts or copies.  Its callers hold the cache's lock.

A windowed lease has a protected prefix, which is stored when it finishes, and a window behind it.  With the first page
that is released its chain is closed: what is computed from then on has not seen all that stands before it, so no chain
of token ids could name it.
"""

from array import array
from collections.abc import Callable

from kvkeep.config import check_int
from kvkeep.counting import Counting
from kvkeep.errors import BadInput, NotReady, OutOfPages
from kvkeep.index.media import check_ends
from kvkeep.index.names import Identity
from kvkeep.lease import Lease, Window
from kvkeep.room import Room
from kvkeep.storing import Storing
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.ledger import Ledger


class Reshaping:
    """Changes the pages of the leases of one cache.

    leases: the live ones, which it adds forks to.   release: a lease lets go of pages.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: GpuPool,
        room: Room,
        storing: Storing,
        leases: dict[int, Lease],
        page_size: int,
        counting: Counting,
        release: Callable[[Lease, "array[int]"], None],
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._room = room
        self._storing = storing
        self._leases = leases
        self._page_size = page_size
        self._counting = counting
        self._release = release

    def truncate(self, lease: Lease, length: int) -> None:
        """See `TieredCache.truncate`."""
        full, part = divmod(length, self._page_size)
        _check_arrived(lease, "rolled back")
        if not 0 <= length <= lease.length:
            raise BadInput(f"truncate to {length} tokens of {lease.length}: it must be 0 to {lease.length}")
        check_ends(lease.media.units, "truncate to", length)
        if (window := lease.window) is not None:
            least = (window.protected if window.sealed is None else window.sealed) * self._page_size
            if length < least:
                raise BadInput(f"truncate to {length} tokens: the first {least} of {lease} stay as they are")
        keep = lease.index_of(full) + (part > 0)
        gone = lease.pages[keep:]
        replace = part and full < lease.sealed
        if replace and not self._room.could_be_had(gone):
            self._counting.refusals += 1
            raise self._room.out_of_pages(1, 1)
        self._storing.rewind(lease, full, length)
        del lease.pages[keep:]
        self._release(lease, gone)
        if replace:
            fresh = self._room.take(1, lease.number)
            self._pool.copy_positions(lease.pages[full], fresh[0], part)
            sealed, lease.pages[full : full + 1] = lease.pages[full : full + 1], fresh
            self._release(lease, sealed)
        lease.length, lease.kv_len = length, min(lease.kv_len, length)

    def protect(self, lease: Lease, length: int) -> None:
        """See `TieredCache.protect_prefix`."""
        window = lease.window
        if not 0 <= length <= lease.length:
            raise BadInput(f"protect_prefix of {length} tokens of {lease.length}: it must be 0 to {lease.length}")
        if window is not None and window.released:
            raise BadInput(
                f"protect_prefix: {lease} has released {window.released} pages: protect a prefix before that"
            )
        protected, kept = length // self._page_size, -(-length // self._page_size)
        if window is None:
            lease.window = Window(protected, kept)
        else:
            window.kept = kept
            if window.sealed is None:
                window.protected = protected

    def release_oldest(self, lease: Lease, count: int) -> None:
        """See `TieredCache.release_oldest`."""
        window = lease.window
        if window is None:
            raise BadInput(f"release_oldest: {lease} has no protected prefix: call protect_prefix first")
        _check_arrived(lease, "released")
        sealed = lease.sealed
        have = max(0, sealed - window.kept - window.released)
        if check_int("release_oldest", count, at_least=1) > have:
            raise BadInput(
                f"release_oldest {count}: it must be 1 to {have}, the sealed pages behind the {window.kept} that stay"
            )
        if window.sealed is None:
            self._close(lease, window)
            window.sealed = sealed
        gone = lease.pages[window.kept : window.kept + count]
        del lease.pages[window.kept : window.kept + count]
        window.released += count
        window.epoch += 1
        self._release(lease, gone)

    def fork(self, lease: Lease, number: int, identity: Identity) -> Lease:
        """A lease `number` of `identity` with the same content; see `TieredCache.fork`."""
        _check_arrived(lease, "forked")
        size, sealed = self._page_size, lease.sealed
        try:
            fresh = self._room.take(-(-lease.length // size) - sealed, number)
        except OutOfPages:
            self._counting.refusals += 1
            raise
        at = lease.index_of(sealed)
        shared = lease.pages[:at]
        self._ledger.retain(shared, number)
        if lease.kv_len > sealed * size:
            self._pool.copy_positions(lease.pages[at], fresh[0], lease.kv_len - sealed * size)
        fork = Lease(number, identity, shared + fresh, 0, identity.name, bytearray(), lease.length, 0)
        fork.kv_len = lease.kv_len
        fork.media = lease.media
        fork.store = False
        fork.epoch = self._storing.epoch
        fork.window = lease.window.copy(0, sealed) if lease.window is not None else Window(0, 0, sealed)
        self._leases[number] = fork
        return fork

    def _close(self, lease: Lease, window: Window) -> None:
        """The chain ends with the protected pages: what of it is known behind them is forgotten."""
        media = lease.media
        self._storing.rewind(lease, window.protected, window.protected * self._page_size)
        lease.media = media  # where its items are still matters to whoever computes them


def _check_arrived(lease: Lease, what: str) -> None:
    """Raises `NotReady` while copies of the lease's pages run."""
    if lease.read_in_progress:
        raise NotReady(f"{lease} cannot be {what}: copies of its pages are running")
