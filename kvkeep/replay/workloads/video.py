"""Video in windows: every window is made from one conditioning picture, one prompt, and the window before it.

Must not know caches.

    prompt | conditioning picture | the last window        the next window is the answer
"""

import random
from dataclasses import dataclass

from kvkeep.replay.workloads.workload import (
    Media,
    MediaRequest,
    Prompt,
    Workload,
    arrivals,
    in_order,
    key_of,
    text_of,
)

PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Video:
    """clips: how many, in `windows` windows each.   clips_per_s: how often one begins.
    window_s: seconds to make a window.   window_tokens, picture_tokens: of a window, and of the conditioning picture.
    again_share: of the clips, those with the conditioning picture of an earlier one.
    width, encode_s: output of the picture's encoder (a 16-bit row a token), and what it takes.
    text_nbytes, text_s: the same of the text encoder; the negative prompt is one for all clips.
    """

    clips: int = 60
    windows: int = 8
    clips_per_s: float = 0.05
    window_s: float = 8.0
    window_tokens: int = 1560
    picture_tokens: int = 1560
    again_share: float = 0.2
    width: int = 3584
    encode_s: float = 0.06
    text_nbytes: int = 4 << 20
    text_s: float = 0.0125
    seed: int = 0

    def workload(self) -> Workload:
        """The requests."""
        rng = random.Random(f"video {self.seed}")
        requests: list[MediaRequest] = []
        pictures: list[int] = []
        for clip, time_s in enumerate(arrivals(rng, self.clips, self.clips_per_s)):
            pictures.append(rng.choice(pictures) if pictures and rng.random() < self.again_share else clip)
            requests += self._clip(clip, pictures[-1], time_s)
        return Workload("video", "synthetic: pictures and windows are digests, sizes and ids", in_order(requests))

    def _clip(self, clip: int, picture: int, time_s: float) -> list[MediaRequest]:
        nbytes = self.picture_tokens * self.width * 2
        shown = Media("vision", key_of("frame", self.seed, picture), self.picture_tokens, nbytes, self.encode_s)
        texts = [Media("text", key_of(*which), 0, self.text_nbytes, self.text_s) for which in (("clip", clip), ("no",))]
        out = []
        for window in range(self.windows):
            prompt = Prompt()
            prompt.text(text_of(PROMPT_TOKENS, "clip", self.seed, clip))
            prompt.item(shown)
            for text in texts:
                prompt.need(text)
            if window:
                prompt.text(text_of(self.window_tokens, "window", self.seed, clip, window - 1))
            made = text_of(self.window_tokens, "window", self.seed, clip, window)
            out.append(prompt.request(time_s + window * self.window_s, made, self.window_s))
        return out
