"""`kvkeep bench vllm_load` without vLLM: its cases, the open loop over HTTP, figures and verdicts.

Must not need vLLM: the run over real servers is in tests/integrations/test_vllm_load.py.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench._load import Arrivals, Served, Slo, recorded
from bench._vllm_load_cases import (
    LoadCase,
    MooncakeShape,
    PrefixShape,
    SampledShape,
    mooncake_replay,
    mooncake_trace,
    prefix_caching,
    prefix_sampled,
    synthetic_lines,
)
from bench._vllm_load_found import ALONE, KVKEEP, Found, LoadPass, Probe
from bench._vllm_load_judging import judge, metrics, rows, table
from bench._vllm_load_sending import Outcome, send
from bench._vllm_workloads import Ask, block_names
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.replay.formats import read_trace

BLOCK = 128
PREFIX = PrefixShape(prefixes=5, repeats=4, prefix_tokens=300, suffix_min=10, suffix_max=90, new_tokens=3)
SAMPLED = SampledShape(prompts=40, repeats=2, tokens_min=100, tokens_max=1600, new_tokens=3)
MOONCAKE = MooncakeShape(4, 3, prompt_max=8192, within_s=900.0, block_tokens=64, output_over=64, new_tokens_max=6)


# ---------------------------------------------------------------------- cases


def test_prefixes_come_as_often_as_they_are_said_to():
    """Each prefix so many times, its suffixes within their bounds and all different, the order shuffled; what a cache
    can match is the full blocks of the prefix, each time but the first."""
    case = prefix_caching(PREFIX, seed=1)
    assert dict.fromkeys(range(5), 4) == Counter(ask.session for ask in case.asks)
    for session in range(5):
        prompts = [ask.prompt for ask in case.asks if ask.session == session]
        assert 1 == len({prompt[:300] for prompt in prompts}) and 4 == len({prompt[300:] for prompt in prompts})
        assert all(310 <= len(prompt) <= 390 for prompt in prompts)
        assert [0, 1, 2, 3] == [ask.turn for ask in case.asks if ask.session == session]
    assert 5 == len({ask.prompt[:1] + ask.prompt[1:300] for ask in case.asks})
    assert [ask.session for ask in case.asks] != sorted(ask.session for ask in case.asks)
    assert [ask.session for ask in case.asks] != [0, 1, 2, 3, 4] * 4
    assert 5 * 3 * 256 / case.prompt_tokens == pytest.approx(case.ceiling_share(BLOCK))


def test_sampled_prompts_come_again_as_they_are():
    """Lengths within their bounds, as many short ones as long ones by their logarithms; each prompt twice."""
    case = prefix_sampled(SAMPLED, seed=1)
    assert [2] * 40 == list(Counter(ask.prompt for ask in case.asks).values())
    lengths = [len(ask.prompt) for ask in case.asks]
    assert 100 <= min(lengths) and max(lengths) <= 1600
    assert 0.35 <= sum(length <= 400 for length in lengths) / len(lengths) <= 0.65


@pytest.mark.parametrize(
    "make",
    [
        lambda seed, folder: prefix_caching(PREFIX, seed),
        lambda seed, folder: prefix_sampled(SAMPLED, seed),
        lambda seed, folder: mooncake_replay(mooncake_trace(None, folder, seed), MOONCAKE, seed),
    ],
    ids=["prefix_caching", "prefix_sampled", "mooncake_replay"],
)
def test_a_seed_makes_the_same_case_again(make: Callable[[int, Path], LoadCase], tmp_path: Path):
    """The checksum of all that is sent is that of the seed; another seed, output length or time has another one."""
    case = make(3, tmp_path)
    assert case.digest() == make(3, tmp_path).digest() != make(4, tmp_path).digest()
    assert case.digest() != replace(case, new_tokens=(*case.new_tokens[:-1], 99)).digest()
    assert case.digest() != replace(case, times_s=tuple(float(at) for at in range(len(case.asks)))).digest()


#: Full blocks of requests, and when they came, in ms: two conversations of two rounds, one that is too long, one that
#: goes on too late, a request that belongs to none.
LINES = (
    (0, (0, 1, 2)),
    (1000, (0, 7, *range(20, 40))),
    (2000, (0, 4)),
    (2000, (0, 1, 2, 3)),
    (3000, (0, 9)),
    (4000, (0, 4, 5)),
    (5000, (0, 7, *range(20, 41))),
    (6000, (0, 8)),
    (9000, (0, 8, 10)),
)


def written(folder: Path) -> Path:
    path = folder / "some.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids) + 256, "output_length": 100 + at, "hash_ids": [*ids, 900 + n]}
        for n, (at, ids) in enumerate(LINES)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_conversations_of_a_trace_are_asked_as_they_came(tmp_path: Path):
    """Those that fit and have their rounds in time, in the order and at the times of the trace; prompts share as many
    blocks, of 64 tokens each, as they share ids, and what is left over is no other's; outputs are shortened."""
    shape = replace(MOONCAKE, conversations=2, rounds=2, prompt_max=4096, within_s=8.0)
    case = mooncake_replay(read_trace(written(tmp_path)), shape, seed=2)
    assert [(0, 0), (1, 0), (0, 1), (1, 1)] == [(ask.session, ask.turn) for ask in case.asks]
    assert ((0.0, 2.0, 2.0, 4.0), (2, 6, 6, 6)) == (case.times_s, case.new_tokens)
    assert "some.jsonl: 2 conversations of 2 rounds" in case.what
    ids = [(0, 1, 2), (0, 4), (0, 1, 2, 3), (0, 4, 5)]
    assert [64 * len(blocks) + 32 for blocks in ids] == [len(ask.prompt) for ask in case.asks]
    for one, ours in zip(case.asks, ids, strict=True):
        for other, theirs in zip(case.asks, ids, strict=True):
            names = [block_names(ask.prompt, 64) for ask in (one, other)]
            assert len(set(ours) & set(theirs)) == len(set(names[0]) & set(names[1]))
    assert 4 == len({ask.prompt[-32:] for ask in case.asks})
    with pytest.raises(BadInput, match=r"some.jsonl: its first 8 s have 2 conversations of 2 rounds.*; 3 are needed"):
        mooncake_replay(read_trace(written(tmp_path)), replace(shape, conversations=3), seed=2)


