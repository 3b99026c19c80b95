"""The streams of M*: which lease each (request, label) holds, what of it may be matched, trimmed and kept.

Must not know what of M* is wrapped (`mstar.py`), nor how requests are scheduled.  Its callers hold the lock of M*'s KV
manager where they give or take pages; the other methods take it.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from mstar.engine.resources.kv.config import KVReqConfig
from mstar.engine.resources.kv.plan import SINK_PAGE
from mstar.model.submodule_base import ARNodeInputs

from kvkeep.cache import TieredCache
from kvkeep.engine.host_tier import HostTier
from kvkeep.errors import BadInput, InvariantViolation, OutOfPages
from kvkeep.index.media import MediaItem
from kvkeep.index.names import Int32s, TokenIds, as_token_ids
from kvkeep.lease import Lease

log = logging.getLogger(__name__)

COPY_WAIT_S = 0.0002  # who cannot go on before a copy is over looks at it this often

Key = tuple[str, str]  # request, label


@dataclass(frozen=True)
class Prompt:
    """What a label of a request begins with.

    tokens: its ids.   media: which of them are placeholders.   salt, adapter: who differs in them shares nothing.
    """

    tokens: TokenIds
    media: tuple[MediaItem, ...] = ()
    salt: bytes = b""
    adapter: bytes = b""


@dataclass
class KeptReqConfig(KVReqConfig):  # type: ignore[misc]  # M* ships no types
    """M*'s configuration of a request for a KV cache, with the prompt of each label that may be matched and kept."""

    prompts: dict[str, Prompt] = field(default_factory=dict)


@dataclass
class Counts:
    """What became of prompts: tokens asked for and matched, and why a prompt was computed whole."""

    prompts: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    refused: int = 0
    revoked: int = 0
    loads_failed: int = 0
    not_trimmed: int = 0


@dataclass(eq=False)
class Stream:
    """A (request, label) that has pages, or is waiting for some.

    tokens: those known of its beginning.   prompt: what it was probed with.
    at: positions with committed KV.   matched: of these, from the cache.   loading: M* knows nothing of it yet.
    named: positions from 0 on have the tokens `tokens` and then those of `fed`, so they may be kept.
    next: the inputs of the step that is prepared.   fed: those behind `tokens` that were committed: places in copies.
    started: inputs were prepared; before that its pages can be had back.   stepped: something was committed.
    """

    lease: Lease
    tokens: Int32s
    prompt: Prompt | None
    named: bool
    at: int = 0
    matched: int = 0
    loading: bool = False
    started: bool = False
    stepped: bool = False
    next: torch.Tensor | None = None
    fed: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def know_fed(self) -> None:
        """The ids that were generated, read from the device."""
        if self.fed:
            more = torch.cat([ids[first:end] for ids, first, end in self.fed]).cpu().numpy().astype(np.int32)
            self.tokens, self.fed = np.concatenate([self.tokens, more]), []


