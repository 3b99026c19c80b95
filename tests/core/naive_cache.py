"""A naive cache of one tier: what each request holds, what is cached, who is refused and what leaves, as plain sets.

Must not use the cache that it is compared with: its pages are objects without numbers, its prefixes whole token lists.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvkeep.index.media import MediaItem
from tests.core.naive import NaiveIndex, PageContent, Prefix


class Page:
    """A page: which requests hold it, and whether it is cached."""

    def __init__(self, *holders: int) -> None:
        self.holders = set(holders)
        self.cached = False

    @property
    def idle(self) -> bool:
        return self.cached and not self.holders


class Refused(Exception):
    """Free and droppable pages do not suffice."""

    def __init__(self, asked: int, short: int) -> None:
        super().__init__(asked, short)
        self.asked = asked
        self.short = short


@dataclass
class NaiveLease:
    """A request.  Pages before `base` came from the cache; `path` is the cached page at depth `stored - 1`."""

    number: int
    root: Hashable
    tokens: list[int]
    media: tuple[MediaItem, ...]
    store: bool
    epoch: int
    pages: list[Page] = field(default_factory=list)
    storable: int = 1 << 30
    base: int = 0
    sealed: int = 0
    stored: int = 0
    path: Page | None = None


class NaiveCache:
    """`total` pages of `page_size` positions; `at_seal` as index_at="seal"."""

    def __init__(self, total: int, page_size: int, at_seal: bool) -> None:
        self.total = total
        self.page_size = page_size
        self.at_seal = at_seal
        self.index = NaiveIndex()
        self.leases: dict[int, NaiveLease] = {}
        self.epoch = 0
        self.admissions = self.refusals = self.prompt_tokens = self.matched_tokens = self.stored = self.evicted = 0

    # ------------------------------------------------------------------ questions

    @property
    def cached_pages(self) -> set[Page]:
        return {entry.page for entry in self.index.entries.values()}

    @property
    def held_pages(self) -> set[Page]:
        return {page for lease in self.leases.values() for page in lease.pages}

    @property
    def free(self) -> int:
        return self.total - len(self.cached_pages | self.held_pages)

    @property
    def idle(self) -> int:
        return len(self.cached_pages - self.held_pages)

    def chain(self, tokens: Sequence[int], media: Sequence[MediaItem], pages: int) -> tuple[PageContent, ...]:
        """The content of the first pages of a sequence."""
        size = self.page_size
        return tuple(
            (
                tuple(tokens[first : first + size]),
                tuple(m for m in media if m.offset < first + size and first < m.offset + m.length),
            )
            for first in range(0, pages * size, size)
        )

    def hit(self, root: Hashable, tokens: Sequence[int], media: Sequence[MediaItem]) -> list[Page]:
        """The cached pages that a prompt may take: one token is left, no item whose inside looks ahead is cut."""
        size = self.page_size
        pages = self.index.match(root, self.chain(tokens, media, len(tokens) // size), (len(tokens) - 1) // size)
        while any(
            m.offset < len(pages) * size and (m.digest is None or self.cuts(m, len(pages) * size)) for m in media
        ):
            pages.pop()
        return pages

    @staticmethod
    def cuts(item: MediaItem, end: int) -> bool:
        return not item.causal and item.offset < end < item.offset + item.length

    # ------------------------------------------------------------------ the life of a request

    def admit(
        self, root: Hashable, tokens: Sequence[int], media: Sequence[MediaItem], reuse: bool, store: bool
    ) -> NaiveLease:
        lease = NaiveLease(self.admissions, root, list(tokens), tuple(media), store, self.epoch)
        pages = self.hit(root, tokens, media) if reuse else []
        unknown = [m.offset // self.page_size for m in media if m.digest is None]
        lease.storable = min(unknown, default=lease.storable)
        lease.base = lease.sealed = lease.stored = len(pages)
        lease.path = pages[-1] if pages else None
        self.leases[lease.number] = lease
        lease.pages = pages
        for page in pages:
            page.holders.add(lease.number)
        try:
            lease.pages = pages + self.take(-(-len(tokens) // self.page_size) - len(pages), lease.number)
        except Refused:
            self.release(lease, pages)
            del self.leases[lease.number]
            raise
        self.admissions += 1
        self.prompt_tokens += len(tokens)
        self.matched_tokens += len(pages) * self.page_size
        return lease

    def extend(self, lease: NaiveLease, tokens: Sequence[int], room: int) -> None:
        need = -(-(len(lease.tokens) + len(tokens) + room) // self.page_size) - len(lease.pages)
        if need > 0:
            lease.pages += self.take(need, lease.number)
        lease.tokens += tokens

    def seal(self, lease: NaiveLease, kv_len: int) -> None:
        lease.sealed = max(lease.sealed, kv_len // self.page_size)
        if self.at_seal and lease.stored < self.last_to_store(lease):
            self.put(lease)

    def truncate(self, lease: NaiveLease, length: int) -> None:
        size = self.page_size
        full, part = divmod(length, size)
        keep = full + (part > 0)
        gone = lease.pages[keep:]
        fresh = bool(part) and full < lease.sealed
        if fresh and not (self.free or self.idle or any(page.holders == {lease.number} for page in gone)):
            self.refusals += 1
            raise Refused(1, 1)
        on_its_path = lease.epoch == self.epoch and not self.lost(lease)
        cut = [m for m in lease.media if m.offset < length < m.offset + m.length]
        lease.storable = min([lease.storable, *(m.offset // size for m in cut)])
        lease.media = tuple(m for m in lease.media if m.offset < length)
        lease.base, lease.sealed = min(lease.base, full), min(lease.sealed, full)
        if full < lease.stored:
            lease.stored = full
            if on_its_path:
                lease.path = self.index.entries[self.prefix(lease, full)].page if full else None
        lease.tokens = lease.tokens[:length]
        lease.pages = lease.pages[:keep]
        self.release(lease, gone)
        if fresh:
            (page,) = self.take(1, lease.number)
            self.release(lease, lease.pages[full:])
            lease.pages[full] = page

    def finish(self, lease: NaiveLease, kv_len: int) -> None:
        lease.sealed = max(lease.sealed, kv_len // self.page_size)
        if lease.epoch == self.epoch:
            if self.lost(lease):
                lease.stored = lease.base
            if lease.stored < self.last_to_store(lease):
                self.put(lease)
            elif lease.stored:
                self.index.touch(*self.prefix(lease, lease.stored))
        self.abort(lease)

    def abort(self, lease: NaiveLease) -> None:
        self.release(lease, lease.pages)
        del self.leases[lease.number]

    def reset(self) -> tuple[int, int]:
        report = (self.idle, len(self.held_pages))
        for page in self.cached_pages:
            page.cached = False
        self.index.entries.clear()
        self.epoch += 1
        return report

    # ------------------------------------------------------------------ the index

    def prefix(self, lease: NaiveLease, pages: int) -> Prefix:
        return (lease.root, self.chain(lease.tokens, lease.media, pages))

    def last_to_store(self, lease: NaiveLease) -> int:
        current = lease.store and lease.epoch == self.epoch
        return min(lease.sealed, lease.storable) if current else 0

    def put(self, lease: NaiveLease) -> None:
        """First writer wins: only what is missing is added."""
        last = self.last_to_store(lease)
        prefix = self.prefix(lease, last)
        added = self.index.insert(*prefix, lease.pages[:last])
        for depth in added:
            lease.pages[depth].cached = True
        self.stored += len(added)
        lease.stored = last
        lease.path = self.index.entries[prefix].page

    def lost(self, lease: NaiveLease) -> bool:
        """Whether another request's page, at the end of what this one stored, has left the cache since."""
        if lease.epoch != self.epoch or not lease.stored:
            return False
        entry = self.index.entries.get(self.prefix(lease, lease.stored))
        return entry is None or entry.page is not lease.path

    # ------------------------------------------------------------------ room

    def take(self, count: int, number: int) -> list[Page]:
        """Free pages first, then cached ones that nobody holds, coldest first, only as many as are short."""
        short = count - self.free
        if short > self.idle:
            self.refusals += 1
            raise Refused(count, short - self.idle)
        for page in self.index.evict(max(short, 0), lambda page: page.idle):
            page.cached = False
            self.evicted += 1
        for lease in self.leases.values():
            if self.free < count:
                self.swap_twins(lease)
        assert self.free >= count, "a cached page that nobody holds could not be had"
        return [Page(number) for _ in range(count)]

    def swap_twins(self, lease: NaiveLease) -> None:
        """Cached pages that nobody holds, before cached pages of a request, give way to its own equal pages."""
        where = {entry.page: prefix for prefix, entry in self.index.entries.items()}
        inside = [where[page] for page in lease.pages if page in where]
        if not inside:
            return
        root, chain = inside[-1]
        for depth in range(len(chain) - 1):
            entry = self.index.entries[root, chain[: depth + 1]]
            if entry.page.idle:
                if lease.path is entry.page:
                    lease.path = lease.pages[depth]
                entry.page.cached, lease.pages[depth].cached = False, True
                entry.page = lease.pages[depth]

    def release(self, lease: NaiveLease, pages: Sequence[Page]) -> None:
        for page in pages:
            page.holders.discard(lease.number)
