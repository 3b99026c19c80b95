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
    """A listener of `TieredCache.watch`.   block_tokens, per_page: positions of a block, blocks of a page.

    Pages of several blocks may begin with the same ones: a block is told when the first page with it enters, and when
    the last one has left.
    """

    def __init__(self, block_tokens: int, per_page: int) -> None:
        self._block_tokens = block_tokens
        self._per_page = per_page
        self._told: list[Stored | Removed] = []
        self._hashes: dict[int, list[Any]] = {}  # by name, of pages in the tier
        self._pages_with: dict[Any, int] = {}  # of these pages, how many hold a hash
        self._unknown: set[int] = set()  # names that entered; `named` says next what they stand for

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """See `Listener`."""
        self._unknown.update(names.tolist())

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """See `Listener`."""
        self._leave(names.tolist())

    def cleared(self, tier: Tier) -> None:
        """See `Listener`."""
        self._leave(list(self._hashes))  # vLLM's own event for that would speak of its blocks too

    def _leave(self, names: list[int]) -> None:
        gone = []
        for h in (h for name in names for h in self._hashes.pop(name, ())):
            left = self._pages_with.pop(h) - 1
            if left:
                self._pages_with[h] = left
            else:
                gone.append(h)
        if gone:
            self._told.append(Removed(gone))

    def named(self, names: Sequence[int], chain: Any, first: int) -> None:
        """The pages of a chain from page `first` on are called `names`: those that have just entered are told.

        That may be pages in the middle: another request's, which stood for them until now, have left.
        """
        fresh, hashes = list[int](), chain.request.block_hashes
        for i in range(len(names) - 1, -1, -1):
            if not self._unknown:
                break
            if names[i] in self._unknown:
                self._unknown.remove(names[i])
                start, end = (first + i) * self._per_page, (first + i + 1) * self._per_page
                self._hashes[names[i]] = list(hashes[start:end])
                fresh += (b for b in reversed(range(start, end)) if self._enters(hashes[b]))
        fresh.reverse()
        starts = [b for k, b in enumerate(fresh) if not k or b - 1 != fresh[k - 1]]
        ends = [b + 1 for k, b in enumerate(fresh) if [b + 1] != fresh[k + 1 : k + 2]]
        self._told += [self._event(chain, start, end) for start, end in zip(starts, ends, strict=True)]

    def _enters(self, block_hash: Any) -> bool:
        before = self._pages_with.get(block_hash, 0)
        self._pages_with[block_hash] = before + 1
        return not before

    def _event(self, chain: Any, start: int, end: int) -> Stored:
        """Blocks `start` to `end` of a chain have entered."""
        request, size = chain.request, self._block_tokens
        lora = request.lora_request
        return Stored(
            hashes=list(request.block_hashes[start:end]),
            parent=request.block_hashes[start - 1] if start else None,
            tokens=chain.known()[start * size : end * size].tolist(),
            lora_id=lora and lora.lora_int_id,
            lora_name=lora and lora.lora_name,
        )

    def take(self) -> list[Stored | Removed]:
        """What has changed since the last call, in order."""
        told, self._told = self._told, []
        return told
