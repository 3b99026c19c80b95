"""Synthetic workloads: what they are made of, how they are served, and what is counted.

Must not judge how large a saving is: that is the bench's business.
"""

from itertools import pairwise

import numpy as np
import pytest

from kvkeep.errors import BadInput
from kvkeep.index.media import MediaItem
from kvkeep.replay.result import Settings
from kvkeep.replay.workloads.named import KINDS, make_workload
from kvkeep.replay.workloads.serving import Saved, Serving
from kvkeep.replay.workloads.workload import NOTHING, Encoded, MediaRequest, Workload, text_of

SMALL = {
    "image-chat": "sessions=6&turns=5",
    "image-generation": "users=40",
    "video": "clips=6&windows=4",
    "audio": "sessions=6&turns=4&clones=40",
}
KINDS_SMALL = [f"workload:{name}?{query}" for name, query in SMALL.items()]


def serve(workload: Workload, gpu_tokens: int, **more: object) -> Saved:
    kv_share = more.pop("kv_share", None)
    return Serving(workload, Settings(gpu_tokens=gpu_tokens, **more), kv_share=kv_share).run()  # type: ignore[arg-type]


def picture(number: int, end: int | None = None, seconds: float = 1.0) -> Encoded:
    return Encoded("vision", number.to_bytes(16, "big"), 1 << 20, seconds, end)


def request(
    time_s: float, *encoded: Encoded, prompt: int = 0, text: object = 0, shown: int | None = None
) -> MediaRequest:
    ids = text_of(prompt, text) if prompt else NOTHING
    media = () if shown is None else (MediaItem(0, 100, shown.to_bytes(16, "big")),)
    return MediaRequest(time_s, ids, NOTHING, media, encoded)


# ---------------------------------------------------------------------- what they are made of


def test_every_kind_has_a_small_one():
    """The list of kinds that the tests below go through is whole."""
    assert set(SMALL) == set(KINDS)


@pytest.mark.parametrize("name", KINDS_SMALL)
def test_the_seed_decides(name: str):
    """Equal seeds give equal requests, another seed others; arrivals do not go back in time."""

    def flat(workload: Workload) -> list[object]:
        return [(r.time_s, r.prompt.tobytes(), r.answer.tobytes(), r.media, r.encoded) for r in workload.requests]

    first = make_workload(name + "&seed=1")
    assert flat(first) == flat(make_workload(name + "&seed=1"))
    assert flat(first) != flat(make_workload(name + "&seed=2"))
    assert all(a.time_s <= b.time_s for a, b in pairwise(first.requests))
    assert "synthetic" in first.note


@pytest.mark.parametrize("name", KINDS_SMALL)
def test_items_lie_in_their_prompts(name: str):
    """Spans are in order and inside, each has the output of its digest, and equal keys are of equal size."""
    sizes: dict[tuple[str, bytes], tuple[int, float]] = {}
    for made in make_workload(name).requests:
        ends = [item.offset + item.length for item in made.media]
        assert all(end <= item.offset for end, item in zip(ends, made.media[1:], strict=False))
        assert all(end <= len(made.prompt) for end in ends)
        placed = [e for e in made.encoded if e.end is not None]
        assert [(e.key, e.end) for e in placed] == [(i.digest, end) for i, end in zip(made.media, ends, strict=True)]
        for e in made.encoded:
            assert sizes.setdefault((e.encoder, e.key), (e.nbytes, e.seconds)) == (e.nbytes, e.seconds)
            assert e.nbytes > 0


def test_a_session_keeps_its_screenshots():
    """Each prompt of a session begins with the one before it; with `keep` there are never more pictures than that."""
    query = "sessions=1&turns=8&new_share=1"
    prompts = [r.prompt for r in make_workload(f"image-chat?{query}").requests]
    assert all(np.array_equal(a, b[: len(a)]) for a, b in pairwise(prompts))
    assert [1, 2, 3, 4, 5, 6, 7, 8] == [len(r.media) for r in make_workload(f"image-chat?{query}").requests]
    kept = make_workload(f"image-chat?{query}&keep=3")
    assert [1, 2, 3, 3, 3, 3, 3, 3] == [len(r.media) for r in kept.requests]
    assert kept.requests[7].media[0].digest == kept.requests[5].media[-1].digest


def test_the_negative_prompt_rides_with_every_request():
    """Of image generation: two outputs a request, and three negative prompts in all."""
    made = make_workload("image-generation?users=100").requests
    assert {2} == {len(r.encoded) for r in made}
    assert 3 >= len({r.encoded[1].key for r in made})
    assert not any(len(r.prompt) for r in made)


def test_prompts_may_come_from_a_file(shared_dir):
    """PartiPrompts, where they are at hand."""
    made = make_workload(f"image-generation?users=300&prompts={shared_dir / 'traces' / 'parti_prompts.tsv.gz'}")
    assert "PartiPrompts" in made.note
    assert len({r.encoded[0].key for r in made.requests}) > 150


