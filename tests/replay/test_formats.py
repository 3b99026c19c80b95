"""Each kind of trace is read as it is meant, and what cannot be read is named by file, line and field."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import BadInput
from kvkeep.replay.formats import read_trace
from kvkeep.replay.trace import Request
from tests.replay.conftest import Write

Tokens = Callable[[str, list[int]], Path]

SESSION = {"id": "a", "off": 2, "len": 6, "turns": [[2, 3, 10], [5, 6, 20]]}
CLAUDE = {
    "id": "a",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 130, "out": 5, "runs": [[1, 2]], "api_time": 2.5, "ttft": 0.5},
        {"t": 9.0, "sub": [{"t": 3.0, "in": 64, "out": 1, "runs": [[7, 1]]}]},
        {"t": 4.0, "in": 200, "out": 1, "runs": [[1, 1], [5, 2]]},
    ],
}
MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 9, 11]}


def test_a_token_trace_with_turns(write: Write, write_tokens: Tokens):
    """Prompts are prefixes of the session's ids; the third number of a turn is its time."""
    write("t.sessions.jsonl.gz", SESSION)
    path = write_tokens("t", [9, 9, 1, 2, 3, 4, 5, 6])
    for named in (path, path.with_name("t"), path.with_name("t.sessions.jsonl.gz")):
        trace = read_trace(named)
        assert ("t", None, "shared") == (trace.name, trace.block, trace.clock)
        assert [[1, 2, 3, 4, 5, 6]] == [ids.tolist() for ids in trace.chains]
        assert [[Request(0, 0, 2, 3, 3, 10.0), Request(0, 0, 5, 6, 6, 20.0)]] == trace.sessions


def test_a_token_trace_without_times_has_no_clock(write: Write, write_tokens: Tokens):
    """Turns of two numbers have no time."""
    path = write_tokens("t", [1, 2, 3, 4])
    write("t.sessions.jsonl", {"off": 0, "len": 4, "turns": [[2, 3]]})
    assert "none" == read_trace(path).clock


def test_a_token_trace_with_requests_of_their_own(write: Write, write_tokens: Tokens):
    """Each request has its own ids; its completion is as long as it says and has none; times are milliseconds."""
    path = write_tokens("t", [1, 2, 3, 4, 5])
    write("t.sessions.jsonl.gz", {"id": "a", "requests": [[0, 3, 10, 0], [2, 3, 0, 1500]]})
    trace = read_trace(path)
    assert "session" == trace.clock
    assert [[1, 2, 3], [3, 4, 5]] == [ids.tolist() for ids in trace.chains]
    assert [[Request(0, 0, 3, 13, 3, 0.0), Request(0, 1, 3, 3, 3, 1.5)]] == trace.sessions


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.xz"])
def test_claude_code_sessions(write: Write, name: str):
    """Only full blocks count, sub-agents stand in their place, ids of different sessions differ, plain or packed."""
    trace = read_trace(write(name, CLAUDE, CLAUDE))
    assert (64, "session") == (trace.block, trace.clock)
    first = [[1, 2], [7], [1, 5, 6]]
    assert first + [[id_ + 8 for id_ in ids] for ids in first] == [ids.tolist() for ids in trace.chains]
    assert [
        Request(0, 0, 130, 135, 130, 0.0, 2.5, 0.5),
        Request(0, 1, 64, 65, 64, 3.0),
        Request(0, 2, 200, 201, 200, 4.0),
    ] == trace.sessions[0]


def test_mooncake_requests(write: Write):
    """A request is a session; a block that is not full is left out; times are milliseconds."""
    trace = read_trace(write("m.jsonl.gz", MOONCAKE))
    assert (512, "shared") == (trace.block, trace.clock)
    assert [[4, 9]] == [ids.tolist() for ids in trace.chains]
    assert [[Request(0, 0, 1030, 1037, 1030, 1.5)]] == trace.sessions


