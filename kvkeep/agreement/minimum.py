"""Minimum: every rank has a cache of its own, and the group takes what all of them have.

Must not know what carries what ranks say.

    admit     each says how much of the prompt it has, and for which lengths it has room; the least is taken by all
    poll      each says what it has in the end: where a load has failed on one, the others give back what is behind it

Ranks need not be in the same state: caches may hold other things, copies end at other times.  What differs is
answered by computing more, never by a rank that goes on with more than another.
"""

from collections.abc import Mapping, Sequence

from kvkeep.agreement.group import GroupLease
from kvkeep.agreement.settings import Setting
from kvkeep.agreement.wire import GONE, PENDING, Reader, ids, look, read_look, read_refusal, refusal
from kvkeep.cache import TieredCache
from kvkeep.errors import OutOfPages
from kvkeep.index.names import Int32s
from kvkeep.lease import Lease
from kvkeep.transfer.backend import After


class Minimum:
    """The mechanism of a rank with a cache; every rank of the group has this one.

    yielded_pages: those that matched here and were not taken, or were given back, since another rank had less.
    shortened: how often a lease gave pages back after it had them, since another rank's load had failed, say.
    """

    def __init__(self, cache: TieredCache) -> None:
        self.page_size = cache.config.page_size
        self.cache: TieredCache = cache
        self.always_polls = False
        self.yielded_pages = 0
        self.shortened = 0
        self._refused: OutOfPages | None = None

    def settings(self, rank: int, size: int) -> Mapping[str, Setting]:
        """See `Mechanism`."""
        config, pages = self.cache.config, self.cache.stats()
        return {
            "mechanism": "minimum",
            "index_at": config.index_at,
            "eviction": config.eviction,
            "pages": pages.pages_total,
            "host_pages": pages.host_pages_total,
        }

    # ------------------------------------------------------------------ admission

    def offer(self, lease: GroupLease) -> bytes:
        """How many pages match here, and what room there is."""
        r = lease.request
        assert r is not None
        found = self.cache.look(r.tokens, r.salt, r.adapter, r.label, r.media, r.reuse)
        lease.matched = found.pages
        return look(found)

    def open(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """Takes what all have, if all have room for the rest."""
        looks = [read_look(message) for message in said]
        least = min(found.pages for found in looks)
        for found in looks:
            if (error := found.refusal_at(least)) is not None:
                raise error
        self._yield(lease, least)
        r = lease.request
        assert r is not None
        try:
            lease.local = self.cache.admit(
                r.tokens, salt=r.salt, adapter=r.adapter, label=r.label, media=r.media, reuse=r.reuse, store=r.store,
                pages_max=least,
            )  # fmt: skip
        except OutOfPages:  # others use this rank's cache as well: the next poll says so
            lease.local = None

    def _yield(self, lease: GroupLease, pages: int) -> None:
        self.yielded_pages += lease.matched - pages
        lease.matched = pages

    # ------------------------------------------------------------------ may it run?

    def report(self, waiting: Sequence[GroupLease], stream: object) -> bytes:
        """For each, its matched pages once its copies are over."""
        self.cache.poll()
        return ids([self._state(lease.local, stream) for lease in waiting])

    def settle(self, waiting: Sequence[GroupLease], said: Sequence[bytes]) -> None:
        """Ready where all have the same; where some have more they give it back, and are asked once more."""
        every = [Reader(message).ids() for message in said]
        for i, lease in enumerate(waiting):
            states = [states[i] for states in every]
            if GONE in states:
                lease.revoked = True
            elif PENDING not in states:
                least = min(states)
                if least == max(states):
                    lease.ready, lease.matched = True, least * self.page_size
                elif lease.local is not None and lease.local.matched_len > least * self.page_size:
                    lease.matched = lease.local.matched_len // self.page_size
                    self._yield(lease, least)
                    self._shorten(lease, lease.local, least)

    def _shorten(self, lease: GroupLease, local: Lease, pages: int) -> None:
        self.shortened += 1
        try:
            self.cache.shorten(local, pages)
        except OutOfPages:  # the pages that it gives back are not free: others hold them as well
            self.cache.abort(local)
            lease.local = None

    def _state(self, lease: Lease | None, stream: object) -> int:
        if lease is None:
            return GONE
        over = lease.gate.wait_on(stream)  # first: another thread may revoke it, and then its copies are over
        if lease.revoked:
            return GONE
        return lease.matched_len // self.page_size if over else PENDING

    # ------------------------------------------------------------------ more pages

    def grow(self, lease: GroupLease, tokens: Int32s, room: int) -> bytes:
        """Takes the pages, if there are some."""
        assert lease.local is not None
        self._refused = None
        try:
            self.cache.extend(lease.local, tokens, room)
        except OutOfPages as error:
            self._refused = error
        return refusal(self._refused)

    def grown(self, lease: GroupLease, said: Sequence[bytes]) -> None:
        """Where one rank has none, all give theirs back, and room from before: page counts stay equal."""
        assert lease.local is not None
        for message in said:
            if (error := read_refusal(Reader(message))) is not None:
                self.cache.truncate(lease.local, lease.length)
                raise error

    # ------------------------------------------------------------------ ends

    def fence(self, event: After) -> None:
        """See `Mechanism`."""
        self.cache.fence(event)

    def close(self, timeout_s: float) -> None:
        """See `Mechanism`."""
        self.cache.close(drain=False, timeout_s=timeout_s)
