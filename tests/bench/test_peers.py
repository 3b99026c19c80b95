"""`kvkeep bench peers`: everybody has the same requests, who is absent is said, and ratios are theirs over ours.

Processes here are real ones of ours; vLLM, SGLang and LMCache are asked in the slow test, where they are installed.
Must not judge a time: that is the bench's own business.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from bench._requests import Requests
from bench._workload import agent_workload
from bench.peers.comparing import Case, Found, Results, Round, best_possible
from bench.peers.judging import metrics, rows, table
from bench.peers.plans import PAGE, SMOKE, Sizes, plan
from bench.peers.processes import OURS, PLACES, ROOT, Absent, Peer, Place
from kvkeep.benching import run_bench
from kvkeep.benching.cases import left_out, load_case
from kvkeep.errors import BadInput
from kvkeep.report import Report

TINY = Sizes(sessions=2, turns=2, chains=2, pages=4, pool_pages=16, cold=4)
TWIN = Place("twin", "bench.peers.ours", None, ("twin",))
W1 = Case("w1", "w1", 2, ("kvkeep", "kvkeep_lru", "twin"), tokens=64_000)


def quiet(_: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A smoke run where no peer is installed."""
    return run_bench("peers", ["--smoke", "--environments", str(tmp_path_factory.mktemp("nowhere"))])


@pytest.fixture
def alone() -> "Any":
    """A process of ours."""
    peer = Peer(OURS)
    yield peer
    peer.end()


# ---------------------------------------------------------------------- requests


def test_w1_is_the_agent_workload_to_the_last_token():
    """The requests that other figures of W1 were measured with, and a checksum of every id."""
    work, workload = plan("w1", Sizes()), agent_workload()
    assert 45_611_047 == work.prompt_tokens == workload.prompt_tokens
    assert workload.turns == work.turns and 0 == work.warm
    assert "691f50f6ecdf8053" == work.checksum()


def test_a_checksum_tells_every_change_of_the_requests():
    """One id, one length, how many are timed."""
    work = plan("match", TINY)
    seen = {work.checksum(), plan("insert", TINY).checksum(), plan("evict", TINY).checksum()}
    work.ids[0][-1] += 1
    seen.add(work.checksum())
    assert 4 == len(seen)


def test_the_best_possible_is_the_ceiling_with_room_and_less_without():
    """A pool for all distinct tokens matches what a cache that never evicts does; a small one less, and LRU no more."""
    workload = agent_workload(sessions=6, turns=4)
    work = plan("w1", Sizes(sessions=6, turns=4))
    assert workload.ceiling(PAGE) == pytest.approx(best_possible(work, 1_000_000) / work.prompt_tokens)
    small = Requests(workload, 20_000)
    small.sample()
    assert sum(small.matched) <= best_possible(work, 20_000) < best_possible(work, 1_000_000)


# ---------------------------------------------------------------------- a process that is asked


def test_a_process_matches_what_the_cache_matches_here(alone: Peer):
    """The same requests, in parts, as in this process; the untimed ones are neither timed nor counted."""
    here = Requests(agent_workload(sessions=2, turns=2), 64_000)
    here.sample()
    asked = alone.ask({"do": "plan", "case": "w1", "sizes": asdict(TINY)})
    assert {"checksum": plan("w1", TINY).checksum(), "requests": 4} == asked
    assert {} == alone.ask({"do": "open", "variant": "kvkeep_lru", "tokens": 64_000, "host_tokens": 0})
    parts = [alone.ask({"do": "serve", "variant": "kvkeep_lru", "until": until}) for until in (1, 4)]
    assert here.matched == [tokens for part in parts for tokens in part["matched"]]
    assert [1, 3] == [len(part["us"]) for part in parts]
    assert all(us > 0 for part in parts for us in part["us"])
    asked = alone.ask({"do": "plan", "case": "match", "sizes": asdict(TINY)})
    alone.ask({"do": "open", "variant": "kvkeep_lru", "tokens": 64_000, "host_tokens": 0})
    again = alone.ask({"do": "serve", "variant": "kvkeep_lru", "until": asked["requests"]})
    assert [4 * PAGE] * 4 == again["matched"]


def test_two_tiers_bring_back_from_host_memory_what_the_first_lost(alone: Peer):
    """Both tiers together match what one that holds everything does."""
    workload = agent_workload(sessions=4, turns=3)
    alone.ask({"do": "plan", "case": "w1", "sizes": asdict(SMOKE)})
    alone.ask({"do": "open", "variant": "kvkeep_lru", "tokens": 16_000, "host_tokens": 64_000})
    found = alone.ask({"do": "serve", "variant": "kvkeep_lru", "until": 12})
    assert sum(found["host"]) > 0
    assert workload.ceiling(PAGE) == pytest.approx(
        (sum(found["matched"]) + sum(found["host"])) / workload.prompt_tokens
    )


def test_whoever_has_other_requests_leaves_the_table():
    """A peer whose checksum is another one is not compared; its column says why."""

    class Astray(Peer):
        def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
            if what["do"] == "plan" and self.place is TWIN:
                what = {**what, "sizes": asdict(SMOKE)}
            return super().ask(what)

    found = _run(Astray)
    assert "it has other requests" in found.absent["twin"]
    assert {"kvkeep", "kvkeep_lru"} == found.found["w1"].keys()


