"""What a request is routed by: equal beginnings for a session's turns, whatever form its prompt has."""

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import BadInput
from kvkeep.proxy.bodies import CHAT, COMPLETIONS, Prompt, prompt_of, read_prompt
from tests.proxy.rigs import chat

NBYTES = 4096


def read(request: Any, path: str = CHAT, nbytes: int = NBYTES) -> Prompt | None:
    return read_prompt(path, json.dumps(request).encode(), nbytes)


def test_a_chat_begins_as_its_later_turns_do():
    """The first turn's bytes begin the second turn's, in whatever order an object's keys were sent."""
    first, second = read(chat("be brief", "hi")), read(chat("be brief", "hi", "hello", "bye"))
    assert first is not None and second is not None
    assert second.raw.startswith(first.raw) and len(second.raw) > len(first.raw)
    turned = {"messages": [dict(reversed(m.items())) for m in chat("be brief", "hi")["messages"]], "model": "m"}
    assert first == read(turned)


def test_sampling_is_not_part_of_a_prompt():
    """Temperature, stream and the like change nothing: they act after the logits."""
    assert read(chat("s", "hi")) == read(chat("s", "hi", temperature=0.3, stream=True, max_tokens=9, n=2))


def test_tools_come_first():
    """Chat templates put them before the messages: other tools, another beginning."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools, without = read(chat("s", "hi", tools=tools)), read(chat("s", "hi"))
    assert with_tools is not None and without is not None
    assert with_tools.raw.endswith(without.raw) and not with_tools.raw.startswith(without.raw[:9])


def test_tools_and_documents_come_first():
    """What templates put before the messages decides before them."""
    for name in ("tools", "functions", "documents"):
        first, second = (read(chat("s", "hi", **{name: [{"name": text * 300}]})) for text in "ab")
        assert first is not None and second is not None
        assert first.raw[:100] != second.raw[:100] and first.raw.startswith(f'{{"{name}":'.encode())
        assert first.raw.endswith((read(chat("s", "hi")) or first).raw)


def test_parts_and_calls_count():
    """An image's address, a call and no content tell messages apart from text, and images from each other."""
    seen = set()
    messages: list[dict[str, Any]] = [
        {"content": "a"},
        {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,1"}}]},
        {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,2"}}]},
        {"content": [{"type": "image_url", "image_url": {"url": "data:,1"}}]},
        {"content": None},
        {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"content": 5},
        {"content": []},
        {"content": {"a": 1}},
    ]
    for message in messages:
        found = read({"messages": [{"role": "user", **message}]})
        assert found is not None
        seen.add(found.raw)
    assert 9 == len(seen)


def test_what_a_template_does_not_see_changes_nothing():
    """Text in parts or not, marks of what to cache, which clients move from turn to turn, and fields that are null."""
    plain = read({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:,1"}}
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    for content in ([{"type": "text", "text": "a"}], [marked]):
        said = {"role": "user", "content": content, "name": None, "cache_control": {"type": "ephemeral"}}
        answer = {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None}
        assert plain == read({"messages": [said, answer]})
    forms = (image, image | {"cache_control": {"type": "ephemeral"}})
    bare, kept = (read({"messages": [{"role": "user", "content": [form]}]}) for form in forms)
    assert bare == kept is not None


def test_objects_of_python_may_hold_anything():
    """What JSON has not is laid out by its type, or is no prompt; nothing is raised."""
    found = [prompt_of({"messages": [{"content": "hi", "seen": object()}]}, NBYTES, chat=True) for _ in range(2)]
    assert found[0] is not None and found[0] == found[1]
    circle: list[Any] = []
    circle.append(circle)
    for message in ({1: "a", "b": 2}, {"content": circle}, {"calls": circle}):
        assert prompt_of({"messages": [message]}, NBYTES, chat=True) is None


@pytest.mark.parametrize("depth", [100, 400, 700, 900, 950, 990])
def test_deep_messages_are_routed_or_left_to_the_engine(depth: int):
    """JSON that can be read but hardly be written again raises nothing but `BadInput`."""
    deep = "[" * depth + "]" * depth
    for body in (f'{{"messages": [{{"content": {deep}}}]}}', f'{{"messages": [{{"calls": {deep}}}]}}'):
        with suppress(BadInput):
            read_prompt(CHAT, body.encode(), NBYTES)


def test_completions_take_text_ids_and_lists_of_them():
    """Text is UTF-8; ids are as the caches have them; of several prompts the first one counts."""
    assert Prompt(b"text", "grüß".encode()) == read({"prompt": "grüß"}, COMPLETIONS)
    ids = np.array([1, 2, 70_000], dtype=np.int32).tobytes()
    assert Prompt(b"ids", ids) == read({"prompt": [1, 2, 70_000]}, COMPLETIONS)
    assert Prompt(b"ids", ids) == read({"prompt": [[1, 2, 70_000], [4]]}, COMPLETIONS)
    assert Prompt(b"text", b"a") == read({"prompt": ["a", "b"]}, COMPLETIONS)


def test_salt_and_adapter_are_those_of_the_request():
    """`cache_salt` and `model`, as vLLM has them."""
    found = read(chat("s", "hi", cache_salt="tenant"))
    assert found is not None
    assert (b"tenant", b"m") == (found.salt, found.adapter)


def test_no_more_is_read_than_routing_needs():
    """Long prompts are cut, and cut alike whatever follows."""
    for request, path in (
        (chat("s" * 9_000, "x"), CHAT),
        ({"prompt": "s" * 9_000}, COMPLETIONS),
        ({"prompt": [5] * 9_000}, COMPLETIONS),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 9_000}}]}]}, CHAT),
    ):
        found = read(request, path, 1_000)
        assert found is not None and 1_000 == len(found.raw)
    many = read(chat(*["m"] * 2_000), nbytes=100)
    assert many == read(chat(*["m"] * 3_000), nbytes=100)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""),
        ("/v1/embeddings", b'{"input": "x"}'),
        (COMPLETIONS, b'{"prompt_embeds": "aGk="}'),
        (COMPLETIONS, b'{"prompt_embeds": "aGk=", "prompt": ""}'),
        (COMPLETIONS, b'{"prompt": {"a": 1}}'),
        (COMPLETIONS, b'{"prompt": [1, "a"]}'),
        (COMPLETIONS, b'{"prompt": [99999999999]}'),
        (COMPLETIONS, b'{"prompt": 7}'),
        (CHAT, b'{"messages": "hi"}'),
        (CHAT, b"{}"),
    ],
)
def test_what_is_not_understood_is_left_to_the_engine(path: str, body: bytes):
    """Other paths, and prompts in forms that are not known here, have no prefix: they are not refused."""
    assert read_prompt(path, body, NBYTES) is None


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, b"{", "not JSON"),
        (CHAT, b"", "not JSON"),
        (CHAT, b"\xff\xfe", "not JSON"),
        (CHAT, b"[1]", "JSON list"),
        (CHAT, b"null", "JSON NoneType"),
        (CHAT, b"[" * 200_000, "nested too deeply"),
        (CHAT, b'{"messages": []}', "messages is empty"),
        (COMPLETIONS, b'{"prompt": ""}', "prompt is empty"),
        (COMPLETIONS, b'{"prompt": []}', "prompt is empty"),
        (COMPLETIONS, b'{"prompt": [[]]}', "prompt is empty"),
    ],
)
def test_bodies_that_nobody_could_answer_are_refused(path: str, body: bytes, words: str):
    """In a line that says what was wrong and what would be right."""
    with pytest.raises(BadInput, match=words):
        read_prompt(path, body, NBYTES)


def test_text_that_is_no_unicode_is_routed_all_the_same():
    """Half a surrogate pair, as JSON can hold it, is the engine's business."""
    assert read_prompt(COMPLETIONS, b'{"prompt": "\\ud83d"}', NBYTES) is not None
    assert read_prompt(CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', NBYTES) is not None
