"""Reads token traces and puts their requests in order.

Must not know kvkeep.
"""

import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Session:
    """ids: all token ids, int32.   turns: [prompt end, completion end, ...] of each request, from the first token."""

    ids: npt.NDArray[np.int32]
    turns: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a session: prompt `ids[:prompt_len]`, completion `ids[prompt_len:final_len]`."""

    session: int
    prompt_len: int
    final_len: int


def read_trace(folder: Path, name: str) -> list[Session]:
    """The sessions of `NAME.tokens.u16.xz` and `NAME.sessions.jsonl.gz`."""
    with lzma.open(folder / f"{name}.tokens.u16.xz") as file:
        ids = np.frombuffer(file.read(), dtype="<u2").astype(np.int32)
    sessions = []
    with gzip.open(folder / f"{name}.sessions.jsonl.gz", "rt") as lines:
        for line in map(json.loads, lines):
            sessions.append(Session(ids[line["off"] : line["off"] + line["len"]], line["turns"]))
    return sessions


def in_order(sessions: Sequence[Session], order: str) -> Iterator[Request]:
    """The requests of a trace: order is "round_robin_N" or "recorded_time"."""
    kind, _, count = order.rpartition("_")
    return round_robin(sessions, int(count)) if kind == "round_robin" else recorded_time(sessions)


def round_robin(sessions: Sequence[Session], open_at_once: int) -> Iterator[Request]:
    """`open_at_once` sessions in rotation, a turn each; when one ends the next in the file takes its seat.

    The newcomer's first turn is in the next rotation.
    """
    waiting = iter(range(len(sessions)))
    seats = [(number, 0) for number in islice(waiting, open_at_once)]
    while seats:
        after = []
        for number, turn in seats:
            yield _request(sessions, number, turn)
            if turn + 1 < len(sessions[number].turns):
                after.append((number, turn + 1))
            else:
                after += [(newcomer, 0) for newcomer in islice(waiting, 1)]
        seats = after


def recorded_time(sessions: Sequence[Session]) -> Iterator[Request]:
    """By the time of arrival that each turn carries; where it is equal, by place in the file."""
    arrivals = [(turn[2], number, k) for number, session in enumerate(sessions) for k, turn in enumerate(session.turns)]
    for _, number, turn in sorted(arrivals):
        yield _request(sessions, number, turn)


def _request(sessions: Sequence[Session], number: int, turn: int) -> Request:
    prompt_len, final_len = sessions[number].turns[turn][:2]
    return Request(number, prompt_len, final_len)