def test_a_peer_that_ends_on_the_way_leaves_and_the_others_go_on():
    """Its column says how it ended; the rounds of the others are whole."""

    class Ending(Peer):
        def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
            if what["do"] == "serve" and self.place is TWIN:
                self._process.kill()
            return super().ask(what)

    found = _run(Ending)
    assert "exit code -9" in found.absent["twin"]
    assert {"kvkeep", "kvkeep_lru"} == found.found["w1"].keys()
    assert [4, 4] == [len(us) for us in found.found["w1"]["kvkeep"].us]


def test_a_peer_whose_package_does_not_load_is_absent_with_its_last_words():
    """And one that is silent for too long is, as well."""
    lost = Peer(Place("lost", "bench.peers.no_such_module", None, ("lost",)))
    with pytest.raises(Absent, match=r"exit code 1.*No module named"):
        lost.hello()
    lost.end()
    slow = Peer(TWIN, answer_s_max=0.001)
    with pytest.raises(Absent, match="did not answer"):
        slow.hello()
    slow.end()


def _run(start: Callable[[Place], Peer]) -> Results:
    """W1 with ours and a twin of ours as the peer."""
    around = Round([TWIN], quiet, start)
    try:
        around.run(W1, TINY)
    finally:
        around.end()
    return around.results


# ---------------------------------------------------------------------- figures


def test_a_ratio_is_theirs_over_ours_and_held_against_its_limit():
    """Medians of the same rounds: a peer that takes 13 times as long reaches 12, one that takes 3 times misses 4."""
    ours, default = Found([[10.0, 10.0], [20.0, 20.0]], 500), Found([[20.0, 20.0], [40.0, 40.0]], 600)
    vllm, rust = Found([[130.0, 130.0], [260.0, 260.0]], 500), Found([[30.0, 30.0], [60.0, 60.0]], 400, 100)
    peers = {"vllm": "vllm", "sglang_rust": "sglang", "lmcache": "lmcache"}
    found = {"kvkeep_lru": ours, "kvkeep": default, "vllm": vllm, "sglang_rust": rust}
    results = Results({"w1": found}, absent={"lmcache": "it is not here"}, checksums={"w1": "abc"})
    results.prompt_tokens, results.best = {"w1": 1000}, {"w1": 900}
    cases = [Case("w1", "w1", 2, ("kvkeep", "kvkeep_lru", *peers), tokens=4_000_000)]
    figures = metrics(cases, peers, results)
    assert (13.0, 3.0) == (figures["w1_ratio_vllm"].value, figures["w1_ratio_sglang_rust"].value)
    assert 6.5 == figures["w1_ratio_vllm_default"].value
    assert figures["w1_ratio_vllm"].interval == (13.0, 13.0)
    assert figures["w1_ratio_lmcache"].value is None
    shares = [figures[f"w1_matched_{who}"].value for who in ("best", "kvkeep", "vllm", "sglang_rust")]
    assert [0.9, 0.6, 0.5, 0.5] == shares
    made = rows(cases, peers, results, figures)
    judged = {row["metric"]: row["reached"] for row in made if "reached" in row}
    assert {"w1_ratio_vllm": True, "w1_ratio_sglang_rust": False} == judged
    [absent] = [row for row in made if row.get("variant") == "lmcache"]
    assert "it is not here" == absent["reason"]
    assert "lmcache: none: it is not here" in list(table(cases, peers, results))


def test_without_any_peer_ours_is_measured_and_each_column_says_why_it_is_empty(smoke: Report):
    """The ratios have no value, never a made-up one; nothing is missed, as nothing could be judged."""
    assert smoke.ok
    for name in ("w1_ratio_vllm", "w1_ratio_sglang_rust", "w1_ratio_lmcache", "tier_ratio_vllm"):
        assert smoke.metrics[name].value is None
    for case in ("w1", "match", "insert", "evict", "tier"):
        for variant in ("kvkeep", "kvkeep_lru"):
            value = smoke.metrics[f"{case}_us_{variant}"].value
            assert value is not None and value > 0
    assert smoke.metrics["w1_matched_kvkeep"].value == smoke.metrics["w1_matched_best"].value
    reasons = {row["peer"]: str(row["reason"]) for row in smoke.rows if "peer" in row}
    assert {place.name for place in PLACES} == reasons.keys()
    assert all("make bench-peers" in reason for reason in reasons.values())
    json.dumps(smoke.to_json(), allow_nan=False)


def test_bench_all_leaves_it_out_and_says_why():
    """It needs environments of its own."""
    assert "make bench-peers" in str(left_out(load_case("peers"), smoke=True))


@pytest.mark.parametrize("options", [["--only", "tensorrt"], ["--rounds", "0"], ["--environments", "nowhere"]])
def test_bad_options_are_refused(options: list[str]):
    """One line that says what would be right."""
    with pytest.raises(BadInput, match=options[0]):
        run_bench("peers", options)


@pytest.mark.slow
def test_every_manager_that_is_installed_matches_the_same_where_there_is_room():
    """Their hits are ours, to the token; in two tiers as well, where they have them."""
    here = [place.name for place in PLACES if (ROOT / str(place.environment) / "ready").is_file()]
    if not here:
        pytest.skip("no environment of a peer is here: make bench-peers")
    report = run_bench("peers", ["--smoke", "--only", ",".join(here)])
    assert {None} == {row["reason"] for row in report.rows if "peer" in row}
    for case in ("w1", "tier"):
        shares = {metric.value for name, metric in report.metrics.items() if name.startswith(f"{case}_matched_")}
        assert 1 == len(shares), shares
    checksums = {(row["case"], row["checksum"]) for row in report.rows if "checksum" in row}
    assert 5 == len(checksums)
