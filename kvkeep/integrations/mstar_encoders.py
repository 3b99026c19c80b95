"""The outputs of M*'s encoder nodes, kept in the tiers of a KV cache of the same engine.

Must not know what an encoder computes.  Wrapped are `SubmoduleManagement.forward` and `forward_batched`: an output is
copied out of the pages before it is handed over, since M* keeps outputs of its own.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvkeep.cache import TieredCache
from kvkeep.encoder import EncoderCache, EncoderFingerprint
from kvkeep.errors import BadInput

log = logging.getLogger(__name__)

Outputs = Mapping[str, Any]  # by name: a tensor, or a list of tensors


@dataclass(frozen=True)
class KeptEncoder:
    """An encoder node.

    fingerprint: what its output depends on besides the media.
    key_of: the digest of a request's media, from M*'s `CurrentForwardPassInfo`; None: not to be kept.
    """

    fingerprint: EncoderFingerprint
    key_of: Callable[[Any], bytes | None]


def keep_encoder(management: Any, encoder: KeptEncoder, cache: TieredCache) -> EncoderCache:
    """Wraps the forward of one node: what was computed once is not computed again."""
    kept = EncoderCache(cache, encoder.fingerprint)
    forward: Callable[..., Any] = management.forward
    batched: Callable[..., Any] = management.forward_batched

    def kept_forward(graph_walk: str, engine_inputs: Any, **inputs: Any) -> Any:
        (rid,) = engine_inputs.request_ids
        key = encoder.key_of(engine_inputs.per_request_info[rid])

        made: list[Outputs] = []

        def compute() -> list[torch.Tensor]:
            made.append(forward(graph_walk, engine_inputs=engine_inputs, **inputs))
            return packed(made[0])

        if key is None:
            return forward(graph_walk, engine_inputs=engine_inputs, **inputs)
        try:
            with kept.get_or_compute(walked(key, graph_walk), compute) as output:
                return made[0] if made else unpacked(output.tensors)
        except BadInput as error:
            if not made:
                raise
            log.warning("kvkeep: an encoder's output is not kept: %s", error)
            return made[0]

    def kept_batched(graph_walk: str, engine_inputs: Any, **inputs: Any) -> Any:
        """A batch is computed unless all of it is there: its inputs are one piece."""
        keys = {rid: encoder.key_of(info) for rid, info in engine_inputs.per_request_info.items()}
        found = {rid: _get(kept, key, graph_walk) for rid, key in keys.items()}
        if all(output is not None for output in found.values()):
            return found
        computed = batched(graph_walk, engine_inputs=engine_inputs, **inputs)
        for rid, key in keys.items():
            output = computed.get(rid)
            if key is not None and found[rid] is None and isinstance(output, Mapping):
                try:
                    kept.get_or_compute(walked(key, graph_walk), partial(packed, output)).release()
                except BadInput as error:
                    log.warning("kvkeep: an encoder's output is not kept: %s", error)
        return computed

    management.forward, management.forward_batched = kept_forward, kept_batched
    return kept


def _get(kept: EncoderCache, key: bytes | None, walk: str) -> Outputs | None:
    output = kept.get(walked(key, walk)) if key is not None else None
    if output is None:
        return None
    with output:
        return unpacked(output.tensors)


def walked(key: bytes, walk: str) -> bytes:
    """The key of an output: a node may compute something else in another walk."""
    return len(key).to_bytes(4, "little") + key + walk.encode()


def packed(outputs: Outputs) -> list[torch.Tensor]:
    """Outputs as tensors, before them one that says what they are called."""
    names: list[tuple[str, int]] = []
    tensors: list[torch.Tensor] = []
    for name, value in outputs.items():
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, torch.Tensor) and part.numel() for part in parts):
            raise BadInput(f"an encoder's output {name!r} is no tensor, or an empty one: its node cannot be kept")
        names.append((name, len(parts) if isinstance(value, list) else 0))
        tensors += parts
    said = torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8)
    return [said.to(tensors[0].device) if tensors else said, *tensors]


def unpacked(tensors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The opposite: copies, in memory of their own."""
    rest = [tensor.clone() for tensor in tensors[1:]]
    outputs: dict[str, Any] = {}
    for name, count in json.loads(bytes(tensors[0].cpu().numpy())):
        outputs[name] = rest[:count] if count else rest[0]
        rest = rest[count or 1 :]
    return outputs
