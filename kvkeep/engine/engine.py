"""The embedded engine: admits requests, prefills them in chunks, decodes them in a batch, and ends them.

Must not know how a forward is computed, nor what the cache keeps.  `step` reads top to bottom: admit what fits,
compose a batch, run it, and let each request of it advance.
"""

import contextlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, IndexAt, check_choice, check_int
from kvkeep.engine.arithmetic import Arithmetic, Mode
from kvkeep.engine.forward import Forward, Piece
from kvkeep.engine.host_tier import HostTier, WrapBackend
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.paged_attention import Segment
from kvkeep.engine.request import ImageInput, Request, SamplingParams, State
from kvkeep.engine.sampling import sample
from kvkeep.engine.tracing import ledger_if_recorded, listener
from kvkeep.engine.vision.features import ImageFeatures
from kvkeep.errors import BadInput, CannotSuspend, InvariantViolation, NotReady, OutOfPages
from kvkeep.index.media import MediaItem, place_media
from kvkeep.index.names import TokenIds, as_token_ids
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.traffic import Suspended

__all__ = ["Engine", "EngineConfig", "ImageInput", "Request", "SamplingParams", "State"]

GREEDY = SamplingParams()
CHUNK_TOKENS: dict[Mode, int] = {"strict": 1024, "fast": 2048}
OnForward = Callable[[Request, int, int, torch.Tensor | None], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an `Engine`.

    page_size: token positions a page holds.
    pool_pages: pages of the pool; one request must fit.
    chunk_tokens: most prompt tokens that one step computes, rounded down to whole pages (one at least).  Chunks end on
        multiples of it, counted from the start of the prompt, so that a prefix hit does not move them.  None is 1,024
        in strict arithmetic and 2,048 in fast, where a prompt of 1,500 takes 2 and 0 % longer than at its fastest;
        512 costs 4 % and lets the requests that decode beside a prompt wait half as long.
    arithmetic: "strict": outputs are the same bits whatever was cached, batched or preempted (CPU only); "fast": the
        least work.  None is strict on a CPU, fast elsewhere.
    threads: intra-op threads of torch during a forward (strict arithmetic may take fewer); None takes torch's setting.
    max_batch: most requests that run at a time.
    reuse, store: take pages from the cache, leave pages in it; both off is an engine without a cache.
    index_at: when a page becomes visible to others, see `CacheConfig`.
    host_pages: pages of the tier in host memory, where cold pages wait; 0 is none.
    suspend_pages: pages in host memory for preempted requests; a preempted request that does not fit there gives its
        pages up and is computed again.
    suspend: which pages go there: "exclusive", those that no other request holds (what becomes of the others meanwhile
        may have to be computed again), or "complete", all.
    weigh_loads: compute pages again where that is faster than to bring them from host memory; off brings them always.
    copy_threads: threads that copy between the tiers where both are in host memory.
    """

    page_size: int = 128
    pool_pages: int = 256
    chunk_tokens: int | None = None
    arithmetic: Mode | None = None
    threads: int | None = None
    max_batch: int = 32
    reuse: bool = True
    store: bool = True
    index_at: IndexAt = "seal"
    host_pages: int = 0
    suspend_pages: int = 0
    suspend: Literal["exclusive", "complete"] = "exclusive"
    weigh_loads: bool = True
    copy_threads: int = 1

    def __post_init__(self) -> None:
        for name in ("page_size", "pool_pages", "max_batch", "copy_threads"):
            check_int(name, getattr(self, name), at_least=1)
        for name in ("host_pages", "suspend_pages"):
            check_int(name, getattr(self, name), at_least=0)
        for name in ("chunk_tokens", "threads"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        if self.arithmetic is not None:
            check_choice("arithmetic", self.arithmetic, ("strict", "fast"))
        check_choice("suspend", self.suspend, ("exclusive", "complete"))


DEFAULTS = EngineConfig()

COPY_WAIT_S = 0.005  # a step that waits for copies looks at them this often
CLOSE_S = 5.0  # seconds that copies get to end


class Engine:
    """Runs requests on one model, over one pool of pages and its cache.

    All methods are called from one thread.  `on_forward`, if set, is called for each request of a forward with the
    positions [start, end) it computed and, when a token follows from them, the logits [vocabulary] of the last one;
    K and V of all positions below `end` are then in the request's pages (`read_kv`).  It must not raise: a step that it
    leaves half done cannot be taken up again.  `wrap_backend` puts a backend of the caller's around the one that copies
    between the tiers, for tests of what happens when copies fail.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig = DEFAULTS, *, wrap_backend: WrapBackend | None = None
    ) -> None:
        self.loaded = loaded
        self.config = config
        mode: Mode = config.arithmetic or ("strict" if torch.device(loaded.device).type == "cpu" else "fast")
        chunk_tokens = config.chunk_tokens or CHUNK_TOKENS[mode]
        self._chunk_tokens = max(chunk_tokens // config.page_size, 1) * config.page_size
        # An image that is one unit is computed at once, however short the chunks are.
        chunk_max = max(self._chunk_tokens, loaded.vision.tokens if loaded.vision is not None else 0)
        self.arithmetic: Arithmetic = loaded.arithmetic(
            mode, config.threads or torch.get_num_threads(), rows_max=chunk_max + config.max_batch
        )
        layout = loaded.layout(config.page_size)
        self.pool = GpuPool.allocate(layout, config.pool_pages, loaded.device)
        tiered = config.host_pages or config.suspend_pages
        self._below = HostTier(self.pool, config, wrap_backend) if tiered else None
        misses = ledger_if_recorded(config.page_size)
        self.cache = TieredCache(
            CacheConfig(page_size=config.page_size, index_at=config.index_at),
            self.pool,
            loaded.fingerprint(config.page_size, mode),
            host=self._below.pool if self._below is not None else None,
            transfers=self._below.transfers if self._below is not None else None,
            misses=misses,
        )
        kept = f"pool {config.pool_pages} pages, host {config.host_pages}" + ("" if config.reuse else ", cache off")
        transfers = self._below.transfers if self._below is not None else None
        self._told = listener(f"engine: {kept}", self.cache, misses, transfers)
        self.on_forward: OnForward | None = None
        self._forward = Forward(loaded, self.pool.kv, layout, self.arithmetic)
        self._images: ImageFeatures | None = None
        if loaded.vision is not None:
            self._images = ImageFeatures(loaded.vision, self.cache, self.arithmetic.threads)
        self._submitted = 0
        self._waiting: deque[Request] = deque()  # by number: oldest first
        self._running: list[Request] = []  # by number: oldest first
        # The oldest waiting request found no room, or a running one was preempted for want of it: nothing is
        # admitted before a running request has ended.  What a preemption frees is for those that still run.
        self._held = False

    # --- what callers do -----------------------------------------------------------------------------------------

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        salt: bytes = b"",
        reuse: bool = True,
        store: bool = True,
        images: Sequence[ImageInput] = (),
        on_token: Callable[[Request, int], None] | None = None,
    ) -> Request:
        """Queues a request; `on_token` is called with each token as it is sampled.

        images: of a vision-language model's prompt, in order; their placeholders are among `token_ids`.  Their
            features are taken from the encoder cache, and left there, where both `reuse` and `store` are on.
        Raises `BadInput` for ids outside the vocabulary, when the prompt and `max_new_tokens` exceed the model's
        positions or the whole pool, or for images that do not fit the model or their placeholders.
        """
        ids = as_token_ids(token_ids)
        vocabulary = self.loaded.vocabulary
        if not len(ids):
            raise BadInput("a prompt of 0 tokens: at least 1 is needed")
        if int(ids.max()) >= vocabulary:
            raise BadInput(f"token id {int(ids.max())}: {self.loaded.name} has ids 0 to {vocabulary - 1}")
        total = len(ids) + params.max_new_tokens
        limits = {
            f"the {self.loaded.positions_max} positions of {self.loaded.name}": self.loaded.positions_max,
            f"the pool's {self.config.pool_pages} pages of {self.config.page_size}": (
                self.config.pool_pages * self.config.page_size
            ),
        }
        for what, limit in limits.items():
            if total > limit:
                raise BadInput(f"prompt of {len(ids)} and max_new_tokens {params.max_new_tokens} exceed {what}")
        media = self._media(images, ids)
        request = Request(
            number=self._submitted,
            ids=array("i", ids.tobytes()),
            prompt_len=len(ids),
            params=params,
            salt=salt,
            reuse=reuse and self.config.reuse,
            store=store and self.config.store,
            images=tuple(images),
            media=media,
            on_token=on_token,
        )
        self._submitted += 1
        self._waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request wherever it stands; nothing when it has ended."""
        if request.state is State.WAITING:
            self._waiting.remove(request)
            if request.ticket is not None:
                self.cache.discard(request.ticket)
        elif request.state is State.RUNNING:
            self.cache.abort(request.held)
            self._leave(request)
        else:
            return
        request.end(State.ABORTED)
        self._told.ended(request)

    def step(self) -> bool:
        """One forward over the requests that run; False when there was nothing to do."""
        self.cache.poll()
        self._take_stock()
        self._admit()
        batch = self._compose()
        if not batch:
            return self._wait_for_copies()
        with self._with_features(batch) as pieces:
            start_ns = time.perf_counter_ns()
            logits = self._forward.run(pieces)
            if self._below is not None:
                self._after_forward(batch, (time.perf_counter_ns() - start_ns) / 1e9)
        self._told.computed(batch, start_ns)
        self._advance(batch, logits)
        return True

    def close(self) -> None:
        """Ends the copies and lets go of host memory; the engine must not be used afterwards."""
        if self._below is not None:
            self.cache.close(drain=False, timeout_s=CLOSE_S)
            self._below.pool.close()

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    def read_kv(self, request: Request) -> torch.Tensor:
        """A copy of the K and V of a running request: [layers, 2, kv_len, kv_heads, head_dim]."""
        lease, size = request.held, self.config.page_size
        pages = torch.tensor(lease.pages[: -(-request.kv_len // size)], dtype=torch.long)
        gathered = self.pool.kv[pages.to(self.pool.kv.device)]
        return gathered.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, : request.kv_len].clone()

    # --- one step ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admits waiting requests, oldest first, until one does not fit."""
        while self._waiting and not self._held and len(self._running) < self.config.max_batch:
            request = self._waiting[0]
            try:
                lease = self._lease(request)
            except NotReady:
                self._told.blocked(request)
                return  # its pages are still on their way down
            except OutOfPages as error:
                if not self._running and not error.in_flight:
                    raise  # it was checked to fit an empty pool, so something else holds pages
                self._held = bool(self._running)
                self._told.blocked(request)
                return
            self._waiting.popleft()
            request.start(lease)
            self._told.admitted(request)
            self._running.append(request)
            self._running.sort(key=_number)  # one that was preempted is older than those admitted since

    def _lease(self, request: Request) -> Lease:
        """Admits a request, or resumes it."""
        if request.ticket is not None:
            return self.cache.resume(request.ticket, request.ids)
        return self.cache.admit(
            request.ids, salt=request.salt, media=request.media, reuse=request.reuse, store=request.store
        )

    def _take_stock(self) -> None:
        """Whose pages arrived may go on, whose did not waits again; who found no page for a last token tries again."""
        for request in [r for r in self._running if r.held.revoked]:
            self._leave(request)
            self._wait_again(request)
        for request in self._running:
            if request.gated and not request.held.read_in_progress:
                request.arrived()
                self._told.arrived(request)
        for request in [r for r in self._running if r.starved]:
            if request.state is State.RUNNING:
                self._extend(request)

    def _wait_for_copies(self) -> bool:
        """Nothing can be computed: waits a moment if that is for want of copies; False when there is nothing to do."""
        if self._below is None or not self._below.transfers.busy:
            return False
        self._below.backend.wait(COPY_WAIT_S)
        return True

    def _after_forward(self, batch: Sequence[tuple[Request, Piece]], seconds: float) -> None:
        """Copies come after the forward's writes; a prefill tells what a token takes."""
        assert self._below is not None
        self.cache.fence(self._below.written())
        rows = sum(piece.segment.rows for _, piece in batch)
        if rows > len(batch) and self.config.weigh_loads:
            self.cache.prefilled(rows, seconds)

    def _compose(self) -> list[tuple[Request, Piece]]:
        """The next forward: every request that decodes, longest first, then prompts, oldest first, up to a chunk."""
        ready = [r for r in self._running if not r.starved and self._may_run(r)]
        decoding = sorted((r for r in ready if r.pending == 1 and not r.holes), key=lambda r: -len(r.ids))
        batch = [(request, self._piece(request, request.kv_len, len(request.ids))) for request in decoding]
        budget = self._chunk_tokens
        for request in ready:
            if request.holes or request.pending > 1:
                start, end = self._chunk(request, budget)
                if start == end:
                    break
                budget = max(budget - (end - start), 0)
                batch.append((request, self._piece(request, start, end)))
        return batch

    def _chunk(self, request: Request, budget: int) -> tuple[int, int]:
        """The next positions of a prompt, or of the hole of a resumed request, that fit in `budget`; or none.

        An image that is one unit is not split; where it is longer than a whole budget it is taken nevertheless.
        """
        if request.holes:
            start, end = request.holes[0]
            want = min(end, start + budget)
        else:
            start = request.kv_len
            grid_end = (start // self._chunk_tokens + 1) * self._chunk_tokens
            want = min(len(request.ids), grid_end)
        end = request.held.chunk_end(start, want)
        if end - start > budget and budget < self._chunk_tokens:
            return start, start
        return start, end

    def _may_run(self, request: Request) -> bool:
        """Whether a forward may be launched over the request's pages: on a stream, behind the copies out of them."""
        gate = request.held.gate
        return gate.open or (self._below is not None and gate.wait_on(self._below.stream))

    def _piece(self, request: Request, start: int, end: int) -> Piece:
        return Piece(
            segment=Segment(request.held.pages, start, end, request.held.media.units),
            ids=request.ids[start:end],
            wanted=end == len(request.ids) and not request.holes,
        )

    def _with_features(
        self, batch: Sequence[tuple[Request, Piece]]
    ) -> contextlib.AbstractContextManager[Sequence[Piece]]:
        """The pieces of a batch with the features of the images in them, which stay where they are meanwhile."""
        if self._images is None:
            return contextlib.nullcontext([piece for _, piece in batch])
        return self._images.held(batch)

    def _media(self, images: Sequence[ImageInput], ids: TokenIds) -> tuple[MediaItem, ...]:
        """The media items of a prompt with images; `BadInput` where the model, or the prompt, does not take them."""
        if self._images is None:
            if images:
                raise BadInput(f"{len(images)} images for {self.loaded.name}, which is a text model: it takes none")
            return ()
        media = self._images.media(images, ids)
        place_media(media, self.config.page_size, len(ids))
        return media

    def _advance(self, batch: Sequence[tuple[Request, Piece]], logits: torch.Tensor) -> None:
        """Commits what a forward computed, samples, ends what is complete, and makes room for the rest."""
        wanted = [request for request, piece in batch if piece.wanted]
        rows = {request.number: logits[row] for row, request in enumerate(wanted)}
        for request, piece in batch:
            self._commit(request, piece.segment.end)
            if self.on_forward is not None:
                self.on_forward(request, piece.segment.start, piece.segment.end, rows.get(request.number))
        if self.loaded.vision is not None:  # nothing could stand behind a placeholder that was generated
            logits = logits.index_fill(
                1, torch.tensor([self.loaded.vision.placeholder], device=logits.device), float("-inf")
            )
        sampled = sample(logits, [(request.params, len(request.ids)) for request in wanted]) if wanted else []
        for request, token in zip(wanted, sampled, strict=True):
            request.append(token)
            self._told.sampled(request)
        for request in wanted:
            if request.finish_reason is not None:
                self.cache.finish(request.held, request.kv_len)
                self._leave(request)
                request.end(State.FINISHED)
                self._told.ended(request)
        for request in sorted(wanted, key=_number):
            if request.state is State.RUNNING:
                self._extend(request)
        for request, token in zip(wanted, sampled, strict=True):
            if request.on_token is not None:
                request.on_token(request, token)

    def _commit(self, request: Request, kv_len: int) -> None:
        """The K and V of the first `kv_len` positions are in pages; a page that is full becomes visible."""
        if request.holes:
            request.fill(kv_len)
            if not request.holes:
                self.cache.seal(request.held, request.kv_len)
            return
        fills_page = kv_len // self.config.page_size > request.kv_len // self.config.page_size
        request.kv_len = kv_len
        if fills_page:
            self.cache.seal(request.held, kv_len)

    def _extend(self, request: Request) -> None:
        """Gives the sampled token its place; while there is none, the youngest request that runs is preempted.

        Where copies hold the pages that would do, the request sits out until they are over; the others go on.
        """
        while request.state is State.RUNNING:
            try:
                self.cache.extend(request.held, request.ids[-1:])
                request.starved = False
                return
            except OutOfPages as error:
                request.starved = error.in_flight > 0
                if request.starved:
                    return
                youngest = self._running[-1]
                if youngest is self._running[0]:
                    raise InvariantViolation(f"{request} runs alone, was checked to fit, and finds no page") from error
                self._preempt(youngest)

    def _preempt(self, request: Request) -> None:
        """Takes a request's pages.  They go to host memory if there is room, else full ones to the index."""
        ticket = None
        if self.config.suspend_pages and not request.holes and not request.gated:
            try:
                ticket = self.cache.suspend(request.held, request.kv_len, complete=self.config.suspend == "complete")
            except CannotSuspend:
                ticket = None
        if ticket is None and request.held.read_in_progress:
            self.cache.abort(request.held)
        elif ticket is None:
            self.cache.finish(request.held, request.holes[0][0] if request.holes else request.kv_len)
        self._leave(request)
        self._held = True
        request.preemptions += 1
        request.suspensions += ticket is not None
        self._wait_again(request, ticket)

    def _wait_again(self, request: Request, ticket: Suspended | None = None) -> None:
        """A request without pages waits, by age, and goes on where it stood."""
        request.wait(ticket)
        self._told.preempted(request)
        self._waiting = deque(sorted((*self._waiting, request), key=_number))

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._held = False


def _number(request: Request) -> int:
    return request.number
