"""What an admitted request holds.

Must not know the tree, the pool or the lock: `cache.py` is the only one that changes a lease.
"""

from array import array
from collections.abc import Callable
from typing import Any, Literal

from kvkeep.errors import BadInput, InvariantViolation, NotReady
from kvkeep.index.hints import Hint
from kvkeep.index.media import NO_MEDIA, Placed, check_ends, chunk_end, cut_before_split_item
from kvkeep.index.names import TOKEN_NBYTES, Identity
from kvkeep.index.uses import Began, Use


class Gate:
    """What keeps the pages of a lease from being touched.

    Loads gate whoever schedules: no forward is launched before `open`.  Copies out of pages gate streams only.
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: "Lease") -> None:
        self._lease = lease

    @property
    def open(self) -> bool:
        """Whether a forward may be launched over the lease: the opposite of `Lease.read_in_progress`."""
        return not self._lease.copies

    def wait_on(self, stream: object) -> bool:
        """Puts what is queued on `stream` from now on behind the copies out of the lease's pages; they gate no more.

        stream: where the engine launches its forwards; for CUDA a `torch.cuda.Stream`, or its handle; None: nowhere.
        Returns whether it is `open`: not while loads run or copies have not started, nor where there are no streams.
        Never blocks.
        """
        if stream is not None and self._lease.copies and self._lease.order is not None:
            self._lease.order(self._lease, stream)
        return self.open


class Window:
    """How the pages of a lease differ from its chain, once it is windowed or forked.

        pages of the chain   0 ... protected ... kept ...... kept + released ......
        in `Lease.pages`     |      stay             |   let go of   |  the window  |

    protected: leading pages that are stored at the end, the rest never.   kept: leading ones that are never released:
        one more where the protected length ends inside a page.
    released: pages let go of behind those.   epoch: how often.
    sealed: once the chain is closed, leading pages that are immutable, released ones counted; None before: its pages
        have names.
    """

    __slots__ = ("epoch", "kept", "protected", "released", "sealed")

    def __init__(self, protected: int, kept: int, sealed: int | None = None) -> None:
        self.protected = protected
        self.kept = kept
        self.released = 0
        self.epoch = 0
        self.sealed = sealed

    def copy(self, protected: int, sealed: int) -> "Window":
        """The same for a fork, which has `sealed` immutable pages."""
        window = Window(protected, self.kept, sealed)
        window.released, window.epoch = self.released, self.epoch
        return window


class Lease:
    """The pages of one live request, in order, and what is known of their content.

        positions   0 ........ matched_len ........ kv_len ........ length ........ reserved
        pages       | shared, from the cache | sealed | being written |  room  |
        tokens                 | token ids from `base` on .........|

    pages: page ids; position p lies in `pages[p // page_size]`, or, once pages were released, in
        `pages[lease.index_of(p // page_size)]`.  Treat it as read-only.
    length: token ids known (prompt and appended).   kv_len: positions known to hold committed KV.
    loaded_len: of the positions that admission took from the cache (`matched_len`), the last ones, which a load of this
        lease's own brings from the host tier.
    holes: after `TieredCache.resume`, ranges of positions below `kv_len` whose KV is gone, to be computed first
    revoked: a load that others waited for as well failed, or was overdue: the lease has ended, and is to be admitted
        again.
    """

    __slots__ = (
        "base", "base_name", "began", "copies", "epoch", "hint", "holes", "identity", "kv_len", "length", "live",
        "loaded_len", "media", "names", "number", "order", "pages", "path", "prompt_len", "revoked",
        "store", "stored", "taken_len", "tokens", "twins", "unread", "use", "window",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        identity: Identity,
        pages: "array[int]",
        base: int,
        base_name: int,
        tokens: bytearray,
        length: int,
        matched_len: int,
    ) -> None:
        self.number = number
        self.identity = identity
        self.pages = pages
        self.length = length
        self.prompt_len = length
        self.taken_len = matched_len  # see `matched_len`
        self.unread = False  # it has become less, and nobody has looked since
        self.loaded_len = 0
        self.kv_len = matched_len
        self.live: Literal[True, False] = True
        # The chain: pages before `base` are shared ones in the index, called `base_name` at their end; from there on
        # `tokens` are this lease's own ids (int32 bytes) and `names` those of its sealed pages.
        self.base = base
        self.base_name = base_name
        self.tokens = tokens
        self.names: list[int] = []
        # The index: pages up to `stored` are there, the last one as (page, generation) `path` (None: the root); `twins`
        # are the depths where the index has another request's page of equal content.
        self.store = True
        self.media: Placed = NO_MEDIA
        self.epoch = 0
        self.stored = base
        self.path: tuple[int, int] | None = None
        self.twins: list[int] = []
        # For an order that learns: the admission, the caller's hint, and what the order knows of this use of the path.
        self.began: Began | None = None
        self.hint: Hint | None = None
        self.use: Use | None = None
        self.copies: set[Any] = set()  # copies in flight, into or out of its pages, that it waits for
        self.order: Callable[[Lease, object], None] | None = None  # what `Gate.wait_on` does
        self.revoked = False
        self.holes: list[tuple[int, int]] = []
        self.window: Window | None = None

    @property
    def read_in_progress(self) -> bool:
        """Whether copies still write, or read, pages of the lease: no forward may be launched over it.

        `TieredCache.poll` ends it.  `revoked` may have become True instead: the lease has ended, admit again.
        """
        return bool(self.copies)

    @property
    def matched_len(self) -> int:
        """Positions that admission took from the cache: the prefill begins there.

        It becomes less when a load fails: read it again when `read_in_progress` has ended.  Until somebody has, no KV
        behind it is believed to be there.
        """
        self.unread = False
        return self.taken_len

    @property
    def gate(self) -> Gate:
        """What `read_in_progress` tells, for engines that launch forwards on streams."""
        return Gate(self)

    @property
    def closed(self) -> bool:
        """Whether its chain has ended: pages are sealed without names, and nothing more of it is stored."""
        return self.window is not None and self.window.sealed is not None

    @property
    def prefix_epoch(self) -> int:
        """How often pages were released: when it has risen, whatever was made of `pages` is to be made again."""
        return self.window.epoch if self.window is not None else 0

    @property
    def released(self) -> int:
        """How many pages behind the protected prefix were released."""
        return self.window.released if self.window is not None else 0

    def index_of(self, number: int) -> int:
        """Where in `pages` page `number` of the chain is; `BadInput` when it was released."""
        window = self.window
        if window is None or number < window.kept:
            return number
        if number < window.kept + window.released:
            raise BadInput(f"page {number} of {self}: pages {window.kept} to {number} were released")
        return number - window.released

    def shorten(self, depth: int, base_name: int, raw: bytes, page_nbytes: int) -> None:
        """The matched pages from `depth` on did not arrive: the lease computes them.   raw: their token ids."""
        if depth + len(raw) // page_nbytes != self.base or self.names:
            raise InvariantViolation(f"{self}: {len(raw) // page_nbytes} pages at {depth} before page {self.base}")
        self.tokens[:0] = raw
        self.base = self.stored = depth
        self.base_name = base_name
        self.loaded_len = 0
        self.holes = []  # they are behind it
        self.taken_len = self.kv_len = depth * (page_nbytes // TOKEN_NBYTES)
        self.unread = True

    def check_shorten(self, pages: int, page_size: int) -> None:
        """Raises `BadInput` or `NotReady` when it cannot go back to the first `pages` pages that matched."""
        if self.read_in_progress:
            raise NotReady(f"{self} cannot be shortened: copies of its pages are running")
        if self.names or self.kv_len > self.base * page_size:
            raise BadInput(f"{self} cannot be shortened: it has KV of its own already")
        if not 0 <= pages <= self.base or pages != cut_before_split_item(pages, page_size, self.media.by_page):
            inside = "and not inside an item whose attention is not causal"
            raise BadInput(f"{self} shortened to {pages} pages: it must be 0 to {self.base}, {inside}")

    def check_kv_len(self, kv_len: int, page_size: int) -> None:
        """Raises `BadInput` or `NotReady` when `kv_len` positions cannot hold committed KV."""
        sealed_len = self.sealed * page_size
        if not sealed_len <= kv_len <= self.length:
            raise BadInput(f"kv_len {kv_len}: it must be {sealed_len} to {self.length}, sealed to known")
        check_ends(self.media.units, "kv_len", kv_len)
        if self.read_in_progress and kv_len // page_size > self.sealed:
            raise NotReady(f"{self} has no KV for {kv_len} positions yet: copies of its pages are running")
        if self.unread and kv_len > self.taken_len:
            raise NotReady(f"{self}: a load failed, its KV ends at {self.taken_len}: read matched_len again")

    def chunk_end(self, kv_len: int, want: int) -> int:
        """Where a prefill chunk ends that begins at `kv_len` and would end at `want`: a media item whose attention is
        not causal is not split.

        Before such an item, or behind it where the chunk begins with it, however long it is; `holes` are split by the
        same rule.
        """
        return chunk_end(self.media.units, kv_len, want)

    @property
    def sealed(self) -> int:
        """Leading pages of the chain that are immutable."""
        if self.window is not None and self.window.sealed is not None:
            return self.window.sealed
        return self.base + len(self.names)

    def raw(self, first: int, last: int, page_size: int) -> memoryview:
        """Token ids of pages `first` to `last` as bytes; let it go before tokens are appended."""
        nbytes = page_size * TOKEN_NBYTES
        return memoryview(self.tokens)[(first - self.base) * nbytes : (last - self.base) * nbytes]

    def __repr__(self) -> str:
        return f"Lease {self.number}"
