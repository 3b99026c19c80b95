"""What is routed by: the prompt of an OpenAI-compatible request, as bytes.

Must not know replicas, nor check what the engine will check: a body that is not understood is nobody's business here.

Two requests of a session must begin with the same bytes, so what a chat template puts first comes first (tools,
documents), each message is laid out on its own, and what does not reach the template is left out: nulls, marks of what
to cache, which clients move along with a session, and whether text comes in parts.  Salt and adapter are where vLLM has
them: `cache_salt`, and `model`, which may name a LoRA.
"""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvkeep.errors import BadInput
from kvkeep.index.names import TOKEN_NBYTES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: Fields of a chat that templates put before its messages.
FIRST = ("tools", "functions", "documents")

#: Objects of a caller in Python may hold what JSON has not: there its type has to do.
_lay_out = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=lambda value: type(value).__name__
).encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a prompt.   kind: what `raw` is, ids or text.   salt, adapter: see `names`."""

    kind: bytes
    raw: bytes
    salt: bytes = b""
    adapter: bytes = b""


def read_prompt(path: str, body: bytes, nbytes_max: int) -> Prompt | None:
    """The first `nbytes_max` bytes of a request's prompt; None for requests that have none that is understood.

    Raises `BadInput` for a body that is not JSON, and for an empty prompt.
    """
    chat = path.endswith(CHAT)
    if not chat and not path.endswith(COMPLETIONS):
        return None
    try:
        request = json.loads(body)
    except ValueError as error:  # UnicodeDecodeError is one
        raise BadInput(f"{path}: the body is not JSON ({error}); send an object with a prompt or messages") from None
    except RecursionError:
        raise BadInput(f"{path}: the body is nested too deeply to be read") from None
    if not isinstance(request, dict):
        raise BadInput(f"{path}: the body is a JSON {type(request).__name__}; send an object with a prompt or messages")
    return prompt_of(request, nbytes_max, chat=chat, where=f"{path}: ")


def prompt_of(request: Mapping[str, Any], nbytes_max: int, *, chat: bool, where: str = "") -> Prompt | None:
    """The same of a request that is an object already.   where: what a `BadInput` begins with."""
    try:
        found = _chat(request, nbytes_max) if chat else _completion(request, nbytes_max)
    except (TypeError, ValueError, RecursionError):
        found = None  # keys of several types, circles, too deep to be laid out: not what JSON has
    if found is None:
        return None
    kind, raw = found
    if not raw:
        what, one = ("messages", "message") if chat else ("prompt", "token")
        raise BadInput(f"{where}{what} is empty; send one {one} or more")
    return Prompt(kind, raw, _text(request.get("cache_salt")), _text(request.get("model")))


def _completion(request: Mapping[str, Any], nbytes_max: int) -> tuple[bytes, bytes] | None:
    """A string, or ids; of several prompts the first."""
    prompt = request.get("prompt")
    if not prompt and request.get("prompt_embeds"):
        return None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return b"text", _text(prompt[:nbytes_max])[:nbytes_max]
    if isinstance(prompt, list):
        try:
            return b"ids", array("i", prompt[: nbytes_max // TOKEN_NBYTES]).tobytes()
        except (TypeError, OverflowError):
            return None  # the engine will say what is wrong with them
    return None


def _chat(request: Mapping[str, Any], nbytes_max: int) -> tuple[bytes, bytes] | None:
    messages = request.get("messages")
    if not isinstance(messages, list):
        return None
    if not messages:
        return b"text", b""
    parts, length = [], 0
    first = [{name: request[name]} for name in FIRST if request.get(name)]
    for part in chain(first, (_message(message, nbytes_max) for message in messages)):
        parts.append(_text(_lay_out(part)))
        length += len(parts[-1])
        if length >= nbytes_max:
            break
    return b"text", b"\n".join(parts)[:nbytes_max]


def _message(message: Any, nbytes_max: int) -> Any:
    """A message as far as a template sees it.  Long strings are cut: what is behind that is cut off anyway."""
    if not isinstance(message, Mapping):
        return message
    seen = {name: value for name, value in message.items() if value is not None and name != "cache_control"}
    content = seen.get("content")
    if isinstance(content, str):
        seen["content"] = content[:nbytes_max]
    elif isinstance(content, list):
        seen["content"] = _content(content, nbytes_max)
    return seen


def _content(parts: list[Any], nbytes_max: int) -> Any:
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))[:nbytes_max]
    return [_cut(part, nbytes_max) for part in parts]


def _cut(value: Any, nbytes_max: int) -> Any:
    if isinstance(value, str):
        return value[:nbytes_max]
    if isinstance(value, list):
        return [_cut(one, nbytes_max) for one in value]
    if isinstance(value, Mapping):
        return {name: _cut(one, nbytes_max) for name, one in value.items() if name != "cache_control"}
    return value


def _text(value: Any) -> bytes:
    """Text as bytes, whatever is in it; nothing for anything else."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b""