def test_the_recorded_trace_is_taken_where_it_is(shared_dir: Path, tmp_path: Path):
    """By its name; what its conversations share can be matched."""
    case = mooncake_replay(mooncake_trace(shared_dir / "traces", tmp_path, 0), MOONCAKE, seed=0)
    assert case.what.startswith("mooncake_conversation.jsonl.gz: 4 conversations of 3 rounds")
    assert [3] * 4 == list(Counter(ask.session for ask in case.asks).values()) and 0.3 < case.ceiling_share(64)


def test_trace_that_is_made_up_says_so_and_has_the_same_form(tmp_path: Path):
    """Lines have the fields of a Mooncake trace, ids enough for their length, times that do not fall, a first block
    that all share; the name that is told says that it is synthetic."""
    made = list(synthetic_lines(6, 3, seed=1))
    assert {("timestamp", "input_length", "output_length", "hash_ids")} == {tuple(line) for line in made}
    for line in made:
        assert isinstance(line["hash_ids"], list) and isinstance(line["input_length"], int)
        assert len(line["hash_ids"]) == -(-line["input_length"] // 512) and 0 == line["hash_ids"][0]
    times = [line["timestamp"] for line in made]
    assert times == sorted(times, key=lambda at: int(str(at)))
    case = mooncake_replay(mooncake_trace(None, tmp_path, 1), MOONCAKE, seed=1)
    assert "synthetic" in case.what and 0.2 < case.ceiling_share(64)


def test_trace_arrivals_keep_their_gaps():
    """What was recorded comes as recorded, faster as a whole; what was not comes by chance, from a seed."""
    asks = tuple(Ask(0, turn, (1, 2)) for turn in range(3))
    timed = LoadCase("some", "made up", asks, (1, 1, 1), (10.0, 40.0, 50.0))
    assert recorded((10.0, 40.0, 50.0), 2.0) == timed.arrivals(2.0, 0) == timed.arrivals(2.0, 1)
    untimed = replace(timed, times_s=None)
    assert untimed.arrivals(2.0, 0) == untimed.arrivals(2.0, 0) != untimed.arrivals(2.0, 1)


# ---------------------------------------------------------------------- the open loop


class Server:
    """Streams completions as vLLM does.  Every answer waits until `hold` lets it go on."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[dict[str, Any]] = []
        self.peers: list[object] = []
        self.hold = asyncio.Event()
        self.at_once = self._now = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        self.peers.append(request.transport and request.transport.get_extra_info("peername"))
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        await self.hold.wait()
        if self.broken == "status":
            return web.Response(status=400, text="too long")
        response = web.StreamResponse()
        await response.prepare(request)
        count = asked["max_tokens"] - (self.broken == "short")
        for token in range(count):
            await self._event(response, {"choices": [{"text": "x", "token_ids": [asked["prompt"][0] + token]}]})
            if self.broken == "error" and token == 1:
                await self._event(response, {"error": {"message": "engine died"}})
                return response
            if self.broken == "cut" and token == 1:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0.005)
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": {"cached_tokens": 1}}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self._now -= 1
        return response

    async def _event(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sent(server: Server, due_s: Sequence[float], wanted: int = 3, hold_s: float = 0.0) -> list[Outcome]:
    """What comes of requests to a server that answers none before `hold_s` after the last has reached it."""
    prompts = [(100 * number, 1) for number in range(len(due_s))]

    async def ask() -> list[Outcome]:
        async with running(server) as url:

            async def let_go() -> None:
                while len(server.asked) < len(due_s):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(hold_s)
                server.hold.set()

            async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                group.create_task(let_go())
                asking = group.create_task(
                    send(url, "model", prompts, [wanted] * len(due_s), Arrivals(tuple(due_s), ""))
                )
            return asking.result()

    return asyncio.run(ask())


def test_requests_are_sent_when_due_whoever_waits():
    """A server that answers nobody before the last has come is asked by all, 120 at once: nobody waits for another."""
    server = Server()
    outcomes = sent(server, [0.001 * number for number in range(120)])
    assert 120 == len(server.asked) == server.at_once
    assert [] == [one.failure for one in outcomes if one.failure]
    assert all(one.served.sent_s is not None and one.served.sent_s >= one.served.due_s for one in outcomes)
    assert [[100 * n, 100 * n + 1, 100 * n + 2] for n in range(120)] == [one.token_ids for one in outcomes]


def test_latency_counts_from_when_a_request_was_due():
    """What a server stands still for is in the latency of all who were due before; tokens keep their own times."""
    first, second = sent(Server(), [0.0, 0.05], hold_s=0.2)
    assert first.served.ttft_s >= 0.25 > 0.2 <= second.served.ttft_s
    assert first.served.ttft_s == first.served.tokens_s[0] and 0.05 == second.served.due_s
    for one in (first, second):
        assert one.served.whole and all(gap > 0 for gap in one.served.itl_s)
        assert (2, 1) == (one.prompt_tokens, one.cached_tokens)


def test_no_connection_is_used_again():
    """A server closes those that are idle, at a moment that nobody knows: the request on it would fail."""
    server = Server()
    server.hold.set()
    sent(server, [0.0, 0.1, 0.2, 0.3])
    assert 4 == len(set(server.peers))


def test_a_greedy_stream_of_exactly_so_many_tokens_is_asked_for():
    """Else outputs could not be compared, nor their times."""
    server = Server()
    sent(server, [0.0], wanted=5)
    expected = {"prompt": [0, 1], "max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "stream": True}
    assert expected.items() <= server.asked[0].items()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("status", "StreamBroken: status 400: too long"),
        ("short", "StreamBroken: 2 tokens came, not 3"),
        ("error", "StreamBroken: the stream says .*engine died"),
        ("cut", "Client.*Error"),
    ],
)
def test_what_fails_is_said_at_its_request(broken: str, said: str):
    """Every way to fail is told, in words, and stops nothing else."""
    outcomes = sent(Server(broken), [0.0, 0.01])
    assert 2 == len(outcomes)
    for one in outcomes:
        assert pytest.raises(AssertionError, match=said).matches(AssertionError(one.failure))


# ---------------------------------------------------------------------- figures, verdicts

ASKS = tuple(Ask(0, turn, tuple(range(300))) for turn in range(4))
CASE = LoadCase("some", "made up", ASKS, (2,) * 4)
SLO = Slo(ttft_s=1.0, itl_s=0.5)


def one_pass(configuration: str, ttft_s: Sequence[float], hits: float = 0.0, failed: Sequence[int] = ()) -> LoadPass:
    """Requests due each second; the second token comes 0.1 s after the first."""
    outcomes = []
    for number, first in enumerate(ttft_s):
        served = Served(number, float(number), 2, float(number), [number + first, number + first + 0.1])
        outcomes.append(Outcome(served, [1, number], 300, 0, "cut" if number in failed else ""))
    arrivals = Arrivals(tuple(float(number) for number in range(len(ttft_s))), "each second")
    return LoadPass("some", configuration, 0, arrivals, outcomes, 0.0, hits, 1.0, 5.0, 300.0)


PROBE = Probe({ALONE: [1], KVKEEP: [1]}, {ALONE: [2], KVKEEP: [2]}, {ALONE: 128, KVKEEP: 128}, 128.0)


def found(*passes: LoadPass, probes: Sequence[Probe] = (PROBE,), bad_lines: Sequence[str] = ()) -> Found:
    return Found(9, 0.5, passes=list(passes), probes=list(probes), bad_lines=list(bad_lines))


FULL_HITS = 3 * 256.0
GOOD = found(one_pass(ALONE, (2.0, 2.0, 0.5, 2.0)), one_pass(KVKEEP, (1.0, 0.5, 0.5, 0.5), FULL_HITS))


def missed(what: Found) -> list[str]:
    made = metrics([CASE], what, BLOCK, SLO)
    return [str(row["metric"]) for row in judge([CASE], made) if not row["reached"]]


def test_figures_are_those_of_the_passes():
    """Time to first token from when a request was due, of equal requests against each other; goodput at the SLO;
    throughput up to the last token; hits of all prompt tokens, against what can be matched."""
    made = {name: metric.value for name, metric in metrics([CASE], GOOD, BLOCK, SLO).items()}
    assert (2.0, 0.5, 4.0) == tuple(made[f"some_{name}"] for name in ("alone_ttft_s", "kvkeep_ttft_s", "ttft_ratio"))
    assert (0.25, 1.0, 4.0) == tuple(
        made[f"some_{name}"] for name in ("alone_goodput_per_s", "kvkeep_goodput_per_s", "goodput_ratio")
    )
    assert (round(1208 / 5.1, 1), round(1208 / 3.6, 1)) == (
        made["some_alone_throughput"],
        made["some_kvkeep_throughput"],
    )
    assert (0.0, round(768 / 1200, 4), 1.0) == tuple(
        made[f"some_{name}"] for name in ("alone_hit_share", "kvkeep_hit_share", "of_ceiling")
    )
    assert 1.0 == made["some_texts_same"] and [] == missed(GOOD)


def test_who_fails_has_not_met_the_slo_and_is_an_error():
    """However fast its tokens came until then; its times are left out, and the run has missed a limit."""
    kept = one_pass(KVKEEP, (0.1, 0.5, 0.5, 0.5), FULL_HITS, failed=[0])
    what = found(GOOD.passes[0], kept)
    made = metrics([CASE], what, BLOCK, SLO)
    assert (0.75, 1, 3) == (
        made["some_kvkeep_goodput_per_s"].value,
        made["errors"].value,
        made["some_kvkeep_ttft_s"].samples,
    )
    assert ["errors"] == missed(what)
    nobody = found(*(one_pass(name, (1.0,) * 4, FULL_HITS, failed=range(4)) for name in (ALONE, KVKEEP)))
    assert metrics([CASE], nobody, BLOCK, SLO)["some_ttft_ratio"].value is None


def test_every_promise_that_is_broken_is_a_limit_missed():
    """Texts without load that differ, cold or from the tier; a tier that brought nothing; hits far below what can be
    matched; errors in a log."""
    differing = replace(PROBE, again={ALONE: [2], KVKEEP: [3]})
    assert ["probe_texts_apart"] == missed(found(*GOOD.passes, probes=[PROBE, differing]))
    differing = replace(PROBE, first={ALONE: [2], KVKEEP: [3]})
    assert ["probe_texts_apart"] == missed(found(*GOOD.passes, probes=[differing]))
    idle = replace(PROBE, external_tokens=0.0)
    assert ["probe_external_tokens"] == missed(found(*GOOD.passes, probes=[PROBE, idle]))
    few = one_pass(KVKEEP, (0.5,) * 4, hits=2 * 256.0)
    assert ["some_of_ceiling"] == missed(found(GOOD.passes[0], few))
    assert ["log_errors"] == missed(found(*GOOD.passes, bad_lines=["ERROR"]))


def test_rows_tell_each_pass_each_request_and_what_is_left_out():
    """Two passes of four requests, a probe, why SGLang is not there, and a table with a line a pass."""
    every = list(rows([CASE], GOOD, SLO))
    assert {"load": 2, "probe": 1, "request": 8, "left out": 1} == Counter(row["series"] for row in every)
    [sglang] = [row for row in every if row["series"] == "left out"]
    assert "sglang" == sglang["config"] and "needs a GPU" in str(sglang["reason"])
    assert [1, 4] == [row["slo_met"] for row in every if row["series"] == "load"]
    assert 3 == len(list(table(every)))


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--case", "nope"],
            "--case nope: there is no such case; known: prefix_caching, prefix_sampled, mooncake_replay",
        ),
        (["--case", ","], r"--case \(none\)"),
        (["--load", "0"], "--load 0.0: it must be a number above 0"),
        (["--slo-ttft", "-1"], "--slo-ttft -1.0: it must be a number above 0"),
        (["--repeats", "0"], "--repeats 0: it must be 1 or more"),
        (["--seed", "-1"], "--seed -1: it must be 0 or more"),
        (["--traces", "nowhere"], "--traces nowhere: there is no such folder"),
    ],
)
def test_options_that_are_wrong_are_said_in_one_line(arguments: list[str], said: str):
    """What was wrong and what would be right."""
    with pytest.raises(BadInput, match=said):
        run_bench("vllm_load", arguments)