def test_token_ids_a_request_a_line(write: Write):
    """Requests of a session share a chain while they go on from it; a fork has a chain of its own."""
    trace = read_trace(
        write(
            "r.jsonl",
            {"session": "a", "prompt": [1, 2], "completion": [3], "time_s": 1.0},
            {"prompt": [8], "completion_len": 4, "time_s": 1.5, "service_s": 0.25},
            {"session": "a", "prompt": [1, 2, 3, 4], "time_s": 2.0},
            {"session": "a", "prompt": [1, 7], "time_s": 3.0},
        )
    )
    assert [[1, 2, 3, 4], [8], [1, 7]] == [ids.tolist() for ids in trace.chains]
    assert [
        [Request(0, 0, 2, 3, 3, 1.0), Request(0, 0, 4, 4, 4, 2.0), Request(0, 2, 2, 2, 2, 3.0)],
        [Request(1, 1, 1, 5, 1, 1.5, 0.25)],
    ] == trace.sessions
    assert "shared" == trace.clock


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of one id a byte, with ChatML's two marks."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_a_chat_log(write: Write, tokenizer: Path):
    """Each assistant message is a completion of what stands before it; the prompts of a session are prefixes."""
    import tokenizers

    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    first = [say("system", "S"), say("user", "hi"), say("assistant", "yo"), say("user", "more")]
    path = write(
        "chat.jsonl",
        {"messages": first, "session": "a", "created": 5},
        {"messages": [*first, say("assistant", "ok")], "session": "b"},
        {"messages": first, "choices": [{"message": say("assistant", "x")}], "session": "a"},
    )
    packed = tokenizer.with_name("packed.json.gz")
    packed.write_bytes(gzip.compress(tokenizer.read_bytes()))
    trace = read_trace(path, tokenizer=packed)
    decode = tokenizers.Tokenizer.from_file(str(tokenizer)).decode
    head = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    more = head + "yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    texts = [
        (
            decode(trace.chains[r.chain][: r.prompt_len].tolist(), skip_special_tokens=False),
            decode(trace.chains[r.chain][r.prompt_len : r.final_len].tolist(), skip_special_tokens=False),
        )
        for session in trace.sessions
        for r in session
    ]
    yo, ok, x = "yo<|im_end|>", "ok<|im_end|>", "x<|im_end|>"
    assert [(head, yo), (more, ""), (more, x), (head, yo), (more, ok)] == texts
    assert 2 == len(trace.chains)
    assert "none" == trace.clock  # not every request has a time


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "no JSON"]),
        ("[1]", ["line 2", "JSON list"]),
        ({"off": 0, "turns": []}, ["line 2", "len", "missing"]),
        ({"off": 0, "len": "4", "turns": []}, ["line 2", "len", "'4'", "whole number"]),
        ({"off": 5, "len": 4, "turns": []}, ["line 2", "len", "only 8"]),
        ({"off": 0, "len": 4, "turns": [[1, 2, 0], [3, 2, 1]]}, ["line 2", "turns[1]", "3 and 2"]),
        ({"off": 0, "len": 4, "turns": [[1, 5, 0]]}, ["line 2", "turns[0]", "4 at most"]),
        ({"off": 0, "len": 4, "turns": [[1, 2, -1]]}, ["line 2", "turns[0][2]", "-1", "seconds"]),
        ({"off": 0, "len": 4, "turns": [[1]]}, ["line 2", "turns[0]", "completion end"]),
        ({"requests": [[7, 2, 0, 0]]}, ["line 2", "requests[0]", "only 8"]),
    ],
)
def test_a_malformed_session_is_named_or_counted(write: Write, write_tokens: Tokens, line: Any, words: list[str]):
    """It is refused by file, line and field; with skip_bad it is left out and counted, and the rest is read."""
    path = write_tokens("t", list(range(8)))
    write("t.sessions.jsonl.gz", SESSION, line, SESSION)
    with pytest.raises(BadInput) as error:
        read_trace(path)
    for word in ["t.sessions.jsonl.gz", *words]:
        assert word in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert (1, 2, [0, 1]) == (trace.bad, len(trace.sessions), [s[0].session for s in trace.sessions])


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (MOONCAKE, {**MOONCAKE, "hash_ids": [4]}, ["hash_ids", "1 ids", "2 or more"]),
        (MOONCAKE, {**MOONCAKE, "hash_ids": [4, -9]}, ["hash_ids[1]", "-9"]),
        (MOONCAKE, {**MOONCAKE, "timestamp": None}, ["timestamp", "None"]),
        (CLAUDE, {**CLAUDE, "block_size": 32}, ["block_size", "32", "64"]),
        (CLAUDE, {**CLAUDE, "requests": [{"t": 0, "in": 64, "runs": [[1]]}]}, ["requests[0].runs[0]", "count"]),
        (CLAUDE, {**CLAUDE, "requests": [{"sub": [{"t": 0, "runs": []}]}]}, ["requests[0].sub[0].in", "missing"]),
        ({"prompt": [1]}, {"prompt": [1, 2**31]}, ["prompt[1]", "2147483648", "2147483647"]),
        ({"prompt": [1]}, {"prompt": []}, ["prompt", "empty"]),
        ({"prompt": [1]}, {"prompt": [1], "completion": "x"}, ["completion", "'x'", "list"]),
    ],
)
def test_a_malformed_line_is_named_or_counted(write: Write, good: Any, bad: Any, words: list[str]):
    """It is refused by file, line and field, or counted."""
    path = write("t.jsonl", good, bad)
    with pytest.raises(BadInput) as error:
        read_trace(path)
    for word in ["t.jsonl line 2", *words]:
        assert word in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert (1, 1) == (trace.bad, len(trace.sessions))


