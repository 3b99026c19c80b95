"""How a lease's pages are named, sealed and stored, and where its chain is in the run tree.

Must not know how room is made or what copies there are.  All but `name_full_pages` is called under the cache's lock.

A lease's path is where its chain ends in the tree: (page, generation) of the last entry, or None for the root.  The
pages on it are its own, or another request's of equal content (twins), which may leave at any time.
"""

from kvkeep.errors import InvariantViolation
from kvkeep.index.hints import Hint
from kvkeep.index.media import NO_MEDIA, media_before
from kvkeep.index.names import TOKEN_NBYTES, Hash64, chain_names
from kvkeep.index.runs import Place, RunTree
from kvkeep.index.uses import NO_STAMP, Began, PathUse
from kvkeep.lease import Lease
from kvkeep.tiers.ledger import Ledger


class Storing:
    """Seals and stores the pages of leases over one ledger and tree.

    epoch: how often the index was cleared; a lease of an earlier epoch stores nothing more.
    pages_stored: pages that have entered the index.
    """

    def __init__(self, tree: RunTree, ledger: Ledger, page_size: int, hash_fn: Hash64) -> None:
        self._tree = tree
        self._ledger = ledger
        self._page_size = page_size
        self._page_nbytes = page_size * TOKEN_NBYTES
        self._hash = hash_fn
        self._uses = tree.gpu.order.uses
        self.epoch = 0
        self.pages_stored = 0

    def name_full_pages(self, lease: Lease) -> list[int]:
        """Names of the pages that `kv_len` fills and that are not sealed yet; none on a closed chain.

        Outside the lock.
        """
        first, last = lease.sealed, lease.kv_len // self._page_size
        if last <= first or lease.closed:
            return []
        parent = lease.names[-1] if lease.names else lease.base_name
        raw = lease.raw(first, last, self._page_size)
        return chain_names(parent, raw, self._page_nbytes, first, lease.media.by_page, self._hash)

    def seal_pages(self, lease: Lease, names: list[int]) -> None:
        """The lease's next `len(names)` pages become READY; on a closed chain all that `kv_len` fills."""
        if names:
            self._ledger.seal(lease.pages[lease.sealed : lease.sealed + len(names)], lease.number)
            lease.names += names
        elif (window := lease.window) is not None and window.sealed is not None:
            full = lease.kv_len // self._page_size
            self._ledger.seal(lease.pages[lease.index_of(window.sealed) : full - window.released], lease.number)
            window.sealed = full

    def store(self, lease: Lease) -> bool:
        """Puts the lease's sealed pages into the tree and stamps its path; False when there was nothing to put."""
        last = lease.sealed if lease.media.storable is None else min(lease.sealed, lease.media.storable)
        if lease.window is not None:
            last = min(last, lease.window.protected)
        if last <= lease.stored or not lease.store or lease.epoch != self.epoch:
            return False
        place = self.place(lease) or self._begin_again(lease)
        first = lease.stored
        done = self._tree.insert(
            place,
            lease.names[first - lease.base : last - lease.base],
            lease.raw(first, last, self._page_size),
            lease.pages[first:last],
            lease.media.by_page,
        )
        lease.twins.extend(range(first, first + done.twins))
        lease.stored = last
        lease.path = self.page_id(done.last)
        self.pages_stored += last - first - done.twins
        return True

    def place(self, lease: Lease) -> Place | None:
        """Where the lease's path ends in the tree; None when the page that ended it has left."""
        if lease.path is None:
            return self._tree.root(lease.identity)
        page, generation = lease.path
        return self._tree.place(page) if self._ledger.generation(page) == generation else None

    def _begin_again(self, lease: Lease) -> Place:
        """Another's page, which ended the lease's path, has left: back to what the lease took from the index."""
        lease.stored, lease.twins = lease.base, []
        lease.path = self.page_id(lease.pages[lease.base - 1]) if lease.base else None
        place = self.place(lease)
        if place is None:
            raise InvariantViolation(f"{lease}: a page that it took from the index is not there")
        return place

    def page_id(self, page: int) -> tuple[int, int]:
        """(page, generation): names the page's present content for good."""
        return (page, self._ledger.generation(page))

    def touch(self, lease: Lease) -> None:
        """Stamps the lease's path; where another's page on it has left, the lease's own comes in its place."""
        if lease.epoch != self.epoch:
            return
        place = self.place(lease)
        if place is None:
            place = self._begin_again(lease)
            if self.store(lease):
                return
        self._tree.touch(place)

    def begun(self, lease: Lease) -> None:
        """Notes for an order that learns when `lease` was admitted, and behind which use."""
        if self._uses is not None:
            place = self.place(lease)
            stamp = NO_STAMP if place is None else self._tree.stamp(place)
            lease.began = Began(self._uses.now(), stamp, lease.prompt_len)

    def ended(self, lease: Lease) -> None:
        """Tells an order that learns of the use of the lease's path, if it has stamped it."""
        uses, began = self._uses, lease.began
        if uses is None or began is None or lease.epoch != self.epoch:
            return
        place = self.place(lease)
        if place is None or not place.depth:
            return
        stamp = self._tree.stamp(place)
        if stamp in uses.of_stamp:  # aborted before it stored anything: whoever used these pages last still is that
            return
        out = max(lease.length - began.length, 0)
        lease.use = uses.used(PathUse(stamp, *place, lease.base, lease.base_name, lease.names, began, out))
        if lease.hint is not None:
            uses.hint(lease.use, lease.hint)

    def hint(self, lease: Lease, hint: Hint) -> None:
        """What the caller knows of the chain's future: for when the lease ends, or, if it has, at once."""
        lease.hint = hint
        if self._uses is not None and lease.use is not None:
            self._uses.hint(lease.use, hint)

    def shorten(self, lease: Lease, depth: int) -> None:
        """Takes the lease back to the first `depth` pages that it matched; the ids of the others come from the tree."""
        gone, before = lease.pages[depth : lease.base], lease.pages[depth - 1] if depth else None
        raw, name = bytes(len(gone) * self._page_nbytes), lease.identity.name
        if lease.epoch == self.epoch:  # otherwise they are forgotten, and it stores nothing any more
            raw = b"".join(self._tree.page_content(page)[0] for page in gone)
            name = name if before is None else self._tree.page_content(before)[1]
        found_len = lease.taken_len - lease.loaded_len
        lease.shorten(depth, name, raw, self._page_nbytes)
        lease.path = None if before is None else self.page_id(before)
        lease.loaded_len = max(0, lease.taken_len - found_len)
        lease.unread = False  # whoever asks for it knows

    def rewind(self, lease: Lease, full: int, length: int) -> None:
        """Takes names, token ids and the path back to `full` pages and `length` tokens."""
        place = self.place(lease) if lease.epoch == self.epoch else None
        if full < lease.base:
            content = self._tree.page_content(lease.pages[full]) if lease.pages[full] in self._tree else None
            before = self._tree.page_content(lease.pages[full - 1]) if full and content else None
            lease.base_name = before[1] if before else lease.identity.name
            lease.tokens = bytearray(content[0] if content else self._page_nbytes)
            lease.base = full
        del lease.tokens[(length - lease.base * self._page_size) * TOKEN_NBYTES :]
        del lease.names[max(full - lease.base, 0) :]
        lease.stored = min(lease.stored, full)
        lease.twins = [d for d in lease.twins if d < full]
        if lease.media is not NO_MEDIA:
            lease.media = media_before(lease.media, length, self._page_size)
        if place is not None and place.depth > full:
            page = self._tree.page_at(place, full - 1) if full else None
            lease.path = None if page is None else self.page_id(page)
