"""Chat logs: OpenAI-style `messages`, laid out as ChatML and tokenised with a tokenizer that the user names.

Must not know pages, nor load a tokenizer before there is a log.

    {"messages": [...]}                            a conversation: each assistant message is a request's completion,
                                                   and what comes after the last one is a request without
    {"messages": [...], "choices": [...]}          one request and its answer (or "response": a message, or text)

`session` (or `id`), `service_s`, `time_s` (or `created`, Unix seconds) may be there; a line without a session is one of
its own.  Messages are tokenised one by one, laid out as `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; a completion is
CONTENT and `<|im_end|>`.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.errors import BadInput
from kvkeep.index.names import Int32s
from kvkeep.replay.reading import Lines, Malformed, Source, listed, need, seconds_or_none
from kvkeep.replay.trace import Clock, Request, Trace

#: Text to token ids.
Encode = Callable[[str], list[int]]


class Builder:
    """Puts requests together into sessions; a request that goes on where its session was shares its chain."""

    def __init__(self) -> None:
        self._chains: list[Int32s] = []
        self._sessions: list[list[Request]] = []
        self._number: dict[str | int, int] = {}
        self._timed = True

    def session(self, name: str | int | None) -> int:
        """The number of the session called so; a new one for None."""
        number = len(self._sessions) if name is None else self._number.setdefault(name, len(self._sessions))
        if number == len(self._sessions):
            self._sessions.append([])
        return number

    def add(
        self,
        session: int,
        prompt: Sequence[int],
        completion: Sequence[int],
        unknown: int = 0,
        time_s: float | None = None,
        service_s: float | None = None,
    ) -> None:
        """One request.   unknown: the length of a completion without token ids."""
        requests = self._sessions[session]
        ids = np.array([*prompt, *completion], dtype=np.int32)
        chain = self._chain(requests, ids)
        self._timed = self._timed and time_s is not None
        known = len(ids)
        requests.append(Request(session, chain, len(prompt), known + unknown, known, time_s or 0.0, service_s))

    def _chain(self, requests: list[Request], ids: Int32s) -> int:
        """The chain that begins with `ids`: the session's last one where one of the two begins the other."""
        if requests:
            chain = requests[-1].chain
            before = self._chains[chain]
            both = min(len(before), len(ids))
            if np.array_equal(before[:both], ids[:both]):
                if len(ids) > len(before):
                    self._chains[chain] = ids
                return chain
        self._chains.append(ids)
        return len(self._chains) - 1

    def trace(self, name: str, digest: str, lines: Lines) -> Trace:
        """What there is."""
        clock: Clock = "shared" if self._timed else "none"
        return Trace(name, digest, None, self._chains, self._sessions, clock, lines.bad, lines.note)


def read_chat(path: Path, lines: Lines, tokenizer: Path | None) -> Trace:
    """A chat log.   tokenizer: a tokenizer.json of the `tokenizers` library."""
    if tokenizer is None:
        raise BadInput(f"{path}: a chat log has no token ids: name the model's tokenizer.json with --tokenizer FILE")
    encode, digest = _load(tokenizer)
    builder = Builder()
    for number, line in lines.objects():
        with lines.guard(number):
            _add_line(builder, line, encode)
    both = hashlib.sha256(f"{lines.source.digest} {digest}".encode()).hexdigest()
    return builder.trace(path.name, both, lines)


def _load(path: Path) -> tuple[Encode, str]:
    """What turns text into token ids, and the digest of its file."""
    try:
        source = Source(path)
    except BadInput as error:
        raise BadInput(f"--tokenizer {error}; name a tokenizer.json") from error
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(source.data)
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"--tokenizer {path}: is no tokenizer.json ({error})") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, source.digest


def _add_line(builder: Builder, line: dict[str, Any], encode: Encode) -> None:
    messages = [_message(m, f"messages[{k}]") for k, m in enumerate(listed(need(line, "messages"), "messages"))]
    if not messages:
        raise Malformed("messages", "it is empty")
    name = line.get("session", line.get("id"))
    if name is not None and not isinstance(name, str | int):
        raise Malformed("session", "it must be a string or a whole number")
    time_s = seconds_or_none(line, "time_s")
    if time_s is None:
        time_s = seconds_or_none(line, "created")
    service_s = seconds_or_none(line, "service_s")
    answer = _answer(line)
    session = builder.session(name)
    said, header = list[int](), encode("<|im_start|>assistant\n")
    for k, (role, content) in enumerate(messages):
        completion = encode(f"{content}<|im_end|>")
        if role == "assistant" and k and answer is None:
            builder.add(session, [*said, *header], completion, 0, time_s, service_s)
            time_s = service_s = None  # of the first answer only
        said += [*encode(f"<|im_start|>{role}\n"), *completion, *encode("\n")]
    if answer is not None:
        builder.add(session, [*said, *header], encode(f"{answer}<|im_end|>"), 0, time_s, service_s)
    elif messages[-1][0] != "assistant":
        builder.add(session, [*said, *header], [], 0, time_s, service_s)


def _message(message: Any, field: str) -> tuple[str, str]:
    """(role, text) of one message; content may be text, parts with text, or null beside tool calls."""
    if not isinstance(message, dict):
        raise Malformed(field, "it must be an object with role and content")
    role = need(message, "role", f"{field}.")
    if not isinstance(role, str):
        raise Malformed(f"{field}.role", "it must be a string")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise Malformed(f"{field}.content", "only parts of text can be replayed")
        content = "".join(str(text) for text in texts)
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Malformed(f"{field}.content", "it must be text")
    return role, content + (json.dumps(calls, sort_keys=True) if calls else "")


def _answer(line: dict[str, Any]) -> str | None:
    """The text of the answer that the line logs beside its messages, or None."""
    if "choices" in line:
        choices = listed(line["choices"], "choices")
        if not choices or not isinstance(choices[0], dict):
            raise Malformed("choices", "it must hold an object with a message")
        return _message(need(choices[0], "message", "choices[0]."), "choices[0].message")[1]
    if "response" in line:
        response = line["response"]
        return response if isinstance(response, str) else _message(response, "response")[1]
    return None
