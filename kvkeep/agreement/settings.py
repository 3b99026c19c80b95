"""What ranks agree on before the first request: settings that must be equal, and such as one rank's decide for all.

Must not know what a setting means, but for pinning.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from kvkeep.agreement.channel import Channel
from kvkeep.errors import BadInput, KvkeepError
from kvkeep.index.names import Fingerprint, hash64
from kvkeep.tiers.cpu_pool import CpuPool

log = logging.getLogger(__name__)

#: A setting's value.  A `Fingerprint` is its fields, but for the one that says which slice a rank holds.
Setting = bool | int | float | str | bytes | Fingerprint | None
Settings = Mapping[str, Setting]
Rule = Literal["same", "least", "most", "first"]
RULES: tuple[Rule, ...] = ("same", "least", "most", "first")

#: How many differences one message tells of.
DIFFERENCES_MAX = 3
#: Seconds after which ranks tell each other that they are still pinning: less than any deadline.
PIN_PERIOD_S = 0.2

_Made = TypeVar("_Made")


def agree_settings(
    channel: Channel, same: Settings, *, least: Settings | None = None, most: Settings | None = None,
    first: Settings | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What all ranks go on with; every rank calls it, and every rank gets the same or raises the same.

    same: must be equal: page size, pool sizes, fingerprint.
    least, most: the smallest, or largest, of all ranks' numbers: pages that memory was found for; what a load takes.
    first: rank 0's value: what was calibrated and is to be equal.
    Raises `BadInput` that names the setting, a rank, and both values; `RankLost`.
    """
    return agree_rules(channel, [("same", same), ("least", least or {}), ("most", most or {}), ("first", first or {})])


def agree_rules(channel: Channel, given: Sequence[tuple[Rule, Settings]]) -> dict[str, Any]:
    """`agree_settings` of what several places give, each name once."""
    try:
        mine: dict[str, Any] = _by_rule(given)
    except BadInput as error:  # the others wait: they hear of it
        mine = {"refused": str(error)}
    ranks: list[dict[str, Any]] = [json.loads(said) for said in channel.exchange("settings", 0, _encode(mine))]
    refused = [f"rank {rank}: {theirs['refused']}" for rank, theirs in enumerate(ranks) if "refused" in theirs]
    if refused:
        raise BadInput("; ".join(refused))
    wrong = _differences([rank["same"] for rank in ranks])
    for rule in RULES[1:]:  # their values may differ, but not their names
        wrong += _differences([dict.fromkeys(rank[rule], "there") for rank in ranks])
    if wrong:
        more = f"; and {len(wrong) - DIFFERENCES_MAX} more" if len(wrong) > DIFFERENCES_MAX else ""
        raise BadInput(f"ranks differ: {'; '.join(wrong[:DIFFERENCES_MAX])}{more}: they must be equal on every rank")
    agreed: dict[str, Any] = ranks[0]["same"] | ranks[0]["first"]
    for rule, choose in (("least", min), ("most", max)):
        agreed |= {name: choose(rank[rule][name] for rank in ranks) for name in ranks[0][rule]}
    return agreed


def all_or_none(
    channel: Channel, what: str, make: Callable[[], _Made], undo: Callable[[_Made], object] = lambda made: None
) -> _Made:
    """What `make` gives, if it gives something on every rank; otherwise `BadInput` on every rank, and `undo` here.

    what: names it, equal on every rank.   make: what it raises is what the other ranks hear; they wait for it no longer
        than their deadline.
    """
    made: list[_Made] = []
    cause: Exception | None = None
    try:
        made.append(make())
    except Exception as error:
        cause = error
    try:
        said = channel.exchange("made", hash64(what.encode(), 0), _story(cause).encode())
        failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text]
        if failed:
            raise BadInput(f"{what}: {'; '.join(failed)}") from cause
    except BaseException:
        for one in made:
            undo(one)
        raise
    return made[0]


def agree_pinning(channel: Channel, pool: CpuPool) -> bool:
    """Whether the host pools of all ranks are pinned; where one is not, none is: this pool is unpinned then.

    Every rank calls it before the first copy.  It waits until pinning in the background is over on all of them, which
    may take longer than the deadline: ranks say meanwhile that they are there.
    """
    while True:
        over, why = True, ""
        try:
            over = pool.wait_pinned(PIN_PERIOD_S)
        except BadInput as error:
            why = str(error)
        here = [over, over and pool.pinned_pages == pool.pages, why]
        ranks = [json.loads(said) for said in channel.exchange("made", 0, _encode(here))]
        if all(ended for ended, _, _ in ranks):
            break
    if all(pinned for _, pinned, _ in ranks):
        return True
    if pool.pinned_pages:
        rank, reason = next((rank, reason) for rank, (_, pinned, reason) in enumerate(ranks) if not pinned)
        log.warning("rank %d could not pin its host pool, so no rank's is: copies are slower. %s", rank, reason)
        pool.unpin()
    return False


def _by_rule(given: Sequence[tuple[Rule, Settings]]) -> dict[str, dict[str, Any]]:
    """Values that JSON has, by rule and name."""
    out: dict[str, dict[str, Any]] = {rule: {} for rule in RULES}
    names: set[str] = set()
    for rule, settings in given:
        for name, value in settings.items():
            if name in names:
                raise BadInput(f"setting {name} is given twice: a name must be used once")
            if rule in ("least", "most") and not isinstance(value, int | float):
                raise BadInput(f"setting {name} is {type(value).__name__}: where the {rule} counts it must be a number")
            names.add(name)
            out[rule] |= _flat(name, value)
    return out


def _flat(name: str, value: Setting) -> dict[str, Any]:
    if isinstance(value, Fingerprint):
        fields = (field for field in value.__dataclass_fields__ if field != "tensor_parallel")
        return {f"{name}.{field}": str(getattr(value, field)) for field in fields}
    if isinstance(value, bytes):
        return {name: value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return {name: value}
    raise BadInput(f"setting {name} is {type(value).__name__}: it must be a number, text, bytes or Fingerprint")


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _story(error: Exception | None) -> str:
    """What others hear of an error; "" without one."""
    if error is None:
        return ""
    text = str(error).strip().partition("\n")[0]
    return text if text and isinstance(error, KvkeepError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _differences(ranks: list[dict[str, Any]]) -> list[str]:
    """For each name that ranks have different values of, the first rank whose value is not rank 0's."""
    out = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        values = [repr(rank[name]) if name in rank else "missing" for rank in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            out.append(f"{name} is {values[other]} on rank {other} and {values[0]} on rank 0")
    return out
