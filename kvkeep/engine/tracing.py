"""What an engine tells a recorder: requests with their waits, forwards, copies, evictions, pages.

Must not change what the engine does; it is told, and reads.

    request N      [ queued [ room ] ][ gate ][ prefill          ][ decode      ]     again from "queued" if preempted
    forwards       what the processor, or the device, computed
    copies         from the start to the poll that saw them over: [ in flight [ bytes moved ] ]
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvkeep.cache import TieredCache
from kvkeep.engine.forward import Piece
from kvkeep.engine.request import Request
from kvkeep.index.eviction import Tier
from kvkeep.index.watch import Names, Reason
from kvkeep.misses import Miss, MissLedger
from kvkeep.telemetry.trace import Recorder, current
from kvkeep.transfer.backend import Job
from kvkeep.transfer.manager import Completion, TransferManager

FORWARDS, EVICTIONS = 1, 2
#: Pages are counted this often at most.
LOOK_NS = 5_000_000

TIERS = {Tier.GPU: "GPU", Tier.HOST: "host"}
_GONE: dict[str, str] = {"evicted": "evicted", "demoted": "left to the tier below", "failed": "load failed"}


Batch = Sequence[tuple[Request, Piece]]


class Told(Protocol):
    """Whom an engine tells.  It must be quick."""

    def blocked(self, request: Request) -> None:
        """The oldest waiting request found no room."""

    def admitted(self, request: Request) -> None:
        """A request has pages now; it may wait for copies into them."""

    def arrived(self, request: Request) -> None:
        """Those copies are over."""

    def computed(self, batch: Batch, begin_ns: int) -> None:
        """A forward is over."""

    def sampled(self, request: Request) -> None:
        """A token was sampled."""

    def preempted(self, request: Request) -> None:
        """It waits again."""

    def ended(self, request: Request) -> None:
        """It has finished, or was aborted."""


class Silence:
    """Nobody is told."""

    def blocked(self, request: Request) -> None: ...
    def admitted(self, request: Request) -> None: ...
    def arrived(self, request: Request) -> None: ...
    def computed(self, batch: Batch, begin_ns: int) -> None: ...
    def sampled(self, request: Request) -> None: ...
    def preempted(self, request: Request) -> None: ...
    def ended(self, request: Request) -> None: ...


class EngineTrace:
    """One engine as a process of a trace; hears of its copies and of what leaves its tiers as well.

    ledger: of the engine's cache; it says why tokens of a prompt were not there.
    """

    def __init__(self, recorder: Recorder, name: str, cache: TieredCache, ledger: MissLedger) -> None:
        self._to = recorder
        self._cache = cache
        self._ledger = ledger
        self._pid = recorder.process(name)
        self._stage: dict[int, list[str]] = {}  # by request: its open spans, outermost first
        self._seen: Miss | None = None
        self._looked_ns = 0
        recorder.thread(self._pid, FORWARDS, "forwards")
        recorder.thread(self._pid, EVICTIONS, "evictions")
        self._missed: dict[str, int] = {}
        recorder.other.setdefault("missed_tokens", {})[str(self._pid)] = self._missed
        cache.watch(self)

    # ------------------------------------------------------------------ requests

    def blocked(self, request: Request) -> None:
        """Told at every step that it waits."""
        if "room" not in self._stages(request):
            self._begin(request, "room")

    def admitted(self, request: Request) -> None:
        """Its queue is over."""
        self._stages(request)
        self._next(
            request, "gate" if request.gated else "prefill", args={**self._of_prompt(request), **self._missing()}
        )

    def arrived(self, request: Request) -> None:
        """It may run."""
        self._next(request, "prefill", args=self._of_prompt(request))

    def computed(self, batch: Batch, begin_ns: int) -> None:
        """And pages are counted.   prompt_tokens: of prompts; the requests that decode have a token each on top."""
        now = self._to.now()
        rows = [piece.segment.rows for _, piece in batch]
        prompt_tokens = sum(count for count in rows if count > 1)
        args = {"requests": len(batch), "decodes": rows.count(1), "prompt_tokens": prompt_tokens}
        self._to.span(self._pid, FORWARDS, "prefill" if prompt_tokens else "decode", begin_ns, now, args)
        if now - self._looked_ns >= LOOK_NS:
            self._look(now)

    def sampled(self, request: Request) -> None:
        """The first token ends the prefill."""
        if self._stages(request)[1:] == ["prefill"]:
            self._next(request, "decode", request.first_token_ns if not request.preemptions else None)

    def preempted(self, request: Request) -> None:
        """From the beginning."""
        self._to.instant(self._pid, EVICTIONS, "preempted", {"request": request.number})
        self._next(request, "queued")

    def ended(self, request: Request) -> None:
        """The whole of it."""
        self._stages(request)
        at_ns = request.ended_ns or self._to.now()
        self._down_to(request, 1, at_ns)
        args = {"output_tokens": len(request.ids) - request.prompt_len, "preemptions": request.preemptions}
        args |= {"aborted": request.aborted} | self._of_prompt(request)
        self._to.end(
            self._pid,
            "request",
            str(request.number),
            f"request {request.number}",
            at_ns,
            args,
        )
        del self._stage[request.number]
        self._look(self._to.now())

    def _stages(self, request: Request) -> list[str]:
        """Its open spans; a request that is heard of for the first time has been queued since it was submitted."""
        if request.number not in self._stage:
            self._stage[request.number] = []
            self._begin(request, f"request {request.number}", at_ns=request.submitted_ns)
            self._begin(request, "queued", at_ns=request.submitted_ns)
        return self._stage[request.number]

    def _begin(self, request: Request, name: str, args: dict[str, Any] | None = None, at_ns: int | None = None) -> None:
        self._to.begin(self._pid, "request", str(request.number), name, at_ns or self._to.now(), args)
        self._stage[request.number].append(name)

    def _next(self, request: Request, name: str, at_ns: int | None = None, args: dict[str, Any] | None = None) -> None:
        """The stage that it is in ends and another begins, at one moment."""
        at_ns = at_ns or self._to.now()
        self._down_to(request, 1, at_ns)
        self._begin(request, name, args, at_ns)

    def _down_to(self, request: Request, depth: int, at_ns: int) -> None:
        stages = self._stage[request.number]
        while len(stages) > depth:
            self._to.end(self._pid, "request", str(request.number), stages.pop(), at_ns)

    def _of_prompt(self, request: Request) -> dict[str, Any]:
        gpu = request.matched_len - request.host_len
        return {"prompt_tokens": request.prompt_len, "matched_gpu": gpu, "matched_cpu": request.host_len}

    def _missing(self) -> dict[str, Any]:
        """What the admission did not find, once; nothing where a suspended request came back."""
        miss = self._ledger.recent[-1] if self._ledger.recent else None
        if miss is None or miss is self._seen:
            return {}
        self._seen = miss
        missing = {str(cause): tokens for cause, tokens in miss.tokens.items() if tokens}
        for cause, tokens in missing.items():
            self._missed[cause] = self._missed.get(cause, 0) + tokens
        return {"missed": missing}

    def _look(self, now: int) -> None:
        self._looked_ns = now
        stats = self._cache.stats()
        pages = {"live": stats.pages_live, "cached": stats.pages_cached, "free": stats.pages_free}
        self._to.counter(self._pid, "GPU pool [pages]", now, pages)
        if stats.host_pages_cached:
            self._to.counter(self._pid, "host tier [pages]", now, {"cached": stats.host_pages_cached})

    # ------------------------------------------------------------------ copies; under the manager's lock

    def started(self, job: Job) -> None:
        """Bytes may move from now on."""
        plan = job.plan
        args = {"cause": plan.cause, "pages": len(plan), "nbytes": job.nbytes}
        self._to.begin(
            self._pid, plan.direction, str(job.number), f"{plan.direction} {plan.cause}", self._to.now(), args
        )

    def over(self, completion: Completion) -> None:
        """A poll has seen it end; how long its bytes moved was measured where they did."""
        job, plan = completion.job, completion.plan
        args = {"ok": completion.ok, "copy_us": completion.copy_ns / 1000, "late": completion.late}
        name = f"{plan.direction} {plan.cause}"
        self._to.end(self._pid, plan.direction, str(job.number), name, self._to.now(), args)

    # ------------------------------------------------------------------ names that leave; under the cache's lock

    def stored(self, tier: Tier, names: Names, parent: int, reason: Reason | None) -> None:
        """What comes is seen in the pages."""

    def removed(self, tier: Tier, names: Names, reason: Reason) -> None:
        """One instant, however many."""
        said = TIERS[tier]
        args = {"tier": said, "pages": len(names), "reason": reason}
        self._to.instant(self._pid, EVICTIONS, f"{said}: {_GONE.get(reason, reason)}", args)

    def cleared(self, tier: Tier) -> None:
        """All of it."""
        said = TIERS[tier]
        self._to.instant(self._pid, EVICTIONS, f"{said}: reset", {"tier": said, "reason": "reset"})


SILENCE = Silence()


def ledger_if_recorded(page_size: int) -> MissLedger | None:
    """A ledger of misses for an engine of a run that is recorded; None where nothing is."""
    return None if current() is None else MissLedger(page_size)


def listener(name: str, cache: TieredCache, ledger: MissLedger | None, transfers: TransferManager | None) -> Told:
    """Whom an engine is to tell: nobody, unless the run is recorded."""
    recorder = current()
    if recorder is None or ledger is None:
        return SILENCE
    told = EngineTrace(recorder, name, cache, ledger)
    if transfers is not None:
        transfers.watch = told
    return told
