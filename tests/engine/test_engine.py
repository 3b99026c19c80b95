"""Scheduler: every request ends, the oldest first in line, and what became of its neighbours does not show."""

import random

import pytest
import torch

from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams, State
from kvkeep.engine.loader import LoadedModel
from kvkeep.errors import BadInput

PAGE = 4


def make(stories: LoadedModel, pages: int, **settings: object) -> Engine:
    chosen: dict[str, object] = {"page_size": PAGE, "chunk_tokens": 64, "threads": 1} | settings
    return Engine(stories, EngineConfig(pool_pages=pages, **chosen))  # type: ignore[arg-type]


def drawn(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


def alone(stories: LoadedModel, ids: list[int], params: SamplingParams) -> list[int]:
    """What a request gives in an engine of its own without a cache."""
    engine = make(stories, 128, reuse=False, store=False)
    request = engine.submit(ids, params)
    engine.run()
    return request.output_ids


def check_queue(engine: Engine) -> None:
    """No request overtakes an older one, preempted ones included; the books are right."""
    running, waiting = list(engine._running), list(engine._waiting)
    numbers = [request.number for request in (*running, *waiting)]
    assert sorted(numbers) == numbers
    for request in running:
        assert request.state is State.RUNNING
        assert request.lease is not None
    for request in waiting:
        assert request.state is State.WAITING
        assert request.lease is None
    engine.cache.check_invariants()


def run_checked(engine: Engine) -> None:
    while engine.step():
        check_queue(engine)


# --- room ------------------------------------------------------------------------------------------------------------


def test_96_pages_for_32_requests(stories: LoadedModel):
    """96 pages, 32 requests that share 59 prompt pages and decode 2 pages each: all finish, with their own output."""
    engine = make(stories, 96)
    shared = drawn(1, 59 * PAGE)
    params = SamplingParams(max_new_tokens=2 * PAGE)
    prompts = [shared + drawn(100 + number, 1) for number in range(32)]
    requests = [engine.submit(ids, params) for ids in prompts]
    run_checked(engine)
    assert [State.FINISHED] * 32 == [request.state for request in requests]
    assert sum(request.preemptions for request in requests) > 0
    assert requests[0].preemptions == 0
    for number in (0, 15, 31):
        assert alone(stories, prompts[number], params) == requests[number].output_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("store", [True, False])
def test_preempted_outputs_are_the_same(stories: LoadedModel, temperature: float, store: bool):
    """Greedy or sampled, a request that was preempted gives what it gives alone, found again or computed again."""
    engine = make(stories, 24)
    prompts = [drawn(number, 18 + number) for number in range(6)]
    params = [
        SamplingParams(max_new_tokens=30, temperature=temperature, top_p=0.95, seed=number) for number in range(6)
    ]
    requests = [engine.submit(i, p, store=store) for i, p in zip(prompts, params, strict=True)]
    run_checked(engine)
    assert sum(request.preemptions for request in requests) > 1
    assert [alone(stories, i, p) for i, p in zip(prompts, params, strict=True)] == [r.output_ids for r in requests]
    if not store:
        assert sum(request.recomputed_len for request in requests) > 0


def test_oldest_is_never_preempted(stories: LoadedModel):
    """At any time the oldest request that has not ended is not preempted."""
    engine = make(stories, 20)
    requests = [engine.submit(drawn(number, 12), SamplingParams(max_new_tokens=40)) for number in range(5)]
    before = [0] * 5
    while engine.step():
        oldest = min((request.number for request in requests if not request.ended), default=None)
        if oldest is not None:
            assert before[oldest] == requests[oldest].preemptions
        before = [request.preemptions for request in requests]
    assert sum(before) > 0
    assert [State.FINISHED] * 5 == [request.state for request in requests]


def test_what_a_preemption_frees_is_for_those_that_run(stories: LoadedModel):
    """After a preemption nothing is admitted before a running request has ended: pages do not change hands in vain.

    The preempted request needs all the pages that it gave up, and one of them is taken.
    """
    engine = make(stories, 20)
    requests = [engine.submit(drawn(number, 12), SamplingParams(max_new_tokens=40)) for number in range(5)]
    preempted = ended = 0
    held_running = 0
    while engine.step():
        if sum(request.ended for request in requests) > ended:
            ended, held_running = sum(request.ended for request in requests), 0
        if held_running:
            assert engine.running <= held_running
        if sum(request.preemptions for request in requests) > preempted:
            preempted, held_running = sum(request.preemptions for request in requests), engine.running
    assert preempted > 0
    assert preempted <= 2 * len(requests)


def test_a_request_waits_until_it_fits(stories: LoadedModel):
    """A large request at the head of the line is not overtaken by a small one, and starts when room is made."""
    engine = make(stories, 16)
    first = engine.submit(drawn(1, 24), SamplingParams(max_new_tokens=20))
    large = engine.submit(drawn(2, 50), SamplingParams(max_new_tokens=4))
    small = engine.submit(drawn(3, 4), SamplingParams(max_new_tokens=2))
    engine.step()
    assert (State.RUNNING, State.WAITING, State.WAITING) == (first.state, large.state, small.state)
    started: list[Request] = []
    while engine.step():
        check_queue(engine)
        started += [r for r in (large, small) if r.state is not State.WAITING and r not in started]
    assert started[0] is large
    assert small.state is State.FINISHED


def test_max_batch(stories: LoadedModel):
    """No more requests run than the setting says."""
    engine = make(stories, 64, max_batch=3)
    for number in range(7):
        engine.submit(drawn(number, 9), SamplingParams(max_new_tokens=5))
    most = 0
    while engine.step():
        most = max(most, engine.running)
    assert most == 3


# --- any order of events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_submit_step_abort_in_any_order(stories: LoadedModel, seed: int):
    """Whatever is submitted and aborted when: all end, no page stays held, outputs are those of a request alone."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = make(stories, 26, max_batch=rng.choice([2, 4, 32]), chunk_tokens=rng.choice([4, 16, 64]))
    stems = [drawn(stem, 60) for stem in range(3)]
    requests: list[tuple[Request, list[int]]] = []
    for _ in range(120):
        event = rng.random()
        if event < 0.25 and len(requests) < 24:
            ids = rng.choice(stems)[: rng.randrange(1, 60)] + drawn(rng.randrange(1000), rng.randrange(4))
            params = SamplingParams(
                max_new_tokens=rng.randrange(1, 30), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(100)
            )
            request = engine.submit(ids, params, reuse=rng.random() < 0.8, store=rng.random() < 0.8)
            requests.append((request, ids))
        elif event < 0.3 and requests:
            engine.abort(rng.choice(requests)[0])
        else:
            engine.step()
        check_queue(engine)
    run_checked(engine)
    assert engine.cache.stats().pages_live == 0
    for request, ids in requests:
        assert request.ended
        if not request.aborted:
            assert alone(stories, ids, request.params) == request.output_ids


def test_abort_everywhere(stories: LoadedModel):
    """A request can be aborted while it waits, in its prompt, while it decodes, and after its end."""
    engine = make(stories, 12, chunk_tokens=8)
    long = engine.submit(drawn(1, 30), SamplingParams(max_new_tokens=10))
    waits = engine.submit(drawn(2, 30), SamplingParams(max_new_tokens=10))
    engine.step()
    assert long.pending > 1
    engine.abort(waits)
    engine.abort(long)
    decodes = engine.submit(drawn(3, 5), SamplingParams(max_new_tokens=10))
    engine.step()
    engine.step()
    assert decodes.output_ids
    engine.abort(decodes)
    ended = engine.submit(drawn(4, 5), SamplingParams(max_new_tokens=2))
    engine.run()
    engine.abort(ended)
    states = [request.state for request in (long, waits, decodes, ended)]
    assert [State.ABORTED] * 3 + [State.FINISHED] == states
    assert engine.cache.stats().pages_live == 0
    assert engine.step() is False


def test_abort_from_the_callback(stories: LoadedModel):
    """A listener may abort its request with the token that it is given."""
    engine = make(stories, 16)
    heard: list[int] = []

    def listen(request: Request, token: int) -> None:
        heard.append(token)
        if len(heard) == 3:
            engine.abort(request)

    request = engine.submit(drawn(1, 9), SamplingParams(max_new_tokens=20), on_token=listen)
    engine.run()
    assert request.aborted
    assert heard == request.output_ids
    assert engine.cache.stats().pages_live == 0


# --- one request -----------------------------------------------------------------------------------------------------


def test_tokens_are_streamed(stories: LoadedModel):
    """The callback hears every token, in order, when it is sampled."""
    engine = make(stories, 16)
    heard: list[int] = []
    request = engine.submit(
        drawn(1, 9), SamplingParams(max_new_tokens=12), on_token=lambda _, token: heard.append(token)
    )
    while engine.step():
        assert heard == request.output_ids
    assert len(heard) == 12
    assert request.ttft_ns > 0


def test_ends(stories: LoadedModel):
    """A request ends at its stop id, which it keeps, or at max_new_tokens."""
    ids = drawn(1, 9)
    whole = alone(stories, ids, SamplingParams(max_new_tokens=12))
    engine = make(stories, 16)
    stopped = engine.submit(ids, SamplingParams(max_new_tokens=12, stop_ids=(whole[5], 511)))
    one = engine.submit(ids, SamplingParams(max_new_tokens=1))
    engine.run()
    assert whole[: whole.index(whole[5]) + 1] == stopped.output_ids
    assert stopped.finish_reason == "stop"
    assert whole[:1] == one.output_ids
    assert one.finish_reason == "length"


def test_a_session_reuses_what_was_generated(stories: LoadedModel):
    """Each turn matches all full pages of the turn before, generated ones too, but for the token without KV."""
    engine = make(stories, 64)
    ids = drawn(1, 10)
    computed = 0
    for turn in range(4):
        request = engine.submit(ids, SamplingParams(max_new_tokens=7))
        engine.run()
        assert (computed // PAGE) * PAGE == request.matched_len
        ids = ids + request.output_ids
        computed = len(ids) - 1
        ids = ids + drawn(50 + turn, 5)


def test_a_full_last_page_is_not_stored(stories: LoadedModel):
    """A sequence that ends on a page boundary leaves its last page out: its last token has no KV."""
    engine = make(stories, 16)
    ids = drawn(1, 2 * PAGE)
    request = engine.submit(ids, SamplingParams(max_new_tokens=2 * PAGE))
    engine.run()
    assert 3 == engine.cache.stats().pages_stored
    longer = engine.submit(ids + request.output_ids + [5], SamplingParams(max_new_tokens=1))
    engine.run()
    assert 3 * PAGE == longer.matched_len


def test_requests_in_flight_share(stories: LoadedModel):
    """With index_at="seal" a request finds the pages of one that still runs; with "finish" it does not."""
    ids = drawn(1, 40)
    matched = {}
    for index_at in ("seal", "finish"):
        engine = make(stories, 64, index_at=index_at)
        engine.submit(ids, SamplingParams(max_new_tokens=20))
        engine.step()
        second = engine.submit(ids, SamplingParams(max_new_tokens=1))
        engine.run()
        matched[index_at] = second.matched_len
    assert {"seal": 36, "finish": 0} == matched


def test_salt_and_opt_outs(stories: LoadedModel):
    """Another salt finds nothing; a request that opts out takes nothing, or leaves nothing."""
    engine = make(stories, 64)
    ids, one = drawn(1, 20), SamplingParams(max_new_tokens=1)

    def matched(**asked: object) -> int:
        request = engine.submit(ids, one, **asked)  # type: ignore[arg-type]
        engine.run()
        return request.matched_len

    assert 0 == matched(store=False)
    assert 0 == matched()
    assert 16 == matched()
    assert 0 == matched(salt=b"other", store=False)
    assert 0 == matched(reuse=False)


def test_engine_without_a_cache(stories: LoadedModel):
    """With reuse and store off nothing is matched or kept, and the output is the same."""
    ids = drawn(1, 30)
    engine = make(stories, 32, reuse=False, store=False)
    outputs = []
    for _ in range(2):
        request = engine.submit(ids, SamplingParams(max_new_tokens=6))
        engine.run()
        assert request.matched_len == 0
        outputs.append(request.output_ids)
    stats = engine.cache.stats()
    assert (0, 0, 32) == (stats.pages_stored, stats.matched_tokens, stats.pages_free)
    kept = make(stories, 32)
    request = kept.submit(ids, SamplingParams(max_new_tokens=6))
    kept.run()
    assert [request.output_ids] * 2 == outputs


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["strict", "fast"])
def test_what_free_pages_hold_does_not_matter(stories: LoadedModel, arithmetic: str):
    """Pages that hold NaN before they are handed out change no output: masked positions are blanked."""
    prompts = [drawn(number, 21 + 9 * number) for number in range(4)]
    outputs = []
    for poison in (0.0, float("nan")):
        engine = make(stories, 60, arithmetic=arithmetic)
        engine.pool.kv.fill_(poison)
        requests = [engine.submit(ids, SamplingParams(max_new_tokens=12)) for ids in prompts]
        engine.run()
        outputs.append([request.output_ids for request in requests])
    assert outputs[0] == outputs[1]


def test_only_computed_positions_are_written(stories: LoadedModel):
    """A forward writes the positions it computes and nothing else: no padding row reaches a page."""
    engine = make(stories, 24, arithmetic="strict", page_size=8)
    engine.pool.kv.fill_(7.0)
    seen: list[tuple[list[int], int]] = []
    engine.on_forward = lambda request, start, end, logits: seen.append((list(request.held.pages), end))
    engine.submit(drawn(1, 21), SamplingParams(max_new_tokens=9))
    engine.submit(drawn(2, 3), SamplingParams(max_new_tokens=9))
    engine.run()
    written = torch.zeros(24, 8, dtype=torch.bool)
    for pages, end in seen:
        for position in range(end):
            written[pages[position // 8], position % 8] = True
    touched = (engine.pool.kv != 7.0).any(dim=-1).any(dim=-1)  # [pages, layers, 2, page_size]
    assert torch.equal(written[:, None, None, :].expand_as(touched), touched)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "new", "says"),
    [
        ([], 1, "0 tokens"),
        ([512], 1, "token id 512"),
        ([-1], 1, "-1"),
        ([1.5], 1, "integer"),
        ([5] * 60, 5, "16 pages of 4"),
        ([5] * 10, 55, "16 pages of 4"),
    ],
)
def test_refused_requests(stories: LoadedModel, ids: list[int], new: int, says: str):
    """A request that could never run is refused at submission, in one line, and leaves nothing behind."""
    engine = make(stories, 16)
    with pytest.raises(BadInput, match=says) as caught:
        engine.submit(ids, SamplingParams(max_new_tokens=new))
    assert "\n" not in str(caught.value)
    assert engine.step() is False
    assert engine.cache.stats().pages_free == 16


def test_a_request_beyond_the_models_positions(stories: LoadedModel):
    """More positions than the model was made for are refused, whatever the pool."""
    engine = make(stories, 200)
    with pytest.raises(BadInput, match="512 positions"):
        engine.submit([5] * 500, SamplingParams(max_new_tokens=13))
    engine.submit([5] * 500, SamplingParams(max_new_tokens=12))


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"pool_pages": 0},
        {"chunk_tokens": 0},
        {"max_batch": 0},
        {"threads": 0},
        {"arithmetic": "exact"},
    ],
)
def test_wrong_settings(wrong: dict[str, object]):
    """A setting out of range is refused with its name."""
    with pytest.raises(BadInput, match=next(iter(wrong))):
        EngineConfig(**wrong)  # type: ignore[arg-type]
