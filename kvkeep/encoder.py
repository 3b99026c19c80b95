"""EncoderCache: what vision, audio and text encoders gave, kept in the tiers of a cache beside its KV pages.

Must not know how pages are found, moved or evicted: `outputs.py` and the cache do.

    vision = EncoderCache(cache, EncoderFingerprint("siglip", revision="b7a2", dtype="float16"))
    with vision.get_or_compute(digest, lambda: tower(pixels)) as output:
        model(..., output.tensors)                  valid until the output is released

The key is the media's digest (`kvkeep.media.digest`), or a prompt's token ids for text encoders; the fingerprint says
what else the output depends on.  Outputs are held: nothing evicts them before `release`, by any occurrence.
"""

import asyncio
import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from kvkeep.cache import TieredCache
from kvkeep.errors import BadInput, OutOfPages
from kvkeep.flights import Abandoned, Circular, Flight, computing, heard, run_compute, waiting
from kvkeep.index.hints import Discard, Hint, Pin
from kvkeep.index.names import TokenIds, as_token_ids, frame
from kvkeep.index.output import Shapes, Tensor, encoder_identity, shapes_of
from kvkeep.outputs import Hold, Outputs
from kvkeep.tiers.memory import PageMajorMemory

if TYPE_CHECKING:
    import torch

#: A key: the digest of a media item, 16 bytes or more, or token ids.
Key = bytes | TokenIds
#: What an encoder gives: one tensor or several, or numpy arrays.
Computed = Any
#: Tensors begin at multiples of this many bytes.
ALIGN_NBYTES = 64
DIGEST_NBYTES_MIN = 16
#: Shapes remembered of outputs that were computed, to notice an encoder that does not give the same again.
SHAPES_REMEMBERED = 4096
#: How long a thread that waits for a copy sleeps between two looks, in seconds.
WAIT_S = 5e-5

Source = Literal["gpu", "cpu", "computed", "joined"]


@dataclass(frozen=True, slots=True)
class EncoderFingerprint:
    """What an encoder's output depends on besides its input; not the device that computed it.

    weights, revision: which model.   adapter: by content or version.   dtype: of its output.   settings: anything else,
    such as the layer that is taken.  Preprocessing belongs to the digest.
    """

    weights: str
    revision: str = ""
    adapter: str = ""
    dtype: str = ""
    settings: str = ""

    def encode(self) -> bytes:
        """The fields, framed."""
        return frame((name, str(getattr(self, name)).encode()) for name in self.__dataclass_fields__)


