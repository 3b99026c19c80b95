"""Reads the kinds of traces there are into `Trace`, and finds out which kind a file is.

Must not know pages.

    NAME.tokens.u16.xz + NAME.sessions.jsonl.gz   token ids of whole sessions, with `turns`, or `requests` of their own
    lines with block_size and requests            Claude Code sessions as block ids
    lines with hash_ids                           Mooncake requests as block ids
    lines with messages                           chat logs, to be tokenised (`chat.py`)
    lines with prompt                             token ids, a request a line

Each may be plain, gzip or xz.  A token trace is named by either file, or by what both begin with.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.errors import BadInput
from kvkeep.index.names import Int32s
from kvkeep.replay import chat
from kvkeep.replay.reading import (
    Lines,
    Malformed,
    Source,
    integer,
    listed,
    need,
    seconds,
    seconds_or_none,
    token_ids,
)
from kvkeep.replay.trace import Clock, Request, Trace

TOKEN_TRACE = re.compile(r"(?P<stem>.*)\.(tokens\.u16|sessions\.jsonl)(\.gz|\.xz)?$")
PACKED = ("", ".gz", ".xz")
BLOCK_MOONCAKE = 512

#: Block ids of one session lie above those of the sessions before it.
BLOCK_ID_MAX = 2**31 - 1


def read_trace(path: Path, *, tokenizer: Path | None = None, skip_bad: bool = False) -> Trace:
    """Reads a trace, whatever its kind.

    tokenizer: the tokenizer.json that chat logs are tokenised with.
    skip_bad: leave malformed lines out and count them, and use a file that was cut short as far as it goes.
    Raises `BadInput` that names file, line and field.
    """
    found = _token_trace(path)
    if found is not None:
        trace = _read_tokens(*found, skip_bad)
    else:
        trace = _read_lines(path, tokenizer, skip_bad)
    if not trace.requests:
        raise BadInput(
            f"{path}: the trace is empty: no request in it{f' ({trace.bad} bad lines)' if trace.bad else ''}"
        )
    return trace


# ---------------------------------------------------------------------- token traces


def _token_trace(path: Path) -> tuple[Path, Path] | None:
    """The two files of a token trace, when `path` names one."""
    matched = TOKEN_TRACE.match(path.name)
    stem = matched["stem"] if matched else path.name
    if not matched and path.is_file():
        return None
    both = [_either(path.with_name(f"{stem}.{kind}")) for kind in ("tokens.u16", "sessions.jsonl")]
    missing = [file for file in both if not file.is_file()]
    if len(missing) == 2:
        raise BadInput(f"{path}: there is no such trace: name a .jsonl, or the NAME of NAME.sessions.jsonl(.gz)")
    if missing:
        raise BadInput(f"{path}: {missing[0].name} is missing beside it (plain, .gz or .xz)")
    return both[0], both[1]


def _either(path: Path) -> Path:
    """`path`, or the compressed file of that name that is there."""
    candidates = [path.with_name(path.name + end) for end in PACKED]
    return next((file for file in candidates if file.is_file()), path)


def _read_tokens(tokens: Path, sessions: Path, skip_bad: bool) -> Trace:
    stream, source = Source(tokens), Source(sessions)
    lines = Lines(source, skip_bad)
    note = lines.note
    if stream.cut is not None:
        note = f"{stream.cut}, {len(stream.data) // 2} tokens"
        if not skip_bad:
            raise BadInput(f"{note}; --skip-bad uses the sessions that are whole")
    ids = np.frombuffer(stream.data, dtype="<u2", count=len(stream.data) // 2).astype(np.int32)
    chains: list[Int32s] = []
    read: list[list[Request]] = []
    clocks: set[Clock] = set()
    for number, line in lines.objects():
        with lines.guard(number):
            if "turns" in line:
                own, requests, kind = _turns(line, ids, len(read), len(chains))
            else:
                own, requests, kind = _offsets(line, ids, len(read), len(chains))
            chains += own
            read.append(requests)
            clocks.add(kind)
    clock: Clock = clocks.pop() if len(clocks) == 1 else "none"
    digest = _digest(stream.digest, source.digest)
    name = sessions.name.partition(".sessions.jsonl")[0]
    return Trace(name, digest, None, chains, read, clock, lines.bad, note)


def _turns(line: dict[str, Any], ids: Int32s, session: int, chain: int) -> tuple[list[Int32s], list[Request], Clock]:
    """A session that only appends: [prompt end, completion end, seconds, ...] a turn."""
    first, length = integer(need(line, "off"), "off"), integer(need(line, "len"), "len", 1)
    if first + length > len(ids):
        raise Malformed("len", f"{length} tokens from {first} on: there are only {len(ids)}")
    requests, timed = [], True
    for k, turn in enumerate(listed(need(line, "turns"), "turns")):
        field = f"turns[{k}]"
        turn = listed(turn, field)
        if len(turn) < 2:
            raise Malformed(field, "it must be [prompt end, completion end, ...]")
        prompt_len, final_len = integer(turn[0], f"{field}[0]", 1), integer(turn[1], f"{field}[1]", 1)
        if not prompt_len <= final_len <= length:
            raise Malformed(field, f"ends {prompt_len} and {final_len}: they must rise, to {length} at most")
        timed = timed and len(turn) > 2
        time_s = seconds(turn[2], f"{field}[2]") if len(turn) > 2 else 0.0
        requests.append(Request(session, chain, prompt_len, final_len, final_len, time_s))
    return [ids[first : first + length]], requests, "shared" if timed else "none"


def _offsets(line: dict[str, Any], ids: Int32s, session: int, chain: int) -> tuple[list[Int32s], list[Request], Clock]:
    """Requests with a prompt of their own each: [offset, prompt length, completion length, ms since the first]."""
    chains, requests = [], []
    for k, entry in enumerate(listed(need(line, "requests"), "requests")):
        field = f"requests[{k}]"
        entry = listed(entry, field)
        if len(entry) < 4:
            raise Malformed(field, "it must be [offset, prompt length, completion length, milliseconds]")
        first, length = integer(entry[0], f"{field}[0]"), integer(entry[1], f"{field}[1]")
        if first + length > len(ids):
            raise Malformed(field, f"{length} tokens from {first} on: there are only {len(ids)}")
        final_len = length + integer(entry[2], f"{field}[2]")
        time_s = seconds(entry[3], f"{field}[3]") / 1e3
        chains.append(ids[first : first + length])
        requests.append(Request(session, chain + k, length, final_len, length, time_s))
    return chains, requests, "session"


# ---------------------------------------------------------------------- one file of lines


def _read_lines(path: Path, tokenizer: Path | None, skip_bad: bool) -> Trace:
    lines = Lines(Source(path), skip_bad)
    objects = lines.objects()
    first = next(objects, None)
    if first is None:
        raise BadInput(f"{path}: the trace is empty: no line in it{f' ({lines.bad} bad ones)' if lines.bad else ''}")
    readers: dict[str, Callable[[Path, Lines], Trace]] = {
        "hash_ids": _read_mooncake,
        "block_size": _read_claude,
        "messages": lambda path, lines: chat.read_chat(path, lines, tokenizer),
        "prompt": _read_requests,
    }
    for field, reader in readers.items():
        if field in first[1]:
            return reader(path, lines)
    number, line = first
    raise BadInput(
        f"{path.name} line {number}: unknown kind of trace with the fields {', '.join(sorted(line)) or '(none)'}: "
        f"there must be one of {', '.join(readers)}"
    )


def _read_mooncake(path: Path, lines: Lines) -> Trace:
    chains: list[Int32s] = []
    sessions: list[list[Request]] = []
    for number, line in lines.objects():
        with lines.guard(number):
            prompt_len = integer(need(line, "input_length"), "input_length", 1)
            final_len = prompt_len + integer(line.get("output_length", 0), "output_length")
            time_s = seconds(need(line, "timestamp"), "timestamp") / 1e3
            ids = token_ids(need(line, "hash_ids"), "hash_ids")
            full = prompt_len // BLOCK_MOONCAKE
            if len(ids) < full:
                raise Malformed("hash_ids", f"{len(ids)} ids for {prompt_len} tokens: there must be {full} or more")
            sessions.append([Request(len(sessions), len(chains), prompt_len, final_len, prompt_len, time_s)])
            chains.append(np.array(ids[:full], dtype=np.int32))
    return Trace(path.name, lines.source.digest, BLOCK_MOONCAKE, chains, sessions, "shared", lines.bad, lines.note)


def _read_claude(path: Path, lines: Lines) -> Trace:
    chains: list[Int32s] = []
    sessions: list[list[Request]] = []
    block, base = 0, 0
    for number, line in lines.objects():
        with lines.guard(number):
            own = integer(need(line, "block_size"), "block_size", 1)
            if block and own != block:
                raise Malformed("block_size", f"{own}: the lines before it have {block}")
            ids, requests, top = _claude_session(line, own, base, len(sessions), len(chains))
            block, base = own, base + top
            chains += ids
            sessions.append(requests)
    return Trace(path.name, lines.source.digest, block, chains, sessions, "session", lines.bad, lines.note)


def _claude_session(
    line: dict[str, Any], block: int, base: int, session: int, chain: int
) -> tuple[list[Int32s], list[Request], int]:
    """Chains, requests in the order of the file, and how many block ids the session uses up."""
    chains: list[Int32s] = []
    requests: list[Request] = []
    top = 0
    for field, entry in _flat(listed(need(line, "requests"), "requests"), "requests"):
        prompt_len = integer(need(entry, "in", field), f"{field}in", 1)
        final_len = prompt_len + integer(entry.get("out", 0), f"{field}out")
        ids = _block_ids(need(entry, "runs", field), f"{field}runs", base)
        full = prompt_len // block
        if len(ids) < full:
            raise Malformed(f"{field}runs", f"{len(ids)} ids for {prompt_len} tokens: there must be {full}")
        top = max(top, int(ids.max()) + 1 - base if len(ids) else 0)
        time_s = seconds(need(entry, "t", field), f"{field}t")
        service_s = seconds_or_none(entry, "api_time", field)
        first_s = seconds_or_none(entry, "ttft", field)
        number = chain + len(chains)
        requests.append(Request(session, number, prompt_len, final_len, prompt_len, time_s, service_s, first_s))
        chains.append(ids[:full])
    return chains, requests, top


def _flat(entries: list[Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, request) with those of sub-agents in their place."""
    for k, entry in enumerate(entries):
        field = f"{where}[{k}]"
        if not isinstance(entry, dict):
            raise Malformed(field, "it must be an object")
        if "sub" in entry:
            yield from _flat(listed(entry["sub"], f"{field}.sub"), f"{field}.sub")
        else:
            yield f"{field}.", entry


