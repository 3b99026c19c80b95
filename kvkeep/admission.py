"""Admission: what of a prompt matches, what of that is loaded, and which pages the rest gets: all, or nothing.

Must not know what becomes of a lease afterwards.  Its callers hold the cache's lock.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from kvkeep.counting import Counting
from kvkeep.errors import BadInput, CannotSuspend, NotReady, OutOfPages
from kvkeep.index.media import (
    NO_MEDIA,
    MediaItem,
    PageMedia,
    Placed,
    cut_before_split_item,
    place_media,
    whole_holes,
)
from kvkeep.index.names import Identity, Int32s, TokenIds, as_int32, check_token_range
from kvkeep.index.runs import Match, RunTree
from kvkeep.lease import Lease
from kvkeep.misses import Looked, MissLedger
from kvkeep.parking import Parking
from kvkeep.room import Drains, Room
from kvkeep.storing import Storing
from kvkeep.tiers.ledger import Ledger, page_ids
from kvkeep.traffic import Suspended, Traffic


@dataclass(frozen=True, slots=True)
class Look:
    """What an admission would find.

    pages: those that match, the first `on_gpu` of them on the GPU.   asked: pages that it would take for the rest.
    short: how many of these could not be had; 0 or less: they could.
    busy: for each of those on the GPU 1 where somebody else holds it, so that it is no room if it is not matched;
        empty where there is room even if none is.   in_flight, held, total: as in `OutOfPages`; 0 then.
    """

    pages: int
    on_gpu: int
    asked: int
    short: int
    in_flight: int = 0
    held: int = 0
    total: int = 0
    busy: bytes = b""

    @property
    def refusal(self) -> OutOfPages | None:
        """Why it would be refused; None: it would not."""
        return self.refusal_at(self.pages)

    def refusal_at(self, pages: int) -> OutOfPages | None:
        """The same for an admission that takes no more than `pages` of those that match."""
        kept = min(pages, self.on_gpu)
        short = self.short + sum(self.busy[kept:])
        if short <= 0:
            return None
        asked = self.asked + self.on_gpu - kept
        return OutOfPages(asked=asked, short=short, in_flight=self.in_flight, held=self.held, total=self.total)


class Admission:
    """Makes the leases of one cache.

    leases: the live ones, which it adds to.   order: what `Gate.wait_on` does.   end: ends a lease.
    release: lets go of pages of one.
    """

    def __init__(
        self,
        tree: RunTree,
        ledger: Ledger,
        room: Room,
        storing: Storing,
        traffic: Traffic | None,
        leases: dict[int, Lease],
        page_size: int,
        counting: Counting,
        misses: MissLedger | None,
        order: Callable[[Lease, object], None],
        end: Callable[[Lease], None],
        release: Callable[[Lease, "array[int]"], None],
    ) -> None:
        self._tree = tree
        self._ledger = ledger
        self._room = room
        self._storing = storing
        self._traffic = traffic
        self._leases = leases
        self._page_size = page_size
        self._counting = counting
        self._misses = misses
        self._order = order
        self._end = end
        self._release = release
        self.numbers = count()

    def prompt(
        self, tokens: TokenIds, media: Sequence[MediaItem], most: int | None
    ) -> tuple[Int32s, Placed, int]:  # fmt: skip
        """A prompt's ids, its media on pages, and how many pages it may take from the cache.  Needs no lock."""
        ids = as_int32(tokens)
        if not len(ids):
            raise BadInput("a prompt of 0 tokens: at least 1 is needed")
        if most is not None and most < 0:
            raise BadInput(f"pages_max {most}: it must be 0 or more")
        limit = (len(ids) - 1) // self._page_size
        placed = place_media(media, self._page_size, len(ids)) if media else NO_MEDIA
        return ids, placed, limit if most is None else min(limit, most)

    def open(
        self,
        identity: Identity,
        ids: Int32s,
        limit: int,
        media: Placed,
        reuse: bool | None = None,
        *,
        reserve: bool = True,
    ) -> Lease:
        """A lease with what matches of `ids`, at most `limit` pages, and pages for the rest.

        reuse: what the prompt wants, so that the miss ledger tells of it; None: it was admitted before.
        reserve: False: the lease ends where the match does, and has no pages for the rest.
        Raises `OutOfPages`, with nothing changed, or `BadInput` for a prompt that could never be admitted.
        """
        length = len(ids)
        need = self._pages_of(length)
        limit = _storable(limit, media)
        raw = ids.data.cast("B")
        (pages, below, name), host_found, declined = self._match(identity, raw, limit, media.by_page)
        if declined and self._traffic is not None:
            self._traffic.loads_declined += 1
        on_gpu = len(pages)
        check_token_range(ids[on_gpu * self._page_size :], on_gpu * self._page_size)
        number = next(self.numbers)
        self._ledger.retain(pages, number)
        load = self._traffic.begin_load(below) if self._traffic is not None and below else None
        take = need - on_gpu if reserve else len(below)
        drains = Drains(take)
        try:
            pages.extend(self._room.take(take, number, drains))
        except OutOfPages as e:
            self._ledger.release(pages, number)
            if self._traffic is not None and load is not None:
                self._traffic.cancel_load(load)
            self._counting.refusals += 1
            raise self._room.out_of_pages(e.asked, e.short) from None
        matched = on_gpu
        if self._traffic is not None and load is not None:
            last_name = self._tree.host_name(below[-1])
            late = max(0, len(below) + drains.count - take)
            if self._traffic.load(load, pages[on_gpu : on_gpu + len(below)], drains.copies, late):
                matched, name = on_gpu + len(below), last_name
        rest = ids[matched * self._page_size :] if reserve else ids[:0]
        own = bytearray(rest.data.cast("B")) if len(rest) else bytearray()
        known = matched * self._page_size + len(rest)
        lease = Lease(number, identity, pages, matched, name, own, known, matched * self._page_size)
        lease.prompt_len = length
        lease.loaded_len = (matched - on_gpu) * self._page_size
        if matched:
            lease.path = self._storing.page_id(pages[matched - 1])
        lease.media, lease.epoch = media, self._storing.epoch
        if self._traffic is not None:
            lease.order = self._order
            self._traffic.join(pages[:matched], lease)
            for copy in drains.copies:
                self._traffic.copies.wait(lease, copy)
        self._storing.begun(lease)
        self._leases[number] = lease
        if self._misses is not None and reuse is not None:
            capped = _storable((length - 1) // self._page_size, media) - limit if reuse else 0
            looked = Looked(matched, limit, name, host_found - (matched - on_gpu), declined, reuse, capped)
            self._misses.admitted(number, identity, raw, media.by_page, looked)
        return lease

    def look(self, identity: Identity, ids: Int32s, limit: int, media: Placed) -> Look:
        """What `open` would find now; changes nothing."""
        reserve = self._pages_of(len(ids))
        limit = _storable(limit, media)
        (pages, below, _), *_ = self._match(identity, ids.data.cast("B"), limit, media.by_page)
        if below and self._traffic is not None and not self._traffic.takes_load(len(below)):
            below = below[:0]
        asked, on_gpu = reserve - len(pages), len(pages)
        short = asked - self._ledger.free - self._ledger.idle
        if short + on_gpu <= 0:
            return Look(on_gpu + len(below), on_gpu, asked, short)
        busy = bytes(not self._ledger.is_idle(page) for page in pages)
        short += on_gpu - sum(busy)  # the idle ones that match are no room
        numbers = self._room.out_of_pages(asked, short)
        return Look(
            on_gpu + len(below), on_gpu, asked, short, numbers.in_flight, numbers.held, numbers.total, busy
        )  # fmt: skip

    def shorten(self, lease: Lease, pages: int) -> None:
        """The lease computes its matched pages from `pages` on itself, on other ones that it gets for them.

        Raises `OutOfPages`, with nothing changed, and what `Lease.check_shorten` does.
        """
        lease.check_shorten(pages, self._page_size)
        gone = lease.pages[pages : lease.base]
        room = self._ledger.free + self._ledger.idle + sum(self._ledger.holders(page) == 1 for page in gone)
        if len(gone) > room:
            self._counting.refusals += 1
            raise self._room.out_of_pages(len(gone), len(gone) - room)
        taken = (lease.taken_len, lease.loaded_len)
        self._storing.shorten(lease, pages)  # before the pages that say what its tokens are may leave
        self._release(lease, gone)
        drains = Drains(len(gone))
        lease.pages[pages : pages + len(gone)] = self._room.take(len(gone), lease.number, drains)
        if self._traffic is not None:
            for copy in drains.copies:
                self._traffic.copies.wait(lease, copy)
        self._counting.shortened(lease, *taken)

    def _pages_of(self, length: int) -> int:
        """Pages of a prompt; `BadInput` when it could never be admitted."""
        pages = -(-length // self._page_size)
        if pages > self._ledger.total:
            raise BadInput(f"a prompt of {length} tokens needs {pages} pages, the pool has {self._ledger.total}")
        return pages

    def _match(self, identity: Identity, raw: memoryview, limit: int, media: PageMedia) -> tuple[Match, int, bool]:
        """What of a prompt is on the GPU, or in host memory with its bytes there, never ending inside a whole item.

        And how many pages host memory has behind those on the GPU, and whether they are computed since that is faster.
        """
        found = self._tree.match(identity, raw, limit, media)
        below, declined = found.host, False
        if self._traffic is not None and found.host:
            below, declined = self._traffic.loadable(found.host)
        if media is not None:
            on_gpu = len(found.pages)
            whole = cut_before_split_item(on_gpu + len(below), self._page_size, media)
            if whole < on_gpu:
                return self._tree.match(identity, raw, whole, media), 0, False
            below = below[: whole - on_gpu]
        return Match(found.pages, below, found.name), len(found.host), declined

    def suspend(self, lease: Lease, kv_len: int, names: list[int], traffic: Traffic, complete: bool) -> Suspended:
        """Parks what a lease holds of its first `kv_len` positions, and ends it; see `TieredCache.suspend`."""
        if lease.closed:
            raise CannotSuspend(f"{lease} cannot be suspended: its chain is closed")
        used = self._pages_of(kv_len)
        holding = traffic.copies.requests_holding(lease.pages[:used])
        which = [i for i in range(used) if complete or holding[i] == 1]
        ticket = Suspended(lease, kv_len, dict.fromkeys(which, -1))
        if which and not traffic.parking.suspend(ticket, page_ids(lease.pages[i] for i in which)):
            raise CannotSuspend(f"{lease} {traffic.parking.refusal(len(which))}")
        self._storing.seal_pages(lease, names)
        if not self._storing.store(lease):
            self._storing.touch(lease)
        if used > lease.sealed:
            self._ledger.seal(lease.pages[used - 1 : used], lease.number)  # the tail: nobody writes it any more
        traffic.parking.hold_sources(ticket)
        self._end(lease)
        return ticket

    def resume(self, ticket: Suspended, ids: Int32s, parking: Parking) -> Lease:
        """A lease of a suspended request; see `TieredCache.resume`."""
        size, kv_len = self._page_size, ticket.kv_len
        parking.check(ticket)
        current = ticket.epoch == self._storing.epoch
        limit = min(kv_len, len(ids) - 1) // size if current else 0
        lease = self.open(ticket.identity, ids, limit, ticket.media)
        lease.store = ticket.store and current
        first = lease.base
        lost = ticket.lost or (self._traffic is not None and self._traffic.copies.manager.ended)
        slots = {} if lost else {i: s for i, s in ticket.slots.items() if i >= first}
        if slots:
            gpu = page_ids(lease.pages[i] for i in slots)
            if not parking.resume(ticket, page_ids(slots.values()), gpu, lease):
                self._end(lease)
                raise NotReady(f"{ticket}: the queue of loads is full")
        parking.forget(ticket)
        used = -(-kv_len // size)
        gone = [i for i in range(first, used) if i not in slots]
        lease.holes = whole_holes([(i * size, min((i + 1) * size, kv_len)) for i in gone], ticket.media.units)
        lease.kv_len = kv_len
        return lease


def _storable(limit: int, media: Placed) -> int:
    """Pages that may match: none from where what is there has no digest."""
    return limit if media.storable is None else min(limit, media.storable)
