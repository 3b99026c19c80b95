"""KvkeepCache: what a chat script passes to transformers' `generate`, so that the next call finds its prefix computed.

Must not know tokenizers or chat templates.  Reads as the life of a forward: what it is asked, what of it is there,
what the layers write, what is kept.

    kept = KvkeepCache(model, cpu_gib=4)
    output = model.generate(ids, past_key_values=kept, max_new_tokens=200)      as often as you like, with any prompts

Newer releases of transformers call the argument `cache`, and take both names.

A cache is not told the ids of a prompt, only K and V.  So a hook before the model's forward reads the ids that are
really computed: it matches them, and takes from the inputs what is there.  Outside a forward the cache says that it is
empty, hence `generate` hands over each prompt in full.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedModel, __version__
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig, check_int
from kvkeep.engine.host_tier import HostTier
from kvkeep.errors import BadInput, InvariantViolation, LeaseRevoked, OutOfPages
from kvkeep.index.names import Fingerprint
from kvkeep.lease import Lease
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import DTYPE_NBYTES, PageLayout

if TYPE_CHECKING:
    from types import TracebackType

    from kvkeep.stats import CacheStats

#: The first release whose caches have this shape, and the first that may not.  Tried with 5.0.0, 5.8.0 and 5.24.0.
VERSIONS = ((5, 0), (6, 0))
#: What a forward may be told besides ids without K and V depending on it.
HARMLESS = {"input_ids", "attention_mask", "position_ids", "cache_position", "cache", "past_key_values"}
#: Rotary embeddings whose angles at a position depend on how long the sequence is: its K are no other sequence's.
MOVING_ROPE = ("dynamic", "longrope")
COPY_WAIT_S = 0.001  # a forward that waits for copies looks at them this often
CLOSE_S = 5.0  # seconds that copies get to end


class KvkeepCache(Cache):
    """Keeps the K and V that `model` computes in pages, and hands a prompt what it begins with.

    model: a decoder with full attention in each layer, on one device, in `eval()`.
    gpu_tokens: positions of the pool that the model reads: the longest sequence, and what is kept beside it.
    cpu_gib: GiB of host memory behind it, for what has to leave the pool; 0 is none.
    page_size: positions of a page.  A prompt that goes on where the last call ended is taken up at that very position;
        any other begins at the end of a page.
    salt: callers that differ in it share nothing.

    One sequence at a time.  Batches, beams and assistants are refused with `BadInput`, like what else could make K and
    V depend on more than token ids.  Calls that ask for hidden states or all logits get those of computed positions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        gpu_tokens: int = 8192,
        cpu_gib: float = 1.0,
        page_size: int = 16,
        salt: bytes = b"",
    ) -> None:
        check_version(__version__)
        layout = layout_of(model, check_int("page_size", page_size, at_least=1))
        pages = -(-check_int("gpu_tokens", gpu_tokens, at_least=page_size) // page_size)
        sizes = Sizes(layout, pages, cpu_gib)
        self._pool = GpuPool.allocate(layout, pages, str(model.device))
        self._below = HostTier(self._pool, sizes) if sizes.host_pages else None
        self._kept = TieredCache(
            CacheConfig(page_size=page_size),
            self._pool,
            _fingerprint(model, layout),
            host=self._below.pool if self._below is not None else None,
            transfers=self._below.transfers if self._below is not None else None,
        )
        self._salt = salt
        self._weights = _weights(model)
        self._live: Lease | None = None
        self._ids: list[int] = []  # of the live lease
        self._in_forward = False
        self.matched_len = 0
        super().__init__(layers=[PagedLayer(self._pool.kv[:, i], layout) for i in range(layout.layers)])
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    # ------------------------------------------------------------------ what callers see

    matched_len: int
    """Positions of the last prompt whose K and V were there: the model has computed the others."""

    def stats(self) -> "CacheStats":
        """Counts of now and since the start."""
        return self._kept.stats()

    def reset(self) -> None:
        """The sequence ends; what it computed stays.  Only loops that call the model without positions need it."""
        self._end()

    def forget(self) -> None:
        """Nothing that was computed before will be used again."""
        self._end()
        self._kept.reset()

    def close(self) -> None:
        """Lets go of the model and of host memory; the cache must not be used afterwards."""
        for hook in self._hooks:
            hook.remove()
        self._end()
        if self._below is not None:
            self._kept.close(drain=False, timeout_s=CLOSE_S)
            self._below.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ a forward

    def _before(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward is to compute: of a new prompt what is not there, else what follows the sequence."""
        if kwargs.get("past_key_values") is not self and kwargs.get("cache") is not self:
            if any(given is self for given in args):
                raise BadInput("a KvkeepCache among the positional arguments: pass it by name, as past_key_values=")
            return None
        ids, first = _asked(model, args, kwargs)
        if self._in_forward:
            self._drop()
            if first != 0:  # `generate` has cut the prompt at a length that is no more
                raise BadInput("the last call was interrupted inside a forward: what it began is dropped, call again")
        if first == 0 or self._live is None:
            if first:
                raise BadInput(f"positions begin at {first}, and no sequence is there: a prompt begins at 0")
            start = self._begin(model, ids)
        else:
            if first is not None and first != len(self._ids):
                raise BadInput(f"positions begin at {first}: 0 begins a prompt, {len(self._ids)} goes on with the last")
            start = 0
            self._extend(self._live, ids)
        self._start_layers(len(self._ids) - len(ids) + start)
        self._in_forward = True
        return _without(args, kwargs, start)

    def _after(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """The pages that the forward has filled are kept; one that failed has left nothing that can be trusted."""
        if not self._in_forward or (kwargs.get("past_key_values") is not self and kwargs.get("cache") is not self):
            return
        wrote = {layer.length for layer in self._layers()}
        if output is None:
            self._drop()
            return
        self._stop_layers()
        assert self._live is not None
        if wrote != {len(self._ids)}:
            raise InvariantViolation(f"the layers wrote {sorted(wrote)} of {len(self._ids)} positions")
        if self._below is not None:
            self._kept.fence(self._below.written())
        self._kept.seal(self._live, len(self._ids))
        self._kept.poll()

    def _drop(self) -> None:
        """A forward has not ended: the live sequence keeps the pages that were full before, and nothing else."""
        self._stop_layers()
        if self._live is not None:
            self._kept.abort(self._live)
            self._live, self._ids = None, []

    def _begin(self, model: PreTrainedModel, ids: list[int]) -> int:
        """A new prompt: how many of its positions are there.  The live sequence goes on if the prompt does."""
        self._check_weights(model)
        live = self._live
        if live is not None and len(ids) > len(self._ids) and ids[: len(self._ids)] == self._ids:
            self.matched_len = len(self._ids)
            self._make_room(live, len(ids) - self.matched_len)
            self._extend(live, ids[self.matched_len :])
            return self.matched_len
        self._end()
        self._live = self._admit(ids)
        self._ids = list(ids)
        self.matched_len = self._live.matched_len
        return self.matched_len

    def _admit(self, ids: list[int]) -> Lease:
        """A lease whose pages are there."""
        while True:
            try:
                lease = self._kept.admit(ids, salt=self._salt)
            except OutOfPages as error:
                self._wait_for_room(error, len(ids))
                continue
            self._arrive(lease)
            if not lease.revoked:
                return lease

    def _arrive(self, lease: Lease) -> None:
        while lease.read_in_progress and not (self._below and lease.gate.wait_on(self._below.stream)):
            self._wait()

    def _make_room(self, lease: Lease, tokens: int) -> None:
        """Cold pages are copied down before `tokens` more need theirs: an extension would not wait, and drop them."""
        size = self._kept.config.page_size
        need = -(-(lease.length + tokens) // size) - len(lease.pages)
        if self._below is not None and need > self._kept.stats().pages_free:
            with suppress(OutOfPages):  # who extends says so
                room = self._kept.admit([0] * (need * size), reuse=False, store=False)
                self._arrive(room)
                self._kept.abort(room)

    def _extend(self, lease: Lease, ids: list[int]) -> None:
        """Pages for `ids`, which follow the sequence; nothing has changed when there are none."""
        while True:
            try:
                self._kept.extend(lease, ids)
                self._ids += ids
                return
            except LeaseRevoked as error:
                raise InvariantViolation(f"{lease} was revoked after its pages had arrived") from error
            except OutOfPages as error:
                self._wait_for_room(error, len(self._ids) + len(ids))

    def _wait_for_room(self, error: OutOfPages, tokens: int) -> None:
        """Waits for the copies that hold pages; `BadInput` when nothing holds any: the sequence is too long."""
        if not error.in_flight:
            raise BadInput(
                f"a sequence of {tokens} tokens and a pool of {self._pool.pages * self._kept.config.page_size}: "
                f"make the cache with a larger gpu_tokens"
            ) from error
        self._wait()

    def _wait(self) -> None:
        if not self._kept.poll():
            time.sleep(COPY_WAIT_S)

    def _end(self) -> None:
        """The live sequence ends, and its full pages stay."""
        if self._live is not None:
            self._kept.finish(self._live, len(self._ids))
            self._live, self._ids = None, []

    def _check_weights(self, model: PreTrainedModel) -> None:
        _check_state(model)
        weights = _weights(model)
        if weights != self._weights:
            self._weights = weights
            self.forget()

    # ------------------------------------------------------------------ layers

    def _layers(self) -> "list[PagedLayer]":
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def _start_layers(self, past: int) -> None:
        assert self._live is not None
        size = self._kept.config.page_size
        device = self._pool.kv.device
        positions = torch.arange(past, len(self._ids), device=device)
        pages = torch.tensor(self._live.pages[: -(-len(self._ids) // size)], device=device)
        for layer in self._layers():
            layer.start(past, pages, pages[positions // size], positions % size)

    def _stop_layers(self) -> None:
        self._in_forward = False
        for layer in self._layers():
            layer.stop()

    def reorder_cache(self, beam_idx: object) -> None:
        """Refused: one sequence at a time."""
        raise BadInput("a KvkeepCache holds one sequence: num_beams=1 is needed")

    def crop(self, *args: object, **kwargs: object) -> None:
        """Refused: what was computed is kept."""
        raise BadInput("a KvkeepCache is not cropped: assisted generation needs another cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: one sequence at a time."""
        raise BadInput("a KvkeepCache holds one sequence: num_return_sequences=1 is needed")

    def batch_select_indices(self, indices: object) -> None:
        """Refused: one sequence at a time."""
        raise BadInput("a KvkeepCache holds one sequence: a batch of 1 is needed")


class PagedLayer(CacheLayerMixin):
    """One layer's view of the pages of the live sequence.

    kv: [pages, 2, page_size, kv_heads, head_dim], a view of the pool.
    Between forwards it says that it is empty.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, kv: torch.Tensor, layout: PageLayout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._kv = kv
        self._shape = (1, layout.kv_heads, layout.head_dim)
        self.stop()

    def start(self, past: int, pages: torch.Tensor, page_of: torch.Tensor, at: torch.Tensor) -> None:
        """A forward begins: `past` positions are there; those that follow lie at (page_of, at)."""
        self.length, self._pages, self._page_of, self._at = past, pages, page_of, at

    def stop(self) -> None:
        """The forward is over."""
        self.length = 0
        self._pages = self._page_of = self._at = torch.empty(0, dtype=torch.long)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to be made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes K and V of the forward's positions into pages; returns those of the sequence so far.

        key_states, value_states: [1, kv_heads, new, head_dim].   Returned: [1, kv_heads, length, head_dim].
        """
        new = len(self._at)
        if not new:
            raise BadInput("a forward that the cache knows nothing of: call the very model that it was made with")
        for states in (key_states, value_states):
            found = (states.shape[0], states.shape[1], states.shape[3])
            if found != self._shape or states.shape[2] != new or states.dtype != self._kv.dtype:
                raise BadInput(
                    f"K or V is {states.dtype} of shape {list(states.shape)}: the cache holds {self._kv.dtype} of "
                    f"shape {[1, self._shape[1], new, self._shape[2]]}, [batch, kv heads, positions, head dimension]"
                )
            if states.requires_grad:
                raise BadInput("a forward that records gradients: kept pages have none; use torch.no_grad()")
        self.length += new
        return self._through_pages(0, key_states), self._through_pages(1, value_states)

    def _through_pages(self, which: int, states: torch.Tensor) -> torch.Tensor:
        pages = self._kv[:, which]
        pages[self._page_of, self._at] = states[0].transpose(0, 1)
        return pages[self._pages].flatten(0, 1)[: self.length].transpose(0, 1)[None]

    def get_seq_length(self, *args: Any) -> int:
        """Positions that are there, during a forward; 0 outside."""
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of K in the attention.   query_length: or, before 5.4, the positions of the queries."""
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + queries, 0

    def get_max_length(self) -> int:
        """-1: no bound but the pool's."""
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length`, as it was called before."""
        return -1


class Sizes:
    """Pages of the tier in host memory; no pages are set aside for preempted requests, since there are none."""

    suspend_pages = 0
    copy_threads = 1

    def __init__(self, layout: PageLayout, pool_pages: int, cpu_gib: float) -> None:
        if not cpu_gib >= 0:
            raise BadInput(f"cpu_gib is {cpu_gib!r}: it must be a number of GiB, 0 or more")
        self.host_pages = int(cpu_gib * 2**30) // layout.page_nbytes
        if cpu_gib and self.host_pages < pool_pages:
            need = pool_pages * layout.page_nbytes / 2**30
            raise BadInput(
                f"cpu_gib={cpu_gib:g} holds {self.host_pages * layout.page_size} tokens, and one sequence may fill the "
                f"pool's {pool_pages * layout.page_size}: use {need:.3g} or more, 0 for none, or a smaller gpu_tokens"
            )


# ---------------------------------------------------------------------- what is understood


def check_version(version: str) -> None:
    """`BadInput` for a transformers whose caches are not known."""
    oldest, beyond = VERSIONS
    if not oldest <= tuple(int(part) for part in version.split(".")[:2]) < beyond:
        raise BadInput(f"transformers {version}: kvkeep knows the caches of 5.0 up to, but not, 6.0")


def layout_of(model: PreTrainedModel, page_size: int) -> PageLayout:
    """What a page of the model looks like; `BadInput` for a model whose K and V are not full pages of plain heads."""
    if not isinstance(model, PreTrainedModel):
        raise BadInput(f"model is {type(model).__name__}: it must be a transformers.PreTrainedModel")
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    if model.config.is_encoder_decoder:
        raise BadInput(f"{name} has an encoder and a decoder: kvkeep keeps decoders' K and V only")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise BadInput(f"{name} has latent attention (kv_lora_rank): kvkeep knows K and V of plain heads only")
    layers = DynamicCache(config=model.config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others or not layers:
        raise BadInput(f"{name} has layers of {', '.join(others) or 'no cache'}: full attention in each is needed")
    rope = _rope_types(config)
    if rope & set(MOVING_ROPE):
        raise BadInput(
            f"{name} has {', '.join(sorted(rope))} rotary embeddings: they turn with the length of the whole sequence, "
            f"so no other sequence can use its K"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        raise BadInput(f"the model is on {', '.join(devices)}: one device is needed")
    _check_state(model)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPE_NBYTES:
        raise BadInput(f"the model's dtype is {dtype}: it must be one of {', '.join(DTYPE_NBYTES)}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return PageLayout(len(layers), heads, head_dim, page_size, dtype)  # type: ignore[arg-type]


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings, of all layers together."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return {str(kind["rope_type"]) for kind in kinds if kind.get("rope_type")}


def _check_state(model: PreTrainedModel) -> None:
    if model.training:
        raise BadInput("the model is in training mode, where dropout changes K and V: call model.eval()")
    if any(hasattr(module, "active_adapter") for module in model.modules()):
        raise BadInput("the model has adapters that may be switched: merge them into the weights first")


def _fingerprint(model: PreTrainedModel, layout: PageLayout) -> Fingerprint:
    """What K and V depend on besides tokens.  Pages never leave the process, and the weights are watched."""
    config = model.config
    return Fingerprint(
        weights=str(config.name_or_path),
        revision=str(getattr(config, "_commit_hash", None)),
        dtype=layout.dtype,
        attention=str(getattr(config, "_attn_implementation", "")),
        rope=",".join(sorted(_rope_types(config.get_text_config(decoder=True)))),
        page_size=layout.page_size,
        layout=repr(layout),
    )


def _weights(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Where each parameter is, and how often it was written: equal as long as nobody has changed the weights.

    Writes through `.data` are not counted by torch: call `forget` after them.
    """
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]


def _asked(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], int | None]:
    """The ids that a forward is given, and the position of the first; `BadInput` where ids cannot name K and V."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if len(args) > 1 or not isinstance(ids, torch.Tensor):
        raise BadInput("a KvkeepCache needs input_ids, and all else by name: embeddings have no ids to be found by")
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise BadInput(f"input_ids of shape {list(ids.shape)}: a KvkeepCache takes one sequence, [1, length]")
    for name, value in kwargs.items():
        if name not in HARMLESS and isinstance(value, torch.Tensor):
            raise BadInput(f"{name} is a tensor: K and V may depend on it, so a KvkeepCache cannot keep them")
    mask = kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        raise BadInput("attention_mask leaves positions out: a KvkeepCache takes one sequence without padding")
    given = [kwargs[name].flatten().tolist() for name in ("position_ids", "cache_position") if _given(kwargs, name)]
    for positions in given:
        if positions != list(range(positions[0], positions[0] + ids.shape[1])):
            raise BadInput("positions that do not follow each other: a KvkeepCache takes one sequence, from 0 on")
    return ids[0].tolist(), given[0][0] if given else None


def _given(kwargs: dict[str, Any], name: str) -> bool:
    return kwargs.get(name) is not None


def _without(args: tuple[Any, ...], kwargs: dict[str, Any], start: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same inputs without their first `start` positions."""
    out = dict(kwargs)
    if args:
        out["input_ids"] = args[0]
    for name in ("input_ids", "position_ids", "cache_position"):
        if _given(out, name):
            out[name] = out[name][..., start:]
    if _given(out, "attention_mask"):
        out["attention_mask"] = None  # all of it is ones, and its length may not fit any more
    return (), out
