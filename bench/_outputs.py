"""Encoder outputs: cases of `bench media` that go through `EncoderCache`, with real encoders where they are installed.

Must not know how a case is scheduled or judged.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bench import _encoders as encoders
from bench._measure import now_ns
from kvkeep.cache import TieredCache
from kvkeep.config import CacheConfig
from kvkeep.encoder import EncoderCache, EncoderFingerprint
from kvkeep.media.digest import Digester
from kvkeep.tiers.gpu_pool import GpuPool
from kvkeep.tiers.layout import PageLayout

Sample = Callable[[], Sequence[float]]

#: SmolLM2-135M in 16 bits: pages of 2.8 MiB.
LAYOUT = PageLayout(layers=30, kv_heads=3, head_dim=64, page_size=128, dtype="float16")


def make_cache(pages: int = 8) -> TieredCache:
    """A cache over memory of this machine."""
    return TieredCache(CacheConfig(eviction="lru"), GpuPool.allocate(LAYOUT, pages), b"bench")


def hits_2mb(times: int) -> Sample:
    """Microseconds from asking for an output of 2 MB to letting go of it: a view of where it lies in the pool."""
    import torch

    cache = make_cache()
    encoder = EncoderCache(cache, EncoderFingerprint("tower"))
    tensor, key = torch.randn(1 << 19), bytes(16)
    encoder.get_or_compute(key, lambda: tensor).release()
    memory = cache.pool.kv
    with encoder.get_or_compute(key, _nothing) as output:
        if output.source != "gpu" or not torch.equal(output.tensor, tensor):
            raise AssertionError("a hit of other bytes")
        if not 0 <= output.tensor.data_ptr() - memory.data_ptr() < memory.nbytes:
            raise AssertionError("a hit that is a copy")

    def sample() -> list[float]:
        out = []
        for _ in range(times):
            begun = now_ns()
            encoder.get_or_compute(key, _nothing).release()
            out.append((now_ns() - begun) / 1e3)
        return out

    return sample


class Repeated:
    """A real encoder and one input, computed and found.   ask: what is done with the answer, if anything."""

    def __init__(self, kind: str, model: Any, source: Any, ask: Callable[[Any], object] | None = None) -> None:
        self._model = model
        self._source = source
        self._ask = ask
        self._digester = Digester(kind, model.preprocessing)
        self._cache = make_cache()
        self._encoder = EncoderCache(self._cache, model.fingerprint)

    def check(self) -> bool:
        """Whether a hit has the bits of a fresh computation."""
        import torch

        key = self._digester.digest(self._source)
        self._encoder.get_or_compute(key, lambda: self._model(self._source)).release()
        with self._encoder.get_or_compute(key, _nothing) as output:
            return output.source == "gpu" and torch.equal(output.tensor, torch.as_tensor(self._model(self._source)))

    def misses(self, times: int) -> Sample:
        """Milliseconds with the digest, the computation, and keeping what it gave; of other bytes each time."""

        def sample() -> list[float]:
            out = []
            for _ in range(times):
                self._encoder.discard(self._digester.digest(self._source))
                begun = now_ns()
                self._asked(lambda: self._model(self._source))
                out.append((now_ns() - begun) / 1e6)
            return out

        return sample

    def hits(self, times: int) -> Sample:
        """Milliseconds with the digest, when the same bytes come again."""

        def sample() -> list[float]:
            self._asked(lambda: self._model(self._source))
            out = []
            for _ in range(times):
                begun = now_ns()
                self._asked(_nothing)
                out.append((now_ns() - begun) / 1e6)
            return out

        return sample

    def _asked(self, compute: Callable[[], Any]) -> None:
        with self._encoder.get_or_compute(self._digester.digest(self._source), compute) as output:
            if self._ask is not None:
                self._ask(output.tensor)


def image() -> Repeated | None:
    """A photograph through EfficientNet-Lite0, its bytes those of an upload; None where that is not installed."""
    if encoders.missing("vision"):
        return None
    file = encoders.images()[1]
    vision = encoders.Vision()
    return Repeated("image", _OfBytes(vision), file.read_bytes())


def clip() -> Repeated | None:
    """Ten seconds of synthesised speech through Whisper's encoder, to the first token of its decoder."""
    if encoders.missing("speech"):
        return None
    hearing = encoders.Speech()
    return Repeated("audio", hearing, encoders.speech(10.0), lambda encoded: hearing.first_token(encoded.numpy()))


class _OfBytes:
    """An image encoder of a file's bytes."""

    def __init__(self, vision: encoders.Vision) -> None:
        self.preprocessing, self.fingerprint, self._vision = vision.preprocessing, vision.fingerprint, vision

    def __call__(self, raw: bytes) -> Any:
        import io

        return self._vision(io.BytesIO(raw))


def _nothing() -> object:
    raise AssertionError("computed again")
