"""Real encoders through the cache: a hit is what computing would have given, bit for bit, and computes nothing.

Must not need a network: weights and images are package data, speech is synthesised.  Each skips where its package is
absent.
"""

import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench._encoders import Sentence, Speech, Vision, images, missing, speech
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.encoder import EncoderCache, EncoderFingerprint
from kvkeep.media.digest import Digester
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout

#: SmolLM2-135M in 16 bits: 2.8 MiB a page.
LAYOUT = PageLayout(layers=30, kv_heads=3, head_dim=64, page_size=128, dtype="float16")

NEGATIVE = "blurry, low quality, extra fingers, watermark"
PROMPTS = ("a corgi on the moon, oil painting", "a glass bridge over a river at dawn", "an old robot reading a map")


def need(encoder: str) -> None:
    absent = missing(encoder)
    if absent:
        pytest.skip(f"the {encoder} encoder needs {absent}")


@pytest.fixture(scope="module")
def vision() -> Vision:
    need("vision")
    return Vision()


@pytest.fixture(scope="module")
def hearing() -> Speech:
    need("speech")
    return Speech()


@pytest.fixture(scope="module")
def sentence() -> Sentence:
    need("sentence")
    return Sentence()


@pytest.fixture
def cache() -> TieredCache:
    return TieredCache(CacheConfig(eviction="lru"), GpuPool.allocate(LAYOUT, 8), b"model")


def test_an_image_is_encoded_once(vision: Vision, cache: TieredCache):
    """Six photographs, each shown three times: six computations, and every hit has the bits of a fresh one."""
    encoder = EncoderCache(cache, vision.fingerprint)
    digester = Digester("image", vision.preprocessing)
    before = vision.calls
    for _ in range(3):
        for file in images():
            with encoder.get_or_compute(digester.digest(file), partial(vision, file)) as output:
                assert output.tensor.shape == (1, 1280, 7, 7)
    assert vision.calls == before + len(images())
    for file in images():
        with encoder.get_or_compute(digester.digest(file), lambda: pytest.fail("computed again")) as output:
            assert output.source == "gpu"
            assert torch.equal(output.tensor, vision(file))
    cache.check_invariants()


def test_a_copy_of_an_image_is_the_same_image(vision: Vision, cache: TieredCache, tmp_path: Path):
    """Equal bytes in another place hit; one other byte does not."""
    encoder, digester = EncoderCache(cache, vision.fingerprint), Digester("image", vision.preprocessing)
    file = images()[1]
    encoder.get_or_compute(digester.digest(file), lambda: vision(file)).release()
    raw = file.read_bytes()
    found = encoder.get(digester.digest(raw))
    assert found is not None
    found.release()
    assert encoder.get(digester.digest(raw + b"\0")) is None


def test_other_preprocessing_is_another_input(vision: Vision, cache: TieredCache):
    """The same file at another size misses, and gives the map of that size."""
    need("vision")
    small, file = Vision(size=160), images()[0]
    encoder = EncoderCache(cache, vision.fingerprint)
    keys = [Digester("image", model.preprocessing).digest(file) for model in (vision, small)]
    encoder.get_or_compute(keys[0], lambda: vision(file)).release()
    assert encoder.get(keys[1]) is None
    with encoder.get_or_compute(keys[1], lambda: small(file)) as output:
        assert output.tensor.shape == (1, 1280, 5, 5)
        assert torch.equal(output.tensor, small(file))


def test_another_encoder_shares_nothing(vision: Vision, cache: TieredCache):
    """Another revision, adapter, dtype or layer misses."""
    file = images()[0]
    key = Digester("image", vision.preprocessing).digest(file)
    EncoderCache(cache, vision.fingerprint).get_or_compute(key, lambda: vision(file)).release()
    for change in ({"revision": "2"}, {"adapter": "lora"}, {"dtype": "float16"}, {"settings": "logits"}):
        said = {"weights": "efficientnet-lite0", "revision": "57934424", "dtype": "float32", "settings": "features"}
        assert EncoderCache(cache, EncoderFingerprint(**said | change)).get(key) is None, change
    assert EncoderCache(cache, EncoderFingerprint(**said)).get(key) is not None


def test_a_clip_is_encoded_once(hearing: Speech, cache: TieredCache):
    """The reference of a voice: the second request hears the same bits, and the decoder says the same behind them."""
    encoder, digester = EncoderCache(cache, hearing.fingerprint), Digester("audio", hearing.preprocessing)
    clip, other = speech(3.0), speech(3.0, seed=1)
    before = hearing.calls
    with encoder.get_or_compute(digester.digest(clip), lambda: hearing(clip)) as first:
        said = hearing.first_token(first.tensor.numpy())
    with encoder.get_or_compute(digester.digest(clip.copy()), lambda: hearing(clip)) as again:
        assert again.source == "gpu"
        assert again.tensor.shape == (1, 1500, 384)
        assert np.array_equal(again.tensor.numpy(), hearing(clip))
        assert hearing.first_token(again.tensor.numpy()) == said
    assert hearing.calls == before + 2  # one of them to compare with
    assert encoder.get(digester.digest(other)) is None
    changed = clip.copy()
    changed[-1] += 1e-3
    assert encoder.get(digester.digest(changed)) is None


def test_the_negative_prompt_is_computed_once_a_process(sentence: Sentence, cache: TieredCache):
    """Guided generation: the constant negative prompt rides with every request, from every thread."""
    encoder = EncoderCache(cache, sentence.fingerprint)
    before, negative = sentence.calls, sentence.tokens(NEGATIVE)
    want = sentence(negative)
    begin, wrong = threading.Barrier(8), []

    def generate(worker: int) -> None:
        begin.wait()
        for n in range(6):
            for ids in (sentence.tokens(PROMPTS[(worker + n) % len(PROMPTS)]), negative):
                with encoder.get_or_compute(ids, partial(sentence, ids)) as output:
                    if ids is negative and not torch.equal(output.tensor, want):
                        wrong.append(worker)

    threads = [threading.Thread(target=generate, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sentence.calls == before + 1 + len(PROMPTS) + 1
    cache.check_invariants()


def test_prompts_are_keyed_by_token_ids(sentence: Sentence, cache: TieredCache):
    """Texts of equal token ids share an output; a prefix of a prompt is another prompt."""
    encoder = EncoderCache(cache, sentence.fingerprint)
    ids = sentence.tokens(PROMPTS[0])
    encoder.get_or_compute(ids, lambda: sentence(ids)).release()
    assert sentence.tokens(PROMPTS[0].upper()) == ids  # an uncased vocabulary
    with encoder.get_or_compute(sentence.tokens(PROMPTS[0].upper()), lambda: pytest.fail("computed again")) as output:
        assert torch.equal(output.tensor, sentence(ids))
    assert encoder.get(ids[:-1]) is None


def test_the_example_runs(repo_root: Path):
    """Six turns of two chats show four photographs: two of them twice, and those are found."""
    need("vision")
    script = repo_root / "examples" / "image_chat.py"
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert ["computed", "computed", "computed", "gpu", "computed", "gpu"] == [line.split()[5] for line in lines[1:7]]
    assert "4 photographs encoded, 2 found" in lines[7]


def test_the_example_says_what_it_needs(repo_root: Path):
    """Where a package is absent it says so, and fails at nothing."""
    script = f"""
        import importlib.util, runpy, sys
        sys.path.insert(0, {str(repo_root)!r})
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "skimage" else found(name, *more)
        runpy.run_path({str(repo_root / "examples" / "image_chat.py")!r}, run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    assert "this example needs" in done.stdout
    assert "skimage" in done.stdout
