"""Which of vLLM's block hashes the tier holds, as it changes: what vLLM publishes as KV events.

Must not import vLLM.  The cache tells of names under its lock; here they are put aside, and told as hashes when asked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvkeep.index.eviction import Tier
from kvkeep.index.watch import Names, Reason


class Stored(NamedTuple):
    """Blocks of consecutive positions that entered the tier.

    hashes: vLLM's, one a block.   parent: the hash before the first; None at the start of a sequence.
    tokens: their ids.   lora_id, lora_name: None without an adapter.
    """

    hashes: list[Any]
    parent: Any
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None


class Removed(NamedTuple):
    """Blocks that left the tier."""

    hashes: list[Any]


class EventLog:
    """A listener of `TieredCache.watch`.   block_tokens, per_page: positions of a block, blocks of a page."""

    def __init__(self, block_tokens: int, per_page: int) -> None:
        self._block_tokens = block_tokens
        self._per_page = per_page
        self._told: list[tuple[str, list[int]]] = []
        self._pages: dict[int, Stored] = {}  # by name, of pages in the tier

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """See `Listener`."""
        self._told.append(("stored", names.tolist()))

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """See `Listener`."""
        self._told.append(("removed", names.tolist()))

    def cleared(self, tier: Tier) -> None:
        """See `Listener`."""
        self._told.append(("cleared", []))

    def named(self, names: Sequence[int], chain: Any, first: int) -> None:
        """The pages of a chain from page `first` on are called `names`."""
        request, per_page = chain.request, self._per_page
        lora = request.lora_request
        for i, name in enumerate(names, first):
            at, end = i * per_page, (i + 1) * per_page
            hashes = list(request.block_hashes[at:end])
            tokens = chain.known()[at * self._block_tokens : end * self._block_tokens].tolist()
            parent = request.block_hashes[at - 1] if at else None
            page = Stored(hashes, parent, tokens, lora and lora.lora_int_id, lora and lora.lora_name)
            if name not in self._pages:
                self._pages[name] = page

    def take(self) -> list[Stored | Removed]:
        """What has changed since the last call, in order."""
        told, self._told = self._told, []
        out: list[Stored | Removed] = []
        for what, names in told:
            if what == "cleared":  # vLLM's own event for that would speak of its blocks too
                what, names = "removed", list(self._pages)
            pages = [self._pages[name] for name in names if name in self._pages]
            if what == "stored" and pages:
                first = pages[0]
                hashes = [h for page in pages for h in page.hashes]
                out.append(first._replace(hashes=hashes, tokens=[t for page in pages for t in page.tokens]))
            elif what == "removed" and pages:
                out.append(Removed([h for page in pages for h in page.hashes]))
                for name in names:
                    self._pages.pop(name, None)
        return out
