"""Image chat: sessions that show one screenshot after the other and keep them.

Must not know caches.

    system prompt | screenshot, question, answer | screenshot, question, answer | ...

The same screenshot comes back within a session (a page is visited again), and some pictures are shown in many sessions.
Where only the last screenshots are kept, the prompt changes in its middle: KV behind that is lost, encoder outputs not.
"""

import math
import random
from dataclasses import dataclass

from kvkeep.index.names import Int32s
from kvkeep.replay.workloads.workload import (
    Media,
    MediaRequest,
    Prompt,
    Workload,
    arrivals,
    in_order,
    key_of,
    text_of,
    zipf,
)

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, LEFT_OUT_TOKENS = 900, 60, 120, 4


@dataclass(frozen=True, slots=True)
class ImageChat:
    """sessions, turns: how many, and turns of each.   sessions_per_s: how often one begins.
    pause_s: median time from a turn to the next.   keep: screenshots that stay in the prompt; 0: all.
    new_share, again_share: of the turns, those with a new screenshot, and those with one of the same session again; the
        others are half without one, half with one of `shared` pictures that all sessions show.
    tokens_min, tokens_max: placeholders of a picture, log-uniform.   width: of the encoder's output, 16 bits each.
    encode_tokens_per_s: how fast the vision encoder is.
    """

    sessions: int = 40
    turns: int = 8
    sessions_per_s: float = 0.1
    pause_s: float = 20.0
    keep: int = 0
    new_share: float = 0.6
    again_share: float = 0.2
    shared: int = 20
    tokens_min: int = 256
    tokens_max: int = 2048
    width: int = 3584
    encode_tokens_per_s: float = 32_000.0
    seed: int = 0

    def workload(self) -> Workload:
        """The requests."""
        rng = random.Random(f"image-chat {self.seed}")
        requests: list[MediaRequest] = []
        for session, begin_s in enumerate(arrivals(rng, self.sessions, self.sessions_per_s)):
            requests += self._session(rng, session, begin_s)
        return Workload("image-chat", "synthetic: screenshots are digests and sizes", in_order(requests))

    def _session(self, rng: random.Random, session: int, time_s: float) -> list[MediaRequest]:
        own: list[Media] = []
        past: list[Media | Int32s] = []
        out = []
        for turn in range(self.turns):
            shown = self._shown(rng, session, own)
            if shown is not None:
                past.append(shown)
            past.append(text_of(QUESTION_TOKENS, "question", self.seed, session, turn))
            answer = text_of(ANSWER_TOKENS, "answer", self.seed, session, turn)
            out.append(self._prompt(past).request(time_s, answer))
            past.append(answer)
            time_s += rng.lognormvariate(math.log(self.pause_s), 0.8)
        return out

    def _prompt(self, past: list[Media | Int32s]) -> Prompt:
        prompt = Prompt()
        prompt.text(text_of(SYSTEM_TOKENS, "system"))
        drop = sum(isinstance(part, Media) for part in past) - self.keep if self.keep else 0
        for part in past:
            if isinstance(part, Media) and drop > 0:
                drop -= 1
                prompt.text(text_of(LEFT_OUT_TOKENS, "left out"))
            else:
                prompt.add(part)
        return prompt

    def _shown(self, rng: random.Random, session: int, own: list[Media]) -> Media | None:
        draw = rng.random()
        if draw < self.new_share or (draw < self.new_share + self.again_share and not own):
            own.append(self._picture(rng, session, len(own)))
            return own[-1]
        if draw < self.new_share + self.again_share:
            return rng.choice(own)
        if draw < (1 + self.new_share + self.again_share) / 2:
            return None
        number = zipf(rng, self.shared)
        return self._picture(random.Random(f"shared {self.seed} {number}"), "shared", number)

    def _picture(self, rng: random.Random, *name: object) -> Media:
        tokens = round(math.exp(rng.uniform(math.log(self.tokens_min), math.log(self.tokens_max))))
        nbytes = tokens * self.width * 2
        return Media("vision", key_of("picture", self.seed, *name), tokens, nbytes, tokens / self.encode_tokens_per_s)