class Streams:
    """The streams of one KV manager.   positions: what counts the positions over it; None when nothing does."""

    def __init__(self, kv: Any, cache: TieredCache, below: HostTier | None, positions: Any) -> None:
        self._kv = kv
        self.cache = cache
        self._below = below
        self._positions = positions
        self.counts = Counts()
        self._lock: threading.RLock = kv._lock
        self._page_size: int = kv.config.page_size
        self._streams: dict[Key, Stream] = {}
        self._asleep: dict[Key, Stream] = {}  # offloaded by M*: what is known of them, without pages
        self._whole: set[Key] = set()  # whose inputs went out as they were: not to be matched any more
        self._acting = threading.local()  # for which streams M* takes or gives pages, in this thread
        self._sink = self._open_sink()

    def check_invariants(self) -> None:
        """Raises `InvariantViolation` when the pages that M* lists are not those of the leases, or owners differ."""
        with self._lock:
            listed = {
                (rid, label): stream.page_indices
                for rid, labels in self._kv._streams.items()
                for label, stream in labels.items()
                if stream.page_indices
            }
            held = {key: list(s.lease.pages) for key, s in self._streams.items() if not s.loading}
            if listed != held:
                raise InvariantViolation(f"M* lists pages {listed}, the leases {held}")
        self.cache.check_invariants()

    @property
    def num_free(self) -> int:
        """Pages that a request could have: free ones, and cached ones that nobody holds."""
        stats = self.cache.stats()
        return stats.pages_free + stats.pages_cached

    # ------------------------------------------------------------------ probe

    def probe(self, node: str, rid: str, info: Any) -> bool:
        """Whether the request may be asked further: False while what matched of its prompt is on its way."""
        key = self.kept_label(node, rid, info.graph_walk)
        if key is None:
            return True
        with self._lock:
            stream = self._streams.get(key)
            if stream is not None:
                return not stream.loading or self._arrive(key, stream)
            prompt = self._fresh_prompt(key, info)
            if prompt is None:
                return True
            try:
                ids = as_token_ids(prompt.tokens)
                lease = self._admit(key, prompt, ids)
            except OutOfPages:
                self.counts.refused += 1
                return True  # M* finds out by itself, and makes room in its own way
            except BadInput as error:
                log.warning("kvkeep: nothing of %s is kept: %s", key, error)
                self._whole.add(key)
                self.counts.refused += 1
                return True
            self.counts.prompts += 1
            self.counts.prompt_tokens += len(ids)
            stream = self._streams[key] = Stream(lease, ids, prompt, named=True, matched=lease.taken_len, loading=True)
            return self._arrive(key, stream)

    def _admit(self, key: Key, prompt: Prompt, ids: Int32s) -> Lease:
        label = key[1].encode()
        return self.cache.admit(ids, salt=prompt.salt, adapter=prompt.adapter, label=label, media=prompt.media)

    def _admit_again(self, key: Key, prompt: Prompt, ids: Int32s) -> Lease:
        """Pages for KV that comes back.  Media have places in whole prompts only: with some, nothing is stored."""
        label, store = key[1].encode(), not prompt.media
        return self.cache.admit(ids, salt=prompt.salt, adapter=prompt.adapter, label=label, reuse=False, store=store)

    def _arrive(self, key: Key, stream: Stream) -> bool:
        """Gives M* the pages of an admission once they are there."""
        lease = stream.lease
        if lease.read_in_progress:
            self.cache.poll()
        if lease.revoked:
            del self._streams[key]  # nobody has seen its pages: it is admitted anew at the next question
            self.counts.loads_failed += 1
            return False
        if not self._may_touch(lease):
            return False
        theirs = self._kv._ensure_label(*key)
        self.counts.loads_failed += lease.taken_len < stream.matched
        stream.at = stream.matched = lease.matched_len
        stream.loading = False
        theirs.page_indices = list(lease.pages)
        theirs.stored_len = stream.matched
        theirs.generation += 1
        if self._positions is not None and stream.matched:
            self._positions._counters.setdefault(key[0], {})[key[1]] = stream.matched
        self.counts.matched_tokens += stream.matched
        return True

    def _fresh_prompt(self, key: Key, info: Any) -> Prompt | None:
        """The prompt of a label that has no KV yet, and that nobody else has computed."""
        rid, label = key
        if key in self._whole:
            return None
        theirs = self._kv._streams[rid].get(label)
        if theirs is not None and (theirs.stored_len or theirs.page_indices or theirs.offloaded or theirs.read_pending):
            return None
        published = (info.resource_publish_info or {}).get(self._kv.name)
        if published is not None and label in published.get(self._kv._rank):
            return None
        prompt: Prompt = self._kv._overrides[rid].prompts[label]
        return prompt

    def kept_label(self, node: str, rid: str, walk: str) -> Key | None:
        """The one label that a node works on in a walk, if the request has a prompt for it."""
        overrides = self._kv._overrides.get(rid)
        if not isinstance(overrides, KeptReqConfig):
            return None
        labels = overrides.get_labels(node, walk)
        return (rid, labels[0]) if len(labels) == 1 and labels[0] in overrides.prompts else None

    def _undo(self, key: Key, stream: Stream) -> None:
        """A hit becomes a miss: M* has not used its pages yet."""
        del self._streams[key]
        theirs = self._kv._streams[key[0]].get(key[1])
        if theirs is not None and not stream.loading:
            theirs.page_indices, theirs.stored_len = [], 0
            theirs.generation += 1
            if self._positions is not None:
                self._positions._counters.get(key[0], {}).pop(key[1], None)
            self.counts.matched_tokens -= stream.matched
        self.cache.abort(stream.lease)

    # ------------------------------------------------------------------ trim

    def trim(self, key: Key, inputs: Any) -> Any:
        """The inputs of a step without what matched.  What cannot be compared with the prompt is not kept.

        M* prepares in the thread that runs the steps, so the step before has been committed, or was not admitted and
        is prepared again.
        """
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                self._whole.add(key)
            if stream is None or not stream.named:
                return inputs
            n, cut = inputs.input_seq_len, 0 if stream.stepped else stream.matched
            first = stream.at - cut
            want = stream.tokens[first : first + n]
            if not _plain(inputs) or n <= cut or (len(want) and inputs.input_ids.tolist() != want.tolist()):
                return self._give_up(key, stream, inputs)
            stream.started = True
            if cut:
                inputs = replace(inputs, input_ids=inputs.input_ids[cut:], input_seq_len=n - cut)
            stream.next = inputs.input_ids
            return inputs

    def _give_up(self, key: Key, stream: Stream, inputs: Any) -> Any:
        self.counts.not_trimmed += not stream.stepped
        if stream.stepped:
            stream.named = False
        elif stream.started:
            raise InvariantViolation(f"{key}: a step was prepared, not committed, and is now another one")
        else:
            self._undo(key, stream)
            self._whole.add(key)
        return inputs

    def seen(self, step: Any) -> None:
        """Adds what was trimmed to the tokens that a sampler has seen."""
        with self._lock:
            trimmed = {key: s for key, s in self._streams.items() if s.next is not None and not s.stepped and s.matched}
        for rid, label in trimmed:
            stream = trimmed[rid, label]
            others = {segment.label for segment in step.segments or () if segment.request_id == rid} - {label}
            if others:
                raise InvariantViolation(
                    f"{rid}: inputs were cut for label {label!r}, and {sorted(others)} uses them too"
                )
            for resource in step.steps.values():
                tracked: dict[str, torch.Tensor] = getattr(resource, "prefill_tracked_tokens", {})
                own = tracked.get(rid)
                if own is not None:
                    skipped = torch.as_tensor(stream.tokens[: stream.matched], dtype=own.dtype, device=own.device)
                    tracked[rid] = torch.cat([skipped, own])

    # ------------------------------------------------------------------ store

    def committed(self, step: Any) -> None:
        """Follows what M* has committed, and seals the pages that are full."""
        if self._below is not None:
            self.cache.fence(self._below.written())
        fed: list[tuple[Stream, torch.Tensor]] = []
        for key, span in self._kv._label_growth(step).items():
            stream = self._streams.get(key)
            if stream is None or not span:
                continue
            end = stream.at + span
            if self._kv._streams[key[0]][key[1]].stored_len != end:
                stream.named = False  # M* has got KV from elsewhere
            elif end > len(stream.tokens) and stream.named:
                if stream.next is None or len(stream.next) != span or stream.at < len(stream.tokens):
                    stream.named = False
                else:
                    fed.append((stream, stream.next))
            stream.at, stream.stepped, stream.next = end, True, None
            if stream.named:
                self._seal(stream)
        if fed:  # copied, since M* may write its own into the same place a step later; all at once
            ids, end = torch.cat([part for _, part in fed]), 0
            for stream, part in fed:
                end += len(part)
                stream.fed.append((ids, end - len(part), end))
        self.cache.poll()

    def _seal(self, stream: Stream) -> None:
        """Full pages whose tokens are known here become immutable."""
        lease, want = stream.lease, min(stream.at, len(stream.tokens))
        if want // self._page_size <= lease.sealed:
            return
        if want > lease.length:
            self.cache.extend(lease, stream.tokens[lease.length : want])
        if lease.chunk_end(lease.kv_len, want) == want:  # not inside a media item
            self.cache.seal(lease, want)

    def end(self, key: Key) -> None:
        """A stream lets go of its pages; what is full and has names stays."""
        stream = self._streams.pop(key)
        lease = stream.lease
        if stream.named and not stream.loading:
            stream.know_fed()
            self._seal(stream)
            if lease.kv_len >= self._page_size:
                self.cache.finish(lease, lease.kv_len)
                return
        self.cache.abort(lease)

    # ------------------------------------------------------------------ pages

    def acquire(self, n: int) -> list[int] | None:
        """`n` more pages for the stream that M* is about to extend; None when there are none."""
        key: Key | None = next(getattr(self._acting, "keys", iter(())), None)
        if key is None:
            raise InvariantViolation(f"M* acquires {n} pages, and it is not known for which request")
        while True:
            try:
                return self._more(key, n)
            except OutOfPages:
                if not self._revoke():
                    return None

    def release(self, pages: Sequence[int]) -> None:
        """A stream of M* lets go of all its pages."""
        if not pages:
            return
        for key, stream in self._streams.items():
            if self._acts_for(key) and not stream.loading and list(stream.lease.pages) == list(pages):
                self.end(key)
                return
        raise InvariantViolation(f"M* releases pages {list(pages)}, and no stream has them: released twice?")

    def _more(self, key: Key, n: int) -> list[int]:
        stream = self._streams.get(key)
        if stream is None:
            return self._open(key, n)
        lease, before = stream.lease, len(stream.lease.pages)
        self.cache.extend(lease, room=(before + n) * self._page_size - lease.length)
        return list(lease.pages[before:])

    def _open(self, key: Key, n: int) -> list[int]:
        """A lease for a stream that was not probed: a fork, a request without a prompt, one that comes back."""
        old = self._asleep.get(key)
        prompt = old.prompt if old is not None and old.named else None
        if old is None or prompt is None:
            lease, tokens = self.cache.admit([0], reuse=False, store=False), np.zeros(0, np.int32)
        else:
            tokens = old.tokens
            lease = self._admit_again(key, prompt, tokens[: n * self._page_size])
        try:
            self.cache.extend(lease, room=n * self._page_size - lease.length)
        except OutOfPages:
            self.cache.abort(lease)
            raise
        while not self._may_touch(lease):
            time.sleep(COPY_WAIT_S)
            self.cache.poll()
        new = self._streams[key] = Stream(lease, tokens, prompt, named=bool(len(tokens)), started=True)
        if old is not None:
            del self._asleep[key]
            new.at, new.matched, new.started, new.stepped = old.at, old.matched, old.started, old.stepped
        return list(lease.pages)

    def _revoke(self) -> bool:
        """Takes back the pages of the last request that was promised some and has not begun; False when none was."""
        for key in reversed(self._streams):
            stream = self._streams[key]
            if not stream.started:
                self._undo(key, stream)
                self.counts.revoked += 1
                return True
        return False

    def _may_touch(self, lease: Lease) -> bool:
        return not lease.read_in_progress or (self._below is not None and lease.gate.wait_on(self._below.stream))

    def forget(self, rid: str) -> None:
        """A request has left M*: what it held without M* knowing is let go of."""
        with self._lock:
            for key in [key for key in (*self._streams, *self._asleep, *self._whole) if key[0] == rid]:
                self._whole.discard(key)
                self._asleep.pop(key, None)
                if key in self._streams:  # its pages were on their way: M* knew none of them
                    self.end(key)

    def named(self, rid: str) -> bool:
        """Whether pages of the request may be read by others."""
        with self._lock:
            return any(stream.named for key, stream in self._streams.items() if key[0] == rid)

    def exclusive_pages(self, rid: str) -> int:
        """Pages that others could have if the request let go of all of its own."""
        with self._lock:
            held = [s.lease for key, s in self._streams.items() if key[0] == rid and not s.loading]
            return sum(map(self.cache.exclusive_pages, held))

    def sleeping(self, rid: str, labels: Sequence[str]) -> dict[Key, Stream]:
        """Streams that are about to be offloaded."""
        return {(rid, label): self._streams[rid, label] for label in labels if (rid, label) in self._streams}

    def asleep(self, streams: dict[Key, Stream], labels: set[str]) -> None:
        """Those of `labels` were offloaded: what is known of them is kept until they come back."""
        self._asleep.update({key: stream for key, stream in streams.items() if key[1] in labels})

    def forked_onto(self, key: Key) -> None:
        """A stream whose pages are about to be overwritten from their beginning: not those that others may read."""
        stream = self._streams.get(key)
        if stream is None or not stream.named:
            return
        if not stream.stepped:
            self._undo(key, stream)
            return
        theirs = self._kv._streams[key[0]][key[1]]
        self.end(key)
        theirs.page_indices = []
        theirs.generation += 1

    @contextmanager
    def acting_for(self, *keys: Key) -> Iterator[None]:
        """What M* acquires or releases inside is for these, in this order."""
        acting = self._acting
        before = getattr(acting, "keys", iter(())), getattr(acting, "rid", None)
        acting.keys, acting.rid = iter(keys), keys[0][0] if keys else None
        try:
            yield
        finally:
            acting.keys, acting.rid = before

    def _acts_for(self, key: Key) -> bool:
        rid = getattr(self._acting, "rid", None)
        return rid is None or key[0] == rid

    def _open_sink(self) -> Lease:
        """Page 0 takes the writes that nobody reads."""
        lease = self.cache.admit([0], reuse=False, store=False)
        if list(lease.pages) != [SINK_PAGE]:
            raise InvariantViolation(f"the first page is {lease.pages[0]}, and M*'s sink is {SINK_PAGE}")
        return lease


def _plain(inputs: Any) -> bool:
    """Whether inputs are token ids and nothing else."""
    return (
        type(inputs) is ARNodeInputs
        and inputs.input_ids is not None
        and inputs.input_ids.dim() == 1
        and len(inputs.input_ids) == inputs.input_seq_len
        and inputs.input_embeds is None
        and inputs.custom_pos_ids is None
        and inputs.resource_step_info is None
        and not inputs.tensor_inputs
        and not inputs.kwargs
    )
