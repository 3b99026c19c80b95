"""Audio: voice sessions that are replayed turn by turn, and texts that are spoken in the voice of one reference.

Must not know caches.

    a voice session:   system prompt | clip, answer | clip, answer | ...          every clip stays
    cloning:           reference clip | text                                      the same reference, text after text
"""

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

SYSTEM_TOKENS, ANSWER_TOKENS, TEXT_TOKENS = 300, 150, 80


@dataclass(frozen=True, slots=True)
class Audio:
    """sessions, turns: voice sessions, and turns of each.   sessions_per_s: how often one begins.
    pause_s: seconds from a turn to the next.   clip_s: seconds of speech in a turn, on average.
    replay_share: of the sessions, those that are an earlier one again (an evaluation, a retry), a while later.
    clones: texts to speak.   clones_per_s: how often.   voices: references, some asked for far more often.
    reference_s: seconds of a reference.   tokens_per_s, width: of the speech encoder's output, 16 bits each.
    encode_share: seconds of encoding for a second of audio.   speak_share: seconds of making a second of speech.
    """

    sessions: int = 40
    turns: int = 10
    sessions_per_s: float = 0.1
    pause_s: float = 12.0
    clip_s: float = 6.0
    replay_share: float = 0.25
    clones: int = 400
    clones_per_s: float = 1.0
    voices: int = 20
    reference_s: float = 10.0
    tokens_per_s: float = 25.0
    width: int = 2048
    encode_share: float = 0.005
    speak_share: float = 0.5
    seed: int = 0

    def workload(self) -> Workload:
        """The requests."""
        rng = random.Random(f"audio {self.seed}")
        requests: list[MediaRequest] = []
        first: list[int] = []
        for session, time_s in enumerate(arrivals(rng, self.sessions, self.sessions_per_s)):
            replayed = first and rng.random() < self.replay_share
            first.append(rng.choice(first) if replayed else session)
            requests += self._session(first[-1], time_s)
        for text, time_s in enumerate(arrivals(rng, self.clones, self.clones_per_s)):
            requests.append(self._clone(zipf(rng, self.voices), text, time_s))
        return Workload("audio", "synthetic: clips are digests and lengths", in_order(requests))

    def _session(self, session: int, time_s: float) -> list[MediaRequest]:
        rng = random.Random(f"voice {self.seed} {session}")
        past: list[Media | Int32s] = []
        out = []
        for turn in range(self.turns):
            past.append(self._clip(rng.expovariate(1 / self.clip_s) + 0.5, "clip", session, turn))
            prompt = Prompt()
            prompt.text(text_of(SYSTEM_TOKENS, "voice system"))
            for part in past:
                prompt.add(part)
            answer = text_of(ANSWER_TOKENS, "voice", self.seed, session, turn)
            out.append(prompt.request(time_s, answer))
            past.append(answer)
            time_s += rng.expovariate(1 / self.pause_s)
        return out

    def _clone(self, voice: int, text: int, time_s: float) -> MediaRequest:
        prompt = Prompt()
        prompt.item(self._clip(self.reference_s, "voice", voice))
        prompt.text(text_of(TEXT_TOKENS, "speak", self.seed, text))
        spoken = text_of(ANSWER_TOKENS, "spoken", self.seed, text)
        return prompt.request(time_s, spoken, ANSWER_TOKENS / self.tokens_per_s * self.speak_share)

    def _clip(self, seconds: float, *name: object) -> Media:
        tokens = max(1, round(seconds * self.tokens_per_s))
        key = key_of("audio", self.seed, *name)
        return Media("speech", key, tokens, tokens * self.width * 2, seconds * self.encode_share)