class EncoderOutput:
    """Tensors of one output, and the hold on them: to be released once, or used in a `with`.

    tensors: read-only.  Views of the pool where an output lies in one piece there: not to be used after `release`.
    source: "gpu" or "cpu": the tier that had it; "computed" by this call, "joined": by another one at the same time.
    """

    __slots__ = ("_hold", "_outputs", "source", "tensors")

    def __init__(
        self, tensors: "tuple[torch.Tensor, ...]", source: Source, outputs: Outputs | None, hold: Hold | None
    ) -> None:
        self.tensors = tensors
        self.source = source
        self._outputs = outputs
        self._hold = hold

    def release(self) -> None:
        """The request lets go of it; releasing again does nothing."""
        hold, self._hold = self._hold, None
        if hold is not None and self._outputs is not None:
            self._outputs.release(hold)

    @property
    def tensor(self) -> "torch.Tensor":
        """The only tensor."""
        (one,) = self.tensors
        return one

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class EncoderCache:
    """The outputs of one encoder.  May be used from any thread, and from one event loop as well.

    cache: whose tiers it shares.   fingerprint: of the encoder.   salt: tenants that differ in it share nothing.
    """

    def __init__(self, cache: TieredCache, fingerprint: EncoderFingerprint | bytes, *, salt: bytes = b"") -> None:
        if not isinstance(fingerprint, EncoderFingerprint | bytes):
            raise BadInput(f"fingerprint is {type(fingerprint).__name__}: it must be an EncoderFingerprint, or bytes")
        if cache.pool.memory is None:
            raise BadInput("the cache's pool has no memory of its own: encoder outputs need GpuPool.allocate or adopt")
        self._cache = cache
        self._outputs = cache.outputs()
        self._memory = cache.pool.memory
        self._identity = encoder_identity(fingerprint if isinstance(fingerprint, bytes) else fingerprint.encode(), salt)
        self._lock = threading.Lock()  # guards what follows
        self._flights: dict[bytes, Flight] = {}
        self._shapes: OrderedDict[bytes, Shapes] = OrderedDict()
        self._coming: list[Hold] = []  # prefetched, not all there yet

    # ------------------------------------------------------------------ asking

    def get_or_compute(
        self, key: Key, compute: Callable[[], Computed], *, expect: Shapes | None = None
    ) -> EncoderOutput:
        """The output of `key`: from a tier, or else from `compute`, which runs once however many ask at the same time.

        compute: gives a tensor, or several.   expect: ((shape, dtype), ...): an output that differs is a miss, and a
            computed one that differs an error.
        What `compute` raises reaches all who wait for it, and nothing is kept.  Raises `BadInput` for an output that
        the pool could never hold, or that differs in shape from what the same key gave before.
        A call inside a `compute` that would wait for that `compute` itself runs its own, so nothing waits for ever; so
        does a call in the thread of an event loop that a computation needs.
        """
        record = _record(key)
        while True:
            output = self._find(record, expect)
            if output is not None:
                return output
            flight, leads = self._board(record)
            if leads:
                return self._lead(flight, expect, compute)
            try:
                with waiting(flight, blocks=True):
                    computed = flight.result()
            except Abandoned:
                continue
            except Circular:
                return self._lead(Flight(record, flight.epoch), expect, compute)
            return self._find(record, expect, counted=False) or self._joined(computed, expect)

    async def get_or_compute_async(
        self, key: Key, compute: Callable[[], Computed | Awaitable[Computed]], *, expect: Shapes | None = None
    ) -> EncoderOutput:
        """`get_or_compute` for asyncio: `compute` may be a coroutine function; another runs in a thread."""
        record = _record(key)
        while True:
            output = await self._find_async(record, expect)
            if output is not None:
                return output
            flight, leads = self._board(record)
            if leads:
                return await self._lead_async(flight, expect, compute)
            try:
                with waiting(flight, blocks=False):
                    waited = asyncio.wrap_future(flight)
                    waited.add_done_callback(heard)
                    computed = await asyncio.shield(waited)
            except Abandoned:
                continue
            except Circular:
                return await self._lead_async(Flight(record, flight.epoch), expect, compute)
            return await self._find_async(record, expect, counted=False) or self._joined(computed, expect)

    def get(self, key: Key, *, expect: Shapes | None = None) -> EncoderOutput | None:
        """The output of `key` if a tier has it; waits for its copy up from host memory."""
        return self._find(_record(key), expect)

    def prefetch(self, key: Key) -> bool:
        """Begins to bring an output up from host memory; whether a tier has it.  Never blocks."""
        self._let_go()
        hold = self._outputs.find(self._identity, _record(key), counted=False)
        if hold is None:
            return False
        if hold.read_in_progress:
            with self._lock:
                self._coming.append(hold)
        else:
            self._outputs.release(hold)
        return True

    def pin(self, key: Key, for_s: float) -> None:
        """For so many seconds the output leaves last, if the cache's eviction order takes hints (LRU does not)."""
        self.hint(key, Pin(for_s))

    def discard(self, key: Key) -> None:
        """The output will not be asked for again: it leaves at once if nobody holds it."""
        if not self._outputs.forget(self._identity, _record(key)):
            self.hint(key, Discard())

    def hint(self, key: Key, hint: Hint) -> None:
        """What is known of the next use of an output."""
        self._outputs.hint(self._identity, _record(key), hint)

    # ------------------------------------------------------------------ finding

    def _find(self, record: bytes, expect: Shapes | None, counted: bool = True) -> EncoderOutput | None:
        self._let_go()
        hold = self._outputs.find(self._identity, record, expect, counted)
        try:
            while hold is not None and hold.read_in_progress:
                if not self._cache.poll():
                    time.sleep(WAIT_S)
            return self._held(hold)
        except BaseException:
            if hold is not None:
                self._outputs.release(hold)
            raise

    async def _find_async(self, record: bytes, expect: Shapes | None, counted: bool = True) -> EncoderOutput | None:
        self._let_go()
        hold = self._outputs.find(self._identity, record, expect, counted)
        try:
            while hold is not None and hold.read_in_progress:
                if not self._cache.poll():
                    await asyncio.sleep(WAIT_S)
            return self._held(hold)
        except BaseException:
            if hold is not None:
                self._outputs.release(hold)
            raise

    def _held(self, hold: Hold | None) -> EncoderOutput | None:
        """What a hold whose copies are over gives; None when they have failed."""
        if hold is None or hold.revoked:
            return None
        return EncoderOutput(self._read(hold), "cpu" if hold.from_host else "gpu", self._outputs, hold)

    def _let_go(self) -> None:
        """What was prefetched and has arrived is held no more."""
        if self._coming:
            with self._lock:
                done = [hold for hold in self._coming if not hold.read_in_progress]
                self._coming = [hold for hold in self._coming if hold.read_in_progress]
            for hold in done:
                self._outputs.release(hold)

    # ------------------------------------------------------------------ computing once

    def _board(self, record: bytes) -> tuple[Flight, bool]:
        """The computation of a record that is under way, and whether the caller is the one to do it.

        One that began before the cache was reset is for those who asked before.
        """
        epoch = self._outputs.epoch
        with self._lock:
            flight = self._flights.get(record)
            if flight is not None and flight.epoch == epoch:
                return flight, False
            flight = self._flights[record] = Flight(record, epoch)
            return flight, True

    def _lead(self, flight: Flight, expect: Shapes | None, compute: Callable[[], Computed]) -> EncoderOutput:
        try:
            found = self._find(flight.record, expect, counted=False)  # stored between the first look and boarding
            if found is not None:
                self._crash(flight, Abandoned())  # the others find it as well
                return found
            begun = time.perf_counter()
            with computing(flight):
                computed = run_compute(compute)
            return self._computed(flight, expect, computed, time.perf_counter() - begun)
        except BaseException as error:
            self._crash(flight, error)
            raise

    async def _lead_async(
        self, flight: Flight, expect: Shapes | None, compute: Callable[[], Computed | Awaitable[Computed]]
    ) -> EncoderOutput:
        try:
            found = await self._find_async(flight.record, expect, counted=False)
            if found is not None:
                self._crash(flight, Abandoned())  # the others find it as well
                return found
            begun = time.perf_counter()
            with computing(flight):
                if inspect.iscoroutinefunction(compute):
                    computed = await compute()
                else:
                    computed = await asyncio.to_thread(run_compute, compute)
                if inspect.isawaitable(computed):
                    computed = await computed
            return self._computed(flight, expect, computed, time.perf_counter() - begun)
        except BaseException as error:
            self._crash(flight, error)
            raise

    def _computed(self, flight: Flight, expect: Shapes | None, computed: Computed, seconds: float) -> EncoderOutput:
        """Keeps what was computed, tells those who wait, and holds it for the caller."""
        record = flight.record
        tensors = _as_tensors(computed)
        layout = _layout(tensors)
        shapes = shapes_of(layout)
        before = self._shapes.get(record, shapes) if expect is None else expect
        if shapes != before:
            raise BadInput(f"the encoder gave {_show(shapes)} for a key that gives {_show(before)}: nothing is kept")
        hold = self._keep(flight, tensors, layout, seconds)
        with self._lock:
            self._shapes[record] = shapes
            self._shapes.move_to_end(record)
            if len(self._shapes) > SHAPES_REMEMBERED:
                self._shapes.popitem(last=False)
        self._land(flight, tensors)
        return EncoderOutput(tensors, "computed", self._outputs, hold)

    def _keep(
        self, flight: Flight, tensors: "tuple[torch.Tensor, ...]", layout: tuple[Tensor, ...], seconds: float
    ) -> Hold | None:
        """Writes an output into pages and stores it; None when there is no room that nobody holds."""
        try:
            hold = self._outputs.reserve(self._identity, layout[-1].offset + layout[-1].nbytes, flight.epoch)
        except OutOfPages:
            return None
        try:
            self._write(hold, tensors, layout)
            self._outputs.store(hold, flight.record, layout, seconds)
        except BaseException:
            self._outputs.release(hold)
            raise
        return hold

    def _land(self, flight: Flight, tensors: "tuple[torch.Tensor, ...]") -> None:
        self._over(flight)
        flight.set_result(tensors)

    def _crash(self, flight: Flight, error: BaseException) -> None:
        """Who waits hears of an error, and goes on itself when the one that computed was only stopped."""
        self._over(flight)
        if not flight.done():
            flight.set_exception(error if isinstance(error, Exception) else Abandoned())

    def _over(self, flight: Flight) -> None:
        with self._lock:
            if self._flights.get(flight.record) is flight:
                del self._flights[flight.record]

    def _joined(self, computed: "tuple[torch.Tensor, ...]", expect: Shapes | None) -> EncoderOutput:
        """What another call computed at the same time, where it could not be kept."""
        shapes = shapes_of(_layout(computed))
        if expect is not None and shapes != expect:
            raise BadInput(f"the encoder gave {_show(shapes)} where {_show(expect)} is expected")
        return EncoderOutput(computed, "joined", None, None)

    # ------------------------------------------------------------------ bytes

    def _write(self, hold: Hold, tensors: "tuple[torch.Tensor, ...]", layout: tuple[Tensor, ...]) -> None:
        import torch

        for tensor, where in zip(tensors, layout, strict=True):
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            raw, done = plain.view(-1).view(torch.uint8), 0
            for page, offset, nbytes in self._outputs.parts(hold.pages, where):
                self._memory.write(page, offset, raw[done : done + nbytes])
                done += nbytes
        if tensors[0].is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._cache.fence(event)

    def _read(self, hold: Hold) -> "tuple[torch.Tensor, ...]":
        import torch

        assert hold.output is not None
        out = []
        for where in hold.output.tensors:
            raw = self._joined_parts(self._outputs.parts(hold.pages, where))
            dtype = getattr(torch, where.dtype)
            if raw.storage_offset() % dtype.itemsize:
                raw = raw.clone()  # pages of an odd size
            out.append(raw.view(dtype).view(where.shape))
        return tuple(out)

    def _joined_parts(self, parts: list[tuple[int, int, int]]) -> "torch.Tensor":
        """The bytes of (page, offset, nbytes) in order: a view where they lie in one piece, otherwise a copy."""
        import torch

        page_nbytes, memory = self._outputs.page_nbytes, self._memory
        page, offset, nbytes = parts[0]
        for next_page, next_offset, more in parts[1:]:
            if page * page_nbytes + offset + nbytes != next_page * page_nbytes + next_offset:
                break
            nbytes += more
        else:
            if isinstance(memory, PageMajorMemory):
                return memory.span(page, offset + nbytes)[offset:]
        return torch.cat([torch.as_tensor(memory.read(*part)) for part in parts])


