"""What a recorded engine tells: held against what the engine and its cache count themselves."""

from pathlib import Path

import pytest

from kvkeep.engine.engine import Engine, EngineConfig, Request, SamplingParams
from kvkeep.engine.loader import LoadedModel
from kvkeep.telemetry.chrome import Span, Trace, check, read_trace
from kvkeep.telemetry.trace import Recorder, recording

PROMPT, PAGE = 90, 16


class Recorded:
    """An engine with two tiers in a pool too small for its sessions, and the trace of it."""

    def __init__(self, model: LoadedModel) -> None:
        recorder = Recorder()
        with recording(recorder):
            self.engine = Engine(model, EngineConfig(page_size=PAGE, pool_pages=14, host_pages=8, chunk_tokens=32))
        self.requests: list[Request] = []
        for turn in range(2):
            for session in range(3):
                ids = [(7 * session + number) % 500 for number in range(PROMPT + 20 * turn)]
                self.requests.append(self.engine.submit(ids, SamplingParams(max_new_tokens=4), salt=bytes([session])))
            self.engine.run()
        assert self.engine._below is not None
        self.moved = self.engine._below.transfers.stats()
        self.stats = self.engine.cache.stats()
        self.engine.close()
        found = recorder.to_json()
        assert [] == check(found)
        self.trace: Trace = read_trace(Path("trace.json"), found)

    def spans(self, name: str) -> list[Span]:
        return [span for span in self.trace.spans() if span.name == name]


@pytest.fixture(scope="module")
def recorded(stories: LoadedModel) -> Recorded:
    return Recorded(stories)


def test_each_request_is_a_span_from_submission_to_its_end(recorded: Recorded) -> None:
    """And says what was found for it where."""
    for request in recorded.requests:
        (span,) = recorded.spans(f"request {request.number}")
        assert request.ended_ns is not None
        assert pytest.approx((request.ended_ns - request.submitted_ns) / 1e9, abs=1e-5) == span.end - span.begin
        assert request.host_len == span.args["matched_cpu"]
        assert request.matched_len - request.host_len == span.args["matched_gpu"]


def test_stages_of_a_request_fill_its_span_and_prefill_ends_with_the_first_token(recorded: Recorded) -> None:
    """queued, gate where it waited for copies, prefill, decode; one ends where the next begins."""
    for request in recorded.requests:
        own = [s for s in recorded.trace.spans() if s.cat == "request" and s.of == str(request.number)]
        stages = sorted(
            (s for s in own if not s.name.startswith("request") and s.name != "room"), key=lambda s: s.begin
        )
        whole = next(s for s in own if s.name.startswith("request"))
        names = [s.name for s in stages if s.name != "gate"]
        assert ("queued", ["prefill", "decode"]) == (names[0], names[-2:])
        assert pytest.approx(whole.end - whole.begin, abs=1e-5) == sum(s.end - s.begin for s in stages)
        if not request.preemptions:
            assert request.first_token_ns is not None
            decode = next(s for s in stages if s.name == "decode")
            first_s = (request.first_token_ns - request.submitted_ns) / 1e9
            assert pytest.approx(first_s, abs=1e-5) == decode.begin - whole.begin


def test_every_copy_that_was_made_is_a_span(recorded: Recorded) -> None:
    """By direction, as the transfer manager counts them, pages too."""
    for (direction, cause), made in recorded.moved.by.items():
        spans = recorded.spans(f"{direction} {cause}")
        arrived = [span.args["pages"] for span in spans if span.args["ok"]]
        assert (made.copies, made.pages) == (len(arrived), sum(arrived))
    assert any(direction == "h2d" for direction, _ in recorded.moved.by)


def test_pages_that_left_a_tier_are_those_that_came_and_are_not_there(recorded: Recorded) -> None:
    """Of the host tier, which was too small: what copies brought, less what is there at the end."""
    gone = [e["args"] for e in recorded.trace.events if e["ph"] == "i" and e["args"].get("tier") == "host"]
    came = sum(made.pages for (direction, _), made in recorded.moved.by.items() if direction == "d2h")
    assert gone
    assert came - recorded.stats.host_pages_cached == sum(args["pages"] for args in gone)


def test_tokens_of_a_prompt_are_found_or_have_a_cause(recorded: Recorded) -> None:
    """Over all admissions, of requests that were admitted again too."""
    missed = recorded.trace.other["missed_tokens"]["1"]
    found = recorded.stats.matched_gpu_tokens + recorded.stats.matched_host_tokens
    assert recorded.stats.prompt_tokens == found + sum(missed.values())


def test_pages_of_the_pool_add_up_at_every_look(recorded: Recorded) -> None:
    """Live, cached and free."""
    looks = [e["args"] for e in recorded.trace.events if e["ph"] == "C" and e["name"] == "GPU pool [pages]"]
    assert looks
    assert {14} == {sum(look.values()) for look in looks}


def test_engine_that_nobody_records_keeps_no_ledger_and_tells_nobody(stories: LoadedModel) -> None:
    """It costs nothing where it is off."""
    engine = Engine(stories, EngineConfig(page_size=PAGE, pool_pages=8, host_pages=8))
    assert engine.cache.misses() is None
    assert engine._below is not None
    assert engine._below.transfers.watch is None
    engine.close()
