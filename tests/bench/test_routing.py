"""`kvkeep bench routing`: its simulated replicas do what is said of them, and the report has what is promised.

Must not judge a time: that is the bench's own business.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench._replicas import Outcome, Replicas, Speeds, Visit, find_rate, visits
from bench._routes import at_random, by_session, least_loaded, prefix, recorded, round_robin, singles
from bench._routing_cases import fleets
from kvkeep.benching import run_bench
from kvkeep.errors import BadInput
from kvkeep.replay.pages import Pages
from kvkeep.replay.reference import Reference
from kvkeep.replay.seat import TraceClock, make_order
from kvkeep.replay.trace import Request, Trace

SPEEDS = Speeds(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0, overhead_s=1.0)


def made(*lengths: int) -> Pages:
    """A trace of one session a length, whose tokens nobody shares."""
    chains = [np.full(length, number, dtype=np.int32) for number, length in enumerate(lengths)]
    sessions = [[Request(n, n, length - 10, length, length)] for n, length in enumerate(lengths)]
    return Pages(Trace("made", "made", None, chains, sessions, "none"), 10)


def test_a_request_waits_for_those_before_it():
    """Two at once on one replica: the second's first token comes when both prefills are over; on two, neither waits."""
    pages = made(110, 210)
    sessions = [Visit(0.0, session, [0.0]) for session in pages.trace.sessions]
    alone = Replicas(pages, 1, 10_000, speeds=SPEEDS).run([*sessions[:1], sessions[1]], round_robin())
    assert [2.0, 5.0] == alone.ttft_s
    assert [2.0, 3.0] == Replicas(pages, 2, 10_000, speeds=SPEEDS).run(sessions, round_robin()).ttft_s


def test_a_turn_comes_when_its_user_has_thought_and_hits_what_is_there():
    """The next turn begins after decoding and thinking, and computes only what the first did not leave."""
    ids = np.arange(60, dtype=np.int32)
    session = [Request(0, 0, 20, 40, 60), Request(0, 0, 50, 60, 60)]
    pages = Pages(Trace("two turns", "two turns", None, [ids], [session], "none"), 10)
    replicas = Replicas(pages, 1, 1_000, speeds=SPEEDS)
    out = replicas.run([Visit(0.0, session, [0.0, 7.0])], least_loaded())
    # Of the first turn's 40 tokens the last has no KV: three pages are kept, and 20 tokens of the second are new.
    assert [1.2, 1.2] == pytest.approx(out.ttft_s)
    assert (70, 30) == (out.prompt_tokens, out.matched_tokens)
    assert 1.2 + 2.0 + 7.0 + 1.2 == pytest.approx(replicas.clock.now_s)


def test_with_one_replica_all_policies_are_one_cache(shared_dir: Path):
    """The same hits as a replay of the trace over one index, whatever chooses, and no copies."""
    traffic = recorded(shared_dir / "traces", "tau_retail_200", 128, think_s=10.0, sessions=30)
    coming = visits(traffic.sessions, 0.1, think_s=10.0)

    def run(policy: object, *, one_cache: bool = False) -> Outcome:
        return Replicas(traffic.pages, 1, 65_536, one_cache=one_cache, eviction="lru").run(coming, policy)  # type: ignore[arg-type]

    outs = [run(policy) for policy in (at_random(), round_robin(), least_loaded(), by_session(1))]
    outs += [run(prefix(traffic.pages, 1)), run(least_loaded(), one_cache=True)]
    assert 1 == len({(out.matched_tokens, tuple(out.ttft_s), out.copies, out.moves) for out in outs})
    clock = TraceClock()
    alone = Reference(traffic.pages, 10**6, make_order("lru", 10**6, clock), clock, unwritten=1)
    whole = alone.replay([request for session in traffic.sessions for request in session])
    roomy = Replicas(traffic.pages, 1, 10**8, eviction="lru").run(coming, at_random())
    assert whole.matched_pages_gpu * 128 == pytest.approx(roomy.matched_tokens, rel=0.01)