def test_a_malformed_message_is_named(write: Write, tokenizer: Path):
    """A chat message without text is refused by its place."""
    path = write("t.jsonl", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    with pytest.raises(BadInput, match=r"line 1: messages\[0\].content: only parts of text"):
        read_trace(path, tokenizer=tokenizer)


def test_a_chat_log_needs_a_tokenizer(write: Write, tmp_path: Path):
    """Without one, or with a file that is none, the message says which option to give."""
    pytest.importorskip("tokenizers")
    path = write("t.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(BadInput, match="--tokenizer FILE"):
        read_trace(path)
    with pytest.raises(BadInput, match=r"gone.json: cannot be read"):
        read_trace(path, tokenizer=tmp_path / "gone.json")
    with pytest.raises(BadInput, match=r"t.jsonl: is no tokenizer.json"):
        read_trace(path, tokenizer=path)


@pytest.mark.parametrize(
    ("lines", "word"),
    [((), "empty"), (("",), "empty"), (({"off": 1},), "unknown kind"), (({"prompt": [1]}, "x"), "no JSON")],
)
def test_an_empty_or_unknown_file_is_refused(write: Write, lines: tuple[Any, ...], word: str):
    """A file with no request in it, and one of no kind that there is, are told apart."""
    with pytest.raises(BadInput, match=word):
        read_trace(write("t.jsonl", *lines))


def test_a_trace_without_requests_is_empty(write: Write, write_tokens: Tokens):
    """Sessions without turns are no trace."""
    path = write_tokens("t", [1, 2])
    write("t.sessions.jsonl", {"off": 0, "len": 2, "turns": []})
    with pytest.raises(BadInput, match="empty"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_named(write: Write, write_tokens: Tokens, tmp_path: Path):
    """Neither file, or one of the two, is there."""
    with pytest.raises(BadInput, match="no such trace"):
        read_trace(tmp_path / "t")
    with pytest.raises(BadInput, match=r"t\.sessions\.jsonl is missing"):
        read_trace(write_tokens("t", [1]))


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl.xz"])
def test_a_file_cut_short_says_how_much_was_read(write: Write, name: str):
    """Half a compressed file is refused with lines and bytes read; with skip_bad its whole lines are used."""
    lines = [{"prompt": [i, i * i % 1009, i * i * i % 1013]} for i in range(5000)]
    path = write(name, *lines)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    with pytest.raises(BadInput, match=rf"{name} is cut short: (\d+) bytes of content were read, (\d+) whole lines"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert 0 < trace.requests < 5000 and 0 == trace.bad
    assert f"{trace.requests} whole lines" in trace.note
    assert lines[trace.requests - 1]["prompt"] == trace.chains[-1].tolist()


def test_a_token_stream_cut_short_loses_the_sessions_behind_it(write: Write, tmp_path: Path):
    """With skip_bad the sessions whose tokens were read are replayed, the others are counted."""
    import lzma

    import numpy as np

    ids = np.random.default_rng(0).integers(0, 60000, 40000).astype("<u2")
    data = lzma.compress(ids.tobytes())
    (tmp_path / "t.tokens.u16.xz").write_bytes(data[: len(data) // 2])
    write("t.sessions.jsonl", *({"off": i * 1000, "len": 1000, "turns": [[900, 1000]]} for i in range(40)))
    with pytest.raises(BadInput, match=r"t.tokens.u16.xz is cut short: \d+ bytes of content were read, \d+ tokens"):
        read_trace(tmp_path / "t")
    trace = read_trace(tmp_path / "t", skip_bad=True)
    assert 40 == trace.requests + trace.bad and 0 < trace.requests < 40
    assert ids[(trace.requests - 1) * 1000 :][:1000].tolist() == trace.chains[-1].tolist()


def test_damaged_compressed_data_are_refused(write: Write):
    """A flipped byte is no short file."""
    path = write("t.jsonl.xz", *({"prompt": [i]} for i in range(1000)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BadInput, match="damaged"):
        read_trace(path, skip_bad=True)
