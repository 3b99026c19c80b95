"""What a request of vLLM is called in the tier: salt, adapter and media, or why it cannot be named.

Must not import vLLM, nor know the tier.  What vLLM's own prefix cache tells apart is told apart here.
"""

import hashlib
from typing import Any, Literal, NamedTuple

from kvkeep.errors import BadInput
from kvkeep.index.media import NO_MEDIA, MediaItem, Placed, place_media
from kvkeep.index.names import frame

#: Why a request is not cached.
#:   embeddings  its prompt, or part of it, is not token ids       adapter  its adapter is exchanged in place
#:   streaming   its prompt grows and changes while it runs        media    an item has no digest, or items overlap
Unnamed = Literal["embeddings", "adapter", "streaming", "media"]
UNNAMED: tuple[Unnamed, ...] = ("embeddings", "adapter", "streaming", "media")


class RequestIdentity(NamedTuple):
    """salt, adapter, media: see `TieredCache.admit`.   placed: the media items on pages."""

    salt: bytes
    adapter: bytes
    media: tuple[MediaItem, ...]
    placed: Placed


def identify(request: Any, page_size: int, whole_media: bool) -> RequestIdentity | Unnamed:
    """The identity of a vLLM request, or why it has none that is safe.

    whole_media: attention inside a media item is not causal, so that no match may end inside one.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return "embeddings"
    if request.resumable:
        return "streaming"
    adapter = b""
    if request.lora_request is not None:
        lora = request.lora_request
        if lora.load_inplace:
            return "adapter"
        fields = (("name", lora.lora_name), ("id", str(lora.lora_int_id)), ("path", lora.lora_path))
        adapter = frame((tag, value.encode()) for tag, value in fields)
    salt = request.cache_salt.encode() if request.cache_salt else b""
    if not request.mm_features:
        return RequestIdentity(salt, adapter, (), NO_MEDIA)
    items = _items(request.mm_features, whole_media)
    try:
        placed = place_media(items, page_size, request.num_prompt_tokens)
    except BadInput:  # items that share placeholders: whose a page is cannot be told
        return "media"
    return RequestIdentity(salt, adapter, items, placed) if placed.storable is None else "media"


def _items(features: Any, whole: bool) -> tuple[MediaItem, ...]:
    items = []
    for feature in features:
        where = feature.mm_position
        name = frame((("modality", feature.modality.encode()), ("identifier", (feature.identifier or "").encode())))
        digest = hashlib.sha256(name).digest() if feature.identifier else None
        items.append(MediaItem(where.offset, where.length, digest, causal=not whole))
    return tuple(sorted(items, key=lambda item: item.offset))
