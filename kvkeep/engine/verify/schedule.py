"""Same schedule: a cached run against the same forwards over pages that were never dropped, moved or shared.

Must not know what the scenarios are for. The reference is as naive as can be: every request has pages of its own, and a
dictionary from the exact token prefix of a page to its bytes, copied when the page filled, stands for the cache. It has
no index, no eviction and no limit. After each step of the cached engine the same rows of the same requests go through
the same forward, and every bit that was taken or made is compared; a page that the cache took from the wrong place, or
that was overwritten, moved or left stale, is then no copy of anything that was ever computed for that prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvkeep.engine.engine import Engine, Request
from kvkeep.engine.forward import Forward, Piece
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.paged_attention import Segment
from kvkeep.engine.verify.compare import Difference, kv_difference, logits_difference, same_bits
from kvkeep.tiers.gpu_pool import GpuPool

PageKey = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Call:
    """One request's part of one forward: positions [start, end), copied while its pages still held them.

    taken: KV of [0, start) where the request was admitted just before; None otherwise.
    made: KV of [start, end). logits: after end - 1, where they were wanted.
    """

    request: Request
    ids: tuple[int, ...]
    start: int
    end: int
    taken: torch.Tensor | None
    made: torch.Tensor
    logits: torch.Tensor | None


@dataclass(slots=True)
class Private:
    """A live request of the reference: its own pages, the admission they are for, and the first difference seen."""

    lease_number: int
    pages: list[int] = field(default_factory=list)


class SameForwards:
    """Judges the requests of one cached engine after another by running each of their forwards a second time."""

    def __init__(self, loaded: LoadedModel, page_size: int, request_pages_max: int, requests_max: int) -> None:
        self._loaded = loaded
        self._page_size = page_size
        self._layout = loaded.layout(page_size)
        self._pool = GpuPool.allocate(self._layout, request_pages_max * requests_max, loaded.device)
        self._free = list(range(request_pages_max * requests_max))
        self._request_pages_max = request_pages_max

    def watch(self, engine: Engine) -> None:
        """Begins anew, with nothing kept, for this engine."""
        self._engine = engine
        self._forward = Forward(self._loaded, self._pool.kv, self._layout, engine.arithmetic)
        self._kept: dict[PageKey, list[torch.Tensor]] = {}
        self._private: dict[int, Private] = {}
        self._leases: dict[int, int] = {}
        self._calls: list[Call] = []
        self._found: dict[int, Difference] = {}
        engine.on_forward = self._seen

    def after_step(self) -> None:
        """Run the last step's forward on private pages and compare everything it took and made."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        pieces = [self._piece(call) for call in calls]
        logits = self._forward.run(pieces)
        wanted = [call.request.number for call in calls if call.logits is not None]
        row_of = {number: row for row, number in enumerate(wanted)}
        for call in calls:
            number = call.request.number
            pages = self._private[number].pages
            made = read_positions(self._pool.kv, pages, self._page_size, call.start, call.end)
            self._note(number, kv_difference(call.made, made, call.start))
            if call.logits is not None:
                self._note(number, logits_difference(call.logits, logits[row_of[number]], call.end - 1))
            self._keep_full_pages(call, pages)

    def judge(self, request: Request) -> Difference | None:
        """The first place where a finished request differed; its private pages are given back."""
        self._free += self._private.pop(request.number).pages
        self._leases.pop(request.number)
        return self._found.pop(request.number, None)

    def _seen(self, request: Request, start: int, end: int, logits: torch.Tensor | None) -> None:
        """Copies, inside the cached engine's step, what a call took and made."""
        lease = request.held
        admitted = self._leases.get(request.number) != lease.number
        self._leases[request.number] = lease.number

        def read(first: int, last: int) -> torch.Tensor:
            return read_positions(self._engine.pool.kv, lease.pages, self._page_size, first, last)

        self._calls.append(
            Call(
                request=request,
                ids=tuple(request.ids[:end]),
                start=start,
                end=end,
                taken=read(0, start) if admitted and start else None,
                made=read(start, end),
                logits=None if logits is None else logits.clone(),
            )
        )

    def _piece(self, call: Call) -> Piece:
        """The call as a piece over private pages; those it took are filled from what was kept."""
        number, lease_number = call.request.number, self._leases[call.request.number]
        private = self._private.get(number)
        if private is None or private.lease_number != lease_number:
            if private is not None:
                self._free += private.pages
            pages = [self._free.pop() for _ in range(self._request_pages_max)]
            private = self._private[number] = Private(lease_number, pages)
            for page in pages:
                self._pool.kv[page].fill_(float("nan"))
            if call.taken is not None:
                self._take_pages(call, private.pages)
        return Piece(
            segment=Segment(private.pages, call.start, call.end),
            ids=call.ids[call.start :],
            wanted=call.logits is not None,
        )

    def _take_pages(self, call: Call, pages: Sequence[int]) -> None:
        """Fill the first private pages with what was kept for their prefixes: what the cache must have handed out.

        A prefix that was dropped and computed again may have been computed in other steps, to other bits; each such
        version was kept, and the one the cache handed out must be among them.
        """
        taken = call.taken
        assert taken is not None
        size = self._page_size
        for place, page in enumerate(pages[: call.start // size]):
            got = taken[:, :, place * size : (place + 1) * size]
            versions = self._kept.get(self._key(call, place), [])
            right = next((kept for kept in versions if same_bits(kept, got)), None)
            if right is None:
                right = versions[-1] if versions else torch.full_like(got, float("nan"))
                self._note(call.request.number, kv_difference(got, right, place * size))
            self._pool.kv[page].copy_(right)

    def _keep_full_pages(self, call: Call, pages: Sequence[int]) -> None:
        """Copy the pages that this call filled, under their exact prefixes."""
        for place in range(call.start // self._page_size, call.end // self._page_size):
            bytes_ = self._pool.kv[pages[place]].clone()
            versions = self._kept.setdefault(self._key(call, place), [])
            if not any(same_bits(kept, bytes_) for kept in versions):
                versions.append(bytes_)

    def _key(self, call: Call, place: int) -> PageKey:
        prefix = call.request.ids[: (place + 1) * self._page_size]
        return call.request.salt, prefix.tobytes()

    def _note(self, number: int, found: Difference | None) -> None:
        if found is not None:
            self._found.setdefault(number, found)


def read_positions(kv: torch.Tensor, pages: Sequence[int], page_size: int, first: int, last: int) -> torch.Tensor:
    """A copy of K and V of positions [first, last): [layers, 2, last - first, kv_heads, head_dim]."""
    first_page = first // page_size
    own = torch.tensor(list(pages[first_page : -(-last // page_size)]), dtype=torch.long, device=kv.device)
    gathered = kv[own].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    return gathered[:, :, first - first_page * page_size : last - first_page * page_size].clone()
