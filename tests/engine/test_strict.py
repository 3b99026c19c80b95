"""Strict arithmetic: K, V and logits are the same bits however a sequence was computed.

Every case is compared with one reference: requests one by one, prompts in chunks of 16, nothing cached.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel

NEW = 24


@dataclass
class Seen:
    """K and V of whole sequences by prompt, logits by prompt and position, outputs and matched lengths by request."""

    kv: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    logits: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)


def prompts(loaded: LoadedModel, count: int, longest: int) -> list[list[int]]:
    """Prompts that begin alike in pairs, of lengths that end anywhere in a page."""
    rng = random.Random(count * longest)
    made: list[list[int]] = []
    for number in range(count):
        length = longest - rng.randrange(longest // 3)
        ids = [rng.randrange(3, loaded.vocabulary) for _ in range(length)]
        made.append(made[-1][: length // 2] + ids[length // 2 :] if number % 2 else ids)
    return made


def watched(
    loaded: LoadedModel,
    asked: list[list[int]],
    config: EngineConfig,
    *,
    rounds: int = 1,
    together: bool = False,
    new: int = NEW,
) -> Seen:
    """Everything that an engine computes for prompts and `new` tokens more, asked `rounds` times over."""
    engine = Engine(loaded, config)
    seen = Seen()

    def watch(request: Request, start: int, end: int, logits: torch.Tensor | None) -> None:
        prompt = request.number % len(asked)
        if logits is not None:
            seen.logits.setdefault((prompt, end), []).append(logits.clone())
        if end == request.prompt_len + new - 1:
            seen.kv.setdefault(prompt, []).append(engine.read_kv(request))

    engine.on_forward = watch
    requests = []
    for _ in range(rounds):
        for ids in asked:
            requests.append(engine.submit(ids, SamplingParams(max_new_tokens=new)))
            if not together:
                engine.run()
        engine.run()
        engine.cache.check_invariants()
    seen.outputs = [request.output_ids for request in requests]
    seen.matched = [request.matched_len for request in requests]
    return seen


def config(
    page_size: int, chunk_tokens: int, *, threads: int = 1, pool_tokens: int = 1200, keep: bool = False
) -> EngineConfig:
    return EngineConfig(
        page_size=page_size,
        pool_pages=-(-pool_tokens // page_size),
        chunk_tokens=chunk_tokens,
        arithmetic="strict",
        threads=threads,
        reuse=keep,
        store=keep,
    )


def assert_same_bits(reference: Seen, seen: Seen) -> None:
    assert reference.kv.keys() == seen.kv.keys()
    for prompt, copies in seen.kv.items():
        for kv in copies:
            differing = (kv != reference.kv[prompt][0]).nonzero()
            assert len(differing) == 0, (
                f"prompt {prompt}: K or V differ first at [layer, kv, position] {differing[0][:3]}"
            )
    for key, rows in seen.logits.items():
        for logits in rows:
            assert torch.equal(reference.logits[key][0], logits), f"logits differ at (prompt, position) {key}"
    count = len(reference.outputs)
    assert [reference.outputs[number % count] for number in range(len(seen.outputs))] == seen.outputs


@pytest.fixture(scope="module")
def asked(stories: LoadedModel) -> list[list[int]]:
    return prompts(stories, count=4, longest=140)


@pytest.fixture(scope="module")
def reference(stories: LoadedModel, asked: list[list[int]]) -> Seen:
    return watched(stories, asked, config(page_size=16, chunk_tokens=16))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("page_size", "chunk_tokens"), [(16, 48), (128, 128), (7, 33), (100, 512), (1, 1), (3, 1000), (64, 64)]
)
def test_any_split(
    stories: LoadedModel, asked: list[list[int]], reference: Seen, page_size: int, chunk_tokens: int, together: bool
):
    """Page sizes, chunk sizes and company change no bit."""
    seen = watched(stories, asked, config(page_size, chunk_tokens), together=together)
    assert_same_bits(reference, seen)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
def test_any_hit(stories: LoadedModel, asked: list[list[int]], reference: Seen, page_size: int, together: bool):
    """A prefix from the cache, its generated pages included, changes no bit; the second round does hit."""
    keep = config(page_size, 64, pool_tokens=2000, keep=True)
    seen = watched(stories, asked, keep, rounds=2, together=together)
    assert_same_bits(reference, seen)
    for ids, matched in zip(asked, seen.matched[len(asked) :], strict=True):
        assert (len(ids) - 1) // page_size * page_size == matched


def test_pages_that_are_dropped_all_the_time(stories: LoadedModel, asked: list[list[int]], reference: Seen):
    """In a pool that holds little more than one request, hits are partial and no bit changes."""
    small = config(8, 64, pool_tokens=240, keep=True)
    seen = watched(stories, asked, small, rounds=3)
    assert_same_bits(reference, seen)
    hits = [matched for matched in seen.matched if matched]
    assert hits
    assert len(hits) < len(seen.matched)


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads(stories: LoadedModel, asked: list[list[int]], reference: Seen, threads: int):
    """The threads that share an operation change no bit."""
    seen = watched(stories, asked, config(16, 128, threads=threads), together=True)
    assert_same_bits(reference, seen)


def test_decode_equals_prefill(stories: LoadedModel, asked: list[list[int]], reference: Seen):
    """K and V that were decoded one by one are those of a prompt that has the same tokens."""
    engine = Engine(stories, config(16, 256))
    whole: list[torch.Tensor] = []
    engine.on_forward = lambda request, start, end, logits: whole.append(engine.read_kv(request))
    for prompt, ids in enumerate(asked):
        engine.submit(ids + reference.outputs[prompt][:-1], SamplingParams(max_new_tokens=1))
        engine.run()
        assert torch.equal(reference.kv[prompt][0], whole[-1])


def test_fast_arithmetic_is_told_apart(stories: LoadedModel, asked: list[list[int]], reference: Seen):
    """The comparison can fail: in fast arithmetic some bit differs from chunk size to chunk size, or in a batch."""
    seen = [
        watched(
            stories,
            asked,
            EngineConfig(page_size=16, pool_pages=75, chunk_tokens=chunk, arithmetic="fast", threads=1),
            together=together,
        )
        for chunk, together in ((16, False), (512, False), (512, True))  # some processors tell only batches apart
    ]
    assert any(not torch.equal(seen[0].kv[prompt][0], other.kv[prompt][0]) for other in seen for prompt in other.kv)


def check_smollm2(loaded: LoadedModel, longest: int, new: int, threads: int) -> None:
    asked = prompts(loaded, count=2, longest=longest)
    room = 3 * (longest + new)
    reference = watched(loaded, asked, config(128, 128, threads=threads, pool_tokens=room), new=new)
    together = watched(loaded, asked, config(128, 256, threads=threads, pool_tokens=room), together=True, new=new)
    assert_same_bits(reference, together)
    keep = config(32, 1024, threads=threads, pool_tokens=room, keep=True)
    hits = watched(loaded, asked, keep, rounds=2, new=new)
    assert_same_bits(reference, hits)
    assert all(hits.matched[len(asked) :])


def test_smollm2(smollm2: LoadedModel):
    """The same for SmolLM2, across the key counts where its attention needs padding (192 to 384)."""
    check_smollm2(smollm2, longest=300, new=3, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_smollm2_long(smollm2: LoadedModel, threads: int):
    """The same over four thousand positions."""
    check_smollm2(smollm2, longest=4000, new=40, threads=threads)
