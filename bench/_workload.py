"""The workloads that bench cases run: W1, interleaved agent sessions, and chains that share nothing.

Must not know kvkeep: a workload is token ids, lengths and an order.

W1 has the parameters, the random streams and so the token ids of the agent workload that other caches' figures were
measured with, so that figures compare.  Its facts: 1,920 requests, 45,611,047 prompt tokens, 1,969,626 distinct
tokens; a cache that never evicts matches 0.96493 of the prompt tokens at pages of 128.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

VOCABULARY = 128_000
W1_SEED = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: prompt `ids[:prompt_len]` of its session, generated `ids[prompt_len:final_len]`.

    The last sampled token has no KV, so `final_len - 1` positions can be kept.
    """

    session: int
    prompt_len: int
    final_len: int

    @property
    def kv_len(self) -> int:
        """Positions whose KV exists at the end."""
        return self.final_len - 1


@dataclass(frozen=True, slots=True)
class Workload:
    """ids: all tokens of each session.   turns: the requests in order of arrival."""

    ids: list[Ids]
    turns: list[Turn]
    system_len: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(turn.prompt_len for turn in self.turns)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all final sequences, the shared system prompt counted once."""
        return self.system_len + sum(len(ids) - self.system_len for ids in self.ids)

    def ceiling(self, page_size: int) -> float:
        """Share of prompt tokens that a cache that never evicts matches, one token left to compute."""
        kept: dict[int, int] = {}
        matched = 0
        for number, turn in enumerate(self.turns):
            known = kept.get(turn.session, self.system_len if number else 0)
            matched += min(known, turn.prompt_len - 1) // page_size * page_size
            kept[turn.session] = turn.kv_len
        return matched / self.prompt_tokens


def agent_workload(
    sessions: int = 64,
    system_len: int = 8192,
    turns: int = 30,
    user_len: tuple[int, int] = (640, 896),
    generated_len: tuple[int, int] = (192, 320),
    seed: int = W1_SEED,
) -> Workload:
    """W1: sessions behind one system prompt, a turn each in rotation.

    user_len, generated_len: least and most tokens that a turn adds to the prompt, and that the model answers.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    system = random.integers(0, VOCABULARY, system_len, dtype=np.int32)
    asked = random.integers(user_len[0], user_len[1] + 1, (sessions, turns))
    answered = random.integers(generated_len[0], generated_len[1] + 1, (sessions, turns))
    final = system_len + np.cumsum(asked + answered, axis=1)
    ids = []
    for length in final[:, -1]:
        own = random.integers(0, VOCABULARY, int(length) - system_len, dtype=np.int32)
        ids.append(np.concatenate([system, own]))
    prompt = final - answered
    order = [
        Turn(session, int(prompt[session, turn]), int(final[session, turn]))
        for turn in range(turns)
        for session in range(sessions)
    ]
    return Workload(ids, order, system_len)


def distinct_chains(count: int, pages: int, page_size: int, seed: int) -> list[Ids]:
    """Token ids of `count` chains of `pages` pages that have nothing in common."""
    random = np.random.Generator(np.random.PCG64(seed))
    return [random.integers(0, VOCABULARY, pages * page_size, dtype=np.int32) for _ in range(count)]
