"""Requests over the OpenAI API, streamed: what came, when its first token came, what the server had at hand.

Must not know servers' processes or how anything is judged.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import openai

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    ttft_s: from sending to the first chunk that holds a token.   total_s: to the end of the stream.
    cached_tokens: prompt tokens that the server did not compute, by its own account; None where it does not say.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def body(prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """A greedy completion of exactly so many tokens, of a prompt of token ids."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


def client(url: str) -> openai.OpenAI:
    """Of a server; nothing is tried again, so that each failure is seen."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


class Reading:
    """Collects the chunks of one stream."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ttft_s: float | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._usage: Any = None

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def add(self, chunk: Any) -> None:
        for choice in chunk.choices:
            ids = getattr(choice, "token_ids", None) or []
            if ids and self._ttft_s is None:
                self._ttft_s = time.perf_counter() - self._began
            self._ids.extend(ids)
            self._texts.append(choice.text)
        if chunk.usage is not None:
            self._usage = chunk.usage

    def answer(self) -> Answer:
        """Raises `RuntimeError` where the stream ended before it should."""
        if self._ttft_s is None or self._usage is None:
            raise RuntimeError("the stream ended without a token or without its usage")
        details = self._usage.prompt_tokens_details
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._began,
            prompt_tokens=int(self._usage.prompt_tokens),
            cached_tokens=None if details is None else details.cached_tokens,
        )


def ask(server: openai.OpenAI, prompt: Sequence[int], new_tokens: int) -> Answer:
    """One request, start to end."""
    reading = Reading()
    for chunk in server.completions.create(**body(prompt, new_tokens)):
        reading.add(chunk)
    return reading.answer()
