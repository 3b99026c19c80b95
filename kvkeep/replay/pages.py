"""A trace cut into pages: what the index is given, and the name of every page, computed once.

Must not know orders, pools or caches.

Token traces are cut as they are: a page is `page_size` token ids.  In block traces a page is several blocks, and the id
of the last one stands for all of it and all before it.  There the index sees pages of two ids, (block id, 0), and a
length of n tokens as `2 * (n // page_size) + (1 if a part of a page is left)`: every decision of the index and of the
cache (`(length - 1) // page_size` pages match, a prompt takes `ceil(length / page_size)`, ...) is then the same.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.errors import BadInput
from kvkeep.index.names import TOKEN_NBYTES, Identity, Int32s, chain_names, make_identity
from kvkeep.replay.namefile import load_names, save_names
from kvkeep.replay.trace import Request, Trace

BLOCK_WIDTH = 2

Names = npt.NDArray[np.uint64]

#: All replays have one fingerprint: names can be shared between them.
FINGERPRINT = b"kvkeep replay"


class Pages:
    """The pages of a trace.

    width: ids that the index sees of a page.   ids: by chain, what it sees.   raws: the same as bytes.
    page_ids: by chain, a number for each full page; equal numbers are equal prefixes.   distinct: above all of these.
    """

    def __init__(self, trace: Trace, page_size: int, names_folder: Path | None = None) -> None:
        """names_folder: where names are kept between replays; None: nowhere."""
        if trace.block is not None and page_size % trace.block:
            raise BadInput(
                f"--page-size {page_size}: {trace.name} has blocks of {trace.block} tokens; "
                f"it must be a multiple of that, such as {max(1, round(page_size / trace.block)) * trace.block}"
            )
        self.trace = trace
        self.page_size = page_size
        self.width = page_size if trace.block is None else BLOCK_WIDTH
        self.identity: Identity = make_identity(FINGERPRINT)
        self.page_nbytes = self.width * TOKEN_NBYTES
        if trace.block is None:
            self.ids: Sequence[Int32s] = trace.chains
        else:
            step = page_size // trace.block
            self.page_ids = [chain[step - 1 :: step] for chain in trace.chains]
            self.ids = [_widened(pages) for pages in self.page_ids]
        self.raws = [ids.data.cast("B") if len(ids) else memoryview(b"") for ids in self.ids]
        names = load_names(names_folder, trace.digest, page_size) if names_folder is not None else None
        if names is None:
            names = self._name_tokens() if trace.block is None else self._name_blocks()
            if names_folder is not None:
                save_names(names_folder, trace.digest, page_size, names)
        if trace.block is None:
            self._number(names)
        else:
            self._names = names
        self.distinct = len(self._names)

    # ------------------------------------------------------------------ lengths

    def length(self, tokens: int) -> int:
        """What the index sees of a length in tokens."""
        if self.width == self.page_size:
            return tokens
        full, part = divmod(tokens, self.page_size)
        return full * self.width + (part > 0)

    def names(self, chain: int, first: int, last: int) -> list[int]:
        """The names of pages `first` to `last` of a chain."""
        return self._names[self.page_ids[chain][first:last]].tolist()  # type: ignore[no-any-return]

    def pages_of(self, request: Request, unwritten: int = 0) -> tuple[npt.NDArray[np.int32], int]:
        """The pages that a request leaves behind, and how many of them its prompt can match.

        unwritten: 1 to count as an engine must: one prompt token is left to compute, the last sampled one has no KV.
        """
        stored = max(min(request.final_len - unwritten, request.known_len), request.prompt_len) // self.page_size
        return self.page_ids[request.chain][:stored], max(0, request.prompt_len - unwritten) // self.page_size

    # ------------------------------------------------------------------ naming

    def _name_tokens(self) -> Names:
        """Names of the full pages of all chains, one after the other."""
        nbytes = self.page_nbytes
        parts = [chain_names(self.identity.name, raw[: len(raw) // nbytes * nbytes], nbytes) for raw in self.raws]
        return np.fromiter((name for part in parts for name in part), dtype=np.uint64)

    def _number(self, names: Names) -> None:
        """Equal names are equal prefixes: of a million pages two share one by chance once in 40 million traces."""
        self._names, numbers = np.unique(names, return_inverse=True)
        ends = np.cumsum([len(ids) // self.page_size for ids in self.ids])
        self.page_ids = np.split(numbers.astype(np.int32), ends[:-1])

    def _name_blocks(self) -> Names:
        """Names by page id.  A page that is known has its whole prefix known, so each is named once."""
        top = max((int(pages.max()) for pages in self.page_ids if len(pages)), default=-1) + 1
        names, known = np.zeros(top, dtype=np.uint64), np.zeros(top, dtype=np.bool_)
        for pages, raw in zip(self.page_ids, self.raws, strict=True):
            new = ~known[pages]
            if not new.any():
                continue
            first = int(new.argmax())
            parent = int(names[pages[first - 1]]) if first else self.identity.name
            raw = raw[first * self.page_nbytes : len(pages) * self.page_nbytes]
            names[pages[first:]] = chain_names(parent, raw, self.page_nbytes)
            known[pages[first:]] = True
        return names


def _widened(pages: npt.NDArray[np.int32]) -> Int32s:
    """(id, 0) for each page, and a 0 that stands for a part of a page."""
    out = np.zeros(len(pages) * BLOCK_WIDTH + 1, dtype=np.int32)
    out[: len(pages) * BLOCK_WIDTH : BLOCK_WIDTH] = pages
    return out
