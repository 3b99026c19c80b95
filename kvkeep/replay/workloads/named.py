"""Workloads by name: `workload:image-chat?sessions=40&seed=1`.

Must not know caches.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.replay.workloads.audio import Audio
from kvkeep.replay.workloads.image_chat import ImageChat
from kvkeep.replay.workloads.image_generation import ImageGeneration
from kvkeep.replay.workloads.video import Video
from kvkeep.replay.workloads.workload import Workload, in_order

PREFIX = "workload:"
KINDS: dict[str, type[Any]] = {
    "image-chat": ImageChat,
    "image-generation": ImageGeneration,
    "video": Video,
    "audio": Audio,
}
MIXED = "mixed"


def make_workload(text: str) -> Workload:
    """The workload that `text` names, with or without `workload:` before it.

    `mixed` is all kinds at once, and takes a seed only.
    Raises `BadInput` for a name or a parameter that there is not.
    """
    name, _, query = text.removeprefix(PREFIX).partition("?")
    given = dict(_pair(pair, text) for pair in query.split("&") if pair)
    if name == MIXED:
        seed = _value(int, "seed", given.pop("seed", "0"), text)
        if given:
            raise BadInput(f"{text}: {next(iter(given))} is not known; {MIXED} takes seed only")
        return mix([kind(seed=seed).workload() for kind in KINDS.values()])
    if name not in KINDS:
        raise BadInput(f"{text}: there is no workload {name!r}; known: {', '.join(KINDS)}, {MIXED}")
    kinds: dict[str, Any] = {field.name: field.type for field in fields(KINDS[name])}
    for key in given:
        if key not in kinds:
            raise BadInput(f"{text}: {key} is not known; {name} takes {', '.join(kinds)}")
    return KINDS[name](**{key: _value(kinds[key], key, said, text) for key, said in given.items()}).workload()  # type: ignore[no-any-return]


def mix(parts: list[Workload]) -> Workload:
    """All of them at once, for one model."""
    requests = in_order([request for part in parts for request in part.requests])
    return Workload(MIXED, "synthetic: " + ", ".join(part.name for part in parts), requests)


def _pair(pair: str, text: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals:
        raise BadInput(f"{text}: {pair!r}: it must be name=value")
    return key, value


def _value(kind: Callable[[str], Any], key: str, said: str, text: str) -> Any:
    """A count of 1 or more (0 for `keep` and `seed`), a number above 0, a share of 1 at most, or text."""
    if kind is str:
        return said
    try:
        value = kind(said)
    except ValueError:
        value = -1
    least = 0 if key in ("keep", "seed") or key.endswith("_share") else 1 if kind is int else 1e-9
    if not least <= value < float("inf") or (key.endswith("_share") and value > 1):
        raise BadInput(
            f"{text}: {key}={said}: it must be {'a whole number' if kind is int else 'a number'} {_range(key, kind)}"
        )
    return value


def _range(key: str, kind: Callable[[str], Any]) -> str:
    if key.endswith("_share"):
        return "from 0 to 1"
    return "of 0 or more" if key in ("keep", "seed") else "of 1 or more" if kind is int else "above 0"
