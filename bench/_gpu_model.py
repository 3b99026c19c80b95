"""The GPU check's model: agent sessions over one of random weights, each layer as large as a real one's.

Must not know limits, rows or what it runs on.  Three engines are asked the same prompts, one at a time: one without a
cache, one that keeps pages in a pool of a quarter of what the sessions grow to, and one with a tier in host memory too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench._agent_figures import BOTH
from bench._gpu_sizes import NAMES, ModelSizes
from bench._serving import Setup, answer_alone, make_engine, setups_of, warmed
from bench._sessions import Held, hold, random_conversations
from kvkeep.engine.asking import Answer, ask, pages_of
from kvkeep.engine.engine import Engine, Request
from kvkeep.engine.loader import LoadedModel, load_model
from kvkeep.telemetry.energy import EnergyReading, JoulesPerTokens, joules_per_1k_prompt_tokens

if TYPE_CHECKING:
    import torch


@dataclass
class Asked:
    """What came of one configuration, over all rounds.   joules: of each round."""

    setup: Setup
    answers: list[Answer] = field(default_factory=list)
    joules: list[JoulesPerTokens] = field(default_factory=list)


@dataclass
class Measured:
    """The sessions, what became of each configuration, and what was looked at beside it.

    pages: that the sessions grow to.   page_nbytes: of a page.
    compared, wrong: positions of hits whose K and V were compared with those of the session's last request, and that
    were not the same bits.
    """

    model: str
    held: Held
    pages: int
    page_nbytes: int
    asked: dict[str, Asked]
    compared: int
    wrong: int

    def later_ttft_ms(self, name: str) -> list[float]:
        """Of the requests that could find something: not the first of their session."""
        asks = self.held.workload.asks
        answers = self.asked[name].answers
        return [answer.ttft_ns / 1e6 for i, answer in enumerate(answers) if asks[i % len(asks)].turn]

    def shares(self, name: str) -> tuple[float, float]:
        """Prompt tokens found where the model reads, and brought from host memory, of all."""
        answers = self.asked[name].answers
        host = sum(answer.host_tokens for answer in answers)
        matched = sum(answer.matched_tokens for answer in answers)
        prompts = self.held.workload.prompt_tokens * (len(answers) // len(self.held.workload.asks))
        return (matched - host) / prompts, host / prompts

    def tokens_per_s(self, name: str) -> float:
        """Prompt tokens and answers, over the time of the requests."""
        answers = self.asked[name].answers
        rounds = len(answers) // len(self.held.workload.asks)
        tokens = rounds * self.held.workload.prompt_tokens + sum(len(answer.output_ids) for answer in answers)
        return 1e9 * tokens / sum(answer.total_ns for answer in answers)


def measure(device: str, sizes: ModelSizes, energy: Callable[[], EnergyReading] | None) -> Measured:
    """Runs it on a torch device.   energy: what the device has used so far; None: not known."""
    loaded = load_model(sizes.model, device=device, dtype=sizes.dtype)
    tokens_max = sizes.turns * (sizes.growth + sizes.new_tokens)
    pages = sizes.sessions * pages_of(tokens_max, sizes.page_size)
    conversations = random_conversations(loaded, sizes.sessions, 0, sizes.growth, seed=0)
    salts = [f"session {number}".encode() for number in range(sizes.sessions)]
    engine = warmed(loaded, Setup("ample", pages), sizes.page_size)
    held = hold("random", engine, conversations, sizes.turns, sizes.new_tokens, salts)
    engine.close()
    asked = {name: Asked(setup) for name, setup in setups_of(held, sizes.page_size).items()}
    for number in range(sizes.rounds):
        for name in NAMES if number % 2 == 0 else reversed(NAMES):
            _round(loaded, held, asked[name], sizes, energy)
    bits = _Bits()
    bits.run(make_engine(loaded, asked[BOTH].setup, sizes.page_size), held)
    page_nbytes = loaded.layout(sizes.page_size).page_nbytes
    return Measured(loaded.name, held, pages, page_nbytes, asked, bits.compared, bits.wrong)


def _round(
    loaded: LoadedModel, held: Held, asked: Asked, sizes: ModelSizes, energy: Callable[[], EnergyReading] | None
) -> None:
    engine = warmed(loaded, asked.setup, sizes.page_size)
    before = energy() if energy is not None else None
    asked.answers += answer_alone(engine, held.workload.asks, sizes.new_tokens, held.salts)
    if energy is not None and before is not None:
        asked.joules.append(joules_per_1k_prompt_tokens(before, energy(), held.workload.prompt_tokens))
    engine.close()


class _Bits:
    """Whether a request finds what its session's last request left, bit by bit."""

    def __init__(self) -> None:
        self.compared = self.wrong = 0
        self._last: dict[int, torch.Tensor] = {}
        self._session = 0
        self._looked: Request | None = None

    def run(self, engine: Engine, held: Held) -> None:
        """All requests, with a look at the pages at each forward; closes the engine."""

        def look(request: Request, start: int, end: int, logits: "torch.Tensor | None") -> None:
            kv = engine.read_kv(request)
            if self._looked is not request and self._session in self._last:
                self._compare(self._last[self._session], kv, request.matched_len)
            self._looked, self._last[self._session] = request, kv

        engine.on_forward = look
        for one in held.workload.asks:
            self._session = one.session
            ask(engine, one.prompt, held.workload.new_tokens, salt=held.salts[one.session])
        engine.close()

    def _compare(self, before: "torch.Tensor", now: "torch.Tensor", matched: int) -> None:
        import torch

        positions = min(matched, before.shape[2])
        same_bits = before[:, :, :positions].view(torch.uint8) == now[:, :, :positions].view(torch.uint8)
        self.compared += positions
        self.wrong += int((~same_bits.flatten(3).all(3).all(0).all(0)).sum())


def joules(asked: Asked) -> Iterator[tuple[float | None, str]]:
    """Joules of 1,000 prompt tokens of each round, and how they are known, or why they are not."""
    for one in asked.joules:
        yield one.value, str(one.how if one.value is not None else one.reason)
