"""What ranks agree on before the first request: settings that must be equal, and such as one rank's decide for all.

Must not know what a setting means, but for pinning.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvkeep.agreement.channel import Channel
from kvkeep.errors import BadInput, KvkeepError
from kvkeep.index.names import Fingerprint, hash64
from kvkeep.tiers.cpu_pool import CpuPool

log = logging.getLogger(__name__)

#: A setting's value.  A `Fingerprint` is its fields, but for the one that says which slice a rank holds.
Setting = bool | int | float | str | bytes | Fingerprint | None
Settings = Mapping[str, Setting]

#: How many differences one message tells of.
DIFFERENCES_MAX = 3

_Made = TypeVar("_Made")


def agree_settings(
    channel: Channel, same: Settings, *, least: Settings | None = None, most: Settings | None = None,
    first: Settings | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What all ranks go on with; every rank calls it, and every rank gets the same or raises the same.

    same: must be equal: page size, pool sizes, fingerprint.
    least, most: the smallest, or the largest, of all ranks' values: pages that memory was found for; what a load takes.
    first: rank 0's value: what was calibrated and is to be equal.
    Raises `BadInput` that names the setting, a rank, and both values; `RankLost`.
    """
    rules = {"same": same, "least": least or {}, "most": most or {}, "first": first or {}}
    mine = {rule: _flat(settings) for rule, settings in rules.items()}
    said = channel.exchange("settings", 0, json.dumps(mine).encode())
    ranks: list[dict[str, dict[str, Any]]] = [json.loads(text) for text in said]
    wrong = _differences([rank["same"] for rank in ranks])
    for rule in ("least", "most", "first"):  # their values may differ, but not their names
        wrong += _differences([dict.fromkeys(rank[rule], "there") for rank in ranks])
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_MAX} more" if len(wrong) > DIFFERENCES_MAX else ""
        raise BadInput(f"ranks differ: {'; '.join(wrong[:DIFFERENCES_MAX])}{more}: they must be equal on every rank")
    agreed = dict(ranks[0]["same"]) | ranks[0]["first"]
    for rule, choose in (("least", min), ("most", max)):
        agreed |= {name: choose(rank[rule][name] for rank in ranks) for name in ranks[0][rule]}
    return agreed


def all_or_none(
    channel: Channel, what: str, make: Callable[[], _Made], undo: Callable[[_Made], object] = lambda made: None
) -> _Made:
    """What `make` gives, if it gives something on every rank; otherwise `BadInput` on every rank, and `undo` here.

    what: names it, equal on every rank.   make: may raise a `KvkeepError`, which is what the other ranks hear.
    """
    made: list[_Made] = []
    error = ""
    try:
        made.append(make())
    except KvkeepError as refusal:
        error = str(refusal) or type(refusal).__name__
    try:
        said = channel.exchange("made", hash64(what.encode(), 0), error.encode())
        failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text]
        if failed:
            raise BadInput(f"{what}: {'; '.join(failed)}")
    except BaseException:
        for one in made:
            undo(one)
        raise
    return made[0]


def agree_pinning(channel: Channel, pool: CpuPool) -> bool:
    """Whether the host pools of all ranks are pinned; where one is not, none is: this pool is unpinned then.

    Every rank calls it before the first copy.  It waits until pinning in the background is over.
    """
    try:
        pool.wait_pinned()
        why = ""
    except BadInput as error:
        why = str(error)
    here = pool.pinned_pages == pool.pages
    ranks = [json.loads(text) for text in channel.exchange("made", 0, json.dumps([here, why]).encode())]
    if all(pinned for pinned, _ in ranks):
        return True
    if pool.pinned_pages:
        rank = next(rank for rank, (pinned, _) in enumerate(ranks) if not pinned)
        log.warning("rank %d could not pin its host pool, so no rank's is: copies are slower. %s", rank, ranks[rank][1])
        pool.unpin()
    return False


def _flat(settings: Settings) -> dict[str, Any]:
    """Values that JSON has."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Fingerprint):
            fields = {field: str(getattr(value, field)) for field in value.__dataclass_fields__}
            out |= {f"{name}.{field}": fields[field] for field in fields if field != "tensor_parallel"}
        elif isinstance(value, bytes):
            out[name] = value.hex()
        elif value is None or isinstance(value, bool | int | float | str):
            out[name] = value
        else:
            raise BadInput(f"setting {name} is {type(value).__name__}: it must be a number, text, bytes or Fingerprint")
    return out


def _differences(ranks: list[dict[str, Any]]) -> list[str]:
    """For each name that ranks have different values of, the first rank whose value is not rank 0's."""
    out = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [repr(rank[name]) if name in rank else "missing" for rank in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            out.append(f"{name} is {values[other]} on rank {other} and {values[0]} on rank 0")
    return out
