"""Image generation: a prompt, tried some times, and the constant negative prompt of guided diffusion with each.

Must not know caches.  The model that draws keeps no KV: text encoder outputs are all that can be kept.
"""

import csv
import gzip
import random
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import BadInput
from kvkeep.index.names import frame
from kvkeep.replay.workloads.workload import (
    NOTHING,
    Media,
    Prompt,
    Workload,
    arrivals,
    in_order,
    key_of,
    text_of,
    zipf,
)

NEGATIVE_PROMPTS = 3
WORDS = "a the red old small fox city robot tree glass river painting photo under over beside holding made of"


@dataclass(frozen=True, slots=True)
class ImageGeneration:
    """users: how many people with a prompt of their own.   users_per_s: how often one begins.
    tries: pictures a prompt is tried for on average.   pause_s: seconds from a try to the next.
    popular_share: of the users, those who take one of the first `popular` prompts.
    prompts: a file of PartiPrompts (.tsv, or .tsv.gz); empty: prompts are made of words.
    tokens, width: of a text encoder's output, padded, 16 bits each.   encode_s: what computing it takes.
    """

    users: int = 400
    users_per_s: float = 0.5
    tries: float = 3.0
    pause_s: float = 15.0
    popular_share: float = 0.2
    popular: int = 30
    prompts: str = ""
    tokens: int = 512
    width: int = 4096
    encode_s: float = 0.0125
    seed: int = 0

    def workload(self) -> Workload:
        """The requests."""
        rng = random.Random(f"image-generation {self.seed}")
        texts = read_prompts(Path(self.prompts)) if self.prompts else [_made(rng) for _ in range(2000)]
        negatives = [self._encoded(f"negative prompt {n}") for n in range(NEGATIVE_PROMPTS)]
        requests = []
        for time_s in arrivals(rng, self.users, self.users_per_s):
            popular = rng.random() < self.popular_share
            text = texts[zipf(rng, min(self.popular, len(texts))) if popular else rng.randrange(len(texts))]
            negative = negatives[zipf(rng, NEGATIVE_PROMPTS)]
            while True:
                prompt = Prompt()
                prompt.need(self._encoded(text))
                prompt.need(negative)
                requests.append(prompt.request(time_s, NOTHING))
                if rng.random() * self.tries < 1:
                    break
                time_s += rng.expovariate(1 / self.pause_s)
        source = "prompts of PartiPrompts" if self.prompts else "prompts are made of words"
        return Workload("image-generation", f"synthetic: {source}, arrivals and tries are drawn", in_order(requests))

    def _encoded(self, text: str) -> Media:
        ids = text_of(len(text.split()), text)
        key = key_of(frame((("tokens", ids.tobytes()),)))
        return Media("text", key, 0, self.tokens * self.width * 2, self.encode_s)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a PartiPrompts file: its column `Prompt`.  Raises `BadInput`."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"prompts={path}: cannot be read ({error})") from None
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    prompts = [row["Prompt"] for row in rows if row.get("Prompt")]
    if not prompts:
        raise BadInput(f"prompts={path}: there is no column Prompt with text in it, separated by tabs")
    return prompts


def _made(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS.split(), k=rng.randint(4, 30)))
