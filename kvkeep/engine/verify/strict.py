"""Strict: a request that took pages from a cache against the same request computed from scratch.

Must not know what the scenarios are for. The reference is an engine with its cache off that runs one request at a time,
in other chunks than the cached run; strict arithmetic says that none of that may show in a single bit.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from kvkeep.engine.engine import Engine, EngineConfig, Request
from kvkeep.engine.loader import LoadedModel
from kvkeep.engine.verify.compare import Difference, kv_difference, logits_difference, output_difference

# Scratch runs kept for requests that come again, such as twins; one holds the KV of a prompt.
REMEMBERED_MAX = 8


@dataclass(slots=True)
class Recording:
    """What a request computed: its logits by position, and K and V of all its positions at its last forward."""

    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    kv: torch.Tensor | None = None
    output_ids: tuple[int, ...] = ()


class Recorder:
    """Fills a recording for each request of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recordings: dict[int, Recording] = {}
        engine.on_forward = self._seen

    def take(self, request: Request) -> Recording:
        """The recording of a finished request; it is forgotten here."""
        recording = self._recordings.pop(request.number)
        recording.output_ids = tuple(request.output_ids)
        return recording

    def _seen(self, request: Request, start: int, end: int, logits: torch.Tensor | None) -> None:
        recording = self._recordings.setdefault(request.number, Recording())
        if logits is not None:
            recording.logits[end - 1] = logits.clone()
        if end == request.prompt_len + request.params.max_new_tokens - 1:
            recording.kv = self._engine.read_kv(request)


class FromScratch:
    """Judges the requests of one cached engine after another by computing each again with nothing kept."""

    def __init__(self, loaded: LoadedModel, page_size: int, request_pages_max: int) -> None:
        config = EngineConfig(
            page_size=page_size,
            pool_pages=request_pages_max,
            arithmetic="strict",
            reuse=False,
            store=False,
        )
        self._scratch = Engine(loaded, config)
        self._scratch_recorder = Recorder(self._scratch)
        self._remembered: OrderedDict[object, Recording] = OrderedDict()

    def watch(self, engine: Engine) -> None:
        """Records what this engine computes from now on."""
        self._recorder = Recorder(engine)

    def after_step(self) -> None:
        """Nothing to do: a request is judged when it has ended."""

    def judge(self, request: Request) -> Difference | None:
        """The first place where a finished request of the watched engine differs from its scratch run."""
        cached, scratch = self._recorder.take(request), self._from_scratch(request)
        if cached.kv is None or scratch.kv is None:
            return Difference("the number of forwards", request.prompt_len)
        found = kv_difference(cached.kv, scratch.kv)
        if found is not None:
            return found
        for position in sorted(cached.logits.keys() | scratch.logits.keys()):
            found = logits_difference(cached.logits.get(position), scratch.logits.get(position), position)
            if found is not None:
                return found
        return output_difference(cached.output_ids, scratch.output_ids, request.prompt_len)

    def _from_scratch(self, request: Request) -> Recording:
        prompt = request.ids[: request.prompt_len]
        # By pixels: what a digest says of them is for the cached run alone.
        seen = tuple((image.offset, image.pixels.numpy().tobytes()) for image in request.images)
        key = (prompt.tobytes(), request.params, seen)
        found = self._remembered.get(key)
        if found is None:
            again = self._scratch.submit(prompt, request.params, images=request.images)
            self._scratch.run()
            found = self._remembered[key] = self._scratch_recorder.take(again)
            if len(self._remembered) > REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return found