def test_copies_are_what_could_go_without_loss():
    """One session on two replicas in turn: half of what is held is a copy; by session id: nothing is."""
    ids = np.arange(400, dtype=np.int32)
    session = [Request(0, 0, 100, 110, 400)] * 40
    pages = Pages(Trace("again", "again", None, [ids], [session], "none"), 10)

    def copies(policy: object) -> float:
        return Replicas(pages, 2, 10_000).run([Visit(0.1, session, [0.0] * 40)], policy).copies  # type: ignore[arg-type]

    assert 0.5 == pytest.approx(copies(round_robin()))
    assert 0.0 == copies(by_session(2))


def test_a_rate_is_found_at_which_replicas_are_as_busy_as_asked():
    """Where busy rises with the rate, it ends near what was asked for."""
    rate, out = find_rate(lambda per_s: Outcome(busy=min(1.0, (per_s / 40) ** 1.5)), guess=1.0, busy=0.7)
    assert 0.7 == pytest.approx(out.busy, abs=0.02)
    assert 40 * 0.7 ** (1 / 1.5) == pytest.approx(rate, rel=0.05)


def test_traces_taken_several_times_share_what_their_sessions_share(shared_dir: Path):
    """The system prompt stays one, the sessions are new ones."""
    once, thrice = (recorded(shared_dir / "traces", "tau_retail_200", 128, think_s=1.0, times=n) for n in (1, 3))
    assert 3 * len(once.sessions) == len(thrice.sessions)
    assert 3 * (once.pages.distinct - 10) + 10 == thrice.pages.distinct


@pytest.mark.parametrize("kind", ["tails", "same"])
def test_half_of_single_prompts_share_a_prefix(kind: str):
    """They have the same 64 pages first; of the others no two share their first page."""
    pages = singles(kind, 40).pages
    first = Counter(pages.names(session[0].chain, 0, 1)[0] for session in pages.trace.sessions)
    assert [20] + [1] * 20 == sorted(first.values(), reverse=True)
    hot = first.most_common(1)[0][0]
    whole = {tuple(names) for s in pages.trace.sessions if (names := pages.names(s[0].chain, 0, 64))[0] == hot}
    assert 1 == len(whole) and {64} == set(map(len, whole))


def test_the_report_has_what_is_promised(shared_dir: Path):
    """Metrics with their units, and for each policy a row; every case is judged."""
    report = run_bench("routing", ["--smoke", "--only", "simulation", "--traces", str(shared_dir / "traces")])
    units = {
        "routing_hit_gap_points": "points",
        "routing_copies_share": "of pages held",
        "hot_ttft_p50_ratio": "of random",
        "hot_ttft_p99_ratio": "of random",
    }
    assert units == {name: metric.unit for name, metric in report.metrics.items()}
    policies = {"random", "round robin", "least loaded", "session id", "kvkeep", "one cache"}
    by_traffic: dict[object, Sequence[object]] = {}
    for row in report.rows:
        by_traffic[row["traffic"]] = [*by_traffic.get(row["traffic"], []), row["policy"]]
    assert all(policies == set(names) for names in by_traffic.values()) and len(by_traffic) == 3
    assert all(("reached" in row) == (row["policy"] == "kvkeep") for row in report.rows)
    assert report.ok == all(row["reached"] for row in report.rows if "reached" in row)


def test_replicas_are_few_and_many_with_room_and_without(shared_dir: Path):
    """2 to 16 of them, and caches that hold less than three of a trace's longest sessions too."""
    cases = fleets(shared_dir / "traces", smoke=False)
    assert {2, 4, 8, 16} == {fleet.replicas for fleet in cases}
    tight = {(8, 32_768), (2, 524_288), (4, 2 << 20), (4, 262_144)}
    assert tight <= {(fleet.replicas, fleet.tokens_each) for fleet in cases}


@pytest.mark.parametrize("arguments", [["--traces", "nowhere"], ["--only", "half"], ["--fast"]])
def test_unknown_options_are_refused(arguments: list[str]):
    """Bad options end in one line that says what was wrong, before anything is measured."""
    with pytest.raises(BadInput, match=arguments[-1]):
        run_bench("routing", arguments)