def test_the_windows_of_a_clip_share_their_conditioning():
    """One picture a clip, and the window before as what the prompt ends with."""
    clip = make_workload("video?clips=1&windows=3").requests
    assert 1 == len({r.media[0].digest for r in clip})
    assert all(np.array_equal(b.prompt[-len(a.answer) :], a.answer) for a, b in pairwise(clip))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("nope", "nope"),
        ("image-chat?colour=1", "colour"),
        ("image-chat?turns=0", "turns=0"),
        ("image-chat?turns=many", "turns=many"),
        ("image-chat?pause_s=nan", "pause_s=nan"),
        ("audio?replay_share=1.5", "from 0 to 1"),
        ("video?clips", "name=value"),
        ("mixed?turns=2", "seed only"),
        ("image-generation?prompts=no.tsv", "no.tsv"),
    ],
)
def test_a_workload_that_there_is_not(name: str, wrong: str):
    """One line says what was wrong."""
    with pytest.raises(BadInput, match=wrong):
        make_workload("workload:" + name)


# ---------------------------------------------------------------------- serving


def test_a_repeated_output_is_counted_as_saved():
    """Three requests for one picture and one for another: two hits, two seconds."""
    saved = serve(Workload("w", "", tuple(request(t, picture(n)) for t, n in enumerate((1, 1, 2, 1)))), 10_000)
    assert (4, 2, 2, 2) == (saved.asked, saved.asked_again, saved.gpu_hits, saved.computed)
    assert (2.0, 4.0, 0.0) == (saved.encoder_s, saved.encoder_all_s, saved.kv_s)


def test_an_output_whose_kv_matched_is_not_needed():
    """The second request's pages cover the picture: nothing is asked of the encoder, and its seconds are saved."""
    made = [request(t, picture(1, end=100), prompt=1000, shown=1) for t in (0, 1)]
    saved = serve(Workload("w", "", tuple(made)), 10_000)
    assert (2, 1, 1, 0) == (saved.asked, saved.computed, saved.unneeded, saved.gpu_hits)
    assert saved.matched_tokens_gpu == 896
    assert saved.kv_s == pytest.approx(896 / 50_000)
    assert saved.encoder_s == 1.0


def test_another_picture_behind_the_same_text_matches_nothing():
    """Digests are in the names of pages; duplicates are counted by digest."""
    made = [request(t, prompt=1000, shown=n) for t, n in enumerate((1, 2, 1))]
    saved = serve(Workload("w", "", tuple(made)), 10_000)
    assert 896 == saved.matched_tokens_gpu
    assert 3 == saved.media_items
    assert pytest.approx(1 / 3) == saved.duplicate_media_rate


def test_one_budget_gives_outputs_the_room_that_kv_does_not_use():
    """Eight pictures of 1 MB in two pages of 7 MiB: a half for KV leaves one page, which holds seven."""
    made = [request(t, picture(n)) for t, n in enumerate([*range(8), *range(8)])]
    one = serve(Workload("w", "", tuple(made)), 256)
    halves = serve(Workload("w", "", tuple(made)), 256, kv_share=0.5)
    assert (8, 0) == (one.gpu_hits, halves.gpu_hits)


def test_a_split_keeps_outputs_out_of_the_kv_part():
    """Three pages; a prompt of two, and 21 pictures of 1 MB: with two pages for KV alone the prompt stays."""
    made = [request(n, prompt=256, text="a") for n in range(2)]
    made += [request(2 + n, picture(n)) for n in range(21)]
    made += [request(30, prompt=256, text="a")]
    split = serve(Workload("w", "", tuple(made)), 384, kv_share=2 / 3 + 1e-9)
    one = serve(Workload("w", "", tuple(made)), 384)
    assert (256, 128) == (split.matched_tokens_gpu, one.matched_tokens_gpu)


def test_requests_wait_for_pages_and_all_are_served():
    """Answers that last: the third prompt waits until the first has ended."""
    made = [MediaRequest(0.0, text_of(500, n), text_of(12, n), (), (), 10.0) for n in range(3)]
    saved = serve(Workload("w", "", tuple(made)), 1024)
    assert (3, 1, 0) == (saved.requests, saved.stalls, saved.unserved)
    assert 9.9 < saved.waited_s <= 10.0


def test_what_is_larger_than_the_pool_is_not_served():
    """A prompt of more pages than there are is counted; an output is computed and not kept."""
    saved = serve(Workload("w", "", (request(0, prompt=1000), request(1, picture(1)._replace(nbytes=1 << 30)))), 512)
    assert (1, 1) == (saved.unserved, saved.refused)


@pytest.mark.parametrize("name", KINDS_SMALL)
@pytest.mark.parametrize("eviction", ["lru", "rhythm"])
def test_two_tiers(name: str, eviction: str):
    """A small GPU tier above host memory: outputs come back from below, and every count adds up."""
    workload = make_workload(name)
    saved = serve(workload, 12_288, cpu_tokens=65_536, link_tokens_per_s=400_000.0, eviction=eviction)
    assert saved.asked == saved.unneeded + saved.gpu_hits + saved.host_hits + saved.computed
    assert saved.asked == sum(len(r.encoded) for r in workload.requests)
    assert 0 < saved.saved_s < saved.prefill_all_s + saved.encoder_all_s
    if "generation" not in name:  # which fits
        assert 0 < saved.host_hits + saved.matched_tokens_cpu