def _record(key: Key) -> bytes:
    if isinstance(key, bytes):
        if len(key) < DIGEST_NBYTES_MIN:
            raise BadInput(f"a digest of {len(key)} bytes: it must be {DIGEST_NBYTES_MIN} or more")
        return frame((("digest", key),))
    ids = as_token_ids(key)
    if not len(ids):
        raise BadInput("a prompt of 0 tokens as a key: at least 1 is needed")
    return frame((("tokens", ids.tobytes()),))


def _as_tensors(computed: Computed) -> "tuple[torch.Tensor, ...]":
    import torch

    many = computed if isinstance(computed, Sequence) else (computed,)
    try:
        tensors = tuple(torch.as_tensor(t) for t in many)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"the encoder gave {type(computed).__name__}: tensors are needed ({error})") from None
    for t in tensors:
        if t.layout != torch.strided or t.is_quantized or t.is_nested or t.is_meta:
            raise BadInput(
                f"the encoder gave a tensor of layout {t.layout}, dtype {t.dtype}, on {t.device}: it must be dense, "
                "not quantized or nested, and have data"
            )
    if not tensors or not all(t.numel() for t in tensors):
        raise BadInput("the encoder gave no tensor, or one without elements: nothing can be kept")
    return tensors


def _layout(tensors: "tuple[torch.Tensor, ...]") -> tuple[Tensor, ...]:
    """Where each tensor's bytes are in the output."""
    out, at = [], 0
    for t in tensors:
        out.append(Tensor(tuple(t.shape), str(t.dtype).removeprefix("torch."), at, t.nbytes))
        at += -(-t.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    return tuple(out)


def _show(shapes: Shapes) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes)