def _block_ids(runs: Any, field: str, base: int) -> Int32s:
    """Runs [first, count] as ids, above `base`."""
    parts = []
    for k, run in enumerate(listed(runs, field)):
        if len(listed(run, f"{field}[{k}]")) != 2:
            raise Malformed(f"{field}[{k}]", "it must be [first id, count]")
        first, count = integer(run[0], f"{field}[{k}][0]"), integer(run[1], f"{field}[{k}][1]", 1)
        if base + first + count > BLOCK_ID_MAX:
            raise Malformed(f"{field}[{k}]", f"ids beyond {BLOCK_ID_MAX} with those of the sessions before it")
        parts.append(np.arange(base + first, base + first + count, dtype=np.int32))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


# ---------------------------------------------------------------------- token ids, a request a line


def _read_requests(path: Path, lines: Lines) -> Trace:
    """Lines {"prompt": [ids], "completion": [ids] or "completion_len": n, "session": any name, "time_s", "service_s"}.

    All fields but `prompt` may be missing; lines without a session are sessions of their own.
    """
    builder = chat.Builder()
    for number, line in lines.objects():
        with lines.guard(number):
            prompt = token_ids(need(line, "prompt"), "prompt")
            if not prompt:
                raise Malformed("prompt", "it is empty: 1 token or more is needed")
            completion = token_ids(line["completion"], "completion") if "completion" in line else []
            unknown = 0 if completion else integer(line.get("completion_len", 0), "completion_len")
            time_s, service_s = seconds_or_none(line, "time_s"), seconds_or_none(line, "service_s")
            name = line.get("session")
            if name is not None and not isinstance(name, str | int):
                raise Malformed("session", "it must be a string or a whole number")
            builder.add(builder.session(name), prompt, completion, unknown, time_s, service_s)
    return builder.trace(path.name, lines.source.digest, lines)


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
